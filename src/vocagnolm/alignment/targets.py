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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vocagnolm.alignment.alignment import Alignment, IntArray
from vocagnolm.alignment.spans import components
from vocagnolm.alignment.tokenizer import TextTokenizer
from vocagnolm.alternatives import (
    FOLLOWS_BIT,
    ID_SHIFT,
    NOTHING,
    Alternatives,
    Vocabulary,
    row_sums,
)

# Tokens of a text, or of texts on one axis, on which it is measured what became of alternatives.
_MEASURED_TOKENS = 1 << 14
_SPACE = ord(" ")
_ODD = 4
# What becomes of an alternative.
UNSPELLED, FIRST_OF_SEVERAL, EXACT, FOLLOWING = range(4)


def token_texts(tokenizer: TextTokenizer, ends: Iterable[int]) -> Vocabulary:
    """The bytes of every token of a tokenizer; special tokens have none. `ends`: tokens that end a
    text or a turn."""
    return Vocabulary.of(_entries(tokenizer), ends, _has_dummy_space(tokenizer))


def _entries(tokenizer: TextTokenizer) -> list[bytes | None]:
    """By id; None for tokens that are no text."""
    control = tokenizer.control_ids
    size = max(tokenizer.vocabulary.values(), default=-1) + 1
    return [None if n in control else tokenizer.bytes_of(n) for n in range(size)]


def _has_dummy_space(tokenizer: TextTokenizer) -> bool:
    """Whether a text begins behind a space that is not in it."""
    spelled = [tokenizer.bytes_of(n) or b"" for n in tokenizer.spans("a").ids.tolist()]
    return b"".join(spelled).startswith(b" ")


# ---- what a student makes of some bytes ----


class Speller:
    """Finds the first token of a student's own tokenization of some bytes in the middle of a
    text."""

    def __init__(self, student: TextTokenizer):
        self._tokenizer = _without_beginning(student)
        self.texts = _entries(student)
        self.dummy_space = _has_dummy_space(student)
        self._ids = {text: n for n, text in reversed([*enumerate(self.texts)]) if text}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, texts: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Of each its first token, -1 where the student cannot spell it, and whether that is all of
        it."""
        ids = np.full(len(texts), -1, np.int32)
        decoded: list[tuple[int, str]] = []
        for index, text in enumerate(texts):
            try:
                decoded.append((index, text.decode()))
            except UnicodeDecodeError:  # not whole characters: no tokenizer reads that
                ids[index] = self._longest_prefix(text)
        encodings = self._tokenizer.encode_batch_fast(
            [text for _, text in decoded], add_special_tokens=False
        )
        for (index, _), encoding in zip(decoded, encodings, strict=True):
            first = encoding.ids[0] if len(encoding.ids) else -1
            spelled = self.texts[first] if first >= 0 else None
            if spelled and texts[index].startswith(spelled):  # else a normaliser changed it
                ids[index] = first
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
    behind_space: NDArray[np.int32]
    """[V] By id: the student's first token of a space and the whole token, for places where its own
    token stands behind a space that is not in the text."""


def spell(speller: Speller, vocabulary: Vocabulary, *, inside: bool = True) -> Spelling:
    """`inside`: also what is left of a token behind its first bytes; else whole tokens alone."""
    content = vocabulary.content.tobytes()
    offsets = vocabulary.offsets.tolist()
    number: dict[bytes, int] = {}
    numbers = np.full(len(content), -1, np.int64)
    for start, end in pairwise(offsets):
        for position in range(start, end if inside else min(start + 1, end)):
            numbers[position] = number.setdefault(content[position:end], len(number))
    ids, exact = speller(list(number))
    known = numbers >= 0
    first = np.full(len(content), -1, np.int32)
    whole = np.zeros(len(content), bool)
    first[known], whole[known] = ids[numbers[known]], exact[numbers[known]]
    behind_space = np.full(len(vocabulary), -1, np.int32)
    if speller.dummy_space and inside:
        (spelled,) = np.nonzero(vocabulary.lengths)
        behind_space[spelled], _ = speller([b" " + vocabulary[n] for n in spelled.tolist()])
    return Spelling(first, whole, behind_space)


class TargetTable:
    """The student's token for every alternative of a teacher."""

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
        self.spelling = spelling or spell(Speller(student), vocabulary)

    def __reduce__(self) -> Any:
        end = None if self.end_id < 0 else self.end_id
        return TargetTable, (self.student, self.vocabulary, end, self.spelling)

    @cached_property
    def targets(self) -> NDArray[np.int32]:
        """[4, V + 1] The student's first token for every entry, -1 if there is none; the last
        column stands for ids beyond the vocabulary. Row 0 is the normal case. The others are for
        positions where a token follows a space that is not in the text: for the student (1), for
        the teacher (2: its alternatives without their space, if they have one), or for both (3)."""
        whole = self._by_id(self._starts(self.spelling.first, -1), -1, self.end_id)
        spaced = self._by_id(self.spelling.behind_space, -1, self.end_id)
        has_space = self._starts(self.vocabulary.content, 0) == _SPACE
        rest = np.append(self.spelling.first, [-1, -1])[self.vocabulary.offsets[:-1] + 1]
        rest = np.where(has_space & (self.vocabulary.lengths > 1), rest, -1)
        unspaced = self._by_id(rest.astype(np.int32), -1, self.end_id)
        both = self._by_id(np.where(has_space, whole[:-1], -1), -1, self.end_id)
        return np.stack([whole, spaced, unspaced, both])

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """[V + 1] `UNSPELLED`, `FIRST_OF_SEVERAL` or `EXACT`."""
        exact = np.where(self.spelling.exact, EXACT, FIRST_OF_SEVERAL)
        kinds = np.where(self.spelling.first >= 0, exact, UNSPELLED).astype(np.uint8)
        end = UNSPELLED if self.end_id < 0 else EXACT
        return self._by_id(self._starts(kinds, UNSPELLED), UNSPELLED, end)

    def _starts(self, values: NDArray[Any], missing: int) -> NDArray[Any]:
        """[V] What is known of the first place of every entry."""
        first = np.append(values, values.dtype.type(missing))[self.vocabulary.offsets[:-1]]
        return np.where(self.vocabulary.lengths > 0, first, values.dtype.type(missing))

    def _by_id(self, values: NDArray[Any], missing: int, end: int) -> NDArray[Any]:
        """[V + 1] With what the teacher's ends become."""
        table = np.append(values, values.dtype.type(missing))
        ends = self.vocabulary.ends
        table[ends[ends < len(self.vocabulary)]] = end
        return table

    @cached_property
    def lengths(self) -> IntArray:
        """[V + 1] Length of every entry in bytes; the last one stands for ids beyond the
        vocabulary."""
        return np.append(self.vocabulary.lengths, 0)

    @cached_property
    def first_bytes(self) -> NDArray[np.int16]:
        """[V + 1] First byte of every entry, -1 if it has no bytes."""
        found = self._starts(self.vocabulary.content.astype(np.int16), -1)
        return np.append(found, np.int16(-1))

    @cached_property
    def student_lengths(self) -> NDArray[np.int32]:
        """Lengths of the student's tokens in bytes, by id; control tokens have no text."""
        return np.array([len(entry or b"") for entry in _entries(self.student)], np.int32)


