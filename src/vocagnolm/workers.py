"""Processes that work for a command."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import connection, get_context, parent_process
from types import TracebackType
from typing import Any


class WorkerPool(ProcessPoolExecutor):
    """Spawned processes (forking after a tokenizer's threads have started can deadlock). Ctrl-C
    reaches every process of a terminal: only the command handles it. Its workers ignore it, also
    while they start, and end when the command ends, however that happens."""

    def __init__(self, workers: int, start: Callable[..., None] | None = None, *given: Any):
        """`start` is called with `given` in every worker before its first task."""
        super().__init__(
            workers, get_context("spawn"), initializer=_start, initargs=(start, *given)
        )

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # Workers are started here and inherit the blocked signal; the command gets it afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        if interrupted:
            # What is under way would be waited for, and may be killed at any time.
            for process in list(self._processes.values()):
                process.kill()
        self.shutdown(cancel_futures=interrupted)


def _start(start: Callable[..., None] | None, *given: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*given)


def _end_with_parent() -> None:
    """A worker whose parent was killed must not go on."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
