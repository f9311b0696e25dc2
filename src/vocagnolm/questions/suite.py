"""The paper's ten tasks: names, answer kinds, shot counts, averages.

The protocol is the one of Rho-1 (its evaluation harness for mathematics): the six word-problem
tasks share eight GSM8K examples, MATH has Minerva's four, the multiple-choice tasks have four
worked examples with options. The paper's MATH is MATH-500: 500 of MATH's 5,000 test questions. The
5,000 are a task outside of the suite. Standard library only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from vocagnolm.errors import UsageError
from vocagnolm.recipe.sections import Protocol as Protocol

# number: one number; mixed: a number, ratio, time or short text; math: a LaTeX expression;
# choice: an option letter
AnswerKind = Literal["number", "mixed", "math", "choice"]
# strict: our prompts and grading; paper: those of the paper's harness, as far as they can be had
PAPER_NEW_TOKENS = 1024
Shot = tuple[str, str]  # a question and its worked answer


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    title: str
    kind: AnswerKind
    shots: int
    letters: str = ""
    examples: tuple[Shot, ...] | None = None
    """Worked examples of its own, instead of those of its kind."""

    @property
    def lm_eval_name(self) -> str:
        """The task's name in lm-eval. It has a prefix, because lm-eval has tasks called gsm8k,
        asdiv and mathqa of its own."""
        return f"vocagnolm_{self.name}"


def _word_problem(name: str, title: str, kind: AnswerKind = "number") -> Task:
    return Task(name=name, title=title, kind=kind, shots=8)


def _choice(name: str, title: str, letters: str) -> Task:
    return Task(name=name, title=title, kind="choice", shots=4, letters=letters)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _word_problem("gsm8k", "GSM8K"),
        Task(name="math500", title="MATH-500", kind="math", shots=4),
        _word_problem("svamp", "SVAMP"),
        _word_problem("asdiv", "ASDiv", "mixed"),
        _word_problem("mawps", "MAWPS"),
        _word_problem("tabmwp", "TabMWP", "mixed"),
        _choice("mathqa", "MathQA", "ABCDE"),
        _choice("mmlu_stem", "MMLU-STEM", "ABCD"),
        _choice("sat", "SAT", "ABCD"),
        _word_problem("gsm_hard", "GSM-Hard"),
        Task(name="math", title="MATH-5000", kind="math", shots=4),
    )
}

# The paper's tables, by name: a task that is added changes none of them.
_SIX = ("gsm8k", "math500", "svamp", "asdiv", "mawps", "mathqa")
_EIGHT = ("gsm8k", "math500", "svamp", "asdiv", "mawps", "tabmwp", "mathqa", "mmlu_stem")
_NINE = (*_EIGHT, "sat")
SUITES: dict[str, tuple[str, ...]] = {"math": (*_NINE, "gsm_hard")}
AVERAGES: dict[str, tuple[str, ...]] = {
    "avg": _NINE,
    "avg_dagger": _SIX,
    "avg_double_dagger": _EIGHT,
}
AVERAGE_TITLES = {"avg": "AVG", "avg_dagger": "AVG†", "avg_double_dagger": "AVG‡"}

_ALIASES = {
    "sat_math": "sat",
    "mmlu": "mmlu_stem",
    "math_500": "math500",
    "math_oai": "math500",
    "minerva_math": "math500",  # where the paper's harness sends this name
    "gsmhard": "gsm_hard",
}


def check_protocol(protocol: str) -> None:
    if protocol not in get_args(Protocol):
        raise UsageError(f"protocol must be {' or '.join(get_args(Protocol))}, not '{protocol}'")


def task_named(name: str) -> Task:
    """The task of that name; `GSM8K`, `mmlu-stem` and `sat_math` are understood too."""
    key = name.strip().lower().replace("-", "_").replace(" ", "_")
    key = _ALIASES.get(key, key)
    if key not in TASKS:
        raise UsageError(f"unknown task '{name}'; the tasks are: {', '.join(TASKS)}")
    return TASKS[key]


def tasks_named(names: str | list[str] | tuple[str, ...] | None, suite: str = "math") -> list[Task]:
    """Tasks from `a,b,c` or a list, in the suite's order and once each; None is the whole suite."""
    if names is None:
        if suite not in SUITES:
            raise UsageError(f"unknown suite '{suite}'; the suites are: {', '.join(SUITES)}")
        names = SUITES[suite]
    elif isinstance(names, str):
        names = [name for name in names.split(",") if name.strip()]
    wanted = {task_named(name).name for name in names}
    if not wanted:
        raise UsageError(f"no task given; the tasks are: {', '.join(TASKS)}")
    return [task for name, task in TASKS.items() if name in wanted]


def averages(scores: Mapping[str, float | None]) -> dict[str, float | None]:
    """The paper's averages; None if a task of the average was not run."""
    return _each_average(scores, lambda known: sum(known) / len(known))


def average_stderrs(stderrs: Mapping[str, float | None]) -> dict[str, float | None]:
    """Standard errors of the averages: the tasks are independent samples, so variances add."""
    return _each_average(stderrs, lambda known: sum(v * v for v in known) ** 0.5 / len(known))


def _each_average(
    values: Mapping[str, float | None], combine: Callable[[list[float]], float]
) -> dict[str, float | None]:
    averages: dict[str, float | None] = {}
    for key, names in AVERAGES.items():
        known = [value for name in names if (value := values.get(name)) is not None]
        averages[key] = combine(known) if len(known) == len(names) else None
    return averages
