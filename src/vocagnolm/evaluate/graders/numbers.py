"""Numbers as people and language models write them: `$1,234.50`, `−5`, `3/4`, `1½`, `10\\%`.

Exact arithmetic on `Fraction`; nothing here guesses. Standard library only.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_DASHES = "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d"
_SPACES = "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000"
_PLAIN = str.maketrans(
    {
        **dict.fromkeys(_DASHES, "-"),
        **dict.fromkeys(_SPACES, " "),
        "\u200b": None,
        "\ufeff": None,
        "\u00d7": "*",
        "\u22c5": "*",
        "\u00b7": "*",
        "\u2044": "/",
        "\uff05": "%",
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
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
        if self.value.denominator == 1:
            return f"{self.value.numerator}{sign}"
        # two and five as the only prime factors: a finite decimal
        rest = self.value.denominator
        for prime in (2, 5):
            while rest % prime == 0:
                rest //= prime
        if self.decimals == 0 or rest != 1:
            return f"{self.value.numerator}/{self.value.denominator}{sign}"
        digits = f"{self.value.numerator * 10**self.decimals // self.value.denominator:d}"
        negative, digits = digits.startswith("-"), digits.lstrip("-").zfill(self.decimals + 1)
        whole, part = digits[: -self.decimals], digits[-self.decimals :].rstrip("0")
        return f"{'-' if negative else ''}{whole}.{part}{sign}"


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
    if match["mixed_bottom"] is not None:
        if exact("mixed_bottom") == 0:
            return None
        value = exact("whole") + exact("mixed_top") / exact("mixed_bottom")
    elif match["bottom"] is not None:
        if exact("bottom") == 0:
            return None
        value = exact("top") / exact("bottom")
    elif match["mantissa"] is not None:
        value = exact("mantissa") * Fraction(10) ** int(match["exponent"])
    else:
        value = exact("decimal")
        decimals = len(match["decimal"].partition(".")[2])
    if match["scale"] is not None:
        power = _SCALE[match["scale"].strip()]
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
        if inner is not None and wrapped[1]:
            return Number(-inner.value, inner.percent, inner.decimals)
        return inner
    match = NUMBER.fullmatch(text.removesuffix("."))
    if match is not None:
        return number_of(match)
    return number_in_words(text) if NUMBER_WORD.fullmatch(text) else None


def same_number(found: Number, gold: Number) -> bool:
    """Equal, allowing for what is a way of writing and not a different result.

    A percent sign may stand for the figure or for a hundredth of it. A decimal with more digits
    than the reference may round to it (5.375 for 5.38); a repeating reference (0.6666666667) is
    matched to one part in a million and to a hundredth. An integer is exact: 17.6 is not 18.
    """
    values = [found.value, found.value / 100] if found.percent else [found.value]
    golds = [gold.value, gold.value / 100] if gold.percent else [gold.value]
    return any(_close(v, found.decimals, g, gold.decimals) for v in values for g in golds)


def _close(value: Fraction, decimals: int, gold: Fraction, gold_decimals: int) -> bool:
    if value == gold:
        return True
    if gold.denominator == 1:
        return abs(value - gold) <= Fraction(1, 10**6)
    if abs(value - gold) <= min(abs(gold) * Fraction(1, 10**6), Fraction(1, 100)):
        return True
    # half a unit of the reference's last digit, half upwards
    rounds = decimals > gold_decimals > 0
    return rounds and abs(value - gold) * 2 * 10**gold_decimals <= 1
