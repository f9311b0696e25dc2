"""Documents worth reading: which of a corpus are kept, by what the stores say of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocagnolm.recipe import Recipe
from vocagnolm.store import LossStore
from vocagnolm.store.rank import best, difference_of, document_bits


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
