"""math-verify in a process of its own.

Sympy can hang, or eat all memory, on an expression that a model made up (`9^{9^{9^9}}`), inside C
code that no signal interrupts. So the comparison runs in a child process that is killed when
it does not answer in time, and started again for the next one. A child, not a thread:
math-verify's own limits use SIGALRM, which works in a main thread only. The child is started as
`python -m`, so that neither a fork of a torch process nor a second run of the caller's main
module is involved.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from vocagnolm.errors import MissingExtraError

TIMEOUT_SECONDS = 8.0
_START_SECONDS = 120.0  # importing sympy on a busy machine
_MEMORY_BYTES = 4 << 30


class Verifier:
    """Asks the child process; a timeout or a crash is "not equal"."""

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()

    def equal(self, found: str, gold: str, tolerance: float = 0.0) -> bool:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([found, gold, tolerance]) + "\n")
                process.stdin.flush()
                line = self._answers.get(timeout=self.timeout_seconds)
            except (queue.Empty, OSError):
                line = None
            if line is None:
                self._kill()
                return False
            return bool(json.loads(line))

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError("math-verify", "eval", "Grading LaTeX answers (task 'math')")
        source = str(Path(__file__).parents[3])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
        process = subprocess.Popen(
            [sys.executable, "-m", "vocagnolm.evaluate.graders.verifier"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        )
        answers: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                answers.put(line)
            answers.put(None)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        self._process, self._answers = process, answers
        try:
            ready = answers.get(timeout=_START_SECONDS)
        except queue.Empty:
            ready = None
        if ready is None:
            self._kill()
            raise RuntimeError("the math-verify process did not start")
        return process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._reader is not None:
                self._reader.join()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # unwritten input of a process that is gone
                        pipe.close()
            self._process = None


_shared: Verifier | None = None


def verify_latex(found: str, gold: str, *, tolerance: float = 0.0) -> bool:
    """Whether two LaTeX expressions are equal, as far as math-verify can tell in time, or are
    numbers that differ by less than the relative tolerance."""
    global _shared
    if _shared is None:
        _shared = Verifier()
        atexit.register(_shared.close)
    return _shared.equal(found, gold, tolerance)


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # not on this platform: the time limit remains
        pass


def _serve() -> None:
    """The child: one JSON triple a line in, one JSON boolean a line out."""
    _limit_memory()
    import logging
    import math

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer

    def reply(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    reply("ready")
    for line in sys.stdin:
        found, gold, tolerance = json.loads(line)
        try:
            parsed = [parse(f"${text}$", parsing_timeout=3) for text in (gold, found)]
            equal = all(parsed) and verify(parsed[0], parsed[1], timeout_seconds=3)
            if not equal and tolerance:
                gold_value, value = (float(some[0].evalf()) for some in parsed)
                equal = math.isclose(gold_value, value, rel_tol=tolerance)
        except Exception:  # sympy raises of all kinds on odd input: then they are not equal
            equal = False
        reply(bool(equal))


if __name__ == "__main__":
    _serve()
