"""Questions with known answers: the benchmarks, their readers, and graders that compare answers.

Grading needs only the standard library, and math-verify for LaTeX.
"""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

_PUBLIC = {"graders": ("Grade", "grade"), "suite": ("averages",)}
"""Module -> the public names that it defines."""

if TYPE_CHECKING:
    from vocagnolm.questions.graders import Grade, grade
    from vocagnolm.questions.suite import averages

__all__ = ["Grade", "averages", "grade"]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
