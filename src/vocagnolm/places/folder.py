"""A folder of this machine."""

import contextlib
import mmap
import os
from pathlib import Path

from vocagnolm import files
from vocagnolm.errors import WriteError
from vocagnolm.locks import folder_lock


class Folder:
    """Steps as `vocagnolm.files` makes them: on the disk before a name is given."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def shown(self, name: str) -> str:
        return str(self.path / name)

    def files(self, *folders: str) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    inside = entry.name in folders and entry.is_dir()
                    found |= self._inside(entry.name) if inside else _named(entry, entry.name)
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            raise WriteError(f"{self.path} is a file; a folder is needed here.") from None
        return found

    def _inside(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with os.scandir(self.path / folder) as entries:
            for entry in entries:
                found |= _named(entry, f"{folder}/{entry.name}")
        return found

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


def _named(entry: os.DirEntry[str], name: str) -> dict[str, int]:
    with contextlib.suppress(FileNotFoundError):  # removed at this moment
        return {name: 0 if entry.is_dir() else entry.stat().st_size}
    return {}
