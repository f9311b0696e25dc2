"""Answers that are option letters."""

import re

from vocagnolm.evaluate.graders.clauses import (
    LONGEST_ANSWER,
    Ambiguous,
    ClauseKind,
    clauses,
    cut_continuation,
    delatex,
    last_sentence,
)

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
    if "\n" in text or len(text.split()) > 12 or len(text) > LONGEST_ANSWER:
        return None
    text = delatex(text)
    whole = re.match(rf"(?:[\(\[]\s*([{letters}])\s*[\)\]]|([{letters}])(?=\s*$|[).:]))", text)
    if whole and not re.match(
        r"\W*(?:is|are|was|has|would|cannot|can|and|or)\b", text[whole.end() :]
    ):
        return whole[1] or whole[2]
    return None
