"""Token-level lexical alignment: which teacher tokens cover each student token; and stretches, the
smallest pieces of text at whose ends all tokenisations have a boundary.

Pure NumPy over byte spans: no tokenizer and no torch. Equation numbers refer to arXiv 2503.19123.
"""

from __future__ import annotations  # help() shows `Spans`, not everything that NumPy makes of it

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vocagnolm.recipe.methods import chunk_bound

IntArray = NDArray[np.int64]
Aggregation = Literal["max", "mean", "sum"]
AGGREGATIONS: tuple[Aggregation, ...] = ("max", "mean", "sum")


@dataclass(frozen=True)
class TokenSpans:
    """The tokens of a text: `ids` [N] and half-open `spans` [N, 2] in UTF-8 bytes."""

    ids: NDArray[np.int32]
    spans: IntArray
    n_bytes: int
    lost_bytes: int
    """Number of bytes of the text that no token covers."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def exact(self) -> bool:
        """Whether the spans tile the text: every byte is in exactly one token."""
        return self.lost_bytes == 0

    @property
    def token_bytes(self) -> IntArray:
        """Byte length of every token."""
        return self.spans[:, 1] - self.spans[:, 0]

    def inside(self, ranges: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
        """Mask [N] of the tokens that overlap one of the byte ranges."""
        mask = np.zeros(len(self), bool)
        for start, stop in ranges:
            mask |= (self.spans[:, 0] < stop) & (self.spans[:, 1] > start)
        return mask


Spans = ArrayLike | TokenSpans
"""What every function here takes: an integer array [N, 2], or tokens with their spans."""


@dataclass(frozen=True)
class Alignment:
    """For each student token, the smallest range `first..last` (inclusive) of teacher tokens that
    covers it, or -1, -1."""

    first: IntArray
    last: IntArray
    teacher_tokens: int | None = None
    """Number of teacher tokens, if known; `carry` expects as many values."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def mapped(self) -> NDArray[np.bool_]:
        """Mask of the student tokens that have teacher tokens."""
        return self.first >= 0


def as_spans(spans: Spans, name: str = "spans") -> IntArray:
    """`[N, 2]` int64 with non-decreasing starts and ends, or a ValueError that says why not."""
    array = _rectangle(spans.spans if isinstance(spans, TokenSpans) else spans, name)
    if array.dtype == object and array.size and isinstance(array.flat[0], TokenSpans):
        raise ValueError(
            f"{name} holds {array.size} documents: align takes the tokens of one, align_batch "
            "those of many"
        )
    if array.size == 0:
        return np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be an integer array [N, 2], got {array.dtype} {array.shape}")
    array = array.astype(np.int64, copy=False)
    starts, ends = array[:, 0], array[:, 1]
    # as one flat row, start and end by turns: spans without overlap only ever go up
    flat = array.reshape(-1)
    if (flat[1:] >= flat[:-1]).all():
        return array
    wrong = ends < starts
    wrong[1:] |= (starts[1:] < starts[:-1]) | (ends[1:] < ends[:-1])
    if wrong.any():
        i = int(np.argmax(wrong))
        before = f" after [{starts[i - 1]}, {ends[i - 1]})" if i else ""
        raise ValueError(f"{name}[{i}] = [{starts[i]}, {ends[i]}){before} runs backwards")
    return array


def _rectangle(rows: Any, name: str) -> NDArray[Any]:
    """Convert rows to an array; the error for rows of unequal length names the first odd one."""
    try:
        return np.asarray(rows)
    except ValueError:
        lengths = [len(row) if hasattr(row, "__len__") else 0 for row in rows]
        odd = next((n for n, length in enumerate(lengths) if length != lengths[0]), None)
        if odd is None:
            raise
        raise ValueError(
            f"{name}[{odd}] has {lengths[odd]} numbers where {name}[0] has {lengths[0]}: the rows "
            "must be of one length"
        ) from None


def align(student_spans: Spans, teacher_spans: Spans) -> Alignment:
    """Map every student token to the smallest range of teacher tokens that covers the same bytes.

        student, teacher = load_tokenizer("student/"), load_tokenizer("teacher/")
        mapping = align(student.spans(text), teacher.spans(text))
        guidance = carry(mapping, teacher_nll)

    `first` is the first teacher token that ends after the student token starts, `last` the last one
    that starts before it ends. This takes two binary searches per token, O(N log M). Zero-width
    tokens have no text: student tokens of this kind are unmapped, and teacher tokens of this kind
    never open or close a range. A student token whose bytes no teacher token covers is unmapped.
    Tokens of texts of unequal length are refused; plain arrays do not know their text.
    """
    _require_one_text(student_spans, teacher_spans)
    return _search(
        as_spans(student_spans, "student_spans"), as_spans(teacher_spans, "teacher_spans")
    )


