"""Evaluation: the paper's math suite and bits per byte.

`grade` and the averages need only the standard library (and math-verify for MATH); what runs a
model is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "graders": ("Grade", "grade"),
    "results": ("Evaluation", "compare_runs"),
    "run": ("evaluate",),
    "settings": ("Engine", "Questions"),
    "suite": ("averages",),
}
"""Module -> the public names that it defines."""

if TYPE_CHECKING:
    from vocagnolm.evaluate.graders import Grade, grade
    from vocagnolm.evaluate.results import Evaluation, compare_runs
    from vocagnolm.evaluate.run import evaluate
    from vocagnolm.evaluate.settings import Engine, Questions
    from vocagnolm.evaluate.suite import averages

__all__ = [
    "Engine",
    "Evaluation",
    "Grade",
    "Questions",
    "averages",
    "compare_runs",
    "evaluate",
    "grade",
]


def __getattr__(name: str) -> Any:
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(import_module(f"vocagnolm.evaluate.{module}"), name)
    raise AttributeError(f"module 'vocagnolm.evaluate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
