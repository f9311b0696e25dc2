"""Code that a model or tokenizer folder brings is not run: no command asks, none runs it."""

import json

import pytest
from evaluation_kit import ROWS, make_model, write_rows
from faults_kit import tiny_tree, write_recipe
from typer.testing import CliRunner

from vocagnolm.alignment import load_tokenizer
from vocagnolm.cli import app
from vocagnolm.errors import TokenizerError, VocagnolmError

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class ForeignConfig(PretrainedConfig):
    model_type = "foreign"
class ForeignTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def foreign(tmp_path):
    """A whole model whose configuration and tokenizer want to run `foreign.py`."""
    (tmp_path / "foreign").mkdir()
    folder = make_model(tmp_path / "foreign")
    (folder / "foreign.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.ForeignConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {
        "tokenizer_class": "ForeignTokenizer",
        "auto_map": {"AutoTokenizer": [None, "foreign.ForeignTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def commands(foreign, lab, folder):
    tree = tiny_tree(lab, folder / "run")
    tree["student"] = {"model": str(foreign)}
    recipe = write_recipe(folder / "r.yaml", tree)
    tree["student"] = {"model": str(foreign), "tokenizer": str(lab / "student")}
    write_recipe(folder / "blocks.yaml", tree)
    pair = ("--student", foreign, "--teacher", lab / "teacher")
    for name, rows in ROWS.items():
        write_rows(folder / "benchmarks", name, rows)
    return {
        "align": ("align", *pair, "--text", "a"),
        "compare": ("compare", *pair),
        "view": ("view", *pair, "--text", "a", "--html", folder / "v.html"),
        "view models": ("view", "--student-model", foreign, "--text", "a", "--html", folder / "v"),
        "check": ("check", recipe),
        "prepare": ("prepare", recipe, "--workers", "1"),
        "train": ("train", recipe),
        "train on blocks": ("train", folder / "blocks.yaml"),
        "score": (
            *("score", "--teacher", foreign, "--corpus", lab / "corpus.jsonl"),
            *("--out", folder / "s", "--device", "cpu"),
        ),
        "evaluate": (
            *("evaluate", foreign, "--tasks", "svamp", "--device", "cpu"),
            *("--benchmarks", folder / "benchmarks"),
        ),
    }


def test_no_command_runs_it_or_asks(foreign, lab, tmp_path):
    for name, command in commands(foreign, lab, tmp_path).items():
        result = CliRunner().invoke(app, [str(part) for part in command], input="y\n" * 9)
        said = str(result.exception) if name != "check" else result.output
        if name != "check":
            assert isinstance(result.exception, VocagnolmError), (name, result.exception)
        assert result.exit_code == 1, name
        assert "code" in said and "[y/N]" not in result.output + said, (name, said)
        assert not (tmp_path / "marker").exists(), name


def test_a_tokenizer_file_can_be_taken_for_itself(foreign):
    with pytest.raises(TokenizerError, match="pass that file"):
        load_tokenizer(foreign)
    trusted = load_tokenizer(foreign, trust_remote_code=True, check=False)
    assert load_tokenizer(foreign / "tokenizer.json").fingerprint == trusted.fingerprint
