"""What a step was like."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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
    """Collects the micro-batches of a step on the device; one transfer to the host a step."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._means: list[dict[str, Tensor]] = []

    def add(self, output: dict[str, Any], targets: Targets) -> None:
        loss = output["loss"].detach().float()
        tokens = loss.new_tensor(targets.labels_BT.numel())
        self._rows.append(torch.cat([loss[None], tokens[None], output["sums"]]))
        self._means.append(output["means"])

    def finish(self, ranks: Ranks, **sums: float) -> dict[str, float]:
        """Measures over micro-batches and ranks, as plain numbers; the meter is empty again. What
        else is to be summed over the ranks travels along: requests, which all ranks must know of
        in the same step, and seconds."""
        names = sorted(self._means[0])
        rows = [
            torch.cat([row, *(means[name].float()[None] for name in names)])
            for row, means in zip(self._rows, self._means, strict=True)
        ]
        count = len(rows) * ranks.size
        # fp64 where there is one: the sum must not depend on how a step is split
        stacked = torch.stack(rows)
        total = (stacked if stacked.is_mps else stacked.double()).sum(0)
        total = ranks.sum(torch.cat([total, total.new_tensor([float(f) for f in sums.values()])]))
        self._rows, self._means = [], []
        values = total.tolist()
        further = dict(zip(sums, values[len(values) - len(sums) :], strict=True))
        means = values[len(values) - len(sums) - len(names) : len(values) - len(sums)]
        return {
            "loss": values[0],
            "tokens": values[1],
            **measures(values[2 : 2 + len(SUMS) + BINS]),
            **{name: value / count for name, value in zip(names, means, strict=True)},
            **further,
        }


class Stopwatch:
    """Wall time between steps. Reading the step's totals has waited for the device by then."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.waited = 0.0
        """Seconds of it that were spent waiting for data."""

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last, self.waited = now - self._last, now, 0.0
        return elapsed

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began


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
