"""From what teachers say to the student's tokens: their losses become guidance, their alternatives
targets. Pure functions over arrays, all documents of a part at once, laid over one axis of bytes.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vocagnolm.alignment import (
    KINDS,
    Alignment,
    SoftTargets,
    TargetTable,
    TeacherTokens,
    TextTokenizer,
    TokenSpans,
    carry,
    kinds,
    stretch_alignment,
    stretches,
    whole_sums,
)
from vocagnolm.alignment.alignment import Aggregation, chunk_align
from vocagnolm.alignment.targets import TARGETS_RULE, Spelling, spell, unmeasured_targets
from vocagnolm.alternatives import Alternatives, AlternativesSpec, Vocabulary
from vocagnolm.base.files import write_bytes
from vocagnolm.chat import ChatTokenizer
from vocagnolm.errors import BlocksError, WriteError
from vocagnolm.recipe.sections import ObjectiveConfig
from vocagnolm.storage.copies import cache_folder
from vocagnolm.store import LossStore
from vocagnolm.store.format import encode_vocabulary
from vocagnolm.store.reader import SCORE_WITH_ALTERNATIVES

TeacherLosses = tuple[NDArray[Any], NDArray[Any]]
"""Byte lengths of the teacher's tokens, which tile the document, and their nll."""
Combine = Literal["min", "best_document"]


@dataclass(frozen=True, kw_only=True)
class GuidancePlan:
    """What blocks hold of the teachers."""

    aggregation: Aggregation = "max"
    combine: Combine = "min"
    stretch: bool = False
    """Also the losses of whole stretches."""
    teacher_losses: bool = False
    """Also all losses of the (one) teacher's own tokens."""


@dataclass(frozen=True)
class Laid:
    """The student's tokens of some documents, laid end to end with a byte between two documents."""

    spans: NDArray[np.int64]
    document: NDArray[np.int64]
    """Per token its document."""
    origins: NDArray[np.int64]
    """Where each document begins."""


@dataclass(frozen=True)
class LaidTeacher:
    """One teacher's tokens of laid documents, where it has them."""

    spans: NDArray[np.int64]
    nll: NDArray[Any]
    bits: NDArray[np.float64]
    """Per document its nats per byte; infinite where it has none."""
    packed: NDArray[np.uint32] | None = None
    """[M, K] Alternatives, where they are wanted."""
    begins: NDArray[np.int64] | None = None
    """Indices of the tokens with which texts begin, where alternatives are wanted."""


def lay(students: Sequence[TokenSpans]) -> Laid:
    widths = np.array([student.n_bytes for student in students], np.int64)
    origins = np.concatenate([[0], np.cumsum(widths + 1)])[:-1].astype(np.int64)
    counts = [len(student) for student in students]
    return Laid(
        end_to_end([student.spans for student in students], origins),
        np.repeat(np.arange(len(students)), counts),
        origins,
    )


def lay_teacher(
    entries: Sequence[TeacherLosses | None],
    ours: Laid,
    alternatives: Sequence[NDArray[np.uint32] | None] | None = None,
) -> LaidTeacher:
    held = [(entry, origin) for entry, origin in zip(entries, ours.origins, strict=True) if entry]
    spans = end_to_end(
        [tiling(token_bytes) for (token_bytes, _), _ in held],
        np.array([origin for _, origin in held], np.int64),
    )
    nll = np.concatenate([nll for (_, nll), _ in held]) if held else np.zeros(0, np.float32)
    bits = np.array([np.inf if entry is None else nats_per_byte(*entry) for entry in entries])
    packed = begins = None
    if alternatives is not None:
        counts = np.array([len(nll) for (_, nll), _ in held], np.int64)
        begins = (np.cumsum(counts) - counts)[counts > 0]
        known = [rows for rows in alternatives if rows is not None]
        packed = np.zeros((0, 1), np.uint32)
        if known:  # those of one document are left where they are: mapped from its file
            packed = known[0] if len(known) == 1 else np.concatenate(known)
    return LaidTeacher(spans, nll, bits, packed, begins)


def nats_and_bytes(token_bytes: NDArray[Any], nll: NDArray[Any]) -> tuple[float, float]:
    """The sum of a document's losses, and the bytes of the tokens that have one."""
    known = np.isfinite(nll)
    nats = np.sum(nll, dtype=np.float64, where=known)
    return float(nats), float(np.sum(token_bytes, dtype=np.int64, where=known))