def _require_one_text(student: Spans, teacher: Spans, document: str = "") -> None:
    """Refuse tokens of two texts, where both know how long their text is."""
    if not (isinstance(student, TokenSpans) and isinstance(teacher, TokenSpans)):
        return
    if student.n_bytes != teacher.n_bytes:
        raise ValueError(
            f"{document}the student's tokens are of a text of {student.n_bytes:,} bytes, the "
            f"teacher's of one of {teacher.n_bytes:,}: give the tokens of one text under both "
            "tokenizers"
        )


def _search(student: IntArray, teacher: IntArray) -> Alignment:
    starts, ends = teacher[:, 0], teacher[:, 1]
    with_text: IntArray | None = None
    if len(teacher) and (starts == ends).any():
        with_text = np.flatnonzero(starts < ends)
        starts, ends = starts[with_text], ends[with_text]
    first = ranks(ends, student[:, 0], side="right")
    last = ranks(starts, student[:, 1], side="left") - 1
    unmapped = (first > last) | (student[:, 0] == student[:, 1])
    if with_text is not None and len(with_text):
        # out-of-range entries are unmapped and overwritten below
        first = with_text[np.minimum(first, len(with_text) - 1)]
        last = with_text[last]
    first[unmapped] = -1
    last[unmapped] = -1
    return Alignment(first, last, len(teacher))


def ranks(values: IntArray, queries: IntArray, *, side: Literal["left", "right"]) -> IntArray:
    """`np.searchsorted` in places of a text. Tokens stand close together: counting them from byte
    to byte takes less than half the time of searching. Where they do not, they are searched."""
    low, high = (int(values[0]), int(values[-1])) if len(values) else (0, 0)
    if not dense(high - low, len(values) + len(queries)):
        return np.searchsorted(values, queries, side=side)
    up_to = np.zeros(high - low + 2, np.int64)
    np.cumsum(np.bincount(values - low, minlength=high - low + 1), out=up_to[1:])
    return np.take(up_to, queries - (low - (side == "right")), mode="clip")


def dense(n_bytes: int, n_tokens: int) -> bool:
    """Whether work for every byte costs no more than work for every token."""
    return n_bytes <= 16 * n_tokens


def align_batch(student_spans: Sequence[Spans], teacher_spans: Sequence[Spans]) -> list[Alignment]:
    """`align` for many documents, with a single search over their concatenated bytes."""
    if len(student_spans) != len(teacher_spans):
        raise ValueError(
            f"{len(student_spans)} student documents against {len(teacher_spans)} teacher documents"
        )
    if not student_spans:
        return []
    for i, (student, teacher) in enumerate(zip(student_spans, teacher_spans, strict=True)):
        _require_one_text(student, teacher, f"document {i}: ")
    students = [as_spans(spans, f"student_spans[{i}]") for i, spans in enumerate(student_spans)]
    teachers = [as_spans(spans, f"teacher_spans[{i}]") for i, spans in enumerate(teacher_spans)]
    n_student, n_teacher = [len(s) for s in students], [len(t) for t in teachers]
    ends = [max(_end(s), _end(t)) for s, t in zip(students, teachers, strict=True)]
    origins = np.cumsum([0, *ends[:-1]])
    together = _search(
        np.concatenate(students) + np.repeat(origins, n_student)[:, None],
        np.concatenate(teachers) + np.repeat(origins, n_teacher)[:, None],
    )
    before = np.repeat(np.cumsum([0, *n_teacher[:-1]]), n_student)
    before[together.first < 0] = 0
    first, last = together.first - before, together.last - before
    cuts = np.cumsum([0, *n_student]).tolist()
    pieces = zip(pairwise(cuts), n_teacher, strict=True)
    return [Alignment(first[a:b], last[a:b], count) for (a, b), count in pieces]


def _end(spans: IntArray) -> int:
    return int(spans[-1, 1]) if len(spans) else 0


def carry(
    alignment: Alignment, teacher_values: ArrayLike, how: Aggregation = "max"
) -> NDArray[np.floating[Any]]:
    """Assign one number per teacher token to the student's tokens (Phi of equation 2).

    A NaN teacher value is missing and is ignored. The result is NaN where the token is unmapped or
    all values of its range are missing. Half-precision input is aggregated in float32.
    """
    values = _rectangle(teacher_values, "teacher_values")
    if how not in AGGREGATIONS:
        raise ValueError(f"how must be one of {', '.join(AGGREGATIONS)}, got {how!r}")
    if values.ndim != 1:
        raise ValueError(f"teacher_values must have one dimension, got shape {values.shape}")
    if values.dtype not in (np.float32, np.float64):
        values = values.astype(np.float32 if values.dtype == np.float16 else np.float64)
    highest = int(alignment.last.max(initial=-1))
    if highest >= len(values):
        raise ValueError(
            f"the alignment points to teacher token {highest}, "
            f"but there are {len(values)} teacher values"
        )
    if alignment.teacher_tokens not in (None, len(values)):
        raise ValueError(
            f"the alignment is to {alignment.teacher_tokens} teacher tokens, but there are "
            f"{len(values)} teacher values: they belong to another text or tokenizer"
        )
    first, last = alignment.first, alignment.last
    if not len(values):
        return np.full(len(alignment), np.nan, values.dtype)
    result = np.take(values, first, mode="wrap")  # -1 is overwritten
    result[first < 0] = np.nan
    several = np.flatnonzero(first < last)
    if len(several):
        result[several] = _reduce(values, first[several], last[several], how)
    return result


