"""Commands of other packages, found by their entry points."""

from importlib import metadata
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.cli.common import GROUP

BROUGHT = '''
import typer
app = typer.Typer(help="Brought along.")

@app.callback()
def everything() -> None: ...

@app.command()
def say(word: str) -> None:
    """Say it."""
    typer.echo(word)
'''


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with two commands, one of them with a name that we have."""
    (tmp_path / "brought_along.py").write_text(BROUGHT)
    monkeypatch.syspath_prepend(tmp_path)
    entries = [metadata.EntryPoint(n, "brought_along:app", GROUP) for n in ("other", "align")]
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: entries)


@pytest.mark.usefixtures("brought")
def test_a_command_of_another_package_runs_and_is_shown() -> None:
    run = CliRunner().invoke(app, ["other", "say", "hello"])
    assert run.exit_code == 0 and run.stdout == "hello\n"
    assert "Brought along." in CliRunner().invoke(app, ["--help"]).stdout
    missing = CliRunner().invoke(app, ["othr"])
    assert missing.exit_code == 2 and "Did you mean 'other'" in missing.output


@pytest.mark.usefixtures("brought")
def test_our_own_commands_stay_ours() -> None:
    command = get_command(app)
    names = command.list_commands(None)  # type: ignore[attr-defined]
    assert names[-1] == "other" and names.count("align") == 1
    assert not hasattr(command.get_command(None, "align"), "commands")  # type: ignore[attr-defined]


def test_our_own_commands_wait_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: pytest.fail("looked"))
    assert CliRunner().invoke(app, ["recipe", "list"]).exit_code == 0


def test_studies_are_such_a_command() -> None:
    assert metadata.entry_points(group=GROUP)["study"].value == "vocagnolm_studies.cli:app"


def test_the_core_does_without_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [])
    missing = CliRunner().invoke(app, ["study", "list"])
    assert missing.exit_code == 2 and "No such command 'study'" in missing.output
    assert "study" not in CliRunner().invoke(app, ["--help"]).stdout
