"""Training a student by any method of the objective, on Hugging Face's Trainer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vocagnolm.train.collate import BlockCollator
    from vocagnolm.train.online import OnlineTeacher
    from vocagnolm.train.run import train
    from vocagnolm.train.trainer import GuidedTrainer

# loaded on first use: `schedule` and `check` are read without torch
_PUBLIC = {
    "BlockCollator": "vocagnolm.train.collate",
    "GuidedTrainer": "vocagnolm.train.trainer",
    "OnlineTeacher": "vocagnolm.train.online",
    "train": "vocagnolm.train.run",
}

__all__ = ["BlockCollator", "GuidedTrainer", "OnlineTeacher", "train"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'vocagnolm.train' has no attribute {name!r}")
