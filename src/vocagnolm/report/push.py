"""`vocagnolm push`: a finished run's model and its card, to the Hugging Face hub."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vocagnolm.base.files import local_path, model_damage
from vocagnolm.errors import PushError, TrainingError, UsageError, first_line

CARD = "README.md"
_PLACEHOLDER = "from_pretrained(FOLDER)"  # in the card, for the address of the model


@dataclass(frozen=True)
class Upload:
    """What was uploaded, or would be, and where."""

    repository: str
    private: bool
    files: dict[str, int]
    """Name -> bytes."""
    local_paths: list[str]
    """Paths of this machine that the card would publish."""
    url: str | None = None

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_bytes": self.total_bytes}


def push(
    run: str | Path, repository: str, *, private: bool = False, dry_run: bool = False
) -> Upload:
    """Upload the model folder of a finished run to `owner/name`. A dry run reaches nothing."""
    _require_repository(repository)
    folder = _model_folder(local_path(run))
    card = (folder / CARD).read_text(encoding="utf-8")
    card = card.replace(_PLACEHOLDER, f'from_pretrained("{repository}")')
    own = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()]
    files = {path.name: path.stat().st_size for path in own if not path.name.startswith(".")}
    files[CARD] = len(card.encode())
    words = {word.strip("`'\",:|[]") for word in card.split()}
    local_paths = sorted(word for word in words if word.startswith("/") and len(word) > 1)
    upload = Upload(repository, private, files, local_paths)
    return upload if dry_run else replace(upload, url=_send(folder, card, upload))


def _send(folder: Path, card: str, upload: Upload) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    message = "Model trained with vocagnolm"
    try:
        created = api.create_repo(upload.repository, private=upload.private, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id,
            folder_path=folder,
            allow_patterns=[name for name in upload.files if name != CARD],
            commit_message=message,
        )
        # last: a card without its model would promise what is not there
        api.upload_file(
            repo_id=created.repo_id,
            path_or_fileobj=card.encode(),
            path_in_repo=CARD,
            commit_message=message,
        )
    except Exception as error:  # network, rights, a token that is missing: many types
        raise PushError(
            f"The upload to {upload.repository} failed: {first_line(error)}. Log in with "
            "`hf auth login` (a token that may write), check the name, and run the same command "
            "again: what was uploaded is not sent again."
        ) from error
    return str(created)


def _require_repository(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"{repository!r} is not a valid hub name (owner/name): {error}") from None


def _model_folder(run: Path) -> Path:
    from vocagnolm.train.folder import read_run

    about = read_run(run)
    if not about:
        raise TrainingError(f"{run} is not a run: expected the folder that `train` wrote.")
    folder = run / "model"
    if not about["finished"] or not (folder / CARD).is_file():
        raise TrainingError(
            f"{run} is not finished: there is no model to upload yet. Run the same `vocagnolm "
            f"train` again to resume."
        )
    if wrong := model_damage(folder):
        raise TrainingError(wrong)
    return folder
