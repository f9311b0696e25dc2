"""A run is what the pages say: the example that does it by hand ends in the same weights."""

import pytest
import torch
from safetensors.torch import load_file
from trainers_kit import load
from training_kit import recipe_dict

from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.run import train


@pytest.mark.parametrize("method", ["cpt", "guided", "distill"])
def test_plain_torch_ends_in_the_same_weights(lab, tmp_path, method):
    """Several passes over the blocks, a warm-up, micro-batches in which tokens compete."""
    tree = recipe_dict(
        lab,
        objective={"method": method},
        optimizer={"learning_rate": 3e-3, "min_learning_rate": 3e-4, "warmup_steps": 3},
        train={"device": "cpu", "batch_blocks": 6, "micro_batch": 3, "epochs": 1.5},
        run={"folder": str(tmp_path / "run"), "save_every": 0, "seed": 5},
    )
    train(recipe_from_dict(tree), quiet=True)
    theirs = load_file(tmp_path / "run" / "model" / "model.safetensors")
    example = load("run_by_hand.py")
    mine = example.run(tmp_path / "run").state_dict()
    assert theirs.keys() == mine.keys()
    start = example.student(tree["student"] | {"model": None}, 5).state_dict()
    assert (start["lm_head.weight"] - theirs["lm_head.weight"]).abs().max() > 0.01
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=0, atol=2e-6)
