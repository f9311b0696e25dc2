"""Train a language model with any teacher, even if their tokenizers differ.

The public names are loaded on first use, so that `import vocagnolm` is fast and the command line
starts without torch.
"""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

__version__ = "0.2.0.dev0"

_PUBLIC = {
    "alignment": (
        *("Alignment", "TextTokenizer", "TokenSpans", "align", "align_batch", "carry"),
        *("chunk_align", "load_tokenizer", "token_spans"),
    ),
    "alignment.picture": ("align_text",),
    "integrations": ("GuidedTrainer", "GuidedTrainerMixin", "export_columns", "guide"),
    "errors": ("VocagnolmError",),
    "questions": ("Grade", "grade"),
    "objective": ("Head", "ObjectiveConfig", "Targets", "guided_loss", "objective_loss"),
    "recipe": ("Recipe", "load_recipe"),
    "store": ("LossStore",),
    "train": ("GuidedCollator",),
    "score": ("ScoreSettings", "WriteSettings", "score_corpus", "write_answers"),
}
"""Module -> the public names that it defines."""

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
    from vocagnolm.alignment.picture import align_text
    from vocagnolm.errors import VocagnolmError
    from vocagnolm.integrations import GuidedTrainer, GuidedTrainerMixin, export_columns, guide
    from vocagnolm.objective import Head, ObjectiveConfig, Targets, guided_loss, objective_loss
    from vocagnolm.questions import Grade, grade
    from vocagnolm.recipe import Recipe, load_recipe
    from vocagnolm.score import ScoreSettings, WriteSettings, score_corpus, write_answers
    from vocagnolm.store import LossStore
    from vocagnolm.train import GuidedCollator

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
    "GuidedTrainerMixin",
    "export_columns",
    "guide",
    "ScoreSettings",
    "WriteSettings",
    "score_corpus",
    "write_answers",
    "align",
    "align_batch",
    "align_text",
    "carry",
    "chunk_align",
    "load_tokenizer",
    "token_spans",
]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
