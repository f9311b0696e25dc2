"""Recipe -> transformers' TrainingArguments and the objective's configuration."""

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from vocagnolm.errors import RecipeError
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.recipe import Recipe
from vocagnolm.train.schedule import Schedule


def objective_config(recipe: Recipe) -> ObjectiveConfig:
    section = recipe.objective
    try:
        return ObjectiveConfig(
            method=section.method,
            keep=section.keep,
            unmapped=section.unmapped,
            scope=section.scope,
            normalise=section.normalise,
            distill_weight=section.distill_weight,
            entropy_keep=section.entropy_keep,
            n_chunks=section.n_chunks,
            chunk_choice=section.chunk_choice,
            seed=recipe.run.seed,
        )
    except ValueError as error:
        raise RecipeError(f"objective: {error}") from error


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
        "optim": optimizer.name,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "max_grad_norm": optimizer.max_grad_norm,
        "bf16": train.bf16,
        "gradient_checkpointing": train.gradient_checkpointing,
        "use_liger_kernel": train.liger,
        "use_cpu": train.device == "cpu",
        "seed": run.seed,
        "logging_steps": run.log_every,
        "report_to": run.report_to or "none",
        "save_strategy": "steps" if run.save_every else "no",
        "save_steps": run.save_every or 500,
        "save_total_limit": None,  # pruned by us, once the new one is known to be complete
        "dataloader_num_workers": train.loader_workers,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": train.device != "cpu" and torch.cuda.is_available(),
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
    if train.parallel == "fsdp2" and schedule.world_size > 1:
        settings["fsdp"] = True
        settings["fsdp_config"] = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    settings.update(train.arguments)
    try:
        return TrainingArguments(**settings)
    except TypeError as error:
        raise RecipeError(f"train.arguments: {error}") from error
    except (ValueError, ImportError) as error:  # an optimizer's name, bf16 without the hardware
        raise RecipeError(f"transformers refuses the recipe's settings: {error}") from error
