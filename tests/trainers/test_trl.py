"""TRL's SFTTrainer, and Liger's flag in transformers' Trainer: `make test-trainers`."""

import os
import sys

import numpy as np
import pytest
from trainers_kit import ARGUMENTS, BATCH, STEPS, cut, load, logged, our_losses
from training_kit import ROUNDING

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
trl = pytest.importorskip("trl", reason="`make test-trainers`")


@pytest.fixture(scope="module")
def demo():
    sys.modules["demo_data"] = load("demo_data.py")
    return sys.modules["demo_data"]


@pytest.fixture(scope="module")
def talks(demo, tmp_path_factory):
    """Conversations and their store."""
    return demo.conversations(tmp_path_factory.mktemp("talks"), 60)


def settings(folder, **more):
    return {**ARGUMENTS, "output_dir": str(folder), "bf16": False, **more}


def guided(demo, talks, folder, model=None, **options):
    """The example's trainer with other arguments of TRL."""
    from vocagnolm import GuidedTrainerMixin, guide

    class GuidedSFTTrainer(GuidedTrainerMixin, trl.SFTTrainer): ...

    own, tokenizer = demo.student()
    rows = guide(talks[0], talks[1], tokenizer)
    peft_config = options.pop("peft_config", None)
    arguments = trl.SFTConfig(**settings(folder, **options))
    return GuidedSFTTrainer(
        own if model is None else model,
        arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def test_sft_on_packed_answers_makes_the_steps_of_our_loop(demo, talks, tmp_path):
    sft = load("trl_sft.py")

    def trainer():
        return sft.guided(*demo.student(), talks[0], settings(tmp_path / "out"), talks[1])

    packed = trainer().train_dataset
    assert max(map(len, packed["seq_lengths"])) > 1
    rows = []
    for row in packed:
        lengths = row.pop("seq_lengths")
        rows.append({**row, "document": np.repeat(np.arange(len(lengths)), lengths)})
    trained = np.concatenate([row["labels"] for row in rows]) != -100
    assert 0.2 < trained.mean() < 0.8
    expected = our_losses(tmp_path, rows[: STEPS * BATCH], packed=True)
    made = trainer()
    made.train()
    np.testing.assert_allclose(logged(made), expected, rtol=ROUNDING)
    assert 0.3 < made.state.log_history[0]["kept_share"] < 0.6


@pytest.mark.parametrize("how", [{}, {"gradient_accumulation_steps": 2}, {"padding_free": True}])
def test_rows_are_cut_or_padded_as_trls_arguments_say(demo, talks, tmp_path, how):
    from vocagnolm import guide

    length = {"max_length": None if "padding_free" in how else 40}
    made = guided(demo, talks, tmp_path / "out", **length, **how)
    made.train()
    rows = cut(guide(talks[0], talks[1], demo.student()[1]), length["max_length"] or 10**6)
    if how == {}:
        expected = our_losses(tmp_path, rows[: STEPS * BATCH])
        np.testing.assert_allclose(logged(made), expected, rtol=ROUNDING)
    assert len(logged(made)) == STEPS and 0.3 < made.state.log_history[0]["kept_share"] < 0.6


def test_adapters_by_trl_and_before_it(demo, talks, tmp_path):
    """However peft wraps the model: the same first loss, and it falls."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear")
    by_trl = guided(demo, talks, tmp_path / "a", max_length=128, peft_config=config)
    before = get_peft_model(demo.student()[0], config)
    wrapped = guided(demo, talks, tmp_path / "b", model=before, max_length=128)
    whole = guided(demo, talks, tmp_path / "c", max_length=128)
    for made in (by_trl, wrapped, whole):
        made.train()
        assert 0.3 < made.state.log_history[0]["kept_share"] < 0.6
    assert logged(by_trl)[0] == pytest.approx(logged(whole)[0], rel=1e-5)
    assert logged(wrapped)[0] == pytest.approx(logged(whole)[0], rel=1e-5)


def test_an_evaluation_is_plain(demo, talks, tmp_path):
    made = guided(demo, talks, tmp_path / "out", max_length=128)
    metrics = made.evaluate(made.train_dataset.select(range(4)))
    assert 0 < metrics["eval_loss"] < 10


def test_a_dataset_without_guidance_is_refused(demo, talks, tmp_path):
    from vocagnolm import GuidedTrainerMixin
    from vocagnolm.errors import UsageError

    class GuidedSFTTrainer(GuidedTrainerMixin, trl.SFTTrainer): ...

    model, tokenizer = demo.student()
    arguments = trl.SFTConfig(**settings(tmp_path))
    with pytest.raises(UsageError, match="the columns messages, and no guidance"):
        GuidedSFTTrainer(model, arguments, train_dataset=talks[0], processing_class=tokenizer)
    with pytest.raises(UsageError, match="must stand before SFTTrainer"):
        type("Wrong", (trl.SFTTrainer, GuidedTrainerMixin), {})


def test_ligers_flag_changes_layers_and_not_the_loss(demo, talks, tmp_path):
    """Its rotary embedding runs in Triton's interpreter; its norms and MLPs do not."""
    from transformers import TrainingArguments
    from transformers.models.llama import modeling_llama

    from vocagnolm import GuidedTrainer, guide

    losses = []
    for liger in (False, True):
        model, tokenizer = demo.student()
        only = {"rms_norm": False, "swiglu": False}
        more = {"use_liger_kernel": liger, "liger_kernel_config": only, "max_steps": 2}
        arguments = TrainingArguments(str(tmp_path), **{**ARGUMENTS, **more})
        rows = guide(talks[0].select(range(8)), talks[1], tokenizer)
        made = GuidedTrainer(model, arguments, train_dataset=rows)
        made.train()
        assert 0.3 < made.state.log_history[0]["kept_share"] < 0.6
        losses.append(logged(made))
    assert modeling_llama.apply_rotary_pos_emb.__module__.startswith("liger_kernel")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_example_without_guidance_trains_too(demo, talks, tmp_path):
    made = load("trl_sft.py").plain(*demo.student(), talks[0], settings(tmp_path, max_steps=1))
    made.train()
    assert len(logged(made)) == 1
