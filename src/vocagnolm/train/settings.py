"""From a recipe's sections to the settings of a run on this machine: steps, batches, the objective,
the optimizer.

Steps, batches and the objective need no torch: it is imported where the machine is asked.
"""

import math
import sys
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.data.mixture import Interleaving
from vocagnolm.errors import RecipeError
from vocagnolm.recipe import Recipe
from vocagnolm.recipe.schema import fields_of
from vocagnolm.recipe.sections import ObjectiveConfig, OptimizerSection

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

# ---- steps and batches ----


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of a run, and the batches of a step, on `world_size` processes."""

    steps: int
    batch_blocks: int
    micro_batch: int
    accumulation: int
    world_size: int
    block_size: int
    blocks: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_blocks * self.block_size

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float:
        return self.steps * self.batch_blocks / self.blocks


def plan_schedule(
    recipe: Recipe, blocks: int, world_size: int = 1, measured: int | None = None
) -> Schedule:
    """The schedule of a recipe with so many blocks. It has whole steps only: the rest of a last,
    incomplete batch is left out. `measured`: the micro-batch that `auto` stands for, if it is
    known; else the first that would be tried."""
    train = recipe.train
    per_step = train.batch_blocks * recipe.data.block_size
    if train.tokens is not None:
        steps = train.tokens // per_step
        asked = f"train.tokens = {train.tokens:,}"
    else:
        steps = int(train.epochs * blocks) // train.batch_blocks
        asked = f"train.epochs = {train.epochs:g} of {blocks:,} blocks"
    if steps < 1:
        read = int(train.epochs * blocks) if train.tokens is None else train.tokens
        most = read if train.tokens is None else read // recipe.data.block_size
        longer = f"train.tokens to at least {per_step}"
        raise RecipeError(
            f"{asked} is less than one step of {train.batch_blocks:,} blocks ({per_step:,} "
            f"tokens). Set {_batch_that_fits(most, train.micro_batch, world_size)}{longer}."
        )
    micro_batch = check_batch(recipe, world_size, measured)
    return Schedule(
        steps=steps,
        batch_blocks=train.batch_blocks,
        micro_batch=micro_batch,
        accumulation=train.batch_blocks // (micro_batch * world_size),
        world_size=world_size,
        block_size=recipe.data.block_size,
        blocks=blocks,
    )


def corpora_read(recipe: Recipe, schedule: Schedule) -> dict[str, int]:
    """The number of blocks that a run reads of each of several corpora, by name."""
    length = schedule.steps * schedule.batch_blocks
    counts = Interleaving(recipe.shares, length).counts(length)
    return dict(zip(recipe.shares, counts, strict=True))


def _batch_that_fits(most_blocks: int, micro_batch: int | str, world_size: int) -> str:
    """A batch and micro-batch for so few blocks, as the beginning of an advice."""
    share = most_blocks // world_size
    if share < 1:
        return ""
    batch = f"train.batch_blocks to {share * world_size}"
    if isinstance(micro_batch, int) and share % micro_batch:
        batch += f" and train.micro_batch to {_largest_divisor(share, micro_batch)}"
    return f"{batch}, or "


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def check_batch(recipe: Recipe, world_size: int, measured: int | None = None) -> int:
    """The micro-batch of a recipe; refused if the batch cannot be split by it. `measured` is what
    `auto` stands for."""
    train = recipe.train
    micro_batch = train.micro_batch
    if micro_batch == "auto":
        if train.parallel != "ddp":
            raise RecipeError(
                f"train.micro_batch: auto measures with the whole model in each process, which "
                f"train.parallel: {train.parallel} does not have. Give a number."
            )
        micro_batch = measured or first_micro_batch(train.batch_blocks // world_size)
    if train.batch_blocks % (micro_batch * world_size):
        next_batch = math.ceil(train.batch_blocks / (micro_batch * world_size))
        advice = f"train.batch_blocks to {next_batch * micro_batch * world_size}"
        if train.batch_blocks % world_size == 0:
            fitting = _largest_divisor(train.batch_blocks // world_size, micro_batch)
            advice = f"train.micro_batch to {fitting}, or {advice}"
        raise RecipeError(
            f"train.batch_blocks = {train.batch_blocks} is not a multiple of train.micro_batch x "
            f"processes = {micro_batch} x {world_size}. Set {advice}."
        )
    return micro_batch


def first_micro_batch(share: int) -> int:
    """The micro-batch that `auto` tries first: the largest number up to the default that divides
    the blocks of a process."""
    return max((n for n in range(1, 9) if share % n == 0 and n <= share), default=1)


def usual_learning_rate(parameters: int, step_tokens: int) -> float:
    """A peak rate to begin with, for a student of this size and steps of so many tokens: the
    paper's for 1.1B parameters; smaller models take larger ones, smaller steps smaller ones."""
    rate = min(4e-3, 8e-5 * math.sqrt(1.1e9 / parameters))
    return float(f"{rate * min(1.0, math.sqrt(step_tokens / 4096)):.2g}")


