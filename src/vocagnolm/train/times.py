"""Where the seconds of a run went, and when its first step was made."""

import time
from dataclasses import dataclass, replace

from vocagnolm.model.compiled import compiling_seconds
from vocagnolm.times import Seconds


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
