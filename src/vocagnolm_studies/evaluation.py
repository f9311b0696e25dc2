"""What is measured on a finished run, bits per byte of held-out text and greedy answers, and what
is read of it again."""

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vocagnolm.base.files import whole_file, write_json
from vocagnolm_studies.design import EvaluationPlan
from vocagnolm_studies.folder import EVALUATION, SELECTION, StudyFolder, read_result

if TYPE_CHECKING:
    from vocagnolm.evaluate.render import Request

ANSWERS_FILE = "answers.jsonl.gz"
SAMPLES_FILE, LIKELIHOODS_FILE = "samples.jsonl.gz", "likelihoods.jsonl.gz"
GRADES_FILE = "grades.json"
PARTS_FIELD = "counts"

Grades = dict[str, dict[int, bool]]
Marks = Mapping[str, Mapping[int, float]]
"""Task -> question -> mark: right or wrong, or the gap between two rows."""


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
        from vocagnolm.evaluate.render import read_requests

        asked = read_requests(requests)
        answer_requests(model, files, plan, asked, folder / ANSWERS_FILE)
        for number in range(plan.samples):
            some = asked[:: plan.samples_every]
            answer_requests(model, files, plan, some, folder / SAMPLES_FILE, seed=number + 1)
    if plan.compared is not None:
        compare_options(model, files, plan, folder / LIKELIHOODS_FILE)
    return result


def compare_options(model: Any, files: Any, plan: EvaluationPlan, path: Path) -> None:
    """Write the log-likelihood in nats of every option of every question."""
    from vocagnolm.evaluate.render import read_requests
    from vocagnolm.generate import Generator

    assert plan.compared is not None
    requests = read_requests(plan.compared)
    generator = Generator(model, files, plan.batch_size)
    try:
        nats = dict(
            pair
            for batch in generator.compare(
                [request.prompt for request in requests], [r.options for r in requests]
            )
            for pair in batch
        )
    finally:
        generator.close()
    rows = [
        {"task": r.task, "index": r.index, "nats": [round(value, 4) for value in nats[n]]}
        for n, r in enumerate(requests)
    ]
    _write_rows(path, rows)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with whole_file(path) as whole, gzip.open(whole, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def answer_requests(
    model: Any,
    files: Any,
    plan: EvaluationPlan,
    requests: "Sequence[Request]",
    path: Path,
    *,
    seed: int = 0,
) -> None:
    """Write answers to all questions: greedy, or drawn with a `seed`, which are added to those that
    are in the file. Tasks with the same stop strings go through together: they share their worked
    examples."""
    from vocagnolm.evaluate.results import fields_of
    from vocagnolm.generate import Answer, Generator, Sampling

    groups: dict[Any, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        groups[request.stop].append(number)
    sampling = Sampling(plan.samples_temperature) if seed else None
    generator = Generator(model, files, plan.batch_size, sampling=sampling, seed=seed)
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
    rows = []
    if seed > 1:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    drawn = {"sample": seed} if seed else {}
    for number, request in enumerate(requests):
        where = {"task": request.task, "index": request.index, **drawn}
        rows.append({**where, **fields_of(answers[number])})
    _write_rows(path, rows)


def grade_answers(path: Path, questions: Mapping[tuple[str, int], "Request"]) -> Grades:
    """Task -> question -> right or wrong, by the protocol of the question."""
    from vocagnolm.questions import grade

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
                question=asked.prompt,
            )
            grades.setdefault(asked.task, {})[asked.index] = graded.correct
    return grades


def questions_of(requests: str | Path) -> dict[tuple[str, int], "Request"]:
    from vocagnolm.evaluate.render import read_requests

    return {(request.task, request.index): request for request in read_requests(requests)}


def average_accuracy(grades: Marks) -> float:
    """Mean over tasks of the share of right answers, in percent."""
    return 100 * float(np.mean([np.mean(list(marks.values())) for marks in grades.values()]))


def read_results(home: StudyFolder) -> dict[str, dict[int, dict[str, Any]]]:
    """Row -> seed -> evaluation of the finished runs, with grades where there are answers."""
    requests = home.study.evaluate.requests
    questions = questions_of(requests) if requests is not None and Path(requests).exists() else {}
    wanted = [(run.row, run.seed, home.run_folder(run)) for run in home.runs]
    if home.study.start is not None:
        wanted.insert(0, ("start", 0, home.folder / "runs" / "start-s0"))
    wanted += [(f"teacher-{name}", 0, at) for name, at in home.measured_teachers().items()]
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for row, seed, folder in wanted:
        path = folder / EVALUATION
        if not path.is_file():
            continue
        result = read_result(path)
        answered = questions and (folder / ANSWERS_FILE).is_file()
        if answered or (folder / GRADES_FILE).is_file():
            result["grades"] = _grades(folder, questions)
            result["accuracy"] = average_accuracy(result["grades"])
        if (folder / SELECTION).is_file():
            result["selection"] = read_result(folder / SELECTION)
        results.setdefault(row, {})[seed] = result
    return results


def _grades(folder: Path, questions: dict[tuple[str, int], "Request"]) -> Grades:
    """The grades of a run, which are kept beside its answers: grading takes seconds."""
    path = folder / GRADES_FILE
    if path.is_file():
        kept = read_result(path)
        return {task: {int(q): bool(v) for q, v in marks.items()} for task, marks in kept.items()}
    grades = grade_answers(folder / ANSWERS_FILE, questions)
    write_json(path, {t: {q: int(v) for q, v in m.items()} for t, m in grades.items()}, indent=None)
    return grades
