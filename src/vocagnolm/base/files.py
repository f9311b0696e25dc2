"""The one place that writes files: whole or not at all, on the disk before it has a name.

A file is written under a temporary name that nobody else can have made, flushed, and renamed; its
folder is flushed too. A process may be killed between any two instructions, and the disk may be
full: what stands under its final name is whole, and what a killed run left behind is recognised by
its name (`.NAME.XXXXXXXX.tmp`) and removed by the next. What is in a bucket is the business
of `vocagnolm.storage`. Standard library only.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import IO, Any

from vocagnolm.errors import BusyError, UsageError, VocagnolmError, WriteError

CHECKSUM = "content_sha256"
"""The key of a JSON file's own checksum."""
LINE_CHECKSUM = "crc32"
"""The key of the checksum that a line of JSON lines carries."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
# one slash: what `Path` makes of two; two letters: a drive has one
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def address_of(path: str | os.PathLike[str]) -> str | None:
    """The address (`s3://bucket/x`), also after `Path` took a slash; None for a local path."""
    if _ADDRESS.match(str(path)) is None:
        return None
    scheme, _, rest = str(path).partition(":/")
    return f"{scheme}://{rest.removeprefix('/')}"


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path; an address (`s3://bucket/x`), of which `Path` would make a folder, is refused."""
    address = address_of(path)
    require_nameable(path)
    if "\0" in str(path):
        raise UsageError(f"{str(path)!r} is not a path: it contains a zero byte.")
    if address is None:
        return Path(path)
    raise UsageError(
        f"{address} is an address, but a local file or folder is needed here. Only corpora, loss "
        f"stores and blocks can be remote; for anything else, mount the bucket (rclone mount, "
        f"gcsfuse) and use the mount point."
    )


def require_nameable(path: str | os.PathLike[str]) -> None:
    """Refuse a name that this process cannot give to the system, or not to libraries in Rust, which
    know no names but UTF-8: each would say in another way that there is no such file."""
    try:
        os.fsencode(path)
        str(path).encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        mend = "Rename it." if encoding == "utf-8" else "Set PYTHONUTF8=1 before Python starts."
        raise UsageError(
            f"{str(path)!a} cannot be opened: the name does not fit the encoding of file names, "
            f"which is {encoding} here. {mend}"
        ) from None


def reached(point: str, path: PurePath) -> None:
    """Called between any two steps of a write, and does nothing: tests stop the process here."""


# ---- whole files and folders ----


def write_bytes(path: str | Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)


def write_text(path: str | Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_json(
    path: str | Path, value: Any, *, indent: int | None = 1, sealed: bool = False
) -> None:
    write_bytes(path, json_bytes(value, indent=indent, sealed=sealed))


def json_bytes(value: Any, *, indent: int | None = 1, sealed: bool = False) -> bytes:
    """A value as JSON. `sealed`: an object that carries its own checksum, which `read_json`
    compares."""
    if sealed:
        value = {**value, CHECKSUM: json_digest(parse_json(json.dumps(value)))}
    try:
        return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # it spells bytes that are no UTF-8
        return (json.dumps(value, indent=indent) + "\n").encode()


def create_bytes(path: str | Path, content: bytes) -> bool:
    """Write a new file atomically. Where the name is taken, change nothing and give False."""
    if local_path(path).exists():
        return False
    try:
        with whole_file(path, new=True) as file:
            file.write(content)
    except _TakenError:
        return False
    return True


class _TakenError(Exception):
    """The name is taken: another process was first."""


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A temporary name beside the final one, which it has when the block ends without an error."""
    temporary = _temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        reached("begin", path)
        yield temporary
        reached("renamed", path)
        _sync_folder(path.parent)
    except BaseException as error:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise not_written(path, error) from error
        raise


@contextlib.contextmanager
def whole_file(path: str | Path, *, new: bool = False) -> Iterator[IO[bytes]]:
    """A binary file that gets its name when the block ends without an error. Folders above it are
    made; permissions follow the umask. `new`: the name must not be taken."""
    path = local_path(path)
    with _temporary(path) as temporary:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o666), "w+b") as file:
            yield file
            reached("written", path)
            file.flush()
            os.fsync(file.fileno())
        reached("synced", path)
        if new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)


@contextlib.contextmanager
def whole_path(path: str | Path) -> Iterator[Path]:
    """A temporary path, for a library that opens the file itself or moves one of its own there. At
    the end it is synced and renamed to `path`; after an error `path` is unchanged."""
    path = local_path(path)
    with _temporary(path) as folder, as_write_error(path):
        folder.mkdir()
        yield folder / path.name
        reached("written", path)
        sync_tree(folder)
        reached("synced", path)
        os.replace(folder / path.name, path)
        folder.rmdir()


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _TakenError from None
    except OSError:  # a file system without links: the best that it has
        if path.exists():
            raise _TakenError from None
        os.replace(temporary, path)
    else:
        os.unlink(temporary)


@contextlib.contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A folder that gets its name, with all its files on the disk, when the block ends without an
    error. A folder of that name, left by the same run, is replaced."""
    path = local_path(path)
    with _temporary(path) as temporary:
        temporary.mkdir()
        yield temporary
        reached("written", path)
        sync_tree(temporary)
        reached("synced", path)
        if path.exists():
            before = _temporary_name(path)
            os.replace(path, before)
            reached("moved", path)
            os.replace(temporary, path)
            shutil.rmtree(before)
        else:
            os.replace(temporary, path)


def append_lines(path: str | Path, lines: str, *, sync: bool = True) -> None:
    """Append whole lines to a file. `sync`: they survive a power cut too."""
    path = local_path(path)
    try:
        reached("begin", path)
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o666), "ab") as file:
            file.write(lines.encode())
            if sync:
                file.flush()
                os.fsync(file.fileno())
        reached("written", path)
    except OSError as error:
        raise not_written(path, error) from error


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that grows; one that a kill cut short is left out and taken off, so that
    the next one starts on a line of its own."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return [line for line in whole.split(b"\n") if line]


