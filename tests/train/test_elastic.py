"""Processes come and go between two starts of a run; its steps stay what they are."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faults_kit import LONG
from safetensors.torch import load_file
from training_kit import LLAMA, ROUNDING, recipe_dict, run_processes, stop_after

from vocagnolm.errors import TrainingError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.checkpoint import MARKER, newest_complete
from vocagnolm.train.folder import read_metrics, read_run
from vocagnolm.train.run import train

SCOPES = [
    {"method": "guided", "scope": "global", "normalise": "selected"},
    {"method": "guided", "scope": "batch", "normalise": "all"},
    {"method": "random", "scope": "sequence", "normalise": "selected"},
]
if not LONG:
    SCOPES = SCOPES[:2]
STEPS = 6


def settings(lab: Path, folder: Path, objective: dict, parallel: str) -> dict:
    return recipe_dict(
        lab,
        # one layer: `test_processes` shards two; given bits are not measured in every run
        student={"config": {**LLAMA, "num_hidden_layers": 1}, "bits_per_byte": 8.0},
        objective=objective,
        # as on a GPU; torch works out once a process how to shard each kind of operation
        optimizer={"name": "adamw_torch_fused"},
        train={"tokens": STEPS * 256, "micro_batch": 2, "parallel": parallel},
        run={"folder": str(folder), "save_every": 2},
    )


class Interrupted(Exception):
    pass


def train_until(step: int, trees: list[dict]) -> None:
    """Each run ends in an error after this step; 0: none does."""
    stop_after(step, Interrupted())
    for tree in trees:
        try:
            train(recipe_from_dict(tree), quiet=True)
        except Interrupted:
            assert step
        else:
            assert not step


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def assert_same_run(folder: Path, whole: Path) -> None:
    ours, theirs = losses(folder), losses(whole)
    assert len(ours) == len(theirs) == STEPS
    np.testing.assert_allclose(ours, theirs, rtol=ROUNDING)
    weights, expected = (load_file(f / "model" / "model.safetensors") for f in (folder, whole))
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def whole(lab, tmp_path_factory) -> Path:
    """The runs of one process that nobody interrupted, without sharding."""
    folder = tmp_path_factory.mktemp("whole")
    run_processes(train_until, 1, 0, [settings(lab, folder / o["scope"], o, "ddp") for o in SCOPES])
    return folder


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_run_goes_on_with_another_number_of_processes(lab, tmp_path, whole, parallel):
    scopes = SCOPES if LONG else SCOPES[parallel == "ddp" :][:1]  # one of each
    trees = [settings(lab, tmp_path / o["scope"], o, parallel) for o in scopes]
    run_processes(train_until, 2, 3, trees)
    if LONG:
        run_processes(train_until, 4, 4, trees[:1])
    run_processes(train_until, 1, 5, trees)
    run_processes(train_until, 2, 0, trees)
    for objective in scopes:
        assert_same_run(tmp_path / objective["scope"], whole / objective["scope"])
        assert read_run(tmp_path / objective["scope"])["schedule"]["world_size"] == 2


def test_sharded_adapters_are_merged(lab, tmp_path):
    trees = {name: settings(lab, tmp_path / name, SCOPES[1], name) for name in ("ddp", "fsdp2")}
    for tree in trees.values():
        tree["lora"] = {"rank": 2}
    run_processes(train_until, 1, 0, [trees["ddp"]])
    run_processes(train_until, 1, 3, [trees["fsdp2"]])
    run_processes(train_until, 2, 0, [trees["fsdp2"]])
    assert_same_run(tmp_path / "fsdp2", tmp_path / "ddp")


def train_hybrid(step: int, tree: dict) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from vocagnolm.train.loop import TrainingLoop

    original = TrainingLoop.check_finite

    def looked_at(self):
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.device_mesh.shape == (2, 2)
            assert parameter.placements == (Replicate(), Shard(0))
        original(self)

    TrainingLoop.check_finite = looked_at
    train_until(step, [tree])


def test_two_machines_shard_within_and_one_goes_on(lab, tmp_path, whole):
    tree = settings(lab, tmp_path / "run", SCOPES[0], "hsdp")
    run_processes(train_hybrid, 4, 3, tree, machines=2)
    run_processes(train_until, 1, 0, [tree])
    assert_same_run(tmp_path / "run", whole / "global")


def hybrid_of_one_each(tree: dict) -> None:
    with pytest.raises(TrainingError, match="Here are 1 of 2 processes"):
        train(recipe_from_dict(tree), quiet=True)


def test_there_is_nothing_to_shard_on_machines_of_one_process(lab, tmp_path):
    tree = settings(lab, tmp_path / "run", SCOPES[0], "hsdp")
    run_processes(hybrid_of_one_each, 2, tree, machines=2)


def train_with_a_slow_disk(tree: dict) -> None:
    """No part is written before the training has gone a step further."""
    from torch.distributed.checkpoint import FileSystemWriter

    metrics = Path(tree["run"]["folder"]) / "metrics.jsonl"
    original = FileSystemWriter.write_data

    def write_data(self, plan, planner):
        step = int(Path(self.path).parent.name.removeprefix("checkpoint-"))
        deadline = time.monotonic() + 200
        while step < 4 and len(read_metrics(metrics)) <= step:
            assert time.monotonic() < deadline, "the training waits for its checkpoint"
            time.sleep(0.01)
        return original(self, plan, planner)

    FileSystemWriter.write_data = write_data
    train_until(5, [tree])


def die_before_the_mark(tree: dict, step: int) -> None:
    from vocagnolm.train import checkpoint

    original = checkpoint.mark_complete

    def mark_complete(checkpoint, number, world_size):
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        original(checkpoint, number, world_size)

    checkpoint.mark_complete = mark_complete
    train_until(0, [tree])


def test_a_sharded_checkpoint_is_written_while_training_goes_on(lab, tmp_path, whole):
    tree = settings(lab, tmp_path / "run", SCOPES[0], "fsdp2")
    run_processes(train_with_a_slow_disk, 2, tree)
    newest = newest_complete(tmp_path / "run" / "checkpoints")
    assert newest.step == 4 and newest.path is not None  # begun before the error, whole after it
    assert not list(newest.path.glob("*.safetensors"))
    assert len(list((newest.path / "parts").glob("*.distcp"))) == 2
    run_processes(train_until, 1, 0, [tree])
    assert_same_run(tmp_path / "run", whole / "global")


def test_half_a_sharded_checkpoint_does_not_count(lab, tmp_path, whole):
    tree = settings(lab, tmp_path / "run", SCOPES[0], "fsdp2")
    tree["run"]["keep_checkpoints"] = STEPS
    with pytest.raises(AssertionError):
        run_processes(die_before_the_mark, 2, tree, 4)
    checkpoints = tmp_path / "run" / "checkpoints"
    half = checkpoints / "checkpoint-4"
    assert list((half / "parts").glob("*.distcp")) and not (half / MARKER).exists()
    assert newest_complete(checkpoints).step == 2
    run_processes(train_until, 1, 0, [tree])
    names = [path.name for path in (half / "parts").glob("*.distcp")]
    assert names == ["__0_0.distcp"]  # nothing is left of the process that is no more
    assert_same_run(tmp_path / "run", whole / "global")
