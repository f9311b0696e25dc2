"""Reading a loss store: its documents by random access, mapped into memory; what it is (`inspect`);
whether it can be trusted (`verify`)."""

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, overload

import numpy as np

from vocagnolm.alternatives import Alternatives, AlternativesSpec, Vocabulary, renumbered
from vocagnolm.base.files import json_digest
from vocagnolm.base.statistics import bits_per_byte
from vocagnolm.errors import StoreError
from vocagnolm.storage import Folder, Storage, storage_of
from vocagnolm.storage.copies import Wanted, cache_folder, copy_files
from vocagnolm.store.format import (
    DOCUMENT_FILE,
    HASH_BYTES,
    HISTOGRAM_STEP_NATS,
    MANIFEST_FILE,
    PARTIAL_MANIFEST_FILE,
    RECORD_FOLDER,
    SHARD_FOLDER,
    STORE_FOLDERS,
    VOCABULARY_FILE,
    ShardFile,
    add_statistics,
    count_reasons,
    decode_vocabulary,
    document_files,
    document_problems,
    encode_vocabulary,
    hash_keys,
    merged_vocabulary,
    read_about,
    read_manifest,
    read_records,
    read_shard,
    shard_name,
    shard_names,
    vocabulary_damage,
    vocabulary_record,
)

SCORE_WITH_ALTERNATIVES = (
    "Score the corpus again into another folder: vocagnolm score ... --alternatives 4"
)


def _bits_per_byte(totals: Mapping[str, Any]) -> float | None:
    """Bits per byte from the totals of a manifest; None where nothing was scored."""
    if not totals["scored_bytes"]:
        return None
    return float(bits_per_byte(totals["nll_sum"], totals["scored_bytes"]))


