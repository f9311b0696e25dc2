"""What a step was like: one JSON object a line in `metrics.jsonl`."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocagnolm.objective.ranks import Ranks

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

    SUMS = ("loss", "nll", "nll_selected", "selected", "predicted", "mapped", "tokens")

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._means: list[dict[str, Tensor]] = []

    def add(self, output: dict[str, Any], labels: Tensor, guidance: Tensor | None) -> None:
        valid = labels >= 0
        selected = output["selected"]
        mapped = torch.zeros((), device=labels.device)
        if guidance is not None:
            mapped = (valid & ~torch.isnan(guidance)).sum()
        values = (
            output["loss"].detach(),
            (output["nll"] * valid).sum(),
            (output["nll"] * selected).sum(),
            selected.sum(),
            valid.sum(),
            mapped,
            torch.tensor(labels.numel(), device=labels.device),
        )
        # float32 counts are exact to 16 M tokens, far above a micro-batch
        self._sums.append(torch.stack([value.float() for value in values]))
        keep = ("excess_", "distill_", "aligned_", "teacher_")
        self._means.append(
            {name: v.float() for name, v in output["stats"].items() if name.startswith(keep)}
        )

    def finish(self, ranks: Ranks) -> dict[str, float]:
        """Totals over micro-batches and ranks, as plain numbers; the meter is empty again."""
        names = sorted(self._means[0])
        rows = [
            torch.cat([sums, torch.stack([means[name] for name in names]) if names else sums[:0]])
            for sums, means in zip(self._sums, self._means, strict=True)
        ]
        count = len(rows) * ranks.size
        # fp64 where there is one: the sum must not depend on how a step is split
        stacked = torch.stack(rows)
        total = ranks.sum((stacked if stacked.is_mps else stacked.double()).sum(0))
        self._sums, self._means = [], []
        values = total.tolist()
        result = dict(zip(self.SUMS, values, strict=False))
        result.update(
            {
                name: value / count
                for name, value in zip(names, values[len(self.SUMS) :], strict=True)
            }
        )
        return result


def step_record(totals: dict[str, float], *, has_guidance: bool) -> dict[str, Any]:
    """The measures of a step from its totals."""
    predicted = max(totals["predicted"], 1.0)
    record: dict[str, Any] = {
        "loss": totals["loss"],
        "loss_selected": totals["nll_selected"] / max(totals["selected"], 1.0),
        "loss_all": totals["nll"] / predicted,
        "selected_share": totals["selected"] / predicted,
        "mapped_share": totals["mapped"] / predicted if has_guidance else None,
    }
    record.update({k: v for k, v in totals.items() if k not in StepMeter.SUMS})
    return record


class MetricsFile:
    """`metrics.jsonl`: appended a line a step, cut back to the checkpoint on resume."""

    def __init__(self, path: Path):
        self.path = path

    def resume_at(self, step: int) -> None:
        """Drop what was written after `step`, and a line that a kill left half-written."""
        if not self.path.exists():
            return
        kept = [json.dumps(r) + "\n" for r in read_metrics(self.path) if r["step"] <= step]
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def append(self, record: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class Stopwatch:
    """Wall time between steps. Reading the step's totals has waited for the device by then."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


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