# ---- from alternatives to targets ----


@dataclass(frozen=True, kw_only=True)
class TargetMass:
    """Where the probability of the teacher's alternatives went, as sums over the student's
    tokens."""

    tokens: int = 0
    shared: int = 0
    """Number of tokens that begin where a teacher token with alternatives begins."""
    inside: int = 0
    """Number of tokens that begin inside such a teacher token."""
    continued: int = 0
    """Number of the latter for which an alternative continues the bytes already read."""
    following: float = 0.0
    """At shared starts: probability of the actual next token, if it is among the alternatives."""
    exact: float = 0.0
    """Probability of alternatives that are one student token."""
    several: float = 0.0
    """Probability of alternatives that take several student tokens, of which the first is the
    target."""
    unspelled: float = 0.0
    """Probability of alternatives that the student cannot represent. The rest of `shared` is beyond
    the alternatives."""


@dataclass(frozen=True)
class SoftTargets:
    """A sparse distribution per student token. All probability that is not listed belongs to the
    label."""

    ids: NDArray[np.int32]
    """[N, K] Ids in the student's vocabulary; the label fills unused entries."""
    probability: NDArray[np.float32]
    """[N, K] Probabilities; 0 for the label, which gets what the others leave."""
    has_targets: NDArray[np.bool_]
    """[N] Whether the teacher provides targets here; otherwise there is only the label."""
    mass: TargetMass