class LossStore:
    """A complete loss store. `store[i]` is `(token_bytes, nll)` of the i-th scored document, and
    `store.alternatives(i)` are its alternatives, if the store has them. Skipped documents are not
    counted: find a text with `store.of(text)`.

    Opening reads only the manifest; shards are memory-mapped on first use. Remote shards are first
    copied to a local folder, once (`vocagnolm.storage.copies`). A store can be sent to worker
    processes, which map the files themselves.
    """

    def __init__(self, path: str | Path, manifest: dict[str, Any]):
        self.path = path
        self.manifest = manifest
        # index after the last document of every shard
        self._ends = list(itertools.accumulate(one["documents"] for one in manifest["shards"]))
        self._shards: dict[int, tuple[ShardFile, np.ndarray]] = {}
        self._ids: dict[int, np.ndarray] = {}  # of the entries of shards with tables of their own

    @classmethod
    def open(cls, path: str | Path) -> "LossStore":
        """Open a complete store: a folder, or an address (s3://, gs://, az://, hf://datasets/...).

            store = LossStore.open("store")
            index = store.of(text)                  # the document with this text
            token_bytes, nll = store[index]         # of the teacher's tokens
            mapping = align(student.spans(text).spans, store.spans(index))
            guidance = carry(mapping, nll)          # a loss for each of the student's tokens

        What is not complete is refused with what to run to complete it.
        """
        storage = storage_of(path)
        require_complete(storage)
        # of a dataset of the hub its copy is the store
        where = storage.path if isinstance(storage, Folder) else str(storage)
        return cls(where, read_manifest(storage))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def teacher_name(self) -> str:
        """The name under which the teacher was scored."""
        teacher = self.manifest["identity"].get("teacher")
        return str(teacher.get("name", "unknown")) if isinstance(teacher, dict) else str(teacher)

    @property
    def bits_per_byte(self) -> float | None:
        """The teacher's bits per byte over everything it scored."""
        return _bits_per_byte(self.manifest["totals"])

    def __repr__(self) -> str:
        tokens = self.manifest["totals"]["tokens"]
        return f"LossStore({str(self.path)!r}, {len(self):,} documents, {tokens:,} tokens)"

    @overload
    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Byte length of every teacher token, int64 [M], and its nll in nats, float32 [M]; NaN
        where the teacher gave none. The lengths add up to the document's UTF-8 bytes. A slice
        gives a list of such pairs."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        columns = self.columns(index)
        return columns["token_bytes"].astype(np.int64), columns["nll"].astype("f4")

    @property
    def kept_alternatives(self) -> AlternativesSpec | None:
        """Number and kind of the alternatives per token; None if the store has none."""
        about = self.manifest["identity"].get("alternatives")
        return None if about is None else AlternativesSpec(about["count"], about["sampled"])

    def alternatives(self, index: int) -> Alternatives:
        """The tokens that the teacher found most likely at the position of each of a document's
        tokens. `store.vocabulary[id]` are the bytes of a token."""
        kept = self.kept_alternatives
        if kept is None:
            raise StoreError(f"{self.path} holds no alternatives. {SCORE_WITH_ALTERNATIVES}")
        return Alternatives(self.columns(index)["alternatives"], kept.sampled)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The teacher's vocabulary, in a store with alternatives."""
        identity = self.manifest["identity"]
        if "alternatives" not in identity:
            raise StoreError(f"{self.path} holds no vocabulary. {SCORE_WITH_ALTERNATIVES}")
        shown = self._folder.shown(VOCABULARY_FILE)
        self._copy([], vocabulary=True)
        try:
            content = self._folder.read(VOCABULARY_FILE)
            if damage := vocabulary_damage(content, vocabulary_record(self.manifest)[0]):
                raise StoreError(f"{shown}: {damage}. {self._mend_hint()}")
            return decode_vocabulary(content)
        except FileNotFoundError:
            raise StoreError(f"{shown} is missing. {self._mend_hint()}") from None

    def of(self, text: str) -> int:
        """Index of the document with exactly this text, found by its hash."""
        index = self.find(hashlib.sha256(text.encode()).digest()[:HASH_BYTES])
        if index is None:
            start = " ".join(text[:60].split())
            raise StoreError(
                f"{self.path} does not hold this text: '{start}...'. It was not scored, was "
                "skipped, or has changed since."
            )
        return index

    def spans(self, index: int) -> np.ndarray:
        """Byte spans of the teacher's tokens of a document, int64 [M, 2], for `align`."""
        token_bytes, _ = self[index]
        ends = np.cumsum(token_bytes)
        return np.stack([ends - token_bytes, ends], axis=1)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def shards(self) -> Iterator[ShardFile]:
        """Every shard, verified, with the ids of the store's vocabulary."""
        for number in range(len(self._ends)):
            shard, _ = self._shard(number)
            if shard.entries is not None:
                columns = self._renumbered(number, shard, shard.columns)
                shard = dataclasses.replace(shard, columns=columns)
            yield shard

    def skipped(self) -> Iterator[dict[str, Any]]:
        """Documents of the corpus that were not scored, with their position and the reason. Opens
        the shards that have some."""
        for number, entry in enumerate(self.manifest["shards"]):
            if entry["skipped"]:
                yield from self._shard(number)[0].about["skipped"]

    def document_hash(self, index: int) -> bytes:
        """The first 16 bytes of the SHA-256 of a document's text."""
        shard, _, inside = self._locate(index)
        return bytes(shard.columns["document_hash"][inside])

    def document_index(self, index: int) -> int:
        """Index of the document in the corpus, including skipped documents, which a folder that the
        teacher wrote does not have."""
        if self.written is not None:
            return range(len(self))[index]
        shard, _, inside = self._locate(index)
        return int(shard.columns["document_index"][inside])

    @property
    def written(self) -> dict[str, Any] | None:
        """What a folder that the teacher wrote holds beside the store; None for other stores."""
        about = self.manifest.get("written")
        return about if isinstance(about, dict) else None

    @property
    def corpus_fingerprint(self) -> str | None:
        """Fingerprint of the corpus that the store is about; None if the store does not have it."""
        corpus = self.written or self.manifest["identity"].get("corpus")
        return corpus.get("fingerprint") if isinstance(corpus, dict) else None

    def made_from(self, corpus_fingerprint: str | None) -> bool:
        """Whether this is the corpus that was scored (`Corpus.fingerprint`); documents then have
        the same numbers in both."""
        known = self.corpus_fingerprint
        return known is not None and known == corpus_fingerprint

    def place_of(self, number: int) -> int | None:
        """Index of the document with this number in the scored corpus, or None if it was skipped.
        Opens only its shard. A folder that the teacher wrote holds no other documents."""
        if self.written is not None:
            return number if number < len(self) else None
        shard = bisect.bisect_right(self._first_documents, number) - 1
        if shard < 0:
            return None
        numbers = self._shard(shard)[0].columns["document_index"]
        inside = int(np.searchsorted(numbers, number))
        if inside == len(numbers) or numbers[inside] != number:
            return None
        return inside + (self._ends[shard - 1] if shard else 0)

    def find(self, document_hash: bytes) -> int | None:
        """Index of a document by its hash (`vocagnolm.data.corpus.document_hash`), or None. Equal
        documents have one hash; the first of them is found. The first call builds an index of the
        whole store."""
        if len(document_hash) != HASH_BYTES:
            raise ValueError(f"a document hash has {HASH_BYTES} bytes, not {len(document_hash)}")
        keys, order = self._hash_index
        key = np.frombuffer(document_hash, "<u8", count=1)[0]
        position = int(np.searchsorted(keys, key))
        while position < len(keys) and keys[position] == key:
            index = int(order[position])
            if self.document_hash(index) == document_hash:
                return index
            position += 1
        return None

    @functools.cached_property
    def _first_documents(self) -> list[int]:
        return [shard["first_document"] for shard in self.manifest["shards"]]

    @functools.cached_property
    def _hash_index(self) -> tuple[np.ndarray, np.ndarray]:
        """First eight bytes of every hash, sorted, and the documents in that order."""
        self.fetch()
        hashes = (shard.columns["document_hash"] for shard in self.shards())
        keys = np.concatenate([np.zeros(0, "<u8"), *map(hash_keys, hashes)])
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def columns(self, index: int) -> dict[str, np.ndarray]:
        """A document's `token_bytes`, `nll` and, where the store has them, `alternatives`. They are
        as the shard holds them: mapped, and read when used."""
        shard, ends, inside = self._locate(index)
        own = slice(int(ends[inside - 1]) if inside else 0, int(ends[inside]))
        names = ("token_bytes", "nll", "alternatives")
        columns = {n: shard.columns[n][own] for n in names if n in shard.columns}
        return self._renumbered(shard.about["shard"], shard, columns)

    def _renumbered(
        self, number: int, shard: ShardFile, columns: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Columns of a shard with a table of its own, in the ids of the store's vocabulary."""
        if "entry_offsets" not in shard.columns:
            return columns
        if number not in self._ids:
            known, entries = self._entry_ids, shard.entries or []
            if any(entry not in known for entry in entries):
                raise StoreError(
                    f"{shard.path} names tokens that {VOCABULARY_FILE} does not hold. "
                    f"{self._mend_hint()}"
                )
            self._ids[number] = np.array([known[entry] for entry in entries], np.uint32)
        packed = renumbered(columns["alternatives"], self._ids[number])
        return {**columns, "alternatives": packed}

    @functools.cached_property
    def _entry_ids(self) -> dict[bytes, int]:
        return {self.vocabulary[index]: index for index in range(len(self.vocabulary))}

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
            self._copy([number])
            try:
                shard = read_shard(self._folder, entry["file"])
            except StoreError as error:
                raise StoreError(f"{error} {self._mend_hint()}") from None
            # the whole file once, when it is first used: a disk may forget a bit
            if hashlib.sha256(shard.content).hexdigest() != entry["sha256"]:
                raise StoreError(
                    f"{shard.path}: its bytes do not match the checksum in the manifest. "
                    f"{self._mend_hint()}"
                )
            self._shards[number] = shard, np.cumsum(shard.token_count, dtype=np.int64)
        return self._shards[number]

    def fetch(self) -> None:
        """Copy all missing files of a remote store, several at once."""
        self._copy(range(len(self._ends)), vocabulary=True)

    def _copy(self, numbers: Sequence[int], *, vocabulary: bool = False) -> None:
        if isinstance(self._storage, Folder):
            return
        entries = [self.manifest["shards"][number] for number in numbers]
        wanted = [Wanted(e["file"], e["file_bytes"], e["sha256"]) for e in entries]
        if vocabulary and "alternatives" in self.manifest["identity"]:
            digest, size = vocabulary_record(self.manifest)
            wanted.append(Wanted(VOCABULARY_FILE, size, digest))
        copy_files(self._storage, wanted, self._folder.path, mend_hint(self.path))

    @functools.cached_property
    def _storage(self) -> Storage:
        return storage_of(self.path)

    @functools.cached_property
    def _folder(self) -> Folder:
        """Where the shards are, or their copies: by what the manifest says, so that another store
        at the same address has copies of its own."""
        if isinstance(self._storage, Folder):
            return self._storage
        shards = [entry["sha256"] for entry in self.manifest["shards"]]
        key = json_digest({"identity": self.manifest["identity"], "shards": shards})
        return Folder(cache_folder() / "stores" / key[:32])

    def _mend_hint(self) -> str:
        if isinstance(self._storage, Folder):
            return mend_hint(self.path)
        return f"Remove that file: it is copied again from {self.path}."

    def __reduce__(self) -> tuple[Any, ...]:
        return LossStore, (self.path, self.manifest)


def mend_hint(path: str | Path) -> str:
    return (
        f"See what else is wrong with: vocagnolm store verify {path}; the command that made the "
        "store, run again, makes the damaged shards again."
    )


def require_complete(storage: Storage) -> None:
    """A store that is not complete must not be used by accident."""
    if storage.has(MANIFEST_FILE):
        return
    found = storage.files(SHARD_FOLDER)
    if PARTIAL_MANIFEST_FILE in found:
        try:
            wanted = read_manifest(storage, partial=True)["shard_count"]
        except FileNotFoundError:  # completed at this moment
            return
        done = len(shard_names(found))
        raise StoreError(
            f"{storage} is not complete: {done} of {wanted} shards are scored. Run the command "
            f"that started it again to resume."
        )
    raise StoreError(
        f"{storage} is not a loss store: it has no {MANIFEST_FILE}. "
        f"Make one with: vocagnolm score --teacher T --corpus C --out {storage}"
    )


# ---- what it is, and whether it can be trusted ----


MOST_SKIPPED_SHOWN = 100
NOT_VERIFIED = "names, sizes and headers; the losses themselves by `vocagnolm store verify` alone"
_THREADS = 16


def listing_problems(manifest: dict[str, Any], found: Mapping[str, int]) -> list[str]:
    """What the names and sizes of the files say against the manifest of a complete store."""
    problems = []
    for entry in manifest["shards"]:
        size = found.get(entry["file"])
        if size is None:
            problems.append(f"{entry['file']} is missing")
        elif size != entry["file_bytes"]:
            problems.append(
                f"{entry['file']} has {size:,} bytes, {entry['file_bytes']:,} are expected"
            )
    for name, about in document_files(manifest).items():
        if found.get(name) != about["bytes"]:
            problems.append(f"{name} is missing or has other bytes than were written")
    if "alternatives" in manifest["identity"] and VOCABULARY_FILE not in found:
        problems.append(f"{VOCABULARY_FILE} is missing")
    return problems


def _strangers(manifest: dict[str, Any], found: Iterable[str]) -> list[str]:
    there = {*shard_names(found), *filter(DOCUMENT_FILE.fullmatch, found)}
    others = there.difference((e["file"] for e in manifest["shards"]), document_files(manifest))
    return [f"{name}: not in the manifest; remove it" for name in sorted(others)]


def inspect_store(path: str | Path) -> dict[str, Any]:
    """Describe a store, complete or not, from its manifest and the shards' headers. `problems` are
    those visible without reading the shards, which `verify_store` does."""
    storage = storage_of(path)
    found = storage.files(*STORE_FOLDERS, RECORD_FOLDER)
    complete = MANIFEST_FILE in found
    if not complete and PARTIAL_MANIFEST_FILE not in found:
        require_complete(storage)  # raises with the right message
    try:
        manifest = read_manifest(storage, partial=not complete)
    except FileNotFoundError:  # completed at this moment
        return inspect_store(path)
    problems: list[str] = []
    names = shard_names(found)
    if complete:
        problems = [*listing_problems(manifest, found), *_strangers(manifest, found)]
        names = [e["file"] for e in manifest["shards"] if found.get(e["file"]) == e["file_bytes"]]
    with ThreadPoolExecutor(_THREADS) as pool:
        shards = list(pool.map(lambda name: read_about(storage, name, found[name]), names))
    totals = add_statistics([about["statistics"] for about in shards])
    if complete and not problems and totals != manifest["totals"]:
        problems.append(f"{MANIFEST_FILE}: its totals are not those of the shards")
    skipped = [entry for about in shards for entry in about["skipped"]]
    reasons = count_reasons(entry["reason"] for entry in skipped)
    documents = filter(DOCUMENT_FILE.fullmatch, found)
    file_bytes = sum(found.get(name, 0) for name in (*names, VOCABULARY_FILE, *documents))
    identity = manifest["identity"]
    scored = totals["scored_tokens"]
    return {
        "path": str(path),
        "complete": complete,
        "problems": problems,
        "verified": NOT_VERIFIED,
        "format_version": manifest["format_version"],
        "documents": totals["documents"],
        "tokens": totals["tokens"],
        "bytes": totals["bytes"],
        "scored_tokens": scored,
        "mean_nll": totals["nll_sum"] / scored if scored else None,
        "bits_per_byte": _bits_per_byte(totals),
        "skipped": totals["skipped"],
        "skipped_reasons": reasons,
        "skipped_documents": skipped[:MOST_SKIPPED_SHOWN],
        "nonfinite": totals["nonfinite"],
        "shards": len(shards),
        "shards_expected": manifest["shard_count"],
        "missing_shards": _ranges(
            n for n in range(manifest["shard_count"]) if shard_name(n) not in found
        ),
        "devices": _devices(storage, manifest, found),
        "file_bytes": file_bytes,
        "bytes_per_token": file_bytes / totals["tokens"] if totals["tokens"] else None,
        "histogram": {"step_nats": HISTOGRAM_STEP_NATS, "counts": totals["histogram"]},
        **identity,
        **({"written": manifest["written"]} if "written" in manifest else {}),
        **_alternatives(identity, totals),
    }


def _alternatives(identity: dict[str, Any], totals: dict[str, Any]) -> dict[str, Any]:
    """What `inspect` adds: the mean probability of every rank, and how often it follows."""
    if "alternatives" not in identity:
        return {}
    tokens = max(totals.get("alternative_tokens", 0), 1)
    shares = {
        name: [value / tokens for value in totals.get(f"alternative_{name}", [])]
        for name in ("mass", "hits")
    }
    return {"alternatives": {**identity["alternatives"], **shares}}


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """`[first, last]` of every run of numbers."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return [[run[0], run[-1]] for run in found]


def _devices(storage: Storage, manifest: dict[str, Any], found: dict[str, int]) -> dict[str, int]:
    """How many shards each GPU has scored, as far as it is known."""
    entries = manifest.get("shards")
    if entries is None:
        digest = json_digest(manifest["identity"])
        entries = read_records(storage, found, manifest["shard_count"], digest).values()
    return dict(Counter(entry["device"] for entry in entries if entry.get("device") is not None))


def verify_store(path: str | Path) -> list[str]:
    """List every problem of the store; empty if it is intact. Reads every byte."""
    storage = storage_of(path)
    require_complete(storage)
    manifest = read_manifest(storage)
    identity = manifest["identity"]
    problems: list[str] = []
    expected_first = 0
    tables = []
    for number, entry in enumerate(manifest["shards"]):
        try:
            shard = read_shard(storage, entry["file"])
            tables.append(shard.entries)
        except StoreError as error:
            problems.append(str(error))
        else:
            found = _shard_problems(shard, entry, number, identity, expected_first)
            problems += [f"{entry['file']}: {problem}" for problem in found]
        expected_first = entry["first_document"] + entry["document_span"]
    corpus = identity.get("corpus")
    documents = corpus.get("documents") if isinstance(corpus, dict) else None
    if expected_first != documents:
        problems.append(
            f"{MANIFEST_FILE}: the shards cover {expected_first:,} documents, the corpus has "
            f"{documents}"
        )
    problems += document_problems(storage, document_files(manifest))
    totals = add_statistics(manifest["shards"])
    if any(manifest["totals"].get(key) != value for key, value in totals.items()):
        problems.append(f"{MANIFEST_FILE}: the totals do not add up")
    problems += _strangers(manifest, storage.files(*STORE_FOLDERS))
    if "alternatives" in identity:
        damage = _vocabulary_problem(storage, manifest, tables)
        problems += [f"{VOCABULARY_FILE}: {damage}"] if damage else []
    return problems


def _vocabulary_problem(
    storage: Storage, manifest: dict[str, Any], tables: Sequence[list[bytes] | None]
) -> str | None:
    """What is wrong with the vocabulary. `tables`: of the shards, where they have some."""
    try:
        content = storage.read(VOCABULARY_FILE)
    except FileNotFoundError:
        return "it is missing"
    if damage := vocabulary_damage(content, vocabulary_record(manifest)[0]):
        return damage
    if "vocabulary" in manifest:
        merged = merged_vocabulary(table or [] for table in tables)
        if encode_vocabulary(merged) != bytes(content):
            return "it is not what the shards' own tables are together"
    return None


def _shard_problems(
    shard: ShardFile,
    entry: dict[str, Any],
    number: int,
    identity: dict[str, Any],
    expected_first: int,
) -> list[str]:
    if hashlib.sha256(shard.content).hexdigest() != entry["sha256"]:
        return ["its bytes do not match the checksum in the manifest"]
    problems = []
    about, columns = shard.about, shard.columns
    if (damage := shard.damage()) is not None:
        problems.append(damage)
    if about["identity"] != json_digest(identity) or about["shard"] != number:
        problems.append("it belongs to another run or place")
    if about["first_document"] != expected_first:
        problems.append(f"it starts at document {about['first_document']}, not {expected_first}")
    if int(columns["token_count"].astype(np.int64).sum()) != len(columns["nll"]):
        problems.append("its token counts do not add up to its tokens")
    alternatives = (identity.get("alternatives") or {}).get("count", 0)
    if "alternatives" in columns or alternatives:
        shape = columns["alternatives"].shape if "alternatives" in columns else "none"
        if shape != (len(columns["nll"]), alternatives):
            problems.append(f"it has alternatives {shape}, {alternatives} per token are expected")
    indices = [*columns["document_index"].tolist(), *(e["document"] for e in about["skipped"])]
    wanted = range(expected_first, expected_first + about["document_span"])
    if len(set(indices)) != len(indices):
        problems.append("a document appears twice")
    elif sorted(indices) != list(wanted):
        problems.append("documents are missing")
    return problems
