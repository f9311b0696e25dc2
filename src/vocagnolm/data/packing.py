"""Packing: documents become one stream of student tokens, each with its guidance.

Pure functions over arrays. A *part* is the stream of some consecutive documents; the parts laid
end to end are the corpus. A block is a window of the stream, cut when it is read, so the same
parts serve every block size.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.align import Alignment, TokenSpans, align, carry
from vocagnolm.align.alignment import Aggregation, chunk_align

HISTOGRAM_STEP_NATS = 0.25
HISTOGRAM_BINS = 41  # the last one holds everything from 10 nats up

TeacherLosses = tuple[NDArray[Any], NDArray[Any]]
"""Byte lengths of the teacher's tokens, which tile the document, and their nll."""


@dataclass
class PackingSummary:
    """What packing met. Sums over parts; shares are derived."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    mapped: int = 0
    one_to_one: int = 0
    separators: int = 0
    lost_bytes: int = 0
    """Bytes that no student token covers (tokenizers that lose text)."""
    missing_documents: int = 0
    """Documents that the store does not hold."""
    unusable_documents: int = 0
    """Documents that cannot be read as text (empty, broken, huge)."""
    guidance_sum: float = 0.0
    guidance_histogram: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)

    def add(self, other: "PackingSummary") -> None:
        for name, value in asdict(other).items():
            if name == "guidance_histogram":
                self.guidance_histogram = [
                    a + b for a, b in zip(self.guidance_histogram, value, strict=True)
                ]
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        tokens, mapped = max(self.tokens, 1), max(self.mapped, 1)
        return {
            **asdict(self),
            "histogram_step_nats": HISTOGRAM_STEP_NATS,
            "mapped_share": self.mapped / tokens,
            "one_to_one_share": self.one_to_one / tokens,
            "mean_guidance": self.guidance_sum / mapped if self.mapped else None,
        }


@dataclass
class Part:
    """Columns of a part by name, and its summary. Column lengths: T tokens, D documents,
    M teacher tokens, B bytes."""

    columns: dict[str, NDArray[Any]]
    summary: PackingSummary


def pack_documents(
    students: Sequence[TokenSpans],
    teachers: Sequence[TeacherLosses | None] | None,
    *,
    document_indices: Sequence[int],
    id_dtype: type[np.unsignedinteger[Any]],
    bos: int | None,
    eos: int | None,
    aggregation: Aggregation,
    keep_teacher: bool = False,
    texts: Sequence[bytes] | None = None,
) -> Part:
    """One part. `teachers` is None without a store; an entry is None where the store lacks the
    document. Separators (BOS, EOS) hold no text: they are unmapped.

    All documents are aligned at once, their byte axes laid end to end: no Python loop over tokens.
    """
    origins = _origins([student.n_bytes for student in students])
    spans = _end_to_end([student.spans for student in students], origins)
    counts = np.array([len(student) for student in students], np.int64)
    place = _places(counts, before=bos is not None, after=eos is not None)
    extra = (bos is not None) + (eos is not None)
    n_tokens = int(counts.sum()) + extra * len(students)

    ids = np.zeros(n_tokens, id_dtype)
    ids[place] = np.concatenate([s.ids for s in students]) if students else []
    document_tokens = counts + extra
    ends = np.cumsum(document_tokens)
    if bos is not None:
        ids[ends - document_tokens] = bos
    if eos is not None:
        ids[ends - 1] = eos
    columns: dict[str, NDArray[Any]] = {
        "ids": ids,
        "document_tokens": document_tokens.astype(np.uint32),
        "document_index": np.array(document_indices, np.int64),
    }
    summary = PackingSummary(
        documents=len(students),
        bytes=sum(student.n_bytes for student in students),
        tokens=n_tokens,
        separators=extra * len(students),
        lost_bytes=sum(student.lost_bytes for student in students),
    )
    if teachers is not None:
        _add_guidance(columns, summary, spans, place, origins, teachers, aggregation, keep_teacher)
    if texts is not None:
        columns["text"] = np.frombuffer(b"".join(texts), np.uint8)
        # separators hold no text: they stand, zero-width, where the previous token ended
        placed = np.zeros((n_tokens, 2), np.int64)
        placed[place] = spans
        columns["spans"] = np.maximum.accumulate(placed, axis=0).astype(np.int32)
        separator = np.ones(n_tokens, bool)
        separator[place] = False
        columns["spans"][separator, 0] = columns["spans"][separator, 1]
    return Part(columns, summary)


def _add_guidance(
    columns: dict[str, NDArray[Any]],
    summary: PackingSummary,
    spans: NDArray[np.int64],
    place: NDArray[np.int64],
    origins: NDArray[np.int64],
    teachers: Sequence[TeacherLosses | None],
    aggregation: Aggregation,
    keep_teacher: bool,
) -> None:
    held = [(entry, origin) for entry, origin in zip(teachers, origins, strict=True) if entry]
    teacher_spans = _end_to_end(
        [tiling(token_bytes) for (token_bytes, _), _ in held],
        np.array([origin for _, origin in held], np.int64),
    )
    nll = np.concatenate([nll for (_, nll), _ in held]) if held else np.zeros(0, np.float32)
    alignment = align(spans, teacher_spans)
    carried = np.minimum(carry(alignment, nll, aggregation), np.finfo(np.float16).max)
    guidance = np.full(len(columns["ids"]), np.nan, np.float16)
    guidance[place] = carried
    columns["guidance"] = guidance

    known = carried[~np.isnan(carried)]
    summary.mapped = len(known)
    summary.one_to_one = int(_one_to_one(alignment, spans, teacher_spans).sum())
    summary.missing_documents = len(teachers) - len(held)
    summary.guidance_sum = float(known.sum(dtype=np.float64))
    summary.guidance_histogram = guidance_histogram(known)
    if keep_teacher:
        ranges = np.full((len(columns["ids"]), 2), -1, np.int32)
        ranges[place, 0], ranges[place, 1] = alignment.first, alignment.last
        columns["teacher_nll"] = nll.astype(np.float16)
        columns["teacher_range"] = ranges


def guidance_histogram(known: NDArray[Any]) -> list[int]:
    """Counts in steps of `HISTOGRAM_STEP_NATS`; the last bin is open."""
    index = np.clip(known / HISTOGRAM_STEP_NATS, 0, HISTOGRAM_BINS - 1).astype(np.int64)
    return np.bincount(index, minlength=HISTOGRAM_BINS).tolist()


def chunk_guidance(
    ranges: NDArray[np.integer[Any]], teacher_nll: NDArray[Any], n_chunks: int
) -> NDArray[np.float32]:
    """The coarse baseline for one block: the block and the teacher tokens behind it are each cut
    into `n_chunks`; every student token gets the mean loss of its teacher chunk.

    `ranges` [L, 2] points into `teacher_nll`; -1 where a token is unmapped.
    """
    mapped = ranges[:, 0] >= 0
    if not mapped.any():
        return np.full(len(ranges), np.nan, np.float32)
    first, last = int(ranges[mapped, 0].min()), int(ranges[mapped, 1].max())
    behind = np.asarray(teacher_nll[first : last + 1], np.float32)
    alignment = chunk_align(len(ranges), len(behind), n_chunks)
    return carry(alignment, behind, "mean").astype(np.float32)


def tiling(token_bytes: NDArray[Any]) -> NDArray[np.int64]:
    """Spans `[N, 2]` of tokens that tile a text, from their byte lengths."""
    ends = np.cumsum(token_bytes, dtype=np.int64)
    spans = np.empty((len(ends), 2), np.int64)
    spans[:, 1] = ends
    spans[:1, 0] = 0
    spans[1:, 0] = ends[:-1]
    return spans


def _one_to_one(
    alignment: Alignment, spans: NDArray[np.int64], teacher_spans: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Student tokens whose text is exactly one teacher token."""
    if not len(teacher_spans):
        return np.zeros(len(spans), bool)
    # unmapped tokens have first = -1, a valid place whose comparison is masked
    starts = np.take(teacher_spans[:, 0], alignment.first) == spans[:, 0]
    ends = np.take(teacher_spans[:, 1], alignment.last) == spans[:, 1]
    return alignment.mapped & (alignment.first == alignment.last) & starts & ends


def _origins(widths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])[:-1].astype(np.int64)


def _end_to_end(
    documents: Sequence[NDArray[np.int64]], origins: NDArray[np.int64]
) -> NDArray[np.int64]:
    if not documents:
        return np.zeros((0, 2), np.int64)
    lengths = [len(spans) for spans in documents]
    return np.concatenate(documents) + np.repeat(origins, lengths)[:, None]


def _places(counts: NDArray[np.int64], *, before: bool, after: bool) -> NDArray[np.int64]:
    """Where the text's own tokens stand in a stream that also holds separators."""
    document = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(document)) + document * (before + after) + before
