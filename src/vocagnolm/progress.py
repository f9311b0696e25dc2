"""How far long work is: when it says so, how its rate and the time left are told, and where its
seconds went."""

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


class Pace:
    """A line after ten seconds, then one every half minute at most."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        wanted = _seconds_wanted()
        self._every = SECONDS if wanted is None else wanted
        self._next = clock() + (FIRST_SECONDS if wanted is None else wanted)

    def due(self) -> bool:
        if self._clock() < self._next:
            return False
        self.said()
        return True

    def said(self) -> None:
        """A line was written for another reason: the next can wait."""
        self._next = self._clock() + self._every


def _seconds_wanted() -> float | None:
    try:
        return max(0.0, float(os.environ[VARIABLE]))
    except (KeyError, ValueError):
        return None


@dataclass
class _Mark:
    time: float
    done: float
    amount: float


class Speed:
    """Rate and time left. What comes within the first second was there before: a run that goes on
    is not faster for what it finds."""

    GRACE_SECONDS = 1.0

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._began = clock()
        self._base = _Mark(self._began, 0.0, 0.0)
        self._last = self._base
        self._total = 0.0

    def note(self, done: float, total: float, amount: float) -> None:
        self._last = _Mark(self._clock(), done, amount)
        self._total = total
        if self._last.time - self._began <= self.GRACE_SECONDS:
            self._base = self._last

    @property
    def rate(self) -> float | None:
        """Amount a second; None while nothing can be said."""
        elapsed = self._last.time - self._base.time
        gained = self._last.amount - self._base.amount
        return gained / elapsed if elapsed > 0 and gained > 0 else None

    @property
    def seconds_left(self) -> float | None:
        elapsed = self._last.time - self._base.time
        gained = self._last.done - self._base.done
        if elapsed <= 0 or gained <= 0:
            return None
        return max(0.0, self._total - self._last.done) / gained * elapsed


def clock_time(seconds: float | None) -> str:
    """`4:05`, `1:04:05`; `-` where it is not known."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# ---- seconds ----


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """One after the other: they add up to all that passed."""

    start: float = 0.0

    @property
    def total(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))

    def with_earlier(self, seconds: float) -> Self:
        """What passed before the run was called: the imports of a command."""
        return replace(self, start=self.start + seconds)

    def __str__(self) -> str:
        parts = (f"{field.name} {getattr(self, field.name):,.1f}" for field in fields(self))
        return f"seconds: {', '.join(parts)}; {self.total:,.1f} in all"
