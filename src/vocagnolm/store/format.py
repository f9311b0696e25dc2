"""The byte format of a loss store; docs/loss-store.md describes it for other languages.

A shard is a safetensors file that we write ourselves, because its bytes are its identity: manifests
hold their digest, `damage` writes a shard again and compares, and a resumed run must give the bytes
of the run before, while the library chooses the order of header and columns, in each version anew.
NumPy and the standard library only.
"""

import contextlib
import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm import files
from vocagnolm.alternatives import NLL_STEPS, STEPS_PER_NAT, Alternatives, Vocabulary
from vocagnolm.errors import StoreError
from vocagnolm.files import checked_json, json_digest, parse_json
from vocagnolm.storage import Folder, Place

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
METADATA_KEY = "vocagnolm"

HASH_BYTES = 16
FLOAT16_MAX = 65504.0
# nll histogram: bins of half a nat from 0 to 20, and one for everything above
HISTOGRAM_STEP_NATS = 0.5
HISTOGRAM_BINS = 41

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
    *("document_index", "token_count", "alternatives", "nll", "token_bytes", "document_hash"),
)


def shard_name(number: int) -> str:
    return f"{SHARD_FOLDER}/{number:06d}.safetensors"


def shard_names(found: Iterable[str]) -> list[str]:
    """The shards among the files of a store."""
    begin = f"{SHARD_FOLDER}/"
    inside = (name.removeprefix(begin) for name in found if name.startswith(begin))
    shards = (n for n in inside if n.endswith(".safetensors") and not n.startswith("."))
    return sorted(begin + name for name in shards)


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
    """As `vocagnolm.alternatives` packs them."""

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
    """Of K ranks: the sums of their probabilities, and how often each is the token that follows.
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
    }
    return _encode({name: c for name, c in columns.items() if c is not None}, about)


def _encode(columns: dict[str, np.ndarray], about: dict[str, Any]) -> bytes:
    """A safetensors file of these columns, in this order, whose metadata also tell a digest of
    them."""
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
                **self.columns,
            )
            same = encode_shard(again, self.about["identity"]) == self.content
        except (KeyError, TypeError, ValueError, IndexError):
            same = False
        return None if same else "its content does not match its checksum"


def open_shard(path: Path) -> ShardFile:
    """Map a shard. Raises StoreError when the file is missing, cut short or not a shard."""
    return read_shard(Folder(path.parent), path.name)


def read_shard(place: Place, name: str) -> ShardFile:
    """A whole shard of a place, with the errors of `open_shard`."""
    path = place.shown(name)
    with _shard_errors(path):
        return parse_shard(place.read(name), path)


def parse_shard(view: memoryview, path: str) -> ShardFile:
    about, columns, start = _parse_header(bytes(view[: _header_end(view)]), len(view))
    names = [name for name in _COLUMNS if name in columns or name != "alternatives"]
    arrays = {name: _array(columns[name], view, start) for name in names}
    return ShardFile(path=path, about=about, columns=arrays, content=view)


def read_about(place: Place, name: str, size: int) -> dict[str, Any]:
    """What a shard of `size` bytes says of itself: only its header is read."""
    with _shard_errors(place.shown(name)):
        begin = place.read_range(name, 0, min(size, _HEADER_GUESS_BYTES))
        end = _header_end(begin)
        if end > len(begin):
            begin += place.read_range(name, len(begin), min(end, size))
        about, _, _ = _parse_header(begin[:end], size)
        return about


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
        raise ValueError("the header is cut short")
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


def vocabulary_damage(content: bytes | memoryview, identity: Mapping[str, Any]) -> str | None:
    """What is wrong with a store's vocabulary file, or None."""
    digest = identity["alternatives"]["vocabulary_sha256"]
    same = hashlib.sha256(content).hexdigest() == digest
    return None if same else "its bytes do not match the checksum in the manifest"


def identity_digest(identity: Mapping[str, Any]) -> str:
    """Digest of everything that decides the bytes of a store."""
    return json_digest(identity)


