"""What a check collects: its findings, and what the recipe's names stand for."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vocagnolm.alignment import TextTokenizer
from vocagnolm.data.corpus import Corpus
from vocagnolm.errors import VocagnolmError
from vocagnolm.store import LossStore
from vocagnolm.train.schedule import Schedule


@dataclass
class CheckReport:
    """What was found. `ready` is the verdict; `plan` holds facts by name."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {
            "ready": self.ready,
            "problems": self.problems,
            "warnings": self.warnings,
            "plan": self.plan,
        }

    def problem(self, line: str) -> None:
        if line not in self.problems:
            self.problems.append(line)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """What goes wrong inside is a problem of the report."""
        try:
            yield
        except VocagnolmError as error:
            self.problem(str(error))


@dataclass
class Found:
    """What the recipe's names stand for on this machine; None where something is wrong with it, or
    where there is nothing to find."""

    tokenizer: TextTokenizer | None = None
    parameters: int | None = None
    corpus: Corpus | None = None
    store: LossStore | None = None
    """The best of several."""
    manifest: dict[str, Any] | None = None
    schedule: Schedule | None = None
    blocks: int | None = None
