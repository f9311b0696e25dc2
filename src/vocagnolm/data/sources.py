"""The kinds of places documents come from. Each counts its documents, takes a checksum of its
bytes in the same pass, and reads any range of documents."""

import contextlib
import gzip
import hashlib
import io
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from vocagnolm.base.files import parse_json, whole_file
from vocagnolm.chat.messages import CONVERSATION_FIELDS, RENAMED_FIELDS
from vocagnolm.errors import CorpusError, UsageError, VocagnolmError, optional
from vocagnolm.recipe.sections import Split as Split
from vocagnolm.storage import scheme_of
from vocagnolm.storage.bucket import BrokenOffError, patiently
from vocagnolm.storage.copies import cache_folder, copying, remembered, tell

# ---- files at an address ----

# scheme -> the package that fsspec needs for it
PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
}
_VERSION_KEYS = ("ETag", "etag", "generation", "md5Hash", "xet_hash", "blob_id", "LastModified")
_COPY_BYTES = 8 * 2**20
Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteFile:
    """One file at an address, in the state in which it was found."""

    address: str
    name: str
    """The path below the folder that was named, like in a local corpus."""
    size: int | None
    version: str | None

    def fetch(self) -> Path:
        """Copy the file to this machine, unless it is there already; gives the path."""
        state = f"{self.address}\n{self.size}\n{self.version}"
        key = hashlib.sha256(state.encode()).hexdigest()[:32]
        path = cache_folder() / "corpora" / key / PurePosixPath(self.name).name
        # without size and version nobody can say whether it is still the same
        known = self.size is not None or self.version is not None

        def is_here() -> bool:
            return known and path.is_file() and self.size in (None, path.stat().st_size)

        if not is_here():
            with copying(path.parent):
                if not is_here():
                    self._copy(path)
        return path

    def _copy(self, path: Path) -> None:
        _patiently(self.address, lambda: self._copy_once(path))

    def _copy_once(self, path: Path) -> None:
        system, inner = _system(self.address)
        with system.open(inner, "rb") as source, whole_file(path) as target:
            done = 0
            while block := source.read(_COPY_BYTES):
                done += target.write(block)
                tell(self.address, path.parent, done, max(done, self.size or 0))
            if self.size not in (None, done):
                raise BrokenOffError(
                    f"{self.address} cannot be read to its end: {done:,} of {self.size:,} bytes."
                )
            if _remote_file(self.address, self.name) != self:
                raise CorpusError(
                    f"{self.address} changed while it was being copied. Do not change the corpus "
                    f"while it is in use."
                )


def remote_files(address: str) -> list[RemoteFile]:
    """The file at an address, or every file below a folder or that fits a pattern
    (`s3://b/x/*.jsonl`)."""
    if scheme_of(address) not in PACKAGES:
        raise UsageError(
            f"{address} has a scheme that no corpus can be read from. Supported: "
            f"{', '.join(f'{name}://' for name in PACKAGES)}."
        )
    if scheme_of(address) in ("http", "https"):  # no folders, no patterns
        return [_remote_file(address, PurePosixPath(urlsplit(address).path).name)]

    def listed() -> tuple[str, Mapping[str, Any]] | str:
        system, inner = _system(address)
        if "*" in inner:
            return inner.partition("*")[0].rpartition("/")[0], system.glob(inner, detail=True)
        if system.isdir(inner):
            return inner.rstrip("/"), system.find(inner, detail=True)
        return PurePosixPath(inner).name

    answer = _patiently(address, listed)
    if isinstance(answer, str):
        return [_remote_file(address, answer)]
    below, listing = answer
    start = address.partition("://")[0]
    return [
        _remote_file(f"{start}://{path}", path[len(below) :].lstrip("/"), about)
        for path, about in sorted(listing.items())
        if about["type"] == "file"
    ]


