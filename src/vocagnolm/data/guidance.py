"""From teachers' losses to the student's tokens: laid over one axis of bytes, carried, combined.

Pure functions over arrays, all documents of a part at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import KINDS, Stretches, TokenSpans, kinds, stretch_losses, stretches
from vocagnolm.alignment.alignment import Aggregation

TeacherLosses = tuple[NDArray[Any], NDArray[Any]]
"""Byte lengths of the teacher's tokens, which tile the document, and their nll."""
Combine = Literal["min", "mean", "median", "max", "best_document"]
_NUMPY: dict[str, Any] = {
    "min": np.nanmin,
    "mean": np.nanmean,
    "median": np.nanmedian,
    "max": np.nanmax,
}


@dataclass(frozen=True, kw_only=True)
class GuidancePlan:
    """What blocks hold of the teachers."""

    aggregation: Aggregation = "max"
    combine: Combine = "min"
    stretch: bool = False
    """Also the losses of whole stretches."""
    teacher_losses: bool = False
    """Also all losses of the (one) teacher's own tokens."""


@dataclass(frozen=True)
class Laid:
    """The student's tokens of some documents, laid end to end with a byte between two documents."""

    spans: NDArray[np.int64]
    document: NDArray[np.int64]
    """Per token its document."""
    origins: NDArray[np.int64]
    """Where each document begins."""


@dataclass(frozen=True)
class LaidTeacher:
    """One teacher's tokens of the same documents, where it has them."""

    spans: NDArray[np.int64]
    nll: NDArray[Any]
    bits: NDArray[np.float64]
    """Per document its nats per byte; infinite where it has none."""
    packed: NDArray[np.uint32] | None = None
    """[M, K] Alternatives, where they are wanted."""


def lay(students: Sequence[TokenSpans]) -> Laid:
    widths = np.array([student.n_bytes for student in students], np.int64)
    origins = np.concatenate([[0], np.cumsum(widths + 1)])[:-1].astype(np.int64)
    counts = [len(student) for student in students]
    return Laid(
        end_to_end([student.spans for student in students], origins),
        np.repeat(np.arange(len(students)), counts),
        origins,
    )


def lay_teacher(
    entries: Sequence[TeacherLosses | None],
    ours: Laid,
    alternatives: Sequence[NDArray[np.uint32] | None] | None = None,
) -> LaidTeacher:
    held = [(entry, origin) for entry, origin in zip(entries, ours.origins, strict=True) if entry]
    spans = end_to_end(
        [tiling(token_bytes) for (token_bytes, _), _ in held],
        np.array([origin for _, origin in held], np.int64),
    )
    nll = np.concatenate([nll for (_, nll), _ in held]) if held else np.zeros(0, np.float32)
    bits = np.array([np.inf if entry is None else _nats_per_byte(*entry) for entry in entries])
    packed = None
    if alternatives is not None:
        known = [rows for rows in alternatives if rows is not None]
        packed = np.concatenate(known) if known else np.zeros((0, 1), np.uint32)
    return LaidTeacher(spans, nll, bits, packed)


def _nats_per_byte(token_bytes: NDArray[Any], nll: NDArray[Any]) -> float:
    known = np.isfinite(nll)
    covered = float(np.asarray(token_bytes)[known].sum())
    return float(np.asarray(nll, np.float64)[known].sum() / covered) if covered else np.inf


def combine(
    carried: Sequence[NDArray[Any]], theirs: Sequence[LaidTeacher], ours: Laid, how: Combine
) -> NDArray[Any]:
    """One number per token out of each teacher's; what one lacks takes the others' values."""
    if len(carried) == 1:
        return carried[0]
    table = np.stack(carried)
    if how == "best_document":
        chosen = np.stack([teacher.bits for teacher in theirs]).argmin(0)[ours.document]
        best = np.take_along_axis(table, chosen[None], axis=0)[0]
        return np.where(np.isnan(best), _over_teachers(table, "min"), best)
    return _over_teachers(table, how)


