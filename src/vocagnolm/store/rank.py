"""What a store says of whole documents. NumPy alone."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocagnolm.store.reader import LossStore


@dataclass(frozen=True)
class DocumentBits:
    """One entry a document of the store."""

    index: NDArray[np.int64]
    """Place in the corpus."""
    hashes: NDArray[np.uint8]
    """[D, 16]"""
    bytes: NDArray[np.int64]
    bits_per_byte: NDArray[np.float64]
    """NaN where no token was scored."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def keys(self) -> NDArray[np.uint64]:
        """First eight bytes of each hash."""
        return np.ascontiguousarray(self.hashes[:, :8]).view("<u8").ravel()


def document_bits(store: LossStore) -> DocumentBits:
    """Reads the whole store once."""
    parts = []
    for shard in store.shards():
        columns = shard.columns
        ends = np.cumsum(columns["token_count"], dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        nll = columns["nll"].astype(np.float64)
        known = np.isfinite(nll)
        width = columns["token_bytes"].astype(np.int64)
        nats = _sums(np.where(known, nll, 0.0), starts, ends)
        covered = _sums(np.where(known, width, 0).astype(np.float64), starts, ends)
        bits = np.full(len(ends), np.nan)
        np.divide(nats / math.log(2), covered, out=bits, where=covered > 0)
        parts.append(
            (
                columns["document_index"].astype(np.int64),
                columns["document_hash"],
                _sums(width.astype(np.float64), starts, ends).astype(np.int64),
                bits,
            )
        )
    return DocumentBits(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _sums(
    values: NDArray[np.float64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.float64]:
    total = np.concatenate([[0.0], np.cumsum(values)])
    sums: NDArray[np.float64] = total[ends] - total[starts]
    return sums
