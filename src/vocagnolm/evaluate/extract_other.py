"""Answers that are not numbers: option letters, LaTeX expressions, short text."""

import re
from itertools import pairwise

from vocagnolm.evaluate.extract import (
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
from vocagnolm.evaluate.numbers import NUMBER

_NOT_THIS = re.compile(r"\b(?:not|neither|nor|none|isn't|either|wrong|incorrect)\b", re.IGNORECASE)


def letter_in_clause(clause: str, letters: str, kind: ClauseKind) -> str | None:
    """The option a clause names. Raises `Ambiguous` where it names several or denies one."""
    both = letters + letters.lower()
    text = delatex(clause).lstrip("*_\"': ")
    text = re.sub(r"^(?:option|choice|answer|letter)\s+", "", text, flags=re.IGNORECASE)
    leading = re.match(
        rf"(?:[\(\[]\s*([{both}])\s*[\)\]]|([{both}])\s?\)|([{letters}])(?=\s*$|[.,:;]|\s)"
        rf"|([{letters.lower()}])(?=\s*[.,;]?\s*$))",
        text,
    )
    if leading:
        rest = text[leading.end() :]
        bare = leading[3]
        # "A square has ...": an article, not an option
        prose = re.match(r"\s+(?!(?:because|since|as|which|for|by|with|is|\()\b)[a-z]", rest)
        if not (bare == "A" and prose):
            if re.match(
                rf"\s*(?:,|or|and|/|nor)\s*(?:option\s+)?[\(\[]?[{letters}][\)\]]?(?!\w)", rest
            ):
                raise Ambiguous
            return next(group for group in leading.groups() if group).upper()
    if kind in ("boxed", "hash"):
        return None
    named = {
        (m[1] or m[2]).upper()
        for m in re.finditer(
            rf"(?<![\w\\])[\(\[]([{both}])[\)\]]|\b(?:option|choice)\s+([{both}])(?!\w)",
            text,
            re.IGNORECASE,
        )
    }
    if len(named) > 1 or (named and _NOT_THIS.search(text)):
        raise Ambiguous
    return named.pop() if named and kind == "said" else None


def extract_choice(output: str, letters: str) -> str | None:
    """The option letter the output settles on, in capitals, or None."""
    text = cut_continuation(output)
    for clause in reversed(clauses(text, choice=True)):
        try:
            letter = letter_in_clause(clause.text, letters, clause.kind)
        except Ambiguous:
            return None
        if letter is not None:
            return letter
    sentence, _ = last_sentence(text)
    verdict = re.search(
        rf"(?<![\w\\])[\(\[]?([{letters}])[\)\]]?\s+is\s+(?:the\s+)?(?:correct|right|best)\b",
        sentence,
    )
    if verdict:
        return verdict[1]
    conclusion = re.fullmatch(
        rf"(?:so|thus|hence|therefore),?\s+(?:it\s+is\s+)?(?:(?:the\s+)?(?:option|choice|answer)\s+"
        rf"\(?([{letters}])\)?|\(([{letters}])\))\W*",
        sentence,
        re.IGNORECASE,
    )
    if conclusion:
        return (conclusion[1] or conclusion[2]).upper()
    # the output is the option itself: "B", "(B) 26", "C. 30"
    whole = re.match(
        rf"(?:[\(\[]\s*([{letters}])\s*[\)\]]|([{letters}])(?=\s*$|[).:]))", delatex(text)
    )
    if whole and "\n" not in text and len(text.split()) <= 12:
        rest = delatex(text)[whole.end() :]
        if not re.match(r"\W*(?:is|are|was|has|would|cannot|can|and|or)\b", rest):
            return whole[1] or whole[2]
    return None


def math_in_clause(clause: str, kind: ClauseKind) -> str | None:
    """The expression a clause states: its formula, its number, or a short phrase."""
    text = clause.strip()
    if kind in ("boxed", "hash"):
        return text.strip("$ ") or None
    text = re.sub(r"\s*I hope.*$", "", text).strip().strip("*_").strip()
    spans = [m for m in MATH_SPAN.finditer(text) if not _prose(_content(m))]
    if spans and (spans[0].start() == 0 or len(spans) == 1):
        joined = spans[:1]
        # "$2$ and $3$", "$2$, $3$": a list
        for before, after in pairwise(spans):
            if joined[-1] is not before:
                break
            if re.fullmatch(
                r"\s*(?:,\s*(?:and|or)?|and|or)\s*", text[before.end() : after.start()]
            ):
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
    if len(text.split()) <= 4 and re.fullmatch(r"(?=.*[\d\\])[\w\s\\{}()\[\].,^+*/=<>|-]+", text):
        return text.strip().rstrip(".") or None
    numbers = [m[0].strip() for m in NUMBER.finditer(delatex(sentence).rpartition("=")[2])]
    ends = complete or ("=" in sentence and not cut)
    return numbers[0] if len(numbers) == 1 and ends and not sentence.endswith("?") else None


def extract_text(output: str) -> str | None:
    """A short phrase given as the answer: "The answer is Luna." -> `Luna`."""
    text = cut_continuation(output)
    for clause in reversed(clauses(text)):
        phrase = re.sub(r"\s*I hope.*$", "", delatex(clause.text)).strip(" .\"'")
        if phrase:
            return phrase if len(phrase.split()) <= 40 else None
    # the output is the bare phrase
    bare = re.fullmatch(r"[\w :'.,/%-]+", text) and len(text.split()) <= 5
    return text.strip(" .") if bare else None
