"""Progress of a run on stderr: a line every so many steps, or now and then where steps are slow."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from vocagnolm.model.runtime import compiling_seconds
from vocagnolm.progress import Pace, Seconds, clock_time
from vocagnolm.train.schedule import Schedule

# ---- signals ----


class Requests:
    """Set by signals, read between two steps."""

    def __init__(self) -> None:
        self.stop = False
        self.save = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.stop = True
        else:
            self.save = True


@contextlib.contextmanager
def listening() -> Iterator[Requests]:
    """Handle both signals inside the block; only Python's main thread can."""
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, requests._note) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- progress ----


class Console:
    def __init__(self, schedule: Schedule, *, quiet: bool, log_every: int):
        self.schedule = schedule
        self.quiet = quiet
        self.log_every = max(1, log_every)
        self._began = (0, time.monotonic())
        self._pace = Pace()

    def start(self, step: int) -> None:
        self._began = (step, time.monotonic())
        s = self.schedule
        self.say(
            f"{'going on after step ' + str(step) if step else 'training'}: {s.steps:,} steps of "
            f"{s.tokens_per_step:,} tokens ({s.accumulation} x {s.micro_batch} blocks on "
            f"{s.world_size} process{'es' if s.world_size > 1 else ''})"
        )

    def step(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if step % self.log_every and step != self.schedule.steps and not self._pace.due():
            return
        self._pace.said()
        first, began = self._began
        left = (time.monotonic() - began) / max(step - first, 1) * (self.schedule.steps - step)
        self.say(
            f"step {step:>6,}/{self.schedule.steps:,}  loss {record['loss']:.4f}  "
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
    """Runs from the start of a command."""

    def __init__(self, earlier: float = 0.0):
        self.times = Times(start=earlier)
        self.first_step: float | None = None
        """Seconds until it was made."""
        self._began = time.perf_counter() - earlier
        self._last, self._compiled = time.perf_counter(), compiling_seconds()

    def end(self, stage: str) -> None:
        """What has passed since the last one belongs to `stage`, but for compiling."""
        now, compiled = time.perf_counter(), compiling_seconds()
        compiling = compiled - self._compiled
        seconds = getattr(self.times, stage) + now - self._last - compiling
        added = {stage: seconds, "compiling": self.times.compiling + compiling}
        self.times = replace(self.times, **added)
        self._last, self._compiled = now, compiled

    def step(self) -> bool:
        """A step was made; whether it was the first."""
        first = self.first_step is None
        if first:
            self.first_step = time.perf_counter() - self._began
        return first
