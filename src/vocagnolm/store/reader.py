"""Reading a loss store: mapped into memory, random access by document."""

import bisect
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.errors import StoreError
from vocagnolm.store.format import (
    HASH_BYTES,
    MANIFEST_FILE,
    PARTIAL_MANIFEST_FILE,
    SHARD_FOLDER,
    ShardFile,
    open_shard,
    read_manifest,
)


class LossStore:
    """A complete loss store. `store[i]` is `(token_bytes, nll)` of the i-th scored document.

    Opening reads the manifest alone; shards are mapped when first used. May be sent to worker
    processes: they map the files themselves.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path = path
        self.manifest = manifest
        self._ends: list[int] = []  # index after the last document of every shard
        total = 0
        for shard in manifest["shards"]:
            total += shard["documents"]
            self._ends.append(total)
        self._shards: dict[int, tuple[ShardFile, np.ndarray]] = {}

    @classmethod
    def open(cls, path: str | Path) -> "LossStore":
        path = Path(path)
        require_complete(path)
        return cls(path, read_manifest(path))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Byte length of every teacher token, int64 [M], and its nll in nats, float32 [M]; NaN
        where the teacher gave none. The lengths add up to the document's UTF-8 bytes."""
        shard, ends, inside = self._locate(index)
        low = int(ends[inside - 1]) if inside else 0
        high = int(ends[inside])
        return (
            shard.columns["token_bytes"][low:high].astype(np.int64),
            shard.columns["nll"][low:high].astype(np.float32),
        )

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def document_hash(self, index: int) -> bytes:
        shard, _, inside = self._locate(index)
        return shard.columns["document_hash"][inside].tobytes()

    def document_index(self, index: int) -> int:
        """Place of the document in the corpus, skipped documents counted."""
        shard, _, inside = self._locate(index)
        return int(shard.columns["document_index"][inside])

    def find(self, document_hash: bytes) -> int | None:
        """Index of a document by its hash (`vocagnolm.data.corpus.document_hash`), or None. Equal
        documents have one hash; the first of them is found."""
        if len(document_hash) != HASH_BYTES:
            raise ValueError(f"a document hash has {HASH_BYTES} bytes, not {len(document_hash)}")
        keys, order = self._hash_index
        key = np.frombuffer(document_hash, "<u8", count=1)[0]
        place = int(np.searchsorted(keys, key))
        while place < len(keys) and keys[place] == key:
            index = int(order[place])
            if self.document_hash(index) == document_hash:
                return index
            place += 1
        return None

    @functools.cached_property
    def _hash_index(self) -> tuple[np.ndarray, np.ndarray]:
        """First eight bytes of every hash, sorted, and the documents in that order."""
        parts = [
            np.ascontiguousarray(self._shard(n)[0].columns["document_hash"][:, :8]).view("<u8")
            for n in range(len(self._ends))
        ]
        keys = np.concatenate(parts).ravel() if parts else np.zeros(0, "<u8")
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def _locate(self, index: int) -> tuple[ShardFile, np.ndarray, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of a store of {len(self)}")
        index %= len(self)
        number = bisect.bisect_right(self._ends, index)
        shard, ends = self._shard(number)
        return shard, ends, index - (self._ends[number - 1] if number else 0)

    def _shard(self, number: int) -> tuple[ShardFile, np.ndarray]:
        if number not in self._shards:
            entry = self.manifest["shards"][number]
            try:
                shard = open_shard(self.path / entry["file"])
            except StoreError as error:
                raise StoreError(f"{error} {mend_hint(self.path)}") from None
            if len(shard.token_count) != entry["documents"]:
                raise StoreError(
                    f"{entry['file']} holds {len(shard.token_count)} documents, the manifest says "
                    f"{entry['documents']}. {mend_hint(self.path)}"
                )
            self._shards[number] = shard, np.cumsum(shard.token_count, dtype=np.int64)
        return self._shards[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return LossStore, (self.path, self.manifest)


def mend_hint(path: Path) -> str:
    return (
        f"See what else is wrong with: vocagnolm store verify {path}; the command that scored the "
        "store, run again, scores the damaged shards again."
    )


def require_complete(path: Path) -> None:
    """A store that is not complete must not be used by accident."""
    if (path / MANIFEST_FILE).exists():
        return
    if (path / PARTIAL_MANIFEST_FILE).exists():
        wanted = read_manifest(path, partial=True)["shard_count"]
        done = len(list((path / SHARD_FOLDER).glob("*.safetensors")))
        raise StoreError(
            f"{path} is not complete: {done} of {wanted} shards are scored. Run the command that "
            "started it again; it goes on from there."
        )
    raise StoreError(
        f"{path} is not a loss store: it has no {MANIFEST_FILE}. "
        f"Make one with: vocagnolm score --teacher T --corpus C --out {path}"
    )