@dataclass(frozen=True, kw_only=True)
class TeacherTokens:
    """A teacher's tokens over a text, or over several concatenated texts."""

    spans: IntArray
    """[M, 2]"""
    alternatives: Alternatives
    """[M, K] The alternatives at the position of each token."""


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
    """Distillation targets for the student's tokens `labels` [N] at `spans` [N, 2] of `text`.

        ours, theirs = student.spans(text), teacher.spans(text)
        mapping = align(ours, theirs)
        targets = carry_alternatives(table, ours.ids, ours.spans, known, mapping, encoded)

    If a student token begins where a teacher token begins, every alternative becomes the first
    token of the student's own tokenization of its bytes. The actual next token becomes the label,
    and an end of text or turn becomes the student's. The probability of alternatives that the
    student cannot represent, and the probability beyond the K alternatives, goes to the label.

    If it begins *inside* a teacher token (`inside`; otherwise it has only its label), the
    alternatives that begin with the bytes already read count, without those bytes. They share the
    probability that these bytes do not rule out. The rest might have led here too (probability
    beyond the K alternatives, and alternatives that end before the token begins); it goes to the
    label.

    Where a token of either model follows a space that is not in the text (the dummy space of
    SentencePiece), alternatives are read without it or spelled with it.

    `begins`: the bytes where texts begin, [0] for one text.
    """
    known = (table, labels, spans, teacher, alignment, text)
    found, shared = unmeasured_targets(*known, inside=inside, begins=begins)
    became = measured(table, [(teacher.alternatives, shared)])
    return replace(found, mass=replace(found.mass, **became))


def unmeasured_targets(
    table: TargetTable,
    labels: NDArray[np.integer[Any]],
    spans: IntArray,
    teacher: TeacherTokens,
    alignment: Alignment,
    text: NDArray[np.uint8],
    *,
    inside: bool,
    begins: IntArray | None,
) -> tuple[SoftTargets, IntArray]:
    """As `carry_alternatives`, but of the alternatives' mass only the numbers of tokens; and the
    teacher tokens at shared starts, for `measured`."""
    labels = np.asarray(labels, np.int32)
    given = teacher.alternatives
    if not len(given) or not len(labels):
        ids = np.repeat(labels[:, None], given.packed.shape[1], axis=1)
        nowhere, none = np.zeros(ids.shape, np.float32), np.zeros(len(labels), bool)
        mass = TargetMass(tokens=len(labels))
        return SoftTargets(ids, nowhere, none, mass), np.zeros(0, np.int64)
    position = alignment.first
    # -1, where a token is unmapped, is a position too, and is not looked at
    mapped = (position >= 0) & (given.packed[:, 0] != NOTHING).take(position)
    read = spans[:, 0] - teacher.spans[:, 0].take(position)
    begins = np.zeros(1, np.int64) if begins is None else begins
    behind = 2 * _behind_space(table, teacher, begins).take(position)
    behind = behind + _student_behind_space(table, labels, spans)

    # of all tokens, which is faster than of those alone that begin with a teacher token
    has_targets = mapped & (read == 0) & (behind < _ODD)
    here = given.at(position)
    alternative = here.packed >> ID_SHIFT
    target = table.targets[0].take(alternative, mode="clip")
    for row in np.flatnonzero((behind > 0) & has_targets).tolist():  # few: where texts begin
        target[row] = table.targets[behind[row]].take(alternative[row], mode="clip")
    own = labels[:, None]
    follows = (here.packed & FOLLOWS_BIT) != 0
    takes_part = ~follows & (target >= 0) & (target != own) & has_targets[:, None]
    ids = np.where(takes_part, target, own)
    probability = here.mass
    probability *= takes_part
    shared = position[has_targets]

    within = np.flatnonzero(mapped & (read > 0))
    if inside:
        plain = within[behind.take(within) == 0]
        _continue(table, plain, position, read, teacher, text, ids, probability, has_targets)
    mass = TargetMass(
        tokens=len(position),
        shared=len(shared),
        inside=len(within),
        continued=int(has_targets[within].sum()),
    )
    return SoftTargets(ids, probability, has_targets, mass), shared


def measured(
    table: TargetTable, shared: Sequence[tuple[Alternatives, NDArray[np.integer[Any]]]]
) -> dict[str, Any]:
    """What became of the alternatives at shared starts, by the names in `TargetMass`; of many
    tokens, evenly spread ones stand for all. `shared`: for each piece of a text its alternatives,
    and the teacher tokens there."""
    total = sum(len(rows) for _, rows in shared)
    step, before = total // _MEASURED_TOKENS + 1, 0
    some = []
    for given, rows in shared:
        some.append(given.at(rows[-before % step :: step]).packed)
        before += len(rows)
    here = Alternatives(np.concatenate(some), shared[0][0].sampled)
    kinds = table.kinds.take(here.packed >> ID_SHIFT, mode="clip")
    kinds[(here.packed & FOLLOWS_BIT) != 0] = FOLLOWING
    sums = np.bincount(kinds.ravel(), here.mass.ravel(), minlength=4).astype(np.float64)
    sums *= total / max(len(here), 1)
    names = {"unspelled": UNSPELLED, "several": FIRST_OF_SEVERAL, "exact": EXACT}
    return {name: float(sums[kind]) for name, kind in (names | {"following": FOLLOWING}).items()}


