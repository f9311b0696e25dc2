"""Training a student with any method of the objective: `train` runs a recipe, and `loop.py` is its
loop. `GuidedTrainer` is the same objective in Hugging Face's Trainer."""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

if TYPE_CHECKING:
    from vocagnolm.train.run import train
    from vocagnolm.train.student import BlockCollator, GuidedCollator
    from vocagnolm.train.teacher import OnlineTeacher
    from vocagnolm.train.trainer import GuidedTrainer

# loaded on first use: `folder` is read without torch
_PUBLIC = {
    "run": ("train",),
    "student": ("BlockCollator", "GuidedCollator"),
    "teacher": ("OnlineTeacher",),
    "trainer": ("GuidedTrainer",),
}

__all__ = ["BlockCollator", "GuidedCollator", "GuidedTrainer", "OnlineTeacher", "train"]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
