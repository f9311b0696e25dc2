"""The guided loss in Hugging Face's Trainer: the steps are those of our own loop, and what would be
plain training is refused."""

import json

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from training_kit import LLAMA, ROUNDING, built_loop, recipe_dict, run_processes
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from vocagnolm import GuidedCollator, GuidedTrainer, GuidedTrainerMixin, guide, guided_loss
from vocagnolm.errors import ObjectiveError, TrainingError, UsageError, VocagnolmWarning
from vocagnolm.objective import ObjectiveConfig

STEPS, BATCH, LENGTH = 4, 8, 32


@pytest.fixture(scope="module")
def rows(lab):
    """Documents with guidance and targets, cut to a length: as many as a run needs."""
    texts = [json.loads(line) for line in (lab / "corpus.jsonl").read_text().splitlines()]
    return guide(datasets.Dataset.from_list(texts), lab / "store", lab / "student")


def student(dtype=torch.float32):
    set_seed(0)
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings), dtype=dtype)


def arguments(folder, accumulation=2, **settings):
    return TrainingArguments(
        str(folder),
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 8,
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


def trainer(rows, folder, objective=None, model=None, kind=GuidedTrainer, **settings):
    return kind(
        model or student(),
        arguments(folder, **settings),
        GuidedCollator(max_length=LENGTH),
        rows,
        objective=ObjectiveConfig(**(objective or {})),
    )


def logged(made, name="loss"):
    return [entry[name] for entry in made.state.log_history if name in entry]


def logged_steps(made):
    """The loss of each step and the norm of its gradient."""
    return list(zip(logged(made), logged(made, "grad_norm"), strict=True))


def our_steps(lab, rows, folder, objective=None):
    """What the loop of `vocagnolm train` makes of the same rows, in their order."""
    names = ("input_ids", "labels", "guidance", "target_ids", "target_p")
    cut = [{name: row[name][:LENGTH] for name in names} for row in rows]
    settings = recipe_dict(
        lab,
        objective=objective or {},
        train={"tokens": STEPS * BATCH * 32},
        run={"folder": str(folder), "save_every": 0},
    )
    steps = []
    built_loop(
        settings,
        lambda record: steps.append((record["loss"], record["gradient_norm"])),
        order=cut,
        collator=GuidedCollator.for_blocks(),
    ).run()
    return steps


DISTILL = {"method": "distill", "mix": 0.8, "mix_end": 0.2}


@pytest.mark.parametrize("objective", [{}, DISTILL, {"weighting": "reducible"}], ids=str)
def test_its_steps_are_those_of_our_loop(lab, rows, tmp_path, objective):
    """Over two micro-batches, and without ever computing all logits."""
    ours = our_steps(lab, rows, tmp_path / "run", objective)
    model = student()
    made = trainer(rows, tmp_path / "hf", objective, model=model)
    model.lm_head.forward = None  # would fail
    made.train()
    np.testing.assert_allclose(logged_steps(made), ours, rtol=ROUNDING)
    measured = {"nll_all", "nll_kept", "kept_share", "mapped_share", "excess_p50"}
    assert measured <= set(made.state.log_history[0])


def train_two(rows, folder, expected):
    made = trainer(rows, folder, accumulation=1)
    made.train()
    np.testing.assert_allclose(logged_steps(made), expected, rtol=ROUNDING)


def test_two_processes(lab, rows, tmp_path):
    expected = our_steps(lab, rows, tmp_path / "run")
    run_processes(train_two, 2, rows, tmp_path / "hf", expected)


def test_it_resumes_as_a_trainer_does(rows, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2}
    made = trainer(rows, tmp_path / "hf", {"method": "random"}, **saved)
    made.train()
    again = trainer(rows, tmp_path / "hf", {"method": "random"}, **saved)
    again.train(resume_from_checkpoint=str(tmp_path / "hf" / "checkpoint-2"))
    assert logged(again)[2:] == pytest.approx(logged(made)[2:], rel=1e-6)


def test_adapters_train(rows, tmp_path):
    model = get_peft_model(student(), LoraConfig(r=2, target_modules="all-linear"))
    made = trainer(rows, tmp_path / "hf", model=model, learning_rate=1e-2)
    made.train()
    losses = logged(made, "nll_all")
    assert losses[-1] < losses[0] and logged(made, "kept_share")[0] < 0.6


def test_an_evaluation_is_the_mean_over_all_tokens(rows, tmp_path):
    some = rows.select(range(8))
    model = student().eval()
    batch = GuidedCollator()([some[n] for n in range(8)])
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    expected = guided_loss(logits.requires_grad_(), batch["labels"], batch, CPT).item()
    seen = []
    for metrics in (None, lambda given: seen.append(given.predictions.shape) or {"one": 1.0}):
        made = GuidedTrainer(
            model, arguments(tmp_path / "hf"), eval_dataset=some, compute_metrics=metrics
        )
        assert made.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert seen and seen[0][0] == 8 and seen[0][2] == 320  # logits, where they are asked for


CPT = ObjectiveConfig(method="cpt")


def test_a_head_that_is_not_understood_gives_its_logits(rows, tmp_path):
    expected = trainer(rows, tmp_path / "known", max_steps=1)
    expected.train()
    model = student()
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: head(hidden) * 1.5
    made = trainer(rows, tmp_path / "hf", model=model, max_steps=1)
    made.train()
    assert 0.3 < logged(made, "kept_share")[0] < 0.6
    assert logged(made)[0] != pytest.approx(logged(expected)[0], rel=1e-3)


class Plain(GuidedTrainerMixin, Trainer):
    """A trainer whose own loss is the model's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        read = {name: inputs[name] for name in ("input_ids", "labels")}
        return Trainer.compute_loss(self, model, read, return_outputs, num_items_in_batch)


def test_plain_training_is_noticed_after_the_first_step(rows, tmp_path):
    made = trainer(rows, tmp_path / "hf", kind=Plain)
    with pytest.raises(TrainingError, match="loss was computed by Plain, which does not call"):
        made.train()
    made = trainer(rows, tmp_path / "set")
    made.compute_loss = super(GuidedTrainerMixin, made).compute_loss
    with pytest.raises(TrainingError, match="by the compute_loss that was set on the trainer"):
        made.train()
    model = student()
    made = trainer(rows, tmp_path / "patched", model=model)
    model.forward = lambda guided=None, **inputs: type(model).forward(model, **inputs)
    with pytest.raises(TrainingError, match="forward of LlamaForCausalLM was replaced after"):
        made.train()


def test_columns_without_any_guidance_are_noticed(rows, tmp_path):
    blank = rows.map(lambda row: {"guidance": [np.nan] * len(row["guidance"])})
    with pytest.warns(VocagnolmWarning, match="No token of the first step has guidance"):
        trainer(blank, tmp_path, max_steps=1).train()


def test_what_would_not_be_guided_is_refused_before_the_first_step(rows, tmp_path):
    with pytest.raises(UsageError, match=r"class Wrong\(GuidedTrainerMixin, Trainer\)"):
        type("Wrong", (Trainer, GuidedTrainerMixin), {})
    with pytest.raises(UsageError, match="label_smoothing_factor"):
        trainer(rows, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(TrainingError, match="float16"):
        trainer(rows, tmp_path, model=student(torch.float16))
    for objective, message in (
        ({"scope": "global"}, "`vocagnolm train`, which reads a step ahead"),
        ({"method": "kld"}, "compares whole distributions"),
    ):
        with pytest.raises(ObjectiveError, match=message):
            trainer(rows, tmp_path, objective).train()
    with pytest.raises(ObjectiveError, match="has no guidance"):
        trainer(rows.remove_columns("guidance"), tmp_path).train()
