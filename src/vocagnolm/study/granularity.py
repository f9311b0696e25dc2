"""The paper's Figure 3: how well chunks of equal length cover each other's text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vocagnolm.align import (
    Alignment,
    Granularity,
    TextTokenizer,
    TokenSpans,
    align,
    granularity,
)
from vocagnolm.errors import CorpusError

DEFAULT_CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class GranularityStudy:
    """IoU and IoS by number of chunks; the last point is token-level alignment."""

    student: str
    teacher: str
    sequences: int
    sequence_tokens: int
    points: list[Granularity]

    def as_json(self) -> dict[str, Any]:
        return {
            "student": self.student,
            "teacher": self.teacher,
            "sequences": self.sequences,
            "sequence_tokens": self.sequence_tokens,
            "chunks": [
                {"n": point.n_chunks, "iou": point.iou, "ios": point.ios}
                for point in self.points[:-1]
            ],
            "token_level": {"iou": self.points[-1].iou, "ios": self.points[-1].ios},
        }


def granularity_study(
    student: TextTokenizer,
    teacher: TextTokenizer,
    documents: Sequence[str],
    *,
    n_chunks: Sequence[int] = DEFAULT_CHUNKS,
    sequence_tokens: int = 2048,
) -> GranularityStudy:
    """Cut the corpus into training sequences and measure chunk pairs in each.

    A sequence is up to `sequence_tokens` student tokens of one document and the teacher tokens
    over the same text.
    """
    sequences = []
    for ours, theirs in zip(
        student.spans_batch(documents), teacher.spans_batch(documents), strict=True
    ):
        sequences += _sequences(ours, theirs, sequence_tokens)
    if not sequences:
        raise CorpusError("there is no text to study: every document is empty")
    return GranularityStudy(
        student=student.name,
        teacher=teacher.name,
        sequences=len(sequences),
        sequence_tokens=sequence_tokens,
        points=granularity(sequences, n_chunks),
    )


def _sequences(
    ours: TokenSpans, theirs: TokenSpans, sequence_tokens: int
) -> list[tuple[np.ndarray, np.ndarray, Alignment]]:
    result = []
    whole = align(ours.spans, theirs.spans)
    for start in range(0, len(ours), sequence_tokens):
        part = slice(start, start + sequence_tokens)
        first, last = whole.first[part], whole.last[part]
        mapped = first >= 0
        if not mapped.any():
            continue
        origin, end = int(first[mapped][0]), int(last[mapped][-1]) + 1
        alignment = Alignment(
            np.where(mapped, first - origin, -1), np.where(mapped, last - origin, -1)
        )
        result.append((ours.spans[part], theirs.spans[origin:end], alignment))
    return result
