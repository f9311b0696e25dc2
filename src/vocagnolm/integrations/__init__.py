"""A teacher's guidance in other people's trainers: columns of a dataset (`columns`), Hugging Face's
Trainer and those derived from it (`trainer`), axolotl (`axolotl`)."""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

if TYPE_CHECKING:
    from vocagnolm.integrations.columns import export_columns, guide
    from vocagnolm.integrations.trainer import GuidedTrainer, GuidedTrainerMixin

_PUBLIC = {
    "columns": ("export_columns", "guide"),
    "trainer": ("GuidedTrainer", "GuidedTrainerMixin"),
}

__all__ = ["GuidedTrainer", "GuidedTrainerMixin", "export_columns", "guide"]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
