"""Evaluation: the paper's math suite and bits per byte.

`grade` and the averages need only the standard library (and math-verify for MATH); what runs a
model is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Engine": "vocagnolm.evaluate.settings",
    "Evaluation": "vocagnolm.evaluate.results",
    "Grade": "vocagnolm.evaluate.graders",
    "Questions": "vocagnolm.evaluate.settings",
    "averages": "vocagnolm.evaluate.suite",
    "compare_runs": "vocagnolm.evaluate.results",
    "evaluate": "vocagnolm.evaluate.run",
    "grade": "vocagnolm.evaluate.graders",
}

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
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'vocagnolm.evaluate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
