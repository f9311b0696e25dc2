"""Recipe -> transformers' TrainingArguments and the objective's configuration."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from vocagnolm.errors import RecipeError, TrainingError
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.recipe import Recipe
from vocagnolm.recipe.sections import LossSection
from vocagnolm.train.schedule import Schedule

# ---- vocabularies ----


def refuse_other_vocabulary(student: dict[str, int], teacher: dict[str, int]) -> None:
    """kld and rho1 presuppose one vocabulary; the teacher may have more tokens (Llemma's 16)."""
    other = [token for token, index in student.items() if teacher.get(token) != index]
    if other:
        raise TrainingError(
            f"This method needs one vocabulary, but {len(other):,} of the student's "
            f"{len(student):,} tokens are not the teacher's (for example {other[0]!r}). "
            "Use method guided or uld."
        )


# ---- arguments ----


def objective_config(recipe: Recipe) -> ObjectiveConfig:
    read = {field.name: getattr(recipe.objective, field.name) for field in fields(LossSection)}
    try:
        return ObjectiveConfig(**read, seed=recipe.run.seed)
    except ValueError as error:
        raise RecipeError(f"objective: {error}") from error


def uses_accelerator(recipe: Recipe) -> bool:
    """What `train.device: auto` means, everywhere: the accelerator if there is one."""
    return recipe.train.device != "cpu" and torch.accelerator.is_available()


def _optimizer_name(recipe: Recipe) -> str:
    """On a GPU in one kernel, which also passes over a step whose loss is not finite."""
    on_gpu = uses_accelerator(recipe) and torch.cuda.is_available()
    name = recipe.optimizer.name
    return "adamw_torch_fused" if on_gpu and name == "adamw_torch" else name


# Arguments of transformers that the recipe sets, where they are not just spelled alike.
_RECIPE_KEYS = {
    "output_dir": "run.folder",
    "max_steps": "train.tokens",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.batch_blocks",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_kwargs": "optimizer.min_learning_rate",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps",
    "optim": "optimizer.name",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "max_grad_norm": "optimizer.max_grad_norm",
    "bf16": "train.bf16",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "use_liger_kernel": "train.liger",
    "use_cpu": "train.device",
    "seed": "run.seed",
    "data_seed": "run.seed",
    "logging_steps": "run.log_every",
    "report_to": "run.report_to",
    "save_strategy": "run.save_every",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep_checkpoints",
    "dataloader_num_workers": "train.loader_workers",
    "fsdp": "train.parallel",
    "fsdp_config": "train.parallel",
    "torch_compile": "train.compile",
}


def refuse_reserved(arguments: dict[str, Any], ours: dict[str, Any]) -> None:
    """`train.arguments` is for what the recipe has no key for: summary and card report the keys.
    Nor is it for secrets: the recipe is copied into the run and the card."""
    for name in arguments:
        if name in _RECIPE_KEYS:
            raise RecipeError(f"train.arguments.{name}: set {_RECIPE_KEYS[name]} instead.")
        if name in ours:
            raise RecipeError(f"train.arguments.{name} is decided by the program.")
        if name.endswith(("token", "key", "password", "secret")):
            raise RecipeError(
                f"train.arguments.{name}: a recipe is copied into the run and the model card, and "
                "must not hold secrets. Log in with `hf auth login`, or set HF_TOKEN."
            )


def training_arguments(recipe: Recipe, schedule: Schedule) -> TrainingArguments:
    optimizer, train, run = recipe.optimizer, recipe.train, recipe.run
    assert run.folder is not None
    settings: dict[str, Any] = {
        "output_dir": str(Path(run.folder) / "checkpoints"),
        "max_steps": schedule.steps,
        "per_device_train_batch_size": schedule.micro_batch,
        "gradient_accumulation_steps": schedule.accumulation,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": optimizer.min_learning_rate},
        "warmup_steps": optimizer.warmup_steps,
        "optim": _optimizer_name(recipe),
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "max_grad_norm": optimizer.max_grad_norm,
        "bf16": train.bf16,
        "gradient_checkpointing": train.gradient_checkpointing,
        "use_liger_kernel": train.liger,
        "use_cpu": not uses_accelerator(recipe),
        "seed": run.seed,
        "logging_steps": run.log_every,
        "report_to": run.report_to or "none",
        "save_strategy": "steps" if run.save_every else "no",
        "save_steps": run.save_every or 500,
        "save_total_limit": None,  # pruned by us, once the new one is known to be complete
        "dataloader_num_workers": train.loader_workers,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": uses_accelerator(recipe),
        # the order is in the dataset: resuming skips to any place in it
        "train_sampling_strategy": "sequential",
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
    }
    if train.gradient_checkpointing:
        settings["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if train.liger:
        # its fused loss would replace the forward that the objective takes over
        settings["liger_kernel_config"] = {
            "fused_linear_cross_entropy": False,
            "cross_entropy": False,
        }
    if train.parallel != "ddp":
        settings["fsdp"] = True
        settings["fsdp_config"] = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    refuse_reserved(train.arguments, settings)
    # from pinned memory, without waiting for the device
    settings["accelerator_config"] = {"non_blocking": uses_accelerator(recipe)}
    settings.update(train.arguments)
    try:
        return TrainingArguments(**settings)
    except TypeError as error:
        raise RecipeError(f"train.arguments: {error}") from error
    except (ValueError, ImportError) as error:  # an optimizer's name, bf16 without the hardware
        raise RecipeError(f"transformers refuses the recipe's settings: {error}") from error


# ---- advice ----


ROOM = 0.4
"""Of the device's memory: whoever takes less may have room for twice as many blocks at a time."""


def slow_arithmetic(recipe: Recipe) -> str | None:
    on_gpu = uses_accelerator(recipe) and torch.cuda.is_available()
    if not on_gpu or recipe.train.bf16 or recipe.student.dtype != "float32":
        return None
    if not torch.cuda.is_bf16_supported():
        return None
    return (
        "train.bf16 is false: float32 arithmetic leaves the fast units of this GPU unused. Set "
        "train.bf16: true; the weights stay float32."
    )


def room_left(schedule: Schedule) -> str | None:
    """After a step: small micro-batches of a small student keep the host busy and a GPU waiting."""
    if schedule.accumulation == 1 or not torch.cuda.is_initialized():
        return None
    taken = torch.cuda.max_memory_reserved()
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if taken > ROOM * whole:
        return None
    return (
        f"{schedule.micro_batch} blocks at a time take {taken / 2**30:,.1f} of "
        f"{whole / 2**30:,.1f} GiB: train.micro_batch: auto finds out whether more are faster"
    )
