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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vocagnolm.alignment.alignment import Alignment, IntArray, carry
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

TARGETS_RULE = 2
"""The version of the rule by which alternatives become targets, in the settings of blocks. Without
one: every alternative, and what is left of it inside a teacher token, is spelled by itself."""
# Tokens of a text, or of texts on one axis, on which it is measured what became of alternatives.
_MEASURED_TOKENS = 1 << 14
_SPACE = ord(" ")
_WHITE_SPACE = (" ", "\n", "\r", "\t")
_ODD = 4
_LEFT = 1e-6  # less is rounding of what the bytes already read leave
_KNOWN_CHARACTERS = 8  # that may complete one that a token breaks off
# What becomes of an alternative.
UNSPELLED, FIRST_OF_SEVERAL, EXACT, FOLLOWING = range(4)


def token_texts(tokenizer: TextTokenizer, ends: Iterable[int]) -> Vocabulary:
    """The bytes of every token of a tokenizer; special tokens have none. `ends`: tokens that end a
    text or a turn."""
    return Vocabulary.of(_entries(tokenizer), ends, _has_dummy_space(tokenizer))


def _entries(tokenizer: TextTokenizer) -> list[bytes | None]:
    """The bytes of every token, by id; None for tokens that are no text."""
    control = tokenizer.control_ids
    size = max(tokenizer.vocabulary.values(), default=-1) + 1
    return [None if n in control else tokenizer.bytes_of(n) for n in range(size)]


def _has_dummy_space(tokenizer: TextTokenizer) -> bool:
    """Whether a text begins behind a space that is not in it."""
    spelled = [tokenizer.bytes_of(n) or b"" for n in tokenizer.spans("a").ids.tolist()]
    return b"".join(spelled).startswith(b" ")


# ---- what a student writes for some bytes ----