def move_folder(path: Path, target: Path) -> None:
    """Give a finished folder another name; where the name is taken, its holder stays."""
    reached("begin moving", target)
    if target.exists():
        shutil.rmtree(path)
    else:
        os.replace(path, target)
        _sync_folder(target.parent)


def remove(path: Path) -> None:
    reached("begin removing", path)
    if os.path.lexists(path):  # on read-only media also a name that is not there is refused
        path.unlink(missing_ok=True)


def is_leftover(name: str) -> bool:
    """Whether a file of this name was left by a run that was killed while it wrote."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(folder: str | Path) -> None:
    """Call it under the folder's lock: nobody else may be writing."""
    for path in Path(folder).glob(".*.tmp"):
        if not is_leftover(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove(path)


def plain_name(name: Any) -> bool:
    """A name inside its folder: what a manifest may list."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def sync_tree(folder: Path) -> None:
    """Flush every file below the folder to the disk, and make it readable for whom the umask lets
    read (libraries that write through temporary files leave them to their owner alone)."""
    readable = folder.stat().st_mode & 0o666
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | readable)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    # without this a power cut may forget the rename
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def as_write_error(what: Path | str) -> Iterator[None]:
    """Turn the errors of libraries that write files into a write error: torch and safetensors raise
    kinds of their own when a disk is full."""
    try:
        yield
    except VocagnolmError:
        raise
    except Exception as error:
        known = isinstance(error, OSError | RuntimeError)
        if not known and type(error).__name__ != "SafetensorError":
            raise
        raise not_written(what, error) from error


def not_written(path: Path | str, error: Exception) -> WriteError:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    mend = next((mend for mend, numbers in _MENDS if _says(error, reason, numbers)), _OTHER_MEND)
    return WriteError(
        f"{path} could not be written: {reason}. What was finished before is kept. {mend}, and run "
        "the same command again."
    )


_MENDS = (
    ("Free some space", (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    (
        "Choose a folder that this user may write to, or change its rights",
        (errno.EROFS, errno.EACCES, errno.EPERM),
    ),
)
_OTHER_MEND = "Check the path and the disk"


def _says(error: Exception, reason: str, numbers: tuple[int, ...]) -> bool:
    """Whether an error is one of these of the system; libraries repeat its words."""
    number = getattr(error, "errno", None)
    return number in numbers or any(os.strerror(n) in reason for n in numbers)


# ---- reading back ----


def sealed_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """JSON lines that each carry their own checksum, which `unsealed` compares."""
    rows = ({**record, LINE_CHECKSUM: _line_checksum(record)} for record in records)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def unsealed(line: str | bytes) -> Any:
    """The value of a line of JSON lines. ValueError where it is not JSON, or not what its checksum
    says; lines of older versions have none."""
    value = parse_json(line)
    if isinstance(value, dict) and LINE_CHECKSUM in value:
        checksum = value.pop(LINE_CHECKSUM)
        if checksum != _line_checksum(value):
            raise ValueError("the line does not match its checksum")
    return value


def finished_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines that was written whole. ValueError where it is damaged."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        raise ValueError("its last line is cut")
    return [unsealed(line) for line in content.split(b"\n")[:-1]]


def _line_checksum(record: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def parse_json(content: str | bytes) -> Any:
    """Parse JSON of unknown origin; text that is nested too deeply raises a ValueError too."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(
    path: str | Path,
    error: type[VocagnolmError],
    mend: str,
    keys: Mapping[str, type | tuple[type, ...]] | None = None,
    *,
    read: Callable[[], bytes | memoryview] | None = None,
) -> dict[str, Any]:
    """A JSON object that has `keys` of these types, or `error` with what is wrong and how to `mend`
    it. `read` gives the content of what is no file of this machine. A file that is not there is the
    caller's business: FileNotFoundError, NotADirectoryError."""
    try:
        content = parse_json(bytes(read() if read else Path(path).read_bytes()).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}. {mend}") from None
    except ValueError as failure:
        raise error(f"{path} is not JSON ({failure}). {mend}") from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise error(f"{path} holds a {kind}, expected a JSON object. {mend}")
    checksum = content.pop(CHECKSUM, None)  # older files have none
    if checksum is not None and checksum != json_digest(content):
        raise error(f"{path} is damaged: its content does not match its checksum. {mend}")
    require_keys(content, path, error, mend, keys or {})
    return content


