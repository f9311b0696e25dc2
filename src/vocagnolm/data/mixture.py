"""Several corpora in one run: their blocks side by side, and an order that gives each corpus its
exact share.

Every corpus has blocks of its own (`vocagnolm prepare` makes them as for a run on it alone) and is
read in its own permutation, epoch after epoch, at its own pace. Which corpus a place of the run
takes its block from is decided by the shares alone, so that any place can be computed: a run
resumes exactly, and a step holds the same blocks however many processes share it.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.base.files import json_digest
from vocagnolm.data.blocks import Block, Blocks, TrainingOrder


class Interleaving:
    """Which corpus each of `length` places belongs to. After any number of places every corpus has
    had its share of them to within one place.

    A corpus may have its n-th place once its share of all places up to there is more than n - 1,
    and must have it before that share exceeds n. Of the corpora that may have a place, the one that
    must have one soonest gets it. Since the shares add up to 1, none is ever late.
    """

    def __init__(self, shares: Mapping[str, Fraction], length: int):
        """`shares` add up to 1."""
        assert sum(shares.values()) == 1
        # after so many places all begins anew
        self._period = math.lcm(*(share.denominator for share in shares.values()))
        self.weights = [int(share * self._period) for share in shares.values()]
        self._corpus = np.array(_dealt(self.weights, min(self._period, length)), np.int64)
        taken = self._corpus[:, None] == np.arange(len(self.weights))
        self._before = np.concatenate([np.zeros_like(taken[:1], np.int64), taken.cumsum(0)])

    def place(self, position: int) -> tuple[int, int]:
        """The corpus of a place, and how many places the corpus has had before."""
        corpus = int(self._corpus[position % self._period])
        return corpus, self.counts(position)[corpus]

    def counts(self, places: int) -> list[int]:
        """How many of the first `places` belong to each corpus."""
        whole, rest = divmod(places, self._period)
        pairs = zip(self.weights, self._before[rest].tolist(), strict=True)
        return [whole * weight + begun for weight, begun in pairs]


def _dealt(weights: list[int], places: int) -> list[int]:
    """The corpus of each of the first places, by exact whole numbers."""
    total, taken, dealt = sum(weights), [0] * len(weights), []
    for place in range(1, places + 1):
        # (the place by which its next block is due, the corpus)
        _, corpus = min(
            (-(-(count + 1) * total // weight), number)
            for number, (count, weight) in enumerate(zip(taken, weights, strict=True))
            if count * total < place * weight
        )
        taken[corpus] += 1
        dealt.append(corpus)
    return dealt


class MixedBlocks:
    """The blocks of several corpora as one sequence, corpus after corpus. They all have the same
    columns: tokens of a corpus without a store have no guidance and no targets."""

    def __init__(self, parts: Mapping[str, Blocks], *, document_mask: bool = False):
        """`document_mask`: keep the documents of a block of texts apart; without it they are one
        text, also beside conversations, which are always separate."""
        self.names, self.parts = list(parts), list(parts.values())
        self.document_mask = document_mask
        self.starts = np.cumsum([0, *map(len, self.parts)]).tolist()
        targets = [part.read("target_ids", 0, 1).shape[1] for part in self.parts if part.targets]
        self._filling: dict[str, NDArray[Any]] = self._fillings(max(targets, default=0))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Block:
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        part = self.parts[number]
        block = part[index - self.starts[number]]
        if "trained" in self._filling and "trained" not in block and not self.document_mask:
            block["document"] = np.zeros_like(block["document"])
        completed = {**self._filling, **block}
        for name in ("target_ids", "target_p"):
            if name in block:  # a store may hold fewer alternatives than another
                completed[name] = self._filling[name].copy()
                completed[name][:, : block[name].shape[1]] = block[name]
        return completed

    @property
    def conversations(self) -> bool:
        return any(part.conversations for part in self.parts)

    @property
    def fingerprint(self) -> str:
        parts = zip(self.names, self.parts, strict=True)
        return mixed_fingerprint({name: part.fingerprint for name, part in parts})

    @property
    def teacher(self) -> str | None:
        names = [part.teacher for part in self.parts if part.teacher is not None]
        return ", ".join(dict.fromkeys(names)) or None

    def _fillings(self, alternatives: int) -> dict[str, NDArray[Any]]:
        """The values with which columns of some corpora are filled in blocks of the others."""
        width = self.parts[0].block_size + 1
        every: dict[str, tuple[bool, NDArray[Any]]] = {
            "trained": (self.conversations, np.ones(width, bool)),
            "guidance": (
                any(part.has_guidance for part in self.parts),
                np.full(width, np.nan, np.float32),
            ),
            "stretch": (  # every token is a stretch of its own, see `cut_stretches`
                any(part.stretches for part in self.parts),
                np.maximum(np.arange(width) - 1, 0),
            ),
            "teacher_sums": (any(part.teacher_sums for part in self.parts), np.zeros(2)),
            "target_ids": (alternatives > 0, np.zeros((width, alternatives), np.int32)),
            "target_p": (alternatives > 0, np.zeros((width, alternatives), np.float32)),
        }
        return {name: filling for name, (held, filling) in every.items() if held}


def mixed_fingerprint(fingerprints: Mapping[str, str]) -> str:
    """The fingerprint of the blocks of several corpora, from those of each by name."""
    return json_digest(dict(fingerprints))


class MixedOrder:
    """The blocks of several corpora in the order of training: by shares, and of each corpus in the
    order that a run on it alone has."""

    def __init__(self, blocks: MixedBlocks, shares: Mapping[str, Fraction], length: int, seed: int):
        assert list(shares) == blocks.names
        self.blocks, self.length = blocks, length
        self._orders = [TrainingOrder(part, length, seed) for part in blocks.parts]
        self._places = Interleaving(shares, length)

    def __len__(self) -> int:
        return self.length

    def block_index(self, position: int) -> int:
        corpus, number = self._places.place(position)
        return int(self.blocks.starts[corpus]) + self._orders[corpus].block_index(number)

    def __getitem__(self, position: int) -> Block:
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of {self.length}")
        index = self.block_index(position)
        return {**self.blocks[index], "block": index}
