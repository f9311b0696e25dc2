"""Spans and alignment: the bridge between two vocabularies. NumPy and tokenizers, no torch."""

import sys
from types import ModuleType
from typing import Any

from vocagnolm.align.alignment import (
    AGGREGATIONS,
    Aggregation,
    Alignment,
    align,
    align_batch,
    carry,
    chunk_align,
    chunk_bounds,
)
from vocagnolm.align.measures import (
    Granularity,
    Overlap,
    Shares,
    character_spans,
    chunk_overlap,
    granularity,
    shares,
    token_overlap,
)
from vocagnolm.align.overlap import VocabularyOverlap, vocabulary_overlap
from vocagnolm.align.spans import TokenSpans
from vocagnolm.align.tokenizer import TextTokenizer, load_tokenizer, token_spans

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "Alignment",
    "Granularity",
    "Overlap",
    "Shares",
    "TextTokenizer",
    "TokenSpans",
    "VocabularyOverlap",
    "align",
    "align_batch",
    "carry",
    "character_spans",
    "chunk_align",
    "chunk_bounds",
    "chunk_overlap",
    "granularity",
    "load_tokenizer",
    "shares",
    "token_overlap",
    "token_spans",
    "vocabulary_overlap",
]


class _CallableModule(ModuleType):
    """`from vocagnolm import align` finds this package or the function, depending on what was
    imported before. Both can be called."""

    def __call__(self, student_spans: Any, teacher_spans: Any) -> Alignment:
        return align(student_spans, teacher_spans)


sys.modules[__name__].__class__ = _CallableModule
