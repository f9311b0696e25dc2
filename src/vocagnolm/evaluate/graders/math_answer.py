"""Answers that are LaTeX expressions, as they were written."""

import re
from itertools import pairwise

from vocagnolm.evaluate.graders.clauses import (
    LONGEST_ANSWER,
    MATH_SPAN,
    Ambiguous,
    ClauseKind,
    breaks_off,
    clauses,
    cut_continuation,
    delatex,
    last_sentence,
    may_be_cut,
)
from vocagnolm.evaluate.graders.numbers import NUMBER

_LIST_WORDS = (",", "and", "or", ",and", ",or")


def math_in_clause(clause: str, kind: ClauseKind) -> str | None:
    """The expression a clause states: its formula, its number, or a short phrase."""
    text = clause.strip()
    if kind in ("boxed", "hash"):
        return text.strip("$ ") or None
    text = text.partition("I hope")[0].strip().strip("*_").strip()
    spans = [m for m in MATH_SPAN.finditer(text) if not _prose(_content(m))]
    if spans and (spans[0].start() == 0 or len(spans) == 1):
        joined = spans[:1]
        # "$2$ and $3$", "$2$, $3$": a list
        for before, after in pairwise(spans):
            if joined[-1] is not before:
                break
            if text[before.end() : after.start()].replace(" ", "") in _LIST_WORDS:
                joined.append(after)
        return ", ".join(_content(m) for m in joined)
    if len(spans) > 1:
        raise Ambiguous
    bare = text.strip("$ ").rstrip(".")
    if re.match(r"(?:correct|right|wrong|incorrect|not|unknown|the same)\b", bare):
        return None
    if kind == "said" and _prose(bare):
        numbers = list(NUMBER.finditer(delatex(bare)))
        return numbers[0][0].strip() if len(numbers) == 1 else None
    return None if _prose(bare) else bare or None


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _prose(text: str) -> bool:
    """More than a formula with a unit or a name: three or more words outside of commands."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    return len(re.findall(r"[A-Za-z]{2,}", text)) > 3


def extract_math(output: str, complete: bool | None = None) -> str | None:
    """The expression the output gives as its answer, as it was written, or None. `complete`: as
    for `extract_number`."""
    text = cut_continuation(output)
    cut = may_be_cut(output, text, complete)
    stated = clauses(text)
    if complete is False and cut and breaks_off(text, stated, known=True):
        return None
    for clause in reversed(stated):
        try:
            answer = math_in_clause(clause.text, clause.kind)
        except Ambiguous:
            return None
        if answer:
            return answer
        if clause.kind == "boxed":
            return None
    return _math_of_last_sentence(text, cut)


def _math_of_last_sentence(text: str, cut: bool) -> str | None:
    sentence, complete = last_sentence(text)
    spans = [_content(m) for m in MATH_SPAN.finditer(sentence)]
    if len(spans) == 1 and complete and not sentence.endswith("?"):
        return spans[0].rpartition("=")[2].strip() or None
    if spans:
        return None
    # the output is the bare value
    if (
        len(text) <= LONGEST_ANSWER
        and len(text.split()) <= 4
        and re.fullmatch(r"(?=.*[\d\\])[\w\s\\{}()\[\].,^+*/=<>|-]+", text)
    ):
        return text.strip().rstrip(".") or None
    numbers = [m[0].strip() for m in NUMBER.finditer(delatex(sentence).rpartition("=")[2])]
    ends = complete or ("=" in sentence and not cut)
    return numbers[0] if len(numbers) == 1 and ends and not sentence.endswith("?") else None
