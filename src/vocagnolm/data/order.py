"""The order in which blocks are trained on."""

import numpy as np
from numpy.typing import NDArray

from vocagnolm.data.blocks import Block, Blocks


class TrainingOrder:
    """The blocks in the order of training: every epoch its own permutation, by seed.

    One long sequence instead of epochs of the Trainer: no step mixes a short batch at an epoch's
    end, fractions of an epoch are possible, and a resumed run skips to any place.
    """

    def __init__(self, blocks: Blocks, length: int, seed: int):
        self.blocks = blocks
        self.length = length
        self.seed = seed
        self._permutation: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.length

    def block_index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.blocks))
        if self._permutation is None or self._permutation[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))
            self._permutation = epoch, order
        return int(self._permutation[1][place])

    def __getitem__(self, position: int) -> Block:
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of {self.length}")
        index = self.block_index(position)
        return {**self.blocks[index], "block": index}
