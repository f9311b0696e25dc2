"""A text, its rows of tokens and their losses, in the form the page shows."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vocagnolm.alignment import (
    Alignment,
    TargetTable,
    TeacherTokens,
    TextTokenizer,
    TokenSpans,
    align,
    align_batch,
    carry_alternatives,
    vocabulary_overlap,
)
from vocagnolm.alignment.alignment import as_spans
from vocagnolm.alternatives import Alternatives, Vocabulary
from vocagnolm.chat import ChatTokenizer
from vocagnolm.report.comparison import measure_fit, plain_tokenizer
from vocagnolm.report.page_data import Passage, Preflight, TeacherRow, TokenRow

TOKEN_TEXT_LIMIT = 400
"""Characters of one token that the page keeps. A tokenizer can make one token of a megabyte."""
_KEPT_AT_END = 40

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A text, or several on one axis of bytes, as one model reads it."""

    name: str
    spans: NDArray[np.int64]
    ids: NDArray[np.integer] | None = None
    nll: NDArray[np.floating] | None = None
    shown: Sequence[str | None] | None = None
    """What a token is where the text does not show it, as of a chat template."""
    trained: Sequence[str | None] | None = None
    """Why each token of a conversation is trained on; None where it is not."""
    alternatives: Alternatives | None = None
    """A teacher's, with the table by which they become targets."""
    table: TargetTable | None = None
    begins: NDArray[np.int64] | None = None
    """Indices of the tokens with which documents begin. None: the first one."""


def joined(parts: Sequence[Reading], begins: NDArray[np.int64]) -> Reading:
    """Documents that lie end to end, each from its byte of `begins`, as one text."""
    first = parts[0]
    given = [part.alternatives for part in parts if part.alternatives is not None]
    packed = [alternatives.packed for alternatives in given]
    counts = np.array([len(part.spans) for part in parts])
    return dataclasses.replace(
        first,
        spans=np.concatenate([part.spans + at for part, at in zip(parts, begins, strict=True)]),
        ids=None if first.ids is None else np.concatenate([part.ids for part in parts]),
        nll=None if first.nll is None else np.concatenate([part.nll for part in parts]),
        shown=None
        if first.shown is None
        else [name for part in parts for name in part.shown or ()],
        trained=None
        if first.trained is None
        else [why for part in parts for why in part.trained or ()],
        alternatives=Alternatives(np.concatenate(packed), given[0].sampled) if given else None,
        begins=(np.cumsum(counts) - counts)[counts > 0],
    )


def make_passage(
    title: str,
    text: bytes,
    student: Reading,
    teachers: Sequence[Reading],
    *,
    breaks: list[int] | None = None,
    inside: bool = True,
) -> Passage:
    """One text with the student's row and the teachers'. `inside`: alternatives have a say inside
    the teacher's tokens too."""
    ours, *theirs = (
        token_row(reading.name, text, reading.spans, reading.ids, reading.nll, reading.shown)
        for reading in (student, *teachers)
    )
    if student.trained is not None:
        ours = dataclasses.replace(ours, trained=[*student.trained])
    rows = []
    for row, teacher in zip(theirs, teachers, strict=True):
        teacher_tokens = teacher_row(row, align(student.spans, teacher.spans))
        if teacher.alternatives is not None:
            teacher_tokens = with_alternatives(
                teacher_tokens, student, teacher, text, inside=inside
            )
        rows.append(teacher_tokens)
    return Passage(title=title, student=ours, teachers=rows, breaks=breaks)


