"""Alternatives: the tokens that a teacher finds likeliest at a position, four bytes each, and the
vocabulary that says what they spell. NumPy only: stores, alignment and models share this.

An alternative is one unsigned 32-bit number:

    bits 12-31   id of the token in the teacher's vocabulary
    bit  11      1 where this token is the one that follows in the text
    bits  0-10   -log p in steps of 1/128 nat, rounded; 2047 stands for everything beyond

All bits set: there is none. A probability is off by at most 0.4 %, and never below e^-16.

Shape letters: M positions (teacher tokens), K alternatives, V entries of the vocabulary.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

ID_SHIFT = 12
FOLLOWS_BIT = 1 << 11
NLL_STEPS = FOLLOWS_BIT - 1
STEPS_PER_NAT = 128
NOTHING = 0xFFFFFFFF
MOST_ALTERNATIVES = 64
MOST_IDS = (1 << (32 - ID_SHIFT)) - 1
"""Ids that can be written; the highest number is taken by `NOTHING`."""

_PROBABILITY = np.exp(-np.arange(NLL_STEPS + 1) / STEPS_PER_NAT).astype(np.float32)


@dataclass(frozen=True)
class AlternativesSpec:
    """How many alternatives are kept, and which."""

    count: int
    sampled: bool = False
    """Drawn from the teacher's distribution, with replacement, instead of its likeliest."""

    @classmethod
    def parse(cls, text: str | int) -> "AlternativesSpec | None":
        """`4`, `sampled:4`; None for `0`. ValueError for all else."""
        match = re.fullmatch(r"(sampled:)?(\d+)", str(text))
        count = int(match[2]) if match else -1
        if match is None or count > MOST_ALTERNATIVES or (match[1] and count == 0):
            raise ValueError(
                f"alternatives is {text!r}, expected a number from 0 to {MOST_ALTERNATIVES}, or "
                f"sampled:1 to sampled:{MOST_ALTERNATIVES}"
            )
        return cls(count, bool(match[1])) if count else None

    def __str__(self) -> str:
        return f"{'sampled:' if self.sampled else ''}{self.count}"


def pack(ids: NDArray[Any], nll: NDArray[Any], follows: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """One number for each alternative; `nll` is -log p in nats. NaN there: no alternative."""
    missing = np.isnan(nll) | (ids < 0)
    steps = np.rint(np.where(missing, 0.0, nll) * STEPS_PER_NAT).clip(0, NLL_STEPS)
    packed = np.where(missing, 0, ids).astype(np.uint32) << ID_SHIFT
    packed |= steps.astype(np.uint32) | np.where(follows, FOLLOWS_BIT, 0).astype(np.uint32)
    return np.where(missing, np.uint32(NOTHING), packed)


def renumbered(packed: NDArray[np.uint32], ids: NDArray[np.integer[Any]]) -> NDArray[np.uint32]:
    """Alternatives of another vocabulary: `ids[n]` is there what is n here."""
    there = packed != NOTHING
    new = np.append(ids, 0).astype(np.uint32)[np.where(there, packed >> ID_SHIFT, len(ids))]
    rest = packed & np.uint32((1 << ID_SHIFT) - 1)
    return np.where(there, (new << ID_SHIFT) | rest, np.uint32(NOTHING)).astype(np.uint32)


def row_sums(values_MK: NDArray[np.float32]) -> NDArray[np.float32]:
    """[M] The same wherever a row lies: BLAS, which multiplies by ones faster, adds up the last
    rows of an array in another order."""
    sums: NDArray[np.float32] = np.einsum("mk->m", values_MK)
    return sums


@dataclass(frozen=True)
class Alternatives:
    """Alternatives as they are stored: `packed` [M, K]. The rest is read from it."""

    packed: NDArray[np.uint32]
    sampled: bool = False

    def __len__(self) -> int:
        return len(self.packed)

    def at(self, rows: NDArray[np.integer[Any]]) -> "Alternatives":
        """The alternatives at these positions."""
        return Alternatives(self.packed.take(rows, axis=0), self.sampled)

    @property
    def present(self) -> NDArray[np.bool_]:
        """[M, K] Whether there is one."""
        return np.not_equal(self.packed, NOTHING)

    @property
    def ids(self) -> NDArray[np.int32]:
        """[M, K] In the teacher's vocabulary; `MOST_IDS` where there is none."""
        ids: NDArray[np.int32] = (self.packed >> ID_SHIFT).astype(np.int32)
        return ids

    @property
    def follows(self) -> NDArray[np.bool_]:
        """[M, K] The token that follows in the text."""
        follows: NDArray[np.bool_] = np.logical_and(self.packed & FOLLOWS_BIT, self.present)
        return follows

    @property
    def probability(self) -> NDArray[np.float32]:
        """[M, K] The teacher's; 0 where there is none."""
        probability = _PROBABILITY.take(self.packed & NLL_STEPS)
        probability *= self.present
        return probability

    @property
    def mass(self) -> NDArray[np.float32]:
        """[M, K] What each counts in a target distribution: its probability, never more than 1
        together (rounded ones may be); or of draws, of which each counts the same, one K-th."""
        if not self.sampled:
            given = self.probability
            together = row_sums(given)
            (above,) = np.nonzero(together > 1)
            given[above] /= together[above, None]
            return given
        return np.where(self.present, np.float32(1 / self.packed.shape[1]), np.float32(0))


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens of a vocabulary spell, by id."""

    content: NDArray[np.uint8]
    """The bytes of all entries, one behind the other."""
    offsets: NDArray[np.uint32]
    """[V + 1] Where each begins; entries that spell nothing are empty."""
    ends: NDArray[np.int32]
    """Ids that end a text or a turn."""
    dummy_space: bool = False
    """The first token of a text stands behind a space that is not in the text."""

    @classmethod
    def of(
        cls, entries: Iterable[bytes | None], ends: Iterable[int], dummy_space: bool
    ) -> "Vocabulary":
        """`entries` by id, None or empty for those that spell nothing."""
        texts = [entry or b"" for entry in entries]
        offsets = np.zeros(len(texts) + 1, np.uint32)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        return cls(
            np.frombuffer(b"".join(texts), np.uint8),
            offsets,
            np.array(sorted(set(ends)), np.int32),
            dummy_space,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        return bytes(self.content[self.offsets[index] : self.offsets[index + 1]])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        ends = self.offsets.astype(np.int64)
        return ends[1:] - ends[:-1]