def _over_teachers(table: NDArray[Any], how: str) -> NDArray[Any]:
    unknown = np.isnan(table).all(0)
    filled = np.where(unknown, 0.0, table)  # columns of NaN alone would warn
    return np.where(unknown, np.nan, _NUMPY[how](filled, axis=0))


def stretch_guidance(
    ours: Laid, theirs: Sequence[LaidTeacher], how: Combine
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Per token the combined loss of its stretch, and whether it goes on with the stretch of the
    token before it. Several teachers are combined over stretches that all of them share; a
    document that one lacks has the stretches of the others."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    bits = np.stack([teacher.bits for teacher in theirs])
    has = np.isfinite(bits)
    if how == "best_document":  # its own stretches, not those that it shares with the others
        has &= np.arange(len(theirs))[:, None] == bits.argmin(0)
    for document in range(has.shape[1]):
        groups.setdefault(tuple(has[:, document].tolist()), []).append(document)
    losses = np.full(len(ours.spans), np.nan)
    begins = np.zeros(len(ours.spans), bool)
    for present, documents in groups.items():
        here = np.isin(ours.document, documents)
        among = [teacher for teacher, there in zip(theirs, present, strict=True) if there]
        if not among:
            continue
        part = Laid(ours.spans[here], ours.document[here], ours.origins)
        found = stretches(part.spans, *(teacher.spans for teacher in among))
        carried = [stretch_losses(found, teacher.spans, teacher.nll) for teacher in among]
        losses[here] = combine(carried, among, part, how)
        begins[here] = found.begins
    inside = ~np.isnan(losses)
    return losses, inside & ~begins


def unbroken(
    losses: NDArray[Any], goes_on: NDArray[np.bool_], place: NDArray[np.int64]
) -> NDArray[Any]:
    """Without the stretches whose tokens are not neighbours at their places: a template's tokens
    stand between them."""
    apart = goes_on & (np.diff(place, prepend=place[:1] - 1) != 1)
    if not apart.any():
        return losses
    number = np.cumsum(~goes_on)
    return np.where(np.isin(number, number[apart]), np.nan, losses)


def cut_stretches(
    losses: NDArray[Any], goes_on: NDArray[np.bool_], *, cut_at_end: bool
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The stretches of a window of the stream: per token the loss of its stretch, and its number.
    The window's first token is read and not predicted, and with `cut_at_end` its last stretch goes
    on behind it: what is not whole has no loss. Every token without one is a stretch of its own;
    numbers count from the first token that is predicted."""
    begins = np.flatnonzero(~goes_on)
    behind_first = begins[begins > 0]
    known = np.asarray(losses, np.float32).copy()
    known[: behind_first[0] if len(behind_first) else None] = np.nan
    if cut_at_end:
        known[begins[-1] if len(begins) else 0 :] = np.nan
    number = np.cumsum(np.isnan(known) | ~goes_on)
    return known, np.maximum(number - number[1], 0)


def kind_counts(ours: Laid, teacher: LaidTeacher) -> list[int]:
    """Tokens by the kind of their stretch."""
    found: Stretches = stretches(ours.spans, teacher.spans)
    counts: list[int] = np.bincount(kinds(found, teacher.spans), minlength=len(KINDS)).tolist()
    return counts


def tiling(token_bytes: NDArray[Any]) -> NDArray[np.int64]:
    """Spans `[N, 2]` of tokens that tile a text, from their byte lengths."""
    ends = np.cumsum(token_bytes, dtype=np.int64)
    spans = np.empty((len(ends), 2), np.int64)
    spans[:, 1] = ends
    spans[:1, 0] = 0
    spans[1:, 0] = ends[:-1]
    return spans


def end_to_end(
    documents: Sequence[NDArray[np.int64]], origins: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Spans of several documents on one axis."""
    if not documents:
        return np.zeros((0, 2), np.int64)
    lengths = [len(spans) for spans in documents]
    return np.concatenate(documents) + np.repeat(origins, lengths)[:, None]
