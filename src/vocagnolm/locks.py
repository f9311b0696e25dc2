"""Who may write: locks on folders and files, which the kernel takes back when their holder dies.
Standard library only."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vocagnolm.errors import BusyError, WriteError
from vocagnolm.files import local_path, not_written

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


@contextlib.contextmanager
def claim(path: str | Path) -> Iterator[bool]:
    """Whether the file could be locked; the lock dies with its holder, the file stays."""
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
                f"{path} is a symbolic link, which no run of ours makes. "
                "Look who put it there, and remove it."
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
