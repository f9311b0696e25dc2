"""Writing a loss store so that nothing half-done can be taken for finished.

A shard is written under a temporary name, flushed to the disk and renamed; the manifest comes
last, in the same way. A process may be killed between any two instructions: what exists under its
final name is whole, and the next run goes on from there.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vocagnolm.errors import StoreError
from vocagnolm.store.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_FILE,
    PARTIAL_MANIFEST_FILE,
    SHARD_FOLDER,
    Shard,
    add_statistics,
    encode_shard,
    identity_digest,
    open_shard,
    read_manifest,
    shard_name,
)

LOCK_FILE = ".lock"
_TEMPORARY = ".tmp"


class StoreWriter:
    """One store being written. `identity` is everything that decides its bytes."""

    def __init__(self, path: Path, identity: dict[str, Any], shard_count: int):
        self.path = path
        self.identity = identity
        self.shard_count = shard_count
        self._digest = identity_digest(identity)

    def begin(self) -> bool:
        """Start or take up the store; True when it is already complete. Refuses a folder that
        holds something else, and a store that other settings have made."""
        complete = (self.path / MANIFEST_FILE).exists()
        if complete or (self.path / PARTIAL_MANIFEST_FILE).exists():
            found = read_manifest(self.path, partial=not complete)
            # a run that failed before its first shard (a teacher that does not load) must not hold
            # the folder against the corrected command
            if complete or any((self.path / SHARD_FOLDER).glob("*")):
                refuse_other_identity(self.path, found["identity"], self.identity)
            elif found["identity"] != self.identity:
                self._write_head()
        else:
            self._begin_new()
        return complete

    def _begin_new(self) -> None:
        if self.path.exists():
            if not self.path.is_dir():
                raise StoreError(f"{self.path} is a file; --out must name a folder.")
            strangers = [p.name for p in self.path.iterdir() if not _is_ours_before_begin(p.name)]
            if strangers:
                raise StoreError(
                    f"{self.path} is not empty and not a loss store (it holds "
                    f"{', '.join(sorted(strangers)[:3])}). Choose another --out."
                )
        (self.path / SHARD_FOLDER).mkdir(parents=True, exist_ok=True)
        self._write_head()

    def _write_head(self) -> None:
        _write_whole(self.path / PARTIAL_MANIFEST_FILE, _json_bytes(self._manifest_head(False)))

    def has_shard(self, number: int) -> tuple[bool, str | None]:
        """(is shard `number` there and whole, what is wrong with it). Reads the shard."""
        path = self.path / shard_name(number)
        if not path.exists():
            return False, None
        try:
            shard = open_shard(path)
        except StoreError as error:
            return False, str(error)
        if (damage := shard.damage()) is not None:
            return False, f"{path}: {damage}."
        if shard.about["identity"] != self._digest or shard.about["shard"] != number:
            return False, f"{path} belongs to another run."
        return True, None

    def write_shard(self, shard: Shard) -> None:
        path = self.path / shard_name(shard.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, encode_shard(shard, self._digest))

    def finish(self) -> dict[str, Any]:
        """All shards are there: write the manifest, which makes the store complete."""
        shards, parts = [], []
        for number in range(self.shard_count):
            path = self.path / shard_name(number)
            about = open_shard(path).about
            parts.append(about["statistics"])
            shards.append(
                {
                    "file": shard_name(number),
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                    "file_bytes": path.stat().st_size,
                    "first_document": about["first_document"],
                    "document_span": about["document_span"],
                    **{k: v for k, v in about["statistics"].items() if k != "histogram"},
                }
            )
        totals = add_statistics(parts)
        manifest = {**self._manifest_head(True), "totals": totals, "shards": shards}
        _write_whole(self.path / MANIFEST_FILE, _json_bytes(manifest))
        return manifest

    def tidy(self) -> None:
        """Remove what runs that were killed left of their own behind the finished store."""
        assert (self.path / MANIFEST_FILE).exists()
        (self.path / PARTIAL_MANIFEST_FILE).unlink(missing_ok=True)
        for leftover in (self.path / SHARD_FOLDER).glob(f"*.safetensors{_TEMPORARY}"):
            leftover.unlink()

    def _manifest_head(self, complete: bool) -> dict[str, Any]:
        return {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "complete": complete,
            "shard_count": self.shard_count,
            "identity": self.identity,
        }


def _is_ours_before_begin(name: str) -> bool:
    # A run killed while it began may have left these.
    return name in (LOCK_FILE, SHARD_FOLDER, PARTIAL_MANIFEST_FILE + _TEMPORARY)


def refuse_other_identity(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = list(_differences(found, wanted))
    if differences:
        lines = "\n".join(
            f"  {name}: the store has {a}, this run has {b}" for name, a, b in differences[:8]
        )
        raise StoreError(
            f"{path} was made with other settings or another corpus:\n{lines}\n"
            "Run with the store's settings to go on with it, or choose another --out. "
            "Nothing was changed."
        )


def _differences(found: Any, wanted: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            inner = f"{name}.{key}" if name else key
            yield from _differences(found.get(key), wanted.get(key), inner)
    elif found != wanted:
        yield name, _brief(found), _brief(wanted)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


@contextlib.contextmanager
def store_lock(path: Path) -> Iterator[None]:
    """Only one run may write to a store. The lock belongs to the process, so that a killed run
    leaves no lock behind; the file stays, empty."""
    path.mkdir(parents=True, exist_ok=True)
    with open(path / LOCK_FILE, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            file.seek(0)
            holder = file.read(20).decode(errors="replace").strip()
            raise StoreError(
                f"another process{f' ({holder})' if holder else ''} is writing to {path}. "
                "Wait for it to end, or choose another --out. To share the work between "
                "processes, start them together: torchrun --nproc_per_node N -m vocagnolm score ..."
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()}".encode())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"{path} could not be written: {error.strerror or error}. What was finished before "
            f"is kept. Make room ({len(content):,} bytes were needed) and run the same command "
            "again: it goes on from there."
        ) from error


def _sync_folder(folder: Path) -> None:
    # Without this a power cut may forget the rename.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
