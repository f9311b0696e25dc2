"""The reports of a run: the measures of a step, metrics.jsonl, lines on stderr, and the time of
each stage."""

import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vocagnolm.base.files import append_lines, sealed_lines, write_text
from vocagnolm.base.progress import Seconds, Throttle, clock_time
from vocagnolm.base.ranks import Ranks
from vocagnolm.errors import TrainingError
from vocagnolm.model.runtime import HostCopy, Moment, compiling_seconds
from vocagnolm.objective import Targets
from vocagnolm.objective.loss import BINS, SUMS, measures
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.settings import Schedule, room_left

if TYPE_CHECKING:  # with the packages of other people
    from vocagnolm.train.trackers import Trackers

# ---- the measures of a step ----


class StepMeter:
    """Collects the measures of one optimizer step on the device, which is not waited for until they
    are read."""

    number = 0
    learning_rate = 0.0

    def __init__(self) -> None:
        self.losses: list[tuple[Tensor, Tensor | None]] = []
        """(loss, blocks) of this rank's micro-batches."""
        self._rows: list[Tensor] = []
        self._means: list[dict[str, Tensor]] = []
        self._has_guidance = False

    def add(self, output: dict[str, Any], targets: Targets, blocks: Tensor | None) -> None:
        loss = output["loss"].detach()
        self.losses.append((loss, blocks))
        # filled in, not sent: a number that is copied to a device is waited for
        tokens = loss.new_full((1,), targets.labels_BT.numel(), dtype=torch.float32)
        self._rows.append(torch.cat([loss.float()[None], tokens, output["sums"]]))
        self._means.append(output["means"])
        self._has_guidance = targets.guidance_BT is not None

    def finish(self, number: int, learning_rate: float, **sums: float) -> None:
        """Send totals over micro-batches and ranks to the host, and with them `sums` over ranks:
        requests, which all ranks must know of in the same step, and seconds."""
        ranks = Ranks.of()
        self.number, self.learning_rate = number, learning_rate
        self._mean_names, self._sum_names = sorted(self._means[0]), list(sums)
        rows = [
            torch.cat([row, *(means[name].float()[None] for name in self._mean_names)])
            for row, means in zip(self._rows, self._means, strict=True)
        ]
        # fp64 where there is one: the sum must not depend on how a step is split
        stacked = torch.stack(rows)
        total = (stacked if stacked.is_mps else stacked.double()).sum(0)
        further = [total.new_full((1,), float(value)) for value in sums.values()]
        self._values = HostCopy(ranks.sum(torch.cat([total, *further])))
        self._micro_batches = len(rows) * ranks.count

    @property
    def ended(self) -> Moment:
        return self._values.moment

    def read(self) -> dict[str, Any]:
        """Measures as plain numbers; waits for the step, and for nothing after it."""
        values = self._values.numpy().tolist()
        end = 2 + len(SUMS) + BINS
        step = {"loss": values[0], "tokens": values[1], **measures(values[2:end])}
        for name, value in zip(self._mean_names, values[end:], strict=False):
            step[name] = value / self._micro_batches
        step |= zip(self._sum_names, values[end + len(self._mean_names) :], strict=True)
        return step if self._has_guidance else {**step, "mapped_share": None}


def require_finite(step: int, losses: list[tuple[Tensor, Tensor | None]], rank: int) -> None:
    """Wait for (loss, blocks) of micro-batches and stop the run at one that is not finite."""
    values = torch.stack([loss for loss, _ in losses]).tolist()
    for number, (value, (_, blocks)) in enumerate(zip(values, losses, strict=True)):
        if math.isfinite(value):
            continue
        named = "" if blocks is None else f", blocks {blocks.tolist()}"
        raise TrainingError(
            f"The loss is {value} in step {step}, micro-batch {number} of rank {rank}{named}. The "
            "weights are still those of the step before; the newest checkpoint is untouched. Lower "
            "optimizer.learning_rate, or check these blocks."
        )


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


