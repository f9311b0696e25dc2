"""`train.micro_batch: auto`: the micro-batch with which this machine is fastest, by measurement."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vocagnolm.errors import TrainingError
from vocagnolm.processes import Ranks
from vocagnolm.train.schedule import first_micro_batch
from vocagnolm.train.trainer import GuidedTrainer

WORTH = 1.03
"""A micro-batch that is larger must be faster by this, or its memory is not worth it."""
_PASSES = 3


@dataclass(frozen=True)
class Tried:
    micro_batch: int
    tokens_per_second: float | None
    """None: out of memory."""

    def __str__(self) -> str:
        rate = self.tokens_per_second
        return f"{self.micro_batch}: " + ("no room" if rate is None else f"{rate:,.0f} tokens/s")


@dataclass(frozen=True)
class FoundMicroBatch:
    micro_batch: int
    seconds: float
    """What it cost to find out."""
    tried: list[Tried]
    """By the leading process."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        tried = ", ".join(map(str, self.tried))
        return f"micro-batch {self.micro_batch}, found in {self.seconds:,.1f} s ({tried})"


def choose(share: int, measure: Callable[[int], float | None]) -> tuple[int, list[Tried]]:
    """Of the numbers that divide `share`, the blocks of a process in a step: twice as many as
    before, as long as that pays. `measure` gives tokens per second, None where they do not fit.
    0 where not even one does."""
    fitting = [n for n in range(1, share + 1) if share % n == 0]
    size = first_micro_batch(share)
    tried = [Tried(size, measure(size))]
    while tried[-1].tokens_per_second is None:
        smaller = [n for n in fitting if n <= size // 2]
        if not smaller:
            return 0, tried
        size = smaller[-1]
        tried.append(Tried(size, measure(size)))
    if len(tried) > 1:
        return size, tried
    while larger := [n for n in fitting if n >= 2 * size]:
        rate = tried[-1].tokens_per_second
        tried.append(Tried(larger[0], measure(larger[0])))
        new = tried[-1].tokens_per_second
        if rate is None or new is None or new < WORTH * rate:
            break
        size = larger[0]
    return size, tried


def find_micro_batch(trainer: GuidedTrainer, share: int) -> FoundMicroBatch:
    """Before the first step. Weights and random numbers stay as they are; all ranks take the
    smallest that one of them has found."""
    began = time.perf_counter()
    device = trainer.args.device
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        room = _room_of_optimizer(trainer) if on_gpu else None
        found, tried = choose(share, lambda blocks: _tokens_per_second(trainer, blocks))
        del room
    agreed = -int(Ranks.of().max(torch.tensor(-found, device=device)))
    if agreed == 0:
        raise TrainingError(
            "train.micro_batch: auto has found no room for a single block on "
            + ("this process's device" if found == 0 else "another process's device")
            + ". Use gradient_checkpointing, lora, a shorter data.block_size or parallel: fsdp2."
        )
    return FoundMicroBatch(agreed, time.perf_counter() - began, tried)


def _tokens_per_second(trainer: GuidedTrainer, blocks: int) -> float | None:
    model: Any = trainer.model
    best = math.inf
    try:
        batch = trainer.first_blocks(blocks)
        for _ in range(1 + _PASSES):  # the first one compiles, and fills the gradients
            began = time.perf_counter()
            trainer.try_pass(batch)
            if trainer.args.device.type == "cuda":
                torch.cuda.synchronize(trainer.args.device)
            best = min(best, time.perf_counter() - began)
        return float(batch["labels"].numel() / best)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def _room_of_optimizer(trainer: GuidedTrainer) -> list[torch.Tensor]:
    """What a step needs beside the passes: AdamW's two moments, and the buckets in which several
    processes exchange their gradients."""
    model: Any = trainer.model
    copies = 2 + (trainer.args.world_size > 1)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [torch.empty_like(p) for p in trained for _ in range(copies)]