def _reduce(
    values: NDArray[Any], first: IntArray, last: IntArray, how: Aggregation
) -> NDArray[Any]:
    missing = np.isnan(values)
    neutral = -np.inf if how == "max" else 0.0
    # one neutral element behind the end, so that `last + 1` is always a place
    padded = np.append(np.where(missing, neutral, values), values.dtype.type(neutral))
    bounds = np.stack([first, last + 1], axis=1).ravel()
    operation = np.maximum if how == "max" else np.add
    reduced = operation.reduceat(padded, bounds)[::2]
    present_before = np.concatenate([[0], np.cumsum(~missing)])
    present = present_before[last + 1] - present_before[first]
    if how == "mean":
        reduced = reduced / np.maximum(present, 1).astype(values.dtype)
    return np.where(present > 0, reduced, np.nan).astype(values.dtype)


def chunk_align(n_student: int, n_teacher: int, n_chunks: int) -> Alignment:
    """The coarse baseline: cuts both sequences into `n_chunks` equal chunks and maps chunk i to
    chunk i.

    Every student token of chunk i gets the whole teacher chunk i. With fewer teacher tokens than
    chunks, some teacher chunks are empty and their student tokens are unmapped.
    """
    if n_chunks < 1:
        raise ValueError(f"n_chunks must be at least 1, got {n_chunks}")
    student, teacher = chunk_bounds(n_student, n_chunks), chunk_bounds(n_teacher, n_chunks)
    chunk = np.repeat(np.arange(n_chunks), np.diff(student))
    first, last = teacher[chunk], teacher[chunk + 1] - 1
    empty = first > last
    return Alignment(np.where(empty, -1, first), np.where(empty, -1, last))


def chunk_bounds(n_tokens: int, n_chunks: int) -> IntArray:
    """Starts of `n_chunks` equal chunks, and the end. Lengths differ by at most one token."""
    bounds: IntArray = chunk_bound(np.arange(n_chunks + 1, dtype=np.int64), n_tokens, n_chunks)
    return bounds


# ---- stretches ----

# The tokens of a stretch spell the same text under every model, so that its whole loss under one is
# comparable with its whole loss under another, whatever the vocabularies are. Documents that are
# laid end to end must have a byte between them, so that none ends where another begins.

KINDS = ("unmapped", "1:1", "1:N", "N:1", "N:M")
"""Student tokens : teacher tokens of a stretch."""


@dataclass(frozen=True)
class Stretches:
    """The stretches of one tokenization with respect to others."""

    boundaries: IntArray
    """Bytes at which all tokenizations have a boundary, ascending. Stretch n is the text from
    `boundaries[n]` to `boundaries[n + 1]`."""
    number: IntArray
    """The stretch of each token of the first tokenization; -1 for a token without text, and where
    the tokens of a stretch do not cover all of it."""

    @property
    def begins(self) -> NDArray[np.bool_]:
        """Mask of the tokens that begin a stretch."""
        inside = np.flatnonzero(self.number >= 0)
        first = np.ones(len(inside), bool)
        first[1:] = self.number[inside[1:]] != self.number[inside[:-1]]
        begins = np.zeros(len(self.number), bool)
        begins[inside[first]] = True
        return begins

    def tokens(self) -> IntArray:
        """For each token, the number of tokens in its stretch; 0 if it has none."""
        known = self.number >= 0
        counts = np.bincount(self.number[known], minlength=max(len(self.boundaries) - 1, 0))
        return np.where(known, counts[self.number] if len(counts) else 0, 0)


def stretches(student_spans: ArrayLike, *teacher_spans: ArrayLike) -> Stretches:
    """The stretches of the student's tokens with respect to one or several teachers."""
    student = as_spans(student_spans, "student_spans")
    teachers = [as_spans(spans, f"teacher_spans[{n}]") for n, spans in enumerate(teacher_spans)]
    boundaries = _common_boundaries([student, *teachers])
    starts, ends = student[:, 0], student[:, 1]
    number = ranks(boundaries, starts, side="right") - 1
    inside = (number >= 0) & (starts < ends)
    inside &= np.take(boundaries, number + 1, mode="clip") >= ends if len(boundaries) else False
    number = np.where(inside, number, -1)
    return Stretches(boundaries, np.where(_spelled(student, boundaries, number), number, -1))


