"""Packing: documents become one stream of student tokens, each with its guidance.

Pure functions over arrays. A *part* is the stream of some consecutive documents; the parts laid
end to end are the corpus. A block is a window of the stream, cut when it is read, so the same
parts serve every block size.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import KINDS, Alignment, TokenSpans, align
from vocagnolm.alignment.targets import measured
from vocagnolm.alternatives import Alternatives
from vocagnolm.base.files import not_written
from vocagnolm.chat.tokens import ChatTokens, trained_spans
from vocagnolm.data.guidance import (
    CarryRule,
    GuidancePlan,
    Laid,
    LaidTeacher,
    TargetsPlan,
    TeacherLosses,
    carry_targets,
    end_to_end,
    kind_counts,
    lay,
    lay_teacher,
    student_guidance,
    unbroken,
)

HISTOGRAM_STEP_NATS = 0.25
HISTOGRAM_BINS = 41  # the last one holds everything from 10 nats up


@dataclass
class PackingSummary:
    """Counts of what packing met. They are sums over parts; shares are derived."""

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
    left_out_documents: int = 0
    """Documents that `corpus.keep_documents` did not choose."""
    unusable_documents: int = 0
    """Documents that cannot be read as text (empty, broken, huge)."""
    wrong_documents: int = 0
    """Answers that are not marked as right, where `corpus.answers` asks for that."""
    trained: int | None = None
    """Conversations: tokens that are trained on; None for texts, all of which are."""
    untrained_documents: int = 0
    """Conversations that hold nothing to train on."""
    refused: dict[str, int] = field(default_factory=dict)
    """Conversations that the student's template refuses, by reason."""
    kinds: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    """Tokens by the kind of their stretch (`alignment.KINDS`), against the first teacher."""
    targets: dict[str, float] = field(default_factory=dict)
    """What became of the first teacher's alternatives (`alignment.TargetMass`)."""
    guidance_sum: float = 0.0
    guidance_histogram: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)

    def add(self, other: "PackingSummary") -> None:
        for name, value in asdict(other).items():
            mine = getattr(self, name)
            if isinstance(value, list):
                setattr(self, name, [a + b for a, b in zip(mine, value, strict=True)])
            elif isinstance(value, dict):
                setattr(
                    self, name, {k: mine.get(k, 0) + value.get(k, 0) for k in {**mine, **value}}
                )
            elif value is not None:
                setattr(self, name, (mine or 0) + value)

    def as_json(self) -> dict[str, Any]:
        """The summary in the form that parts keep, without what does not apply to them."""
        values = asdict(self)
        if not self.targets:
            del values["targets"]
        if not self.wrong_documents:
            del values["wrong_documents"]
        if self.trained is None:
            for name in ("trained", "untrained_documents", "refused"):
                del values[name]
        return values

    def to_dict(self) -> dict[str, Any]:
        """The summary with shares, which are of the tokens that are trained on."""
        tokens = max(self.tokens if self.trained is None else self.trained, 1)
        mapped = max(self.mapped, 1)
        return {
            **self.as_json(),
            "histogram_step_nats": HISTOGRAM_STEP_NATS,
            "mapped_share": self.mapped / tokens,
            "one_to_one_share": self.one_to_one / tokens,
            "kinds": dict(zip(KINDS, self.kinds, strict=True)),
            "mean_guidance": self.guidance_sum / mapped if self.mapped else None,
            **({"target_shares": target_shares(self.targets)} if self.targets else {}),
        }


def target_shares(mass: Mapping[str, float]) -> dict[str, float]:
    """`TargetMass` as shares: of the tokens, and of the teacher's probability at shared starts."""
    tokens, shared = max(mass["tokens"], 1), max(mass["shared"], 1)
    spelled = {name: mass[name] / shared for name in ("following", "exact", "several", "unspelled")}
    return {
        **{name: mass[name] / tokens for name in ("shared", "inside", "continued")},
        **spelled,
        "beyond": max(0.0, 1.0 - sum(spelled.values())),
    }


def target_words(shares: Mapping[str, float]) -> list[str]:
    """The shares of alternatives that became targets, as two sentences for the console."""
    return [
        f"targets: {shares['shared']:.1%} of the tokens begin where a teacher token begins, "
        f"{shares['inside']:.1%} inside a teacher token ({shares['continued']:.1%} where an "
        f"alternative continues from there)",
        f"of the teacher's probability {shares['following']:.1%} is on the actual next token, "
        f"{shares['exact']:.1%} on other student tokens, {shares['several']:.1%} on text of "
        f"several student tokens, {shares['unspelled']:.1%} on text whose first token depends on "
        f"what follows or that it cannot represent, "
        f"{shares['beyond']:.1%} beyond the alternatives",
    ]


