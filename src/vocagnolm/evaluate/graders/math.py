"""Expressions: how LaTeX is read, and whether two expressions are equal."""

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from vocagnolm.errors import MissingExtraError
from vocagnolm.evaluate.graders.answers import canonical_text
from vocagnolm.evaluate.graders.clauses import delatex
from vocagnolm.evaluate.graders.numbers import Number, parse_number, plain, same_number

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
            [sys.executable, "-m", "vocagnolm.evaluate.graders.math"],
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


# ---- the same answer ----


_UNICODE_TO_LATEX = {
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ", "²": "^2", "³": "^3",
    "θ": r"\theta ", "ℝ": r"\mathbb{R}", "∅": r"\emptyset ",
}  # fmt: skip
_SUBSTITUTIONS = [
    (re.compile(r"√\s*(\d+|\{[^{}]*\}|\([^()]*\)|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\w)\s*(\w)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\w)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*(\w)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*(\w)"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:leq|leqslant)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\begin\{(?:[bvBV]?matrix|array)\}(?:\{[clr|]+\})?"), r"\\begin{pmatrix}"),
    (re.compile(r"\\end\{(?:[bvBV]?matrix|array)\}"), r"\\end{pmatrix}"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<!\\)\\!\s*"), ""),
    (re.compile(r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|\\degree"), ""),
    (re.compile(r"\\(?:text|mbox|mathrm|textrm)\s*\{\s*(?:and|or)\s*\}"), ","),
    (re.compile(r"(?<=[\w}\])$])\s+(?:and|or)\s+(?=[\w\\({\[$-])"), ", "),
    (re.compile(r"\\\$|(?<!\\)\$|(?<!\\)\\[()\[\]]"), ""),
]
# a unit after the value: \text{ cm}^2, \mathrm{miles}
_UNIT_COMMAND = re.compile(
    r"(?<=[\w})\]%])\s*\\(?:text|mbox|mathrm|textrm|operatorname)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*$"
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|mbox|mathrm|mathbf|textrm|boxed|mathit)\s*\{([^{}]*)\}"
)
_UNIT_WORDS = re.compile(
    r"^((?=.*\d)[-+\d.,/\s^%]++|(?:[-+\d.,/\s]|\\frac\{\d+\}\{\d+\}|\\sqrt\{\d+\}|\\pi)++)\s*"
    r"(?:[A-Za-z]{2,}(?:\s+[A-Za-z]+)*)(?:\s*\^\s*\{?\d\}?)?$"
)
_REMARK = re.compile(r"(?<=\d)\s+\([A-Za-z]{3,}(?:\s+[A-Za-z]+)*\)$")  # 9 (apples)
_EXPLAINED = re.compile(r"(-?[\d.]+) \(([^()=]*\d ?[-+*/] ?[^()=]*)\)")  # 18 (9 + 9)
# 1000(26), (2)(3): math-verify wants a sign there; not \log_2(8), \sin^2(1)
_NO_SIGN = re.compile(r"(?<=[\d)])(?<![_^]\d)(?<![_^]\d\d)\s*(?=\(\s*-?[\d.]+\s*\))")
_NAMED = re.compile(r"^\s*(?:[A-Za-z]|[A-Za-z]\([a-z]\))\s*(?:=|\\in(?![a-zA-Z]))\s*")


def canonical_math(text: str, words: bool = True) -> str:
    """One spelling for what LaTeX can write in many; degrees and `x =` go, and with `words` any
    that stand after a number."""
    text = plain(text).strip()
    for sign, command in _UNICODE_TO_LATEX.items():
        text = text.replace(sign, command)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".").strip()
    while (shorter := _UNIT_COMMAND.sub("", text)) not in ("", text):
        text = shorter.strip()
    text = _WRAPPER.sub(r"\1", text).strip()
    if words:
        text = _REMARK.sub("", text)
        if unit := _UNIT_WORDS.match(text):
            text = unit[1].strip()
    text = _NO_SIGN.sub(r" \\cdot ", text)
    if text.count("=") <= 1:
        text = _NAMED.sub("", text)
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\s?\d{3})+(?:\.\d+)?(?:\\?%)?", text):
        text = text.replace(",", "").replace(" ", "")
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)", text):
        text = text.strip("() ")
    return re.sub(r"\s+", " ", text).strip()


def _is_words(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z]{2,}(?:[\s,'-]+[A-Za-z]+)*", text))


def _number(text: str) -> Number | None:
    if re.search(r"[(){}\[\]]", text) and "\\frac" not in text:
        return None
    return parse_number(delatex(text))


def same_math(found: str, gold: str) -> bool:
    """Equal as mathematics. Plain cases are settled here; the rest goes to math-verify, in a
    process that may be killed."""
    a, b = canonical_math(found), canonical_math(gold)
    explained = _EXPLAINED.fullmatch(a)
    if explained and verify_latex(explained[2], explained[1]):
        a = explained[1]
    if not a:
        return False
    if a.replace(" ", "") == b.replace(" ", ""):
        return True
    x, y = _number(a), _number(b)
    if x is not None and y is not None:
        return same_number(x, y)
    if _is_words(a) or _is_words(b):  # sympy would read `no` as n*o, equal to `on`
        return canonical_text(a) == canonical_text(b)
    if _is_pair(a) != _is_pair(b) and ("," in a) and ("," in b):
        return False  # an ordered pair or an interval is no list of solutions
    return same_base(a, b) and verify_latex(a, b)


def same_base(a: str, b: str) -> bool:
    """False for `52_8` and `52_9`."""
    bases = {base[1] for text in (a, b) if (base := re.search(r"_\{?(\d+)\}?$", text))}
    return len(bases) < 2


def _is_pair(text: str) -> bool:
    return text[:1] in "([" and text[-1:] in ")]"
