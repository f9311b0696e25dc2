"""Writing a loss store so that nothing half-done can be taken for finished.

A shard is written under a temporary name, flushed to the disk and renamed; then its record, and the
manifest last, in the same way. A process may be killed between any two instructions: what exists
under its final name is whole, and the next run goes on from there.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from vocagnolm import files
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
from vocagnolm.store.records import (
    ShardRecord,
    listed_record,
    read_record,
    record_of_file,
    remove_records,
    write_record,
)

# A share that comes while another one writes the manifest waits so long.
_FINISHING_SECONDS = 60.0


class StoreWriter:
    """One store being written. `identity` is everything that decides its bytes; `device`, the GPU
    that this process scores on, is noted for every shard and decides nothing."""

    def __init__(
        self, path: Path, identity: dict[str, Any], shard_count: int, device: str | None = None
    ):
        self.path = path
        self.identity = identity
        self.shard_count = shard_count
        self.device = device
        self._digest = identity_digest(identity)
        self._had_manifest = (path / MANIFEST_FILE).exists()
        self._listed: list[ShardRecord] = []  # by the manifest, where there is one
        self._known: dict[int, ShardRecord] = {}

    def begin(self) -> None:
        """Start or take up the store. Refuses a folder that holds something else, and a store that
        other settings have made."""
        complete = (self.path / MANIFEST_FILE).exists()
        if complete or (self.path / PARTIAL_MANIFEST_FILE).exists():
            try:
                found = read_manifest(self.path, partial=not complete)
            except StoreError:
                self._require_own_shards()  # then the manifest can be made again from them
                return
            # a run that failed before its first shard (a teacher that does not load) must not hold
            # the folder against the corrected command
            if complete or any((self.path / SHARD_FOLDER).glob("*")):
                refuse_other_identity(self.path, found["identity"], self.identity)
                with contextlib.suppress(KeyError):  # damaged: it is made again from the shards
                    self._listed = [listed_record(entry) for entry in found.get("shards", [])]
            elif found["identity"] != self.identity:
                self._write_head()
        else:
            self._begin_new()

    def _require_own_shards(self) -> None:
        """A manifest that cannot be read: every shard must say that it is this run's."""
        for path in sorted((self.path / SHARD_FOLDER).glob("*.safetensors")):
            with contextlib.suppress(StoreError):  # a damaged shard is nobody's
                if open_shard(path).about["identity"] == self._digest:
                    continue
            raise StoreError(
                f"{self.path}: the manifest cannot be read, and {path.name} does not say that this "
                "command made it. Move the folder away, or choose another --out."
            )

    def _begin_new(self) -> None:
        if self.path.exists():
            if not self.path.is_dir():
                raise StoreError(f"{self.path} is a file; --out must name a folder.")
            names = [path.name for path in self.path.iterdir()]
            if {MANIFEST_FILE, PARTIAL_MANIFEST_FILE} & {*names}:  # another share has begun it now
                self.begin()
                return
            strangers = [name for name in names if not _is_ours_before_begin(name)]
            if strangers:
                raise StoreError(
                    f"{self.path} is not empty and not a loss store (it holds "
                    f"{', '.join(sorted(strangers)[:3])}). Choose another --out."
                )
        (self.path / SHARD_FOLDER).mkdir(parents=True, exist_ok=True)
        self._write_head()

    def _write_head(self) -> None:
        files.write_json(self.path / PARTIAL_MANIFEST_FILE, self._manifest_head(False))

    def has_shard(self, number: int) -> tuple[bool, str | None]:
        """(is shard `number` there and whole, what is wrong with it). Of a store that grows, a
        shard with a record is not read; of a complete one every shard is."""
        path = self.path / shard_name(number)
        if not path.exists():
            return False, None
        if (
            not self.was_complete
            and (record := read_record(self.path, number, self._digest)) is not None
        ):
            self._known[number] = record
            return True, None
        try:
            shard = open_shard(path)
        except StoreError as error:
            return False, str(error)
        record = record_of_file(self.path, number)
        listed = self._listed[number] if number < len(self._listed) else None
        if listed is not None and listed.sha256 == record.sha256:
            record = listed
        elif (damage := shard.damage()) is not None:
            return False, f"{path}: {damage}."
        if shard.about["identity"] != self._digest or shard.about["shard"] != number:
            return False, f"{path} belongs to another run."
        self._known[number] = record
        if not self.was_complete:
            write_record(self.path, number, self._digest, record)
        return True, None

    def write_shard(self, shard: Shard) -> None:
        """Of two processes that have scored one shard the first one's counts: shard and record
        belong together."""
        if self.completed_by_others or (
            not self._had_manifest and read_record(self.path, shard.number, self._digest)
        ):
            return
        content = encode_shard(shard, self._digest)
        name = shard_name(shard.number)
        files.write_bytes(self.path / name, content)
        checksum = hashlib.sha256(content).hexdigest()
        record = ShardRecord(name, len(content), checksum, self.device)
        write_record(self.path, shard.number, self._digest, record)
        self._known[shard.number] = record

    @property
    def was_complete(self) -> bool:
        """Whether the store had a manifest, and a whole one, when it was taken up."""
        return bool(self._listed)

    @property
    def completed_by_others(self) -> bool:
        """Whether the store has got its manifest since this run began."""
        return not self._had_manifest and (self.path / MANIFEST_FILE).exists()

    def absent_shards(self) -> list[int]:
        """Those that have no file. Reads nothing."""
        numbers = range(self.shard_count)
        return [number for number in numbers if not (self.path / shard_name(number)).exists()]

    def finish(self) -> None:
        """All shards are there: write the manifest, which makes the store complete. One that says
        something else is written again."""
        shards, parts = [], []
        for number in range(self.shard_count):
            about = open_shard(self.path / shard_name(number)).about
            record = (
                self._known.get(number)
                or read_record(self.path, number, self._digest)
                or record_of_file(self.path, number)
            )
            parts.append(about["statistics"])
            shards.append(
                {
                    "file": record.file,
                    "sha256": record.sha256,
                    "file_bytes": record.file_bytes,
                    "first_document": about["first_document"],
                    "document_span": about["document_span"],
                    **{k: v for k, v in about["statistics"].items() if k != "histogram"},
                    **({"device": record.device} if record.device else {}),
                }
            )
        totals = add_statistics(parts)
        manifest = {**self._manifest_head(True), "totals": totals, "shards": shards}
        try:
            if read_manifest(self.path) == json.loads(json.dumps(manifest)):
                return
        except (FileNotFoundError, StoreError):
            pass
        files.write_json(self.path / MANIFEST_FILE, manifest)

    def tidy(self) -> None:
        """Remove what runs that were killed left of their own behind the finished store."""
        assert (self.path / MANIFEST_FILE).exists()
        files.remove(self.path / PARTIAL_MANIFEST_FILE)
        remove_records(self.path)
        for folder in (self.path, self.path / SHARD_FOLDER):
            files.remove_leftovers(folder)

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
    return name in (files.LOCK_FILE, SHARD_FOLDER) or files.is_leftover(name)


def refuse_other_identity(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = list(files.differences(found, wanted))
    if different:
        lines = "\n".join(
            f"  {name}: the store has {_brief(a)}, this run has {_brief(b)}"
            for name, a, b in different[:8]
        )
        raise StoreError(
            f"{path} was made with other settings or another corpus:\n{lines}\n"
            "Run with the store's settings to go on with it, or choose another --out. "
            "Nothing was changed."
        )


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def store_lock(path: Path, *, shared: bool = False) -> contextlib.AbstractContextManager[None]:
    """Only one run may write to a store, or several that have a share each."""
    return files.folder_lock(
        path,
        "Wait for it to end, or choose another --out. To share the work between processes, start "
        "them together (torchrun --nproc_per_node N -m vocagnolm score ...), or each with a share "
        "of its own (--share I/N).",
        shared=shared,
        patience=_FINISHING_SECONDS if shared else 0.0,
    )
