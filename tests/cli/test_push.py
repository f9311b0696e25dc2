"""What goes to the hub, and when nothing does."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import PushError, TrainingError, UsageError
from vocagnolm.report.push import push

FILES = {"model.safetensors": b"w" * 1000, "config.json": b"{}", "tokenizer.json": b"{}"}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"finished": True, "schedule": {}}))
    for name, content in FILES.items():
        (folder / "model" / name).write_bytes(content)
    (folder / "model" / ".hidden").write_text("x")
    card = "# run\n\n| corpus | `/data/secret/c.jsonl` |\n\nmodel = from_pretrained(FOLDER)\n"
    (folder / "model" / "README.md").write_text(card)
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


@pytest.fixture
def hub(monkeypatch):
    """Calls that reach the hub's interface; nothing leaves this machine."""
    calls = []

    class Address(str):
        repo_id = "someone/model"

    class Api:
        def create_repo(self, name, **options):
            calls.append(("create", name, options))
            return Address("https://hub/someone/model")

        def upload_folder(self, **options):
            calls.append(("folder", options))

        def upload_file(self, **options):
            calls.append(("file", options))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return SimpleNamespace(calls=calls, api=Api)


def test_a_dry_run_lists_files_and_reaches_nothing(run, hub):
    shown = CliRunner().invoke(app, ["push", str(run), "someone/model", "--dry-run"])
    assert shown.exit_code == 0 and hub.calls == []
    assert "model.safetensors            1,000 bytes" in shown.stdout
    assert "4 files" in shown.stdout and "would go to someone/model" in shown.stdout
    assert "/data/secret/c.jsonl" in shown.stderr and "hidden" not in shown.output
    shown = CliRunner().invoke(app, ["push", str(run), "someone/model", "--dry-run", "--json"])
    values = json.loads(shown.stdout)
    assert set(values["files"]) == {*FILES, "README.md"} and values["url"] is None


def test_the_model_goes_first_and_the_card_names_its_place(run, hub):
    shown = CliRunner().invoke(app, ["push", str(run), "someone/model", "--private"])
    assert shown.exit_code == 0 and "https://hub/someone/model" in shown.stdout
    (_, name, created), (_, folder), (_, card) = hub.calls
    assert name == "someone/model" and created == {"private": True, "exist_ok": True}
    assert folder["folder_path"] == run / "model" and set(folder["allow_patterns"]) == set(FILES)
    assert card["path_in_repo"] == "README.md"
    assert b'from_pretrained("someone/model")' in card["path_or_fileobj"]


def test_what_cannot_be_pushed(run, hub, monkeypatch):
    with pytest.raises(UsageError, match="not a valid hub name"):
        push(run, "a/b/c")
    with pytest.raises(TrainingError, match="is not a run"):
        push(run / "model", "someone/model")

    def refuse(self, name, **options):
        raise RuntimeError("401 Unauthorized\nmore")

    monkeypatch.setattr(hub.api, "create_repo", refuse)
    with pytest.raises(PushError, match=r"401 Unauthorized\. Log in with `hf auth login`"):
        push(run, "someone/model")
    (run / "run.json").write_text(json.dumps({"finished": False, "schedule": {}}))
    with pytest.raises(TrainingError, match="is not finished"):
        push(run, "someone/model")
