"""A store that was published as a dataset of the Hugging Face hub."""

from pathlib import Path

from vocagnolm.errors import AddressError

HUB_SCHEME = "hf"


def hub_folder(address: str) -> Path:
    """Where `huggingface_hub` keeps its copy of `hf://datasets/OWNER/NAME[@REVISION][/FOLDER]`;
    what is not there is fetched, and checked by it."""
    repository, revision, inside = _parts(address)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    prefix = f"{inside}/" if inside else ""
    try:
        folder = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[f"{prefix}manifest.json", f"{prefix}shards/*"],
        )
    except Exception as error:  # network, rights, a name that is wrong: a dozen kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AddressError(
            f"{address} cannot be had from the hub: {reason.rstrip('.')}. Check the name, and log "
            "in with `hf auth login` where the dataset is not public."
        ) from None
    return Path(folder) / inside


def _parts(address: str) -> tuple[str, str | None, str]:
    kind, *names = address.rstrip("/").partition("://")[2].split("/")
    if kind != "datasets" or len(names) < 2 or not all(names):
        raise AddressError(f"{address}: expected hf://datasets/OWNER/NAME, with @REVISION or not.")
    name, _, revision = names[1].partition("@")
    return f"{names[0]}/{name}", revision or None, "/".join(names[2:])
