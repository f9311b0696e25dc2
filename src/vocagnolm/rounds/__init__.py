"""Rounds on policy: the student writes, a teacher reads its answers, and the student learns from
what the teacher makes of the tokens that it drew."""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

_PUBLIC = {
    "run": ("train_rounds",),
    "targets": ("Rollout", "rollout_targets"),
    "teacher": ("AnswerTeacher",),
}
"""Module -> the names that it defines, which are loaded on first use."""

if TYPE_CHECKING:
    from vocagnolm.rounds.run import train_rounds
    from vocagnolm.rounds.targets import Rollout, rollout_targets
    from vocagnolm.rounds.teacher import AnswerTeacher

__all__ = ["AnswerTeacher", "Rollout", "rollout_targets", "train_rounds"]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
