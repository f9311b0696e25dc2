"""The suite in three steps, for a machine with a GPU but without lm-eval, datasets or math-verify.

    python benchmarks/evaluate_gpu.py render --benchmarks DIR --out requests.jsonl [--limit N]
    python benchmarks/evaluate_gpu.py generate --model MODEL --requests requests.jsonl --run RUN
    python benchmarks/evaluate_gpu.py grade --requests requests.jsonl --run RUN

`render` and `grade` want the `eval` extra; `generate` wants torch and transformers alone. Run
`generate` again to resume it. What `grade` leaves in RUN is read by `vocagnolm report`.
"""

import argparse
import json
import sys
import time
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from vocagnolm.evaluate.render import read_requests
from vocagnolm.evaluate.results import Evaluation, RunFolder, score_records


def by_task(path: str) -> dict:
    return {task: list(some) for task, some in groupby(read_requests(path), lambda r: r.task)}


def render_step(options: argparse.Namespace) -> None:
    from vocagnolm.evaluate.render import render, write_requests
    from vocagnolm.evaluate.suite import tasks_named

    requests = render(
        tasks_named(options.tasks),
        benchmarks=options.benchmarks,
        limit=options.limit,
        choices=options.choices,
        max_new_tokens=options.max_new_tokens,
    )
    write_requests(options.out, [request for some in requests.values() for request in some])
    print(json.dumps({name: len(some) for name, some in requests.items()}))


def generate_step(options: argparse.Namespace) -> None:
    from vocagnolm.evaluate.bits import bits_per_byte
    from vocagnolm.evaluate.generate import Generator
    from vocagnolm.evaluate.run import answer_task, checksum
    from vocagnolm.model import open_model

    requests = by_task(options.requests) if options.requests else {}
    files = open_model(options.model, device=options.device, dtype=options.dtype)
    run = RunFolder(options.run)
    settings = {
        "format": 1,
        "model": files.describe()["fingerprint"],
        "tokenizer": files.tokenizer.fingerprint,
        "device": files.device.type,
        "dtype": files.dtype_name,
        "batch_size": options.batch_size,
    }
    run.claim(settings, {name: checksum(some) for name, some in requests.items()})
    model = files.load()
    generator = Generator(model, files, options.batch_size)
    for name, some in requests.items():
        started = time.perf_counter()
        answer_task(
            run,
            generator,
            some,
            lambda p: print(f"\r{p.task} {p.done}/{p.total}", end="", file=sys.stderr),
        )
        seconds = time.perf_counter() - started
        line = {"task": name, "questions": len(some), "seconds": round(seconds, 1)}
        print(json.dumps(line | {"batch_size": generator.batch_size}), flush=True)
    generator.close()
    if options.text:
        measured = bits_per_byte(model, files, options.text)
        run.write_results(Evaluation({}, measured.value))
        print(json.dumps({"bits_per_byte": measured.value, "bytes": measured.scored_bytes}))


def grade_step(options: argparse.Namespace) -> None:
    from vocagnolm.evaluate.compare import format_table, scores_table
    from vocagnolm.evaluate.run import grade_task

    run = RunFolder(options.run)
    requests = by_task(options.requests)
    for name, some in requests.items():
        if run.records(name) is None:
            grade_task(run, name, some)
    scores = {name: score_records(run.records(name) or []) for name in requests}
    print(format_table(scores_table(run.write_results(Evaluation(scores)))))


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
    render.set_defaults(step=render_step)
    generate = steps.add_parser("generate")
    generate.add_argument("--model", required=True)
    generate.add_argument("--requests")
    generate.add_argument("--text", nargs="*", default=[])
    generate.add_argument("--run", required=True)
    generate.add_argument("--batch-size", type=int)
    generate.add_argument("--device", default="auto")
    generate.add_argument("--dtype", default="auto")
    generate.set_defaults(step=generate_step)
    grade = steps.add_parser("grade")
    grade.add_argument("--requests", required=True)
    grade.add_argument("--run", required=True)
    grade.set_defaults(step=grade_step)
    options = parser.parse_args()
    options.step(options)


if __name__ == "__main__":
    main()
