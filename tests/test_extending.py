"""What CONTRIBUTING.md says about adding a name, really done: each test adds one in a module of its
own, as a new row and a new function, and sees it train, weigh, store, grade or be shown."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from training_kit import make_lab, recipe_dict, write_store

from vocagnolm import objective
from vocagnolm.errors import UsageError
from vocagnolm.evaluate.render import render
from vocagnolm.objective import ObjectiveConfig, ScoredBatch, Targets, select, weigh_step
from vocagnolm.objective.distill import DISTANCES
from vocagnolm.objective.selection import RANKINGS, WEIGHTINGS
from vocagnolm.questions import benchmarks, suite
from vocagnolm.questions.graders import grade
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.recipe.methods import CHOOSABLE_WEIGHTINGS, METHODS, Method
from vocagnolm.storage import BACKENDS
from vocagnolm.store import LossStore

TABLES = (METHODS, RANKINGS, WEIGHTINGS, DISTANCES, BACKENDS, suite.TASKS, benchmarks.SOURCES)
Add = Callable[[str], ModuleType]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Imports a module with this content; its names are gone after the test."""
    before = [dict(table) for table in TABLES]
    weightings = list(CHOOSABLE_WEIGHTINGS)
    monkeypatch.syspath_prepend(tmp_path)

    def import_module(content: str) -> ModuleType:
        (tmp_path / "added_here.py").write_text(content)
        importlib.invalidate_caches()
        return importlib.import_module("added_here")

    yield import_module
    sys.modules.pop("added_here", None)
    CHOOSABLE_WEIGHTINGS[:] = weightings
    for table, rows in zip(TABLES, before, strict=True):
        table.clear()
        table.update(rows)


A_METHOD = """
from vocagnolm.recipe.methods import METHODS, Method
from vocagnolm.objective.selection import RANKINGS, Ranked, float_key

METHODS["easiest"] = Method(label="training on the tokens of lowest loss", ranking="ease")

def by_ease(batch, guidance, index_B, config, step):
    return Ranked(float_key(-batch.nll_BT))

RANKINGS["ease"] = by_ease
"""
A_WEIGHTING = """
from vocagnolm.recipe.methods import CHOOSABLE_WEIGHTINGS
from vocagnolm.objective.selection import WEIGHTINGS

CHOOSABLE_WEIGHTINGS.append("squared")
WEIGHTINGS["squared"] = lambda own, teacher, config: (own - teacher).square()
"""
A_BACKEND = """
from vocagnolm.storage import BACKENDS, Backend, Folder
from pathlib import Path

BACKENDS["shelf"] = Backend(lambda address: Folder(Path({root!r}, address.partition("://")[2])))
"""
A_BENCHMARK = """
from vocagnolm.questions.benchmarks import SOURCES, Example, Source
from vocagnolm.questions.suite import TASKS, Task

TASKS["sums"] = Task(name="sums", title="Sums", kind="number", shots=8)
SOURCES["sums"] = Source(
    lambda row: Example(row["sum"], row["result"]), "sum, result", ("sums/test.jsonl",), "nowhere"
)
"""


def scored(nll: list[float], guidance: list[float]) -> ScoredBatch:
    targets = Targets(labels_BT=torch.ones(1, 5).long(), guidance_BT=torch.tensor([guidance]))
    return ScoredBatch(targets, torch.tensor([nll]))


def test_a_method_trains(add: Add, tmp_path: Path) -> None:
    from vocagnolm.data.prepare import prepare
    from vocagnolm.train.run import train

    with pytest.raises(ValueError, match=r"method is .*, expected one of cpt, guided"):
        ObjectiveConfig(method="easiest")
    add(A_METHOD)
    objective.check_tables()
    batch = scored([3.0, 1.0, 4.0, 2.0, 5.0], [1.0] * 5)
    chosen = select(batch, ObjectiveConfig(method="easiest"))
    assert chosen.tolist() == [[False, True, False, True, False]]
    make_lab(tmp_path, 12)
    settings = {"objective": {"method": "easiest"}, "train": {"tokens": 256, "device": "cpu"}}
    tree = recipe_dict(tmp_path, **settings)
    tree["train"] |= {"batch_blocks": 2, "micro_batch": 2}
    prepare(recipe_from_dict(tree))
    train(recipe_from_dict(tree), quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert steps and all(step["nll_kept"] < step["nll_all"] for step in steps)


def test_a_weighting_weighs(add: Add) -> None:
    batch = scored([3.0, 1.0, 4.0, 2.0, 5.0], [1.0, 1.0, 2.0, float("nan"), 5.0])
    with pytest.raises(ValueError, match=r"weighting is .*, expected one of top_k, reducible"):
        ObjectiveConfig(weighting="squared")
    add(A_WEIGHTING)
    objective.check_tables()
    weighed = weigh_step([batch], ObjectiveConfig(weighting="squared"))
    assert weighed.weights[0].tolist() == [[4.0, 0.0, 4.0, 1.0, 0.0]]
    recipe_from_dict({"objective": {"weighting": "squared"}})


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (Method(label="half", ranking="nowhere"), "'nowhere', and there are only: excess"),
        (Method(label="half", weighting="nowhere"), "there are only: reducible"),
        (Method(label="half", distance="nowhere"), "there are only: kl, wasserstein"),
    ],
)
def test_what_is_added_by_half_is_an_error(add: Add, row: Method, named: str) -> None:
    METHODS["half"] = row
    with pytest.raises(LookupError, match=named):
        objective.check_tables()
    config = ObjectiveConfig(method="half")
    if row.distance is None:
        with pytest.raises(KeyError, match="nowhere"):
            weigh_step([scored([1.0] * 5, [1.0] * 5)], config)


def test_a_backend_stores(add: Add, tmp_path: Path) -> None:
    texts = make_lab(tmp_path, 6)
    with pytest.raises(UsageError, match="Use a local folder or s3://"):
        LossStore.open("shelf://one")
    add(A_BACKEND.format(root=str(tmp_path / "shelves")))
    write_store("shelf://one", texts, tmp_path / "teacher")
    assert (tmp_path / "shelves" / "one" / "manifest.json").is_file()
    assert len(LossStore.open("shelf://one")) == len(texts)


def test_a_benchmark_is_read_and_graded_and_changes_no_average(add: Add, tmp_path: Path) -> None:
    nine = suite.AVERAGES["avg"]
    assert len(nine) == 9 and len(suite.SUITES["math"]) == 10
    add(A_BENCHMARK)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "test.jsonl").write_text('{"sum": "What is 2 + 3?", "result": "5"}\n')
    (example,) = benchmarks.load_examples("sums", tmp_path)
    assert grade("sums", "The answer is 5.", example.gold).correct
    assert [task.name for task in suite.tasks_named("sums")] == ["sums"]
    assert suite.AVERAGES["avg"] == nine and "sums" not in suite.SUITES["math"]
    # no task file for lm-eval is needed
    (request,) = render(suite.tasks_named("sums"), benchmarks=tmp_path)["sums"]
    assert request.prompt.endswith("\n\n\nQuestion: What is 2 + 3?\nAnswer:")
