"""Train a language model with any teacher, even if their tokenizers differ.

The public names are loaded on first use, so that `import vocagnolm` is fast and the command line
starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

# public name -> the module that defines it
_PUBLIC = {
    "Alignment": "vocagnolm.alignment",
    "TextTokenizer": "vocagnolm.alignment",
    "TokenSpans": "vocagnolm.alignment",
    "align": "vocagnolm.alignment",
    "align_batch": "vocagnolm.alignment",
    "carry": "vocagnolm.alignment",
    "chunk_align": "vocagnolm.alignment",
    "load_tokenizer": "vocagnolm.alignment",
    "token_spans": "vocagnolm.alignment",
    "export_columns": "vocagnolm.columns",
    "guide": "vocagnolm.columns",
    "VocagnolmError": "vocagnolm.errors",
    "Grade": "vocagnolm.evaluate",
    "grade": "vocagnolm.evaluate",
    "Head": "vocagnolm.objective",
    "ObjectiveConfig": "vocagnolm.objective",
    "Targets": "vocagnolm.objective",
    "guided_loss": "vocagnolm.objective",
    "objective_loss": "vocagnolm.objective",
    "Recipe": "vocagnolm.recipe",
    "load_recipe": "vocagnolm.recipe",
    "LossStore": "vocagnolm.store",
    "GuidedCollator": "vocagnolm.train",
    "GuidedTrainer": "vocagnolm.train",
    "ScoreSettings": "vocagnolm.score",
    "score_corpus": "vocagnolm.score",
}

if TYPE_CHECKING:
    from vocagnolm.alignment import (
        Alignment,
        TextTokenizer,
        TokenSpans,
        align,
        align_batch,
        carry,
        chunk_align,
        load_tokenizer,
        token_spans,
    )
    from vocagnolm.columns import export_columns, guide
    from vocagnolm.errors import VocagnolmError
    from vocagnolm.evaluate import Grade, grade
    from vocagnolm.objective import Head, ObjectiveConfig, Targets, guided_loss, objective_loss
    from vocagnolm.recipe import Recipe, load_recipe
    from vocagnolm.score import ScoreSettings, score_corpus
    from vocagnolm.store import LossStore
    from vocagnolm.train import GuidedCollator, GuidedTrainer

__all__ = [  # noqa: RUF022  (grouped as in _PUBLIC)
    "__version__",
    "Alignment",
    "TextTokenizer",
    "TokenSpans",
    "VocagnolmError",
    "Grade",
    "grade",
    "Head",
    "ObjectiveConfig",
    "Targets",
    "guided_loss",
    "objective_loss",
    "Recipe",
    "load_recipe",
    "LossStore",
    "GuidedCollator",
    "GuidedTrainer",
    "export_columns",
    "guide",
    "ScoreSettings",
    "score_corpus",
    "align",
    "align_batch",
    "carry",
    "chunk_align",
    "load_tokenizer",
    "token_spans",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'vocagnolm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
