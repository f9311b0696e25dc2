"""What is known of a shard without reading it.

While a store grows, every finished shard has a record beside it, `records/NNNNNN.json`, so that a
run that goes on need not read what is there. The manifest is made of the records at the end, and
they are removed.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from vocagnolm import files
from vocagnolm.errors import StoreError
from vocagnolm.places import Place
from vocagnolm.store.format import ShardFile, shard_name

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
