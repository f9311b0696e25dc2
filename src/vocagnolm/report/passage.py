"""A text, its rows of tokens and their losses, in the form the page shows."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vocagnolm.alignment import (
    Alignment,
    TargetTable,
    TeacherTokens,
    TextTokenizer,
    TokenSpans,
    carry_alternatives,
    vocabulary_overlap,
)
from vocagnolm.alignment.alignment import as_spans
from vocagnolm.alternatives import Alternatives, Vocabulary
from vocagnolm.chat import ChatTokenizer
from vocagnolm.pair import measure_fit
from vocagnolm.report.page_data import Preflight, TeacherRow, TokenRow

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


# ---- what the teacher expected ----


SHOWN = 5
"""Alternatives of a place that a page keeps."""
_LEAST = 0.001
_END = "⏹"  # an end of text or turn, which spells nothing


@dataclasses.dataclass(frozen=True)
class Expected:
    """A teacher's alternatives over a text, and the table by which they become targets."""

    table: TargetTable
    alternatives: Alternatives
    begins: NDArray[np.int64]
    """Bytes where documents begin."""


def with_alternatives(
    row: TeacherRow,
    expected: Expected,
    ids: NDArray[np.integer],
    spans: NDArray[np.int64],
    teacher_spans: NDArray[np.int64],
    text: bytes,
    *,
    inside: bool = True,
) -> TeacherRow:
    """The row with what the teacher expected; `ids` and `spans` are the student's tokens. All
    alternatives decide what becomes of those that are shown."""
    given = expected.alternatives
    found = carry_alternatives(
        expected.table,
        ids,
        spans,
        TeacherTokens(spans=teacher_spans, alternatives=given),
        Alignment(np.array(row.first), np.array(row.last)),
        np.frombuffer(text, np.uint8),
        inside=inside,
        begins=expected.begins,
    )
    shown = _shown(given, expected.table.vocabulary)
    ids_given = given.ids.tolist()
    targets: list[list[tuple[str | None, float] | None]] = []
    for token, place in enumerate(row.first):
        if place < 0 or not found.told[token]:
            targets.append([])
            continue
        begin, start = int(teacher_spans[place, 0]), int(spans[token, 0])
        pairs = zip(found.ids[token].tolist(), found.probability[token].tolist(), strict=True)
        targets.append(
            [
                _target(expected.table, *pair)
                if _goes_on(expected.table.vocabulary, index, text[begin:start])
                else None
                for index, pair in zip(ids_given[place][: len(shown[place])], pairs, strict=False)
            ]
        )
    return dataclasses.replace(row, alternatives=shown, targets=targets)


def _shown(given: Alternatives, vocabulary: Vocabulary) -> list[list[tuple[str, float, bool]]]:
    """Per teacher token its first alternatives: text, probability, whether it follows."""
    least = 0.0 if given.sampled else _LEAST  # draws stand in no order
    ends = set(vocabulary.ends.tolist())
    columns = (given.ids, given.probability, given.present, given.follows)
    found = []
    for place in zip(*(column[:, :SHOWN].tolist() for column in columns), strict=True):
        rows: list[tuple[str, float, bool]] = []
        for index, p, present, is_next in zip(*place, strict=True):
            if not present or p < least:
                break
            spelled = vocabulary[index] if index < len(vocabulary) else b""
            name = _END if index in ends else spelled.decode("utf-8", "surrogateescape")
            rows.append((name, round(p, 4), is_next))
        found.append(rows)
    return found


def _goes_on(vocabulary: Vocabulary, index: int, read: bytes) -> bool:
    """Whether the bytes already read leave an alternative possible; one that ends among them is."""
    if not read:
        return True
    spelled = vocabulary[index] if index < len(vocabulary) else b""
    common = min(len(spelled), len(read))
    return common > 0 and spelled[:common] == read[:common]


def _target(table: TargetTable, index: int, p: float) -> tuple[str | None, float]:
    """The student's token; None for what is the label's."""
    if p == 0.0:
        return None, 0.0
    if index == table.end_id:
        return _END, round(p, 4)
    spelled = table.student.bytes_of(index) or b""
    return spelled.decode("utf-8", "surrogateescape"), round(p, 4)


# ---- the pair's part of a page ----


def preflight(
    names: tuple[str, str],
    student: TextTokenizer,
    teacher: TextTokenizer | None,
    ours: Sequence[TokenSpans],
    theirs: Sequence[NDArray[np.int64]],
    alignments: Sequence[Alignment],
    *,
    exact: bool,
) -> Preflight:
    """How the pair fits on these texts. A store needs no teacher's tokenizer; where there is one,
    the vocabularies are compared."""
    base = student
    if isinstance(student, ChatTokenizer):  # what a template prints is neither mapped nor unmapped
        base, ours, alignments = student.base, *_with_text(ours, alignments)
    fit = measure_fit([one.spans for one in ours], theirs, alignments)
    found = Preflight(
        student=names[0],
        teacher=names[1],
        student_vocabulary=student.vocabulary_size,
        text_bytes=sum(one.n_bytes for one in ours),
        exact=exact,
        **vars(fit),
    )
    if teacher is None:
        return found
    if isinstance(teacher, ChatTokenizer):
        teacher = teacher.base
    overlap = vocabulary_overlap(base, teacher)
    return dataclasses.replace(
        found,
        teacher_vocabulary=teacher.vocabulary_size,
        overlap_raw=overlap.raw,
        overlap_marks=overlap.marks,
        overlap_bytes=overlap.bytes,
    )


def _with_text(
    ours: Sequence[TokenSpans], alignments: Sequence[Alignment]
) -> tuple[list[TokenSpans], list[Alignment]]:
    held = [one.token_bytes > 0 for one in ours]
    return (
        [
            TokenSpans(one.ids[here], one.spans[here], one.n_bytes, one.lost_bytes)
            for one, here in zip(ours, held, strict=True)
        ],
        [
            Alignment(one.first[here], one.last[here])
            for one, here in zip(alignments, held, strict=True)
        ],
    )
