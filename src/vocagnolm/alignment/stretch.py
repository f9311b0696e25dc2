"""Stretches: the smallest pieces of text at whose ends all tokenisations have a boundary.

The tokens of a stretch spell the same text under every model, so that its whole loss under one is
comparable with its whole loss under another, whatever the vocabularies are. Pure NumPy over byte
spans. Documents that are laid end to end must have a byte between them, so that none ends where
another begins.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vocagnolm.alignment.alignment import Alignment, IntArray, as_spans

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
    boundaries = _boundaries(student)
    for place, spans in enumerate(teacher_spans):
        boundaries = _common(boundaries, _boundaries(as_spans(spans, f"teacher_spans[{place}]")))
    starts, ends = student[:, 0], student[:, 1]
    number = np.searchsorted(boundaries, starts, side="right") - 1
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
    place = np.searchsorted(spans[:, 0], bounds, side="left")
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


def _boundaries(spans: IntArray) -> IntArray:
    with_text = spans[spans[:, 0] < spans[:, 1]]
    flat = with_text.reshape(-1)
    if (flat[1:] >= flat[:-1]).all():  # no overlap: ascending already
        return flat[np.concatenate([[True], flat[1:] != flat[:-1]])] if len(flat) else flat
    return np.unique(flat)


def _common(a: IntArray, b: IntArray) -> IntArray:
    if not len(b):
        return a[:0]
    place = np.minimum(np.searchsorted(b, a), len(b) - 1)
    common: IntArray = a[b[place] == a]
    return common


def _spelled(spans: IntArray, boundaries: IntArray, number: IntArray) -> NDArray[np.bool_]:
    """Whether the tokens of each token's stretch add up to its text."""
    if len(boundaries) < 2:
        return np.zeros(len(number), bool)
    known = number >= 0
    width = np.bincount(
        number[known],
        weights=(spans[known, 1] - spans[known, 0]).astype(np.float64),
        minlength=len(boundaries) - 1,
    )
    whole = width == np.diff(boundaries)
    spelled: NDArray[np.bool_] = known & whole[np.maximum(number, 0)]
    return spelled


def kinds(found: Stretches, teacher_spans: ArrayLike) -> NDArray[np.int8]:
    """Per token the kind of its stretch, a place in `KINDS`."""
    spans = as_spans(teacher_spans, "teacher_spans")
    spans = spans[spans[:, 0] < spans[:, 1]]
    bounds = found.boundaries
    if len(bounds) < 2:
        return np.zeros(len(found.number), np.int8)
    theirs = np.searchsorted(spans[:, 0], bounds[1:]) - np.searchsorted(spans[:, 0], bounds[:-1])
    several_theirs = theirs[found.number] > 1
    several_ours = found.tokens() > 1
    kind = 1 + several_theirs.astype(np.int8) + 2 * several_ours.astype(np.int8)
    return np.where(found.number >= 0, kind, 0).astype(np.int8)
