"""Processes that work for a command, and a limit of time for code of somebody else."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import connection, get_context, parent_process
from types import TracebackType
from typing import Any, NoReturn, TypeVar


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
    """End this worker when its parent is gone, for example killed."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


# ---- a limit of time ----


Result = TypeVar("Result")


def answer_within(seconds: float, ask: Callable[[], Result]) -> Result:
    """What `ask` returns, or TimeoutError if it has not returned by then; it may hang in C code,
    where no exception reaches it, so its thread is left behind."""
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        _hanging.append(thread)
        raise


_hanging: list[threading.Thread] = []


def leave(code: int) -> NoReturn:
    """End the process. Python itself would wait for threads that hang in C code, or crash there."""
    if any(thread.is_alive() for thread in _hanging):
        with contextlib.suppress(TimeoutError):
            answer_within(_LEAVING_SECONDS, atexit._run_exitfuncs)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


_LEAVING_SECONDS = 10.0


@contextlib.contextmanager
def calling_after(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Calls `call` from another thread if the block has not ended after so many seconds."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class TookTooLong(Exception):
    """Raised inside `time_limit`, wherever the code is."""


_CHECK_SECONDS = 0.25
_deadlines: dict[int, float] = {}  # by the identity of the thread
_watch: threading.Thread | None = None


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End Python code of this thread after so many seconds, within a quarter of a second, in any
    thread (a signal would reach the main thread alone). It cannot be nested, and does not end C
    code."""
    global _watch
    thread = threading.get_ident()
    _deadlines[thread] = time.monotonic() + seconds
    if _watch is None or not _watch.is_alive():  # a fork has none
        _watch = threading.Thread(target=_end_late_ones, daemon=True)
        _watch.start()
    arrived = False
    try:
        yield
    except TookTooLong:
        arrived = True
        raise
    finally:
        if _deadlines.pop(thread, None) is None and not arrived:
            for _ in range(100):  # it is on its way, and must not arrive behind this block
                time.sleep(0.01)


def _end_late_ones() -> None:
    """Raise TookTooLong in threads that are past their deadline. This takes no lock: an exception
    between two instructions would leave it closed."""
    while True:
        time.sleep(_CHECK_SECONDS)
        for thread, deadline in list(_deadlines.items()):
            if time.monotonic() > deadline and _deadlines.pop(thread, None) is not None:
                raised = ctypes.py_object(TookTooLong)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
