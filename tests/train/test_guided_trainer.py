"""The objective in Hugging Face's Trainer: the steps are those of our own loop."""

import numpy as np
import pytest
from training_kit import LLAMA, ROUNDING, recipe_dict, run_processes, steps_of_our_loop
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.errors import TrainingError
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.train import BlockCollator, GuidedTrainer, OnlineTeacher

STEPS = 4
GLOBAL = {"scope": "global", "normalise": "selected"}


class Logs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(logs)

    @property
    def steps(self):
        """Loss and norm of the gradient."""
        return [(logs["loss"], logs["grad_norm"]) for logs in self.seen if "loss" in logs]


def student():
    set_seed(0)
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))


def trainer(lab, folder, objective=None, model=None, accumulation=2, **settings):
    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": accumulation,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 3e-4},
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **settings,
        },
    )
    blocks = TrainingOrder(Blocks(lab / "blocks", 32), STEPS * 8, seed=0)
    logs = Logs()
    made = GuidedTrainer(
        model or student(),
        arguments,
        objective=ObjectiveConfig(**(objective or {})),
        train_dataset=blocks,
        eval_dataset=TrainingOrder(Blocks(lab / "blocks", 32), 8, seed=1),
        callbacks=[logs],
    )
    return made, logs


def our_steps(lab, folder, objective):
    return steps_of_our_loop(
        recipe_dict(
            lab,
            objective={"method": "guided", **objective},
            train={"tokens": STEPS * 256},
            run={"folder": str(folder), "save_every": 0},
        )
    )


@pytest.mark.parametrize("objective", [{}, GLOBAL], ids=["batch", "global"])
def test_its_steps_are_those_of_our_loop(lab, tmp_path, objective):
    ours = our_steps(lab, tmp_path / "run", objective)
    made, logs = trainer(lab, tmp_path / "hf", objective)
    made.train()
    np.testing.assert_allclose(logs.steps, ours, rtol=ROUNDING)
    assert {"nll_all", "nll_kept", "kept_share", "mapped_share", "excess_p50"} <= set(logs.seen[0])
    saved = made.evaluate()
    assert saved["eval_loss"] < 6.0
    made.save_model(str(tmp_path / "model"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def train_two(lab, folder, expected):
    made, logs = trainer(lab, folder, GLOBAL, accumulation=1)
    made.train()
    np.testing.assert_allclose(logs.steps, expected, rtol=ROUNDING)


def test_two_processes(lab, tmp_path):
    expected = our_steps(lab, tmp_path / "run", GLOBAL)
    run_processes(train_two, 2, lab, tmp_path / "hf", expected)


def test_it_resumes_as_a_trainer_does(lab, tmp_path):
    made, logs = trainer(lab, tmp_path / "hf", save_strategy="steps", save_steps=2)
    made.train()
    again, later = trainer(lab, tmp_path / "hf", save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "hf" / "checkpoint-2"))
    found, expected = (
        [one["loss"] for one in each.seen if "loss" in one] for each in (later, logs)
    )
    assert found == pytest.approx(expected[2:], rel=1e-6)


def test_an_online_teacher_guides_it(lab, tmp_path):
    teacher = AutoModelForCausalLM.from_pretrained(lab / "twin")
    made, logs = trainer(lab, tmp_path / "hf", {"method": "rho1"})
    made.teacher = OnlineTeacher(teacher, config=made.objective)
    made.train()
    assert 0.3 < logs.seen[0]["kept_share"] < 0.6


def test_adapters_train(lab, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(student(), LoraConfig(r=2, target_modules="all-linear"))
    made, logs = trainer(lab, tmp_path / "hf", model=model, learning_rate=1e-2)
    made.train()
    losses = [one["nll_all"] for one in logs.seen if "nll_all" in one]
    assert losses[-1] < losses[0]


def test_documents_that_cannot_be_kept_apart_are_refused(lab, tmp_path):
    settings = {"vocab_size": 320, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "word_embed_proj_dim": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **settings))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(TrainingError, match="document_mask to false"):
        GuidedTrainer(
            model,
            arguments,
            objective=ObjectiveConfig(),
            data_collator=BlockCollator(document_mask=True),
        )
