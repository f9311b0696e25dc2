"""LitGPT's model and data module in Lightning's Trainer: `make test-trainers`."""

import inspect
import sys

import numpy as np
import pytest
import torch
from trainers_kit import BATCH, STEPS, cut, load, our_losses
from training_kit import ROUNDING

pytest.importorskip("litgpt", reason="`make test-trainers`")


@pytest.fixture(scope="module")
def example():
    sys.modules["demo_data"] = load("demo_data.py")
    return load("litgpt_lightning.py")


@pytest.fixture(scope="module")
def checkpoint(example, tmp_path_factory):
    return example.demo_checkpoint(tmp_path_factory.mktemp("litgpt") / "demo")


def trained(model, data, folder):
    """The losses that Lightning logs."""
    import lightning as L

    seen = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer, *rest):
            seen.append(trainer.logged_metrics["train_loss"].item())

    data.connect(model.llm.tokenizer, batch_size=BATCH, max_seq_length=128)
    trainer = L.Trainer(
        max_steps=STEPS,
        gradient_clip_val=1.0,
        accelerator="cpu",
        callbacks=[Losses()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data)
    return seen


def test_the_converted_student_is_the_demos(example, checkpoint):
    model, tokenizer = sys.modules["demo_data"].student()
    ids = tokenizer("Question: 3 + 4?\nSolution: 7.", return_tensors="pt").input_ids
    theirs = example.LLM.load(checkpoint, distribute=None)
    theirs.trainer_setup()
    torch.testing.assert_close(theirs(ids), model(ids).logits, rtol=1e-4, atol=1e-5)


def test_guidance_takes_one_line_of_the_step(example):
    guided, plain = (
        set(inspect.getsource(one.training_step).splitlines())
        for one in (example.GuidedLLM, example.LitLLM)
    )
    assert len(guided - plain) == 1


def test_lightnings_trainer_makes_the_steps_of_our_loop(example, checkpoint, tmp_path):
    from vocagnolm import guide

    dataset, store = sys.modules["demo_data"].texts(tmp_path, STEPS * BATCH)
    expected = our_losses(tmp_path, cut(guide(dataset, store, checkpoint)))
    data = example.GuidedData(dataset, store, checkpoint, shuffle=False)
    losses = trained(example.GuidedLLM(checkpoint, tied=True), data, tmp_path)
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)
    plain = trained(example.LitLLM(checkpoint, tied=True), data, tmp_path)
    assert min(np.subtract(plain, losses)) > 0.01
