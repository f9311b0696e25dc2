"""Several teachers over one corpus: what their loss stores say, side by side."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import stretch_losses, stretches
from vocagnolm.base.statistics import bits_per_byte
from vocagnolm.data.corpus import Corpus, Document, document_hash
from vocagnolm.data.guidance import TeacherLosses, end_to_end, nats_and_bytes, tiling
from vocagnolm.errors import StoreError
from vocagnolm.recipe import Recipe
from vocagnolm.store import LossStore
from vocagnolm.store.analysis import best, difference_of, document_bits

# ---- where a store has a document ----


class Lookup:
    """Finds documents of a corpus in a store: by their number where the store was made from this
    very corpus, otherwise by content, through an index of all its documents."""

    def __init__(self, store: LossStore, corpus_fingerprint: str | None):
        self.store = store
        self._by_number = store.made_from(corpus_fingerprint)

    def row(self, number: int, document_hash: bytes) -> int | None:
        """Index in the store of the document that has this number in the corpus."""
        if self._by_number:
            row = self.store.place_of(number)
            if row is None or self.store.document_hash(row) == document_hash:
                return row
        return self.store.find(document_hash)


# ---- which documents ----


@dataclass(frozen=True)
class Chosen:
    """Kept documents by the first eight bytes of their hashes, sorted."""

    keys: NDArray[np.uint64]

    def __contains__(self, document_hash: bytes) -> bool:
        key = np.frombuffer(document_hash, "<u8", count=1)[0]
        row = int(np.searchsorted(self.keys, key))
        return row < len(self.keys) and bool(self.keys[row] == key)


def chosen_documents(recipe: Recipe) -> Chosen | None:
    """The documents that `corpus.keep_documents` chooses; None: all of them. Documents that the
    teacher has not scored are not chosen."""
    plan = recipe.corpus.keep_documents
    if plan is None:
        return None
    store = recipe.stores[0]
    if plan.by == "difference":
        assert plan.against is not None  # see Recipe.store_problems
        bits, score = difference_of(store, plan.against)
    else:
        bits = document_bits(LossStore.open(store))
        score = -bits.bits_per_byte
        if plan.by == "random":
            score = np.random.default_rng(recipe.run.seed).random(len(bits))
    return Chosen(np.sort(bits.keys[best(score, bits.bytes, plan.share)]))


# ---- teachers side by side ----


APART_NATS = 1.0
_BATCH_DOCUMENTS = 256


def best_shares(stores: Sequence[LossStore], documents: int = 500) -> list[float] | None:
    """How often each teacher is the best, over documents spread evenly over the first store; None
    where they have none in common."""
    sums = [_sums(_entries(stores, rows)) for rows in _common(stores, documents)]
    return _compared(sums)["best_share"] if sums else None


def _entries(stores: Sequence[LossStore], rows: Sequence[int]) -> list[TeacherLosses]:
    """One document's losses in every store."""
    return [store[row] for store, row in zip(stores, rows, strict=True)]


def _sums(entries: Sequence[TeacherLosses]) -> NDArray[np.float64]:
    """One document's nats in every store, and the bytes of the tokens that have a loss [2, S]."""
    return np.array([nats_and_bytes(*entry) for entry in entries]).T


