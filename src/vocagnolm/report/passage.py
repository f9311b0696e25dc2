"""A text, its two rows of tokens and their losses, in the form the page shows."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vocagnolm.alignment.alignment import Aggregation, Alignment, as_spans, carry
from vocagnolm.report.page_data import Passage, Selection, TokenRow

TOKEN_TEXT_LIMIT = 400
"""Characters of one token that the page keeps. A tokenizer can make one token of a megabyte."""
_KEPT_AT_END = 40

FloatArray = NDArray[np.float64]


def token_row(
    name: str,
    text: bytes,
    spans: ArrayLike,
    ids: Sequence[int] | NDArray[np.integer] | None = None,
    nll: ArrayLike | None = None,
) -> TokenRow:
    """One tokenizer's row over `text`: what each token covers, its id and its loss."""
    array = as_spans(spans)
    starts, ends = array[:, 0], array[:, 1]
    if len(array) and int(ends.max()) > len(text):
        raise ValueError(f"a span ends at byte {int(ends.max())} of a text of {len(text)} bytes")
    for label, column in (("ids", ids), ("nll", nll)):
        if column is not None and len(np.asarray(column)) != len(array):
            raise ValueError(f"{len(np.asarray(column))} {label} for {len(array)} tokens")
    gaps = starts - np.concatenate([[0], ends[:-1]])
    return TokenRow(
        name=name,
        text=[_token_text(text[start:end]) for start, end in array.tolist()],
        length=(ends - starts).tolist(),
        gap=gaps.tolist() if gaps.any() else None,
        ids=None if ids is None else [int(i) for i in ids],
        nll=None if nll is None else rounded(nll),
    )


def _token_text(token: bytes) -> str:
    # a character has at most four bytes, so a short token needs no look at its characters
    if len(token) > 4 * TOKEN_TEXT_LIMIT:
        head = token[: 4 * TOKEN_TEXT_LIMIT].decode("utf-8", "surrogateescape")
        tail = token[-4 * _KEPT_AT_END :].decode("utf-8", "surrogateescape")
        return f"{head[: TOKEN_TEXT_LIMIT - _KEPT_AT_END]}…{tail[-_KEPT_AT_END:]}"
    whole = token.decode("utf-8", "surrogateescape")
    if len(whole) > TOKEN_TEXT_LIMIT:
        return f"{whole[: TOKEN_TEXT_LIMIT - _KEPT_AT_END]}…{whole[-_KEPT_AT_END:]}"
    return whole


def rounded(values: ArrayLike, digits: int = 4) -> list[float | None]:
    """Numbers short enough for a page; what is not finite becomes None."""
    return [
        round(value, digits) if math.isfinite(value) else None
        for value in np.asarray(values, np.float64).tolist()
    ]


def build_passage(
    title: str,
    student: TokenRow,
    teacher: TokenRow | None = None,
    alignment: Alignment | None = None,
    *,
    guidance: ArrayLike | None = None,
    aggregation: Aggregation = "max",
    selected: ArrayLike | None = None,
    note: str | None = None,
) -> Passage:
    """Join two rows by their alignment. Guidance is carried from the teacher's losses unless it
    is given (a store's blocks have it already); excess needs the student's losses too."""
    n_tokens = len(student.text)
    if alignment is not None and len(alignment) != n_tokens:
        raise ValueError(f"an alignment of {len(alignment)} tokens for {n_tokens} student tokens")
    if guidance is None and alignment is not None and teacher is not None and teacher.nll:
        guidance = carry(alignment, _numbers(teacher.nll), aggregation)
    excess = None
    if guidance is not None and student.nll is not None:
        excess = rounded(_numbers(student.nll) - np.asarray(guidance, np.float64))
    return Passage(
        title=title,
        student=student,
        teacher=teacher,
        first=None if alignment is None else alignment.first.tolist(),
        last=None if alignment is None else alignment.last.tolist(),
        guidance=None if guidance is None else rounded(guidance),
        excess=excess,
        selected=None if selected is None else np.asarray(selected).astype(int).tolist(),
        note=note,
    )


def _numbers(values: Sequence[float | None]) -> FloatArray:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def select_passages(
    passages: Sequence[Passage], *, keep: float = 0.4, unmapped: str = "include"
) -> tuple[list[Passage], Selection]:
    """Apply the paper's rule to all passages at once, as if they were one batch: keep the
    `keep` share of the mapped tokens with the largest excess.

    A token without a student loss (the first one) is no target and is never kept.
    """
    excess = [_numbers(passage.excess or []) for passage in passages]
    scored = [
        ~np.isnan(_numbers(passage.student.nll or [None] * len(passage.student.text)))
        for passage in passages
    ]
    if unmapped == "mean":
        excess = _with_mean_guidance(passages, excess)
    together = np.concatenate([*excess, np.zeros(0)])
    compete = np.flatnonzero(~np.isnan(together))
    n_kept = kept_count(len(compete), keep)
    order = compete[np.argsort(-together[compete], kind="stable")]
    kept = np.zeros(len(together), bool)
    kept[order[:n_kept]] = True
    threshold = float(together[order[n_kept - 1]]) if n_kept else None
    result, begin = [], 0
    for passage, values, has_loss in zip(passages, excess, scored, strict=True):
        here = kept[begin : begin + len(values)]
        if unmapped == "include":
            here = here | (np.isnan(values) & has_loss)
        result.append(dataclasses.replace(passage, selected=here.astype(int).tolist()))
        begin += len(values)
    rule = Selection(method="guided", keep=keep, unmapped=unmapped, threshold=threshold)
    return result, rule


def kept_count(n_tokens: int, keep: float) -> int:
    """k of n as the objective counts it: rounded half up in exact arithmetic, at least one."""
    share = Fraction(str(keep)).limit_denominator(1_000_000)
    k = (2 * share.numerator * n_tokens + share.denominator) // (2 * share.denominator)
    return max(k, 1) if keep > 0 and n_tokens > 0 else k


def _with_mean_guidance(
    passages: Sequence[Passage], excess: Sequence[FloatArray]
) -> list[FloatArray]:
    guidance = np.concatenate([_numbers(passage.guidance or []) for passage in passages])
    mean = float(np.nanmean(guidance)) if (~np.isnan(guidance)).any() else math.nan
    return [
        np.where(np.isnan(values), _numbers(passage.student.nll or []) - mean, values)
        for passage, values in zip(passages, excess, strict=True)
    ]
