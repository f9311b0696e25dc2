"""Is the answer in a model's output right?

Uses only the standard library, and math-verify (in its own process) for LaTeX.
"""

import re
from dataclasses import dataclass

from vocagnolm.questions.graders import paper
from vocagnolm.questions.graders.answers import (
    Number,
    clauses,
    delatex,
    extract_choice,
    extract_math,
    extract_number,
    extract_text,
    parse_number,
    same_number,
    same_text,
)
from vocagnolm.questions.graders.math import same_math
from vocagnolm.questions.suite import Protocol, Task, check_protocol, task_named

Gold = str | int | float


@dataclass(frozen=True)
class Grade:
    correct: bool
    extracted: str | None  # None: the output gives no answer, or none that is clear


def grade(
    task: str,
    output: str,
    gold: Gold,
    *,
    complete: bool | None = None,
    protocol: Protocol = "strict",
    question: str | None = None,
) -> Grade:
    """Find the answer in `output` and compare it with the reference.

    `task` is one of the suite's names (`gsm8k`, `math`, ...). `gold` is the reference in the
    benchmark's own form: `18`, a GSM8K solution that ends in `#### 18`, `9 (apples)`, a MATH answer
    or a whole solution with `\boxed{...}`, an option letter or its index. `complete`: False for an
    output that was cut off at the token limit, in which partial numbers do not count; None if
    unknown. `question`: the question or the whole prompt; 3.14 is right for 3.1 only if it asks for
    rounding, or if the reference says that it is rounded. `protocol="paper"` finds and compares
    answers as the paper's harness does, complete or not.
    """
    which = task_named(task)
    check_protocol(protocol)
    if protocol == "paper":
        return _paper_grade(which, output, gold)
    if which.kind == "choice":
        letter = extract_choice(output, which.letters)
        return Grade(letter == gold_letter(gold, which), letter)
    rounds = _is_rounded(gold, question)
    if which.kind == "math":
        answer = extract_math(output, complete)
        return Grade(answer is not None and same_math(answer, gold_math(gold), rounds), answer)
    reference = gold_number(gold)
    if reference is not None:
        number = extract_number(output, complete)
        correct = number is not None and same_number(number, reference, rounds)
        return Grade(correct, None if number is None else str(number))
    if which.kind == "number":
        raise ValueError(f"task '{which.name}' has number answers; the reference is {gold!r}")
    phrase = extract_text(output)
    return Grade(phrase is not None and same_text(phrase, str(gold)), phrase)


def _paper_grade(task: Task, output: str, gold: Gold) -> Grade:
    if task.kind == "choice":
        letter = paper.extract_letter(output)
        return Grade(letter == gold_letter(gold, task), letter)
    reference = gold_math(gold)
    if task.kind != "math":
        number = gold_number(gold)
        reference = str(gold) if number is None else str(number.value)
    answer = paper.extract_answer(output)
    return Grade(answer is not None and paper.same_answer(answer, reference), answer)


_ABOUT = re.compile(r"\\approx(?![a-zA-Z])|≈|\b(?:about|approximately|roughly)\b", re.IGNORECASE)
_ROUND = re.compile(
    r"\b(?:round(?:ed|ing)?|nearest|approximat\w+|estimate\w*|significant\s+(?:digits|figures)"
    r"|decimal\s+places?)\b",
    re.IGNORECASE,
)


def _is_rounded(gold: Gold, question: str | None) -> bool:
    """Whether the reference is a rounding: by its own words, or because the question asks for one.
    Of a prompt the last question counts, not the worked examples before it."""
    asked = re.split(r"\n\n\n|\n(?=Question:|Problem:|user:)", question or "")[-1]
    return bool(_ABOUT.search(str(gold)) or _ROUND.search(str(gold)) or _ROUND.search(asked))


def gold_letter(gold: Gold, task: Task) -> str:
    """`C`, `(c)`, or 2, the index that MMLU counts with."""
    if isinstance(gold, int | float) or gold.strip().isdigit():
        index = int(gold)
        if not 0 <= index < len(task.letters):
            raise ValueError(f"task '{task.name}' has options {task.letters}; found index {gold}")
        return task.letters[index]
    letter = gold.strip().strip("()[]. ").upper()
    if len(letter) != 1 or letter not in task.letters:
        raise ValueError(f"task '{task.name}' has options {task.letters}; found {gold!r}")
    return letter


def gold_math(gold: Gold) -> str:
    """The answer of a MATH solution: the content of its last box, or the text itself."""
    boxes = [clause.text for clause in clauses(str(gold)) if clause.kind == "boxed"]
    return boxes[-1] if boxes else str(gold)


def gold_number(gold: Gold) -> Number | None:
    """The reference as a number; None when it is text, a ratio or a time."""
    if isinstance(gold, int | float):
        return parse_number(repr(gold))
    text = _ABOUT.sub("", gold.rpartition("####")[2]).strip()
    text = re.sub(r"(?<=[\w%.])\s*\([^()]*\)$", "", text)  # 9 (apples)
    return parse_number(delatex(text))
