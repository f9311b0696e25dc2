"""An address that no code serves is refused by every command, before anything is written. What is
served is tried in tests/storage."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vocagnolm.base.files import folder_lock, local_path, write_text
from vocagnolm.cli import app
from vocagnolm.errors import UsageError
from vocagnolm.recipe.load import recipe_from_dict
from vocagnolm.store import LossStore

MESSAGE = r"(s3|ftp)://bucket/x.* .*(local file or folder is needed|Use a local folder or)"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not Path("s3:").exists() and not Path("ftp:").exists()


@pytest.mark.parametrize("address", ["s3://bucket/x", Path("s3://bucket/x")])
def test_an_address_is_refused_also_after_path_took_a_slash(address):
    with pytest.raises(UsageError, match=MESSAGE):
        local_path(address)


@pytest.mark.parametrize("address", ["gs://b", "hf://datasets/n", "https://x.org/a", "file:///a"])
def test_any_scheme(address):
    with pytest.raises(UsageError, match=address):
        local_path(address)


@pytest.mark.parametrize("path", ["a/b", "/mnt/bucket/x", "../x", "C:/x", "a:b", "x/s3://y"])
def test_local_paths_stay_what_they_are(path):
    assert local_path(path) == Path(path)


@pytest.mark.parametrize(
    "command",
    [
        "score --teacher t --corpus c.jsonl --out ftp://bucket/x",
        "store inspect ftp://bucket/x",
        "store verify ftp://bucket/x",
        "store export ftp://bucket/x",
        "store compare ftp://bucket/x ftp://bucket/x2",
        "store rank ftp://bucket/x",
        "report s3://bucket/x",
        "report . --html s3://bucket/x.html",
        "prepare recipe.yaml --set data.blocks=ftp://bucket/x",
        "train recipe.yaml --set run.folder=s3://bucket/x",
        "train recipe.yaml --set store.path=ftp://bucket/x",
        "evaluate model --text c.jsonl --out s3://bucket/x",
        "push s3://bucket/x owner/name",
    ],
)
def test_every_command_refuses_it(command):
    Path("recipe.yaml").write_text("corpus: {files: [c.jsonl]}\n")
    Path("metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    Path("c.jsonl").write_text('{"text": "x"}\n')
    result = CliRunner().invoke(app, command.split())
    with pytest.raises(UsageError, match=MESSAGE):
        raise result.exception


def test_the_library_refuses_it_too():
    for call in (
        lambda: LossStore.open("ftp://bucket/x"),
        lambda: write_text("s3://bucket/x", "lost"),
        lambda: folder_lock(Path("s3://bucket/x"), "").__enter__(),
        lambda: recipe_from_dict({"store": {"path": ["a", "ftp://bucket/x"]}}),
    ):
        with pytest.raises(UsageError, match=MESSAGE):
            call()
