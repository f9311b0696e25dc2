"""Several teachers over one corpus: what their loss stores say, side by side."""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import stretch_losses, stretches
from vocagnolm.data.corpus import Corpus, Document, document_hash
from vocagnolm.data.guidance import TeacherLosses, end_to_end, tiling
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

    def place(self, number: int, document_hash: bytes) -> int | None:
        """Index in the store of the document that has this number in the corpus."""
        if self._by_number:
            place = self.store.place_of(number)
            if place is None or self.store.document_hash(place) == document_hash:
                return place
        return self.store.find(document_hash)


# ---- which documents ----


@dataclass(frozen=True)
class Chosen:
    """Kept documents by the first eight bytes of their hashes, sorted."""

    keys: NDArray[np.uint64]

    def __contains__(self, document_hash: bytes) -> bool:
        key = np.frombuffer(document_hash, "<u8", count=1)[0]
        place = int(np.searchsorted(self.keys, key))
        return place < len(self.keys) and bool(self.keys[place] == key)


def chosen_documents(recipe: Recipe) -> Chosen | None:
    """None: all of them. Documents that the teacher has not scored are not among the chosen."""
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


@dataclass
class Totals:
    """Of the documents that all stores hold; one entry a store."""

    stores: int
    documents: int = 0
    nats: NDArray[np.float64] = field(init=False)
    covered: NDArray[np.float64] = field(init=False)
    """Bytes of the tokens that have a loss."""
    best: NDArray[np.float64] = field(init=False)
    """Documents on which this teacher needs the fewest bits per byte; shared where several do."""

    def __post_init__(self) -> None:
        self.nats, self.covered, self.best = (np.zeros(self.stores) for _ in range(3))

    def add(self, entries: Sequence[TeacherLosses]) -> NDArray[np.float64]:
        """One document of every store; returns its bits per byte under each."""
        nats, covered = np.zeros(self.stores), np.zeros(self.stores)
        for number, (token_bytes, nll) in enumerate(entries):
            known = np.isfinite(nll)
            nats[number] = np.asarray(nll, np.float64)[known].sum()
            covered[number] = np.asarray(token_bytes)[known].sum()
        bits = nats / math.log(2) / np.maximum(covered, 1)
        bits[covered == 0] = np.inf
        self.documents += 1
        self.nats += nats
        self.covered += covered
        if np.isfinite(bits).any():
            winners = bits == bits.min()
            self.best += winners / winners.sum()
        return bits

    def bits_per_byte(self) -> list[float | None]:
        return [
            float(n / math.log(2) / c) if c else None
            for n, c in zip(self.nats, self.covered, strict=True)
        ]

    def best_shares(self) -> list[float]:
        return [float(count) / max(self.documents, 1) for count in self.best]


def best_shares(stores: Sequence[LossStore], documents: int = 500) -> list[float] | None:
    """How often each teacher is the best, over documents spread evenly over the first store; None
    where they have none in common."""
    totals = Totals(len(stores))
    for places in _common(stores, documents):
        totals.add([store[place] for store, place in zip(stores, places, strict=True)])
    return totals.best_shares() if totals.documents else None


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
    reader = _Comparison(stores, corpus, sources, examples)
    batch: list[tuple[int, ...]] = []
    for places in _common(stores, limit):
        batch.append(places)
        if len(batch) == _BATCH_DOCUMENTS:
            reader.read(batch)
            batch = []
    reader.read(batch)
    if not reader.totals.documents:
        raise StoreError(
            f"{', '.join(map(str, paths))} have no document in common: they are stores of other "
            "corpora. Documents are known by their text."
        )
    return reader.result(paths)


