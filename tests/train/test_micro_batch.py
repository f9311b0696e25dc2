"""`train.micro_batch: auto`: what is chosen, what it leaves alone, and who must agree."""

import math
from functools import partial

import pytest
import torch
from training_kit import built_setup, recipe_dict, run_processes, stop_after

from vocagnolm.errors import RecipeError, TrainingError
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train import micro_batch
from vocagnolm.train.check import check
from vocagnolm.train.folder import read_metrics, read_run
from vocagnolm.train.loop import TrainingLoop
from vocagnolm.train.micro_batch import choose, find_micro_batch
from vocagnolm.train.run import train
from vocagnolm.train.settings import check_batch

CPU = torch.device("cpu")


def rates(measured):
    """A measurement from a table; what is not in it does not fit."""
    return measured.get


@pytest.mark.parametrize(
    ("share", "measured", "expected", "asked"),
    [
        (64, {8: 100, 16: 150, 32: 180, 64: 181}, 32, [8, 16, 32, 64]),
        (64, {8: 100, 16: 103, 32: 90}, 16, [8, 16, 32]),
        (64, {8: 100, 16: 102.9, 32: 500}, 8, [8, 16]),
        (64, {8: 100, 16: 150}, 16, [8, 16, 32]),  # 32: no room
        (64, {1: 50, 2: 70}, 2, [8, 4, 2]),  # what did not fit is not tried again
        (8, {8: 1}, 8, [8]),
        (30, {6: 1, 15: 2, 30: 3}, 30, [6, 15, 30]),
        (7, {7: 1}, 7, [7]),
        (11, {1: 1, 11: 2}, 11, [1, 11]),
        (64, {}, 0, [8, 4, 2, 1]),
    ],
)
def test_twice_as_many_as_long_as_it_pays(share, measured, expected, asked):
    size, tried = choose(share, rates(measured))
    assert size == expected and [entry.micro_batch for entry in tried] == asked
    assert [entry.tokens_per_second for entry in tried] == [measured.get(n) for n in asked]


def tree(lab, folder, **sections):
    return recipe_dict(
        lab,
        student={"config": dict(recipe_dict(lab)["student"]["config"], attention_dropout=0.1)},
        train={"tokens": 4 * 16 * 32, "batch_blocks": 16, "micro_batch": "auto"},
        run={"folder": str(folder), "save_every": 2, **sections.pop("run", {})},
        **sections,
    )


@pytest.mark.parametrize("scope", ["batch", "global"])
def test_a_measurement_leaves_nothing_behind(lab, tmp_path, scope):
    setup, *_ = built_setup(tree(lab, tmp_path / "run", objective={"scope": scope}))
    before = {name: value.clone() for name, value in setup.student.state_dict().items()}
    state = torch.get_rng_state()
    found = find_micro_batch(setup, ObjectiveConfig(scope=scope), CPU, 16)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in setup.student.parameters())
    after = setup.student.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert found.micro_batch in (8, 16) and found.seconds > 0
    assert [entry.micro_batch for entry in found.tried] == [8, 16]
    assert all(entry.tokens_per_second > 0 for entry in found.tried)


def test_no_room_is_no_end_unless_there_is_none_at_all(lab, tmp_path, monkeypatch):
    setup, *_ = built_setup(tree(lab, tmp_path / "run"))
    original, limit = micro_batch.try_pass, [4]

    def try_pass(setup, objective, batch):
        if len(batch["labels"]) > limit[0]:
            raise torch.OutOfMemoryError("no")
        original(setup, objective, batch)

    monkeypatch.setattr(micro_batch, "try_pass", try_pass)
    find = partial(find_micro_batch, setup, ObjectiveConfig(), CPU, 16)
    found = find()
    assert found.micro_batch == 4 and "8: no room, 4: " in str(found)
    limit[0] = 0
    with pytest.raises(TrainingError, match="no room for a single block"):
        find()


def fake_rates(monkeypatch, measured):
    monkeypatch.setattr(micro_batch, "_tokens_per_second", lambda *given: measured.get(given[-1]))


def test_a_run_finds_its_micro_batch_once_and_is_that_run(lab, tmp_path, capsys, monkeypatch):
    """The run equals the one that was told the number; a resumed one does not measure again."""
    fake_rates(monkeypatch, {8: 100.0, 16: 110.0})
    settings = tree(lab, tmp_path / "auto")
    monkeypatch.setattr(TrainingLoop, "end_step", TrainingLoop.end_step)  # undone below
    stop_after(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(recipe_from_dict(settings))
    told = capsys.readouterr().err
    assert "micro-batch 16, found in " in told and "8: 100 tokens/s, 16: 110 tokens/s" in told
    assert "(1 x 16 blocks on 1 process)" in told
    monkeypatch.undo()
    monkeypatch.setattr(micro_batch, "_tokens_per_second", None)  # would fail
    assert check(recipe_from_dict(settings)).plan["schedule"]["micro_batch"] == 16
    train(recipe_from_dict(settings), quiet=True)
    about = read_run(tmp_path / "auto")
    assert about["schedule"]["micro_batch"] == 16 and about["schedule"]["accumulation"] == 1
    assert about["found_micro_batch"]["micro_batch"] == 16
    assert about["found_micro_batch"]["tried"][0] == {"micro_batch": 8, "tokens_per_second": 100.0}
    given = tree(lab, tmp_path / "given")
    given["train"]["micro_batch"] = 16
    train(recipe_from_dict(given), quiet=True)
    auto, number = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("auto", "given"))
    for name in ("loss", "nll_kept", "kept_share", "excess_p50"):
        assert [r[name] for r in auto] == [r[name] for r in number]


def test_a_real_run(lab, tmp_path):
    train(recipe_from_dict(tree(lab, tmp_path / "run")), quiet=True)
    about = read_run(tmp_path / "run")
    assert about["schedule"]["micro_batch"] == about["found_micro_batch"]["micro_batch"]
    assert about["schedule"]["micro_batch"] * about["schedule"]["accumulation"] == 16
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 4 and all(math.isfinite(r["loss"]) for r in records)


def train_unequal(settings):
    """The second process has room for less."""
    import os

    table = {8: 100.0} if os.environ["RANK"] == "0" else {4: 50.0}
    micro_batch._tokens_per_second = lambda *given: table.get(given[-1])
    train(recipe_from_dict(settings), quiet=True)


def test_processes_take_the_smallest_that_one_has_found(lab, tmp_path):
    run_processes(train_unequal, 2, tree(lab, tmp_path / "run"))
    about = read_run(tmp_path / "run")
    assert about["schedule"]["micro_batch"] == 4 and about["schedule"]["accumulation"] == 2
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4


def train_measured(settings):
    train(recipe_from_dict(settings), quiet=True)


def test_processes_measure_without_each_other(lab, tmp_path):
    settings = tree(lab, tmp_path / "run", objective={"scope": "global", "normalise": "selected"})
    run_processes(train_measured, 2, settings)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4


def test_what_check_says_of_it(lab, tmp_path):
    report = check(recipe_from_dict(tree(lab, tmp_path / "run")))
    assert report.ready and report.plan["schedule"]["micro_batch"] == "auto"
    assert any("which tokens compete depends" in warning for warning in report.warnings)
    sharded = tree(lab, tmp_path / "run")
    sharded["train"]["parallel"] = "fsdp2"
    with pytest.raises(RecipeError, match="Give a number"):
        check_batch(recipe_from_dict(sharded), 1)