def nats_per_byte(token_bytes: NDArray[Any], nll: NDArray[Any]) -> float:
    """A document's mean loss per byte; infinite where no token has a loss."""
    nats, covered = nats_and_bytes(token_bytes, nll)
    return nats / covered if covered else np.inf


# ---- losses ----


@dataclass(frozen=True)
class CarryRule:
    """Which of a teacher's losses guide a student token, and how they become one number."""

    unit: Literal["token", "stretch", "chunk"] = "token"
    """The teacher tokens that cover it, all those of its stretch, or those of its chunk."""
    aggregation: Aggregation = "max"
    """How losses become one number; of a stretch they are added up."""
    chunks: int = 1

    @classmethod
    def of(cls, config: ObjectiveConfig, aggregation: Aggregation) -> "CarryRule":
        unit = "stretch" if config.by_stretch else config.rule.unit
        return cls(unit, aggregation, config.n_chunks)


def carry_losses(ranges: Alignment, nll: NDArray[Any], rule: CarryRule) -> NDArray[Any]:
    """One teacher's loss for every student token. `ranges`: the teacher tokens that cover the
    token, or with `stretch` those of its stretch."""
    if rule.unit == "stretch":
        return whole_sums(ranges, nll)
    if rule.unit == "chunk":
        return _chunk_losses(ranges, nll, rule)
    return carry(ranges, nll, rule.aggregation)


def _chunk_losses(ranges: Alignment, nll: NDArray[Any], rule: CarryRule) -> NDArray[np.float32]:
    """The coarse baseline for one block: the block and the teacher tokens behind it are each cut
    into chunks; every mapped student token gets the losses of its teacher chunk, aggregated as
    those behind a token are (section 3.2 of the paper). Tokens without text (BOS, EOS) lie in
    chunks too, but have no guidance: they follow `unmapped`."""
    mapped = ranges.mapped
    if not mapped.any():
        return np.full(len(ranges), np.nan, np.float32)
    first, last = int(ranges.first[mapped].min()), int(ranges.last[mapped].max())
    behind = np.asarray(nll[first : last + 1], np.float32)
    chunks = chunk_align(len(ranges), len(behind), rule.chunks)
    guidance = carry(chunks, behind, rule.aggregation).astype(np.float32)
    guidance[~mapped] = np.nan
    return guidance


