"""What a text answers: a short text, an option letter, a number or an expression."""

import re
from fractions import Fraction
from itertools import pairwise
from math import prod

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
from vocagnolm.evaluate.graders.numbers import (
    NUMBER,
    NUMBER_WORD,
    Number,
    number_in_words,
    number_of,
    parse_number,
    plain,
)


def extract_text(output: str) -> str | None:
    """A short phrase given as the answer: "The answer is Luna." -> `Luna`."""
    text = cut_continuation(output)
    for clause in reversed(clauses(text)):
        phrase = delatex(clause.text).partition("I hope")[0].strip(" .\"'")
        if phrase:
            return phrase if len(phrase.split()) <= 40 else None
    # the output is the bare phrase
    bare = re.fullmatch(r"[\w :'.,/%-]+", text) and len(text.split()) <= 5
    return text.strip(" .") if bare else None


_ARTICLE = re.compile(r"^(?:the|a|an)\s+", re.IGNORECASE)


def canonical_text(text: str) -> str:
    """`The 60th caller.` -> `60th caller`; `2:35 P.M.` -> `2:35pm`; `3 : 4` -> `3:4`."""
    text = plain(text).strip().strip("\"'*_.,;! ").casefold()
    text = re.sub(r"\b([ap])\.?\s?m\b\.?", r"\1m", text)
    text = re.sub(r"(?<=\d)\s*:\s*(?=\d)", ":", text)
    text = re.sub(r"(?<=\d)\s+(?=[ap]m\b)", "", text)
    text = _ARTICLE.sub("", text)
    return re.sub(r"[^\w:/%.+-]+", " ", text).strip(" .")


def same_text(found: str, gold: str) -> bool:
    """Equal as short text; what follows a comma or a "because" is explanation."""
    wanted = canonical_text(gold)
    short = re.split(r",|;|\(|\b(?:because|since|as|with)\b", found, maxsplit=1)[0]
    if wanted in {canonical_text(found), canonical_text(short)}:
        return True
    ratio = re.fullmatch(r"(\d+)\s*(?::|to|/)\s*(\d+)", canonical_text(found))
    return ratio is not None and f"{ratio[1]}:{ratio[2]}" == wanted


# ---- answers that are option letters ----


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


# ---- answers that are numbers ----


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


# ---- answers that are LaTeX expressions, as they were written ----


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
