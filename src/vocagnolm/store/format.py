"""The byte format of a loss store; docs/loss-store.md describes it for other languages.

A shard is a safetensors file that we write ourselves, because its bytes are its identity: manifests
hold their digest, `damage` writes a shard again and compares, and a resumed run must give the bytes
of the run before, while the library chooses the order of header and columns, in each version anew.
NumPy and the standard library only.
"""

import contextlib
import fnmatch
import hashlib
import itertools
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.alternatives import MOST_IDS, NLL_STEPS, STEPS_PER_NAT, Alternatives, Vocabulary
from vocagnolm.base import files
from vocagnolm.base.files import parse_json, read_json, require_keys
from vocagnolm.errors import StoreError
from vocagnolm.storage import Folder, Storage

FORMAT_NAME = "vocagnolm-loss-store"
FORMAT_VERSION = 1
WITH_ALTERNATIVES = 2
"""The version of stores that hold alternatives; all others have the bytes they always had."""
FORMAT_VERSIONS = (FORMAT_VERSION, WITH_ALTERNATIVES)
MANIFEST_FILE = "manifest.json"
PARTIAL_MANIFEST_FILE = "manifest.partial.json"
SHARD_FOLDER = "shards"
VOCABULARY_FILE = "vocabulary.safetensors"
VOCABULARY_FORMAT = "vocagnolm-vocabulary"
DATA_FOLDER, DROPPED_FOLDER = "data", "dropped"
"""In a folder that a teacher wrote: its documents, and what was left out of them."""
STORE_FOLDERS = (SHARD_FOLDER, DATA_FOLDER, DROPPED_FOLDER)
"""The folders of a complete store."""
DOCUMENT_FILE = re.compile(rf"({DATA_FOLDER}|{DROPPED_FOLDER})/\d{{6}}-[0-9a-f]{{8}}\.jsonl")
ANSWER_FOLDER = "answers"
ANSWER_FILE = re.compile(rf"{ANSWER_FOLDER}/\d{{6}}-\d{{8}}-\d{{4}}\.json")
"""While a server writes a folder: its answers to the prompts of shards that are under way."""
METADATA_KEY = "vocagnolm"

HASH_BYTES = 16
FLOAT16_MAX = 65504.0
# nll histogram: bins of half a nat from 0 to 20, and one for everything above
HISTOGRAM_STEP_NATS = 0.5
HISTOGRAM_BINS = 41
_COUNTS = ("documents", "tokens", "bytes", "scored_tokens", "scored_bytes", "nonfinite", "skipped")

_DTYPE_NAMES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "F16": np.dtype("<f2"),
}
_NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPE_NAMES.items()}
_READ = " or ".join(map(str, FORMAT_VERSIONS))
# More than the header of a shard without many skipped documents takes.
_HEADER_GUESS_BYTES = 2**15
# Widest elements first, so that every column starts at a multiple of its element size.
_COLUMNS = (
    *("document_index", "token_count", "alternatives", "entry_offsets", "nll", "token_bytes"),
    *("document_hash", "entry_bytes"),
)
_OPTIONAL_COLUMNS = ("alternatives", "entry_offsets", "entry_bytes")


def shard_name(number: int) -> str:
    return f"{SHARD_FOLDER}/{number:06d}.safetensors"


def document_file(folder: str, number: int, content: bytes) -> str:
    """The name of a shard's file of documents, with a part of its digest: of two processes that
    write one shard with other answers, neither touches the other's file."""
    return f"{folder}/{number:06d}-{hashlib.sha256(content).hexdigest()[:8]}.jsonl"


