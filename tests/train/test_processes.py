"""Two processes against one: the same global batch must be the same step."""

import numpy as np
import pytest
import torch
from faults_kit import LONG
from safetensors.torch import load_file
from training_kit import ROUNDING, recipe_dict, run_processes, stop_after

from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.run import train

OBJECTIVES = [
    {"method": "guided", "scope": "global", "normalise": "selected"},
    {"method": "guided", "scope": "batch", "normalise": "all"},
    {"method": "random", "scope": "sequence", "normalise": "selected"},
    {"method": "chunk", "scope": "sequence", "normalise": "selected"},
    {"method": "guided", "compare": "stretch", "scope": "global", "normalise": "selected"},
    {"method": "guided", "compare": "stretch", "weighting": "reducible"},
    {"method": "alm", "scope": "batch"},
    {"method": "distill", "mix": 1.0, "mix_end": 0.0},
    {"method": "distill", "keep": 0.4, "scope": "global", "normalise": "selected"},
]
if not LONG:  # one of each kind: over the step, by chance, by stretch, graded, distilled
    OBJECTIVES = OBJECTIVES[::2]


def name_of(objective: dict) -> str:
    return "-".join(map(str, objective.values()))


def settings(lab, folder, objective, **train_section):
    return recipe_dict(
        lab,
        student={"bits_per_byte": 8.0},  # given, it is not measured in every run
        objective=objective,
        train={"tokens": 4 * 256, "micro_batch": 2, **train_section},
        run={"folder": str(folder), "save_every": 0},
    )


def train_all(trees: list[dict]) -> None:
    """Several runs in the same processes: starting them is what costs."""
    for tree in trees:
        train(recipe_from_dict(tree), quiet=True)


@pytest.fixture(scope="module")
def one_process(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    trees = [settings(lab, folder / name_of(o), o) for o in OBJECTIVES]
    run_processes(train_all, 1, trees)
    return folder


def assert_same(folder, reference, objectives=OBJECTIVES):
    for objective in objectives:
        ours, theirs = (f / name_of(objective) for f in (folder, reference))
        a, b = (read_metrics(f / "metrics.jsonl") for f in (ours, theirs))
        for field in ("loss", "nll_all", "kept_share", "mapped_share", "excess_p50", "tokens"):
            np.testing.assert_allclose(
                [r[field] for r in a],
                [r[field] for r in b],
                rtol=ROUNDING,
                atol=1e-6,
                err_msg=field,
            )
        weights, expected = (load_file(f / "model" / "model.safetensors") for f in (ours, theirs))
        assert weights.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=1e-3, atol=1e-5)


def test_ddp_equals_one_process(lab, tmp_path, one_process):
    run_processes(train_all, 2, [settings(lab, tmp_path / name_of(o), o) for o in OBJECTIVES])
    assert_same(tmp_path, one_process)


def train_sharded(trees: list[dict]) -> None:
    from torch.distributed.tensor import DTensor

    from vocagnolm.train import run

    train_all(trees[:1])
    original = run.full_state_dict

    def looked_at(model):
        assert all(isinstance(p, DTensor) for p in model.parameters()), "not sharded"
        return original(model)

    run.full_state_dict = looked_at
    train_all(trees[1:])


def test_fsdp2_equals_one_process(lab, tmp_path, one_process):
    objectives = OBJECTIVES if LONG else OBJECTIVES[:1] + OBJECTIVES[-1:]
    trees = [settings(lab, tmp_path / name_of(o), o, parallel="fsdp2") for o in objectives]
    run_processes(train_sharded, 2, trees)
    assert_same(tmp_path, one_process, objectives)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"] if LONG else ["ddp"])
def test_two_processes_resume(lab, tmp_path, parallel):
    """Interrupted by hand after a checkpoint, then run again."""
    whole = settings(lab, tmp_path / "whole", OBJECTIVES[0], parallel=parallel)
    broken = settings(lab, tmp_path / "broken", OBJECTIVES[0], parallel=parallel)
    for tree in (whole, broken):
        tree["run"]["save_every"] = 2
    run_processes(train_all, 2, [whole])
    with pytest.raises(AssertionError, match="stop here"):
        run_processes(train_and_stop, 2, broken)
    assert len(read_metrics(tmp_path / "broken" / "metrics.jsonl")) == 3
    run_processes(train_all, 2, [broken])
    a, b = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("broken", "whole"))
    assert [r["step"] for r in a] == [1, 2, 3, 4]
    assert [r["loss"] for r in a] == [r["loss"] for r in b]


def train_and_stop(tree: dict) -> None:
    stop_after(3, RuntimeError("stop here"))
    train_all([tree])
