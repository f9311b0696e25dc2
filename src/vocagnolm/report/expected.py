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