def _bits(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bits per byte of every store, from its nats and bytes; infinite where no token has a loss."""
    bits = bits_per_byte(*sums)
    return np.where(np.isnan(bits), np.inf, bits)


def _compared(sums: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    """Every teacher's bits per byte over some documents, and the share of the documents on which it
    needs the fewest bits; a tie counts for each teacher in equal parts."""
    nats, covered = np.sum(sums, axis=0)
    best = np.zeros(len(nats))
    for document_sums in sums:
        bits = _bits(document_sums)
        if np.isfinite(bits).any():
            winners = bits == bits.min()
            best += winners / winners.sum()
    known = bits_per_byte(nats, covered).tolist()
    return {
        "documents": len(sums),
        "bits_per_byte": [None if math.isnan(bits) else bits for bits in known],
        "best_share": (best / len(sums)).tolist(),
    }


def compare_stores(
    paths: Sequence[str | Path],
    corpus: Corpus | None = None,
    *,
    sources: Corpus | None = None,
    limit: int | None = None,
    examples: int = 20,
) -> dict[str, Any]:
    """Bits per byte of several teachers on the documents that all of them scored, by file of the
    corpus, or by what `sources` (the same corpus, with another field as its text) says; the share
    of tokens on which they differ; the stretches where they differ most, in words where the corpus
    is given."""
    if len(paths) < 2:
        raise StoreError("a comparison needs at least two stores.")
    stores = [LossStore.open(path) for path in paths]
    first = stores[0]

    def document(row: int) -> Document | None:
        """The document in the corpus, if it is the one which was scored."""
        index = first.document_index(row)
        for scored in () if corpus is None else corpus.read(index, index + 1):
            text = scored.text
            if text is not None and document_hash(text) == first.document_hash(row):
                return scored
        return None

    def source(scored: Document) -> str:
        if sources is None:
            return scored.place.partition("[")[0].partition(":")[0]
        (named,) = sources.read(scored.record, scored.record + 1)
        return named.text or "(none)"

    sums: list[NDArray[np.float64]] = []
    by_source: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    tokens, apart = np.zeros(len(stores)), np.zeros(len(stores))
    widest: list[_Stretch] = []
    common = _common(stores, limit)
    while batch := list(itertools.islice(common, _BATCH_DOCUMENTS)):
        entries = [_entries(stores, rows) for rows in batch]
        for rows, entry in zip(batch, entries, strict=True):
            sums.append(_sums(entry))
            if (scored := document(rows[0])) is not None:
                by_source[source(scored)].append(sums[-1])
        known, differ, wide = _stretches_apart(entries, [rows[0] for rows in batch], examples)
        tokens += known
        apart += differ
        widest = heapq.nlargest(examples, [*widest, *wide])
    if not sums:
        raise StoreError(
            f"{', '.join(map(str, paths))} have no document in common: they were made from "
            f"different corpora. Documents are identified by their text."
        )
    everywhere, shares = _compared(sums), apart / np.maximum(tokens, 1)

    def shown(stretch: _Stretch) -> dict[str, Any]:
        _, row, start, end, nats = stretch
        scored, text = document(row), None
        if scored is not None and scored.text is not None:
            text = scored.text.encode()[start:end].decode(errors="replace")
        where = {"document": first.document_index(row), "bytes": [start, end]}
        return {**where, "text": text, "nats": nats}

    return {
        "documents": len(sums),
        "stores": [
            {
                "path": str(path),
                "teacher": store.teacher_name,
                "documents": len(store),
                "bits_per_byte": everywhere["bits_per_byte"][number],
                "best_share": everywhere["best_share"][number],
                "apart_share": None if number == 0 else float(shares[number]),
            }
            for number, (path, store) in enumerate(zip(paths, stores, strict=True))
        ],
        "sources": [{"name": name, **_compared(by_source[name])} for name in sorted(by_source)],
        "stretches": [shown(stretch) for stretch in widest],
        "document_bits_per_byte": [_bits(document_sums).tolist() for document_sums in sums],
    }


def _common(stores: Sequence[LossStore], limit: int | None) -> Iterator[tuple[int, ...]]:
    """Rows of the documents that all stores hold, evenly spread if there are too many."""
    first = stores[0]
    lookups = [Lookup(store, first.corpus_fingerprint) for store in stores[1:]]
    step = 1 if limit is None else max(1, len(first) // limit)
    for row in range(0, len(first), step):
        digest = first.document_hash(row)
        number = first.document_index(row)
        rows = [row, *(lookup.row(number, digest) for lookup in lookups)]
        present = tuple(place for place in rows if place is not None)
        if len(present) == len(stores):
            yield present


_Stretch = tuple[float, int, int, int, list[float]]
"""How many nats the teachers are apart, the document's place in the first store, its first byte and
the one behind it, and every teacher's nats."""


def _stretches_apart(
    entries: Sequence[Sequence[TeacherLosses]], rows: Sequence[int], examples: int
) -> tuple[NDArray[Any], NDArray[Any], list[_Stretch]]:
    """Where stores disagree on some documents. For every store: how many tokens of the first store
    both know, and on how many of them the two differ; then the widest stretches."""
    widths = np.array([int(np.sum(entry[0][0], dtype=np.int64)) for entry in entries])
    origins = np.concatenate([[0], np.cumsum(widths + 1)])[:-1].astype(np.int64)
    by_store = list(zip(*entries, strict=True))
    spans = [
        end_to_end([tiling(lengths) for lengths, _ in documents], origins) for documents in by_store
    ]
    common = stretches(spans[0], *spans[1:])
    losses = np.stack(
        [
            stretch_losses(common, own, np.concatenate([nll for _, nll in documents]))
            for own, documents in zip(spans, by_store, strict=True)
        ]
    )
    apart = np.abs(losses - losses[0])
    known = ~np.isnan(apart)
    spread = np.where(known.all(0) & common.begins, np.ptp(losses, axis=0), -1.0)
    widest: list[_Stretch] = []
    for token in np.argsort(-spread, kind="stable")[:examples]:
        if spread[token] <= 0:
            break
        start, end = common.boundaries[common.number[token] :][:2].tolist()
        inside = int(np.searchsorted(origins, start, side="right")) - 1
        begin, nats = int(origins[inside]), losses[:, token].tolist()
        widest.append((float(spread[token]), rows[inside], start - begin, end - begin, nats))
    return known.sum(1), (np.where(known, apart, 0.0) > APART_NATS).sum(1), widest
