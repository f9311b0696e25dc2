"""Real processes, really killed: what is resumed is the uninterrupted run, bit for bit."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_kit import fresh_process, recipe_dict

from vocagnolm.data.blocks import Blocks
from vocagnolm.errors import TrainingError, VocagnolmWarning
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.checkpoint import (
    MARKER,
    Resumable,
    damage,
    mark_complete,
    newest_complete,
    prune_checkpoints,
)
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.metrics import MetricsFile
from vocagnolm.train.run import train

# about 100 blocks, 8 a step: the second epoch begins in step 13 or so
STEPS = 20
TOKENS = STEPS * 8 * 32


def tree(lab: Path, folder: Path) -> dict:
    return recipe_dict(
        lab,
        # dropout: the state of the random numbers is part of what is resumed
        student={
            "config": dict(recipe_dict(lab)["student"]["config"], attention_dropout=0.1),
            "bits_per_byte": 8.0,  # given, it is not measured in every run
        },
        # the mix, which changes from step to step, too
        objective={
            "method": "distill",
            "keep": 0.4,
            "mix_end": 0.0,
            "scope": "global",
            "compare": "stretch",
        },
        train={"tokens": TOKENS},
        run={"folder": str(folder), "save_every": 4},
    )


def start(settings: dict) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=_train, args=(settings,))
    process.start()
    return process


def _train(settings: dict) -> None:
    fresh_process()
    train(recipe_from_dict(settings), quiet=True)
    os._exit(0)


def finish(settings: dict) -> None:
    process = start(settings)
    process.join(120)
    assert process.exitcode == 0


def kill_when(process: multiprocessing.Process, ready) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(lab, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(tree(lab, folder))
    return folder


def assert_same_run(folder: Path, whole: Path) -> None:
    ours, theirs = (read_metrics(f / "metrics.jsonl") for f in (folder, whole))
    for record in (*ours, *theirs):
        del record["tokens_per_second"], record["data_wait_share"]
    assert ours == theirs
    weights, expected = (load_file(f / "model" / "model.safetensors") for f in (folder, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kill_after", [[1], [7, 17]], ids=["before-a-checkpoint", "two-epochs"])
def test_killed_runs_end_as_if_nothing_had_happened(lab, tmp_path, uninterrupted, kill_after):
    folder = tmp_path / "run"
    assert len(Blocks(lab / "blocks", 32)) < 8 * 16  # the last kill comes in the second epoch
    for step in kill_after:
        kill_when(start(tree(lab, folder)), lambda step=step: lines(folder) >= step)
        assert not (folder / "model").exists()
    finish(tree(lab, folder))
    assert_same_run(folder, uninterrupted)


def test_killed_while_a_checkpoint_is_written(lab, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    eighth = folder / "checkpoints" / "checkpoint-8"
    kill_when(start(tree(lab, folder)), lambda: eighth.exists() and any(eighth.iterdir()))
    # the kill may have come too late on a fast disk: then make it what it would have been
    (eighth / MARKER).unlink(missing_ok=True)
    assert newest_complete(folder / "checkpoints").step == 4
    finish(tree(lab, folder))
    assert damage(folder / "checkpoints" / f"checkpoint-{STEPS}") is None
    assert_same_run(folder, uninterrupted)


def test_a_damaged_checkpoint_is_passed_over(lab, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    kill_when(start(tree(lab, folder)), lambda: lines(folder) >= 13)
    damaged = folder / "checkpoints" / "checkpoint-12" / "optimizer.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert newest_complete(folder / "checkpoints").step == 8
    finish(tree(lab, folder))
    assert_same_run(folder, uninterrupted)


def test_another_recipe_cannot_go_on_with_an_interrupted_run(lab, tmp_path):
    folder = tmp_path / "run"
    settings = tree(lab, folder)
    kill_when(start(settings), lambda: lines(folder) >= 6)
    before = sorted(folder.rglob("*"))
    settings["objective"] = {"scope": "batch"}
    with pytest.raises(TrainingError, match=r"objective\.scope: 'global' -> 'batch'"):
        train(recipe_from_dict(settings), quiet=True)
    assert sorted(folder.rglob("*")) == before


def make_checkpoint(folder: Path, step: int, *, complete: bool = True) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"x" * step)
    if complete:
        mark_complete(path, step, world_size=1)
    return path


def test_only_complete_checkpoints_of_ours_are_found_and_pruned(tmp_path):
    for step in (2, 4, 10):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 3, complete=False)  # of a kill, and passed by since
    incomplete = make_checkpoint(tmp_path, 12, complete=False)
    (tmp_path / "checkpoint-mine").mkdir()
    assert newest_complete(tmp_path) == Resumable(tmp_path / "checkpoint-10", 10, [])
    prune_checkpoints(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("checkpoint-10", "checkpoint-12", "checkpoint-mine")
    ]
    shutil.rmtree(tmp_path / "checkpoint-10")
    assert newest_complete(tmp_path).path is None and incomplete.exists()


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 8):
        file.append({"step": step})
    with open(file.path, "a") as raw:
        raw.write('{"step": 8, "lo')
    file.resume_at(5)
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [
        *range(1, 6)
    ]


def test_a_damaged_line_of_metrics_costs_that_line_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\xff\n{"step": 3}\n{"step": 4')
    with pytest.warns(VocagnolmWarning, match="line 2 is damaged"):
        assert [record["step"] for record in read_metrics(path)] == [1, 3]
