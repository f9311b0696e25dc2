"""The steps that every place knows."""

from contextlib import AbstractContextManager
from typing import Protocol


class Place(Protocol):
    """Files by name (`manifest.json`, `shards/000000.safetensors`). `str(place)` is its path or
    address."""

    def files(self, *folders: str) -> dict[str, int]:
        """Name -> bytes of the files here and in these folders, in one look. Other folders stand
        there under their names alone. Empty where there is nothing yet."""

    def has(self, name: str) -> bool:
        """Whether there is such a file now."""

    def read(self, name: str) -> memoryview:
        """The whole file; FileNotFoundError where there is none."""

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """These bytes, or those that there are; FileNotFoundError where there is no file."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a file whole, unless the name is taken: False then, and nothing is changed. In a
        bucket also True where these very bytes stand there: the answer to our own request may have
        been lost."""

    def put(self, name: str, content: bytes) -> None:
        """Write a file whole, in the place of one that may be there."""

    def remove(self, *names: str) -> None:
        """Files that are not there are no error."""

    def tidy(self, *folders: str) -> None:
        """Remove what killed processes left here and in these folders, and folders that have
        become empty."""

    def try_writing(self) -> str | None:
        """Before the first write: an error where nothing can be written, a warning where of two
        writers not the first one counts."""

    def lock(
        self, advice: str, *, shared: bool = False, patience: float = 0.0
    ) -> AbstractContextManager[None]:
        """Keep others from writing, where the place can; `create` is what keeps it whole."""

    def shown(self, name: str) -> str:
        """A file's path or address, for messages."""
