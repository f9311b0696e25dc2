"""How a student's tokens lie over a teacher's on some texts: shares and covered text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import Alignment, shares, token_overlap


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Shares are of the student's tokens; the overlaps are means over its mapped ones, None where
    there is none."""

    student_tokens: int
    teacher_tokens: int
    one_to_one: float
    one_to_many: float
    many_to_one: float
    unmapped: float
    ios: float | None
    iou: float | None


def measure_fit(
    ours: Sequence[NDArray[np.int64]],
    theirs: Sequence[NDArray[np.int64]],
    alignments: Sequence[Alignment],
) -> Fit:
    """Spans of the same texts under both tokenisations, and their alignments."""
    counts = [shares(alignment) for alignment in alignments]
    covers = [token_overlap(*one) for one in zip(ours, theirs, alignments, strict=True)]
    tokens = max(sum(count.tokens for count in counts), 1)
    return Fit(
        student_tokens=sum(len(spans) for spans in ours),
        teacher_tokens=sum(len(spans) for spans in theirs),
        one_to_one=sum(count.one_to_one for count in counts) / tokens,
        one_to_many=sum(count.one_to_many for count in counts) / tokens,
        many_to_one=sum(count.many_to_one for count in counts) / tokens,
        unmapped=sum(count.unmapped for count in counts) / tokens,
        ios=_mean([cover.ios for cover in covers]),
        iou=_mean([cover.iou for cover in covers]),
    )


def _mean(parts: Sequence[NDArray[np.float64]]) -> float | None:
    values = np.concatenate([*parts, np.zeros(0)])
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
