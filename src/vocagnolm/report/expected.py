"""What the teacher expected at every place of a text, and what became of it in the student's
vocabulary: the alternatives of a page."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import Alignment, TargetTable, TeacherTokens, carry_alternatives
from vocagnolm.alternatives import Alternatives, Vocabulary
from vocagnolm.report.page_data import TeacherRow

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
    """The row with what the teacher expected; `ids` and `spans` are the student's tokens."""
    given = Alternatives(expected.alternatives.packed[:, :SHOWN], expected.alternatives.sampled)
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
    targets: list[list[tuple[str | None, float]]] = []
    for token, place in enumerate(row.first):
        told = bool(found.told[token])
        kept = range(len(shown[place])) if told and place >= 0 else ()
        rows = zip(found.ids[token].tolist(), found.probability[token].tolist(), strict=True)
        pairs = [*rows]
        targets.append([_target(expected.table, *pairs[k]) for k in kept])
    return dataclasses.replace(row, alternatives=shown, targets=targets)


def _shown(given: Alternatives, vocabulary: Vocabulary) -> list[list[tuple[str, float, bool]]]:
    """Per teacher token its alternatives: text, probability, whether it follows."""
    ends = set(vocabulary.ends.tolist())
    probability = given.probability.tolist()
    found = []
    for ids, chances, follows in zip(
        given.ids.tolist(), probability, given.follows.tolist(), strict=True
    ):
        rows: list[tuple[str, float, bool]] = []
        for index, p, is_next in zip(ids, chances, follows, strict=True):
            if p < _LEAST:
                break
            spelled = vocabulary[index] if index < len(vocabulary) else b""
            name = _END if index in ends else spelled.decode("utf-8", "surrogateescape")
            rows.append((name, round(p, 4), is_next))
        found.append(rows)
    return found


def _target(table: TargetTable, index: int, p: float) -> tuple[str | None, float]:
    """The student's token; None for what is the label's."""
    if p == 0.0:
        return None, 0.0
    if index == table.end_id:
        return _END, round(p, 4)
    spelled = table.student.bytes_of(index) or b""
    return spelled.decode("utf-8", "surrogateescape"), round(p, 4)
