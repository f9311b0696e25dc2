"""A text, its rows of tokens and their losses, in the form the page shows."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vocagnolm.alignment.alignment import Alignment, as_spans
from vocagnolm.report.page_data import TeacherRow, TokenRow

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
    shown: Sequence[str | None] | None = None,
) -> TokenRow:
    """One tokenizer's row over `text`: what each token covers, its id and its loss. `shown`: what a
    token is where the text does not show it, as of a chat template."""
    array = as_spans(spans)
    starts, ends = array[:, 0], array[:, 1]
    if len(array) and int(ends.max()) > len(text):
        raise ValueError(f"a span ends at byte {int(ends.max())} of a text of {len(text)} bytes")
    for label, column in (("ids", ids), ("nll", nll)):
        if column is not None and len(np.asarray(column)) != len(array):
            raise ValueError(f"{len(np.asarray(column))} {label} for {len(array)} tokens")
    gaps = starts - np.concatenate([[0], ends[:-1]])
    texts = [_token_text(text[start:end]) for start, end in array.tolist()]
    if shown is not None:
        texts = [own if other is None else other for own, other in zip(texts, shown, strict=True)]
    return TokenRow(
        name=name,
        text=texts,
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


def teacher_row(row: TokenRow, alignment: Alignment) -> TeacherRow:
    """A row over a text that the student's tokens are aligned with."""
    return TeacherRow(**vars(row), first=alignment.first.tolist(), last=alignment.last.tolist())


def row_spans(row: TokenRow) -> NDArray[np.int64]:
    """The row's tokens as byte spans [N, 2]."""
    lengths = np.array(row.length, np.int64)
    ends = np.cumsum(lengths + (0 if row.gap is None else np.array(row.gap, np.int64)))
    return np.stack([ends - lengths, ends], axis=1)


def numbers(values: Sequence[float | None]) -> FloatArray:
    """A column of the page as an array; NaN where it has no number."""
    return np.array([math.nan if value is None else value for value in values], np.float64)
