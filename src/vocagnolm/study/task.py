"""A piece of work that is done once, and what its actions share."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """Something to do once: `done` exists afterwards."""

    name: str
    kind: str
    done: Path
    needs: tuple[Path, ...]
    """Files that must be there before."""
    action: Callable[[], object]

    @property
    def is_done(self) -> bool:
        return self.done.exists()

    @property
    def is_ready(self) -> bool:
        return all(path.exists() for path in self.needs)


def existing_path(source: str | None) -> tuple[Path, ...]:
    """A file or folder to wait for; a hub id is nothing to wait for."""
    if source is None:
        return ()
    local = source.startswith((".", "/", "~")) or source.count("/") != 1 or Path(source).exists()
    return (Path(source),) if local else ()


def release_memory() -> None:
    """Give back what the last model held."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
