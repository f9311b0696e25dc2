"""Files of a corpus at an address (`s3://`, `gs://`, `hf://`, `https://`), through fsspec.

Every file is copied once to the cache folder, under a name that its address, size and version (the
server's ETag) decide, and is read from there like any other file: a corpus needs sizes, checksums
and random access, and reads its bytes at least twice.
"""

import contextlib
import hashlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from vocagnolm.errors import CorpusError, MissingExtraError, UsageError
from vocagnolm.files import whole_file
from vocagnolm.places import scheme_of
from vocagnolm.places.copies import cache_folder, copying, tell

# scheme -> the package that fsspec needs for it
PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
}
_VERSION_KEYS = ("ETag", "etag", "generation", "md5Hash", "xet_hash", "blob_id", "LastModified")
_READ_BYTES = 8 * 2**20
_ATTEMPTS = 4


@dataclass(frozen=True)
class RemoteFile:
    """One file at an address, in the state in which it was found."""

    address: str
    name: str
    """As in a local corpus: without the folder that was named."""
    size: int | None
    version: str | None

    def fetch(self) -> Path:
        """The copy on this machine; made if there is none."""
        state = f"{self.address}\n{self.size}\n{self.version}"
        key = hashlib.sha256(state.encode()).hexdigest()[:32]
        path = cache_folder() / "corpora" / key / PurePosixPath(self.name).name
        if self._is_at(path):
            return path
        with copying(path.parent):
            if not self._is_at(path):
                self._copy(path)
        return path

    def _is_at(self, path: Path) -> bool:
        # without size and version nobody can say whether it is still the same
        known = self.size is not None or self.version is not None
        return known and path.is_file() and self.size in (None, path.stat().st_size)

    def _copy(self, path: Path) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                with _told(self.address):
                    self._copy_once(path)
                return
            except _BrokenOffError as error:
                if attempt == _ATTEMPTS - 1:
                    raise CorpusError(str(error)) from None
                time.sleep(0.1 * 2**attempt)

    def _copy_once(self, path: Path) -> None:
        system, inner = _system(self.address)
        with system.open(inner, "rb") as source, whole_file(path) as target:
            done = 0
            while block := source.read(_READ_BYTES):
                done += target.write(block)
                tell(self.address, path.parent, done, max(done, self.size or 0))
            if self.size not in (None, done):
                raise _BrokenOffError(
                    f"{self.address} cannot be read to its end: {done:,} of {self.size:,} bytes."
                )
            if found_file(self.address, self.name) != self:
                raise CorpusError(
                    f"{self.address} was changed while it was copied. Leave the corpus alone while "
                    "it is used."
                )


def remote_files(address: str) -> list[RemoteFile]:
    """The file at an address; or all below a folder, or that fit a pattern (`s3://b/x/*.jsonl`)."""
    if scheme_of(address) not in PACKAGES:
        raise UsageError(
            f"{address} is an address of a kind that no corpus can be read from. Known are "
            f"{', '.join(f'{name}://' for name in PACKAGES)}."
        )
    if scheme_of(address) in ("http", "https"):  # no folders, no patterns
        return [found_file(address, PurePosixPath(urlsplit(address).path).name)]
    with _told(address):
        system, inner = _system(address)
        if "*" in inner:
            below, found = _fixed_part(inner), system.glob(inner, detail=True)
        elif system.isdir(inner):
            below, found = inner.rstrip("/"), system.find(inner, detail=True)
        else:
            return [found_file(address, PurePosixPath(inner).name)]
    start = address.partition("://")[0]
    return [
        _as_found(f"{start}://{path}", path[len(below) :].lstrip("/"), about)
        for path, about in sorted(found.items())
        if about["type"] == "file"
    ]


def found_file(address: str, name: str) -> RemoteFile:
    with _told(address):
        system, inner = _system(address)
        return _as_found(address, name, system.info(inner))


def _as_found(address: str, name: str, about: Mapping[str, Any]) -> RemoteFile:
    version = next((str(about[key]) for key in _VERSION_KEYS if about.get(key)), None)
    return RemoteFile(address, name, about.get("size"), version)


def _fixed_part(pattern: str) -> str:
    """The folder before the first part with a star."""
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if "*" in part)
    return "/".join(parts[:first])


def _system(address: str) -> tuple[Any, str]:
    scheme = scheme_of(address) or ""
    package = PACKAGES[scheme]
    try:
        fsspec = importlib.import_module("fsspec")
        importlib.import_module(package)
    except ImportError as error:
        name = "fsspec" if error.name == "fsspec" else package
        extra = "gcs" if name == "gcsfs" else "bucket"
        raise MissingExtraError(name, extra, f"reading {address}") from None
    # fsspec's own cache of clients and listings knows nothing of a changed environment or bucket
    state = (scheme, os.getpid(), hash(tuple(sorted(os.environ.items()))))
    if state not in _clients:
        _clients.clear()
        _clients[state] = fsspec.core.url_to_fs(address, skip_instance_cache=True)[0]
    _clients[state].invalidate_cache()
    return _clients[state], str(_clients[state]._strip_protocol(address))


_clients: dict[Any, Any] = {}


class _BrokenOffError(Exception):
    """A transfer that may go well the next time."""


@contextlib.contextmanager
def _told(address: str) -> Iterator[None]:
    """The errors of a dozen libraries in our words."""
    try:
        yield
    except (CorpusError, MissingExtraError, UsageError, _BrokenOffError):
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError):
            # fsspec calls a web server that is out of reach a missing file, too
            cause = error.__cause__ if scheme_of(address) in ("http", "https") else None
            if not isinstance(cause, Exception) or getattr(cause, "status", None) == 404:
                raise CorpusError(
                    f"{address} does not exist: there is no such bucket, folder or file."
                ) from None
            error = cause
        kind = type(error).__name__
        if isinstance(error, PermissionError) or "Credential" in kind:
            raise CorpusError(
                f"{address} may not be read: the server does not accept the credentials, or none "
                "were found. They are taken from the usual places: the environment or a profile."
            ) from None
        reason = (str(error).strip().splitlines() or [kind])[0]
        raise _Unreached(
            f"{address} cannot be read: {kind}: {reason[:200]}. Check the address and the network."
        ) from None


class _Unreached(_BrokenOffError, CorpusError):
    """An error for who does not try again."""