def _remote_file(address: str, name: str, about: Mapping[str, Any] | None = None) -> RemoteFile:
    """A remote file with its current size and version; `about`: what its server says of it, if
    that is known already."""

    def info() -> Mapping[str, Any]:
        system, inner = _system(address)
        return dict(system.info(inner))

    about = _patiently(address, info) if about is None else about
    version = next((str(about[key]) for key in _VERSION_KEYS if about.get(key)), None)
    return RemoteFile(address, name, about.get("size"), version)


def _patiently(address: str, request: Callable[[], Result]) -> Result:
    def attempt() -> Result:
        try:
            with _corpus_errors(address):
                return request()
        except (CorpusError, BrokenOffError):
            forget_client(address)  # the next attempt reads addresses and credentials again
            raise

    return patiently(attempt, "://".join(urlsplit(address)[:2]), CorpusError)


def _system(address: str) -> tuple[Any, str]:
    """The client for an address, which fsspec keeps for the process, and the path in its terms."""
    package = PACKAGES[scheme_of(address) or ""]
    fsspec = optional("fsspec", "bucket", f"reading {address}")
    optional(package, "gcs" if package == "gcsfs" else "bucket", f"reading {address}")
    system, inner = fsspec.core.url_to_fs(address)
    system.invalidate_cache()  # of listings
    return system, str(inner)


def forget_client(address: str) -> None:
    """Let the next request for an address make a new client, with the environment as it then is."""
    import fsspec

    fsspec.get_filesystem_class(scheme_of(address)).clear_instance_cache()


@contextlib.contextmanager
def _corpus_errors(address: str) -> Iterator[None]:
    """Turn the errors of a dozen libraries into a CorpusError in our words."""
    try:
        yield
    except (VocagnolmError, BrokenOffError):
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
                "were found. They are taken from the environment or a profile."
            ) from None
        reason = (str(error).strip().splitlines() or [kind])[0]
        final = isinstance(error, ValueError | TypeError) or "Validation" in kind
        raise (CorpusError if final else BrokenOffError)(
            f"{address} cannot be read: {kind}: {reason[:200]}. Check the address and the network."
        ) from None


# ---- kinds of sources ----


LONGEST_TEXT = 2**20
"""Bytes of a text up to which it is one document; see `vocagnolm.data.corpus` for longer ones."""
# A place to seek to is remembered this often; between two, lines are skipped unread.
_LINES_PER_MARK = 256
_READ_BYTES = 2**20
# A frame may unfold a few bytes into 128 KiB: so little is given to it at once.
_COMPRESSED_BYTES = 2**12
MOST_LINE_BYTES = 2**28
_TOO_LONG = f"huge: a line of more than {MOST_LINE_BYTES:,} bytes"


@dataclass(frozen=True)
class Problem:
    reason: str


@dataclass(frozen=True)
class Record:
    """One entry of a source as it stands: a mapping of fields, a text, or what is wrong."""

    place: str
    value: Any


def wanted_fields(names: Iterable[str], text_field: str | None) -> list[str]:
    """The fields of a record that are read: the text, or else what a conversation is in; None: all
    of them."""
    fields = [*names]
    if text_field is None:
        return fields
    if text_field in fields:
        return [text_field]
    own = "messages" in fields or "prompt" in fields
    return [name for name in (CONVERSATION_FIELDS if own else RENAMED_FIELDS) if name in fields]


