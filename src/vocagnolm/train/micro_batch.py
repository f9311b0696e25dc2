"""`train.micro_batch: auto`: the number of blocks at a time that is fastest on this machine."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from vocagnolm.base.ranks import Ranks
from vocagnolm.errors import TrainingError
from vocagnolm.objective import Decided, ObjectiveConfig, count_kept
from vocagnolm.train.collate import batch_targets
from vocagnolm.train.loop import Batch, MicroBatch, Setup, sent
from vocagnolm.train.settings import first_micro_batch

WORTH = 1.03
"""A micro-batch that is larger must be faster by this, or its memory is not worth it."""
_PASSES = 3


@dataclass(frozen=True)
class Trial:
    """A micro-batch that was tried."""

    micro_batch: int
    tokens_per_second: float | None
    """None if it did not fit into memory."""

    def __str__(self) -> str:
        rate = self.tokens_per_second
        return f"{self.micro_batch}: " + ("no room" if rate is None else f"{rate:,.0f} tokens/s")


@dataclass(frozen=True)
class FoundMicroBatch:
    """The micro-batch of a run, and how it was found."""

    micro_batch: int
    seconds: float
    """The time that the search took."""
    tried: list[Trial]
    """The trials of the leading process."""

    def __str__(self) -> str:
        tried = ", ".join(map(str, self.tried))
        return f"micro-batch {self.micro_batch}, found in {self.seconds:,.1f} s ({tried})"


def choose(share: int, measure: Callable[[int], float | None]) -> tuple[int, list[Trial]]:
    """The fastest of the numbers that divide `share`, the blocks of a process in a step, and what
    was tried: twice as many as before, as long as that pays. `measure` gives tokens per second,
    None where they do not fit. 0 where not even one block fits."""
    fitting = [n for n in range(1, share + 1) if share % n == 0]
    size = first_micro_batch(share)
    tried = [Trial(size, measure(size))]
    while tried[-1].tokens_per_second is None:
        smaller = [n for n in fitting if n <= size // 2]
        if not smaller:
            return 0, tried
        size = smaller[-1]
        tried.append(Trial(size, measure(size)))
    if len(tried) > 1:
        return size, tried
    while larger := [n for n in fitting if n >= 2 * size]:
        rate = tried[-1].tokens_per_second
        tried.append(Trial(larger[0], measure(larger[0])))
        new = tried[-1].tokens_per_second
        if rate is None or new is None or new < WORTH * rate:
            break
        size = larger[0]
    return size, tried


def find_micro_batch(
    setup: Setup, objective: ObjectiveConfig, device: torch.device, share: int
) -> FoundMicroBatch:
    """The micro-batch for a process that has `share` blocks of a step, measured with the run's own
    passes. Weights and random numbers stay as they are; all ranks take the smallest number that one
    of them has found."""
    began = time.perf_counter()
    ranks, on_gpu = Ranks.of(), device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        # a step needs more than the passes: AdamW's two moments, and the buckets in which several
        # processes exchange their gradients
        copies = (2 + (ranks.count > 1)) * on_gpu
        trained = [p for p in setup.student.parameters() if p.requires_grad]
        room = [torch.empty_like(p) for p in trained for _ in range(copies)]
        size, tried = choose(
            share, lambda blocks: _tokens_per_second(setup, objective, device, blocks)
        )
        del room
    agreed = -int(ranks.max(torch.tensor(-size, device=device)))
    if agreed == 0:
        raise TrainingError(
            "train.micro_batch: auto has found no room for a single block on "
            + ("this process's device" if size == 0 else "another process's device")
            + ". Use gradient_checkpointing, lora, a shorter data.block_size or parallel: fsdp2."
        )
    return FoundMicroBatch(agreed, time.perf_counter() - began, tried)


def _tokens_per_second(
    setup: Setup, objective: ObjectiveConfig, device: torch.device, blocks: int
) -> float | None:
    """The rate of passes over so many blocks; None where memory ends."""
    best = math.inf
    try:
        batch = sent(setup.collator([setup.order[index] for index in range(blocks)]), device)
        for _ in range(1 + _PASSES):  # the first one compiles, and fills the gradients
            began = time.perf_counter()
            try_pass(setup, objective, batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - began)
        return float(batch["labels"].numel() / best)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    finally:
        setup.student.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def try_pass(setup: Setup, objective: ObjectiveConfig, batch: Batch) -> None:
    """Forward and backward of a micro-batch by itself, before the training. It leaves nothing but
    gradients, and no other rank takes part."""
    config = replace(objective, scope="batch") if objective.scope == "global" else objective
    teacher = setup.teacher
    if teacher is not None and not teacher.distils:
        batch = {**batch, **teacher.guide(batch), "counts": None}
    targets = batch_targets(batch)
    kept = count_kept(batch.get("counts"), config)
    decided = Decided(denominator=targets.valid_BT.sum(), kept=kept)
    setup.student.train()
    passed = MicroBatch.of(batch, targets, config, teacher=teacher, decided=decided)
    output: dict[str, Any] = setup.student(passed)
    output["loss"].backward()
