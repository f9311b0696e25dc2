"""What is known of a shard without reading it.

While a store grows, every finished shard has a record beside it, `records/NNNNNN.json`, so that a
run that goes on need not read what is there. The manifest takes the records in at the end, and they
are removed.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vocagnolm import files
from vocagnolm.errors import StoreError
from vocagnolm.store.format import shard_name

RECORD_FOLDER = "records"


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard."""

    file: str
    file_bytes: int
    sha256: str
    device: str | None = None
    """The GPU that scored it; None where it is not known, and on a CPU."""

    def to_json(self) -> dict[str, Any]:
        """What is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def record_of_file(store: Path, number: int, device: str | None = None) -> ShardRecord:
    """Reads the shard for its checksum."""
    path = store / shard_name(number)
    return ShardRecord(shard_name(number), path.stat().st_size, files.file_digest(path), device)


def listed_record(entry: Mapping[str, Any]) -> ShardRecord:
    """What a manifest says of a shard."""
    return ShardRecord(entry["file"], entry["file_bytes"], entry["sha256"], entry.get("device"))


def write_record(store: Path, number: int, identity: str, record: ShardRecord) -> None:
    files.write_json(_path(store, number), {"identity": identity, **record.to_json()})


def read_record(store: Path, number: int, identity: str) -> ShardRecord | None:
    """The record of shard `number`, if it is one of the store of this identity and the shard has
    its size. What cannot be read is no record."""
    keys: dict[str, type] = {"identity": str, "file": str, "file_bytes": int, "sha256": str}
    try:
        content = files.read_json(_path(store, number), StoreError, "", keys)
        size = (store / shard_name(number)).stat().st_size
    except (FileNotFoundError, StoreError):
        return None
    record = listed_record(content)
    if content["identity"] != identity or record.file != shard_name(number):
        return None
    return record if record.file_bytes == size else None


def remove_records(store: Path) -> None:
    folder = store / RECORD_FOLDER
    files.remove_leftovers(folder)
    for path in sorted(folder.glob("*.json")):
        files.remove(path)
    with contextlib.suppress(OSError):  # not there, or something else in it
        folder.rmdir()


def _path(store: Path, number: int) -> Path:
    return store / RECORD_FOLDER / f"{number:06d}.json"