class _File:
    """A file on disk with the state in which it was first read. Sent to another process it keeps
    what was counted and hashed, and is opened there when it is first read."""

    _opened: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold open files."""
    origin: RemoteFile | None = None
    """Where it was copied from; a process on another machine makes a copy of its own."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self._state = self._stat()

    def _stat(self) -> tuple[int, int, int]:
        with self._readable():
            status = self.path.stat()
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _open(self) -> io.BufferedIOBase:
        with self._readable():
            return io.BufferedReader(io.FileIO(self.path), _READ_BYTES)

    def _digest(self) -> str:
        with self._open() as file, self._readable():
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn errors of the file system, of decompressors and of pyarrow into a CorpusError in our
        words."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise CorpusError(f"{self.path} cannot be read: {reason}.") from error
        except EOFError as error:
            raise CorpusError(f"{self.path} cannot be read to its end: {error}.") from error
        except Exception as error:
            # zlib.error, zstandard.ZstdError, ArrowInvalid: the libraries' own kinds
            if type(error).__module__.split(".")[0] not in ("zlib", "zstandard", "pyarrow"):
                raise
            raise CorpusError(
                f"{self.path} cannot be read as {self.path.suffix[1:]}: {error}."
            ) from error

    fingerprint: str
    """SHA-256 of the content."""

    def changed(self) -> bool:
        """Whether the file has changed. An edit can keep the size and set the time back, but not
        that of the inode, which other things touch too (a link, new rights): where it has moved,
        the content decides."""
        now = self._stat()
        if now[:2] != self._state[:2] or (
            now != self._state and self._digest() != self.fingerprint
        ):
            return True
        self._state = now
        return False

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in self._opened}
        return kept | {"path": self.path.absolute()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.origin is not None:
            self.path = self.origin.fetch()
            self._state = self._stat()


class JsonLines(_File):
    """A file with one JSON value per line; blank lines do not count. It is plain, .gz or .zst."""

    _opened = ("_cursor",)
    # Documents still to be read from an open file: shards are mostly asked for in order.
    _cursor: tuple[int, io.BufferedIOBase, int] | None = None

    def __init__(self, path: Path, name: str, text_field: str | None):
        super().__init__(path, name)
        self._marks: list[tuple[int, int]] = []  # (byte, line) of every 256th document
        digest = hashlib.sha256()
        self._documents = 0
        self.long_records: list[int] = []
        """Numbers of the records that may hold a long text: no text is longer than its line."""
        position = number = 0
        begun = False  # of a line that is read in pieces
        with self._open() as file, self._readable():
            while line := file.readline(MOST_LINE_BYTES):
                digest.update(line)
                if not begun and not line.isspace():
                    if len(line) > LONGEST_TEXT:
                        self.long_records.append(self._documents)
                    if self._documents % _LINES_PER_MARK == 0:
                        self._marks.append((position, number))
                    self._documents += 1
                position += len(line)
                begun = not line.endswith(b"\n")
                number += not begun
        # Of the content, not of the compressed bytes: compressing a corpus does not change it.
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._documents

    def read(self, start: int, stop: int) -> Iterator[Record]:
        file, document, number = self._at(start)
        try:
            with self._readable():
                while document < stop and (line := file.readline(MOST_LINE_BYTES)):
                    number += 1
                    cut = len(line) == MOST_LINE_BYTES and not line.endswith(b"\n")
                    if cut:
                        _skip_line(file)
                    elif line.isspace():
                        continue
                    document += 1
                    if document > start:
                        value = Problem(_TOO_LONG) if cut else _json_value(line)
                        yield Record(f"{self.name}:{number}", value)
        except BaseException:
            file.close()  # also where the reader stops early
            raise
        self._cursor = (document, file, number)

    def __del__(self) -> None:
        if self._cursor is not None:
            self._cursor[1].close()

    def _at(self, start: int) -> tuple[io.BufferedIOBase, int, int]:
        """The open file, before document `start` or some before it: (file, document, line)."""
        cursor, self._cursor = self._cursor, None
        mark = start // _LINES_PER_MARK
        if cursor is not None:
            document, file, number = cursor
            seekable = not self._compressed
            if document <= start and not (seekable and mark * _LINES_PER_MARK > document):
                return file, document, number
            file.close()
        file = self._open()
        if self._compressed or mark >= len(self._marks):
            return file, 0, 0
        position, number = self._marks[mark]
        file.seek(position)
        return file, mark * _LINES_PER_MARK, number

    @property
    def _compressed(self) -> bool:
        return self.path.suffix.lower() in (".gz", ".zst")

    def _open(self) -> io.BufferedIOBase:
        suffix = self.path.suffix.lower()
        with self._readable():
            if suffix == ".gz":
                return gzip.open(self.path, "rb")
            return _open_zstandard(self.path) if suffix == ".zst" else super()._open()


def _skip_line(file: io.BufferedIOBase) -> None:
    """Read to the end of a line, in pieces."""
    while (piece := file.readline(_READ_BYTES)) and not piece.endswith(b"\n"):
        pass


def _open_zstandard(path: Path) -> io.BufferedIOBase:
    zstandard = optional("zstandard", "data", f"reading {path.name}")
    stream = _ZstandardStream(open(path, "rb"), zstandard.ZstdDecompressor(max_window_size=2**27))  # noqa: SIM115
    return io.BufferedReader(stream, _READ_BYTES)


class _ZstandardStream(io.RawIOBase):
    """Reads every frame of a Zstandard file in turn. The library's own reader stops after the first
    frame, and takes a truncated frame for a whole one."""

    def __init__(self, file: IO[bytes], decompressor: Any):
        self._file = file
        self._decompressor = decompressor
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            waiting = self._frame.unused_data if self._frame and self._frame.eof else b""
            block = waiting or self._file.read(_COMPRESSED_BYTES)
            if not block:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it is cut short")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._ready = self._frame.decompress(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _json_value(line: bytes) -> Any:
    try:
        value = parse_json(line)
    except UnicodeDecodeError as error:
        return Problem(f"not UTF-8: at byte {error.start} of the line")
    except ValueError as error:
        return Problem(f"not JSON: {error}")
    return value if isinstance(value, dict | str) else Problem("not JSON: not an object")


class TextFile(_File):
    """A text file as one document, or one for each paragraph or line, without its last line break.
    Blank lines are no documents."""

    def __init__(self, path: Path, name: str, split: Split = "none"):
        super().__init__(path, name)
        self._whole = split == "none"
        # Of every piece: first byte, byte after the last, line. Numbers, not objects: a line may
        # be a document, and there may be many.
        self._pieces = array("Q")
        self.fingerprint = self._digest()
        if not self._whole:
            with self._open() as file, self._readable():
                self._find_pieces(file, join=split == "blank_line")

    def _find_pieces(self, file: io.BufferedIOBase, *, join: bool) -> None:
        position = 0
        inside = False
        for number, line in enumerate(file, 1):
            end = position + len(line.rstrip(b"\r\n"))
            blank = not line.strip()
            if not blank and join and inside:
                self._pieces[-2] = end
            elif not blank:
                self._pieces.extend((position, end, number))
            inside = not blank
            position += len(line)

    def __len__(self) -> int:
        return 1 if self._whole else len(self._pieces) // 3

    @property
    def long_records(self) -> list[int]:
        """Numbers of the texts that are long."""
        if self._whole:
            return [0] if self._state[0] > LONGEST_TEXT else []
        bounds = zip(self._pieces[::3], self._pieces[1::3], strict=True)
        return [number for number, (first, end) in enumerate(bounds) if end - first > LONGEST_TEXT]

    def read(self, start: int, stop: int) -> Iterator[Record]:
        with self._readable(), open(self.path, "rb") as file:
            for index in range(start, min(stop, len(self))):
                if self._whole:
                    yield Record(self.name, _utf8(file.read()))
                    continue
                first, end, line = self._pieces[3 * index : 3 * index + 3]
                file.seek(first)
                yield Record(f"{self.name}:{line}", _utf8(file.read(end - first)))


def _utf8(content: bytes) -> str | Problem:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return Problem(f"not UTF-8: at byte {error.start}")


class ParquetRows(_File):
    """A Parquet file with one document per row. Only the columns of the text, or of a conversation,
    are read."""

    _opened = ("_file",)

    def __init__(self, path: Path, name: str, text_field: str | None):
        super().__init__(path, name)
        self._text_field = text_field
        self._rows = int(self._file.metadata.num_rows)
        self.fingerprint = self._digest()

    @cached_property
    def _file(self) -> Any:
        purpose = f"reading {self.path.name}"
        _, parquet = (optional(name, "data", purpose) for name in ("pyarrow", "pyarrow.parquet"))
        with self._readable():
            return parquet.ParquetFile(self.path)

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def long_records(self) -> list[int]:
        """Numbers of the rows with a long text. The texts are read through for it, once on a
        machine."""
        about = self.fingerprint, self._text_field, LONGEST_TEXT
        numbers: list[int] = remembered("long texts", about, self._long_rows)
        return numbers

    def _long_rows(self) -> list[int]:
        """The rows with a long text; row groups that have no room for one are not read."""
        compute = optional("pyarrow.compute", "data", f"reading {self.path.name}")
        field, metadata = self._text_field or "", self._file.metadata
        columns = [metadata.schema.column(n).path for n in range(metadata.num_columns)]
        if field not in columns:
            return []
        rows: list[int] = []
        first = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if group.column(columns.index(field)).total_uncompressed_size > LONGEST_TEXT:
                with self._readable():
                    texts = self._file.read_row_group(number, columns=[field]).column(field)
                    long = compute.greater(compute.binary_length(texts), LONGEST_TEXT)
                    rows += [first + row for row in compute.indices_nonzero(long).to_pylist()]
            first += group.num_rows
        return rows

    def read(self, start: int, stop: int) -> Iterator[Record]:
        names = self._file.schema_arrow.names
        wanted = wanted_fields(names, self._text_field)
        if not wanted:  # reported by the corpus, with the names there are
            for row in range(start, stop):
                yield Record(f"{self.name}[{row}]", dict.fromkeys(names))
            return
        first = 0
        for group in range(self._file.metadata.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            low, high = max(start, first), min(stop, first + rows)
            if low < high:
                with self._readable():
                    table = self._file.read_row_group(group, columns=wanted)
                columns = [table.column(name).slice(low - first, high - low) for name in wanted]
                for row, *values in zip(range(low, high), *columns, strict=True):
                    try:
                        pairs = zip(wanted, (value.as_py() for value in values), strict=True)
                        fields: Any = dict(pairs)
                    except UnicodeDecodeError as error:
                        fields = Problem(f"not UTF-8: at byte {error.start}")
                    yield Record(f"{self.name}[{row}]", fields)
            first += rows


class DatasetSource:
    """A dataset of the Hugging Face hub: `owner/name`, or `owner/name:split`."""

    def __init__(self, name: str, text_field: str | None):
        self.name = name
        self._text_field = text_field
        self._documents = len(self._rows)
        digest = hashlib.sha256()
        self.long_records: list[int] = []
        """Numbers of the rows that may hold a long text: no text is longer than its row."""
        for number, record in enumerate(self.read(0, len(self))):
            row = json.dumps(record.value, sort_keys=True, default=str).encode()
            digest.update(row)
            if len(row) > LONGEST_TEXT:
                self.long_records.append(number)
        self.fingerprint = digest.hexdigest()

    @cached_property
    def _rows(self) -> Any:
        datasets = optional("datasets", "data", f"reading {self.name} from the hub")
        repository, _, split = self.name.partition(":")
        try:
            return datasets.load_dataset(repository, split=split or "train")
        except Exception as error:  # the library raises a dozen kinds; all mean: not to be had
            raise CorpusError(
                f"{self.name} is neither a file nor a folder here, and cannot be loaded as a hub "
                f"dataset: {type(error).__name__}: {error}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_rows"}

    def __len__(self) -> int:
        return self._documents

    def read(self, start: int, stop: int) -> Iterator[Record]:
        for row in range(start, stop):
            fields = self._rows[row]
            if wanted := wanted_fields(fields, self._text_field):
                fields = {name: fields[name] for name in wanted}
            yield Record(f"{self.name}[{row}]", fields)

    def changed(self) -> bool:
        return False


Source = JsonLines | TextFile | ParquetRows | DatasetSource