def _continue(
    table: TargetTable,
    tokens: IntArray,
    position: IntArray,
    read: IntArray,
    teacher: TeacherTokens,
    text: NDArray[np.uint8],
    ids: NDArray[np.int32],
    probability: NDArray[np.float32],
    has_targets: NDArray[np.bool_],
) -> None:
    """Student tokens that begin inside a teacher token, in place: alternatives that begin with the
    bytes already read, renormalised by all that these do not rule out."""
    vocabulary, there = table.vocabulary, position.take(tokens)
    given = teacher.alternatives.at(there)
    alternative, p, follows = given.packed >> ID_SHIFT, given.mass, given.follows
    begins = teacher.spans[:, 0].take(there)
    # few have even the first byte in common; of those the others, one at a time
    alike = table.first_bytes.take(alternative, mode="clip") == text.take(begins)[:, None]
    row, column = np.nonzero(alike & ~follows)
    other = alternative[row, column]
    length, wanted = table.lengths.take(other), read.take(tokens.take(row))
    origin, from_byte = begins.take(row), vocabulary.offsets.take(other).astype(np.int64)
    possible, at = np.ones(len(row), bool), 1
    going = np.flatnonzero(np.minimum(wanted, length) > at)
    while len(going):
        same = vocabulary.content.take(from_byte.take(going) + at) == text.take(
            origin.take(going) + at
        )
        possible[going[~same]] = False
        at += 1
        going = going[same & (np.minimum(wanted, length).take(going) > at)]
    mass = p[row, column]
    left = np.bincount(row[possible], mass[possible], minlength=len(tokens)).astype(np.float32)
    left += 1 - row_sums(p * ~follows)
    alive = np.flatnonzero(possible & (length > wanted))
    row, column = row.take(alive), column.take(alive)
    has_targets[tokens.take(row)] = True
    target = table.spelling.first.take(from_byte.take(alive) + wanted.take(alive))
    good = (target >= 0) & (target != ids[tokens.take(row), column])
    row, column = row[good], column[good]
    ids[tokens.take(row), column] = target[good]
    probability[tokens.take(row), column] = mass.take(alive)[good] / left.take(row)


def _behind_space(
    table: TargetTable, teacher: TeacherTokens, begins: IntArray
) -> NDArray[np.int64]:
    """[M] 1 for teacher tokens that spell a space before the text that they stand for: a dummy
    space at the beginning of a text, or the last one of a chat template. `_ODD` for those that
    spell something else there."""
    widths = teacher.spans[:, 1] - teacher.spans[:, 0]
    behind = np.zeros(len(widths), np.int64)
    if table.vocabulary.dummy_space:  # as long as nothing else is known
        behind[np.isin(teacher.spans[:, 0], begins) & (widths > 0)] = 1
    packed = teacher.alternatives.packed
    at = np.flatnonzero((packed & FOLLOWS_BIT) != 0)
    index = packed.ravel().take(at) >> ID_SHIFT
    row = at // packed.shape[1]
    more = table.lengths.take(index, mode="clip") - widths.take(row)
    known = index < len(table.vocabulary)
    behind[row[known]] = 0
    odd = np.flatnonzero(known & (more > 0))
    first = table.vocabulary.content.take(table.vocabulary.offsets.take(index[odd]))
    behind[row[odd]] = np.where((more[odd] == 1) & (first == _SPACE), 1, _ODD)
    return behind


def _student_behind_space(
    table: TargetTable, labels: NDArray[np.integer[Any]], spans: IntArray
) -> NDArray[np.int64]:
    """[N] The same for the student's tokens."""
    behind = np.zeros(len(labels), np.int64)
    (odd,) = np.nonzero(table.student_lengths.take(labels) > spans[:, 1] - spans[:, 0])
    for at in odd.tolist():  # few: where texts begin
        text = table.student.bytes_of(int(labels[at])) or b""
        one_more = len(text) == int(spans[at, 1] - spans[at, 0]) + 1
        behind[at] = 1 if one_more and text.startswith(b" ") else _ODD
    return behind
