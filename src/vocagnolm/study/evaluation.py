"""What is measured on a finished run: bits per byte of held-out text, and greedy answers."""

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.files import whole_file
from vocagnolm.study.design import EvaluationPlan

if TYPE_CHECKING:
    from vocagnolm.evaluate.render import Request

ANSWERS_FILE = "answers.jsonl.gz"
PARTS_FIELD = "counts"


def evaluate_model(
    model_folder: str | Path, plan: EvaluationPlan, folder: Path, *, requests: str | None
) -> dict[str, Any]:
    """Bits per byte on held-out and validation text; answers to `requests` go to
    `answers.jsonl.gz`."""
    from vocagnolm.evaluate.bits import bits_per_byte
    from vocagnolm.model import open_model

    files = open_model(model_folder, device=plan.device, dtype=plan.dtype)
    model = files.load()
    result: dict[str, Any] = {"held_out": {}, "validation": {}}
    for kind, named in (("held_out", plan.held_out), ("validation", plan.validation)):
        for name, path in named.items():
            bits = bits_per_byte(
                model, files, [path], context=plan.context, parts_field=PARTS_FIELD
            )
            result[kind][name] = bits.value
    if requests is not None:
        answer_requests(model, files, plan, requests, folder / ANSWERS_FILE)
    return result


def answer_requests(model: Any, files: Any, plan: EvaluationPlan, source: str, path: Path) -> None:
    """Greedy answers to all questions. Tasks with the same stop strings go through together:
    they share their worked examples."""
    from vocagnolm.evaluate.generate import Generator
    from vocagnolm.evaluate.render import read_requests
    from vocagnolm.evaluate.results import Answer

    requests = read_requests(source)
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        groups[request.stop].append(number)
    generator = Generator(model, files, plan.batch_size)
    answers: dict[int, Answer] = {}
    try:
        for stop, numbers in groups.items():
            wanted = max(requests[n].max_new_tokens for n in numbers)
            for batch in generator.generate(
                [requests[n].prompt for n in numbers],
                stop=stop,
                max_new_tokens=min(plan.max_new_tokens, wanted),
            ):
                answers.update({numbers[place]: answer for place, answer in batch})
    finally:
        generator.close()
    with whole_file(path) as whole, gzip.open(whole, "wt", encoding="utf-8") as file:
        for number, request in enumerate(requests):
            line = {"task": request.task, "index": request.index, **asdict(answers[number])}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


Grades = dict[str, dict[int, bool]]


def grade_answers(path: Path, questions: Mapping[tuple[str, int], "Request"]) -> Grades:
    """Task -> question -> right or wrong, by the protocol of the question."""
    from vocagnolm.evaluate import grade

    grades: Grades = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            answer = json.loads(line)
            asked = questions.get((answer["task"], answer["index"]))
            if asked is None:
                continue
            graded = grade(
                asked.task,
                answer["output"],
                asked.gold,
                complete=answer.get("complete"),  # older files do not say
                protocol=asked.protocol,
            )
            grades.setdefault(asked.task, {})[asked.index] = graded.correct
    return grades


def questions_of(requests: str | Path) -> dict[tuple[str, int], "Request"]:
    from vocagnolm.evaluate.render import read_requests

    return {(one.task, one.index): one for one in read_requests(requests)}
