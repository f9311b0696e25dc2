"""Answers that are numbers. Standard library only."""

import re
from fractions import Fraction
from math import prod

from vocagnolm.evaluate.graders.clauses import (
    Ambiguous,
    ClauseKind,
    breaks_off,
    clauses,
    cut_continuation,
    delatex,
    last_sentence,
    may_be_cut,
)
from vocagnolm.evaluate.graders.numbers import (
    NUMBER,
    NUMBER_WORD,
    Number,
    number_in_words,
    number_of,
    parse_number,
)

_NEGATION = re.compile(
    r"\b(?:not|isn't|neither|nor|none|unknown|undetermined|cannot|can't|impossible)\b",
    re.IGNORECASE,
)
_RESULT_WORD = re.compile(r".*\b(?:which\s+is|that\s+is|i\.e\.|equals|equal\s+to|or\s+simply)\b")
_GOES_ON = re.compile(
    r"\(|\s+\(\s*[-+]?[\d.,]+\s*\)"
    r"|\s*(?:[-+*/x^:]\s*[$(]?[\d(]|(?:of|to|or|and|times|plus|minus|divided\s+by|out\s+of)\s+[$(]?\d"
    r"|dozens?\b)|.*\b(?:and|or)\b[^.]*\d"
)


_FACTOR = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_PRODUCT = re.compile(rf"(?:{_FACTOR}|\(\s*{_FACTOR}\s*\))(?:\(\s*{_FACTOR}\s*\))+(?![\d(])")


def _product_at(text: str) -> tuple[Number | None, int]:
    """The value of `1000(26)` or `(2)(3)(4)` at the start of the text, and where it ends."""
    match = _PRODUCT.match(text)
    factors = [parse_number(f) for f in re.findall(_FACTOR, match[0])] if match else []
    if match is None or None in factors:
        return None, 0
    known = [f for f in factors if f is not None]
    value = prod((f.value for f in known), start=Fraction(1))
    return Number(value, decimals=sum(f.decimals for f in known)), match.end()


def _without_remark(match: re.Match[str]) -> str:
    """`15 (3 x 5)` and `15(dollars)` without the bracket. Right after a number, a number in
    brackets is a factor, and a calculation could be one: they stay."""
    space, inside = match.groups()
    words = re.search(r"[A-Za-z]{2,}", inside)
    after_number = match.string[match.start() - 1].isdigit()
    remark = not after_number or words or (space and parse_number(inside) is None)
    return " " if remark else match[0]


def number_in_clause(clause: str, kind: ClauseKind) -> Number | None:
    """The number a clause states. Raises `Ambiguous` where it could be read in two ways."""
    text = delatex(clause)
    text = re.sub(r"(?<=[\w%])(\s*)\(([^()]*)\)", _without_remark, text)
    text = re.sub(r"^(?:\W*\b(?:about|approximately|around|only|a total of|about)\b)+\s*", "", text)
    if _NEGATION.search(text):
        raise Ambiguous
    if "=" in text:
        text = text.rpartition("=")[2].strip()
    elif result := _RESULT_WORD.match(text):
        text = text[result.end() :].strip(" ,:")
    text = text.lstrip("*_\"': ")
    product, end = _product_at(text)
    if product is not None:
        if _GOES_ON.match(text[end:]):
            raise Ambiguous
        return product
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