# ---- the objective ----


def objective_config(recipe: Recipe) -> ObjectiveConfig:
    """The objective of a recipe."""
    section = recipe.objective
    names = [key.name for key in fields(ObjectiveConfig) if hasattr(section, key.name)]
    given = {name: getattr(section, name) for name in names}
    try:
        config = ObjectiveConfig(**given, seed=recipe.run.seed)
    except ValueError as error:
        raise RecipeError(f"objective: {error}") from error
    if config.rule.selects and not config.graded and config.keep == 0:
        raise RecipeError("objective: keep is 0: no token would be kept. Give a share above 0.")
    return config


def what_a_step_depends_on(recipe: Recipe) -> str:
    """A sentence for the card and `check`: whether the micro-batch affects the run."""
    if objective_config(recipe).depends_on_micro_batch:
        return (
            "on train.micro_batch, since tokens compete within a micro-batch (objective.scope: "
            "batch); not on the number of processes"
        )
    return "neither on train.micro_batch nor on the number of processes"


# ---- the device, and what transformers knows by name ----


def uses_accelerator(recipe: Recipe) -> bool:
    """Whether a run uses the accelerator: if there is one and `train.device` is not cpu."""
    import torch

    return recipe.train.device != "cpu" and torch.accelerator.is_available()


def may_use_gpu(recipe: Recipe) -> bool:
    """Whether a run might use a GPU, without importing torch, which takes seconds: Linux shows a
    GPU as a device."""
    devices = ("nvidiactl", "kfd", "dxg")  # NVIDIA's, AMD's, and any in Windows' Linux
    loaded = "torch" in sys.modules or sys.platform != "linux"
    seen = loaded or any(Path("/dev", name).exists() for name in devices)
    return recipe.train.device != "cpu" and seen


def check_arguments(recipe: Recipe, schedule: Schedule) -> None:
    """Raise an error for settings that transformers refuses. It takes seconds to ask, so it is not
    asked about the default optimizer with arithmetic that every machine has."""
    refuse_arguments(recipe.train.arguments)
    unusual = recipe.optimizer.name != fields_of(OptimizerSection)["name"].default
    if recipe.train.arguments or unusual or (recipe.train.half_precision and may_use_gpu(recipe)):
        training_arguments(recipe, schedule)


