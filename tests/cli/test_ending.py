"""Whatever goes wrong ends in one message and an exit code."""

import os
import signal
import sys
import time

import pytest
from faults_kit import in_child, some
from training_kit import make_lab, recipe_dict

from vocagnolm import cli
from vocagnolm.cli.common import KEPT
from vocagnolm.errors import UsageError


def ended(monkeypatch, capsys, error, *arguments):
    """Exit code and stderr of the command line when `recipe list` fails with `error`."""

    def fail():
        raise error

    monkeypatch.setattr("vocagnolm.recipe.load.shipped_recipes", fail, raising=True)
    monkeypatch.setattr(sys, "argv", ["vocagnolm", *arguments, "recipe", "list"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_under_torchrun_one_process_prints_and_torchrun_has_the_message(
    monkeypatch, capsys, tmp_path, rank
):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setenv("RANK", rank)
    code, said = ended(monkeypatch, capsys, UsageError("no such thing."))
    assert code == 2 and said == ("error: no such thing.\n" if rank == "0" else "")
    shown = str(ChildFailedError("vocagnolm", {int(rank): ProcessFailure(0, 1, 2, str(report))}))
    assert "traceback : error: no such thing." in shown


def test_an_unforeseen_error_is_one_line_and_a_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, said = ended(monkeypatch, capsys, RuntimeError("inner\nworkings"))
    assert code == 70 and said.count("\n") == 1 and "RuntimeError: inner " in said
    (trace,) = tmp_path.rglob("traceback.txt")
    assert str(trace) in said
    assert "Traceback" in trace.read_text() and "workings" in trace.read_text()


def test_a_message_of_a_megabyte_keeps_its_beginning_and_its_end(monkeypatch, capsys):
    code, said = ended(monkeypatch, capsys, UsageError(f"what. {'x' * 10**6} Do this."))
    assert code == 2 and len(said) <= 2001
    assert said.startswith("error: what. xx") and said.endswith("xx Do this.\n")


def test_packages_of_unlike_age_are_no_fault_of_the_program(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = ImportError("cannot import name 'HybridCache' from 'transformers'")
    code, said = ended(monkeypatch, capsys, error)
    assert code == 1 and said.count("\n") == 1
    assert "do not fit together: cannot import name 'HybridCache'" in said and "--upgrade" in said


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_trace(how, monkeypatch, capsys):
    monkeypatch.setenv("VOCAGNOLM_DEBUG", "1" if how == "variable" else "")
    with pytest.raises(RuntimeError, match="inner"):
        options = ["--debug"] if how == "option" else []
        ended(monkeypatch, capsys, RuntimeError("inner"), *options)


def test_the_ends_of_files_and_the_keyboard(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, said = ended(monkeypatch, capsys, EOFError("at byte 3"))
    assert code == 70 and "ended too early: at byte 3" in said
    code, said = ended(monkeypatch, capsys, KeyboardInterrupt())
    assert code == 130 and said == "Interrupted: nothing was written; run the same command again.\n"


def test_every_named_command_exists():
    from typer.main import get_command

    assert set(KEPT) <= set(get_command(cli.app).list_commands(None))


@pytest.mark.parametrize("workers", some(["1", "2"], 1))
def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(workers, tmp_path, monkeypatch):
    """The real keys: every process of the terminal gets the signal."""
    import json

    make_lab(tmp_path, 200)
    tree = recipe_dict(tmp_path, data={"blocks": str(tmp_path / "blocks"), "part_documents": 2})
    (tmp_path / "r.yaml").write_text(json.dumps(tree))
    words = ["vocagnolm", "prepare", str(tmp_path / "r.yaml"), "--workers"]

    def prepare():
        os.setsid()
        # a shell that runs the tests in the background lets them ignore the key
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv, sys.stderr = [*words, workers], (tmp_path / "said").open("w")
        os.dup2(sys.stderr.fileno(), 2)
        try:
            cli.main()
        except SystemExit as left:
            sys.stderr.flush()
            os._exit(left.code or 0)

    child = in_child(prepare)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list((tmp_path / "blocks").glob("part*")):
        time.sleep(0.01)
    os.killpg(child, signal.SIGINT)
    _, status = os.waitpid(child, 0)
    said = (tmp_path / "said").read_text()
    assert os.waitstatus_to_exitcode(status) == 130, said
    assert said.endswith(f"Interrupted: {KEPT['prepare']}\n") and "Traceback" not in said
    assert not (tmp_path / "blocks" / "manifest.json").exists()
    monkeypatch.setattr(sys, "argv", [*words, "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
