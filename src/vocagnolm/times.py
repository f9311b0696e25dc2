"""Where the seconds of a command went."""

from dataclasses import dataclass, fields, replace
from typing import Self


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
