"""Is this teacher worth following? One number against another, no model."""

import math
from collections.abc import Sequence

from vocagnolm.store.reader import LossStore

CLEARLY_BETTER = 0.97
"""A teacher is clearly better when its bits per byte are below this share of the student's."""


def teacher_warning(teacher_bits: float | None, student_bits: float | None) -> str | None:
    """What to tell the user about a teacher whose bits per byte on the corpus are not clearly
    below the student's; None where it is, or where one of the two is not known."""
    if teacher_bits is None or student_bits is None:
        return None
    if teacher_bits <= CLEARLY_BETTER * student_bits:
        return None
    return (
        f"the teacher has {teacher_bits:.3f} bits per byte on its corpus, the student "
        f"{student_bits:.3f}: a teacher that is not clearly better than the student did harm in "
        "our experiments. Compare them on clean text too: on a corpus that is partly wrong, a good "
        "teacher may look weak."
    )


def best_store(stores: Sequence[LossStore]) -> LossStore:
    """Of the teacher with the fewest bits per byte."""

    def bits(store: LossStore) -> float:
        return math.inf if store.bits_per_byte is None else store.bits_per_byte

    return min(stores, key=bits)
