"""torchtitan's own classes around the example: `make test-trainers`. Its set-up of processes, which
wants GPUs, is left out: the model is that of transformers, and the step is that of its trainer."""

import contextlib
import sys

import numpy as np
import pytest
import torch
from trainers_kit import BATCH, RATE, STEPS, load, our_losses, prepared
from training_kit import ROUNDING

pytest.importorskip("torchtitan", reason="`make test-trainers`")


def test_its_loader_loss_and_step_are_those_of_our_loop(tmp_path):
    from vocagnolm.data.blocks import Blocks, TrainingOrder

    sys.modules["demo_data"] = demo = load("demo_data.py")
    titan = load("torchtitan/guided.py")
    prepared(tmp_path)
    order = TrainingOrder(Blocks(tmp_path / "ours/blocks", 64), STEPS * BATCH, seed=0)
    # near 0, where many tokens lie, the last bit of a loss decides which of two is kept
    expected = our_losses(tmp_path, order, keep=0.2)

    config = titan.BlockLoader.Config(dataset_path=str(tmp_path / "ours/blocks"))
    sizes = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 64, "local_batch_size": BATCH}
    batches = iter(titan.BlockLoader(config, **sizes))
    model = demo.student()[0]
    trainer = object.__new__(titan.GuidedTrainer)
    trainer.model_parts = [lambda ids: model(ids).logits]
    trainer.loss_fn = titan.GuidedLoss(titan.GuidedLoss.Config(keep=0.2))
    trainer.train_context = contextlib.nullcontext
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        inputs, labels = next(batches)
        extra = {"guidance": inputs["guidance"]}
        tokens = torch.tensor(labels.numel())
        loss = trainer._forward_backward_body(inputs["input"], labels, tokens, extra)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)


def test_its_configuration_is_made():
    config = load("torchtitan/guided.py").guided_llama3()
    assert config.loss.keep == 0.4 and config.training.disable_cuda_graphs