@dataclass
class Part:
    """Columns of a part by name, and its summary. Column lengths: T tokens, D documents,
    M teacher tokens, B bytes."""

    columns: dict[str, NDArray[Any]]
    summary: PackingSummary


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Documents that are packed at once."""

    indices: Sequence[int]
    students: Sequence[TokenSpans]
    teachers: Sequence[Sequence[TeacherLosses | None]] | None = None
    """The losses of every store, None without one; an entry is None where it lacks the document."""
    texts: Sequence[bytes] | None = None
    trained: Sequence[NDArray[np.int64]] | None = None
    """Conversations: the bytes that are trained on."""
    alternatives: Sequence[Sequence[NDArray[np.uint32] | None]] | None = None


@dataclass
class _Packed(Part):
    """A packed batch, with what the summary of all batches needs."""

    known: NDArray[Any]
    """The guidance that there is, before it is rounded."""
    shared: tuple[Alternatives, NDArray[np.uint32]] | None = None
    """The first teacher's alternatives, and its tokens at shared starts."""


def pack_documents(
    batches: Iterable[Batch],
    *,
    id_dtype: type[np.unsignedinteger[Any]],
    prefix: Sequence[int],
    eos: int | None,
    guidance: GuidancePlan,
    keep_text: bool = True,
    targets: TargetsPlan | None = None,
    folder: Path | None = None,
) -> Part:
    """Pack documents into a part. Separators (the `prefix` of every document, EOS) hold no text:
    they are unmapped. Tokens of conversations that are not trained on are context and have no
    guidance.
    `targets`: alternatives become targets; that takes the texts, which are kept only with
    `keep_text`.

    All documents of a batch are aligned at once, their byte axes laid end to end: no Python loop
    over tokens. Batches come one by one, and only their columns stay. `folder`: where long columns
    wait for the end of the part.
    """
    with ExitStack() as open_files:
        new_column = partial(_Column, folder, open_files)
        grown: dict[str, _Column] = defaultdict(new_column)
        known, shared = new_column(), []
        summary = PackingSummary()
        for batch in batches:
            packed = _pack(batch, id_dtype, prefix, eos, guidance, keep_text, targets)
            before = {"spans": summary.bytes, "teacher_range": grown["teacher_nll"].rows}
            summary.add(packed.summary)
            for name, values in packed.columns.items():
                if name in before:
                    values[values >= 0] += before[name]
                grown[name].append(values)
            known.append(packed.known)
            if packed.shared is not None:
                shared.append(packed.shared)
        # of all at once: sums of parts would differ from it in their last bits
        summary.guidance_sum = float(known.whole().sum(dtype=np.float64))
        columns = {name: grown[name].whole() for name in packed.columns}
    if targets is not None and shared:
        summary.targets |= measured(targets.tables[0], shared)
    if "spans" in columns:
        _place_separators(columns["spans"])
    return Part(columns, summary)


class _Column:
    """Values that come in pieces. From `MOST_BYTES` on they go to a file without a name in the
    folder, which is mapped in the end: the system can take such memory back at any time."""

    MOST_BYTES = 2**23

    def __init__(self, folder: Path | None, open_files: ExitStack):
        self.rows = 0
        self._folder, self._open_files = folder, open_files
        self._file: IO[bytes] | None = None
        self._pieces: list[NDArray[Any]] = []
        self._bytes = 0

    def append(self, piece: NDArray[Any]) -> None:
        self._like = piece[:0]
        self.rows += len(piece)
        self._bytes += piece.nbytes
        self._pieces.append(piece)
        if self._folder is None or self._bytes < self.MOST_BYTES:
            return
        try:
            if self._file is None:
                temporary = TemporaryFile(dir=self._folder)  # noqa: SIM115  (of `open_files`)
                self._file = self._open_files.enter_context(temporary)
            for waiting in self._pieces:
                self._file.write(np.ascontiguousarray(waiting).data)
            self._file.flush()
        except OSError as error:
            raise not_written(self._folder, error) from error
        self._pieces.clear()

    def whole(self) -> NDArray[Any]:
        shape = self.rows, *self._like.shape[1:]
        if self._file is not None:
            return np.memmap(self._file, self._like.dtype, "r+", shape=shape)
        return self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)


def _place_separators(spans: NDArray[np.int32]) -> None:
    """Give separators, which hold no text, zero-width spans where the previous token ended. In
    place."""
    separator = spans[:, 0] < 0
    np.maximum(spans, 0, out=spans)
    np.maximum.accumulate(spans, axis=0, out=spans)
    spans[separator, 0] = spans[separator, 1]


