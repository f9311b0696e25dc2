"""Several evaluations side by side: scores, differences, standard errors, significance.

The same questions are put to all models, so the test is paired: McNemar's exact test for a task
(a binomial test on the questions that only one of two models got right), a sign-flip permutation
test for the averages and for anything that pools tasks.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.evaluate.results import Evaluation, open_run
from vocagnolm.evaluate.settings import OF_THE_QUESTIONS, differing
from vocagnolm.evaluate.suite import AVERAGE_TITLES, AVERAGES, TASKS
from vocagnolm.files import json_digest
from vocagnolm.statistics import mcnemar_exact, mean_error, sign_flip_p


@dataclass(frozen=True)
class Difference:
    """Second run minus first, in percentage points, on the questions that both answered."""

    difference: float
    stderr: float | None
    p_value: float | None
    n: int


@dataclass(frozen=True)
class Run:
    name: str
    evaluation: Evaluation
    correct: dict[str, dict[int, bool]]  # task -> question -> right
    asked: dict[str, dict[int, str]]  # task -> question -> its prompt and reference answer
    checksums: dict[str, str]  # task -> of all that was asked, limits included


@dataclass(frozen=True)
class Comparison:
    runs: list[Run]
    # row (task or average) -> difference of every run but the first to the first; None where one
    # of the two was not evaluated on it, or under other conditions
    differences: dict[str, list[Difference | None]]
    # the same rows -> what the conditions of the two differ in
    unlike: dict[str, list[list[str]]]

    def titles(self) -> list[str]:
        """The runs' names, with the protocol where it is not the same for all."""
        protocols = [run.evaluation.protocol for run in self.runs]
        if len(set(protocols) - {None}) < 2:
            return [run.name for run in self.runs]
        return [f"{run.name} ({run.evaluation.protocol})" for run in self.runs]

    def notes(self) -> list[str]:
        """What was not compared, and averages that a reader may miss: the paper's MATH was once
        taken for the 5,000."""
        return self._not_compared() + [
            f"{run.name} has math, all 5,000 questions; the averages want math500 (the paper's). "
            "Add it: vocagnolm evaluate MODEL --tasks math500 --out RUN"
            for run in self.runs
            if "math" in run.evaluation.tasks
            and any(set(t) - run.evaluation.tasks.keys() == {"math500"} for t in AVERAGES.values())
        ]

    def _not_compared(self) -> list[str]:
        lines = []
        for place, run in enumerate(self.runs[1:]):
            reasons: dict[str, list[str]] = {}
            for row, unlike in self.unlike.items():
                if unlike[place]:
                    title = TASKS[row].title if row in TASKS else row.replace("_", " ")
                    reasons.setdefault("; ".join(unlike[place]), []).append(title)
            lines += [
                f"{', '.join(rows)}: {self.runs[0].name} and {run.name} are not compared, because "
                f"they were evaluated under other conditions ({reason})."
                for reason, rows in reasons.items()
            ]
        return lines

    def rows(self) -> list[str]:
        tasks = [t for t in TASKS if any(t in run.evaluation.tasks for run in self.runs)]
        keys = [
            k for k in AVERAGES if any(r.evaluation.averages()[k] is not None for r in self.runs)
        ]
        return tasks + keys

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [{"name": run.name, **run.evaluation.to_json()} for run in self.runs],
            "differences": {
                row: [None if d is None else vars(d) for d in listed]
                for row, listed in self.differences.items()
            },
            "unlike": self.unlike,
        }


def paired_difference(first: dict[int, bool], second: dict[int, bool]) -> Difference | None:
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    gains = [100 * (int(second[i]) - int(first[i])) for i in shared]
    p_value = mcnemar_exact(gains.count(-100), gains.count(100))
    return Difference(sum(gains) / len(gains), mean_error(gains), p_value, len(gains))


def average_difference(
    first: dict[str, dict[int, bool]], second: dict[str, dict[int, bool]], tasks: tuple[str, ...]
) -> Difference | None:
    """Difference of an average over tasks. The p-value is from a permutation test: under the null
    hypothesis the two models' answers to a question may be exchanged."""
    parts, contributions = [], []
    for task in tasks:
        one = paired_difference(first.get(task, {}), second.get(task, {}))
        if one is None:
            return None
        parts.append(one)
        weight = 100 / (one.n * len(tasks))
        shared = sorted(first[task].keys() & second[task].keys())
        contributions += [weight * (second[task][i] - first[task][i]) for i in shared]
    difference = sum(one.difference for one in parts) / len(tasks)
    known = [one.stderr for one in parts if one.stderr is not None]
    stderr = sum(e * e for e in known) ** 0.5 / len(tasks) if len(known) == len(parts) else None
    p_value = sign_flip_p(np.array(contributions))
    return Difference(difference, stderr, p_value, sum(one.n for one in parts))


def load_run(path: str | Path, name: str | None = None) -> Run:
    folder, evaluation = open_run(path)
    records = {task: folder.records(task) or [] for task in evaluation.tasks}
    return Run(
        name or folder.path.resolve().name,
        evaluation,
        {task: {one.index: one.correct for one in listed} for task, listed in records.items()},
        {
            task: {one.index: json_digest([one.prompt, one.gold]) for one in listed}
            for task, listed in records.items()
        },
        folder.checksums(),
    )


