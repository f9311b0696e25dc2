"""Training a student with any method of the objective: `train` runs a recipe, and `loop.py` is its
loop. `GuidedTrainer` is the same objective in Hugging Face's Trainer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vocagnolm.train.run import train
    from vocagnolm.train.student import BlockCollator, GuidedCollator
    from vocagnolm.train.teacher import OnlineTeacher
    from vocagnolm.train.trainer import GuidedTrainer

# loaded on first use: `folder` is read without torch
_PUBLIC = {
    "BlockCollator": "vocagnolm.train.student",
    "GuidedCollator": "vocagnolm.train.student",
    "GuidedTrainer": "vocagnolm.train.trainer",
    "OnlineTeacher": "vocagnolm.train.teacher",
    "train": "vocagnolm.train.run",
}

__all__ = ["BlockCollator", "GuidedCollator", "GuidedTrainer", "OnlineTeacher", "train"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'vocagnolm.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
