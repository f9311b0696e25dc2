"""What is measured on a finished run, bits per byte of held-out text and greedy answers, and what
is read of it again."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    grades: Grades = {}
    for task, index, right in _graded(path, questions):
        grades.setdefault(task, {})[index] = right
    return grades


def _graded(
    path: Path, questions: Mapping[tuple[str, int], "Request"]
) -> Iterator[tuple[str, int, bool]]:
    """The answers of a file to these questions, with whether each is right."""
    from vocagnolm.questions import grade

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
            yield asked.task, asked.index, graded.correct


def questions_of(requests: str | Path) -> dict[tuple[str, int], "Request"]:
    from vocagnolm.evaluate.render import read_requests

    return {(request.task, request.index): request for request in read_requests(requests)}


def average_accuracy(grades: Marks) -> float:
    """Mean over tasks of the share of right answers, in percent."""
    return 100 * float(np.mean([np.mean(list(marks.values())) for marks in grades.values()]))


def read_results(home: StudyFolder) -> dict[str, dict[int, dict[str, Any]]]:
    """Row -> seed -> evaluation of the finished runs, with the marks of their answers."""
    plan = home.study.evaluate
    asked, choosing = (
        questions_of(path) if path is not None and Path(path).exists() else {}
        for path in (plan.requests, plan.validation_requests)
    )
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
        for name, marks in _marks(folder, asked, choosing).items():
            result[name] = {task: m for task, m in marks.items() if task not in plan.apart}
            if name == "grades":
                result["accuracy"] = average_accuracy(result[name])
                result["apart"] = {task: m for task, m in marks.items() if task in plan.apart}
        if (folder / SELECTION).is_file():
            result["selection"] = read_result(folder / SELECTION)
        results.setdefault(row, {})[seed] = result
    return results


MARKS_FILES = {
    "grades": GRADES_FILE,
    "choosing": "choosing.json",
    "drawn": "drawn.json",
    "ranked": "ranked.json",
}
"""What is kept of a run question by question: marks of greedy answers, those to the questions that
choose learning rates, mean marks of drawn answers, and whether the right option is the likeliest
one."""


def _marks(
    folder: Path,
    asked: "Mapping[tuple[str, int], Request]",
    choosing: "Mapping[tuple[str, int], Request]",
) -> dict[str, Marks]:
    """The marks of a run by the names of `MARKS_FILES`, as far as there are any. They are kept
    beside the answers: grading takes seconds. Questions that choose are never reported."""
    reported = {where: asked[where] for where in asked if where not in choosing}
    also = {where: asked[where] for where in asked if where in choosing}
    makers: dict[str, tuple[str, Callable[[Path], Marks]]] = {
        "grades": (ANSWERS_FILE, lambda path: grade_answers(path, reported)),
        "choosing": (ANSWERS_FILE, lambda path: grade_answers(path, also)),
        "drawn": (SAMPLES_FILE, lambda path: _mean_marks(_graded(path, reported))),
        "ranked": (LIKELIHOODS_FILE, lambda path: _ranked(path, choosing)),
    }
    every: dict[str, Marks] = {}
    for name, (source, make) in makers.items():
        path = folder / MARKS_FILES[name]
        if path.is_file():
            kept = read_result(path)
            every[name] = {
                task: {int(q): float(v) for q, v in marks.items()} for task, marks in kept.items()
            }
        elif asked and (folder / source).is_file():
            marks = make(folder / source)
            if marks:
                plain = {
                    task: {q: v if v % 1 else int(v) for q, v in by_question.items()}
                    for task, by_question in marks.items()
                }
                write_json(path, plain, indent=None)
                every[name] = marks
    return every


def _mean_marks(graded: Iterable[tuple[str, int, bool]]) -> Marks:
    marks: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for task, index, right in graded:
        marks[task][index].append(right)
    return {task: {q: float(np.mean(v)) for q, v in by.items()} for task, by in marks.items()}


def _ranked(path: Path, without: "Mapping[tuple[str, int], Request]") -> Marks:
    """Whether the first option of each question, which is the right one, is the likeliest."""
    marks: dict[str, dict[int, float]] = defaultdict(dict)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if (row["task"], row["index"]) not in without:
                first, *others = row["nats"]
                marks[row["task"]][row["index"]] = float(first > max(others))
    return marks