def _common(stores: Sequence[LossStore], limit: int | None) -> Iterator[tuple[int, ...]]:
    """Places of the documents that all stores hold, evenly spread if there are too many."""
    first = stores[0]
    lookups = [Lookup(store, first.corpus_fingerprint) for store in stores[1:]]
    step = 1 if limit is None else max(1, len(first) // limit)
    for place in range(0, len(first), step):
        digest = first.document_hash(place)
        number = first.document_index(place)
        places = [place, *(lookup.place(number, digest) for lookup in lookups)]
        found = tuple(one for one in places if one is not None)
        if len(found) == len(stores):
            yield found


class _Comparison:
    def __init__(
        self,
        stores: Sequence[LossStore],
        corpus: Corpus | None,
        sources: Corpus | None,
        examples: int,
    ):
        self.stores = stores
        self.corpus = corpus
        self.names = sources
        self.examples = examples
        self.totals = Totals(len(stores))
        self.sources: dict[str, Totals] = defaultdict(lambda: Totals(len(stores)))
        self.document_bits: list[NDArray[np.float64]] = []
        self.tokens = np.zeros(len(stores))
        self.apart = np.zeros(len(stores))
        self.widest: list[tuple[float, int, int, int, list[float]]] = []

    def read(self, batch: Sequence[tuple[int, ...]]) -> None:
        if not batch:
            return
        entries = [
            [store[place] for store, place in zip(self.stores, places, strict=True)]
            for places in batch
        ]
        for places, entry in zip(batch, entries, strict=True):
            self.document_bits.append(self.totals.add(entry))
            document = self._document(places[0])
            if document is not None:
                self.sources[self._source(document)].add(entry)
        widths = np.array([int(np.sum(entry[0][0], dtype=np.int64)) for entry in entries])
        origins = np.concatenate([[0], np.cumsum(widths + 1)])[:-1].astype(np.int64)
        spans = [
            end_to_end([tiling(entry[number][0]) for entry in entries], origins)
            for number in range(len(self.stores))
        ]
        nll = [
            np.concatenate([entry[number][1] for entry in entries])
            for number in range(len(self.stores))
        ]
        found = stretches(spans[0], *spans[1:])
        losses = np.stack([stretch_losses(found, s, n) for s, n in zip(spans, nll, strict=True)])
        apart = np.abs(losses - losses[0])
        known = ~np.isnan(apart)
        self.tokens += known.sum(1)
        self.apart += (np.where(known, apart, 0.0) > APART_NATS).sum(1)
        spread = np.where(known.all(0) & found.begins, np.ptp(losses, axis=0), -1.0)
        for token in np.argsort(-spread, kind="stable")[: self.examples]:
            if spread[token] <= 0:
                break
            start, end = found.boundaries[found.number[token] :][:2].tolist()
            inside = int(np.searchsorted(origins, start, side="right")) - 1
            origin = int(origins[inside])
            row = (start - origin, end - origin, losses[:, token].tolist())
            entry_key = (float(spread[token]), batch[inside][0], *row)
            heapq.heappush(self.widest, entry_key)
            if len(self.widest) > self.examples:
                heapq.heappop(self.widest)

    def _document(self, place: int) -> Document | None:
        """The document in the corpus, if that is the one which was scored."""
        if self.corpus is None:
            return None
        index = self.stores[0].document_index(place)
        for document in self.corpus.read(index, index + 1):
            text = document.text
            if text is not None and document_hash(text) == self.stores[0].document_hash(place):
                return document
        return None

    def _source(self, document: Document) -> str:
        if self.names is None:
            return document.place.partition("[")[0].partition(":")[0]
        (named,) = self.names.read(document.index, document.index + 1)
        return named.text or "(none)"

    def result(self, paths: Sequence[str | Path]) -> dict[str, Any]:
        bits, best = self.totals.bits_per_byte(), self.totals.best_shares()
        shares = self.apart / np.maximum(self.tokens, 1)
        return {
            "documents": self.totals.documents,
            "stores": [
                {
                    "path": str(path),
                    "teacher": store.teacher_name,
                    "documents": len(store),
                    "bits_per_byte": bits[number],
                    "best_share": best[number],
                    "apart_share": None if number == 0 else float(shares[number]),
                }
                for number, (path, store) in enumerate(zip(paths, self.stores, strict=True))
            ],
            "sources": [
                {
                    "name": name,
                    "documents": totals.documents,
                    "bits_per_byte": totals.bits_per_byte(),
                    "best_share": totals.best_shares(),
                }
                for name, totals in sorted(self.sources.items())
            ],
            "stretches": [self._stretch(entry) for entry in sorted(self.widest, reverse=True)],
            "document_bits_per_byte": [bits.tolist() for bits in self.document_bits],
        }

    def _stretch(self, entry: tuple[float, int, int, int, list[float]]) -> dict[str, Any]:
        _, place, start, end, nats = entry
        document = self._document(place)
        text = None
        if document is not None and document.text is not None:
            text = document.text.encode()[start:end].decode(errors="replace")
        return {
            "document": self.stores[0].document_index(place),
            "bytes": [start, end],
            "text": text,
            "nats": nats,
        }
