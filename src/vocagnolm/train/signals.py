"""What a cluster says to a run: SIGTERM, save and leave; SIGUSR1, save and go on."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Requests:
    """Set by signals, read between two steps."""

    def __init__(self) -> None:
        self.stop = False
        self.save = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.stop = True
        else:
            self.save = True


@contextlib.contextmanager
def listening() -> Iterator[Requests]:
    """Handle both signals inside the block; only Python's main thread can."""
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, requests._note) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
