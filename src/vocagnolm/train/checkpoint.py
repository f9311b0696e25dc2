"""Checkpoints that are known to be complete.

A checkpoint is many files, and a kill may come between any two. So a marker with every file's
size is written last, and only marked folders whose files agree with it are resumed from. Only
folders with a marker of ours are ever removed.
"""

import json
import os
import re
import shutil
from pathlib import Path

MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)$")


def mark_complete(folder: str | Path, step: int, world_size: int) -> None:
    """All files of `checkpoint-STEP` are there: say so, durably."""
    checkpoint = Path(folder) / f"checkpoint-{step}"
    files = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MARKER):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(checkpoint).as_posix()] = path.stat().st_size
    content = json.dumps({"step": step, "world_size": world_size, "files": files}, indent=1)
    temporary = checkpoint / f".{MARKER}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, checkpoint / MARKER)


def unmark(folder: str | Path, step: int) -> None:
    """A damaged checkpoint is about to be written again: its old marker must not vouch for it."""
    (Path(folder) / f"checkpoint-{step}" / MARKER).unlink(missing_ok=True)


def is_complete(checkpoint: Path) -> bool:
    """The marker is there and every file has the size that it names."""
    try:
        files = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def newest_complete(folder: str | Path) -> tuple[Path, int] | None:
    """The newest checkpoint to resume from and its step."""
    found = [(step, path) for step, path in _checkpoints(Path(folder)) if is_complete(path)]
    if not found:
        return None
    step, path = max(found)
    return path, step


def prune_checkpoints(folder: str | Path, keep: int) -> None:
    """Remove complete checkpoints but the newest `keep` (at least one)."""
    complete = [path for _, path in sorted(_checkpoints(Path(folder))) if is_complete(path)]
    for path in complete[: -max(1, keep)]:
        (path / MARKER).unlink()  # first: a half-removed folder must not pass for complete
        shutil.rmtree(path)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = [(_NAME.match(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [(int(match.group(1)), path) for match, path in named if match]
