"""Does a stronger teacher help more, and does its vocabulary matter? The demo's students, guided by
teachers that were trained for a shorter time, and by one that has the student's own vocabulary.

    python runs/demo_teachers.py [--seeds 3] [--out out/teachers]

Prints a table, and leaves it with a figure in the folder. About 20 minutes on two cores;
what is finished is not done again.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import track
from tokenizers import Tokenizer

from vocagnolm import statistics
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, make, students
from vocagnolm.demo.verdict import mean_and_spread
from vocagnolm.recipe import Recipe
from vocagnolm.study.design import FigurePlan
from vocagnolm.study.figure import draw


def own_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """The student's, instead of one made from the texts."""
    return Tokenizer.from_file(str(students.START / "tokenizer.json"))


SHIPPED = make.PLANS[0]
TEACHERS = {
    **{f"{n} steps": replace(SHIPPED, steps=n) for n in (100, 200, 300, 450)},
    f"{SHIPPED.steps} steps, the demo's": SHIPPED,
    f"{SHIPPED.steps} steps, the student's vocabulary": replace(SHIPPED, tokenizer=own_tokenizer),
}
BUDGET = students.Budget()
CONTROLS = ("cpt", "random")


def recipe_of(out: Path, name: str, method: str, seed: int) -> Recipe:
    """`name`: of the teacher. The controls do not look at it."""
    folder = out / "teachers" / name
    recipe = students.recipe_of(folder, method, seed, BUDGET)
    recipe.teacher.tokenizer = str(folder / "model")
    recipe.corpus.files = [str(out / "corpus.jsonl")]
    return recipe


def make_teacher(out: Path, name: str) -> float:
    """A teacher with its store and blocks; its bits per byte on the corpus."""
    students.one_thread()
    folder = out / "teachers" / name
    make.make_model(TEACHERS[name], folder / "model", math.inf)
    bits = students.score(folder / "model", out / "corpus.jsonl", folder / "store")
    prepare(recipe_of(out, name, "guided", 0))
    return bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/teachers"))
    given = parser.parse_args()
    out: Path = given.out
    students.quiet()
    documents = corpus.corpus_documents(BUDGET.documents)
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    problems = corpus.held_out_problems(BUDGET.problems, documents)
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        made = {name: pool.submit(make_teacher, out, name) for name in TEACHERS}
        bits = {name: future.result() for name, future in made.items()}

        def train(name: str, method: str) -> list[Future[dict[str, float]]]:
            recipes = [recipe_of(out, name, method, seed) for seed in range(given.seeds)]
            job = students.train_and_measure
            return [pool.submit(job, recipe, held_out, problems) for recipe in recipes]

        usual = f"{SHIPPED.steps} steps, the demo's"
        jobs: dict[tuple[str | None, str], list[Future[dict[str, float]]]] = {
            (None, method): train(usual, method) for method in CONTROLS
        }
        jobs |= {(name, "guided"): train(name, "guided") for name in TEACHERS}
        for (teacher, method), seeds in track(jobs.items(), "students"):
            shares = [100 * seed.result()["exact"] for seed in seeds]
            rows.append({"teacher": teacher, "method": method, "by_seed": shares})
    for row in rows:
        if row["teacher"] is not None:
            itself = students.measure(
                out / "teachers" / row["teacher"] / "model", held_out, problems
            )
            row["bits_per_byte_corpus"] = bits[row["teacher"]]
            row["bits_per_byte_clean"] = itself["bits_per_byte"]
            row["teacher_exact"] = 100 * itself["exact"]
    write_results(out, rows)


def write_results(out: Path, rows: list[dict[str, Any]]) -> None:
    print("\n| teacher | exact answers | bits per byte, corpus | clean text | its student |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        row["row"] = row["teacher"] or row["method"]
        row["label"] = {"cpt": "none: plain pretraining", "random": "none: random 40 %"}.get(
            row["row"], row["row"]
        )
        row["accuracy"], row["accuracy_spread"] = statistics.mean_and_spread(row["by_seed"])
        about = " |  | "
        if row["teacher"] is not None:
            about = (
                f"{row['teacher_exact']:.1f} | {row['bits_per_byte_corpus']:.3f} | "
                f"{row['bits_per_byte_clean']:.3f}"
            )
        print(f"| {row['label']} | {about} | {mean_and_spread(row['by_seed'], 1)} |")
    table = {"study": "teachers", "title": "Students against their teachers", "rows": rows}
    (out / "teachers.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    *others, own = TEACHERS
    figure = FigurePlan(
        kind="lines",
        x={name: plan.steps for name, plan in TEACHERS.items()},
        log_x=True,
        series={"another vocabulary": others, "the student's vocabulary": [own]},
        reference="cpt",
        x_label="steps that the teacher was trained for",
    )
    draw(table, figure, out / "teachers.svg")


if __name__ == "__main__":
    main()
