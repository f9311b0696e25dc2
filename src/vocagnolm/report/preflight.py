"""The pair's part of a page."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import Alignment, TextTokenizer, TokenSpans, vocabulary_overlap
from vocagnolm.chat import ChatTokenizer
from vocagnolm.pair.preflight import measure_fit
from vocagnolm.report.page_data import Preflight


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
