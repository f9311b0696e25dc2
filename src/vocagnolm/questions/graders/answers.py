"""Find the answer in what a model wrote: a number, an option letter, a short text or a formula.

One rule above all: no answer is better than a wrong one. An answer counts when the text says
that it is the answer (`#### 18`, `\\boxed{18}`, "The answer is 18") or, failing that, when the
last complete sentence can be read in one way only. Everything else is "no answer", and is
counted apart.

Numbers are exact (`Fraction`), as people and language models write them: `$1,234.50`, `−5`, `3/4`,
`1½`, `10\\%`. What a formula is worth is math-verify's to say (`graders.math`).

A model may write anything, so reading takes time in proportion to the text: what runs over a whole
text does not go back, and what is read closely is short. Standard library only.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Literal

# ---- numbers ----

_DASHES = "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d"
_SPACES = "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000"
_PLAIN = str.maketrans(
    {
        **dict.fromkeys(_DASHES, "-"),
        **dict.fromkeys(_SPACES, " "),
        **dict.fromkeys("\u200b\ufeff"),  # without width
        **dict.fromkeys("\u00d7\u22c5\u00b7", "*"),
        **dict.fromkeys("\u2018\u2019", "'"),
        **dict.fromkeys("\u201c\u201d", '"'),
        "\u2044": "/",
        "\uff05": "%",
    }
)
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5",
    "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip


def plain(text: str) -> str:
    """Unicode variants of minus, space, percent, quote and fraction signs as ASCII."""
    text = text.translate(_PLAIN)
    for sign, fraction in _VULGAR.items():
        if sign in text:
            text = re.sub(rf"(?<=\d)\s*{sign}", f" {fraction}", text).replace(sign, fraction)
    return text


@dataclass(frozen=True)
class Number:
    value: Fraction
    percent: bool = False  # written with a percent sign: `value` is the figure before it
    decimals: int = 0  # digits after the point, as written

    def __str__(self) -> str:
        sign = "%" if self.percent else ""
        if self.decimals == 0 or self.value.denominator == 1:
            return f"{self.value}{sign}"
        minus = "-" if self.value < 0 else ""
        digits = str(int(abs(self.value) * 10**self.decimals)).zfill(self.decimals + 1)
        whole, part = digits[: -self.decimals], digits[-self.decimals :].rstrip("0")
        return f"{minus}{whole}.{part}{sign}"


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_CURRENCY = r"(?:(?:US|USD|CA|A)?\s?[$€£¥₹]|USD|EUR|GBP|Rs\.?|rs\.?|Php|P(?=\d))"
# one number; the named groups tell mixed numbers, fractions, scientific and plain ones apart
NUMBER = re.compile(
    rf"""(?<![\w.,/^])(?<!\d:)(?P<sign>[-+]\s?)?(?:{_CURRENCY}\s?)?(?P<sign2>-)?
    (?:
      (?P<whole>\d+)(?:\s+|-|\s+and\s+)(?P<mixed_top>\d+)\s?/\s?(?P<mixed_bottom>\d+)
      | (?P<top>{_DECIMAL})\s?/\s?(?P<bottom>{_DECIMAL})
      | (?P<mantissa>{_DECIMAL})(?:\s?(?:\*|x)\s?10\s?\^\s?\{{?|[eE])
        (?P<exponent>[-+]?\d{{1,3}})\}}?
      | (?P<decimal>{_DECIMAL})
    )
    (?!\d|[.,:/^]\d|(?:st|nd|rd|th|[xyzn])\b)  # no part of a list, a time, a power, 3rd, 5x
    (?P<scale>\s(?:hundred|thousand|million|billion|trillion)\b)?
    (?P<percent>\s?%|\s?\bpercent\b|\s?\bper\s?cent\b)?""",
    re.VERBOSE,
)
_SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def number_of(match: re.Match[str]) -> Number | None:
    """The value of a `NUMBER` match; None when a denominator is zero or a model ran on."""
    if len(match[0]) > 200:
        return None

    def exact(name: str) -> Fraction:
        return Fraction(match[name].replace(",", ""))

    decimals = 0
    bottom = match["mixed_bottom"] or match["bottom"]
    if bottom is not None and not bottom.strip("0.,"):
        return None
    if match["mixed_bottom"] is not None:
        value = exact("whole") + exact("mixed_top") / exact("mixed_bottom")
    elif match["bottom"] is not None:
        value = exact("top") / exact("bottom")
    elif match["mantissa"] is not None:
        value = exact("mantissa") * Fraction(10) ** int(match["exponent"])
    else:
        value = exact("decimal")
        decimals = len(match["decimal"].partition(".")[2])
    if scale := match["scale"]:
        power = _SCALE[scale.strip()]
        value, decimals = value * 10**power, max(decimals - power, 0)
    if ("-" in (match["sign"] or "")) != (match["sign2"] is not None):
        value = -value
    return Number(value, match["percent"] is not None, decimals)


_UNITS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORD_VALUE = {word: value for value, word in enumerate(_UNITS)} | {
    word: 10 * value for value, word in enumerate(_TENS, start=2)
}
_WORD = "|".join(sorted([*_WORD_VALUE, "hundred", "thousand", "million"], key=len, reverse=True))
NUMBER_WORD = re.compile(rf"\b(?:{_WORD})(?:(?:\s+and\s+|[\s-]+)(?:{_WORD})\b)*\b", re.IGNORECASE)


def number_in_words(words: str) -> Number | None:
    """`one hundred and twenty-five` -> 125; None when the words do not make one number."""
    total = current = 0
    previous = 10**9
    for word in re.split(r"[\s-]+", words.lower().strip()):
        if word == "and":
            continue
        if word == "hundred":
            if current >= 100:
                return None
            current, previous = max(current, 1) * 100, 100
        elif word in ("thousand", "million"):
            total += max(current, 1) * 10 ** _SCALE[word]
            current, previous = 0, 10**9
        elif word in _WORD_VALUE:
            value = _WORD_VALUE[word]
            # `five six` and `twenty thirteen` are lists, not numbers
            if previous < 20 or (previous < 100 and value >= 10):
                return None
            current, previous = current + value, value
        else:
            return None
    return Number(Fraction(total + current))


def parse_number(text: str) -> Number | None:
    """The number that `text` is, as a whole; None when it is anything else."""
    text = plain(text).strip().strip("$").strip()
    if wrapped := re.fullmatch(r"(-?)\s*\(([^()]+)\)", text):  # -(1/3)
        inner = parse_number(wrapped[2])
        return replace(inner, value=-inner.value) if inner and wrapped[1] else inner
    match = NUMBER.fullmatch(text.removesuffix("."))
    if match is not None:
        return number_of(match)
    return number_in_words(text) if NUMBER_WORD.fullmatch(text) else None


def same_number(answer: Number, gold: Number, rounds: bool = False) -> bool:
    """Equal, allowing for what is a way of writing and not a different result.

    A percent sign may stand for the figure or for a hundredth of it. A repeating reference
    (0.6666666667) is matched to one part in a million and to a hundredth. With `rounds`, a decimal
    with more digits than the reference may round to it (5.375 for 5.38). An integer is exact: 17.6
    is not 18.
    """
    values = [answer.value, answer.value / 100] if answer.percent else [answer.value]
    golds = [gold.value, gold.value / 100] if gold.percent else [gold.value]
    rounds = rounds and answer.decimals > gold.decimals > 0
    return any(_close(v, g, gold.decimals if rounds else None) for v in values for g in golds)


def _close(value: Fraction, gold: Fraction, decimals: int | None) -> bool:
    if value == gold:
        return True
    if gold.denominator == 1:
        return abs(value - gold) <= Fraction(1, 10**6)
    if abs(value - gold) <= min(abs(gold) * Fraction(1, 10**6), Fraction(1, 100)):
        return True
    # half a unit of the reference's last digit, half upwards
    return decimals is not None and abs(value - gold) * 2 * 10**decimals <= 1


# ---- where a text states its answer ----

# the model goes on with the next example of the prompt's kind, or ends its turn
_CONTINUATION = re.compile(
    r"<\|(?:im_start|im_end|endoftext|end_of_text|eot_id)\|>|</s>|<eos>|<end_of_turn>"
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
    text = text.strip()
    closing = text.rfind("I hope")  # Minerva's last words
    if closing >= 0 and re.fullmatch(r"I hope (?:it|this) is correct\.?", text[closing:]):
        text = text[:closing].rstrip()
    return text


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
_LATEX_SPACE = re.compile(r"\\q?quad|\\text(?=\{)|\\[()\[\],;: ]|[$,{}\s]")
_AND = re.compile(r"(?:(?:[^.!?]{0,25} )?(?:and|or))?(?: ?[A-Za-z](?:_ ?\w+)? ?=)?")
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
    boxes: list[tuple[int, list[str]]] = []
    end = 0  # of the last box
    for match in _BOXED.finditer(text):
        if match.start() < end:  # a box in a box
            continue
        at = match.end()
        if text[at : at + 1] == "{":
            if at not in closing:  # cut off in the middle of the answer
                boxes.append((match.start(), [""]))
                continue
            content, after = text[at + 1 : closing[at]], closing[at] + 1
        else:
            bare = _BARE_BOX.match(text, at)
            if bare is None:
                continue
            content, after = bare[0], bare.end()
        # "\boxed{2} and \boxed{3}" is one answer in two boxes
        between = _LATEX_SPACE.sub(" ", text[end : min(match.start(), end + 100)]).split()
        near = end and match.start() - end <= 100 and _AND.fullmatch(" ".join(between))
        parts = boxes.pop()[1] if near else []
        parts.append(content)
        boxes.append((match.start(), parts))
        end = after
    return [Clause(start, "boxed", _short(", ".join(parts))) for start, parts in boxes]


def _short(answer: str) -> str:
    return answer if len(answer) <= LONGEST_ANSWER else ""


def _sentence(text: str, start: int) -> str:
    """From `start` to the end of the line or of the sentence, leaving `$...$` whole."""
    line = text[start : start + LONGEST_ANSWER].partition("\n")[0]
    if not line.strip():  # "The answer is:" and the value on the next line
        start += len(line)
        line = text[start : start + LONGEST_ANSWER].lstrip().partition("\n")[0]
    stop = _STOP.search(_shielded(line))
    return line[: stop.start()] if stop else line


def _shielded(text: str) -> str:
    """The text with its formulas blanked out."""
    return MATH_SPAN.sub(lambda m: "\0" * len(m[0]), text)


# `\(` and `\[` end at their closing one and hold no other
MATH_SPAN = re.compile(
    r"\$\$(?P<a>.+?)\$\$|(?<!\\)\$(?P<b>[^$\n]*?[^$\n\\])\$"
    r"|\\\((?P<c>(?:(?!\\[()]).)+)\\\)|\\\[(?P<d>(?:(?!\\[\[\]]).)+)\\\]",
    re.DOTALL,
)


def clauses(text: str, choice: bool = False) -> list[Clause]:
    """The clauses in which the text states an answer, in the order of the text. A bare heading
    ("Answer: ...") often opens the reasoning, so it counts only where nothing else does."""
    result = [Clause(m.start(), "hash", _short(m[1].strip())) for m in _HASH.finditer(text)]
    result += _boxed_clauses(text)
    result += _sentences_after(_SAID, "said", text)
    if choice:
        result += _sentences_after(_CHOICE_SAID, "said", text)
    result = result or _sentences_after(_HEADING, "heading", text)
    # "The answer is \boxed{5}": the box, not the words around it
    return sorted(result, key=lambda c: (c.start, c.kind == "boxed"))[-_MOST_CLAUSES:]


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
    text = MATH_SPAN.sub(lambda m: m[0].replace("\n", " "), text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "", False
    line = lines[-1]
    ends = [m.end() for m in _STOP.finditer(_shielded(line))]
    complete = bool(ends) and not line[ends[-1] :].strip("*_\"') ")
    begin = (ends[-2] if len(ends) > 1 else 0) if complete else (ends[-1] if ends else 0)
    return _short(line[begin:].strip()), complete


class Ambiguous(Exception):
    """The clause names several answers, or none on purpose; later places are not searched."""


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


# ---- answers that are short text ----


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
    """A short answer in one spelling: `The 60th caller.` -> `60th caller`; `2:35 P.M.` -> `2:35pm`;
    `3 : 4` -> `3:4`."""
    text = plain(text).strip().strip("\"'*_.,;! ").casefold()
    text = re.sub(r"\b([ap])\.?\s?m\b\.?", r"\1m", text)
    text = re.sub(r"(?<=\d)\s*:\s*(?=\d)", ":", text)
    text = re.sub(r"(?<=\d)\s+(?=[ap]m\b)", "", text)
    text = _ARTICLE.sub("", text)
    return re.sub(r"[^\w:/%.+-]+", " ", text).strip(" .")


def same_text(answer: str, gold: str) -> bool:
    """Whether two short texts are equal; what follows a comma or a "because" is explanation."""
    wanted = canonical_text(gold)
    short = re.split(r",|;|\(|\b(?:because|since|as|with)\b", answer, maxsplit=1)[0]
    if wanted in {canonical_text(answer), canonical_text(short)}:
        return True
    ratio = re.fullmatch(r"(\d+)\s*(?::|to|/)\s*(\d+)", canonical_text(answer))
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
    try:
        for clause in reversed(clauses(text, choice=True)):
            if letter := letter_in_clause(clause.text, letters, clause.kind):
                return letter
    except Ambiguous:
        return None
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
    try:
        for clause in reversed(stated):
            number = number_in_clause(clause.text, clause.kind)
            if number is not None or clause.kind == "boxed":  # chosen by the model, if no number
                return number
    except Ambiguous:
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
    numbers = [number_of(m) for m in NUMBER.finditer(words)]
    distinct = {(n.value, n.percent) for n in numbers if n is not None}
    if len(distinct) != 1 or not (complete or short):
        return None
    return next(n for n in numbers if n is not None)


# ---- answers that are LaTeX expressions, as they were written ----


_BARE_MATH = re.compile(r"(?=.*[\d\\])[\w\s\\{}()\[\].,^+*/=<>|-]+")
_LIST_WORDS = (",", "and", "or", ",and", ",or")
_CONCLUSION = re.compile(
    r"(?:\b(?:is|are|equals|be|by)\b|'s\b)(?:\s+(?:about|just|simply|thus))*:?\s"
)
_DENIED = re.compile(r"(?:\bnot|\bcannot|n't)\s+\w+:?\s+$")
_IS_ANSWER = re.compile(r"\s+(?:is|are)\s+(?:our|the|my)\s+(?:final\s+|correct\s+)?answers?\b")
# "12 square units", "7, because they play"; not "2 pi", "5 or 6"
_UNIT = re.compile(r"[\s,]+(?!(?:pi|sqrt|sin|cos|tan|log|ln|or|and|to)\b)[A-Za-z]{2,}[^\d=+*/\\]*")
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b)")


def math_in_clause(clause: str, kind: ClauseKind) -> str | None:
    """The expression a clause states: its formulas, its number, or a short phrase."""
    if kind in ("boxed", "hash"):
        return clause.strip("$ ") or None
    text = clause.strip().strip('*_"').strip()
    formulas = _formulas(text)
    if formulas and text.startswith(formulas[0]):
        return formulas[0]
    if _prose(text) or _CONCLUSION.search(_shielded(text)):
        return _concluded(text, ended=True)
    if len(formulas) > 1:
        raise Ambiguous
    bare = text.strip("$ ").rstrip(".")
    if re.match(r"(?:correct|right|wrong|incorrect|not|unknown|the same)\b", bare):
        return None
    number = NUMBER.match(words := delatex(bare))
    if number and _UNIT.fullmatch(words, number.end()):
        return number[0].strip()
    return formulas[0] if formulas else bare or None


def _formulas(text: str) -> list[str]:
    """The formulas of a text with what belongs to them; "$2$ and $3$" and "$2$, $3$" are each a
    single formula."""
    ranges: list[tuple[int, int]] = []
    for match in MATH_SPAN.finditer(text):
        if _prose(next(group for group in match.groups() if group is not None)):
            continue
        start, end = match.span()
        if percent := _PERCENT.match(text, end):
            end = percent.end()
        if ranges and text[ranges[-1][1] : start].replace(" ", "") in _LIST_WORDS:
            start = ranges.pop()[0]
        ranges.append((start, end))
    return [text[start:end] for start, end in ranges]


def _content(formula: str) -> str:
    """A text without the signs around it, where it is one formula and nothing else."""
    spans = list(MATH_SPAN.finditer(formula))
    if len(spans) == 1 and spans[0][0] == formula:
        formula = next(group for group in spans[0].groups() if group is not None)
    return formula.strip().rstrip(".,").strip()


def _prose(text: str) -> bool:
    """Whether a text is more than a formula with a unit or a name: three or more words outside of
    commands."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    return len(re.findall(r"[A-Za-z]{2,}", text)) > 3