def student_guidance(
    ours: Laid,
    theirs: Sequence[LaidTeacher],
    alignments: Sequence[Alignment],
    rule: CarryRule,
    how: Combine,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Per token the teachers' combined loss, and whether the token goes on with the stretch of the
    token before it. Several teachers are combined over stretches that all of them share; a document
    that one lacks has the stretches of the others."""
    if rule.unit != "stretch":
        pairs = zip(alignments, theirs, strict=True)
        carried = [carry_losses(ranges, teacher.nll, rule) for ranges, teacher in pairs]
        return combine(carried, theirs, ours, how), np.zeros(len(carried[0]), bool)
    losses = np.full(len(ours.spans), np.nan)
    begins = np.zeros(len(ours.spans), bool)
    for among, documents in _by_teachers(theirs, how):
        here = np.isin(ours.document, documents)
        part = Laid(ours.spans[here], ours.document[here], ours.origins)
        common = stretches(part.spans, *(teacher.spans for teacher in among))
        carried = [
            carry_losses(stretch_alignment(common, teacher.spans), teacher.nll, rule)
            for teacher in among
        ]
        losses[here] = combine(carried, among, part, how)
        begins[here] = common.begins
    return losses, ~np.isnan(losses) & ~begins


def _by_teachers(
    theirs: Sequence[LaidTeacher], how: Combine
) -> Iterator[tuple[list[LaidTeacher], list[int]]]:
    """Groups of documents: those that the same teachers have, or with `best_document` those that
    the same teacher knows best."""
    bits = np.stack([teacher.bits for teacher in theirs])
    has = np.isfinite(bits)
    if how == "best_document":  # its own stretches, not those that it shares with the others
        has &= np.arange(len(theirs))[:, None] == bits.argmin(0)
    groups: dict[tuple[bool, ...], list[int]] = {}
    for document in range(has.shape[1]):
        groups.setdefault(tuple(has[:, document].tolist()), []).append(document)
    for present, documents in groups.items():
        if any(present):
            yield [entry for entry, there in zip(theirs, present, strict=True) if there], documents


def combine(
    carried: Sequence[NDArray[Any]], theirs: Sequence[LaidTeacher], ours: Laid, how: Combine
) -> NDArray[Any]:
    """One loss per token out of those of several teachers: the smallest, or that of the teacher
    which knows the token's document best. What one teacher lacks is taken from the others."""
    if len(carried) == 1:
        return carried[0]
    table = np.stack(carried)
    smallest: NDArray[Any] = np.fmin.reduce(table, axis=0)  # NaN where no teacher has a loss
    if how == "min":
        return smallest
    chosen = np.stack([teacher.bits for teacher in theirs]).argmin(0)[ours.document]
    best = np.take_along_axis(table, chosen[None], axis=0)[0]
    return np.where(np.isnan(best), smallest, best)


def unbroken(
    losses: NDArray[Any], goes_on: NDArray[np.bool_], position: NDArray[np.int64]
) -> NDArray[Any]:
    """The losses without those of stretches whose tokens are not neighbours at their places: a
    template's tokens stand between them."""
    apart = goes_on & (np.diff(position, prepend=position[:1] - 1) != 1)
    if not apart.any():
        return losses
    number = np.cumsum(~goes_on)
    return np.where(np.isin(number, number[apart]), np.nan, losses)


def cut_stretches(
    losses: NDArray[Any], goes_on: NDArray[np.bool_], *, cut_at_end: bool
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The stretches of a window of the stream: per token the loss of its stretch, and its number.
    The window's first token is read and not predicted, and with `cut_at_end` its last stretch goes
    on behind it: what is not whole has no loss. Every token without one is a stretch of its own;
    numbers count from the first token that is predicted."""
    begins = np.flatnonzero(~goes_on)
    behind_first = begins[begins > 0]
    known = np.asarray(losses, np.float32).copy()
    known[: behind_first[0] if len(behind_first) else None] = np.nan
    if cut_at_end:
        known[begins[-1] if len(begins) else 0 :] = np.nan
    number = np.cumsum(np.isnan(known) | ~goes_on)
    return known, np.maximum(number - number[1], 0)


def kind_counts(ours: Laid, teacher: LaidTeacher) -> list[int]:
    """The number of tokens by the kind of their stretch."""
    token_kinds = kinds(stretches(ours.spans, teacher.spans), teacher.spans)
    counts: list[int] = np.bincount(token_kinds, minlength=len(KINDS)).tolist()
    return counts


def tiling(token_bytes: NDArray[Any]) -> NDArray[np.int64]:
    """Spans `[N, 2]` of tokens that tile a text, from their byte lengths."""
    ends = np.cumsum(token_bytes, dtype=np.int64)
    spans = np.empty((len(ends), 2), np.int64)
    spans[:, 1] = ends
    spans[:1, 0] = 0
    spans[1:, 0] = ends[:-1]
    return spans


def end_to_end(
    documents: Sequence[NDArray[np.int64]], origins: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Spans of several documents on one common axis of bytes."""
    if not documents:
        return np.zeros((0, 2), np.int64)
    lengths = [len(spans) for spans in documents]
    return np.concatenate(documents) + np.repeat(origins, lengths)[:, None]


# ---- targets ----


# Below this share of a teacher's tokens that it can spell, a student's vocabulary is the wrong one.
_LEAST_SPELLED = 0.01


@dataclass(frozen=True, kw_only=True)
class TargetsPlan:
    """What blocks hold of the teachers' alternatives."""

    tables: tuple[TargetTable, ...]
    """One for every store."""
    spec: AlternativesSpec
    inside: bool
    weights: tuple[float, ...]
    with_label: bool = False
    """Also what is known of the label's own probability, which needs the teacher's losses."""

    def given(self, packed: NDArray[np.uint32]) -> Alternatives:
        """The alternatives that count, of all that a store holds of some documents; it may lack
        them all."""
        count = self.spec.count
        rows = packed[:, :count] if len(packed) else np.zeros((0, count), np.uint32)
        return Alternatives(rows, self.spec.sampled)


def common_alternatives(stores: Sequence[LossStore], count: int | None) -> AlternativesSpec:
    """How many alternatives the blocks have: as many as are asked for, or all. Refused where a
    store has none or too few, or where stores differ."""
    kept: list[AlternativesSpec] = []
    for store in stores:
        if (spec := store.kept_alternatives) is None:
            raise BlocksError(
                f"{store.path} holds no alternatives to distil from. {SCORE_WITH_ALTERNATIVES}"
            )
        kept.append(spec)
    each = ", ".join(f"{s.path} has {spec}" for s, spec in zip(stores, kept, strict=True))
    least = min(spec.count for spec in kept)
    if len({spec.sampled for spec in kept}) > 1:
        raise BlocksError(
            f"the stores hold two kinds of alternatives: {each}. Sampled and most likely tokens "
            f"cannot be averaged: use stores of one kind."
        )
    if count is None and len(set(kept)) > 1:
        raise BlocksError(
            f"the stores hold different numbers of alternatives: {each}. Set "
            f"objective.alternatives to at most {least}."
        )
    if count is not None and count > least:
        held_by = stores[0].path if len(stores) == 1 else "a store"
        raise BlocksError(
            f"objective.alternatives is {count}, but {held_by} holds {least} per token. Use at "
            f"most {least}, or score the corpus again with --alternatives {count} into another "
            "folder."
        )
    return AlternativesSpec(count or least, kept[0].sampled)


def target_table(tokenizer: TextTokenizer, vocabulary: Vocabulary, eos: int | None) -> TargetTable:
    """What a teacher's tokens become for the student, read from the user's cache, or made and put
    there. The teacher's ends become `eos`, or in conversations the end of a turn."""
    end_id = tokenizer.end_of_turn if isinstance(tokenizer, ChatTokenizer) else eos
    student = tokenizer.base if isinstance(tokenizer, ChatTokenizer) else tokenizer
    digest = hashlib.sha256(encode_vocabulary(vocabulary)).hexdigest()
    key = f"{TARGETS_RULE} {digest} {student.fingerprint}"
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    path = cache_folder() / "spelling" / name
    spelling = _cached(path, len(vocabulary.content))
    if spelling is None:
        spelling = spell(student, vocabulary)
        content = save(vars(spelling))
        with contextlib.suppress(WriteError):  # a home that cannot be written: made again next time
            write_bytes(path, hashlib.sha256(content).digest() + content)
    table = TargetTable(student, vocabulary, end_id, spelling)
    spelled = float((table.targets[0] >= 0).mean())
    if spelled < _LEAST_SPELLED:
        raise BlocksError(
            f"{student.name} ({student.kind}) can represent {spelled:.1%} of the teacher's tokens: "
            f"its vocabulary has neither their characters nor byte tokens. Use method guided "
            f"instead."
        )
    return table


def _cached(path: Path, size: int) -> Spelling | None:
    """The spelling that another run kept, behind a checksum; None where the file is not whole."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            spelling = Spelling(**load(content[32:]))
            return spelling if len(spelling.token) == size else None
    except (OSError, SafetensorError, ValueError):
        pass
    return None


def carry_targets(
    labels: NDArray[Any],
    ours: Laid,
    theirs: Sequence[LaidTeacher],
    alignments: Sequence[Alignment],
    text: NDArray[np.uint8],
    plan: TargetsPlan,
) -> tuple[SoftTargets, NDArray[np.int64]]:
    """The teachers' targets side by side, each by its weight; where one has no say, the others
    share its weight. What became of the alternatives is counted for the first teacher, whose tokens
    at shared starts come second."""
    carried, shared = [], []
    for table, teacher, alignment in zip(plan.tables, theirs, alignments, strict=True):
        assert teacher.packed is not None
        given = plan.given(teacher.packed)
        tokens = TeacherTokens(
            spans=teacher.spans,
            alternatives=given,
            begins=teacher.begins,
            nll=teacher.nll if plan.with_label else None,
        )
        known = (table, labels, ours.spans, tokens, alignment, text)
        own, rows = unmeasured_targets(*known, inside=plan.inside)
        carried.append(own)
        shared.append(rows)
    if len(carried) == 1:
        return carried[0], shared[0]
    weights = np.array(plan.weights)[:, None] * np.stack([target.has_targets for target in carried])
    shares = (weights / np.maximum(weights.sum(0), 1e-30)).astype(np.float32)
    weighted = [
        target.probability * share[:, None] for target, share in zip(carried, shares, strict=True)
    ]
    together = replace(
        carried[0],
        ids=np.concatenate([target.ids for target in carried], axis=1),
        probability=np.concatenate(weighted, axis=1),
    )
    return together, shared[0]
