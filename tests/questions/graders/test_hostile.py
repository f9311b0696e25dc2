"""A model may write anything: grading neither fails on it nor takes time out of proportion."""

import random
import time

import pytest
from faults_kit import LONG

from vocagnolm.questions import grade
from vocagnolm.questions.graders.answers import extract_math, number_in_words, parse_number
from vocagnolm.questions.graders.math import readable_math

PIECES = [
    "\\boxed{", "\\boxed ", "\\boxed{1}", "\\boxed{1} and ", "{", "}", "((", "))", "(1)", "$",
    "$1$ ", "$$", "\\(", "\\[", "\\(1\\)", " ", "\t", "\n", "\n\n\na", "\u00a0", "~", "#### ",
    "answer is ", "The answer is 5 ", "The answer is\n", "answer to ", "Answer: ", "choice is ",
    "option A ", "(A) ", "A or ", "\nQ ", "and ", "and 1 ", "1 ", "1,", "111,", "9", "9.", "9/",
    "1e", "e9", "-", "^", "=", "which is ", "not ", "hundred ", "million ", "twenty-", "\\frac{",
    "\\frac{1}{2}", "\\text{a}", "\\sqrt", "½", "°", "\\times ", "\\", "\\, ", ". ", "! ",
    "I hope ", "**", "%", "\\begin{array}{c", "\\left(", "x = ", "1 : ", "p.m. ", "because ",
    "1 234 ", "<|im_", "\U0001f34e", "\ud83c", "\0",
]  # fmt: skip
LENGTH = 10_000
SECONDS = 2.0  # a twentieth of it is enough on an idle core; `\boxed{` alone took 4 s once


def read_all(output: str) -> None:
    for protocol in ("strict", "paper"):
        grade("gsm8k", output, "18", complete=False, protocol=protocol)
        grade("asdiv", output, "Purple", protocol=protocol)
        grade("mathqa", output, "B", protocol=protocol)
    answer = extract_math(output)
    if answer is not None:
        # what math-verify does with it is limited by its own process
        readable_math(answer)


@pytest.mark.parametrize("piece", PIECES, ids=ascii)
def test_long_repetitions(piece):
    repeated = piece * (LENGTH // len(piece))
    around = [("", "."), ("so \\boxed{", "} 7"), ("The answer is 5", "x"), ("= 5 ", "")]
    for before, after in around if LONG else around[len(piece) % 2 :][:1]:
        started = time.process_time()
        read_all(before + repeated + after)
        assert time.process_time() - started < SECONDS, (before, after)


def test_random_text():
    dice = random.Random(0)
    started = time.perf_counter()
    for _ in range(200 if LONG else 50):
        pieces = dice.choices(PIECES, k=dice.randint(1, 6))
        read_all("".join(dice.choices(pieces, k=dice.randint(1, 200))))
    assert time.perf_counter() - started < 60


def test_an_answer_in_thousands_of_boxes_is_none():
    assert grade("math", "\\boxed{" * 3200, "4").extracted is None
    assert grade("math", "\\boxed{4}" * 3200, "4").extracted is None


def test_deep_brackets_and_endless_words_are_no_numbers():
    assert parse_number("(" * 5000 + "1" + ")" * 5000) is None
    assert number_in_words("hundred " * 5000) is None
