"""The command line as a user runs it."""

import contextlib
import io
import json
import shlex
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import made
import pytest
import training_kit
from typer.main import get_command

from vocagnolm import cli

TEXT = "Probability, Uncertainty: e\u0301 👩‍👧 12345\r\n"


def run(*arguments: object) -> SimpleNamespace:
    """The command as its entry point runs it, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.setenv("NO_COLOR", "1")
        patch.setattr(sys, "argv", ["vocagnolm", *map(str, arguments)])
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as stop,
        ):
            cli.main()
    return SimpleNamespace(
        returncode=stop.value.code or 0, stdout=out.getvalue(), stderr=err.getvalue()
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return (
        made.save("sentencepiece prepend", folder / "student"),
        made.save("byte-level NFC", folder / "teacher"),
    )


def test_start_up_is_without_torch():
    heavy = "{'torch', 'transformers', 'numpy', 'tokenizers'}"
    code = f"import sys, vocagnolm.cli; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


PAIR = ["--student", "student", "--teacher", "teacher"]
QUICK = [
    ["--help"],
    ["align", *PAIR, "--text", "two words"],
    ["compare", *PAIR],
    ["study", "granularity", *PAIR],
    ["view", *PAIR, "--text", "a", "--html", "v"],
    ["recipe", "list"],
    ["recipe", "show", "laptop"],
    ["write", "--help"],
    ["study", "list"],
    ["store", "inspect", "store"],
    ["check", "recipe.yaml", "--json"],
    ["prepare", "recipe.yaml", "--workers", "1"],
]
TYPOS = [
    ["check", "typo.yaml"],
    ["prepare", "typo.yaml"],
    ["train", "typo.yaml"],
    ["score", "--recipe", "typo.yaml"],
    ["check", "laptop", "--set", "objective.keeep=0.4"],
    ["prepare", "laptop", "--set", "objective.keeep=0.4"],
    ["train", "laptop", "--set", "objective.keeep=0.4"],
]
ONE_BY_ONE = """
import sys
from vocagnolm.cli import main
for arguments, code in {calls!r}:
    sys.argv = ["vocagnolm", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert (stop.code or 0) == code, arguments
    heavy = {{"torch", "transformers", "datasets", "pyarrow", "pandas", "scipy"}} & set(sys.modules)
    assert not heavy, (arguments, heavy)
"""


def test_what_needs_no_model_and_what_is_a_typo_is_answered_at_once(tmp_path):
    """Without torch, one command after the other: the first that imports it is named. What only
    transformers knows of a recipe is asked once and remembered."""
    training_kit.make_lab(tmp_path, count=4)
    (tmp_path / "recipe.yaml").write_text(json.dumps(training_kit.recipe_dict(tmp_path)))
    asked = run("check", tmp_path / "recipe.yaml", "--json")
    (tmp_path / "typo.yaml").write_text("objective: {keeep: 0.4}\n")
    calls = [(words, 0) for words in QUICK] + [(words, 2) for words in TYPOS]
    command = [sys.executable, "-c", ONE_BY_ONE.format(calls=calls)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said = "unknown key 'keeep' in objective. Did you mean 'keep'?"
    assert done.stderr.count(said) == len(TYPOS)
    assert asked.returncode == 0
    parameters = json.loads(asked.stdout)["plan"]["student"]["parameters"]
    assert f'"parameters": {parameters}' in done.stdout


def commands(command, path=()):
    """Every command that does something, with its words."""
    listed = getattr(command, "list_commands", None)
    if listed is None:
        yield path, command
    else:
        for name in listed(None):
            yield from commands(command.get_command(None, name), (*path, name))


def test_every_command_has_an_example_that_it_understands():
    found = dict(commands(get_command(cli.app)))
    assert len(found) > 20
    for path, command in found.items():
        program, *words = shlex.split(str(command.epilog).removeprefix("Example: "), comments=True)
        words = words[: words.index(">")] if ">" in words else words
        assert (program, *words[: len(path)]) == ("vocagnolm", *path)
        command.make_context(" ".join(path), words[len(path) :])  # an unknown option is refused
        paragraphs = command.help.split("\n\n")
        assert all(part and "\n" not in part.strip() for part in paragraphs)  # filled, not ragged


def test_help_names_values_and_groups_options():
    assert "─ Server ─" not in run("evaluate", "--help").stdout
    shown = run("evaluate", "--help-all").stdout
    assert "<" not in shown and "auto|cpu|cuda" in shown and "generate|likelihood" in shown
    for panel in ("Benchmarks", "Model", "Server"):
        assert f"─ {panel} ─" in shown
    shown = run("--help").stdout
    assert shown.index("Start here") < shown.index("demo") < shown.index("The stages")


def test_version_help_and_exit_codes():
    assert run("--version").stdout.startswith("vocagnolm 0.")
    helped = run("--help")
    assert helped.returncode == 0 and "compare" in helped.stdout
    assert run("compare").returncode == 2
    assert run("no-such-command").returncode == 2
    command = [sys.executable, "-m", "vocagnolm", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("vocagnolm 0.")


def test_align_json(pair):
    student, teacher = pair
    done = run("align", "--student", student, "--teacher", teacher, "--text", TEXT, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["text"] == TEXT
    encoded = TEXT.encode()
    for side in ("student", "teacher"):
        spans = [(token["start"], token["end"]) for token in result[side]]
        assert spans[0][0] == 0 and spans[-1][1] == len(encoded)
        assert all(a[1] == b[0] for a, b in pairwise(spans))
    for token in result["student"]:
        first, last = token["first"], token["last"]
        if token["start"] == token["end"]:
            assert first == last == -1
        else:
            assert result["teacher"][first]["start"] <= token["start"]
            assert result["teacher"][last]["end"] >= token["end"]
    summary = result["summary"]
    assert summary["ios"] == 1.0 and summary["mapped"] + summary["unmapped"] == len(
        result["student"]
    )


def test_align_reads_a_file_as_bytes_and_draws(pair, tmp_path):
    student, teacher = pair
    file = tmp_path / "text.txt"
    file.write_bytes("a\r\nb\t ½".encode())
    call = ["align", "--student", student, "--teacher", teacher, "--file", file]
    assert json.loads(run(*call, "--json").stdout)["text"] == "a\r\nb\t ½"
    plot = tmp_path / "figure2.png"
    drawn = run(*call, "--plot", plot).stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "student" in drawn and "teacher" in drawn and "one-to-one" in drawn


def test_compare_json_and_table(pair, tmp_path):
    student, teacher = pair
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"body": "Two and two are four."}) + "\n")
    plot = tmp_path / "figure1.svg"
    call = ["compare", "--student", student, "--teacher", teacher, "--teacher", student]
    call += ["--plot", plot]
    result = json.loads(run(*call, "--corpus", corpus, "--text-field", "body", "--json").stdout)
    assert result["student"]["name"] == "student"
    other, same = result["pairs"]
    assert set(other) >= {"teacher", "vocabulary", "kind", "overlap", "tiling", "unmapped_share"}
    assert set(other["overlap"]) == {"raw", "marks", "bytes"}
    assert other["tiling"] == "exact" and other["kind"] == "byte-level BPE"
    assert same["overlap"]["raw"] == 1.0
    assert same["one_to_one_share"] + same["unmapped_share"] == pytest.approx(1.0)
    table = run(*call)
    assert table.returncode == 0 and "overlap" in table.stdout and "ready" in table.stdout
    assert "<svg" in plot.read_text()


def test_compare_says_what_is_lossy(tmp_path):
    student = made.save("byte-level", tmp_path / "student")
    teacher = made.save("wordpiece", tmp_path / "bert")
    call = ["compare", "--student", student, "--teacher", teacher, "--json"]
    (pair,) = json.loads(run(*call).stdout)["pairs"]
    assert pair["tiling"] == "lossy" and pair["unmapped_share"] > 0
    assert pair["lost_bytes"]["teacher"] > 0 and "bert" in pair["verdict"]


def test_study_granularity(pair, tmp_path):
    student, teacher = pair
    plot = tmp_path / "figure3.png"
    done = run(
        *("study", "granularity", "--student", student, "--teacher", teacher),
        *("--chunks", "8,2", "--json", "--plot", plot),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [point["n"] for point in result["chunks"]] == [2, 8]
    assert result["token_level"]["ios"] == 1.0
    assert 0 < result["chunks"][1]["iou"] < 1
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["align", "--text", "a", "--file", "b"], 2, "one of --text, --file or --messages"),
        (["align", "--file", "missing.txt"], 1, "cannot read missing.txt"),
        (["align", "--text", "a", "--special-tokens", "x"], 2, "'text', 'control'"),
        (["study", "granularity", "--chunks", "8,x"], 2, "--chunks is '8,x'"),
        (["compare", "--corpus", "missing.jsonl"], 1, "missing.jsonl"),
    ],
)
def test_bad_calls_get_one_message(pair, arguments, code, message):
    student, teacher = pair
    done = run(*arguments, "--student", student, "--teacher", teacher)
    assert done.returncode == code
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_file_that_is_not_utf8(pair, tmp_path):
    student, teacher = pair
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9 au lait")
    done = run("align", "--student", student, "--teacher", teacher, "--file", file)
    assert done.returncode == 1 and "byte 0xe9 at offset 3" in done.stderr


def test_a_path_that_cannot_be_written_is_one_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "page.html"
    monkeypatch.setattr(cli, "app", lambda: target.parent.mkdir())
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr().err
    assert stop.value.code == 1
    assert said.startswith(f"error: {tmp_path / 'file'}: File exists") and said.count("\n") == 1
