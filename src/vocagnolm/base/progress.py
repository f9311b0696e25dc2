"""Progress of long work: when a line is due, the rate and the time left, and where the seconds
went."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

FIRST_SECONDS = 10.0
SECONDS = 30.0
VARIABLE = "VOCAGNOLM_PROGRESS_SECONDS"
"""Environment variable: seconds between two lines, instead of 10 and then 30."""

Clock = Callable[[], float]


class Throttle:
    """Says when the next line of progress is due: after ten seconds, then every half minute at
    most."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        first, self._every = FIRST_SECONDS, SECONDS
        with contextlib.suppress(KeyError, ValueError):
            first = self._every = max(0.0, float(os.environ[VARIABLE]))
        self._next = clock() + first

    def due(self) -> bool:
        if self._clock() < self._next:
            return False
        self.said()
        return True

    def said(self) -> None:
        """Note that a line was written for another reason, so that the next can wait."""
        self._next = self._clock() + self._every


class Speed:
    """Rate and time left of work that may resume. What is done within the first second counts as
    done before: a resumed run is not faster for what it finds."""

    GRACE_SECONDS = 1.0

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._began = clock()
        self._base = self._last = (self._began, 0.0, 0.0)  # time, done, amount
        self._total = 0.0

    def note(self, done: float, total: float, amount: float) -> None:
        self._last = (self._clock(), done, amount)
        self._total = total
        if self._last[0] - self._began <= self.GRACE_SECONDS:
            self._base = self._last

    def _gains(self) -> tuple[float, float, float]:
        seconds, done, amount = (b - a for a, b in zip(self._base, self._last, strict=True))
        return seconds, done, amount

    @property
    def rate(self) -> float | None:
        """Amount per second; None while nothing can be said."""
        seconds, _, gained = self._gains()
        return gained / seconds if seconds > 0 and gained > 0 else None

    @property
    def done_rate(self) -> float | None:
        """Units of work done per second; None while nothing can be said."""
        seconds, gained, _ = self._gains()
        return gained / seconds if seconds > 0 and gained > 0 else None

    @property
    def seconds_left(self) -> float | None:
        seconds, gained, _ = self._gains()
        if seconds <= 0 or gained <= 0:
            return None
        return max(0.0, self._total - self._last[1]) / gained * seconds


def clock_time(seconds: float | None) -> str:
    """Seconds as `4:05` or `1:04:05`; `-` where they are not known."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def byte_text(size: int) -> str:
    """`512 bytes`, `4.1 MB`, `51.1 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} bytes"


# ---- seconds ----


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of consecutive stages of a command: together they are all the time that passed."""

    start: float = 0.0

    @property
    def total(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))

    def with_earlier(self, seconds: float) -> Self:
        """These seconds and those that passed before the run was called: the imports of a
        command."""
        return replace(self, start=self.start + seconds)

    def __str__(self) -> str:
        parts = (f"{field.name} {getattr(self, field.name):,.1f}" for field in fields(self))
        return f"seconds: {', '.join(parts)}; {self.total:,.1f} in all"
