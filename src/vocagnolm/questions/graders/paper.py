"""Grading by the rules of the paper's harness (ZubinGou/math-evaluation-harness at dcfa46a).

The rules are its own, the words and the program are ours. They are laxer than our own grading in
places (the last number of any output counts, so do 0.18 and 1800 for 18, and an interval may be
open or closed) and harder in others: all that follows "the answer is" must be the answer.
Expressions go to math-verify, where the harness has sympy and latex2sympy2.
"""

import re
from fractions import Fraction

from vocagnolm.questions.graders.answers import (
    LONGEST_ANSWER,
    NUMBER_WORD,
    closing_braces,
    number_in_words,
    plain,
)
from vocagnolm.questions.graders.math import NO_SIGN, UNICODE_TO_LATEX, same_base, verify_latex

_TOLERANCE = Fraction(1, 10**4)  # relative
_LONGEST_NUMBER = 200  # digits
_PLAIN_NUMBER = r"-?\d*\.?\d+(?:e[-+]?\d{1,3})?|-?\d+/0*[1-9]\d*"
_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
# of the harness's 130 words, which it takes out wherever they stand, the measures
_UNITS = re.compile(
    r"(?<![\w\\])(?:mile|yard|feet|ft|inch|inche|metre|meter|mtr|km|cm|mm|dm"
    r"|acre|hectare|square|sq|cubic|cube|litre|liter|gallon|gal|kg|gm|lb"
    r"|second|sec|minute|min|hour|hr|day|month|year|yr|mph|kmph|kmh"
    r"|rupee|rs|degree|deg|percent|per|unit|apple|coin|men|women)s?(?!\w)"
)


def extract_letter(output: str) -> str | None:
    """The first letter after "answer is" or "choice is". Nothing else is tried."""
    text = output.partition("Problem:")[0].replace("choice is", "answer is").lower()
    match = re.search(r"answer is \(?([a-e])", text)
    return match[1].upper() if match else None


def extract_answer(output: str) -> str | None:
    """The first of these that the output has: Minerva's closing sentence, the last box, what
    follows the last "the answer is" to the very end, the last number."""
    text = output.strip()
    if "final answer is $" in text and "$. I hope" in text:
        answer = text.partition("final answer is $")[2].partition("$. I hope")[0]
    elif "boxed" in text:
        answer = _boxed(text.rpartition("boxed")[2])
    elif "he answer is" in text:
        answer = text.rpartition("he answer is")[2]
    elif "final answer is" in text:
        answer = text.rpartition("final answer is")[2]
    else:
        answer = (_LAST_NUMBER.findall(text.replace(",", "")) or [""])[-1]
    answer = "".join(line.strip() for line in answer.split("\n"))
    return answer.removeprefix(":").removesuffix(".").removesuffix("/").strip() or None


def _boxed(after: str) -> str:
    """The content of the last box; all that is left of a text that ends in an open box."""
    if after.startswith("{"):
        return after[1 : closing_braces(after).get(0)]
    return after.partition("$")[0]


def same_answer(answer: str, gold: str) -> bool:
    if len(answer) > LONGEST_ANSWER:
        return False
    return _same(_spelling(answer), _spelling(gold))


def _spelling(text: str) -> str:
    if "matrix" not in text and "array" not in text:  # there, two backslashes end a row
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # its examples teach `\\frac`
    without_units = _UNITS.sub("", text)
    text = canonical_math(without_units if without_units.strip() else text)
    return re.sub(r"\\?%", "", text).strip()


# ---- spelling ----


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
_NAMED = re.compile(r"^\s*(?:[A-Za-z]|[A-Za-z]\([a-z]\))\s*(?:=|\\in(?![a-zA-Z]))\s*")


def canonical_math(text: str) -> str:
    """One spelling for what LaTeX can write in many; degrees and `x =` go."""
    text = plain(text).strip().translate(UNICODE_TO_LATEX)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".").strip()
    while (shorter := _UNIT_COMMAND.sub("", text)) not in ("", text):
        text = shorter.strip()
    text = _WRAPPER.sub(r"\1", text).strip()
    text = NO_SIGN.sub(r" \\cdot ", text)
    if text.count("=") <= 1:
        text = _NAMED.sub("", text)
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\s?\d{3})+(?:\.\d+)?(?:\\?%)?", text):
        text = text.replace(",", "").replace(" ", "")
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)", text):
        text = text.strip("() ")
    return re.sub(r"\s+", " ", text).strip()


def _same(answer: str, gold: str) -> bool:
    if answer == gold:
        return True
    x, y = _number(answer), _number(gold)
    if x is not None and y is not None:
        return any(_close(x, y * scale) for scale in (Fraction(1, 100), 1, 100))
    if not answer:
        return False
    if _without_brackets(answer) == _without_brackets(gold):
        return True
    if _in_brackets(answer) and _in_brackets(gold):
        parts = answer[1:-1].split(","), gold[1:-1].split(",")
        if 1 < len(parts[0]) == len(parts[1]):
            return all(_same(a.strip(), b.strip()) for a, b in zip(*parts, strict=True))
    return _is_formula(answer, gold) and verify_latex(answer, gold, tolerance=float(_TOLERANCE))


def _number(text: str) -> Fraction | None:
    text = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text).replace(",", "")
    if len(text) <= _LONGEST_NUMBER and re.fullmatch(_PLAIN_NUMBER, text):
        return Fraction(text)
    words = None if re.search(r"\d", text) else NUMBER_WORD.search(text)
    number = number_in_words(words[0]) if words else None
    return None if number is None else number.value


def _is_formula(answer: str, gold: str) -> bool:
    """Whether there is anything to compute. A letter is never a number, a word, a time or a number
    in another base is no expression, and `9 * 2 = 18` is no `18`."""
    letters = re.findall(r"[A-Za-z]+", re.sub(r"\\[A-Za-z]+", " ", answer))
    if any(len(word) > 2 for word in letters) or (letters and _number(gold) is not None):
        return False
    return ":" not in answer and answer.count("=") == gold.count("=") and same_base(answer, gold)


def _close(value: Fraction, gold: Fraction) -> bool:
    return abs(value - gold) <= _TOLERANCE * max(abs(value), abs(gold))


def _without_brackets(text: str) -> str:
    return re.sub(r"[{}()\s]", "", text).lower()


def _in_brackets(text: str) -> bool:
    return text[:1] in ("(", "[") and text[-1:] in (")", "]")
