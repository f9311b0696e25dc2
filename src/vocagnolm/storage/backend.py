"""The steps that every storage knows, and the storages that are folders: of this machine, or copies
that `huggingface_hub` keeps."""

import contextlib
import mmap
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from vocagnolm.base import files
from vocagnolm.base.files import folder_lock
from vocagnolm.errors import AddressError, WriteError, first_line


class Storage(Protocol):
    """Files by name (`manifest.json`, `shards/000000.safetensors`). `str(storage)` is its path or
    address."""

    def files(self, *folders: str) -> dict[str, int]:
        """Name -> size in bytes of the files here and in these folders, with one listing. Other
        folders appear only by name. Empty if there is nothing yet."""

    def has(self, name: str) -> bool:
        """Whether the file exists now."""

    def read(self, name: str) -> memoryview:
        """The whole file; FileNotFoundError if there is none."""

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """These bytes, or as many as exist; FileNotFoundError if there is no file."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a whole file unless the name is taken; then return False and change nothing. In a
        bucket also return True if exactly these bytes exist, because the response to our own
        request may have been lost."""

    def put(self, name: str, content: bytes) -> None:
        """Write a whole file, replacing an existing one."""

    def remove(self, *names: str) -> None:
        """Remove files; missing files are not an error."""

    def tidy(self, *folders: str) -> None:
        """Remove what killed processes left here and in these folders, and folders that have become
        empty."""

    def try_writing(self) -> str | None:
        """Raise an error if nothing can be written; a warning if the last of two writers wins."""

    def lock(
        self, advice: str, *, shared: bool = False, patience: float = 0.0
    ) -> AbstractContextManager[None]:
        """Keep others from writing, if the storage can; `create` is what protects the data."""

    def shown(self, name: str) -> str:
        """A file's path or address, for messages."""


# ---- a folder of this machine ----


class Folder:
    """The steps as in `vocagnolm.base.files`: data are on disk before the file gets its name."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def shown(self, name: str) -> str:
        return str(self.path / name)

    def files(self, *folders: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for folder in ("", *folders):
            try:
                entries = [*os.scandir(self.path / folder)]
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                path = self.path / folder
                raise WriteError(f"{path} is a file; a folder is needed here.") from None
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                with contextlib.suppress(FileNotFoundError):  # removed at this moment
                    if name not in folders:
                        sizes[name] = 0 if entry.is_dir() else entry.stat().st_size
        return sizes

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read(self, name: str) -> memoryview:
        with open(self.path / name, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # which cannot be mapped
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with open(self.path / name, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def create(self, name: str, content: bytes) -> bool:
        return files.create_bytes(self.path / name, content)

    def put(self, name: str, content: bytes) -> None:
        files.write_bytes(self.path / name, content)

    def remove(self, *names: str) -> None:
        for name in names:
            files.remove(self.path / name)

    def tidy(self, *folders: str) -> None:
        files.remove_leftovers(self.path)
        for name in folders:
            files.remove_leftovers(self.path / name)
            with contextlib.suppress(OSError):  # not there, or not empty
                (self.path / name).rmdir()

    def try_writing(self) -> str | None:
        return None

    def lock(
        self, advice: str, *, shared: bool = False, patience: float = 0.0
    ) -> contextlib.AbstractContextManager[None]:
        return folder_lock(self.path, advice, shared=shared, patience=patience)


# ---- a store that was published as a dataset of the Hugging Face hub ----


HUB_SCHEME = "hf"
_STORE_FILES = ("manifest.json", "vocabulary.safetensors", "shards/*", "data/*", "dropped/*")


def hub_folder(address: str) -> Path:
    """Where `huggingface_hub` keeps its copy of `hf://datasets/OWNER/NAME[@REVISION][/FOLDER]`;
    what is not there is fetched, and checked by it."""
    repository, revision, inside = _parts(address)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    prefix = f"{inside}/" if inside else ""
    try:
        folder = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[f"{prefix}{name}" for name in _STORE_FILES],
        )
    except Exception as error:  # network, rights, a name that is wrong: a dozen kinds
        raise AddressError(
            f"{address} cannot be downloaded from the hub: {first_line(error)}. Check the name, "
            "and log in with `hf auth login` if the dataset is not public."
        ) from None
    return Path(folder) / inside


def _parts(address: str) -> tuple[str, str | None, str]:
    kind, *names = address.rstrip("/").partition("://")[2].split("/")
    if kind != "datasets" or len(names) < 2 or not all(names):
        raise AddressError(
            f"{address}: expected hf://datasets/OWNER/NAME, optionally with @REVISION."
        )
    name, _, revision = names[1].partition("@")
    return f"{names[0]}/{name}", revision or None, "/".join(names[2:])