def flops_share(model: Any, schedule: Schedule, device: torch.device) -> float | None:
    """The share of the devices' peak that one token a second takes, forward and backward of plain
    training: 6 N + 12 layers x hidden x length (PaLM, app. B). None where the peak is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = [key for key in PEAK_TFLOPS if key in name]
    if not known:
        return None
    config = model.config.get_text_config()
    parameters = sum(int(p.numel()) for p in model.parameters())
    layers, hidden = int(config.num_hidden_layers), int(config.hidden_size)
    flops = 6.0 * parameters + 12.0 * layers * hidden * schedule.block_size
    return flops / (PEAK_TFLOPS[max(known, key=len)] * 1e12) / schedule.world_size


# ---- metrics.jsonl and progress on stderr ----


@dataclass(frozen=True)
class MetricsFile:
    """`metrics.jsonl`: one line per step, cut back to the checkpoint on resume."""

    path: Path

    def resume_at(self, step: int) -> None:
        """Drop what was written after `step`, and a line that a kill left half-written."""
        if self.path.exists():
            kept = (r for r in read_metrics(self.path) if r["step"] <= step)
            write_text(self.path, sealed_lines(kept))

    def append(self, record: dict[str, Any]) -> None:
        append_lines(self.path, sealed_lines([record]), sync=False)


class Console:
    """Lines on stderr: one every `log_every` steps, and now and then where steps are slow."""

    def __init__(self, *, quiet: bool, log_every: int):
        self.quiet, self.log_every = quiet, log_every
        self._steps, self._first, self._began = 0, 0, 0.0
        self._throttle = Throttle()

    def start(self, schedule: Schedule, step: int) -> None:
        """The training begins, or continues after `step`."""
        self._steps, self._first, self._began = schedule.steps, step, time.monotonic()
        s = schedule
        self.say(
            f"{'going on after step ' + str(step) if step else 'training'}: {s.steps:,} steps of "
            f"{s.tokens_per_step:,} tokens ({s.accumulation} x {s.micro_batch} blocks on "
            f"{s.world_size} process{'es' if s.world_size > 1 else ''})"
        )

    def step(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if self.quiet:
            return
        if step % self.log_every and step != self._steps and not self._throttle.due():
            return
        self._throttle.said()
        seconds = time.monotonic() - self._began
        left = seconds / max(step - self._first, 1) * (self._steps - step)
        self.say(
            f"step {step:>6,}/{self._steps:,}  loss {record['loss']:.4f}  "
            f"nll kept {record['nll_kept']:.4f} all {record['nll_all']:.4f}  "
            f"kept {record['kept_share']:.1%}  "
            f"lr {record['learning_rate']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"ETA {clock_time(left)}"
        )

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)


# ---- seconds ----


@dataclass(frozen=True, kw_only=True)
class Times(Seconds):
    """Seconds of each stage of a run."""

    start: float = 0.0
    """Imports, opening the blocks and reading them through, while the student is loaded."""
    loading: float = 0.0
    """The rest of the weights, and moving them to the device."""
    measuring: float = 0.0
    """Student against teacher, and `micro_batch: auto`."""
    compiling: float = 0.0
    training: float = 0.0
    """Steps and checkpoints."""
    finishing: float = 0.0
    """Gathering and writing the model."""


class Clock:
    """Attributes the time since the start of a command to the stages of a run. `earlier`: seconds
    that had passed before."""

    def __init__(self, earlier: float = 0.0):
        self.times = Times(start=earlier)
        self.first_step: float | None = None
        """Seconds until the first step was made."""
        self._began = time.perf_counter() - earlier
        self._last, self._compiled = time.perf_counter(), compiling_seconds()

    def end(self, stage: str) -> None:
        """Add the time since the previous call to `stage`, but for what compiling took."""
        now, compiled = time.perf_counter(), compiling_seconds()
        compiling = compiled - self._compiled
        seconds = getattr(self.times, stage) + now - self._last - compiling
        added = {stage: seconds, "compiling": self.times.compiling + compiling}
        self.times = replace(self.times, **added)
        self._last, self._compiled = now, compiled

    def step(self) -> bool:
        """Note that a step was made; whether it was the first."""
        first = self.first_step is None
        if first:
            self.first_step = time.perf_counter() - self._began
        return first


# ---- what becomes of the measures ----


class Report:
    """Receives the measures and texts of a run. This class drops them: it is used in all processes
    but the first."""

    def step(self, record: dict[str, Any], gradient_norm: Tensor | None) -> None:
        """A step was read."""

    def wants_texts(self, step: int) -> bool:
        return False

    def texts(self, step: int, labels_BT: Tensor, weights_BT: Tensor) -> None:
        """Show a micro-batch with its selection."""


@dataclass(frozen=True)
class RunReport(Report):
    """Writes every step into metrics.jsonl, some to stderr, and some to the trackers."""

    metrics: MetricsFile
    console: Console
    clock: Clock
    schedule: Schedule
    flops_share: float | None = None
    """The value of the function of this name."""
    trackers: "Trackers | None" = None

    def step(self, record: dict[str, Any], gradient_norm: Tensor | None) -> None:
        share, rate = self.flops_share, record["tokens_per_second"]
        record["mfu"] = None if share is None else rate * share
        self.metrics.append(record)
        if self.clock.step():
            self.console.say(f"the first step was made after {self.clock.first_step:,.1f} s")
            if advice := room_left(self.schedule):
                self.console.say(advice)
        self.console.step(record)
        if self.trackers is not None:
            self.trackers.step(record, gradient_norm)

    def wants_texts(self, step: int) -> bool:
        return self.trackers is not None and self.trackers.wants_texts(step)

    def texts(self, step: int, labels_BT: Tensor, weights_BT: Tensor) -> None:
        if self.trackers is not None:
            self.trackers.texts(step, labels_BT, weights_BT)
