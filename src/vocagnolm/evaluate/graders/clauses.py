"""Find the answer in what a model wrote.

One rule above all: no answer is better than a wrong one. An answer counts when the text says
that it is the answer (`#### 18`, `\\boxed{18}`, "The answer is 18") or, failing that, when the
last complete sentence can be read in one way only. Everything else is "no answer", and is
counted apart.

A model may write anything, so reading takes time in proportion to the text: what runs over a whole
text does not go back, and what is read closely is short. Standard library only.
"""

import re
from dataclasses import dataclass
from typing import Literal

from vocagnolm.evaluate.graders.numbers import plain

# the model goes on with the next example of the prompt's kind, or ends its turn
_CONTINUATION = re.compile(
    r"<\|(?:im_end|endoftext|end_of_text|eot_id)\|>|</s>|<eos>|<end_of_turn>"
    r"|(?:\n|(?<=[.!?] ))[ \t#*]*(?:Question|Problem|Q|Exercise|Instruction|User|Human)"
    r"\s*(?:\d+\s*)?:"
)
# No answer is longer, and no text states its answer more often: what is beyond is not read.
LONGEST_ANSWER = 1000
_MOST_CLAUSES = 100


def cut_continuation(output: str) -> str:
    """What belongs to this question: the text up to the next `Question:` or end marker."""
    text = output.lstrip()
    # a model may open by repeating the question, hence not at the very start
    match = _CONTINUATION.search(text, 1)
    text = text[: match.start()] if match else text
    # two blank lines part the examples of the prompt; before an answer they are only a wide gap
    marks = [m for pattern in _MARKS if (m := pattern.search(text))]
    if marks:
        first = min(m.start() + len(m[0].rstrip()) for m in marks)
        if gap := re.compile(r"\n\s*\n\s*\n").search(text, first):
            text = text[: gap.start()]
    return text.strip()


# The tightest limit on an answer's tokens in use: 256 in the suite, 192 in the studies. A token has
# at least one byte, so that a shorter text was ended by the model.
_TIGHTEST_LIMIT = 192


def may_be_cut(output: str, text: str, complete: bool | None) -> bool:
    """Whether `text`, the answer's part of `output`, may have been broken off at the limit, even
    in the middle of a number: nothing follows it, not even the end of its line, and the output is
    not complete, or as long as such outputs are where that is not known."""
    if complete is None:
        complete = len(text.encode(errors="replace")) < _TIGHTEST_LIMIT
    return not complete and output.rstrip(" ").endswith(text)


# --- where the text says that an answer comes -----------------------------------------------

ClauseKind = Literal["hash", "boxed", "said", "heading"]


@dataclass(frozen=True)
class Clause:
    start: int
    kind: ClauseKind
    text: str


