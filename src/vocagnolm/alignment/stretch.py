"""Stretches: the smallest pieces of text at whose ends all tokenisations have a boundary.

The tokens of a stretch spell the same text under every model, so that its whole loss under one is
comparable with its whole loss under another, whatever the vocabularies are. Pure NumPy over byte
spans. Documents that are laid end to end must have a byte between them, so that none ends where
another begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vocagnolm.alignment.alignment import Alignment, IntArray, as_spans, dense, ranks

KINDS = ("unmapped", "1:1", "1:N", "N:1", "N:M")
"""Student tokens : teacher tokens of a stretch."""


@dataclass(frozen=True)
class Stretches:
    """Of one tokenisation against others."""

    boundaries: IntArray
    """Bytes at which all tokenisations have a boundary, ascending: stretch n is the text from
    `boundaries[n]` to `boundaries[n + 1]`."""
    number: IntArray
    """Per token of the first tokenisation its stretch; -1 for a token without text, and where the
    tokens of a stretch do not spell all of it."""

    @property
    def begins(self) -> NDArray[np.bool_]:
        """Tokens that begin a stretch."""
        inside = np.flatnonzero(self.number >= 0)
        first = np.ones(len(inside), bool)
        first[1:] = self.number[inside[1:]] != self.number[inside[:-1]]
        begins = np.zeros(len(self.number), bool)
        begins[inside[first]] = True
        return begins

    def tokens(self) -> IntArray:
        """Per token how many tokens its stretch has; 0 where it has none."""
        known = self.number >= 0
        counts = np.bincount(self.number[known], minlength=max(len(self.boundaries) - 1, 0))
        return np.where(known, counts[self.number] if len(counts) else 0, 0)


def stretches(student_spans: ArrayLike, *teacher_spans: ArrayLike) -> Stretches:
    """The stretches of the student's tokens against those of one teacher, or of several."""
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
    found: Stretches, teacher_spans: ArrayLike, teacher_nll: ArrayLike
) -> NDArray[np.float64]:
    """A teacher's loss of every token's stretch, the sum over its teacher tokens; NaN where the
    token has none, where the teacher's tokens do not spell all of it, or where one of their
    losses is missing."""
    spans = as_spans(teacher_spans, "teacher_spans")
    if len(np.asarray(teacher_nll)) != len(spans):
        raise ValueError(f"{len(np.asarray(teacher_nll))} teacher losses for {len(spans)} tokens")
    return whole_sums(stretch_alignment(found, spans), teacher_nll)


def stretch_alignment(found: Stretches, teacher_spans: ArrayLike) -> Alignment:
    """Per token the teacher tokens of its stretch; -1 where it has none, and where the teacher's
    tokens do not spell all of it. A teacher token without text counts for the text behind it."""
    spans = as_spans(teacher_spans, "teacher_spans")
    bounds = found.boundaries
    if len(bounds) < 2 or not len(spans):
        return Alignment(np.full(len(found.number), -1), np.full(len(found.number), -1))
    # tokens that start inside a stretch; those without text at its end belong to the next
    place = ranks(spans[:, 0], bounds, side="left")
    covered = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
    spelled = np.diff(covered[place]) == np.diff(bounds)
    known = (found.number >= 0) & spelled[found.number]
    return Alignment(
        np.where(known, place[:-1][found.number], -1),
        np.where(known, place[1:][found.number] - 1, -1),
    )


def whole_sums(ranges: Alignment, values: ArrayLike) -> NDArray[np.float64]:
    """Per token the sum over its range; NaN where there is none or one of its values is missing."""
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
    """Bytes at which all of them have a boundary; tokens without text have none."""
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


def kinds(found: Stretches, teacher_spans: ArrayLike) -> NDArray[np.int8]:
    """Per token the kind of its stretch, a place in `KINDS`."""
    spans = _with_text(as_spans(teacher_spans, "teacher_spans"))
    bounds = found.boundaries
    if len(bounds) < 2:
        return np.zeros(len(found.number), np.int8)
    several_theirs = (np.diff(ranks(spans[:, 0], bounds, side="left")) > 1)[found.number]
    several_ours = found.tokens() > 1
    kind = 1 + several_theirs.astype(np.int8) + 2 * several_ours.astype(np.int8)
    return np.where(found.number >= 0, kind, 0).astype(np.int8)