def document_files(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The files of documents that the shards of a written folder name, with bytes, lines and
    digests; none in other stores."""
    return {
        name: about
        for entry in manifest["shards"]
        for name, about in (entry.get("files") or {}).items()
    }


def shard_names(found: Iterable[str]) -> list[str]:
    """The shards among the files of a store."""
    return sorted(fnmatch.filter(found, f"{SHARD_FOLDER}/[!.]*.safetensors"))


@dataclass
class Shard:
    """The teacher's losses for a run of consecutive documents of the corpus.

    D documents, T tokens: `document_hash` uint8 [D, 16], `document_index` uint64 [D] (place in
    the corpus, skipped documents counted), `token_count` uint32 [D], `token_bytes` unsigned [T],
    `nll` float16 [T] in nats, NaN where unscored, `alternatives` uint32 [T, K] or None.
    """

    number: int
    first_document: int
    document_span: int
    """How many documents of the corpus the shard stands for: scored + skipped."""
    document_hash: np.ndarray
    document_index: np.ndarray
    token_count: np.ndarray
    token_bytes: np.ndarray
    nll: np.ndarray
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """`{"document": index in the corpus, "place": file:line, "reason": ...}`."""
    nonfinite: int = 0
    """Tokens for which the teacher gave NaN or infinity; stored as NaN."""
    alternatives: np.ndarray | None = None
    """The packed form of `vocagnolm.alternatives`."""
    entry_offsets: np.ndarray | None = None
    entry_bytes: np.ndarray | None = None
    """Where nobody knows the teacher's vocabulary: what the ids of the alternatives spell in this
    shard, sorted, as a vocabulary file holds it. The empty entry is an end."""
    files: dict[str, dict[str, Any]] | None = None
    """In a written folder: the files that hold the shard's documents, with bytes, lines and
    digests."""

    @property
    def format_version(self) -> int:
        return FORMAT_VERSION if self.alternatives is None else WITH_ALTERNATIVES

    def statistics(self) -> dict[str, Any]:
        """Sums that add up over shards; what `store inspect` shows without reading the shards."""
        nll = self.nll.astype(np.float64)
        scored = np.isfinite(nll)
        token_bytes = self.token_bytes.astype(np.int64)
        bins = np.minimum(nll[scored] / HISTOGRAM_STEP_NATS, HISTOGRAM_BINS - 1).astype(np.int64)
        return {
            "documents": len(self.token_count),
            "tokens": int(self.token_count.astype(np.int64).sum()),
            "bytes": int(token_bytes.sum()),
            "scored_tokens": int(scored.sum()),
            "scored_bytes": int(token_bytes[scored].sum()),
            # fsum: exactly rounded, so the figure does not depend on NumPy's summation order
            "nll_sum": math.fsum(nll[scored]),
            "nonfinite": self.nonfinite,
            "skipped": len(self.skipped),
            "histogram": np.bincount(bins, minlength=HISTOGRAM_BINS).tolist(),
            **({} if self.alternatives is None else _alternatives_statistics(self.alternatives)),
        }


def _alternatives_statistics(packed: np.ndarray) -> dict[str, Any]:
    """Sums of the probabilities of K ranks, and how often each is the token that follows.
    Sums over a histogram of the stored numbers, so that they do not depend on NumPy's order."""
    given = Alternatives(packed)
    present, follows = given.present, given.follows
    probability = [math.exp(-step / STEPS_PER_NAT) for step in range(NLL_STEPS + 1)]
    mass = []
    for rank in range(packed.shape[1]):
        steps = packed[present[:, rank], rank] & NLL_STEPS
        counts = np.bincount(steps, minlength=NLL_STEPS + 1).tolist()
        mass.append(math.fsum(n * p for n, p in zip(counts, probability, strict=True) if n))
    return {
        "alternative_tokens": int(present[:, :1].sum()),
        "alternative_mass": mass,
        "alternative_hits": follows.sum(axis=0).tolist(),
    }


def hash_keys(document_hash: np.ndarray) -> np.ndarray:
    """The first eight bytes of every hash, as one number: what documents are sorted by."""
    return np.ascontiguousarray(document_hash[:, :8]).view("<u8").ravel()


def to_float16(nll: np.ndarray) -> np.ndarray:
    """Round to half precision, saturating at its largest number instead of overflowing to
    infinity. NaN (unscored) stays NaN. Rounding noise below zero becomes zero."""
    narrow: np.ndarray = np.clip(nll, 0.0, FLOAT16_MAX).astype("<f2")
    return narrow


def narrowest_unsigned(values: np.ndarray) -> np.ndarray:
    """One byte a token nearly always; more where a token is longer than 255 bytes."""
    largest = int(values.max(initial=0))
    dtype = next(d for d in ("u1", "<u2", "<u4") if largest <= np.iinfo(d).max)
    return values.astype(dtype)


def encode_shard(shard: Shard, identity: str) -> bytes:
    """The bytes of a shard file. `identity` is the digest of the settings it was made with."""
    columns = {name: getattr(shard, name) for name in _COLUMNS}
    about = {
        "format": FORMAT_NAME,
        "format_version": shard.format_version,
        "identity": identity,
        "shard": shard.number,
        "first_document": shard.first_document,
        "document_span": shard.document_span,
        "statistics": shard.statistics(),
        "skipped": shard.skipped,
        **({} if shard.files is None else {"files": shard.files}),
    }
    return _encode({name: c for name, c in columns.items() if c is not None}, about)


def _encode(columns: dict[str, np.ndarray], about: dict[str, Any]) -> bytes:
    """A safetensors file of these columns in this order, with their digest in its metadata."""
    columns = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    body = hashlib.sha256()
    header: dict[str, Any] = {}
    offset = 0
    for name, column in columns.items():
        assert column.dtype in _NAME_OF_DTYPE, f"{name}: {column.dtype}"
        header[name] = {
            "dtype": _NAME_OF_DTYPE[column.dtype],
            "shape": list(column.shape),
            "data_offsets": [offset, offset + column.nbytes],
        }
        offset += column.nbytes
        body.update(column.tobytes())
    about = {**about, "data_sha256": body.hexdigest()}
    header["__metadata__"] = {METADATA_KEY: json.dumps(about, sort_keys=True)}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(c.tobytes() for c in columns.values())])