def compare_runs(paths: list[str | Path]) -> Comparison:
    """Read finished evaluations; the first is the one the others are compared with."""
    runs = [load_run(path) for path in paths]
    names = [run.name for run in runs]
    # runs/a/eval and runs/b/eval have the same last part: then the whole path tells them apart
    if len(set(names)) < len(names):
        runs = [replace(run, name=str(path)) for path, run in zip(paths, runs, strict=True)]
    table = Comparison(runs, {}, {})
    base, others = runs[0], runs[1:]
    for row in [*table.rows(), "bits_per_byte"]:
        table.unlike[row] = [_unlike(base, run, row) for run in others]
    for row in table.rows():
        table.differences[row] = [_difference(base, run, row) for run in others]
    return table


def _difference(first: Run, second: Run, row: str) -> Difference | None:
    if _unlike(first, second, row):
        return None
    if row in TASKS:
        return paired_difference(first.correct.get(row, {}), second.correct.get(row, {}))
    return average_difference(first.correct, second.correct, AVERAGES[row])


def _unlike(first: Run, second: Run, row: str) -> list[str]:
    """What the conditions of two runs differ in; nothing where one of them lacks the row."""
    a, b = first.evaluation, second.evaluation
    if row == "bits_per_byte":
        if a.bits_per_byte is None or b.bits_per_byte is None:
            return []
        return differing(a.conditions.get(row), b.conditions.get(row))
    tasks = [row] if row in TASKS else list(AVERAGES[row])
    if any(task not in run.tasks for task in tasks for run in (a, b)):
        return []
    found: dict[str, None] = {}
    if a.protocol != b.protocol:
        found[f"protocol {a.protocol} / {b.protocol}"] = None
    for task in tasks:
        found |= dict.fromkeys(_unlike_task(first, second, task))
    return list(found)


def _unlike_task(first: Run, second: Run, task: str) -> list[str]:
    pair = []
    for run in (first, second):
        known = run.evaluation.conditions.get(task, {})
        pair.append({k: v for k, v in known.items() if k not in (*OF_THE_QUESTIONS, "protocol")})
    shared = first.asked[task].keys() & second.asked[task].keys()
    lines = differing(*pair)
    old = not any(pair) and first.asked[task] == second.asked[task]
    sums = [run.checksums.get(task) for run in (first, second)]
    if old and None not in sums and sums[0] != sums[1]:
        lines.append("the limit of new tokens or the stop strings, which were not recorded")
    if any(first.asked[task][number] != second.asked[task][number] for number in shared):
        lines.append("prompts (another version of the task or of its questions)")
    return lines


# --- text -----------------------------------------------------------------------------------


def _number(value: float | None, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1f}" if sign else f"{value:.1f}"


def _with_error(value: float | None, stderr: float | None, sign: bool = False) -> str:
    text = _number(value, sign)
    return text if value is None or stderr is None else f"{text} ± {stderr:.1f}"


def _p_value(p: float | None) -> str:
    if p is None:
        return ""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def scores_table(evaluation: Evaluation) -> list[list[str]]:
    """Rows of cells for one evaluation, the heading first."""
    score = "score (paper)" if evaluation.protocol == "paper" else "score"
    rows = [["task", score, "n", "no answer"]]
    for name, task in evaluation.tasks.items():
        score = _with_error(task.score, task.stderr)
        rows.append([TASKS[name].title, score, str(task.n), str(task.no_answer)])
    means, errors = evaluation.averages(), evaluation.average_stderrs()
    for key, value in means.items():
        if value is not None:
            rows.append([AVERAGE_TITLES[key], _with_error(value, errors[key]), "", ""])
    if evaluation.bits_per_byte is not None:
        rows.append(["bits per byte", f"{evaluation.bits_per_byte:.4f}", "", ""])
    return rows


def comparison_table(comparison: Comparison) -> list[list[str]]:
    """Rows of cells: every run's score, and for all but the first the difference to the first."""
    first, *others = comparison.titles()
    heading = ["task", first]
    for title in others:
        heading += [title, "difference", ""]
    rows = [heading]
    for row in comparison.rows():
        cells = [TASKS[row].title if row in TASKS else AVERAGE_TITLES[row]]
        for position, run in enumerate(comparison.runs):
            if row in TASKS:
                task = run.evaluation.tasks.get(row)
                cells.append("-" if task is None else _with_error(task.score, task.stderr))
            else:
                means, errors = run.evaluation.averages(), run.evaluation.average_stderrs()
                cells.append(_with_error(means[row], errors[row]))
            if position:
                change = comparison.differences[row][position - 1]
                if change is None:
                    cells += ["-", ""]
                else:
                    cells += [
                        _with_error(change.difference, change.stderr, sign=True),
                        _p_value(change.p_value),
                    ]
        rows.append(cells)
    if any(run.evaluation.bits_per_byte is not None for run in comparison.runs):
        cells = ["bits per byte"]
        base = comparison.runs[0].evaluation.bits_per_byte
        for position, run in enumerate(comparison.runs):
            bits = run.evaluation.bits_per_byte
            cells.append("-" if bits is None else f"{bits:.4f}")
            if position:
                same = not comparison.unlike["bits_per_byte"][position - 1]
                known = bits is not None and base is not None and same
                cells += [f"{bits - base:+.4f}" if known else "-", ""]  # type: ignore[operator]
        rows.append(cells)
    return rows


def format_table(rows: list[list[str]]) -> str:
    """Columns under each other: names to the left, figures to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(rows[0]):
        table.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    # the same wherever it is printed: never folded to the width of a terminal
    console = Console(width=10_000, color_system=None)
    with console.capture() as printed:
        console.print(table)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())
