"""When are two LaTeX answers the same? One spelling first, then math-verify."""

import re

from vocagnolm.evaluate.graders.clauses import delatex
from vocagnolm.evaluate.graders.numbers import Number, parse_number, plain, same_number
from vocagnolm.evaluate.graders.text_answer import canonical_text
from vocagnolm.evaluate.graders.verifier import verify_latex

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
