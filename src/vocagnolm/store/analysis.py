"""What a store says of its documents: ranks by bits per byte or by difference. No model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.base.statistics import bits_per_byte
from vocagnolm.errors import StoreError
from vocagnolm.store.format import hash_keys
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
        return hash_keys(self.hashes)


def document_bits(store: LossStore) -> DocumentBits:
    """Reads the whole store once."""
    parts = []
    for shard in store.shards():
        columns = shard.columns
        ends = np.cumsum(columns["token_count"], dtype=np.int64)
        nll = columns["nll"].astype(np.float64)
        width = columns["token_bytes"].astype(np.int64)
        known = np.isfinite(nll)
        nats = _sums(np.where(known, nll, 0.0), ends)
        covered = _sums(np.where(known, width, 0), ends)
        bits = bits_per_byte(nats, covered)
        index = columns["document_index"].astype(np.int64)
        parts.append((index, columns["document_hash"], _sums(width, ends).astype(np.int64), bits))
    return DocumentBits(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _sums(values: NDArray[Any], ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """The sum of every document's values; `ends`: where each document's tokens end."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(np.diff(total[np.append(0, ends)]))


def difference_of(
    store: str | Path, against: str | Path
) -> tuple[DocumentBits, NDArray[np.float64]]:
    """How many bits per byte the reference `against` needs more than the teacher of `store` (arXiv
    2410.17215); NaN for documents that the reference's store lacks. Refused where the two have
    nothing in common."""
    teacher, reference = (document_bits(LossStore.open(path)) for path in (store, against))
    found = np.full(len(teacher), np.nan)
    if len(reference):
        order = np.argsort(reference.keys, kind="stable")
        keys = reference.keys[order]
        position = np.minimum(np.searchsorted(keys, teacher.keys), len(keys) - 1)
        more = reference.bits_per_byte[order][position] - teacher.bits_per_byte
        found = np.where(keys[position] == teacher.keys, more, np.nan)
    if np.isnan(found).all():
        raise StoreError(
            f"{against} and {store} have no document in common: they were made from different "
            f"corpora. Documents are identified by their text."
        )
    return teacher, found


@dataclass(frozen=True)
class RankedDocuments:
    """The documents of a store, the best first; what has no score comes last."""

    documents: DocumentBits
    difference: NDArray[np.float64] | None
    order: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def by(self) -> str:
        return "bits_per_byte" if self.difference is None else "difference"

    def columns(self) -> dict[str, NDArray[Any]]:
        columns: dict[str, NDArray[Any]] = {
            "rank": np.arange(1, len(self) + 1),
            "document": self.documents.index[self.order],
            "bytes": self.documents.bytes[self.order],
            "bits_per_byte": self.documents.bits_per_byte[self.order],
        }
        if self.difference is not None:
            columns["difference"] = self.difference[self.order]
        return columns

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        part = {name: column[start:stop].tolist() for name, column in self.columns().items()}
        return [
            {name: None if value != value else value for name, value in zip(part, row, strict=True)}
            for row in zip(*part.values(), strict=True)
        ]


def rank_documents(store: str | Path, against: str | Path | None = None) -> RankedDocuments:
    """By the teacher's bits per byte, fewest first, or by how much the reference needs more."""
    if against is None:
        bits = document_bits(LossStore.open(store))
        return RankedDocuments(bits, None, _best_first(-bits.bits_per_byte))
    bits, found = difference_of(store, against)
    return RankedDocuments(bits, found, _best_first(found))


def _best_first(score: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.argsort(np.where(np.isnan(score), np.inf, -score), kind="stable")


def best(score: NDArray[np.float64], widths: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """The best documents that together hold this share of the text, at least one; ties go to the
    earlier one, what has no score is never among them."""
    order = _best_first(score)
    held = np.cumsum(widths[order], dtype=np.float64)
    count = int(np.searchsorted(held, share * held[-1] * (1 - 1e-12))) + 1
    chosen = order[:count]
    return chosen[~np.isnan(score[chosen])]
