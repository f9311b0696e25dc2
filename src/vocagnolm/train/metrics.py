"""What a step was like."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vocagnolm.model.runtime import Arriving, Moment
from vocagnolm.objective import Targets
from vocagnolm.objective.ranks import Ranks
from vocagnolm.objective.statistics import BINS, SUMS, measures

# Dense bfloat16 peak of a device in TFLOP/s, as its maker states it; the longest match counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "A10": 125.0,
    "A40": 149.7,
    "B200": 2250.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H200": 989.0,
    "H800": 989.0,
    "L4": 121.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
}


class StepMeter:
    """Collects the micro-batches of a step on the device, and never waits for it."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._means: list[dict[str, Tensor]] = []

    def add(self, output: dict[str, Any], targets: Targets) -> None:
        loss = output["loss"].detach().float()
        # filled in, not sent: a number that is copied to a device is waited for
        tokens = loss.new_full((1,), targets.labels_BT.numel())
        self._rows.append(torch.cat([loss[None], tokens, output["sums"]]))
        self._means.append(output["means"])

    def finish(self, ranks: Ranks, **sums: float) -> "Totals":
        """Totals over micro-batches and ranks; the meter is empty again. What else is to be summed
        over the ranks travels along: requests, which all ranks must know of in the same step, and
        seconds."""
        names = sorted(self._means[0])
        rows = [
            torch.cat([row, *(means[name].float()[None] for name in names)])
            for row, means in zip(self._rows, self._means, strict=True)
        ]
        count = len(rows) * ranks.size
        # fp64 where there is one: the sum must not depend on how a step is split
        stacked = torch.stack(rows)
        total = (stacked if stacked.is_mps else stacked.double()).sum(0)
        further = [total.new_full((1,), float(value)) for value in sums.values()]
        total = ranks.sum(torch.cat([total, *further]))
        self._rows, self._means = [], []
        return Totals(total, count, names, list(sums))


class Totals:
    """The totals of a step, on their way to the host."""

    def __init__(self, total: Tensor, count: int, means: Sequence[str], further: Sequence[str]):
        self._values = Arriving(total)
        self._count, self._means, self._further = count, means, further

    @property
    def arrives(self) -> Moment:
        return self._values.moment

    def read(self) -> dict[str, float]:
        """Measures as plain numbers; waits for the step, and for nothing after it."""
        values = self._values.numpy().tolist()
        end = 2 + len(SUMS) + BINS
        means = zip(self._means, values[end:], strict=False)
        return {
            "loss": values[0],
            "tokens": values[1],
            **measures(values[2:end]),
            **{name: value / self._count for name, value in means},
            **dict(zip(self._further, values[end + len(self._means) :], strict=True)),
        }


class DataWait:
    """Seconds that were spent waiting for data."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Since it was last asked."""
        taken, self._seconds = self._seconds, 0.0
        return taken


def flops_per_token(parameters: int, layers: int, hidden: int, block_size: int) -> float:
    """Forward and backward of plain training: 6 N + 12 layers x hidden x length (PaLM, app. B)."""
    return 6.0 * parameters + 12.0 * layers * hidden * block_size


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, where its name is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_TFLOPS if key in name]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None
