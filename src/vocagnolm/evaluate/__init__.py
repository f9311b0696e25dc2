"""Evaluation: the paper's math suite and bits per byte.

`grade` and the averages need only the standard library (and math-verify for MATH); what runs a
model is imported on first use.
"""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
