"""What a run is made from, and what it says about it."""

import json
import shutil

import pytest
from training_kit import documents, fresh_process, recipe_dict, write_corpus, write_store
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.run import train


@pytest.fixture
def tree(lab, tmp_path):
    """A recipe of one step whose corpus, store and blocks may be changed."""
    for name in ("store", "blocks"):
        shutil.copytree(lab / name, tmp_path / name)
    shutil.copyfile(lab / "corpus.jsonl", tmp_path / "corpus.jsonl")
    made = recipe_dict(
        tmp_path,
        student={"tokenizer": str(lab / "student")},
        train={"tokens": 8 * 32, "device": "auto"},
        run={"folder": str(tmp_path / "run"), "save_every": 0},
    )
    shutil.rmtree(tmp_path / "blocks")
    prepare(recipe_from_dict(made))
    return made


def call(*arguments):
    fresh_process()
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def recipe(tree, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_a_corpus_that_changed_since_prepare_is_refused_by_its_name(tree, tmp_path):
    texts = documents(32)
    write_corpus(tmp_path / "corpus.jsonl", [texts[0].swapcase(), *texts[1:]])
    with pytest.raises(BlocksError, match=r"(?s)do not belong to this recipe.*corpus: "):
        train(recipe_from_dict(tree), quiet=True)
    assert not (tmp_path / "run" / "model").exists()


def test_a_store_that_changed_since_prepare_is_refused_by_what_differs(lab, tree, tmp_path):
    shutil.rmtree(tmp_path / "store")
    write_store(tmp_path / "store", documents(32), lab / "teacher", seed=7)
    with pytest.raises(BlocksError, match=r"(?s)do not belong to this recipe.*store: its seed"):
        train(recipe_from_dict(tree), quiet=True)


def test_check_measures_student_and_teacher_itself(lab, recipe):
    student = ["--set", f"student.model={lab / 'twin'}", "--set", "student.config=null"]
    found = json.loads(call("check", recipe, "--json", *student).stdout)
    assert found["ready"], found["problems"]
    strength = found["plan"]["strength"]
    assert strength["documents"] > 0
    # random weights of 322 rows know nothing; the made-up losses are of longer tokens
    assert strength["student_bits_per_byte"] > strength["teacher_bits_per_byte"] > 0
    quick = json.loads(call("check", recipe, "--json", "--no-measure", *student).stdout)
    assert "strength" not in quick["plan"]


def test_what_check_calls_ready_is_trained_and_a_finished_run_says_so(recipe):
    half = ["--set", "train.dtype=bfloat16"]  # whatever device `auto` finds
    assert json.loads(call("check", recipe, "--json", *half).stdout)["ready"]
    assert call("train", recipe, "--quiet", *half).exit_code == 0
    again = call("train", recipe, *half)
    assert again.exit_code == 0 and "is finished already; nothing to do" in again.stdout
