"""A sample of a corpus: documents evenly spread over it, with the teacher's losses at hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vocagnolm.data.corpus import Corpus, document_hash, open_corpus
from vocagnolm.data.lookup import Lookup
from vocagnolm.errors import CorpusError, StudyError
from vocagnolm.store import LossStore

# Documents are read in rounds, each in the order of the files (compressed ones cannot seek), each
# twice as long as the one before.
_FIRST_ROUND = 64
# After so many documents of which the store holds none, the two do not belong together.
_GIVE_UP_AFTER = 1000


@dataclass
class SpreadSample:
    """Documents in the order of the corpus, and what was passed over on the way."""

    indices: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    missing: int = 0
    """Documents that the store does not hold."""
    unusable: int = 0
    """Documents that are no text (empty, broken, huge)."""

    @property
    def looked_at(self) -> int:
        return len(self.indices) + self.missing + self.unusable


def spread_order(count: int) -> list[int]:
    """0..count-1, every one once; the first n of them lie evenly spread, whatever n is."""
    # multiples of the golden section, modulo 1, leave no large gap at any length (Weyl); their
    # ranks are the documents
    golden = (math.sqrt(5) - 1) / 2
    points = np.arange(count) * golden % 1.0
    return [int(rank) for rank in np.argsort(np.argsort(points))]


def spread_documents(
    corpus: Corpus,
    store: LossStore,
    token_counts: Callable[[Sequence[str]], list[int]],
    tokens: int,
) -> SpreadSample:
    """As many documents as give `tokens` student tokens, or all there are. Only documents that the
    store holds are taken."""
    sample = SpreadSample()
    lookup = Lookup(store, corpus.fingerprint)
    order = spread_order(len(corpus))
    start, size = 0, _FIRST_ROUND
    while sample.tokens < tokens and start < len(order):
        found: dict[int, str] = {}
        here = order[start : start + size]
        for index in sorted(here):
            (document,) = corpus.read(index, index + 1)
            if document.text is None:
                sample.unusable += 1
            elif lookup.place(index, document_hash(document.text)) is None:
                sample.missing += 1
            else:
                found[index] = document.text
        taken = [index for index in here if index in found]
        for index, count in zip(taken, token_counts([found[i] for i in taken]), strict=True):
            if sample.tokens >= tokens:
                break
            sample.indices.append(index)
            sample.texts.append(found[index])
            sample.tokens += count
        start, size = start + size, 2 * size
        if not sample.indices and sample.looked_at >= _GIVE_UP_AFTER:
            break
    if not sample.indices:
        raise StudyError(
            f"None of {sample.looked_at:,} documents of the corpus can be used: {sample.missing:,} "
            f"are not in the loss store {store.path}, {sample.unusable:,} hold no text. Give the "
            "corpus that the store was made from, or score this one: vocagnolm score"
        )
    together = sorted(zip(sample.indices, sample.texts, strict=True))
    sample.indices, sample.texts = [i for i, _ in together], [text for _, text in together]
    return sample


def sources_of(
    paths: str | Sequence[str], field_name: str, sample: SpreadSample
) -> list[str] | None:
    """What `field_name` says for each sampled document; None where the corpus has no such field.

    The field is read as if it were the text: so every kind of file works."""
    try:
        corpus = open_corpus(paths, text_field=field_name, format="text")
    except CorpusError:
        return None
    named = []
    for index, text in zip(sample.indices, sample.texts, strict=True):
        (document,) = corpus.read(index, index + 1)
        if document.text == text:
            return None  # a file without fields: all of it is the text
        named.append("(none)" if document.text is None else document.text)
    return named