def _concluded(sentence: str, ended: bool) -> str | None:
    """What a sentence comes to: its only formula or number, after the last "is" that has any. A
    sentence that did not end must end in it."""
    if verdict := _IS_ANSWER.search(sentence):
        sentence, ended = sentence[: verdict.start()], True
    starts = [0, *(m.end() for m in _CONCLUSION.finditer(_shielded(sentence)))]
    for start in reversed(starts):
        part = sentence[start:].strip()
        if _DENIED.search(sentence[:start]) or part.startswith("not "):
            return None
        if formulas := _formulas(part):
            single = len(formulas) == 1 and (start > 0 or len(MATH_SPAN.findall(formulas[0])) == 1)
            return formulas[0] if single and (ended or part.endswith(formulas[0])) else None
        words = delatex(part).rpartition("=")[2]
        if numbers := list(NUMBER.finditer(words)):
            single = len({parse_number(m[0]) for m in numbers}) == 1
            last = start > 0 and re.fullmatch(r"\s?\S{0,4}", words[numbers[-1].end() :])
            return numbers[0][0].strip() if single and (ended or last) else None
    return None


def extract_math(output: str, complete: bool | None = None) -> str | None:
    """The expression the output gives as its answer, as it was written, or None. `complete`: as
    for `extract_number`."""
    text = cut_continuation(output)
    cut = may_be_cut(output, text, complete)
    stated = clauses(text)
    if complete is False and cut and breaks_off(text, stated, known=True):
        return None
    try:
        for clause in reversed(stated):
            answer = math_in_clause(clause.text, clause.kind)
            if answer or clause.kind == "boxed":
                return _content(answer or "") or None
    except Ambiguous:
        return None
    return _content(_math_of_last_sentence(text, cut) or "") or None


def _math_of_last_sentence(text: str, cut: bool) -> str | None:
    bare = text.rstrip(".")
    if len(text) <= LONGEST_ANSWER and (
        _formulas(bare) == [bare]
        or (not cut and parse_number(delatex(bare)) is not None)
        or (not cut and len(text.split()) <= 4 and _BARE_MATH.fullmatch(text))
    ):
        return bare  # the output is the value alone
    sentence, complete = last_sentence(text)
    if sentence.endswith("?"):
        return None
    ended = complete or ("=" in sentence and not cut)
    return _concluded(sentence, ended) if ended or not cut else None
