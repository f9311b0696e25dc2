"""Local copies of files that stand behind an address: made once, checked, reused."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from vocagnolm.base import files
from vocagnolm.base.files import folder_lock
from vocagnolm.errors import AddressError, WriteError
from vocagnolm.storage.backend import Storage

CACHE_VARIABLE = "VOCAGNOLM_CACHE"
_THREADS = 8
version = cache(metadata.version)  # of a package: a file of some kilobytes is parsed for it
_FOR_EVER = 7 * 24 * 3600.0  # another process of this machine copies: its copy is ours

Listener = Callable[[str, Path, int, int], None]
"""Called with what is copied, where to, and bytes: done and all."""
_listeners: list[Listener] = []


def cache_folder() -> Path:
    """This user's cache on this machine: $VOCAGNOLM_CACHE, or vocagnolm in the cache folder."""
    if given := os.environ.get(CACHE_VARIABLE):
        return files.local_path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vocagnolm"


def remembered(name: str, about: Sequence[object], work: Callable[[], Any]) -> Any:
    """What `work` gives, a JSON value: out of the user's cache where it has been done before with
    all that it is `about` and these versions of the libraries. For answers of transformers, which
    takes seconds to import. An error is not remembered."""
    installed = [version(package) for package in ("torch", "transformers", "tokenizers")]
    key = hashlib.sha256(repr([name, *installed, *about]).encode()).hexdigest()
    path = cache_folder() / "remembered" / f"{key[:32]}.json"
    try:
        return files.read_json(path, AddressError, "")["answer"]
    except (OSError, AddressError, KeyError):
        answer = work()
    with contextlib.suppress(WriteError):  # a home that cannot be written: asked again next time
        files.write_json(path, {"name": name, "answer": answer}, sealed=True)
    return answer


@contextlib.contextmanager
def reporting_to(listener: Listener) -> Iterator[None]:
    """The listener hears how far copying is while this lasts: the command line shows it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(what: str, folder: Path, done: int, total: int) -> None:
    for listener in _listeners:
        listener(what, folder, done, total)


@contextlib.contextmanager
def copying(folder: Path) -> Iterator[None]:
    """One process of a machine copies, the others wait for it."""
    advice = "It copies files there; wait for its end."
    with folder_lock(folder, advice, patience=_FOR_EVER):
        yield


@dataclass(frozen=True)
class Wanted:
    """A file of a storage, as its manifest lists it."""

    name: str
    size: int | None
    sha256: str | None

    def wrong(self, content: bytes | memoryview) -> str | None:
        if self.size is not None and len(content) != self.size:
            return f"{len(content):,} bytes, the manifest says {self.size:,}"
        if self.sha256 is not None and hashlib.sha256(content).hexdigest() != self.sha256:
            return "its bytes do not match the checksum in the manifest"
        return None

    def is_in(self, folder: Path) -> bool:
        try:
            size = (folder / self.name).stat().st_size
        except FileNotFoundError:
            return False
        return self.size in (None, size)


def copy_files(storage: Storage, wanted: Sequence[Wanted], folder: Path, mend: str) -> None:
    """Copies of these files in a local folder. What is copied is checked against its checksum; what
    is there already is known by its size, and its readers check it. `mend`: what to do about a
    file that is damaged where it comes from."""
    if all(file.is_in(folder) for file in wanted):
        return
    with copying(folder), ThreadPoolExecutor(_THREADS) as pool:
        absent = [file for file in wanted if not file.is_in(folder)]
        total = sum(file.size or 0 for file in absent)
        done = 0
        for size in pool.map(lambda file: _copy(storage, file, folder, mend), absent):
            done += size
            tell(str(storage), folder, done, max(total, done))


def _copy(storage: Storage, file: Wanted, folder: Path, mend: str) -> int:
    shown = storage.shown(file.name)
    try:
        content = storage.read(file.name)
    except FileNotFoundError:
        raise AddressError(f"{shown} is missing, and the manifest lists it. {mend}") from None
    if problem := file.wrong(content):
        raise AddressError(f"{shown} is damaged: {problem}. {mend}")
    files.write_bytes(folder / file.name, bytes(content))
    return len(content)
