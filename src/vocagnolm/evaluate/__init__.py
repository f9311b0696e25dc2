"""Evaluation: the paper's math suite and bits per byte.

What runs a model is imported on first use.
"""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

_PUBLIC = {
    "results": ("Evaluation", "compare_runs"),
    "run": ("evaluate",),
    "settings": ("Engine", "Questions"),
}
"""Module -> the public names that it defines."""

if TYPE_CHECKING:
    from vocagnolm.evaluate.results import Evaluation, compare_runs
    from vocagnolm.evaluate.run import evaluate
    from vocagnolm.evaluate.settings import Engine, Questions

__all__ = [
    "Engine",
    "Evaluation",
    "Questions",
    "compare_runs",
    "evaluate",
]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