def read_manifest(store: Path | Place, *, partial: bool = False) -> dict[str, Any]:
    store = Folder(store) if isinstance(store, Path) else store
    name = PARTIAL_MANIFEST_FILE if partial else MANIFEST_FILE
    path = store.shown(name)
    mend = "The command that scored the store, run again, writes it anew."
    keys: dict[str, type] = {"format": str, "format_version": int, "shard_count": int}
    keys |= {"identity": dict} if partial else {"identity": dict, "shards": list, "totals": dict}
    try:
        content = bytes(store.read(name))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. {mend}") from None
    manifest = checked_json(content, path, StoreError, mend, keys)
    name, version = manifest["format"], manifest["format_version"]
    if name != FORMAT_NAME or version not in FORMAT_VERSIONS:
        raise StoreError(
            f"{path} says format {name!r}, version {version}; this program reads {FORMAT_NAME!r}, "
            f"version {_READ}. Use the vocagnolm version that wrote it, or score again."
        )
    for number, entry in enumerate(manifest.get("shards", [])):
        if not isinstance(entry, dict) or entry.get("file") != shard_name(number):
            raise StoreError(
                f"{path} lists {entry!r:.60} where {shard_name(number)} belongs. {mend}"
            )
    return manifest


def add_statistics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals of a store from the statistics of its shards."""
    total: dict[str, Any] = {
        key: sum(part[key] for part in parts)
        for key in (
            "documents",
            "tokens",
            "bytes",
            "scored_tokens",
            "scored_bytes",
            "nonfinite",
            "skipped",
        )
    }
    total["nll_sum"] = math.fsum(part["nll_sum"] for part in parts)
    total["histogram"] = [
        sum(part["histogram"][i] for part in parts) for i in range(HISTOGRAM_BINS)
    ]
    if parts and all("alternative_tokens" in part for part in parts):
        total["alternative_tokens"] = sum(part["alternative_tokens"] for part in parts)
        for name, add in (("alternative_mass", math.fsum), ("alternative_hits", sum)):
            ranks = zip(*(part[name] for part in parts), strict=True)
            total[name] = [add(values) for values in ranks]
    return total


def count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """Why documents were left out, by kind: what stands before the colon."""
    return dict(Counter(reason.split(":")[0] for reason in reasons))


# ---- records of shards ----


RECORD_FOLDER = "records"
_THREADS = 16
_KEYS: dict[str, type] = {
    "identity": str,
    "file": str,
    "file_bytes": int,
    "sha256": str,
    "first_document": int,
    "document_span": int,
    "statistics": dict,
}


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: all that the manifest says of it."""

    file: str
    file_bytes: int
    sha256: str
    first_document: int
    document_span: int
    statistics: dict[str, Any]
    device: str | None = None
    """The GPU that scored it; None where it is not known, and on a CPU."""

    def to_json(self) -> dict[str, Any]:
        """What is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def listed(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "file_bytes": self.file_bytes,
            "first_document": self.first_document,
            "document_span": self.document_span,
            **{k: v for k, v in self.statistics.items() if k != "histogram"},
            **({"device": self.device} if self.device else {}),
        }


def record_of(shard: ShardFile, number: int, device: str | None = None) -> ShardRecord:
    return ShardRecord(
        shard_name(number),
        len(shard.content),
        hashlib.sha256(shard.content).hexdigest(),
        shard.about["first_document"],
        shard.about["document_span"],
        shard.about["statistics"],
        device,
    )


def record_name(number: int) -> str:
    return f"{RECORD_FOLDER}/{number:06d}.json"


def record_bytes(identity: str, record: ShardRecord) -> bytes:
    return files.json_bytes({"identity": identity, **record.to_json()})


def read_records(
    store: Place, found: Mapping[str, int], shard_count: int, identity: str
) -> dict[int, ShardRecord]:
    """The records among the files that were `found`, of shards that are there too."""
    numbers = [
        number
        for number in range(shard_count)
        if record_name(number) in found and shard_name(number) in found
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        records = pool.map(lambda n: read_record(store, n, found[shard_name(n)], identity), numbers)
        pairs = zip(numbers, records, strict=True)
        return {number: record for number, record in pairs if record is not None}


def read_record(store: Place, number: int, size: int, identity: str) -> ShardRecord | None:
    """The record of shard `number`, if it is one of the store of this identity and of a shard of
    this size. What cannot be read is no record."""
    name = record_name(number)
    try:
        content = files.checked_json(bytes(store.read(name)), name, StoreError, "", _KEYS)
    except (OSError, StoreError):
        return None
    about = {key: content[key] for key in _KEYS if key != "identity"}
    record = ShardRecord(**about, device=content.get("device"))
    if content["identity"] != identity or record.file != shard_name(number):
        return None
    return record if record.file_bytes == size else None