class Speller:
    """Finds the tokens that a student writes for a teacher's tokens in the middle of a text."""

    def __init__(self, student: TextTokenizer, vocabulary: Vocabulary):
        """`vocabulary`: the tokens of the teacher."""
        self._tokenizer = _without_beginning(student)
        self.texts = _entries(student)
        self.dummy_space = _has_dummy_space(student)
        self._ids = {text: n for n, text in reversed([*enumerate(self.texts)]) if text}
        self._longest = max(map(len, self._ids), default=0)
        short = {vocabulary[n] for n in np.flatnonzero(vocabulary.lengths == 2).tolist()}
        self._words_take_blank, self._digits_take_blank = b" a" in short, b" 1" in short

    def first(self, texts: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """For each text the first of its `tokens`, -1 where there is none, and whether that is all
        of it."""
        ids = [tokens[0] if tokens else -1 for tokens in self.tokens(texts)]
        exact = [n >= 0 and self.texts[n] == text for n, text in zip(ids, texts, strict=True)]
        return np.array(ids, np.int32), np.array(exact, bool)

    def tokens(self, texts: Sequence[bytes]) -> list[list[int]]:
        """The tokens that the student writes for each text, from its beginning, as far as they end
        within it and are the same for all that may follow: a text that ends with white space or
        inside a character is read with what may stand behind it."""
        readings = [self._readings(text) for text in texts]
        together = [reading for several in readings for reading in several]
        encodings = iter(self._tokenizer.encode_batch_fast(together, add_special_tokens=False))
        return [
            _common([self._within(text, next(encodings).ids) for _ in several])
            if several
            else self._longest_prefix(text)
            for text, several in zip(texts, readings, strict=True)
        ]

    def _readings(self, text: bytes) -> list[str]:
        """The text with what may follow; none where it begins inside a character."""
        try:
            whole = text.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return []
            whole = text[: error.start].decode()
            return [whole + character for character in self._completions(text[error.start :])]
        return [whole + self._behind(whole)] if whole.endswith(_WHITE_SPACE) else [whole]

    def _behind(self, text: str) -> str:
        """What a teacher may write behind a token that ends with white space: a word, or, where
        words take the last blank with them, a digit or a word with a blank of its own."""
        if not (self._words_take_blank and text.endswith(" ")):
            return "a"
        return " a" if self._digits_take_blank or text.endswith("  ") else "1"

    def _completions(self, beginning: bytes) -> list[str]:
        """Characters that begin with these bytes: the first ones that the student's vocabulary
        holds, which are frequent, and one that it does not hold."""
        known = self._characters.get(beginning, [])
        missing = (2 if beginning < b"\xe0" else 3 if beginning < b"\xf0" else 4) - len(beginning)
        for more in product(range(0x80, 0xC0), repeat=missing):
            with suppress(UnicodeDecodeError):  # not all bytes may follow each other
                other = (beginning + bytes(more)).decode()
                if other not in known:
                    return [*known[:_KNOWN_CHARACTERS], other]
        return known[:_KNOWN_CHARACTERS]

    @cached_property
    def _characters(self) -> dict[bytes, list[str]]:
        """Characters of several bytes in the student's vocabulary, by the bytes that they begin
        with, in the order of their tokens."""
        characters: dict[str, None] = {}
        for text in filter(None, self.texts):
            if not text.isascii():
                characters |= dict.fromkeys(text.decode(errors="ignore"))
        by_beginning: dict[bytes, list[str]] = {}
        for character in characters:
            encoded = character.encode()
            for end in range(1, len(encoded)):
                by_beginning.setdefault(encoded[:end], []).append(character)
        return by_beginning

    def _within(self, text: bytes, ids: list[int]) -> list[int]:
        """The tokens that spell the text from its beginning and end within it."""
        end = count = 0
        for index in ids:
            spelled = self.texts[index]
            if not spelled or not text.startswith(spelled, end):  # longer, or normalised
                break
            end, count = end + len(spelled), count + 1
        return ids[:count]

    def _longest_prefix(self, text: bytes) -> list[int]:
        for end in range(min(len(text), self._longest), 0, -1):
            if (index := self._ids.get(text[:end])) is not None:
                return [index]
        return []


def _common(rows: Sequence[list[int]]) -> list[int]:
    """The tokens with which all rows begin."""
    shortest = min(rows, key=len)
    for n, token in enumerate(shortest):
        if any(row[n] != token for row in rows):
            return shortest[:n]
    return shortest


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
    """What a student writes for the tokens of a teacher's vocabulary. The first two arrays are by
    place in `Vocabulary.content`: -1 where the student has no boundary in a token, or what it
    writes there depends on the text that follows."""

    token: NDArray[np.int32]
    """The student's token that begins at the place."""
    before: NDArray[np.int32]
    """The one that ends there; -1 where a token of the teacher begins."""
    exact: NDArray[np.bool_]
    """[V] By id: the student writes one token, which is all of it."""
    behind_space: NDArray[np.int32]
    """[V] The student's first token of a space and the teacher's token, for places where its own
    token stands behind a space that is not in the text."""
    without_space: NDArray[np.int32]
    """[V] The student's first token of what follows the space that the teacher's token begins with,
    for places where the teacher's token stands behind a space that is not in the text."""


def spell(student: TextTokenizer, vocabulary: Vocabulary) -> Spelling:
    speller = Speller(student, vocabulary)
    lengths = [len(text or b"") for text in speller.texts]
    token, before = np.full((2, len(vocabulary.content)), -1, np.int32)
    exact = np.zeros(len(vocabulary), bool)
    behind_space, without_space = np.full((2, len(vocabulary)), -1, np.int32)
    spelled = np.flatnonzero(vocabulary.lengths).tolist()
    texts = [vocabulary[n] for n in spelled]
    for index, text, written in zip(spelled, texts, speller.tokens(texts), strict=True):
        place, previous = int(vocabulary.offsets[index]), -1
        for own in written:
            token[place], before[place] = own, previous
            place, previous = place + lengths[own], own
        exact[index] = len(written) == 1 and lengths[written[0]] == len(text)
    if speller.dummy_space:
        behind_space[spelled], _ = speller.first([b" " + text for text in texts])
    spaced = [n for n, text in zip(spelled, texts, strict=True) if text[:1] == b" " != text]
    without_space[spaced], _ = speller.first([vocabulary[n][1:] for n in spaced])
    return Spelling(token, before, exact, behind_space, without_space)


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
        self.spelling = spelling or spell(student, vocabulary)

    def __reduce__(self) -> Any:
        end = None if self.end_id < 0 else self.end_id
        return TargetTable, (self.student, self.vocabulary, end, self.spelling)

    @cached_property
    def targets(self) -> NDArray[np.int32]:
        """[4, V + 1] The student's first token for every entry, -1 if there is none; the last
        column stands for ids beyond the vocabulary. Row 0 is the normal case. The others are for
        positions where a token follows a space that is not in the text: for the student (1), for
        the teacher (2: its alternatives without their space, if they have one), or for both (3)."""
        whole = self._by_id(self._starts(self.spelling.token, -1), -1, self.end_id)
        spaced = self._by_id(self.spelling.behind_space, -1, self.end_id)
        unspaced = self._by_id(self.spelling.without_space, -1, self.end_id)
        has_space = self._starts(self.vocabulary.content, 0) == _SPACE
        both = self._by_id(np.where(has_space, whole[:-1], -1), -1, self.end_id)
        return np.stack([whole, spaced, unspaced, both])

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """[V + 1] The kind of every entry: `UNSPELLED`, `FIRST_OF_SEVERAL` or `EXACT`."""
        kinds = np.where(self._starts(self.spelling.token, -1) >= 0, FIRST_OF_SEVERAL, UNSPELLED)
        kinds[self.spelling.exact] = EXACT
        end = UNSPELLED if self.end_id < 0 else EXACT
        return self._by_id(kinds.astype(np.uint8), UNSPELLED, end)

    def _starts(self, values: NDArray[Any], missing: int) -> NDArray[Any]:
        """[V] The value at the first byte of every entry; `missing` for entries without text."""
        first = np.append(values, values.dtype.type(missing))[self.vocabulary.offsets[:-1]]
        return np.where(self.vocabulary.lengths > 0, first, values.dtype.type(missing))

    def _by_id(self, values: NDArray[Any], missing: int, end: int) -> NDArray[Any]:
        """[V + 1] Values by id, with `end` for the teacher's ends and `missing` for ids beyond the
        vocabulary."""
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
        first = self._starts(self.vocabulary.content.astype(np.int16), -1)
        return np.append(first, np.int16(-1))

    @cached_property
    def student_lengths(self) -> NDArray[np.int32]:
        """Lengths of the student's tokens in bytes, by id; control tokens have no text."""
        return np.array([len(entry or b"") for entry in _entries(self.student)], np.int32)

    @cached_property
    def blanks(self) -> NDArray[np.bool_]:
        """The student's tokens that are nothing but blanks, by id."""
        return np.array([bool(e and not e.strip(b" ")) for e in _entries(self.student)], np.bool_)


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
    """Number of the latter for which another alternative continues the bytes already read, with a
    token that the student writes there."""
    following: float = 0.0
    """At shared starts: probability of the actual next token, if it is among the alternatives."""
    exact: float = 0.0
    """Probability of alternatives that are one student token."""
    several: float = 0.0
    """Probability of alternatives that take several student tokens, of which the first is the
    target."""
    unspelled: float = 0.0
    """Probability of alternatives that the student cannot represent, or whose first token depends
    on the text behind them. The rest of `shared` is beyond the alternatives."""


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
    label: NDArray[np.float32] | None = None
    """[N] What is known of the label's own probability, if the teacher's losses are: that of the
    teacher's tokens which cover it, and of alternatives that become the same token. What neither
    the label nor another target has is then the probability of tokens that are not listed."""


@dataclass(frozen=True, kw_only=True)
class TeacherTokens:
    """A teacher's tokens over a text, or over several concatenated texts."""

    spans: IntArray
    """[M, 2]"""
    alternatives: Alternatives
    """[M, K] The alternatives at the position of each token."""
    begins: IntArray | None = None
    """Indices of the tokens with which texts begin. None: the first one."""
    nll: NDArray[np.floating[Any]] | None = None
    """[M] Their losses, for `SoftTargets.label`."""


def carry_alternatives(
    table: TargetTable,
    labels: NDArray[np.integer[Any]],
    spans: IntArray,
    teacher: TeacherTokens,
    alignment: Alignment,
    text: NDArray[np.uint8],
    *,
    inside: bool = True,
) -> SoftTargets:
    """Distillation targets for the student's tokens `labels` [N] at `spans` [N, 2] of `text`.

        ours, theirs = student.spans(text), teacher.spans(text)
        mapping = align(ours, theirs)
        targets = carry_alternatives(table, ours.ids, ours.spans, known, mapping, encoded)

    If a student token begins where a teacher token begins, every alternative becomes the first
    token that the student writes for its bytes there (`Speller.tokens`). The actual next token
    becomes the label, and an end of text or turn becomes the student's. To the label goes the
    probability of alternatives that the student cannot represent or whose first token depends on
    what follows, and the probability beyond the K alternatives.

    If it begins *inside* a teacher token (`inside`; otherwise it has only its label), the
    alternatives that begin with the bytes already read count. They share the probability that these
    bytes do not rule out. Such an alternative becomes the token with which the student goes on in
    it, if it writes these bytes with the tokens that stand in the text; else it goes to the label.
    So does the rest that might have led here (probability beyond the K alternatives, and
    alternatives that end before the token begins).

    Where a token of either model follows a space that is not in the text (the dummy space of
    SentencePiece), alternatives are read without it or spelled with it.
    """
    known = (table, labels, spans, teacher, alignment, text)
    targets, shared = unmeasured_targets(*known, inside=inside)
    became = measured(table, [(teacher.alternatives, shared)])
    return replace(targets, mass=replace(targets.mass, **became))


def unmeasured_targets(
    table: TargetTable,
    labels: NDArray[np.integer[Any]],
    spans: IntArray,
    teacher: TeacherTokens,
    alignment: Alignment,
    text: NDArray[np.uint8],
    *,
    inside: bool,
) -> tuple[SoftTargets, IntArray]:
    """The targets with only the numbers of tokens in their `mass`, and the teacher tokens at shared
    starts, for `measured`."""
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
    behind = 2 * _behind_space(table, teacher).take(position)
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
    label = None
    if teacher.nll is not None:
        following = np.exp(-np.nan_to_num(carry(alignment, teacher.nll, "sum"), nan=np.inf))
        same = row_sums(probability * (~follows & (target == own)))
        label = np.where(has_targets, following + same, 0.0).astype(np.float32)
    probability *= takes_part
    shared = position[has_targets]

    within = np.flatnonzero(mapped & (read > 0))
    continued = 0
    if inside:
        plain = within[behind.take(within) == 0]
        ongoing = _going_on(table, plain, position, read, teacher, text)
        has_targets[ongoing.token] = True
        has_targets[plain[ongoing.agrees]] = True
        token, column = ongoing.token, ongoing.column
        target = table.spelling.token.take(ongoing.place)
        behind_blanks = _crosses_blank(table, labels, spans, ongoing)
        unspaced = table.spelling.without_space.take(ongoing.entry)
        target = np.where(behind_blanks, unspaced, target)
        kept = (target >= 0) & (behind_blanks | _as_in_text(table, labels, spans, ongoing))
        continued = len(np.unique(token[kept]))
        as_label = kept & (target == labels.take(token))
        if label is not None:
            told = np.flatnonzero(has_targets.take(plain))
            left = np.maximum(ongoing.left, _LEFT)
            label[plain[told]] = (following.take(plain) / left).take(told)
            np.add.at(label, token[as_label], ongoing.probability[as_label])
        kept &= ~as_label
        ids[token[kept], column[kept]] = target[kept]
        probability[token[kept], column[kept]] = ongoing.probability[kept]
    mass = TargetMass(
        tokens=len(position),
        shared=len(shared),
        inside=len(within),
        continued=continued,
    )
    return SoftTargets(ids, probability, has_targets, mass, label), shared


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


@dataclass(frozen=True)
class _GoingOn:
    """Alternatives that go on from inside a teacher token, one entry each."""

    token: IntArray
    """The student's token that begins inside."""
    column: IntArray
    """The number of the alternative at the teacher token."""
    entry: NDArray[np.integer[Any]]
    """The alternative itself."""
    begin: IntArray
    """Where the alternative begins in `Vocabulary.content`."""
    place: IntArray
    """Where the student's token begins in it."""
    probability: NDArray[np.float32]
    """Renormalised by all that the bytes already read do not rule out."""
    agrees: NDArray[np.bool_]
    """For every student token that was asked about: the token that follows in the text, which goes
    on too, is among the alternatives."""
    left: NDArray[np.float32]
    """For every such token: the probability that the bytes already read do not rule out."""


def _going_on(
    table: TargetTable,
    tokens: IntArray,
    position: IntArray,
    read: IntArray,
    teacher: TeacherTokens,
    text: NDArray[np.uint8],
) -> _GoingOn:
    """For student tokens that begin inside a teacher token: the alternatives that begin with the
    bytes already read, without the token that follows in the text."""
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
    row, begin = row.take(alive), from_byte.take(alive)
    return _GoingOn(
        token=tokens.take(row),
        column=column.take(alive),
        entry=other.take(alive),
        begin=begin,
        place=begin + wanted.take(alive),
        probability=mass.take(alive) / left.take(row),
        agrees=np.logical_or.reduce(follows, axis=1),
        left=left,
    )


def _as_in_text(
    table: TargetTable, labels: NDArray[np.integer[Any]], spans: IntArray, ongoing: _GoingOn
) -> NDArray[np.bool_]:
    """Whether the student writes what is already read of each alternative with the tokens that
    stand in the text: compared one token at a time, backwards to where the alternative begins."""
    same = np.zeros(len(ongoing.token), bool)
    going, token, place = np.arange(len(same)), ongoing.token - 1, ongoing.place
    at = spans[:, 0].take(ongoing.token)
    while len(going):
        before = table.spelling.before.take(place)
        length = table.student_lengths.take(before)
        stands = (before >= 0) & (token >= 0) & (labels.take(token) == before)
        stands &= (spans[:, 1].take(token) == at) & (spans[:, 0].take(token) == at - length)
        place, at = place - length, at - length
        done = place == ongoing.begin.take(going)
        same[going[stands & done]] = True
        on = np.flatnonzero(stands & ~done)
        going, token, place, at = going[on], token[on] - 1, place[on], at[on]
    return same


def _crosses_blank(
    table: TargetTable,
    labels: NDArray[np.integer[Any]],
    spans: IntArray,
    ongoing: _GoingOn,
) -> NDArray[np.bool_]:
    """Whether a student token stands behind blanks that it writes as one token together with the
    blank that begins the teacher's token, as Gemma does: its tokenizer cuts behind them, whatever
    follows."""
    before = np.maximum(ongoing.token - 1, 0)
    begins, place = spans.take(before, axis=0).T
    one_blank = (ongoing.place - ongoing.begin == 1) & (ongoing.token > 0)
    one_blank &= table.vocabulary.content.take(ongoing.begin) == _SPACE
    crossing = one_blank & (place == spans[:, 0].take(ongoing.token)) & (begins < place - 1)
    blank = table.blanks.take(labels.take(before), mode="clip")
    both: NDArray[np.bool_] = blank & crossing
    return both


def _behind_space(table: TargetTable, teacher: TeacherTokens) -> NDArray[np.int64]:
    """[M] 1 for teacher tokens that spell a space before the text that they stand for: a dummy
    space at the beginning of a text, or the last one of a chat template. `_ODD` for those that
    spell something else there."""
    widths = teacher.spans[:, 1] - teacher.spans[:, 0]
    behind = np.zeros(len(widths), np.int64)
    if table.vocabulary.dummy_space:  # as long as nothing else is known
        begins = np.zeros(1, np.int64) if teacher.begins is None else teacher.begins
        # a first token without text is that space itself
        behind[begins] = widths[begins] > 0
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
    """[N] 1 for student tokens that spell a space before the text that they stand for, `_ODD` for
    those that spell something else there."""
    behind = np.zeros(len(labels), np.int64)
    (odd,) = np.nonzero(table.student_lengths.take(labels) > spans[:, 1] - spans[:, 0])
    for at in odd.tolist():  # few: where texts begin
        text = table.student.bytes_of(int(labels[at])) or b""
        one_more = len(text) == int(spans[at, 1] - spans[at, 0]) + 1
        behind[at] = 1 if one_more and text.startswith(b" ") else _ODD
    return behind
