"""Checkpoints that are known to be whole.

A checkpoint is many files, and a kill may come between any two; a disk may also forget a bit. So a
marker with every file's size and checksum is written last, and only marked folders whose files
agree with it are resumed from. Only folders with a marker of ours are ever removed.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from vocagnolm.errors import TrainingError
from vocagnolm.files import file_digests, read_json, remove, sync_tree, write_json

MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)$")


@dataclass(frozen=True)
class Resumable:
    """Where a run can go on, and what could not be used."""

    path: Path | None
    step: int
    damaged: list[str]
    """`checkpoint-20: what is wrong`, newer ones that were passed over."""


def mark_complete(checkpoint: Path, step: int, world_size: int) -> None:
    """All files of `checkpoint-STEP` are there: say so, durably."""
    sync_tree(checkpoint)
    paths = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MARKER)
    files = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, file_digests(paths), strict=True)
    }
    write_json(checkpoint / MARKER, {"step": step, "world_size": world_size, "files": files})


def unmark(checkpoint: Path) -> None:
    """A damaged checkpoint is about to be written again: its old marker must not vouch for it."""
    (checkpoint / MARKER).unlink(missing_ok=True)


def damage(checkpoint: Path, *, read: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. `read`: also compare every byte."""
    try:
        files = read_json(checkpoint / MARKER, TrainingError, "", {"files": dict})["files"]
    except FileNotFoundError:
        return "it was never finished"
    except TrainingError as error:
        return str(error)
    for name, entry in files.items():
        size = entry["bytes"] if isinstance(entry, dict) else entry  # older markers: sizes alone
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is cut short or missing"
    checked = {name: entry for name, entry in files.items() if isinstance(entry, dict)}
    if read:
        digests = file_digests([checkpoint / name for name in checked])
        for (name, entry), digest in zip(checked.items(), digests, strict=True):
            if entry["sha256"] != digest:
                return f"{name} does not match its checksum"
    return None


def newest_complete(folder: str | Path, *, read: bool = True) -> Resumable:
    """The newest checkpoint that is whole. Those that were never finished are passed over without
    a word: a kill while one is written is no damage."""
    damaged: list[str] = []
    for step, path in sorted(_checkpoints(Path(folder)), reverse=True):
        wrong = damage(path, read=read)
        if wrong is None:
            return Resumable(path, step, damaged)
        if (path / MARKER).exists():
            damaged.append(f"{path.name}: {wrong}")
    return Resumable(None, 0, damaged)


def prune_checkpoints(folder: str | Path, keep: int) -> None:
    """Remove complete checkpoints but the newest `keep` (at least one)."""
    found = sorted(_checkpoints(Path(folder)))
    complete = [path for _, path in found if damage(path, read=False) is None]
    for path in complete[: -max(1, keep)]:
        remove(path / MARKER)  # first: a half-removed folder must not pass for complete
        shutil.rmtree(path)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = [(_NAME.match(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [(int(match.group(1)), path) for match, path in named if match]
