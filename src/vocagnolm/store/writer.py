"""Writing a loss store so that nothing half-done can be taken for finished.

One protocol for folders and buckets, of steps that happen as a whole or not at all:

1. try put-if-absent, and warn where the storage ignores it;
2. create `manifest.partial.json`, or compare its identity; with alternatives, create the
   teacher's vocabulary, whose digest is part of the identity;
3. where several processes share the work, create `claims/N`, or leave the shard to its holder
   (`vocagnolm.jobs`); put what a server answers into `answers/` until its shard is there
   (`vocagnolm.score.journal`);
4. create the shard: where it exists the other attempt counts, if it is whole. The files of
   documents that a written shard names are there before it, under names that hold their digest;
5. put `records/N.json`, its digest and statistics;
6. create `manifest.json` from the records.

A process may be killed between any two instructions: the next one lists what is there once, and
goes on from that.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vocagnolm.base import files
from vocagnolm.errors import StorageWarning, StoreError
from vocagnolm.jobs.job import CLAIM_FOLDER
from vocagnolm.storage import Folder, storage_of
from vocagnolm.storage.bucket import PROBE
from vocagnolm.store.format import (
    ANSWER_FILE,
    ANSWER_FOLDER,
    DOCUMENT_FILE,
    FORMAT_NAME,
    MANIFEST_FILE,
    PARTIAL_MANIFEST_FILE,
    RECORD_FOLDER,
    SHARD_FOLDER,
    STORE_FOLDERS,
    VOCABULARY_FILE,
    Record,
    Shard,
    add_statistics,
    document_files,
    document_problems,
    encode_shard,
    encode_vocabulary,
    listed,
    merged_vocabulary,
    parse_shard,
    read_about,
    read_entries,
    read_manifest,
    read_records,
    read_shard,
    record_bytes,
    record_name,
    record_of,
    shard_name,
    shard_names,
    version_of,
    vocabulary_damage,
)

# ---- what is measured ----

_DECIMALS = 4


def measured(values: Sequence[float], tolerance: float) -> dict[str, Any]:
    return {"tolerance": tolerance, "measured": [round(value, _DECIMALS) for value in values]}


def apart(found: Sequence[float], ours: Sequence[float]) -> float:
    """How far two measurements are from each other, on the mean of their values."""
    if len(found) != len(ours):
        return float("inf")
    pairs = zip(found, ours, strict=True)
    return sum(abs(a - b) for a, b in pairs) / max(1, len(found))


def with_values_of(found: Any, ours: Any) -> Any:
    """`ours`, with what `found` has measured wherever the two agree."""
    if not (isinstance(found, Mapping) and isinstance(ours, Mapping)):
        return ours
    if _is_measured(found) and _is_measured(ours):
        tolerance = ours["tolerance"]
        same = tolerance == found["tolerance"]
        near = same and apart(found["measured"], ours["measured"]) <= tolerance
        return found if near else ours
    return {key: with_values_of(found.get(key), value) for key, value in ours.items()}


def measured_apart(name: str, found: Any, ours: Any) -> str | None:
    """How far two measurements of the name are apart, in words; None: it is something else."""
    both = isinstance(found, list) and isinstance(ours, list)
    if not both or name.rpartition(".")[2] != "measured" or len(found) != len(ours):
        return None
    return f"{apart(found, ours):.3f} apart on the mean of {len(ours)} values, more than allowed"


def _is_measured(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("measured"), list) and "tolerance" in value


# ---- the writer ----


_THREADS = 8
# A share that comes while another one writes the manifest waits so long.
_FINISHING_SECONDS = 60.0


class StoreWriter:
    """A store being written. `identity` is everything that determines its bytes. `device`, the GPU
    that this process uses, is only recorded for every shard. `vocabulary`: the bytes of the
    teacher's vocabulary, in the process that begins a store with alternatives."""

    def __init__(
        self,
        path: str | Path,
        identity: dict[str, Any],
        shard_count: int,
        device: str | None = None,
        vocabulary: bytes | None = None,
    ):
        self.path = path
        self.storage = storage_of(path)
        self.identity = identity
        self.shard_count = shard_count
        self.device = device
        self._vocabulary = vocabulary
        self._digest = files.json_digest(identity)
        self._had_manifest = self.storage.has(MANIFEST_FILE)
        self._listed: list[dict[str, Any]] = []  # by the manifest, where there is one
        self._files: dict[str, int] = {}
        self._known: dict[int, Record] = {}
        self._made: set[int] = set()

    @property
    def digest(self) -> str:
        """The digest of the store's identity, which every shard names."""
        return self._digest

    def begin(self) -> None:
        """Start or resume the store. Refuses a folder with other content, and a store made with
        other settings."""
        self._begin()
        if self._vocabulary is not None:
            self._write_vocabulary(self._vocabulary)

    def _begin(self) -> None:
        self.look()
        complete = MANIFEST_FILE in self._files
        if not complete and PARTIAL_MANIFEST_FILE not in self._files:
            self._begin_new()
            return
        try:
            found = read_manifest(self.storage, partial=not complete)
        except FileNotFoundError:  # completed at this moment
            self._begin()
            return
        except StoreError:
            self._require_own_shards()  # then the manifest can be made again from them
            return
        self._agree(found["identity"], complete)
        if found["identity"] != self.identity:
            # a run that failed before its first shard (a teacher that does not load), or that could
            # score no document, must not hold the folder against the corrected command
            if self._holds_work():
                refuse_other_identity(str(self.storage), found["identity"], self.identity)
            self._clear()
            complete = False
        if complete:
            self._listed = found.get("shards", [])
        else:
            self._try_writing()

    def _holds_work(self) -> bool:
        """Whether the folder holds a document, or an answer; a damaged shard may have held one."""
        if any(
            DOCUMENT_FILE.fullmatch(n) or n.startswith(f"{ANSWER_FOLDER}/") for n in self._files
        ):
            return True
        try:
            return any(
                read_about(self.storage, name, self._files[name])["statistics"]["documents"]
                for name in shard_names(self._files)
            )
        except (StoreError, KeyError, TypeError):
            return True

    def _clear(self) -> None:
        """Begin anew where nothing was made: first the manifest goes that speaks of the rest."""
        head = files.json_bytes(self._manifest_head(False), sealed=True)
        self.storage.put(PARTIAL_MANIFEST_FILE, head)
        left = [name for name in self._files if name.startswith(f"{RECORD_FOLDER}/")]
        left += [*shard_names(self._files), *({VOCABULARY_FILE} & self._files.keys())]
        self.storage.remove(*({MANIFEST_FILE} & self._files.keys()), *left)
        self._had_manifest = False
        self.look()

    def _agree(self, found: dict[str, Any], complete: bool) -> None:
        """What was measured: the first measurement counts for all that agree with it."""
        agreed = with_values_of(found, self.identity)
        if agreed != self.identity:
            self.identity, self._digest = agreed, files.json_digest(agreed)
            if not complete:
                self._known = self._records()

    def take_identity(self, found: dict[str, Any]) -> None:
        """Take the identity from the process that has begun the store."""
        self._agree(found, complete=True)
        refuse_other_identity(str(self.storage), found, self.identity)

    def look(self) -> None:
        """See what is there now: one listing, and the records in it."""
        self._files = self.storage.files(*STORE_FOLDERS, RECORD_FOLDER, ANSWER_FOLDER)
        self._known = {}
        if MANIFEST_FILE not in self._files:
            self._known = self._records()

    def _records(self) -> dict[int, Record]:
        """Records of the shards that are there, as far as they were listed."""
        return read_records(self.storage, self._files, self.shard_count, self._digest)

    def _require_own_shards(self) -> None:
        """A manifest that cannot be read: every shard must say that it is this run's."""
        for name in map(shard_name, range(self.shard_count)):
            if name not in self._files:
                continue
            with contextlib.suppress(StoreError):  # a damaged shard is nobody's
                if read_shard(self.storage, name).about["identity"] == self._digest:
                    continue
            raise StoreError(
                f"{self.storage}: the manifest cannot be read, and {name.partition('/')[2]} does "
                f"not show that this command made it. If it did, remove that file and it is "
                f"scored again. Otherwise choose another --out."
            )

    def _begin_new(self) -> None:
        # a run killed while it began may have left these
        ours = (files.LOCK_FILE, SHARD_FOLDER, RECORD_FOLDER, CLAIM_FOLDER)
        theirs = [name for name in self._files if not DOCUMENT_FILE.fullmatch(name)]
        names = {name.partition("/")[0] for name in theirs}.difference(ours)
        strangers = sorted(
            n for n in names if not (files.is_leftover(n) or n.startswith(f"{PROBE}-"))
        )
        if strangers:
            raise StoreError(
                f"{self.storage} is not empty and not a loss store (it holds "
                f"{', '.join(strangers[:3])}). Choose another --out."
            )
        self._try_writing()
        head = files.json_bytes(self._manifest_head(False), sealed=True)
        if not self.storage.create(PARTIAL_MANIFEST_FILE, head):  # another share has begun it now
            self._begin()

    def _write_vocabulary(self, content: bytes) -> None:
        """Before the first shard. One that is damaged in a complete store is written again."""
        if self._files.get(VOCABULARY_FILE) == len(content) and not self.was_complete:
            return
        if not self.storage.create(VOCABULARY_FILE, content) and vocabulary_damage(
            self.storage.read(VOCABULARY_FILE), self.identity["alternatives"]["vocabulary_sha256"]
        ):
            self.storage.put(VOCABULARY_FILE, content)

    def _try_writing(self) -> None:
        if warning := self.storage.try_writing():
            warnings.warn(warning, StorageWarning, stacklevel=2)

    def has_shard(self, number: int) -> tuple[bool, str | None]:
        """(is shard `number` present and intact, what is wrong with it), as last found by `begin`
        or `look`, or as written by this process. In a growing store, a shard with a record
        is not read; in a complete one every shard is."""
        if shard_name(number) not in self._files:
            return False, None
        if number in self._known and not self.was_complete:
            damage = self._lacking(self._known[number])
            return damage is None, damage
        record, damage = self._examined(number)
        if record is None:
            return False, damage
        self._known[number] = record
        if not self.was_complete:
            self.storage.put(record_name(number), record_bytes(self._digest, record))
        return True, None

    def _examined(self, number: int) -> tuple[Record | None, str | None]:
        """A shard that was read through: its record, or what is wrong with it."""
        name = shard_name(number)
        try:
            shard = read_shard(self.storage, name)
            record = record_of(shard, number)
        except StoreError as error:
            return None, str(error)
        except (KeyError, TypeError):
            return None, f"{self.storage.shown(name)} is damaged: its header lacks fields."
        entry = self._listed[number] if number < len(self._listed) else {}
        if entry.get("sha256") == record["sha256"]:  # of these very bytes
            record |= {"device": entry["device"]} if entry.get("device") else {}
        elif (damage := shard.damage()) is not None:
            return None, f"{shard.path}: {damage}."
        if shard.about.get("identity") != self._digest or shard.about.get("shard") != number:
            return None, f"{shard.path} belongs to another run."
        problems = document_problems(self.storage, record.get("files") or {})
        return (None, f"{problems[0]}.") if problems else (record, None)

    def _lacking(self, record: Record) -> str | None:
        """A file of documents that the last listing does not show as the shard describes it."""
        for name, about in (record.get("files") or {}).items():
            if self._files.get(name) != about["bytes"]:
                return (
                    f"{self.storage.shown(name)} is missing or has other bytes than were written."
                )
        return None

    def write_shard(self, shard: Shard, documents: Mapping[str, bytes] | None = None) -> None:
        """Write a shard; if two processes make it, the first one counts, with its record.
        `documents`: the contents of the files that the shard names."""
        if self.completed_by_others:
            return
        for name, content in (documents or {}).items():
            self.storage.put(name, content)
            self._files[name] = len(content)
        content = encode_shard(shard, self._digest)
        name, record_at = shard_name(shard.number), record_name(shard.number)
        created = self.storage.create(name, content)
        self._files[name] = len(content)
        if not created:
            other, _ = self._examined(shard.number)
            if other is not None:
                # its writer may have been killed, or be about to write the record itself
                if not self._had_manifest:
                    self.storage.create(record_at, record_bytes(self._digest, other))
                self._known[shard.number] = other
                return
            self.storage.put(name, content)
        record = record_of(parse_shard(memoryview(content), name), shard.number, self.device)
        self.storage.put(record_at, record_bytes(self._digest, record))
        self._known[shard.number] = record
        self._made.add(shard.number)

    @property
    def was_complete(self) -> bool:
        """Whether the store had an intact manifest when it was opened."""
        return bool(self._listed)

    @property
    def completed_by_others(self) -> bool:
        """Whether the store got its manifest after this run began."""
        return not self._had_manifest and self.storage.has(MANIFEST_FILE)

    def absent_shards(self) -> list[int]:
        """Shards that have no file now, by one listing."""
        there = self.storage.files(SHARD_FOLDER)
        return [number for number in range(self.shard_count) if shard_name(number) not in there]

    def finish(self, more: Callable[[list[Record]], dict[str, Any]] | None = None) -> bool:
        """When all shards are present, make the manifest from their records, which completes the
        store. An existing manifest with other content is replaced. `more`: what the manifest says
        beside, made from the records. Returns False, and writes nothing, if no shard holds a
        document."""
        if len(self._known) < self.shard_count:  # other processes have scored them
            self._files = self.storage.files(*STORE_FOLDERS, RECORD_FOLDER)
            found = self._records()
            self._known = {**found, **self._known}
        records = [self._record(number) for number in range(self.shard_count)]
        totals = add_statistics([record["statistics"] for record in records])
        if not totals["documents"]:
            return False
        self._require_unchanged(records)
        shards = [listed(record) for record in records]
        manifest = {**self._manifest_head(True), "totals": totals, "shards": shards}
        manifest |= {} if more is None else more(records)
        content = files.json_bytes(manifest, sealed=True)
        if self.storage.create(MANIFEST_FILE, content):
            return True
        try:
            there: Any = read_manifest(self.storage)
        except StoreError:
            there = None
        if there is None or (self._had_manifest and there != json.loads(json.dumps(manifest))):
            self.storage.put(MANIFEST_FILE, content)
        return True

    def _require_unchanged(self, records: Sequence[Record]) -> None:
        """Read through what earlier runs or other processes have made: the manifest vouches for it.
        A bucket looks after its own bytes, and would be copied here as a whole."""
        if self._had_manifest or not isinstance(self.storage, Folder):
            return
        others = [number for number in range(self.shard_count) if number not in self._made]
        with ThreadPoolExecutor(_THREADS) as pool:
            changed = [*pool.map(self._changed, others, (records[number] for number in others))]
        for number, wrong in zip(others, changed, strict=True):
            if wrong is not None:  # without its record the next run looks into the shard itself
                self.storage.remove(record_name(number))
                raise StoreError(
                    f"{wrong} since they were written. Run the same command again: what is damaged "
                    "is made again."
                )

    def _changed(self, number: int, record: Record) -> str | None:
        """Which file of a shard is not as its record says."""
        digests = {shard_name(number): record["sha256"]}
        digests |= {name: about["sha256"] for name, about in (record.get("files") or {}).items()}
        for name, digest in digests.items():
            try:
                content = self.storage.read(name)
            except FileNotFoundError:
                return f"{self.storage.shown(name)}: its bytes have gone"
            if hashlib.sha256(content).hexdigest() != digest:
                return f"{self.storage.shown(name)}: its bytes have changed"
        return None

    def merge_vocabulary(self) -> dict[str, Any]:
        """When all shards are present, and have tables of their own: write the vocabulary that they
        have together, and return what the manifest says of it."""
        about = self.identity.get("alternatives")
        if about is None or "vocabulary_sha256" in about:
            return {}
        sizes = self.storage.files(SHARD_FOLDER)
        names = map(shard_name, range(self.shard_count))
        tables = (read_entries(self.storage, name, sizes[name]) for name in names)
        content = encode_vocabulary(merged_vocabulary(tables))
        self.storage.put(VOCABULARY_FILE, content)
        digest = hashlib.sha256(content).hexdigest()
        return {"vocabulary": {"sha256": digest, "bytes": len(content)}}

    def _record(self, number: int) -> Record:
        if number not in self._known:
            record, damage = self._examined(number)
            if record is None:
                raise StoreError(f"{damage} Run the same command again: it is scored again.")
            self._known[number] = record
        return self._known[number]

    def tidy(self) -> None:
        """Remove what killed runs left behind in the finished store."""
        folders = (*STORE_FOLDERS, RECORD_FOLDER, CLAIM_FOLDER, ANSWER_FOLDER)
        found = self.storage.files(*folders)
        assert MANIFEST_FILE in found
        left = [n for n in found if n.startswith(f"{RECORD_FOLDER}/") and n.endswith(".json")]
        left += [name for name in found if name.startswith(f"{CLAIM_FOLDER}/")]
        left += filter(ANSWER_FILE.fullmatch, found)
        if documents := set(filter(DOCUMENT_FILE.fullmatch, found)):
            named = document_files(read_manifest(self.storage))
            left += sorted(documents.difference(named))  # of attempts that did not count
        if PARTIAL_MANIFEST_FILE in found:
            self.storage.remove(PARTIAL_MANIFEST_FILE)  # before the records that it counts on
        self.storage.remove(*left)
        self.storage.tidy(*folders)

    def _manifest_head(self, complete: bool) -> dict[str, Any]:
        return {
            "format": FORMAT_NAME,
            "format_version": version_of(self.identity),
            "complete": complete,
            "shard_count": self.shard_count,
            "identity": self.identity,
        }


def refuse_other_identity(path: str | Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    def brief(value: Any) -> str:
        text = json.dumps(value)
        return text if len(text) <= 80 else text[:77] + "..."

    different = list(files.differences(found, wanted))
    if different:
        lines = "\n  ".join(
            f"{name}: "
            + (measured_apart(name, a, b) or f"the store has {brief(a)}, this run has {brief(b)}")
            for name, a, b in different[:8]
        )
        raise StoreError(
            f"{path} was made with other settings or another corpus:\n  {lines}\n"
            "Use the store's settings to continue it, or choose another --out. "
            "Nothing was changed."
        )


def store_lock(
    path: str | Path, *, shared: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Only one run may write to a store, or several that have a share each. A bucket has no locks:
    there the protocol alone keeps the store whole."""
    return storage_of(path).lock(
        "Wait for it to end, or choose another --out. To share the work between processes, start "
        "them together (torchrun --nproc_per_node N -m vocagnolm ...), or each with its own share "
        "(--share I/N).",
        shared=shared,
        patience=_FINISHING_SECONDS if shared else 0.0,
    )
