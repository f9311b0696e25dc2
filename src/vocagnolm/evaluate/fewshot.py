"""The worked examples that stand before every question.

GSM8K's eight and Minerva's four are the field's classics; lm-eval carries them and they are read
from the installed package. The options beside Minerva's four, and the MathQA examples, are our
own. Each example is a pair: the question as put to the model, and the worked answer.

The paper's harness has the same eight and the same four, the latter with every backslash doubled
and the lines broken elsewhere; `protocol="paper"` gives its texts to the byte, MathQA's excepted.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

import yaml

from vocagnolm.errors import MissingExtraError
from vocagnolm.evaluate.benchmarks import with_options
from vocagnolm.evaluate.suite import AnswerKind, Protocol, Task

Shot = tuple[str, str]

# wrong options beside the right one of Minerva's examples, which stands at the letter
_MINERVA_OPTIONS: tuple[tuple[list[str], str], ...] = (
    (["(2,5]", "[2,5)", "[2,5]", "(-\\infty,5)"], "B"),
    (["6", "10", "14", "24"], "D"),
    (["9", "12", "16", "20"], "C"),
    (["$-\\frac{2}{3}$", "$-\\frac{3}{2}$", "$\\frac{2}{3}$", "$\\frac{3}{2}$"], "A"),
)

_PAPER_OPTIONS: tuple[tuple[list[str], str], ...] = (
    (["[-5,-2)", "[2,5)", "[-2,-5)", "[5,2)"], "B"),
    (["14", "4", "2", "24"], "D"),
    (["12", "20", "16", "15"], "C"),
    (["$-\\\\frac{2}{3}$", "$\\\\frac{2}{3}$", "$\\\\frac{1}{3}$", "$\\\\frac{4}{9}$"], "A"),
)
_PAPER_SPACES = (("  $", " $"), (",\nfind", ", find"), (":\n\\\\begin", ": \\\\begin"))
_PAPER_MATH = (
    ("{5-x}}$.", "{5-x}}$.}"),
    (". Therefore,", ".\nTherefore,"),
    (". Also,", ".\nAlso,"),
)
_PAPER_CHOICE = (
    (". Therefore, the", ".\nTherefore, the"),
    (".  ", ". "),
    ("is nonzero.", "is\nnonzero."),
    ("we obtain\n\n", "we obtain\n"),
)

_MATHQA_SHOTS = (
    (
        "A train runs 60 km in the first hour and 10 km less in each hour after that . how far "
        "does it run in 4 hours ?",
        ["160 km", "170 km", "180 km", "190 km", "200 km"],
        "The distances of the four hours are 60, 50, 40 and 30 km.\n"
        "Their sum is 60 + 50 + 40 + 30 = 180 km.",
        "C",
    ),
    (
        "The average of 5 numbers is 18 . if one of them , 30 , is taken away , what is the "
        "average of the rest ?",
        ["15", "16", "17", "18", "19"],
        "The sum of the 5 numbers is 5 * 18 = 90.\n"
        "Without 30 the sum is 90 - 30 = 60, and 4 numbers are left.\n"
        "Their average is 60 / 4 = 15.",
        "A",
    ),
    (
        "A shirt is sold for rs . 540 after a discount of 10 % . what was its marked price ?",
        ["rs . 486", "rs . 550", "rs . 590", "rs . 594", "rs . 600"],
        "Let the marked price be $x$. After the discount $0.9x = 540$.\n"
        "So $x = \\frac{540}{0.9} = 600$ rupees.",
        "E",
    ),
    (
        "The ratio of boys to girls in a class is 3 : 2 . if there are 12 girls , how many "
        "students are in the class ?",
        ["18", "30", "24", "36", "20"],
        "Two parts are 12 girls, so one part is 12 / 2 = 6 students.\n"
        "The class has 3 + 2 = 5 parts, that is 5 * 6 = 30 students.",
        "B",
    ),
)


def _lm_eval_file(*parts: str) -> str:
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise MissingExtraError("lm-eval", "eval", "Evaluation")
    return Path(found.origin).parent.joinpath("tasks", *parts).read_text(encoding="utf-8")


@cache
def _gsm8k_shots() -> tuple[Shot, ...]:
    settings = yaml.safe_load(_lm_eval_file("gsm8k", "gsm8k-cot.yaml"))
    samples = settings["fewshot_config"]["samples"]
    return tuple((sample["question"], sample["target"]) for sample in samples)


@cache
def _minerva_shots() -> tuple[Shot, ...]:
    # the module itself cannot be imported beside math-verify: it insists on an older antlr4
    module = ast.parse(_lm_eval_file("minerva_math", "utils.py"))
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "list_fewshot_samples":
            returned = next(s for s in statement.body if isinstance(s, ast.Return))
            assert returned.value is not None
            samples = ast.literal_eval(returned.value)
            return tuple((sample["problem"], sample["solution"]) for sample in samples)
    raise AssertionError("this lm-eval does not carry Minerva's examples")


def _lettered(answer: str, letter: str) -> str:
    reasoning = answer.partition("\nFinal Answer:")[0]
    return f"{reasoning}\nFinal Answer: The final answer is ({letter})."


def _published(text: str, edits: tuple[tuple[str, str], ...]) -> str:
    text = text.replace("\\", "\\\\")
    for ours, theirs in (*_PAPER_SPACES, *edits):
        text = text.replace(ours, theirs)
    return text


def _minerva(kind: AnswerKind, protocol: Protocol) -> list[Shot]:
    if protocol == "strict":
        return list(_minerva_shots())
    edits = _PAPER_CHOICE if kind == "choice" else _PAPER_MATH
    return [(_published(q, edits), _published(a, edits)) for q, a in _minerva_shots()]


def shots_of(task: Task, protocol: Protocol = "strict") -> list[Shot]:
    """The examples of a task, with their reasoning, in the order of the protocol."""
    if task.name == "mathqa":
        return [
            (with_options(q, options, task.letters), _lettered(reasoning, letter))
            for q, options, reasoning, letter in _MATHQA_SHOTS
        ]
    if task.kind in ("math", "choice"):
        shots = _minerva(task.kind, protocol)
    else:
        shots = list(_gsm8k_shots())
    if task.kind == "choice":
        listed = _PAPER_OPTIONS if protocol == "paper" else _MINERVA_OPTIONS
        shots = [
            (with_options(q, options, task.letters), _lettered(answer, letter))
            for (q, answer), (options, letter) in zip(shots, listed, strict=True)
        ]
    assert len(shots) == task.shots, f"{task.name}: lm-eval has {len(shots)} examples"
    return shots