def encode_vocabulary(vocabulary: Vocabulary) -> bytes:
    """The bytes of a store's vocabulary file."""
    about = {
        "format": VOCABULARY_FORMAT,
        "format_version": FORMAT_VERSION,
        "dummy_space": vocabulary.dummy_space,
        "ends": vocabulary.ends.tolist(),
    }
    offsets = vocabulary.offsets.astype("<u4")
    return _encode({"offsets": offsets, "content": vocabulary.content}, about)


def decode_vocabulary(content: memoryview) -> Vocabulary:
    """ValueError, KeyError or TypeError where it is not one."""
    about, columns, start = _parse_header(bytes(content[: _header_end(content)]), len(content))
    offsets, texts = (_array(columns[name], content, start) for name in ("offsets", "content"))
    return Vocabulary(texts, offsets, np.array(about["ends"], np.int32), about["dummy_space"])


def entry_table(entries: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """What ids spell, as the columns `entry_offsets` and `entry_bytes` of a shard."""
    table = Vocabulary.of(entries, (), False)
    return table.offsets.astype("<u4"), table.content


def _entries(columns: Mapping[str, np.ndarray]) -> list[bytes] | None:
    if "entry_offsets" not in columns:
        return None
    content, ends = columns["entry_bytes"].tobytes(), columns["entry_offsets"].tolist()
    return [content[start:end] for start, end in itertools.pairwise(ends)]


def merged_vocabulary(tables: Iterable[Iterable[bytes]]) -> Vocabulary:
    """One vocabulary for shards with tables of their own."""
    entries = sorted(set[bytes]().union(*tables))
    if len(entries) > MOST_IDS:
        raise StoreError(
            f"the teacher's alternatives have {len(entries):,} different texts, and a store "
            f"numbers at most {MOST_IDS:,} of them. Write into several folders."
        )
    return Vocabulary.of(entries, [0] if entries[:1] == [b""] else [], False)


@dataclass(frozen=True)
class ShardFile:
    """A shard that was written: its columns are views of the content, which for a file on disk is
    mapped; nothing of it is read until used."""

    path: str
    """Path or address, for messages."""
    about: dict[str, Any]
    columns: dict[str, np.ndarray]
    content: memoryview
    """The whole file."""

    @property
    def token_count(self) -> np.ndarray:
        return self.columns["token_count"]

    @property
    def entries(self) -> list[bytes] | None:
        """What the ids of its alternatives spell, in a shard with a table of its own."""
        return _entries(self.columns)

    def damage(self) -> str | None:
        """What is wrong with the content, or None. Reads the whole shard: written again from what
        was read, it must have the same bytes, those of its checksum included."""
        try:
            again = Shard(
                number=self.about["shard"],
                first_document=self.about["first_document"],
                document_span=self.about["document_span"],
                skipped=self.about["skipped"],
                nonfinite=self.about["statistics"]["nonfinite"],
                files=self.about.get("files"),
                **self.columns,
            )
            same = encode_shard(again, self.about["identity"]) == self.content
        except (KeyError, TypeError, ValueError, IndexError):
            same = False
        return None if same else "its content does not match its checksum"


def read_shard(storage: Storage, name: str) -> ShardFile:
    """A whole shard, mapped where the storage is a folder. StoreError where it is not one."""
    path = storage.shown(name)
    with _shard_errors(path):
        return parse_shard(storage.read(name), path)


def parse_shard(view: memoryview, path: str) -> ShardFile:
    about, columns, start = _parse_header(bytes(view[: _header_end(view)]), len(view))
    names = [name for name in _COLUMNS if name in columns or name not in _OPTIONAL_COLUMNS]
    arrays = {name: _array(columns[name], view, start) for name in names}
    return ShardFile(path=path, about=about, columns=arrays, content=view)


def read_about(storage: Storage, name: str, size: int) -> dict[str, Any]:
    """What a shard of `size` bytes says of itself: only its header is read."""
    with _shard_errors(storage.shown(name)):
        return _read_header(storage, name, size)[0]


def _read_header(
    storage: Storage, name: str, size: int
) -> tuple[dict[str, Any], dict[str, Any], int]:
    begin = storage.read_range(name, 0, min(size, _HEADER_GUESS_BYTES))
    end = _header_end(begin)
    if end > len(begin):
        begin += storage.read_range(name, len(begin), min(end, size))
    return _parse_header(begin[:end], size)


def read_entries(storage: Storage, name: str, size: int) -> list[bytes]:
    """The table of a shard that has one of its own: nothing else of it is read."""
    with _shard_errors(storage.shown(name)):
        _, columns, start = _read_header(storage, name, size)
        arrays = {}
        for column in ("entry_offsets", "entry_bytes"):
            first, last = columns[column]["data_offsets"]
            content = storage.read_range(name, start + first, start + last)
            arrays[column] = np.frombuffer(content, _DTYPE_NAMES[columns[column]["dtype"]])
        return _entries(arrays) or []


@contextlib.contextmanager
def _shard_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise StoreError(f"{path} is missing.") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}.") from None
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise StoreError(f"{path} is damaged: {error}.") from None


