"""What the task files beside this one call: questions in, grades out."""

import os
from typing import Any

from vocagnolm.evaluate.render import shots_of
from vocagnolm.questions.benchmarks import load_examples
from vocagnolm.questions.graders import grade
from vocagnolm.questions.suite import Protocol, check_protocol, task_named


def load(task: str, benchmarks: str | None = None, protocol: Protocol = "strict", **_: Any) -> Any:
    """The questions and the worked examples as lm-eval wants them. `benchmarks` and `protocol`
    come with `--metadata`, the former also from the environment; without it they are downloaded."""
    from datasets import Dataset, DatasetDict

    check_protocol(protocol)
    folder = benchmarks or os.environ.get("VOCAGNOLM_BENCHMARKS")
    rows = [
        {
            "task": task,
            "protocol": protocol,
            "question": example.question,
            "gold": example.gold,
            "letters": example.letters,
        }
        for example in load_examples(task, folder, protocol)
    ]
    which = task_named(task)
    shots = [
        # the letter alone is the answer where options are compared by likelihood
        {
            "question": question,
            "answer": answer,
            "gold": answer.rpartition("(")[2][:1] if which.letters else "",
            "letters": which.letters,
        }
        for question, answer in shots_of(which, protocol)
    ]
    return DatasetDict({"test": Dataset.from_list(rows), "shots": Dataset.from_list(shots)})


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    graded = grade(
        doc["task"], results[0], doc["gold"], protocol=doc["protocol"], question=doc["question"]
    )
    return {"correct": float(graded.correct), "no_answer": float(graded.extracted is None)}


def option_labels(doc: dict[str, Any]) -> list[str]:
    return [f"({letter})" for letter in doc["letters"]]


def option_index(doc: dict[str, Any]) -> int:
    return int(doc["letters"].index(doc["gold"]))
