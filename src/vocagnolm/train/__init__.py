"""Training a student with any method of the objective: `train` runs a recipe, `loop.py` is its
loop, and `GuidedCollator` makes batches for any loop."""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

if TYPE_CHECKING:
    from vocagnolm.train.collate import GuidedCollator
    from vocagnolm.train.run import train
    from vocagnolm.train.teacher import OnlineTeacher

# loaded on first use: `folder` is read without torch
_PUBLIC = {
    "run": ("train",),
    "collate": ("GuidedCollator",),
    "teacher": ("OnlineTeacher",),
}

__all__ = ["GuidedCollator", "OnlineTeacher", "train"]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