def _header_end(begin: bytes | memoryview) -> int:
    (header_bytes,) = struct.unpack_from("<Q", begin)
    return 8 + int(header_bytes)


def _parse_header(begin: bytes, size: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What the shard is, where its columns are, and from where these places count."""
    start = _header_end(begin)
    if start > len(begin):
        raise ValueError("the header is truncated")
    header = parse_json(begin[8:start])
    about = parse_json(header.pop("__metadata__")[METADATA_KEY])
    if about["format_version"] not in FORMAT_VERSIONS:
        raise ValueError(f"format version {about['format_version']}, this program reads {_READ}")
    end = max(entry["data_offsets"][1] for entry in header.values())
    if size != start + end:
        raise ValueError(f"{size:,} bytes, its header says {start + end:,}")
    return about, header, start


def _array(entry: dict[str, Any], view: memoryview, start: int) -> np.ndarray:
    dtype = _DTYPE_NAMES[entry["dtype"]]
    low, high = entry["data_offsets"]
    flat = np.frombuffer(view, dtype, count=(high - low) // dtype.itemsize, offset=start + low)
    return flat.reshape(entry["shape"])


def version_of(identity: Mapping[str, Any]) -> int:
    """The version of the format in which a store of this identity is written."""
    return WITH_ALTERNATIVES if identity.get("alternatives") else FORMAT_VERSION


def vocabulary_record(manifest: Mapping[str, Any]) -> tuple[str, int]:
    """Digest and size of a store's vocabulary file: from the identity, or, where the vocabulary is
    what was seen while the shards were made, from beside it."""
    about = manifest["identity"]["alternatives"]
    if "vocabulary_sha256" in about:
        return about["vocabulary_sha256"], about["vocabulary_bytes"]
    about = manifest["vocabulary"]
    return about["sha256"], about["bytes"]


def vocabulary_damage(content: bytes | memoryview, digest: str) -> str | None:
    """What is wrong with a store's vocabulary file, or None."""
    same = hashlib.sha256(content).hexdigest() == digest
    return None if same else "its bytes do not match the checksum in the manifest"


def read_manifest(store: Path | Storage, *, partial: bool = False) -> dict[str, Any]:
    store = Folder(store) if isinstance(store, Path) else store
    name = PARTIAL_MANIFEST_FILE if partial else MANIFEST_FILE
    path = store.shown(name)
    mend = "Run the command that made the store again to rewrite it."
    keys: dict[str, type] = {"format": str, "format_version": int, "shard_count": int}
    keys |= {"identity": dict} if partial else {"identity": dict, "shards": list, "totals": dict}
    manifest = read_json(path, StoreError, mend, keys, read=lambda: store.read(name))
    format_name, version = manifest["format"], manifest["format_version"]
    if format_name != FORMAT_NAME or version not in FORMAT_VERSIONS:
        raise StoreError(
            f"{path} says format {format_name!r}, version {version}; this program reads "
            f"{FORMAT_NAME!r}, version {_READ}. Use the vocagnolm version that wrote it, or score "
            "again."
        )
    if partial:
        return manifest
    if "vocabulary" in manifest:
        about = manifest["vocabulary"] if isinstance(manifest["vocabulary"], dict) else {}
        where = f"{path} (vocabulary)"
        require_keys(about, where, StoreError, mend, {"sha256": str, "bytes": int})
    counts = {**dict.fromkeys(_COUNTS, (int,)), "nll_sum": (int, float)}
    require_keys(manifest["totals"], f"{path} (totals)", StoreError, mend, counts)
    for number, entry in enumerate(manifest["shards"]):
        if not isinstance(entry, dict) or entry.get("file") != shard_name(number):
            raise StoreError(
                f"{path} lists {entry!r:.60} where {shard_name(number)} belongs. {mend}"
            )
        where = f"{path} ({entry['file']})"
        require_keys(entry, where, StoreError, mend, {**_LISTED, **counts})
    return manifest


def add_statistics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals from the statistics of shards, or from a manifest's entries, without histogram."""
    total: dict[str, Any] = {key: sum(part[key] for part in parts) for key in _COUNTS}
    total["nll_sum"] = math.fsum(part["nll_sum"] for part in parts)
    if all("histogram" in part for part in parts):
        empty = [0] * HISTOGRAM_BINS
        rows = zip(empty, *(part["histogram"] for part in parts), strict=True)
        total["histogram"] = [sum(counts) for counts in rows]
    if parts and all("alternative_tokens" in part for part in parts):
        total["alternative_tokens"] = sum(part["alternative_tokens"] for part in parts)
        for name, add in (("alternative_mass", math.fsum), ("alternative_hits", sum)):
            ranks = zip(*(part[name] for part in parts), strict=True)
            total[name] = [add(values) for values in ranks]
    return total


def count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """Why documents were left out, by kind: what stands before the colon."""
    return dict(Counter(reason.split(":")[0] for reason in reasons))


def document_problems(store: Storage, described: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with files of documents, which are read through; `described` as in a shard."""
    problems = []
    for name, about in described.items():
        try:
            content = store.read(name)
        except FileNotFoundError:
            problems.append(f"{store.shown(name)} is missing")
            continue
        if hashlib.sha256(content).hexdigest() != about["sha256"]:
            problems.append(f"{store.shown(name)}: its bytes do not match its checksum")
    return problems


# ---- records of shards ----


RECORD_FOLDER = "records"
_THREADS = 16
Record = dict[str, Any]
"""A finished shard: all that the manifest says of it, and its histogram; with the `device` that
scored it where that is known and a GPU."""
_LISTED = {"sha256": str, "file_bytes": int, "first_document": int, "document_span": int}


def record_of(shard: ShardFile, number: int, device: str | None = None) -> Record:
    return {
        "file": shard_name(number),
        "file_bytes": len(shard.content),
        "sha256": hashlib.sha256(shard.content).hexdigest(),
        **{key: shard.about[key] for key in ("first_document", "document_span", "statistics")},
        **({"files": shard.about["files"]} if "files" in shard.about else {}),
        **({"device": device} if device else {}),
    }


def listed(record: Record) -> dict[str, Any]:
    """A shard's entry in the manifest, from its record."""
    return {
        **{key: record[key] for key in ("file", *_LISTED)},
        **{k: v for k, v in record["statistics"].items() if k != "histogram"},
        **{k: record[k] for k in ("files", "device") if record.get(k)},
    }


def record_name(number: int) -> str:
    return f"{RECORD_FOLDER}/{number:06d}.json"


def record_bytes(identity: str, record: Record) -> bytes:
    return files.json_bytes({"identity": identity, **record}, sealed=True)


def read_records(
    store: Storage, found: Mapping[str, int], shard_count: int, identity: str
) -> dict[int, Record]:
    """The records among the files that were `found`, of shards that are there too."""
    numbers = [n for n in range(shard_count) if {record_name(n), shard_name(n)} <= found.keys()]

    def read(number: int) -> Record | None:
        """None where it is no record of a shard of this size in a store of this identity."""
        name = record_name(number)
        keys = {"identity": str, "file": str, "statistics": dict, **_LISTED}
        try:
            record = read_json(name, StoreError, "", keys, read=lambda: store.read(name))
        except (OSError, StoreError):
            return None
        shard = (record.pop("identity"), record["file"], record["file_bytes"])
        expected = (identity, shard_name(number), found[shard_name(number)])
        return record if shard == expected else None

    with ThreadPoolExecutor(_THREADS) as pool:
        pairs = zip(numbers, pool.map(read, numbers), strict=True)
        return {number: record for number, record in pairs if record is not None}
