"""Where a store has a document of a corpus."""

from vocagnolm.store import LossStore


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
