"""The suite in three steps, for a machine with a GPU but without lm-eval, datasets or math-verify.

    python benchmarks/evaluate_gpu.py render --benchmarks DIR --out requests.jsonl [--limit N]
    python benchmarks/evaluate_gpu.py generate --model MODEL --requests requests.jsonl --run RUN
    python benchmarks/evaluate_gpu.py grade --requests requests.jsonl --run RUN

`render` and `grade` want the `eval` extra; `generate` wants torch and transformers alone. Tasks
with the same worked examples are answered in the same batches, so that a large --batch-size is
filled. `--seconds N` begins no batch after N seconds; run `generate` again to go on. `grade` takes
several runs, leaves out tasks that are not complete, and its results are read by `vocagnolm
report`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from vocagnolm.evaluate.render import Request, read_requests
from vocagnolm.evaluate.results import Evaluation, RunFolder, score_records
from vocagnolm.questions.suite import Protocol

# enough of a prompt to tell worked examples apart, and less than any of them has
_EXAMPLES_CHARACTERS = 1000


def by_task(path: str) -> dict[str, list[Request]]:
    return {task: list(some) for task, some in groupby(read_requests(path), lambda r: r.task)}


def protocol_of(requests: dict[str, list[Request]]) -> Protocol:
    return next(iter(requests.values()))[0].protocol


def by_examples(requests: dict[str, list[Request]]) -> list[list[Request]]:
    """What can share batches: the same examples, ends and longest answer. Options that are
    compared, not written, stay with their task."""
    groups: dict[Any, list[Request]] = {}
    for task, some in requests.items():
        first = some[0]
        examples = first.prompt[:_EXAMPLES_CHARACTERS]
        key = task if first.options else (first.stop, first.max_new_tokens, examples)
        groups.setdefault(key, []).extend(some)
    return list(groups.values())


def render_step(options: argparse.Namespace) -> None:
    from vocagnolm.evaluate.render import render, write_requests
    from vocagnolm.questions.suite import tasks_named

    requests = render(
        tasks_named(options.tasks),
        benchmarks=options.benchmarks,
        limit=options.limit,
        choices=options.choices,
        max_new_tokens=options.max_new_tokens,
        protocol=options.protocol,
    )
    write_requests(options.out, [request for some in requests.values() for request in some])
    print(json.dumps({name: len(some) for name, some in requests.items()}))


def deadline(seconds: float | None) -> Callable[[], bool]:
    started = time.perf_counter()
    return lambda: seconds is not None and time.perf_counter() - started >= seconds


def answered(run: RunFolder, task: str) -> set[int]:
    return {record.index for record in run.records(task) or []} | run.answers(task).keys()


def answer_together(
    run: RunFolder, generator: Any, group: list[Request], is_over: Callable[[], bool]
) -> None:
    """As `answer_task`, over several tasks."""
    tasks = list(dict.fromkeys(request.task for request in group))
    there = {task: answered(run, task) for task in tasks}
    open_tasks = [task for task in tasks if run.records(task) is None]
    batches = generator.generate(
        [request.prompt for request in group],
        stop=group[0].stop,
        max_new_tokens=group[0].max_new_tokens,
        is_done=lambda batch: all(group[i].index in there[group[i].task] for i in batch),
    )
    while not is_over():
        batch = next(batches, None)
        if batch is None:
            return
        for task in open_tasks:
            new = [(group[i].index, answer) for i, answer in batch if group[i].task == task]
            run.add_answers(task, new)
        print(f"{' '.join(tasks)}: {len(batch)} more of {len(group)}", file=sys.stderr)


def generate_step(options: argparse.Namespace) -> None:
    from vocagnolm.evaluate.bits import bits_per_byte
    from vocagnolm.evaluate.run import answer_task, checksum
    from vocagnolm.generate import Generator
    from vocagnolm.model import open_model

    requests = by_task(options.requests) if options.requests else {}
    files = open_model(options.model, device=options.device, dtype=options.dtype)
    run = RunFolder(options.run)
    settings = {
        "format": 2,
        "model": files.describe()["fingerprint"],
        "tokenizer": files.tokenizer.fingerprint,
        "device": files.device.type,
        "dtype": files.dtype_name,
        "batch_size": options.batch_size,
        "tasks_share_batches": True,
    }
    if requests:
        settings["protocol"] = protocol_of(requests)
    run.claim(settings, {name: checksum(some) for name, some in requests.items()})
    model = files.load()
    generator = Generator(model, files, options.batch_size)
    is_over = deadline(options.seconds)
    for group in by_examples(requests):
        started = time.perf_counter()
        if group[0].options:
            if run.records(group[0].task) is None and not is_over():
                answer_task(run, generator, group)
        else:
            answer_together(run, generator, group, is_over)
        seconds = time.perf_counter() - started
        for name in dict.fromkeys(request.task for request in group):
            done = len(answered(run, name))
            line = {"task": name, "questions": len(requests[name]), "answered": done}
            print(json.dumps(line | {"seconds of its group": round(seconds, 1)}), flush=True)
    generator.close()
    if options.text:
        measured = bits_per_byte(model, files, options.text)
        run.write_results(Evaluation({}, measured.value))
        print(json.dumps({"bits_per_byte": measured.value, "bytes": measured.scored_bytes}))


def grade_step(options: argparse.Namespace) -> None:
    from vocagnolm.evaluate.results import format_table, scores_table
    from vocagnolm.evaluate.run import grade_task

    requests = by_task(options.requests)
    for path in options.run:
        run = RunFolder(path)
        scores = {}
        for name, some in requests.items():
            if run.records(name) is None:
                missing = len(some) - len(run.answers(name))
                if missing:
                    print(f"{path}: {name} lacks {missing} answers", file=sys.stderr)
                    continue
                grade_task(run, name, some)
            scores[name] = score_records(run.records(name) or [])
        graded = Evaluation(scores, protocol=protocol_of(requests))
        print(f"\n{path}\n" + format_table(scores_table(run.write_results(graded))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(required=True)
    render = steps.add_parser("render")
    render.add_argument("--benchmarks", required=True)
    render.add_argument("--out", required=True)
    render.add_argument("--tasks")
    render.add_argument("--limit", type=int)
    render.add_argument("--choices", default="generate")
    render.add_argument("--max-new-tokens", type=int)
    render.add_argument("--protocol", default="strict")
    render.set_defaults(step=render_step)
    generate = steps.add_parser("generate")
    generate.add_argument("--model", required=True)
    generate.add_argument("--requests")
    generate.add_argument("--text", nargs="*", default=[])
    generate.add_argument("--run", required=True)
    generate.add_argument("--batch-size", type=int)
    generate.add_argument("--seconds", type=float, help="begin no batch after this time")
    generate.add_argument("--device", default="auto")
    generate.add_argument("--dtype", default="auto")
    generate.set_defaults(step=generate_step)
    grade = steps.add_parser("grade")
    grade.add_argument("--requests", required=True)
    grade.add_argument("--run", required=True, nargs="+")
    grade.set_defaults(step=grade_step)
    options = parser.parse_args()
    options.step(options)


if __name__ == "__main__":
    main()