def token_row(
    name: str,
    text: bytes,
    spans: ArrayLike,
    ids: Sequence[int] | NDArray[np.integer] | None = None,
    nll: ArrayLike | None = None,
    shown: Sequence[str | None] | None = None,
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
    whole = token.decode("utf-8", "surrogateescape")
    if len(whole) <= TOKEN_TEXT_LIMIT:
        return whole
    return f"{whole[: TOKEN_TEXT_LIMIT - _KEPT_AT_END]}…{whole[-_KEPT_AT_END:]}"


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
"""Alternatives of a token that a page keeps."""
_LEAST = 0.001
_END = "⏹"  # an end of text or turn, which spells nothing


def with_alternatives(
    row: TeacherRow,
    student: Reading,
    teacher: Reading,
    text: bytes,
    *,
    inside: bool = True,
) -> TeacherRow:
    """The row with what the teacher expected. All alternatives decide what becomes of those that
    are shown."""
    table, given = teacher.table, teacher.alternatives
    assert table is not None and given is not None and student.ids is not None
    carried = carry_alternatives(
        table,
        student.ids,
        student.spans,
        TeacherTokens(spans=teacher.spans, alternatives=given, begins=teacher.begins),
        Alignment(np.array(row.first), np.array(row.last)),
        np.frombuffer(text, np.uint8),
        inside=inside,
    )
    shown = _shown(given, table.vocabulary)
    ids_given = given.ids.tolist()
    targets: list[list[tuple[str | None, float] | None]] = []
    for token, first in enumerate(row.first):
        if first < 0 or not carried.has_targets[token]:
            targets.append([])
            continue
        read = text[int(teacher.spans[first, 0]) : int(student.spans[token, 0])]
        pairs = zip(carried.ids[token].tolist(), carried.probability[token].tolist(), strict=True)
        targets.append(
            [
                _target(table, *pair) if _goes_on(table.vocabulary, index, read) else None
                for index, pair in zip(ids_given[first][: len(shown[first])], pairs, strict=False)
            ]
        )
    return dataclasses.replace(row, alternatives=shown, targets=targets)


def _shown(given: Alternatives, vocabulary: Vocabulary) -> list[list[tuple[str, float, bool]]]:
    """Per teacher token its first alternatives: text, probability, whether it follows."""
    least = 0.0 if given.sampled else _LEAST  # draws stand in no order
    ends = set(vocabulary.ends.tolist())
    columns = (given.ids, given.probability, given.present, given.follows)
    shown = []
    for token in zip(*(column[:, :SHOWN].tolist() for column in columns), strict=True):
        rows: list[tuple[str, float, bool]] = []
        for index, p, present, is_next in zip(*token, strict=True):
            if not present or p < least:
                break
            spelled = _spelled(vocabulary, index).decode("utf-8", "surrogateescape")
            rows.append((_END if index in ends else spelled, round(p, 4), is_next))
        shown.append(rows)
    return shown


def _spelled(vocabulary: Vocabulary, index: int) -> bytes:
    return vocabulary[index] if index < len(vocabulary) else b""


def _goes_on(vocabulary: Vocabulary, index: int, read: bytes) -> bool:
    """Whether the bytes already read leave an alternative possible; one that ends among them is."""
    spelled = _spelled(vocabulary, index)
    common = min(len(spelled), len(read))
    return not read or (common > 0 and spelled[:common] == read[:common])


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
    *,
    exact: bool,
) -> Preflight:
    """How the pair fits on these texts. A store needs no teacher's tokenizer; where there is one,
    the vocabularies are compared."""
    spans = [tokens.spans for tokens in ours]
    if isinstance(student, ChatTokenizer):  # what a template prints is neither mapped nor unmapped
        spans = [tokens.spans[tokens.token_bytes > 0] for tokens in ours]
    fit = Preflight(
        student=names[0],
        teacher=names[1],
        student_vocabulary=student.vocabulary_size,
        text_bytes=sum(tokens.n_bytes for tokens in ours),
        exact=exact,
        **vars(measure_fit(spans, theirs, align_batch(spans, theirs))),
    )
    if teacher is None:
        return fit
    overlap = vocabulary_overlap(plain_tokenizer(student), plain_tokenizer(teacher))
    return dataclasses.replace(
        fit,
        teacher_vocabulary=plain_tokenizer(teacher).vocabulary_size,
        overlap_raw=overlap.raw,
        overlap_marks=overlap.marks,
        overlap_bytes=overlap.bytes,
    )