_SAID = re.compile(
    r"\banswers?\b[*_]*(?:,?\s+(?:to|for|of|in)\b[^.\n:=]{0,80}?)?,?\s+"
    r"(?:is|are|was|will\s+be|would\s+be|should\s+be|must\s+be|equals|comes\s+(?:out\s+)?to)\b"
    r"(?:\s+(?:therefore|thus|then|just|simply|exactly|approximately|about|roughly|equal\s+to|"
    r"given\s+by|option|choice))*\s*[*_]*:?[*_]*\s*",
    re.IGNORECASE,
)
_CHOICE_SAID = re.compile(
    r"\b(?:choice|option)\b[*_]*(?:\s+(?:is|was|would\s+be|should\s+be|must\s+be)\b\s*[*_]*:?|\s*:)"
    r"[*_]*\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(r"\b(?:answer|ans)\b[*_]*\s*[:=][*_]*\s*", re.IGNORECASE)
_HASH = re.compile(r"####[ \t]*([^\n]*)")
_BOXED = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_BARE_BOX = re.compile(r"[^\s$.,;]+")
# a full stop that ends a sentence: not 3.5, not "p.m.", not "Mrs."
_STOP = re.compile(
    r"(?<!\\)(?<!\b[A-Za-z])(?<!\bMr)(?<!\bMs)(?<!\bDr)(?<!\bMrs)(?<!\bRs)[.!?](?=[\s*\"')]|$)"
)


_MARKS = (_HASH, _BOXED, _SAID, _CHOICE_SAID, _HEADING)


def closing_braces(text: str) -> dict[int, int]:
    """Position of every opening brace that is closed -> position of the brace that closes it."""
    closing = {}
    opened = []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def _boxed_clauses(text: str) -> list[Clause]:
    closing = closing_braces(text) if "box" in text else {}
    found: list[tuple[int, list[str]]] = []
    end = 0  # of the last box
    for match in _BOXED.finditer(text):
        if match.start() < end:  # a box in a box
            continue
        at = match.end()
        if text[at : at + 1] == "{":
            if at not in closing:  # cut off in the middle of the answer
                found.append((match.start(), [""]))
                continue
            content, after = text[at + 1 : closing[at]], closing[at] + 1
        else:
            bare = _BARE_BOX.match(text, at)
            if bare is None:
                continue
            content, after = bare[0], bare.end()
        # "\boxed{2} and \boxed{3}" is one answer in two boxes
        between = re.sub(r"\\text(?=\{)|[\s$,{}]", "", text[end : match.start()])
        parts = found.pop()[1] if end and between in ("", "and", "or") else []
        parts.append(content)
        found.append((match.start(), parts))
        end = after
    return [Clause(start, "boxed", _short(", ".join(parts))) for start, parts in found]


def _short(answer: str) -> str:
    return answer if len(answer) <= LONGEST_ANSWER else ""


def _sentence(text: str, start: int) -> str:
    """From `start` to the end of the line or of the sentence, leaving `$...$` whole."""
    line = text[start : start + LONGEST_ANSWER].partition("\n")[0]
    if not line.strip():  # "The answer is:" and the value on the next line
        start += len(line)
        line = text[start : start + LONGEST_ANSWER].lstrip().partition("\n")[0]
    shielded = MATH_SPAN.sub(lambda m: "\0" * len(m[0]), line)
    stop = _STOP.search(shielded)
    return line[: stop.start()] if stop else line


# `\(` and `\[` end at their closing one and hold no other
MATH_SPAN = re.compile(
    r"\$\$(?P<a>.+?)\$\$|(?<!\\)\$(?P<b>[^$\n]*?[^$\n\\])\$"
    r"|\\\((?P<c>(?:(?!\\[()]).)+)\\\)|\\\[(?P<d>(?:(?!\\[\[\]]).)+)\\\]",
    re.DOTALL,
)


def clauses(text: str, choice: bool = False) -> list[Clause]:
    """The places where the text states an answer, in the order of the text. A bare heading
    ("Answer: ...") often opens the reasoning, so it counts only where nothing else does."""
    found = [Clause(m.start(), "hash", _short(m[1].strip())) for m in _HASH.finditer(text)]
    found += _boxed_clauses(text)
    found += _sentences_after(_SAID, "said", text)
    if choice:
        found += _sentences_after(_CHOICE_SAID, "said", text)
    found = found or _sentences_after(_HEADING, "heading", text)
    # "The answer is \boxed{5}": the box, not the words around it
    return sorted(found, key=lambda c: (c.start, c.kind == "boxed"))[-_MOST_CLAUSES:]


def _sentences_after(mark: re.Pattern[str], kind: ClauseKind, text: str) -> list[Clause]:
    last = list(mark.finditer(text))[-_MOST_CLAUSES:]
    return [Clause(m.start(), kind, _sentence(text, m.end())) for m in last]


def breaks_off(text: str, stated: list[Clause], *, known: bool) -> bool:
    """Whether the last answer that a cut text states may be half a number: "The answer is 1,190,"
    and, where the cut is `known`, "The answer is 1,190" too."""
    last = stated[-1].text if stated else ""
    half = re.fullmatch(r"\W*+[\d,]+,", last) or (known and re.search(r"\d$", last))
    return bool(half) and text.endswith(last)


def last_sentence(text: str) -> tuple[str, bool]:
    """The last sentence and whether it is complete (ends in a full stop)."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "", False
    line = lines[-1]
    shielded = MATH_SPAN.sub(lambda m: "\0" * len(m[0]), line)
    ends = [m.end() for m in _STOP.finditer(shielded)]
    complete = bool(ends) and not line[ends[-1] :].strip("*_\"') ")
    begin = (ends[-2] if len(ends) > 1 else 0) if complete else (ends[-1] if ends else 0)
    return _short(line[begin:].strip()), complete


# --- what a clause says ---------------------------------------------------------------------


class Ambiguous(Exception):
    """The clause names several answers, or none on purpose: do not look further."""


_LATEX_TO_PLAIN = [
    (re.compile(r"\\[dtc]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}"), r" \1/\2"),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r" \1/\2"),
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\boxed\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!\s?|(?<=\d)\\[,;: ](?=\d{3})"), ""),
    (re.compile(r"\\[,;: ]|~|\\quad|\\qquad"), " "),
    (re.compile(r"(?<!\s)\s*\\(?:times|cdot)(?![a-z])\s*"), " * "),
    (re.compile(r"\\div(?![a-z])"), " / "),
    (re.compile(r"\^\s*\{?\\circ\}?|\\degree|°"), " degrees"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\\$|\$|\\[()\[\]]|\\left|\\right|\*\*|__|`"), ""),
    (re.compile(r"(?<=\d) (?=\d{3}(?:\D|$))(?!\d{3}\s?/)"), ""),  # 1 234 567
]


def delatex(text: str) -> str:
    """LaTeX and Markdown around a number as plain text; money and math dollars go."""
    text = plain(text)
    for pattern, replacement in _LATEX_TO_PLAIN:
        text = pattern.sub(replacement, text)
    return text.strip().strip("*_").strip()
