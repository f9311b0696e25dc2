"""From a teacher's alternatives to targets in the student's vocabulary.

At a place where the teacher expects some of its tokens, the student is to expect the same text: the
alternatives become a sparse distribution over the student's tokens (`carry_alternatives`). What an
alternative becomes depends on the two vocabularies alone, and is looked up in a table that is made
once (`spell`). NumPy and tokenizers, no torch.

Shape letters: N student tokens, M teacher tokens, K alternatives, V entries of the teacher's
vocabulary.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vocagnolm.alignment.alignment import Alignment, IntArray
from vocagnolm.alignment.tokenizer import TextTokenizer
from vocagnolm.alignment.vocabulary import components
from vocagnolm.alternatives import FOLLOWS_BIT, ID_SHIFT, Alternatives, Vocabulary

# What becomes of an alternative, as places in `TargetMass.mass`.
UNSPELLED, FIRST_OF_SEVERAL, EXACT, FOLLOWING = range(4)


def token_texts(tokenizer: TextTokenizer, ends: Iterable[int]) -> Vocabulary:
    """What every token of a tokenizer spells; special tokens spell nothing. `ends`: those that end
    a text or a turn."""
    control = tokenizer.control_ids
    size = max(tokenizer.vocabulary.values(), default=-1) + 1
    entries = [None if n in control else tokenizer.bytes_of(n) for n in range(size)]
    spelled = b"".join(tokenizer.bytes_of(n) or b"" for n in tokenizer.spans("a").ids.tolist())
    return Vocabulary.of(entries, ends, dummy_space=spelled.startswith(b" "))


# ---- what a student makes of some bytes ----


class Speller:
    """The first token of a student's own tokenisation of some bytes, read in the middle of a
    text."""

    def __init__(self, student: TextTokenizer):
        self._tokenizer = _without_beginning(student)
        control = student.control_ids
        size = max(student.vocabulary.values(), default=-1) + 1
        self.texts = [None if n in control else student.bytes_of(n) for n in range(size)]
        """By the student's ids; None for tokens that are no text."""
        self._ids = {text: n for n, text in reversed([*enumerate(self.texts)]) if text}
        self._longest = max(map(len, self._ids), default=0)
        self._known: dict[bytes, tuple[int, bool]] = {}

    def __call__(self, text: bytes) -> tuple[int, bool]:
        """(id, whether it spells all of it); -1 where the student cannot spell it."""
        if text not in self._known:
            ids, exact = self.batch([text])
            self._known[text] = int(ids[0]), bool(exact[0])
        return self._known[text]

    def batch(self, texts: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        ids = np.full(len(texts), -1, np.int32)
        decoded: list[tuple[int, str]] = []
        for place, text in enumerate(texts):
            try:
                decoded.append((place, text.decode()))
            except UnicodeDecodeError:  # not whole characters: no tokenizer reads that
                ids[place] = self._longest_prefix(text)
        encodings = self._tokenizer.encode_batch_fast(
            [text for _, text in decoded], add_special_tokens=False
        )
        for (place, _), encoding in zip(decoded, encodings, strict=True):
            first = encoding.ids[0] if len(encoding.ids) else -1
            spelled = self.texts[first] if first >= 0 else None
            if spelled and texts[place].startswith(spelled):  # else a normaliser changed it
                ids[place] = first
        exact = [n >= 0 and self.texts[n] == text for n, text in zip(ids, texts, strict=True)]
        return ids, np.array(exact, bool)

    def _longest_prefix(self, text: bytes) -> int:
        for end in range(min(len(text), self._longest), 0, -1):
            if (found := self._ids.get(text[:end])) is not None:
                return found
        return -1


def _without_beginning(student: TextTokenizer) -> Tokenizer:
    """A tokenizer without what it does at the beginning of a text: no dummy space is put there,
    none is taken away."""
    description: dict[str, Any] = json.loads(student._tokenizer.to_str())
    steps = components(description.get("normalizer"), "normalizers")
    steps = [step for step in steps if step["type"] not in ("Prepend", "Strip")]
    description["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    splits = components(description.get("pre_tokenizer"), "pretokenizers")
    for step in splits:
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        if "add_prefix_space" in step:
            step["add_prefix_space"] = False
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splits} if splits else None
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.encode_special_tokens = True
    return tokenizer


@dataclass(frozen=True)
class Spelling:
    """What a student makes of a teacher's vocabulary, by place in `Vocabulary.content`: entry p is
    about the bytes from p to the end of the token that p lies in."""

    first: NDArray[np.int32]
    """The student's first token of them; -1 where it has none."""
    exact: NDArray[np.bool_]
    """That token is all of them."""


def spell(speller: Speller, vocabulary: Vocabulary, *, inside: bool = True) -> Spelling:
    """`inside`: also what is left of a token behind its first bytes; else whole tokens alone."""
    content = vocabulary.content.tobytes()
    offsets = vocabulary.offsets.tolist()
    number: dict[bytes, int] = {}
    places = np.full(len(content), -1, np.int64)
    for start, end in zip(offsets, offsets[1:], strict=False):
        for place in range(start, end if inside else min(start + 1, end)):
            places[place] = number.setdefault(content[place:end], len(number))
    ids, exact = speller.batch(list(number))
    known = places >= 0
    first = np.full(len(content), -1, np.int32)
    whole = np.zeros(len(content), bool)
    first[known], whole[known] = ids[places[known]], exact[places[known]]
    return Spelling(first, whole)


class TargetTable:
    """What every alternative of a teacher becomes for a student."""

    def __init__(
        self,
        student: TextTokenizer,
        vocabulary: Vocabulary,
        end_id: int | None,
        spelling: Spelling | None = None,
    ):
        """`end_id`: the student's token that ends a text, or a turn, which all of the teacher's
        ends become. `spelling`: where it is known already."""
        self.student = student
        self.vocabulary = vocabulary
        self.end_id = -1 if end_id is None else end_id
        self.spelling = spelling or spell(self.speller, vocabulary)

    def __reduce__(self) -> Any:
        end = None if self.end_id < 0 else self.end_id
        return TargetTable, (self.student, self.vocabulary, end, self.spelling)

    @cached_property
    def speller(self) -> Speller:
        return Speller(self.student)

    @cached_property
    def whole(self) -> NDArray[np.int32]:
        """[V + 1] The student's first token of every entry, -1 where there is none; the last one
        stands for ids beyond the vocabulary."""
        return self._by_id(self.spelling.first, -1, self.end_id)

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """[V + 1] `UNSPELLED`, `FIRST_OF_SEVERAL` or `EXACT`."""
        exact = np.where(self.spelling.exact, EXACT, FIRST_OF_SEVERAL)
        kinds = np.where(self.spelling.first >= 0, exact, UNSPELLED).astype(np.uint8)
        return self._by_id(kinds, UNSPELLED, UNSPELLED if self.end_id < 0 else EXACT)

    def _by_id(self, values: NDArray[Any], missing: int, end: int) -> NDArray[Any]:
        spelled = self.vocabulary.lengths > 0
        table = np.full(len(self.vocabulary) + 1, missing, values.dtype)
        table[:-1][spelled] = values[self.vocabulary.offsets[:-1][spelled]]
        ends = self.vocabulary.ends
        table[ends[ends < len(self.vocabulary)]] = end
        return table

    @cached_property
    def student_lengths(self) -> IntArray:
        """Bytes of the student's tokens, by id; 0 for those that are no text."""
        return np.array([len(text or b"") for text in self.speller.texts], np.int64)


# ---- from alternatives to targets ----


@dataclass
class TargetMass:
    """What became of the teacher's alternatives, as sums over the student's tokens."""

    tokens: int = 0
    shared: int = 0
    """Tokens that begin where a teacher token begins, which has alternatives."""
    inside: int = 0
    """Tokens that begin inside such a teacher token."""
    continued: int = 0
    """Of these: where an alternative goes on from the bytes already read."""
    mass: list[float] = field(default_factory=lambda: [0.0] * 4)
    """At shared starts, the probability of alternatives that the student cannot spell, spells by
    several tokens (of which the first is the target), spells by one, and of the token that follows.
    What is left of `shared` lies beyond the alternatives."""

    def add(self, other: "TargetMass") -> None:
        for name in ("tokens", "shared", "inside", "continued"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.mass = [a + b for a, b in zip(self.mass, other.mass, strict=True)]


@dataclass(frozen=True)
class SoftTargets:
    """Per student token a sparse distribution beside the label: all probability that is not here is
    the label's."""

    ids: NDArray[np.int32]
    """[N, K] In the student's vocabulary; the label where there is nothing else."""
    probability: NDArray[np.float32]
    """[N, K] 0 for the label, which has what the others leave."""
    mass: TargetMass


@dataclass(frozen=True, kw_only=True)
class TeacherTokens:
    """A teacher's tokens over a text, or over several texts on one axis of bytes."""

    spans: IntArray
    """[M, 2]"""
    nll: NDArray[Any]
    """[M]"""
    alternatives: Alternatives
    """[M, K]"""


def carry_alternatives(
    table: TargetTable,
    labels: NDArray[np.integer[Any]],
    spans: IntArray,
    teacher: TeacherTokens,
    alignment: Alignment,
    text: NDArray[np.uint8],
    *,
    inside: bool = True,
    begins: IntArray | None = None,
) -> SoftTargets:
    """Targets of the student's tokens `labels` [N] at `spans` [N, 2] of `text`.

        ours, theirs = student.spans(text), teacher.spans(text)
        mapping = align(ours, theirs)
        targets = carry_alternatives(table, ours.ids, ours.spans, known, mapping, encoded)

    A student token that begins where a teacher token begins: every alternative becomes the first
    token of the student's own tokenisation of its bytes, the one that really follows becomes the
    label, and an end of text or turn the student's. What the student cannot spell, and what lies
    beyond the K alternatives, is the label's.

    One that begins *inside* a teacher token (`inside`; else it has its label alone): the
    alternatives that begin with the bytes already read count, without those bytes, renormalised
    together with the token that follows.

    `begins`: the bytes where texts begin, [0] for one text.
    """
    labels = np.asarray(labels, np.int32)
    packed, sampled = teacher.alternatives.packed, teacher.alternatives.sampled
    count = packed.shape[1]
    ids = np.repeat(labels[:, None], count, axis=1)
    probability = np.zeros((len(labels), count), np.float32)
    mass = TargetMass(tokens=len(labels))
    if not len(packed) or not len(labels):
        return SoftTargets(ids, probability, mass)
    given = teacher.alternatives.present[:, 0]
    place = alignment.first
    mapped = (place >= 0) & given[place]
    read = spans[:, 0] - teacher.spans[place, 0]
    shared = np.flatnonzero(mapped & (read == 0))
    odd = _odd_places(table, teacher, np.zeros(1, np.int64) if begins is None else begins)
    lead = table.student_lengths[labels] > spans[:, 1] - spans[:, 0]

    rows = packed[place[shared]]
    alternative = rows >> ID_SHIFT
    target = table.whole.take(alternative, mode="clip")
    p = teacher.alternatives[place[shared]].mass
    follows = rows & FOLLOWS_BIT != 0
    kinds = table.kinds.take(alternative, mode="clip")
    kinds[follows] = FOLLOWING
    own = labels[shared, None]
    nothing = follows | (target < 0) | (target == own)
    ids[shared] = np.where(nothing, own, target)
    probability[shared] = np.where(nothing, np.float32(0), p)
    mass.shared = len(shared)
    mass.mass = np.bincount(kinds.ravel(), p.ravel(), minlength=4).tolist()

    within = np.flatnonzero(mapped & (read > 0))
    mass.inside = len(within)
    if inside:
        plain = within[~(odd[place[within]] | lead[within])]
        _continue(table, plain, place, read, teacher, text, sampled, ids, probability)
    # dummy spaces: a few places, one by one
    for i in np.flatnonzero(mapped & (odd[place] | lead) & ((read == 0) | inside)).tolist():
        ids[i], probability[i] = _at_odd_place(
            table, int(labels[i]), spans[i], teacher, int(place[i]), int(read[i]), text
        )
    if len(within):
        mass.continued = int((probability[within] > 0).any(axis=1).sum())
    return SoftTargets(ids, probability, mass)


def _continue(
    table: TargetTable,
    tokens: IntArray,
    place: IntArray,
    read: IntArray,
    teacher: TeacherTokens,
    text: NDArray[np.uint8],
    sampled: bool,
    ids: NDArray[np.int32],
    probability: NDArray[np.float32],
) -> None:
    """Student tokens that begin inside a teacher token, in place: alternatives that begin with the
    bytes already read."""
    vocabulary, there = table.vocabulary, place[tokens]
    given = teacher.alternatives[there]
    alternative, follows = given.ids, given.follows
    known = np.append(vocabulary.lengths, 0).take(alternative, mode="clip")
    start = np.append(vocabulary.offsets[:-1], 0).astype(np.int64).take(alternative, mode="clip")
    row, column = np.nonzero((known > read[tokens, None]) & ~follows & given.present)
    origin, from_byte = teacher.spans[there, 0][row], start[row, column]
    wanted = read[tokens][row]
    # a byte of all of them at a time: few have more than the first in common
    other, going, at = np.zeros(len(row), bool), np.arange(len(row)), 0
    while len(going):
        same = vocabulary.content[from_byte[going] + at] == text[origin[going] + at]
        other[going[~same]] = True
        at += 1
        going = going[same & (wanted[going] > at)]
    alive = np.flatnonzero(~other)
    row, column = row[alive], column[alive]
    mass = np.zeros(alternative.shape, np.float32)
    mass[row, column] = given.mass[row, column]
    total = mass.sum(axis=1)
    total += (given.mass * follows).sum(axis=1) if sampled else _probability(teacher.nll[there])
    target = table.spelling.first[from_byte[alive] + wanted[alive]]
    own = ids[tokens[row], column]
    good = (target >= 0) & (target != own)
    row, column = row[good], column[good]
    ids[tokens[row], column] = target[good]
    probability[tokens[row], column] = mass[row, column] / total[row]


def _probability(nll: NDArray[Any]) -> NDArray[np.float32]:
    return np.exp(-np.asarray(nll, np.float32))


def _odd_places(
    table: TargetTable, teacher: TeacherTokens, begins: IntArray
) -> NDArray[np.bool_]:
    """Teacher tokens that stand for fewer bytes than they spell: behind a dummy space, at the
    beginning of a text or of a message."""
    widths = teacher.spans[:, 1] - teacher.spans[:, 0]
    packed = teacher.alternatives.packed
    row, column = np.nonzero((packed & FOLLOWS_BIT != 0) & teacher.alternatives.present)
    lengths = np.append(table.vocabulary.lengths, 0)
    spelled = lengths.take(packed[row, column] >> ID_SHIFT, mode="clip")
    odd = np.zeros(len(widths), bool)
    odd[row] = spelled > widths[row]
    if table.vocabulary.dummy_space:
        odd |= np.isin(teacher.spans[:, 0], begins) & (widths > 0)
    return odd


def _at_odd_place(
    table: TargetTable,
    label: int,
    span: IntArray,
    teacher: TeacherTokens,
    place: int,
    read: int,
    text: NDArray[np.uint8],
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """One token's targets, where a token on either side spells a space that is not in the text."""
    given = teacher.alternatives[place : place + 1]
    vocabulary, speller = table.vocabulary, table.speller
    entries = [
        vocabulary[n] if n < len(vocabulary) else b"" for n in given.ids[0].tolist()
    ]
    start, end = teacher.spans[place].tolist()
    following = next((e for e, f in zip(entries, given.follows[0], strict=True) if f), None)
    before = b" " if vocabulary.dummy_space else b""
    if following is not None:
        before = following[: max(0, len(following) - (end - start))]
    before += text[start : start + read].tobytes()
    own = speller.texts[label] or b""
    lead = own[: max(0, len(own) - int(span[1] - span[0]))]
    ids = np.full(given.packed.shape[1], label, np.int32)
    mass = np.zeros(len(ids), np.float32)
    total = 0.0
    ends = set(vocabulary.ends.tolist())
    for k, entry in enumerate(entries):
        if not given.present[0, k] or (given.follows[0, k] and not given.sampled):
            continue
        p, index = float(given.mass[0, k]), int(given.ids[0, k])
        target = -1
        if given.follows[0, k]:
            target = label
        elif read == 0 and index in ends:
            target = table.end_id
        elif entry.startswith(before) and len(entry) > len(before):
            target = speller(lead + entry[len(before) :])[0]
        elif read:
            continue
        total += p
        if target not in (-1, label):
            ids[k], mass[k] = target, p
    if read == 0:
        return ids, mass
    if not given.sampled:
        total += float(_probability(teacher.nll[place]))
    return ids, mass / np.float32(max(total, 1e-30))
