"""The pair's part of a page."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import Alignment, TextTokenizer, TokenSpans, vocabulary_overlap
from vocagnolm.pair.fit import measure_fit
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
    overlap = vocabulary_overlap(student, teacher)
    return dataclasses.replace(
        found,
        teacher_vocabulary=teacher.vocabulary_size,
        overlap_raw=overlap.raw,
        overlap_marks=overlap.marks,
        overlap_bytes=overlap.bytes,
    )
