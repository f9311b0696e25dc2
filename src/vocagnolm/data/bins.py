"""Whole conversations into blocks: which of them stand together in which block."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Bins:
    """Which documents stand in which block."""

    order: NDArray[np.int64]
    """Documents, block after block."""
    ends: NDArray[np.int64]
    """Per block where its documents end in `order`."""
    cut: int
    """Documents that are longer than a block: their end is left out."""
    without: int
    """Documents that have nothing to train on, or nothing before they are cut: left out."""
    tokens: int
    """Tokens in the blocks, without padding."""

    def __len__(self) -> int:
        return len(self.ends)

    def words(self, room: int) -> str:
        """How conversations fill blocks, as a sentence for the console."""
        parts = [f"{self.tokens / max(len(self) * room, 1):.1%} of the blocks filled"]
        if self.cut:
            parts.append(f"{self.cut:,} conversations longer than a block: cut at the end")
        if self.without:
            parts.append(f"{self.without:,} with nothing to train on: left out")
        return "; ".join(parts)

    def documents(self, index: int) -> list[int]:
        start = int(self.ends[index - 1]) if index else 0
        documents: list[int] = self.order[start : int(self.ends[index])].tolist()
        return documents


def fill_bins(
    document_tokens: NDArray[np.int64], first_trained: NDArray[np.int64], room: int
) -> Bins:
    """Place documents into blocks of `room` tokens. Every document goes into the fullest block that
    still has room for it; blocks come in the order of their first documents."""
    usable = (first_trained >= 0) & (first_trained < room)
    lengths = np.minimum(document_tokens, room)
    kept = np.flatnonzero(usable)
    longest_first = kept[np.argsort(-lengths[kept], kind="stable")]
    blocks: list[list[int]] = []
    open_at: list[list[int]] = [[] for _ in range(room + 1)]  # by the room that is left
    there = 0  # bit n: a block with room for n tokens is open
    for document, length in zip(
        longest_first.tolist(), lengths[longest_first].tolist(), strict=True
    ):
        fitting = there >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            number = open_at[left].pop()
            if not open_at[left]:
                there &= ~(1 << left)
        else:
            left, number = room, len(blocks)
            blocks.append([])
        blocks[number].append(document)
        left -= length
        if left:
            open_at[left].append(number)
            there |= 1 << left
    for block in blocks:
        block.sort()
    blocks.sort(key=lambda block: block[0])
    sizes = [len(block) for block in blocks]
    return Bins(
        order=np.array([document for block in blocks for document in block], np.int64),
        ends=np.cumsum(sizes, dtype=np.int64),
        cut=int((document_tokens[kept] > room).sum()),
        without=int((~usable).sum()),
        tokens=int(lengths[kept].sum()),
    )
