"""Spans and alignment: the bridge between two vocabularies. NumPy and tokenizers, no torch."""

from vocagnolm.alignment.alignment import (
    AGGREGATIONS,
    Aggregation,
    Alignment,
    TokenSpans,
    align,
    align_batch,
    carry,
    chunk_align,
    chunk_bounds,
)
from vocagnolm.alignment.measures import (
    Granularity,
    Overlap,
    Shares,
    character_spans,
    chunk_overlap,
    granularity,
    shares,
    token_overlap,
)
from vocagnolm.alignment.overlap import VocabularyOverlap, vocabulary_overlap
from vocagnolm.alignment.stretch import (
    KINDS,
    Stretches,
    kinds,
    stretch_alignment,
    stretch_losses,
    stretches,
    whole_sums,
)
from vocagnolm.alignment.tokenizer import TextTokenizer, load_tokenizer, token_spans

__all__ = [
    "AGGREGATIONS",
    "KINDS",
    "Aggregation",
    "Alignment",
    "Granularity",
    "Overlap",
    "Shares",
    "Stretches",
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
    "kinds",
    "load_tokenizer",
    "shares",
    "stretch_alignment",
    "stretch_losses",
    "stretches",
    "token_overlap",
    "token_spans",
    "vocabulary_overlap",
    "whole_sums",
]
