"""Find the answer in what a model wrote.

One rule above all: no answer is better than a wrong one. An answer counts when the text says
that it is the answer (`#### 18`, `\\boxed{18}`, "The answer is 18") or, failing that, when the
last complete sentence can be read in one way only. Everything else is "no answer", and is
counted apart. Standard library only.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vocagnolm.evaluate.numbers import (
    NUMBER,
    NUMBER_WORD,
    Number,
    number_in_words,
    number_of,
    plain,
)

# the model goes on with the next example of the prompt's kind, or ends its turn
_CONTINUATION = re.compile(
    r"<\|(?:im_end|endoftext|end_of_text|eot_id)\|>|</s>|<eos>|<end_of_turn>"
    r"|(?:\n|(?<=[.!?] ))[ \t#*]*(?:Question|Problem|Q|Exercise|Instruction|User|Human)\s*\d*\s*:"
)


def cut_continuation(output: str) -> str:
    """What belongs to this question: the text up to the next `Question:` or end marker."""
    text = output.lstrip()
    # a model may open by repeating the question, hence not at the very start
    match = _CONTINUATION.search(text, 1)
    text = text[: match.start()] if match else text
    # two blank lines part the examples of the prompt; before an answer they are only a wide gap
    for gap in re.finditer(r"\n\s*\n\s*\n", text):
        if clauses(text[: gap.start()], choice=True):
            return text[: gap.start()].strip()
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
# a full stop that ends a sentence: not 3.5, not "p.m.", not "Mrs."
_STOP = re.compile(
    r"(?<!\\)(?<!\b[A-Za-z])(?<!\bMr)(?<!\bMs)(?<!\bDr)(?<!\bMrs)(?<!\bRs)[.!?](?=[\s*\"')]|$)"
)


def closing_brace(text: str, start: int) -> int | None:
    """Position of the brace that closes the one at `start`; None when it never closes."""
    depth = 0
    escaped = False
    for position in range(start, len(text)):
        if escaped:
            escaped = False
        elif text[position] == "\\":
            escaped = True
        elif text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    return None


def _boxed_clauses(text: str) -> Iterator[Clause]:
    previous: Clause | None = None
    previous_end = 0
    for match in _BOXED.finditer(text):
        if match.start() < previous_end:  # a box in a box
            continue
        at = match.end()
        if at < len(text) and text[at] == "{":
            end = closing_brace(text, at)
            if end is None:  # cut off in the middle of the answer
                yield Clause(match.start(), "boxed", "")
                continue
            content, end = text[at + 1 : end], end + 1
        else:
            bare = re.match(r"[^\s$.,;]+", text[at:])
            if bare is None:
                continue
            content, end = bare[0], at + bare.end()
        # "\boxed{2} and \boxed{3}" is one answer in two boxes
        between = text[previous_end : match.start()]
        if previous is not None and re.fullmatch(
            r"[\s$,]*(?:\\text\{)?\s*(?:and|or)?\s*\}?[\s$]*", between
        ):
            content = f"{previous.text}, {content}"
        previous, previous_end = Clause(match.start(), "boxed", content), end
        yield previous


def _sentence(text: str, start: int) -> str:
    """From `start` to the end of the line or of the sentence, leaving `$...$` whole."""
    line_end = text.find("\n", start)
    line = text[start : line_end if line_end >= 0 else len(text)]
    if not line.strip() and line_end >= 0:  # "The answer is:" and the value on the next line
        return _sentence(text, re.compile(r"\s*").match(text, line_end).end())  # type: ignore[union-attr]
    shielded = MATH_SPAN.sub(lambda m: "\0" * len(m[0]), line)
    stop = _STOP.search(shielded)
    return line[: stop.start()] if stop else line


MATH_SPAN = re.compile(
    r"\$\$(?P<a>.+?)\$\$|(?<!\\)\$(?P<b>[^$\n]*?[^$\n\\])\$|\\\((?P<c>.+?)\\\)|\\\[(?P<d>.+?)\\\]",
    re.DOTALL,
)


def clauses(text: str, choice: bool = False) -> list[Clause]:
    """Every place where the text states an answer, in the order of the text. A bare heading
    ("Answer: ...") often opens the reasoning, so it counts only where nothing else does."""
    found = [Clause(m.start(), "hash", m[1].strip()) for m in _HASH.finditer(text)]
    found += _boxed_clauses(text)
    said = list(_SAID.finditer(text)) + (list(_CHOICE_SAID.finditer(text)) if choice else [])
    found += [Clause(m.start(), "said", _sentence(text, m.end())) for m in said]
    if not found:
        headings = _HEADING.finditer(text)
        found = [Clause(m.start(), "heading", _sentence(text, m.end())) for m in headings]
    # "The answer is \boxed{5}": the box, not the words around it
    return sorted(found, key=lambda c: (c.start, c.kind == "boxed"))


# --- numbers --------------------------------------------------------------------------------


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
    (re.compile(r"\s*\\(?:times|cdot)(?![a-z])\s*"), " * "),
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


_NEGATION = re.compile(
    r"\b(?:not|isn't|neither|nor|none|unknown|undetermined|cannot|can't|impossible)\b",
    re.IGNORECASE,
)
_RESULT_WORD = re.compile(r".*\b(?:which\s+is|that\s+is|i\.e\.|equals|equal\s+to|or\s+simply)\b")
_GOES_ON = re.compile(
    r"\s*(?:[-+*/x^:]\s*[$(]?[\d(]|(?:of|to|or|and|times|plus|minus|divided\s+by|out\s+of)\s+[$(]?\d"
    r"|dozens?\b)|.*\b(?:and|or)\b[^.]*\d"
)


def number_in_clause(clause: str, kind: ClauseKind) -> Number | None:
    """The number a clause states. Raises `Ambiguous` where it could be read in two ways."""
    text = delatex(clause)
    text = re.sub(r"(?<=[\w%])\s*\([^()]*\)", "", text)  # 15 (3 x 5)
    text = re.sub(r"^(?:\W*\b(?:about|approximately|around|only|a total of|about)\b)+\s*", "", text)
    if _NEGATION.search(text):
        raise Ambiguous
    if "=" in text:
        text = text.rpartition("=")[2].strip()
    elif result := _RESULT_WORD.match(text):
        text = text[result.end() :].strip(" ,:")
    text = re.sub(r"^-\s*\(([^()]*)\)", r"-\1", text).lstrip("*_\"'(: ")
    match = NUMBER.match(text)
    number = number_of(match) if match else None
    if match is None and (match := NUMBER_WORD.match(text)):
        number = number_in_words(match[0])
    if match is not None:
        if _GOES_ON.match(text[match.end() :]):
            raise Ambiguous
        return number
    if kind != "said":  # a heading or a box starts with its value or has none
        return None
    values = {m: number_of(m) for m in NUMBER.finditer(text)}
    distinct = {(n.value, n.percent) for n in values.values() if n is not None}
    if len(distinct) > 1:
        raise Ambiguous
    return next((n for n in values.values() if n is not None), None)


def extract_number(output: str, complete: bool | None = None) -> Number | None:
    """The number the output gives as its answer, or None. `complete`: whether the model ended the
    output, as far as it is known."""
    text = cut_continuation(output)
    cut = may_be_cut(output, text, complete)
    stated = clauses(text)
    if cut and breaks_off(text, stated, known=complete is not None):
        return None
    for clause in reversed(stated):
        try:
            number = number_in_clause(clause.text, clause.kind)
        except Ambiguous:
            return None
        if number is not None:
            return number
        if clause.kind == "boxed":  # the model chose its answer, and it is no number
            return None
    return _number_of_last_sentence(text, cut)


def breaks_off(text: str, stated: list[Clause], *, known: bool) -> bool:
    """Whether the last answer that a cut text states may be half a number: "The answer is 1,190,"
    and, where the cut is `known`, "The answer is 1,190" too."""
    last = stated[-1].text if stated else ""
    half = re.fullmatch(r"\W*[\d,]+,", last) or (known and re.search(r"\d$", last))
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
    return line[begin:].strip(), complete


def _number_of_last_sentence(text: str, cut: bool) -> Number | None:
    """The protocol falls back to the last number of the output. We do so where the last sentence
    reads as a conclusion: it ends in `= number`, or it is complete and has one number only. With
    `cut`, a sentence that is not complete may have been broken off, and says nothing."""
    sentence, complete = last_sentence(text)
    if not sentence or sentence.rstrip("*_\"') ").endswith("?"):
        return None
    short = "\n" not in text.strip() and len(text.split()) <= 4 and sentence == text.strip()
    words = delatex(sentence)
    if _NEGATION.search(words):
        return None
    if "=" in words:
        words = words.rpartition("=")[2]
        complete = complete or (not cut and bool(re.search(r"\d", words)))
    found = [number_of(m) for m in NUMBER.finditer(words)]
    distinct = {(n.value, n.percent) for n in found if n is not None}
    if len(distinct) != 1 or not (complete or short):
        return None
    return next(n for n in found if n is not None)