def require_keys(
    content: Mapping[str, Any],
    path: str | Path,
    error: type[VocagnolmError],
    mend: str,
    keys: Mapping[str, type | tuple[type, ...]],
) -> None:
    for name, kind in keys.items():
        if not isinstance(content.get(name), kind):
            raise error(f"{path} is damaged: its '{name}' is {content.get(name)!r:.40}. {mend}")


def file_digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Digests of several files, computed in threads, since hashing releases the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(file_digest, paths))


def file_records(folder: Path, *excluded: str) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file below a folder, but for those of these names."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in excluded)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, file_digests(paths), strict=True)
    }


def damaged_file(folder: Path, records: Mapping[str, Any], *, read: bool = True) -> str | None:
    """What is wrong with the first file that is not as recorded, or None. `read`: also compare
    every byte."""
    for name, entry in records.items():
        size = entry["bytes"] if isinstance(entry, dict) else entry  # older records: sizes alone
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is truncated or missing"
    checked = {name: entry for name, entry in records.items() if isinstance(entry, dict)}
    if read:
        digests = file_digests([folder / name for name in checked])
        for (name, entry), digest in zip(checked.items(), digests, strict=True):
            if entry["sha256"] != digest:
                return f"{name} does not match its checksum"
    return None


def model_damage(folder: Path, *, read: bool = True) -> str | None:
    """What is wrong with the model folder of a finished run, by the checksums in the run.json
    beside it; None too where there is no record."""
    folder = folder.resolve()
    try:
        about = parse_json((folder.parent / "run.json").read_bytes())
        records = about["model_files"] if folder.name == "model" and about["finished"] else {}
        wrong = damaged_file(folder, records, read=read)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if wrong is None:
        return None
    return (
        f"{folder} is damaged: {wrong}. `vocagnolm train {folder.parent / 'recipe.yaml'}` makes "
        "the model again from the last checkpoint."
    )


def json_digest(value: Any) -> str:
    """SHA-256 of a value as JSON with sorted keys: the identity of settings."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def differences(actual: Any, wanted: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """`(name, actual, wanted)` for every leaf in which two nested mappings differ."""
    if isinstance(actual, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*actual, *wanted}):
            inner = f"{name}.{key}" if name else str(key)
            yield from differences(actual.get(key), wanted.get(key), inner)
    elif actual != wanted:
        yield name, actual, wanted


# ---- locks ----


LOCK_FILE = ".lock"


@contextlib.contextmanager
def folder_lock(
    folder: str | Path, advice: str, *, shared: bool = False, patience: float = 0.0
) -> Iterator[None]:
    """Only one process may write to a folder; or several that hold it `shared`, and nobody else.
    The kernel takes the lock back when its holder dies, however it dies. The holder's name stands
    in the file, which is why it is opened without truncating it (as `filelock` does).

    patience: seconds to wait for the holder."""
    path = local_path(folder) / LOCK_FILE
    if path.parent.is_dir() and _is_read_only(path.parent):
        yield  # nobody writes there; what is finished can be read
        return
    with contextlib.ExitStack() as held:
        file = held.enter_context(_open_lock(path))
        patient_until = time.monotonic() + patience
        while True:
            try:
                if _lock(file, path, advice, shared):
                    break
            except BusyError:
                if time.monotonic() >= patient_until:
                    raise
                time.sleep(0.2)
            file = held.enter_context(_open_lock(path))  # its last holder may have removed it
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()} since {since}".encode())
        file.flush()
        try:
            yield
        finally:
            if not shared:  # others may hold it, under its name
                path.unlink(missing_ok=True)


def _is_read_only(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY) or not os.access(folder, os.W_OK)


@contextlib.contextmanager
def claim(path: str | Path) -> Iterator[bool]:
    """Try to lock a file; gives whether that worked. The lock dies with its holder, the file
    stays."""
    with _open_lock(Path(path)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _open_lock(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW
        return os.fdopen(os.open(path, flags, 0o666), "r+b")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise WriteError(
                f"{path} is a symbolic link, which this program never creates. Find out who "
                f"created it, and remove it."
            ) from None
        raise not_written(path, error) from error


def _lock(file: IO[bytes], path: Path, advice: str, shared: bool) -> bool:
    """True when the file is locked and is still the one under its name."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        holder = file.read(200).decode(errors="replace").strip()
        named = f" ({holder})" if holder else ""
        raise BusyError(f"another process{named} is writing to {path.parent}. {advice}") from None
    try:
        return os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


def model_folder_name(path: Path) -> str:
    """A model folder's name, or that of the folder around it where its own says nothing: `train`
    calls every result `model`."""
    path = path.resolve()
    return path.parent.name if path.name == "model" and path.parent.name else path.name
