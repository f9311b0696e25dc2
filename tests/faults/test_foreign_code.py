"""Code that a model or tokenizer folder brings is not run: no command asks, none runs it."""

import json
import threading

import pytest
import torch
from evaluation_kit import ROWS, make_model, write_rows
from faults_kit import tiny_tree, write_recipe
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from training_kit import fresh_process
from typer.testing import CliRunner

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.chat import template as chat_template
from vocagnolm.chat.messages import Message
from vocagnolm.cli import app
from vocagnolm.errors import TilingError, TokenizerError, TrainingError, VocagnolmError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.checkpoint import mark_complete

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


def test_a_regular_expression_that_runs_away_is_an_error_of_that_text():
    runaway = Tokenizer(models.BPE({"x": 0, "y": 1, " ": 2}, []))
    runaway.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer = TextTokenizer(runaway, name="runaway")
    for read in (tokenizer.spans, lambda text: tokenizer.spans_batch([text, "y"])):
        with pytest.raises(TilingError, match="failed on the text"):
            read("x" * 40)
    assert len(tokenizer.spans("y y")) == 3


@pytest.mark.parametrize("step", ["9 ** 9 ** 9", "'x' * 10 ** 9 * 100", "[1] * 10 ** 9"])
def test_a_single_step_of_a_template_has_a_limit(step):
    """Which the time could not end: it is one call of C."""
    template = chat_template.ChatTemplate("{{ " + step + " }}", (), (), "given")
    with pytest.raises(chat_template.TemplateRaised, match=r"repeats something|too large"):
        template.render([Message("user", "a", True)])
    fine = chat_template.ChatTemplate("{{ '-' * 40 }}{{ 2 ** 10 }}", (), (), "given")
    assert fine.render([Message("user", "a", True)]) == "-" * 40 + "1024"


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_template_that_never_ends_is_ended(monkeypatch, in_thread):
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    loops = "{% for a in range(9999) %}" * 4 + "{% set b = a %}" + "{% endfor %}" * 4
    template = chat_template.ChatTemplate(loops, (), (), "given")
    said = []

    def render():
        with pytest.raises(TokenizerError, match="did not end within"):
            template.render([Message("user", "a", True)])
        said.append(True)

    if in_thread:
        thread = threading.Thread(target=render)
        thread.start()
        thread.join(60)
    else:
        render()
    assert said


def test_a_forged_checkpoint_is_refused_without_advice_to_load_it(lab, tmp_path):
    from vocagnolm.train.run import train

    def run():
        fresh_process()
        train(recipe_from_dict(tiny_tree(lab, tmp_path / "run")), quiet=True)

    class Forged:
        def __reduce__(self):
            return (tmp_path / "marker").touch, ()

    run()
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-3"
    torch.save({"state": Forged()}, checkpoint / "optimizer.pt")
    mark_complete(checkpoint, 3, 1)
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    with pytest.warns(match="made again"), pytest.raises(TrainingError) as refused:
        run()
    assert "optimizer.pt" in str(refused.value) and "weights_only" not in str(refused.value)
    assert not (tmp_path / "marker").exists()