def _pack(
    batch: Batch,
    id_dtype: type[np.unsignedinteger[Any]],
    prefix: Sequence[int],
    eos: int | None,
    guidance: GuidancePlan,
    keep_text: bool,
    targets: TargetsPlan | None,
) -> _Packed:
    students, texts = batch.students, batch.texts
    counts = np.array([len(student) for student in students], np.int64)
    at = _positions(counts, before=len(prefix), after=int(eos is not None))
    extra = len(prefix) + (eos is not None)
    n_tokens = int(counts.sum()) + extra * len(students)

    ids = np.zeros(n_tokens, id_dtype)
    ids[at] = np.concatenate([s.ids for s in students]) if students else []
    document_tokens = counts + extra
    ends = np.cumsum(document_tokens)
    for number, token in enumerate(prefix):
        ids[ends - document_tokens + number] = token
    if eos is not None:
        ids[ends - 1] = eos
    columns: dict[str, NDArray[Any]] = {
        "ids": ids,
        "document_tokens": document_tokens.astype(np.uint32),
        "document_index": np.array(batch.indices, np.int64),
    }
    summary = PackingSummary(
        documents=len(students),
        bytes=sum(student.n_bytes for student in students),
        tokens=n_tokens,
        separators=extra * len(students),
        lost_bytes=sum(student.lost_bytes for student in students),
    )
    result = _Packed(columns, summary, np.zeros(0, np.float32))
    if batch.teachers is not None or batch.trained is not None:
        ours, there = lay(students), at
    if batch.trained is not None:
        ranges = end_to_end(batch.trained, ours.origins)
        turns = [
            np.where(student.turns < 0, student.turns, student.turns + origin)
            for student, origin in zip(students, ours.origins, strict=True)
            if isinstance(student, ChatTokens)
        ]
        mask = trained_spans(ours.spans, np.concatenate([*turns, np.zeros(0, np.int64)]), ranges)
        _add_trained(columns, summary, mask, at, document_tokens)
    if batch.teachers is not None:
        others = batch.alternatives
        theirs = [
            lay_teacher(entries, ours, others[n] if others is not None else None)
            for n, entries in enumerate(batch.teachers)
        ]
        if batch.trained is not None:
            theirs = [_only_trained(teacher, ranges) for teacher in theirs]
            ours = Laid(ours.spans[mask], ours.document[mask], ours.origins)
            there = at[mask]
        alignments = [align(ours.spans, teacher.spans) for teacher in theirs]
        _add_guidance(result, ours, there, theirs, alignments, guidance)
        if targets is not None:
            assert texts is not None and theirs[0].packed is not None
            axis = _on_axis(texts, ours.origins)
            carried, rows = carry_targets(ids[there], ours, theirs, alignments, axis, targets)
            columns["target_ids"] = _rows_scattered(carried.ids.astype(id_dtype), there, n_tokens)
            columns["target_p"] = _rows_scattered(
                carried.probability.astype(np.float16), there, n_tokens
            )
            summary.targets = asdict(carried.mass)
            result.shared = targets.given(theirs[0].packed), rows.astype(np.uint32)
    if texts is not None and keep_text:
        columns["text"] = np.frombuffer(b"".join(texts), np.uint8)
        spans = np.full((n_tokens, 2), -1, np.int32)  # -1: separators
        widths = [student.n_bytes for student in students]
        begins = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])[:-1].astype(np.int64)
        spans[at] = end_to_end([student.spans for student in students], begins)
        columns["spans"] = spans
    return result


def _add_trained(
    columns: dict[str, NDArray[Any]],
    summary: PackingSummary,
    mask: NDArray[np.bool_],
    at: NDArray[np.int64],
    document_tokens: NDArray[np.int64],
) -> None:
    """Which tokens are trained on, and per document the first of them; -1 where there is none."""
    trained = np.zeros(len(columns["ids"]), np.uint8)
    trained[at] = mask
    starts = np.cumsum(document_tokens) - document_tokens
    where = np.append(np.flatnonzero(trained), len(trained))
    first = where[np.searchsorted(where, starts)] - starts
    columns["trained"] = trained
    columns["first_trained"] = np.where(first < document_tokens, first, -1).astype(np.int32)
    summary.trained = int(mask.sum())
    summary.untrained_documents = int((columns["first_trained"] < 0).sum())