def stretch_losses(
    token_stretches: Stretches, teacher_spans: ArrayLike, teacher_nll: ArrayLike
) -> NDArray[np.float64]:
    """The teacher's total loss on the stretch of each token. NaN if the token has no stretch, if
    the teacher's tokens do not cover all of it, or if one of their losses is missing."""
    spans = as_spans(teacher_spans, "teacher_spans")
    if len(np.asarray(teacher_nll)) != len(spans):
        raise ValueError(f"{len(np.asarray(teacher_nll))} teacher losses for {len(spans)} tokens")
    return whole_sums(stretch_alignment(token_stretches, spans), teacher_nll)


def stretch_alignment(token_stretches: Stretches, teacher_spans: ArrayLike) -> Alignment:
    """The teacher tokens of each token's stretch; -1 if it has none, or if the teacher's tokens do
    not cover all of it. A teacher token without text counts for the text that follows it."""
    spans = as_spans(teacher_spans, "teacher_spans")
    bounds = token_stretches.boundaries
    if len(bounds) < 2 or not len(spans):
        return Alignment(
            np.full(len(token_stretches.number), -1), np.full(len(token_stretches.number), -1)
        )
    # tokens that start inside a stretch; those without text at its end belong to the next
    index = ranks(spans[:, 0], bounds, side="left")
    covered = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
    spelled = np.diff(covered[index]) == np.diff(bounds)
    known = (token_stretches.number >= 0) & spelled[token_stretches.number]
    return Alignment(
        np.where(known, index[:-1][token_stretches.number], -1),
        np.where(known, index[1:][token_stretches.number] - 1, -1),
    )


def whole_sums(ranges: Alignment, values: ArrayLike) -> NDArray[np.float64]:
    """For each token, the sum over its range; NaN if there is no range or one of its values is
    missing."""
    given = np.asarray(values, np.float64)
    missing = np.isnan(given)
    total = np.concatenate([[0.0], np.cumsum(np.where(missing, 0.0, given))])
    gaps = np.concatenate([[0], np.cumsum(missing)])
    first, behind = ranges.first, ranges.last + 1
    whole = ranges.mapped & (gaps[behind] == gaps[first])
    return np.where(whole, np.maximum(total[behind] - total[first], 0.0), np.nan)


def _with_text(spans: IntArray) -> IntArray:
    return np.take(spans, np.flatnonzero(spans[:, 0] < spans[:, 1]), axis=0)


def _common_boundaries(tokenisations: Sequence[IntArray]) -> IntArray:
    """Bytes at which all tokenizations have a boundary; tokens without text have none."""
    ends = [(int(s[0, 0]), int(s[:, 1].max())) for s in tokenisations if len(s)]
    if len(ends) < len(tokenisations):
        return np.zeros(0, np.int64)
    low, high = min(a for a, _ in ends), max(b for _, b in ends)
    if not dense(high - low, sum(map(len, tokenisations))):
        each = [np.unique(_with_text(spans)) for spans in tokenisations]
        return reduce(partial(np.intersect1d, assume_unique=True), each)
    common = np.ones(high - low + 1, bool)
    for spans in tokenisations:
        bounds = _with_text(spans) - low
        here = np.zeros(len(common), bool)
        here[bounds[:, 0]] = True
        here[bounds[:, 1]] = True
        common &= here
    return np.flatnonzero(common) + low


def _spelled(spans: IntArray, boundaries: IntArray, number: IntArray) -> NDArray[np.bool_]:
    """Whether the tokens of each token's stretch add up to its text."""
    if len(boundaries) < 2:
        return np.zeros(len(number), bool)
    width = np.bincount(
        number + 1,  # what is in no stretch comes first
        weights=spans[:, 1] - spans[:, 0],
        minlength=len(boundaries),
    )
    whole = np.append(False, width[1:] == np.diff(boundaries))
    spelled: NDArray[np.bool_] = whole[number + 1]
    return spelled


def kinds(token_stretches: Stretches, teacher_spans: ArrayLike) -> NDArray[np.int8]:
    """For each token, the kind of its stretch as an index into `KINDS`."""
    spans = _with_text(as_spans(teacher_spans, "teacher_spans"))
    bounds = token_stretches.boundaries
    if len(bounds) < 2:
        return np.zeros(len(token_stretches.number), np.int8)
    several_theirs = (np.diff(ranks(spans[:, 0], bounds, side="left")) > 1)[token_stretches.number]
    several_ours = token_stretches.tokens() > 1
    kind = 1 + several_theirs.astype(np.int8) + 2 * several_ours.astype(np.int8)
    return np.where(token_stretches.number >= 0, kind, 0).astype(np.int8)
