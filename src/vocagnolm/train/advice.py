"""What a run leaves unused of its GPU, and the key that changes it."""

import torch

from vocagnolm.recipe import Recipe
from vocagnolm.train.arguments import uses_accelerator
from vocagnolm.train.schedule import Schedule

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
