"""How good an alignment is: IoU and IoS (section 2 of the paper), and the kinds of mapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment.alignment import Alignment, IntArray, Spans, as_spans, chunk_bounds
from vocagnolm.alignment.spans import SPACE_MARK
from vocagnolm.alignment.tokenizer import TextTokenizer

Unit = Literal["bytes", "characters"]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Overlap:
    """Intersection over union and intersection over student, per pair; NaN where there is no
    text."""

    iou: FloatArray
    ios: FloatArray

    @property
    def mean_iou(self) -> float:
        return _mean(self.iou)

    @property
    def mean_ios(self) -> float:
        return _mean(self.ios)


def _mean(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def token_overlap(student_spans: Spans, teacher_spans: Spans, alignment: Alignment) -> Overlap:
    """IoU and IoS of every student token with the teacher range that it is mapped to.

    They are 0 for an unmapped token with text, and NaN (ignored in means) for a zero-width token.
    """
    student, teacher = as_spans(student_spans), as_spans(teacher_spans)
    covered = np.zeros((len(student), 2), np.int64)
    mapped = alignment.mapped
    covered[mapped, 0] = teacher[alignment.first[mapped], 0]
    covered[mapped, 1] = teacher[alignment.last[mapped], 1]
    return _overlap(student, covered)


def chunk_overlap(student_spans: Spans, teacher_spans: Spans, n_chunks: int) -> Overlap:
    """IoU and IoS of the text under student chunk i with the text under teacher chunk i."""
    student = _chunk_texts(as_spans(student_spans), n_chunks)
    teacher = _chunk_texts(as_spans(teacher_spans), n_chunks)
    return _overlap(student, teacher)


def _chunk_texts(spans: IntArray, n_chunks: int) -> IntArray:
    bounds = chunk_bounds(len(spans), n_chunks)
    edges = np.append(spans[:, 0], spans[-1:, 1] if len(spans) else [0])
    return np.stack([edges[bounds[:-1]], edges[bounds[1:]]], axis=1)


def _overlap(student: IntArray, teacher: IntArray) -> Overlap:
    start = np.maximum(student[:, 0], teacher[:, 0])
    end = np.minimum(student[:, 1], teacher[:, 1])
    shared = np.maximum(end - start, 0).astype(np.float64)
    student_width = (student[:, 1] - student[:, 0]).astype(np.float64)
    union = student_width + (teacher[:, 1] - teacher[:, 0]) - shared
    with np.errstate(invalid="ignore", divide="ignore"):
        return Overlap(
            iou=np.where(student_width > 0, shared / union, np.nan),
            ios=np.where(student_width > 0, shared / student_width, np.nan),
        )


def character_spans(text: str, spans: Spans) -> IntArray:
    """Convert byte spans to character spans that contain every character touched.

    Tokens that split a character share it, so these spans may overlap.
    """
    encoded = np.frombuffer(text.encode(), np.uint8)
    continues = (encoded & 0xC0) == 0x80
    # how many characters begin before byte i: the character of byte i is begun[i + 1] - 1
    begun = np.concatenate([[0], np.cumsum(~continues)])
    array = as_spans(spans)
    starts, ends = array[:, 0], array[:, 1]
    first = begun[np.minimum(starts + 1, len(encoded))] - (starts < len(encoded))
    result = np.stack([first, begun[ends]], axis=1)
    result[starts == ends, 1] = result[starts == ends, 0]
    return result


@dataclass(frozen=True)
class Shares:
    """How the student's tokens map; the four counts add up to all tokens.

    one_to_one: one teacher token that contains no other student token. many_to_one: one teacher
    token, shared with other student tokens. one_to_many: two or more teacher tokens.
    """

    tokens: int
    one_to_one: int
    one_to_many: int
    many_to_one: int
    unmapped: int

    @property
    def mapped(self) -> int:
        return self.tokens - self.unmapped


def shares(alignment: Alignment) -> Shares:
    mapped = alignment.mapped
    first, last = alignment.first[mapped], alignment.last[mapped]
    # ranges are monotone, so only neighbours can share a teacher token
    shared = np.zeros(len(first), bool)
    touching = last[:-1] >= first[1:]
    shared[:-1] |= touching
    shared[1:] |= touching
    single = first == last
    return Shares(
        tokens=len(alignment),
        one_to_one=int((single & ~shared).sum()),
        one_to_many=int((~single).sum()),
        many_to_one=int((single & shared).sum()),
        unmapped=int((~mapped).sum()),
    )


@dataclass(frozen=True)
class Granularity:
    """One point of the paper's Figure 3: mean IoU and IoS of all chunk pairs of a corpus."""

    n_chunks: int | None
    """None: token-level alignment, the reference line."""
    iou: float
    ios: float


def granularity(
    documents: Sequence[tuple[Any, Any, Alignment]], n_chunks: Sequence[int]
) -> list[Granularity]:
    """IoU and IoS against the number of chunks, with token-level alignment last.

    `documents` holds (student spans, teacher spans, alignment) per document.
    """
    points = []
    for n in (*n_chunks, None):
        overlaps = [
            token_overlap(*document) if n is None else chunk_overlap(*document[:2], n)
            for document in documents
        ]
        iou = np.concatenate([np.zeros(0), *(overlap.iou for overlap in overlaps)])
        ios = np.concatenate([np.zeros(0), *(overlap.ios for overlap in overlaps)])
        points.append(Granularity(n_chunks=n, iou=_mean(iou), ios=_mean(ios)))
    return points


# ---- overlap of vocabularies ----


@dataclass(frozen=True)
class VocabularyOverlap:
    """Shared entries as a fraction of the teacher's vocabulary.

    raw: equal token strings, as in the paper. marks: the same with the space marks `▁` and `Ġ`
    treated as equal. bytes: equal bytes of text, whatever the spelling.
    """

    raw: float
    marks: float
    bytes: float
    shared_raw: int


def vocabulary_overlap(student: TextTokenizer, teacher: TextTokenizer) -> VocabularyOverlap:
    ours, theirs = set(student.vocabulary), set(teacher.vocabulary)
    shared = len(ours & theirs)
    marked = [{token.replace("Ġ", SPACE_MARK) for token in tokens} for tokens in (ours, theirs)]
    texts = [
        {tokenizer.bytes_of(index) for index in tokenizer.vocabulary.values()} - {None}
        for tokenizer in (student, teacher)
    ]
    return VocabularyOverlap(
        raw=shared / max(len(theirs), 1),
        marks=len(marked[0] & marked[1]) / max(len(marked[1]), 1),
        bytes=len(texts[0] & texts[1]) / max(len(texts[1]), 1),
        shared_raw=shared,
    )
