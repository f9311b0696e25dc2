"""What the task files beside this one call: questions in, grades out."""

import os
from typing import Any

from vocagnolm.evaluate.benchmarks import load_examples
from vocagnolm.evaluate.fewshot import short_shots_of, shots_of
from vocagnolm.evaluate.grading import grade
from vocagnolm.evaluate.suite import task_named


def load(task: str, benchmarks: str | None = None, **_: Any) -> Any:
    """The questions as lm-eval wants them. `benchmarks` comes with `--metadata` or from the
    environment; without it they are downloaded."""
    from datasets import Dataset, DatasetDict

    folder = benchmarks or os.environ.get("VOCAGNOLM_BENCHMARKS")
    rows = [
        {"task": task, "question": e.question, "gold": e.gold, "letters": e.letters}
        for e in load_examples(task, folder)
    ]
    return DatasetDict({"test": Dataset.from_list(rows)})


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    graded = grade(doc["task"], results[0], doc["gold"])
    return {"correct": float(graded.correct), "no_answer": float(graded.extracted is None)}


def option_labels(doc: dict[str, Any]) -> list[str]:
    return [f"({letter})" for letter in doc["letters"]]


def option_index(doc: dict[str, Any]) -> int:
    return doc["letters"].index(doc["gold"])


def _shots(task: str) -> list[dict[str, str]]:
    return [
        {"question": question, "answer": answer} for question, answer in shots_of(task_named(task))
    ]


def _short_shots(task: str) -> list[dict[str, str]]:
    which = task_named(task)
    return [
        {"question": question, "gold": letter, "letters": which.letters}
        for question, letter in short_shots_of(which)
    ]


def word_problem_shots() -> list[dict[str, str]]:
    return _shots("gsm8k")


def math_shots() -> list[dict[str, str]]:
    return _shots("math")


def mathqa_shots() -> list[dict[str, str]]:
    return _shots("mathqa")


def mmlu_stem_shots() -> list[dict[str, str]]:
    return _shots("mmlu_stem")


def mathqa_short_shots() -> list[dict[str, str]]:
    return _short_shots("mathqa")


def mmlu_stem_short_shots() -> list[dict[str, str]]:
    return _short_shots("mmlu_stem")
