"""A token that is named for the beginning of a text and that no text gets: said by every command
that reads texts with a model's tokenizer."""

import json
import shutil
import warnings

import pytest
from training_kit import LLAMA, make_lab, recipe_dict
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import VocagnolmWarning
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.check import check

SAYS = "teller names <s> for the beginning of a text"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A model that says which token begins a text, and not whether it is put there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("lab")
    make_lab(folder, 8)
    shutil.copytree(folder / "teacher", folder / "teller")
    torch.manual_seed(0)
    settings = {k: v for k, v in LLAMA.items() if k != "model_type"} | {"vocab_size": 520}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))
    model.save_pretrained(folder / "teller")
    return folder


def calls(folder):
    model, corpus = str(folder / "teller"), str(folder / "corpus.jsonl")
    here = ["--device", "cpu"]
    return {
        "compare": ["--student", str(folder / "student"), "--teacher", model, "--corpus", corpus],
        "score": ["--teacher", model, "--corpus", corpus, *here],
        "evaluate": [model, "--text", corpus, *here],
    }


@pytest.mark.parametrize(("adds", "warned"), [({}, 1), ({"add_bos_token": False}, 0)], ids=str)
def test_the_commands_say_so_once(lab, tmp_path, adds, warned):
    config = lab / "teller" / "tokenizer_config.json"
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    config.write_text(json.dumps({**about, "bos_token": "<s>", **adds}))
    for name, call in calls(lab).items():
        more = ["--out", str(tmp_path / "store")] if name == "score" else []
        with warnings.catch_warnings():
            warnings.simplefilter("default", VocagnolmWarning)
            done = CliRunner().invoke(app, [name, *call, *more])
        assert done.exit_code == 0, done.output
        assert done.stderr.count(SAYS) == warned, name
    recipe = recipe_dict(
        lab,
        student={"tokenizer": str(lab / "teller"), "config": {**LLAMA, "vocab_size": 520}},
        objective={"method": "cpt"},
        store={"path": None},
    )
    found = check(recipe_from_dict(recipe), measure=False).warnings
    assert sum(SAYS in line for line in found) == warned
    recipe["data"]["bos"] = "<s>"  # said by the recipe
    assert not any(SAYS in line for line in check(recipe_from_dict(recipe)).warnings)