# Arguments of transformers that `train.arguments` may set.
FURTHER_ARGUMENTS = frozenset(
    {
        *("adam_epsilon", "optim_args", "optim_target_modules", "neftune_noise_alpha"),
        *("fp16", "tf32", "full_determinism"),
        *("ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        *("ddp_static_graph", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
        *("dataloader_multiprocessing_context", "log_level", "logging_first_step", "run_name"),
        *("project", "trackio_space_id"),
    }
)
# Arguments with the value of a recipe's key, and those that other keys decide.
_AS_IN_RECIPE = {
    "learning_rate": "optimizer.learning_rate",
    "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "max_grad_norm": "optimizer.max_grad_norm",
    "seed": "run.seed",
    "logging_steps": "run.log_every",
}
_RECIPE_KEYS = _AS_IN_RECIPE | {
    "bf16": "train.dtype",
    "output_dir": "run.folder",
    "max_steps": "train.tokens",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch",
    "auto_find_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.batch_blocks",
    "lr_scheduler_kwargs": "optimizer.min_learning_rate",
    "warmup_ratio": "optimizer.warmup_steps",
    "optim": "optimizer.name",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "use_liger_kernel": "train.liger",
    "use_cpu": "train.device",
    "data_seed": "run.seed",
    "report_to": "run.report_to",
    "save_strategy": "run.save_every",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep_checkpoints",
    "dataloader_num_workers": "train.loader_workers",
    "fsdp": "train.parallel",
    "fsdp_config": "train.parallel",
    "torch_compile": "train.compile",
}


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse `train.arguments` that a key of the recipe sets, which summary and card report, and
    secrets, since the recipe is copied into the run and the card."""
    for name in arguments:
        if name in _RECIPE_KEYS:
            raise RecipeError(f"train.arguments.{name}: set {_RECIPE_KEYS[name]} instead.")
        if name.endswith(("token", "key", "password", "secret")):
            raise RecipeError(
                f"train.arguments.{name}: a recipe is copied into the run and the model card, and "
                "must not hold secrets. Log in with `hf auth login`, or set HF_TOKEN."
            )
        if name not in FURTHER_ARGUMENTS:
            raise RecipeError(
                f"train.arguments.{name} is set by the program, or not used by it. Supported: "
                f"{', '.join(sorted(FURTHER_ARGUMENTS))}."
            )


def training_arguments(recipe: Recipe, schedule: Schedule) -> "TrainingArguments":
    """The part of a recipe that transformers' optimizers read. Its `device` starts
    torch.distributed. The loop reads the recipe itself."""
    import torch
    from transformers import TrainingArguments

    optimizer, train, run = recipe.optimizer, recipe.train, recipe.run
    assert run.folder is not None
    refuse_arguments(train.arguments)
    on_gpu = uses_accelerator(recipe) and torch.cuda.is_available()
    # on a GPU in one kernel, which can also skip a step whose loss is not finite
    fused = on_gpu and optimizer.name == "adamw_torch"
    settings: dict[str, Any] = {
        "output_dir": str(Path(run.folder) / "checkpoints"),
        "max_steps": schedule.steps,
        "per_device_train_batch_size": schedule.micro_batch,
        "gradient_accumulation_steps": schedule.accumulation,
        "optim": "adamw_torch_fused" if fused else optimizer.name,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": optimizer.min_learning_rate},
        "bf16": train.half_precision,
        "use_cpu": not uses_accelerator(recipe),
        "report_to": "none",
        **{name: attrgetter(key)(recipe) for name, key in _AS_IN_RECIPE.items()},
        **train.arguments,
    }
    try:
        return TrainingArguments(**settings)
    except (TypeError, ValueError, ImportError) as error:  # bf16 without the hardware, a name
        raise RecipeError(f"transformers refuses the recipe's settings: {error}") from error


# Parameters without weight decay: norms and biases, as in transformers' Trainer.
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def build_optimizer(model: Any, arguments: "TrainingArguments") -> "torch.optim.Optimizer":
    """The optimizer of a run: any that transformers knows by name."""
    import torch
    from torch import nn
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: Any = [
        {
            "params": [p for name, p in trained if (name in decayed) == decays],
            "weight_decay": arguments.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    if arguments.optim in ("adamw_torch", "adamw_torch_fused") and not arguments.optim_args:
        # as the Trainer makes it, whose import takes a second where datasets is installed
        betas = (arguments.adam_beta1, arguments.adam_beta2)
        fused = {"fused": True} if arguments.optim == "adamw_torch_fused" else {}
        adam: dict[str, Any] = {"betas": betas, "eps": arguments.adam_epsilon, **fused}
        return torch.optim.AdamW(groups, lr=arguments.learning_rate, **adam)
    try:
        from transformers import Trainer

        make, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except (ValueError, ImportError) as error:
        raise RecipeError(f"optimizer.name {arguments.optim}: {error}") from error
    if "lomo" in arguments.optim:
        raise RecipeError(f"optimizer.name {arguments.optim} steps inside the backward pass.")
    for name in ("params", "model", "optimizer_dict"):  # optimizers that group by themselves
        groups = options.pop(name, groups)
    optimizer: torch.optim.Optimizer
    if not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)):
        optimizer = make()(model, **options)  # a factory that reads the whole model
        return optimizer
    optimizer = make(groups, **options)
    if options.get("optim_bits") == 8:  # embeddings need more
        from bitsandbytes.optim import GlobalOptimManager

        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager = GlobalOptimManager.get_instance()
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer


# ---- advice ----


ROOM = 0.4
"""A run that takes less than this share of the device's memory may have room for twice as many
blocks at a time."""


def slow_arithmetic(recipe: Recipe) -> str | None:
    """Advice for a run in float32 on a GPU that has bfloat16; else None."""
    if recipe.train.half_precision or recipe.student.dtype != "float32" or not may_use_gpu(recipe):
        return None
    import torch

    on_gpu = uses_accelerator(recipe) and torch.cuda.is_available()
    if not (on_gpu and torch.cuda.is_bf16_supported()):
        return None
    return (
        "train.dtype is float32: this arithmetic leaves the fast units of this GPU unused. Set "
        "train.dtype: bfloat16; the weights stay float32."
    )


def room_left(schedule: Schedule) -> str | None:
    """Advice for a run whose first step took little of a GPU's memory; else None. Small
    micro-batches of a small student keep the host busy and the GPU waiting."""
    import torch

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
