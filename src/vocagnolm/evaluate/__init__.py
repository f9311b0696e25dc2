"""Evaluation: the paper's math suite and bits per byte.

`grade` and the averages need the standard library (and math-verify for MATH); what runs a model
is imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Grade": "vocagnolm.evaluate.grading",
    "averages": "vocagnolm.evaluate.suite",
    "grade": "vocagnolm.evaluate.grading",
}

if TYPE_CHECKING:
    from vocagnolm.evaluate.grading import Grade, grade
    from vocagnolm.evaluate.suite import averages

__all__ = ["Grade", "averages", "grade"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'vocagnolm.evaluate' has no attribute {name!r}")