def _only_trained(teacher: LaidTeacher, ranges: NDArray[np.int64]) -> LaidTeacher:
    """The teacher's losses on what is trained on; its other losses are not known."""
    near = np.searchsorted(ranges[:, 1], teacher.spans[:, 0], side="right")
    starts = np.append(ranges[:, 0], np.iinfo(np.int64).max)
    inside = starts[near] < teacher.spans[:, 1]
    return replace(teacher, nll=np.where(inside, teacher.nll, np.nan))


def _add_guidance(
    result: _Packed,
    ours: Laid,
    at: NDArray[np.int64],
    theirs: Sequence[LaidTeacher],
    alignments: Sequence[Alignment],
    plan: GuidancePlan,
) -> None:
    columns, summary = result.columns, result.summary
    rule = CarryRule(aggregation=plan.aggregation)
    carried, _ = student_guidance(ours, theirs, alignments, rule, plan.combine)
    columns["guidance"] = _scattered(carried, at, len(columns["ids"]))
    if plan.stretch:
        guidance = student_guidance(ours, theirs, alignments, CarryRule("stretch"), plan.combine)
        columns["stretch"] = _stretch_column(*guidance, at, len(columns["ids"]))
    known = result.known = carried[~np.isnan(carried)]
    summary.mapped = len(known)
    # of the first teacher, where there are several
    summary.one_to_one = int(_one_to_one(alignments[0], ours.spans, theirs[0].spans).sum())
    summary.kinds = kind_counts(ours, theirs[0])
    summary.guidance_histogram = guidance_histogram(known)
    if plan.teacher_losses:
        ranges = np.full((len(columns["ids"]), 2), -1, np.int32)
        ranges[at, 0], ranges[at, 1] = alignments[0].first, alignments[0].last
        columns["teacher_nll"] = theirs[0].nll.astype(np.float16)
        columns["teacher_range"] = ranges


def _on_axis(texts: Sequence[bytes], origins: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The texts' bytes where their spans are laid."""
    joined = np.zeros(sum(map(len, texts)) + len(texts), np.uint8)
    for text, origin in zip(texts, origins.tolist(), strict=True):
        joined[origin : origin + len(text)] = np.frombuffer(text, np.uint8)
    return joined


def _scattered(values: NDArray[Any], at: NDArray[np.int64], n_tokens: int) -> NDArray[np.float16]:
    """Values of the text's own tokens among all tokens; NaN for separators."""
    column = np.full(n_tokens, np.nan, np.float16)
    column[at] = np.minimum(values, np.finfo(np.float16).max)
    return column


def _rows_scattered(rows: NDArray[Any], at: NDArray[np.int64], n_tokens: int) -> NDArray[Any]:
    """Rows of the text's own tokens among all tokens; zeros for separators."""
    column = np.zeros((n_tokens, rows.shape[1]), rows.dtype)
    # as one thing each: several times faster than number by number
    whole = np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))
    column.view(whole)[at] = rows.view(whole)
    return column


def _stretch_column(
    losses: NDArray[Any], goes_on: NDArray[np.bool_], at: NDArray[np.int64], n_tokens: int
) -> NDArray[np.float16]:
    """The teacher's loss of each token's stretch; minus its sign where the token goes on with the
    stretch of the token before it: losses are never negative, so that the sign is free."""
    losses = unbroken(losses, goes_on, at)
    goes_on = goes_on & ~np.isnan(losses)
    column = _scattered(losses, at, n_tokens)
    column[at] = np.copysign(column[at], np.where(goes_on, -1.0, 1.0)).astype(np.float16)
    return column


def guidance_histogram(known: NDArray[Any]) -> list[int]:
    """Counts of guidance in steps of `HISTOGRAM_STEP_NATS`; the last bin is open."""
    index = np.clip(known / HISTOGRAM_STEP_NATS, 0, HISTOGRAM_BINS - 1).astype(np.int64)
    counts: list[int] = np.bincount(index, minlength=HISTOGRAM_BINS).tolist()
    return counts


def _one_to_one(
    alignment: Alignment, spans: NDArray[np.int64], teacher_spans: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mask of the student tokens whose text is exactly one teacher token."""
    if not len(teacher_spans):
        return np.zeros(len(spans), bool)
    # unmapped tokens have first = -1, a valid place whose comparison is masked
    starts = np.take(teacher_spans[:, 0], alignment.first) == spans[:, 0]
    ends = np.take(teacher_spans[:, 1], alignment.last) == spans[:, 1]
    alone = alignment.mapped & (alignment.first == alignment.last)
    exact: NDArray[np.bool_] = alone & starts & ends
    return exact


def _positions(counts: NDArray[np.int64], *, before: int, after: int) -> NDArray[np.int64]:
    """Where the text's own tokens stand in a stream that also holds separators."""
    document = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(document)) + document * (before + after) + before
