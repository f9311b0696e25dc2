"""Documents worth reading: which of a corpus are kept, by what the stores say of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocagnolm.errors import BlocksError
from vocagnolm.recipe import Recipe
from vocagnolm.store import LossStore
from vocagnolm.store.rank import DocumentBits, document_bits


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
    if not recipe.stores:
        raise BlocksError("corpus.keep_documents needs store.path: the teacher's losses decide.")
    bits = document_bits(LossStore.open(recipe.stores[0]))
    if plan.by == "random":
        score = np.random.default_rng(recipe.run.seed).random(len(bits))
    elif plan.by == "bits_per_byte":
        score = -bits.bits_per_byte
    else:
        if plan.against is None:
            raise BlocksError(
                "corpus.keep_documents by difference needs `against`: the loss store of a small "
                "reference model (or of the student) for the same corpus."
            )
        score = difference(bits, document_bits(LossStore.open(plan.against)))
        if np.isnan(score).all():
            raise BlocksError(
                f"{plan.against} and {recipe.stores[0]} have no document in common: they are "
                "stores of other corpora."
            )
    return Chosen(np.sort(bits.keys[best(score, bits.bytes, plan.share)]))


def difference(teacher: DocumentBits, reference: DocumentBits) -> NDArray[np.float64]:
    """How many bits per byte the reference needs more than the teacher (arXiv 2410.17215); NaN for
    documents that the reference's store lacks."""
    order = np.argsort(reference.keys, kind="stable")
    keys = reference.keys[order]
    place = np.minimum(np.searchsorted(keys, teacher.keys), max(len(keys) - 1, 0))
    if not len(keys):
        return np.full(len(teacher), np.nan)
    found = keys[place] == teacher.keys
    return np.where(found, reference.bits_per_byte[order][place] - teacher.bits_per_byte, np.nan)


def best(
    score: NDArray[np.float64], widths: Sequence[int] | NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """The best documents that together hold this share of the text, at least one; ties go to the
    earlier one, what has no score comes last."""
    order = np.argsort(np.where(np.isnan(score), np.inf, -score), kind="stable")
    held = np.cumsum(np.asarray(widths)[order], dtype=np.float64)
    count = int(np.searchsorted(held, share * held[-1] * (1 - 1e-12))) + 1
    chosen = order[:count]
    return chosen[~np.isnan(score[chosen])]
