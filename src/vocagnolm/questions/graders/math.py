"""Whether two LaTeX expressions are equal: math-verify extracts and compares them.

math-verify runs in a child process that the system ends after some seconds of computing time, so
that a hanging expression is a wrong answer and not a hanging evaluation, on a busy machine as on an
idle one. What math-verify reads wrongly (`2√3` as 2, `1000(26)` as 1026, `no` as n*o) is rewritten
or settled before it is asked.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from vocagnolm.errors import MissingExtraError
from vocagnolm.questions.graders.answers import (
    MATH_SPAN,
    Number,
    canonical_text,
    delatex,
    parse_number,
    plain,
    same_number,
)

TIMEOUT_SECONDS = 8.0  # of computing
_PATIENCE = 30  # a busy machine may need so many times longer
_START_SECONDS = 120.0  # importing sympy on a busy machine
_MEMORY_BYTES = 4 << 30


class Verifier:
    """Asks the child process; a timeout or a crash is "not equal"."""

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, answer: str, gold: str, tolerance: float = 0.0) -> bool:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([answer, gold, tolerance]) + "\n")
                process.stdin.flush()
                line = self._answer(process, self.timeout_seconds * _PATIENCE)
            except OSError:
                line = ""
            if not line:
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
        program = f"import {__name__} as m; m._serve({self.timeout_seconds})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        )
        if not self._answer(self._process, _START_SECONDS):
            self._kill()
            raise RuntimeError("the math-verify process did not start")
        return self._process

    def _answer(self, process: "subprocess.Popen[str]", seconds: float) -> str:
        """The child's next line; empty where it ended, or was ended after so many seconds."""
        assert process.stdout is not None
        watch = threading.Timer(seconds, process.kill)
        watch.daemon = True
        watch.start()
        try:
            return process.stdout.readline()
        finally:
            watch.cancel()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # unwritten input of a process that is gone
                        pipe.close()
            self._process = None


_shared: Verifier | None = None


def verify_latex(answer: str, gold: str, *, tolerance: float = 0.0) -> bool:
    """Whether two LaTeX expressions are equal, as far as math-verify can tell in time, or are
    numbers that differ by less than the relative tolerance."""
    global _shared
    if _shared is None:
        _shared = Verifier()
        atexit.register(_shared.close)
    return _shared.equal(answer, gold, tolerance)


def _limit(seconds: float) -> None:
    """End this process when it has computed for so long, even in the middle of one product."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _serve(seconds: float) -> None:
    """Serve comparisons in the child process: one JSON triple a line in, one JSON boolean a line
    out."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    import logging
    import math

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer

    def reply(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    def number(parsed: list[Any]) -> float | None:
        with contextlib.suppress(Exception):  # of several kinds, where it is no number
            return float(parsed[0].evalf())
        return None

    def equal(answer: str, gold: str, tolerance: float) -> bool:
        theirs, ours = (parse(_as_formula(text), parsing_timeout=None) for text in (answer, gold))
        if not theirs or not ours:
            return False
        value = number(ours)
        digits = 6
        if not tolerance and value and abs(value) < 1:  # six digits that count
            digits -= math.floor(math.log10(abs(value))) + 1
        both = {"float_rounding": digits, "timeout_seconds": None}
        if verify(ours, theirs, **both) or (
            re.search(r"[<>]|\\[lg]e", answer)
            and not tolerance
            and verify(ours, theirs, **both, allow_set_relation_comp=True)
        ):
            return tolerance > 0 or value != 0 or number(theirs) in (None, 0)
        guess = number(theirs) if tolerance else None
        known = value is not None and guess is not None
        return known and math.isclose(value or 0, guess or 0, rel_tol=tolerance)

    reply("ready")
    for line in sys.stdin:
        _limit(seconds)
        try:
            result = equal(*json.loads(line))
        except Exception:  # sympy raises of all kinds on odd input: then they are not equal
            result = False
        _limit(0)
        reply(result)


def _as_formula(text: str) -> str:
    return text if MATH_SPAN.search(text) else f"${text}$"


# ---- the same answer ----


UNICODE_TO_LATEX = str.maketrans({
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ", "²": "^2", "³": "^3",
    "θ": r"\theta ", "ℝ": r"\mathbb{R}", "∅": r"\emptyset ",
})  # fmt: skip
# 1000(26), (2)(3): math-verify wants a sign there; not \log_2(8), \sin^2(1)
NO_SIGN = re.compile(r"(?<=[\d)])(?<![_^]\d)(?<![_^]\d\d)\s*(?=\(\s*-?[\d.]+\s*\))")
_SUBSTITUTIONS = [
    (re.compile(r"√\s*(\d+|\{[^{}]*\}|\([^()]*\)|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:mathrm|text|rm|operatorname)\s*\{\s*([A-Za-z])\s*\}"), r"{\1}"),
    (re.compile(r"\s+\(\s*[A-Za-z]{3,}(?:\s+[A-Za-z]+)*\s*\)$"), ""),  # 9 (apples)
    (NO_SIGN, r" \\cdot "),
]
_PAIR = re.compile(r"[(\[][^()\[\]]*(?:\([^()\[\]]*\)[^()\[\]]*)*[)\]]")
_EXPLAINED = re.compile(r"(-?[\d.]+) \(([^()=]*\d ?[-+*/] ?[^()=]*)\)")  # 18 (9 + 9)


def readable_math(text: str) -> str:
    """A formula in which what math-verify reads wrongly is rewritten."""
    text = plain(text).strip().rstrip(".").strip()
    if "matrix" not in text and "array" not in text:  # there, two backslashes end a row
        text = re.sub(r"\\\\(?=[A-Za-z()\[\]])", r"\\", text)
    text = text.translate(UNICODE_TO_LATEX)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return text.strip()


def _number(text: str) -> Number | None:
    if re.search(r"[(){}\[\]]", text) and "\\frac" not in text and "\\text" not in text:
        return None
    return parse_number(delatex(text))


def _is_words(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z]{2,}(?:[\s,'-]+[A-Za-z]+)*", text))


def same_math(answer: str, gold: str, rounds: bool = False) -> bool:
    """Whether two answers are equal as mathematics: numbers exactly (or, with `rounds`, by
    rounding), words as words, and everything else as math-verify says."""
    a, b = readable_math(answer), readable_math(gold)
    b = re.sub(r"^\$?\s*(?:\\approx|≈)\s*", "", b)
    explained = _EXPLAINED.fullmatch(a)
    if explained and verify_latex(explained[2], explained[1]):
        a = explained[1]
    x, y = _number(a), _number(b)
    if x is not None and y is not None:
        return same_number(x, y, rounds)
    words = canonical_text(delatex(a)), canonical_text(delatex(b))
    if any(map(_is_words, words)):  # sympy would read `no` as n*o, equal to `on`
        return words[0] == words[1]
    if _PAIR.fullmatch(a.strip("$ ")) and "," in _PAIR.sub("", b):
        return False  # an ordered pair or an interval is no list of solutions
    return bool(a) and same_base(a, b) and verify_latex(a, b)


def same_base(a: str, b: str) -> bool:
    """Whether no two different bases are named: `52_8` and `52_9` are not in the same base."""
    bases = {base[1] for text in (a, b) if (base := re.search(r"_\{?(\d+)\}?\$?$", text))}
    return len(bases) < 2
