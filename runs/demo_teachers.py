"""Does a stronger teacher help more, and does its vocabulary matter? The demo's students, guided by
teachers that were trained for a shorter time, and by one that has the student's own vocabulary, by
the published rule, the reducible share of the stretch and likelihood matching. Of every teacher it
is told how often a wrong result has the higher loss than a right one, as `study selection --label`
measures it.

    python runs/demo_teachers.py [--seeds 3] [--out out/teachers]

Prints a table, and leaves it with a figure in the folder. About 40 minutes on two cores;
what is finished is not done again.
"""

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo_models
from rich.progress import track
from tokenizers import Tokenizer

from vocagnolm import statistics
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students
from vocagnolm.demo.pipeline import mean_and_spread
from vocagnolm.recipe import Recipe
from vocagnolm.workers import WorkerPool
from vocagnolm_studies.design import FigurePlan
from vocagnolm_studies.figures import draw
from vocagnolm_studies.labels import LabelFields
from vocagnolm_studies.selection import selection_study


def own_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """The student's, instead of one made from the texts."""
    return Tokenizer.from_file(str(students.START / "tokenizer.json"))


SHIPPED = demo_models.PLANS[0]
STEPS = (100, 200, 250, 300, 375, 450, 600)
TEACHERS = {
    **{f"{n} steps": replace(SHIPPED, steps=n) for n in STEPS},
    f"{SHIPPED.steps} steps, the demo's": SHIPPED,
    f"{SHIPPED.steps} steps, the student's vocabulary": replace(SHIPPED, tokenizer=own_tokenizer),
}
BUDGET = students.Budget()
CONTROLS = ("cpt", "random")
RULES = {
    "guided": "published: top 40 % by token",
    "reducible": "reducible share, floor 0.2",
    "alm": "likelihood matching",
}


def recipe_of(out: Path, name: str, method: str, seed: int) -> Recipe:
    """`name`: of the teacher. The controls do not look at it."""
    folder = out / "teachers" / name
    recipe = students.recipe_of(folder, method, seed, BUDGET)
    recipe.teacher.tokenizer = str(folder / "model")
    recipe.corpus.files = [str(out / "corpus.jsonl")]
    return recipe


def make_teacher(out: Path, name: str) -> dict[str, float]:
    """A teacher with its store and blocks; its bits per byte on the corpus, and how often a wrong
    result has the higher loss."""
    students.one_thread()
    folder = out / "teachers" / name
    demo_models.make_model(TEACHERS[name], folder / "model")
    bits = students.score(folder / "model", out / "corpus.jsonl", folder / "store")
    for rule in RULES:
        prepare(recipe_of(out, name, rule, 0))
    labels = selection_study(
        str(students.START),
        str(folder / "store"),
        str(out / "labelled.jsonl"),
        tokens=BUDGET.tokens,
        block_size=128,
        device="cpu",
        labels=LabelFields(label="correct"),
    ).labels
    assert labels is not None
    tells = labels.areas["results"]["teacher loss"]
    return {
        "bits_per_byte_corpus": bits,
        "tells_wrong": tells.value,
        "tells_wrong_low": tells.low,
        "tells_wrong_high": tells.high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/teachers"))
    given = parser.parse_args()
    out: Path = given.out
    students.quiet()
    documents = corpus.corpus_documents(BUDGET.documents)
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    corpus.write_labelled(out / "labelled.jsonl", documents)
    problems = corpus.held_out_problems(BUDGET.problems, documents)
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    with WorkerPool(os.cpu_count() or 1) as pool:
        made = {name: pool.submit(make_teacher, out, name) for name in TEACHERS}
        known = {name: future.result() for name, future in made.items()}

        def train(name: str, method: str) -> list[Future[dict[str, float]]]:
            recipes = [recipe_of(out, name, method, seed) for seed in range(given.seeds)]
            job = students.train_and_measure
            return [pool.submit(job, recipe, held_out, problems) for recipe in recipes]

        usual = f"{SHIPPED.steps} steps, the demo's"
        jobs: dict[tuple[str | None, str], list[Future[dict[str, float]]]] = {
            (None, method): train(usual, method) for method in CONTROLS
        }
        jobs |= {(name, rule): train(name, rule) for rule in RULES for name in TEACHERS}
        for (teacher, method), seeds in track(jobs.items(), "students"):
            shares = [100 * seed.result()["exact"] for seed in seeds]
            rows.append({"teacher": teacher, "method": method, "by_seed": shares})
    for row in rows:
        if row["teacher"] is not None:
            itself = students.measure(
                out / "teachers" / row["teacher"] / "model", held_out, problems
            )
            row |= known[row["teacher"]]
            row["bits_per_byte_clean"] = itself["bits_per_byte"]
            row["teacher_exact"] = 100 * itself["exact"]
    write_results(out, rows)


def write_results(out: Path, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["row"] = " ".join(filter(None, (row["teacher"], row["method"])))
        row["label"] = {"cpt": "none: plain pretraining", "random": "none: random 40 %"}.get(
            row["row"], row["row"]
        )
        row["accuracy"], row["accuracy_spread"] = statistics.mean_and_spread(row["by_seed"])
    of = {(row["teacher"], row["method"]): row for row in rows}
    head = (
        "teacher | exact answers | bits per byte, corpus | clean text | wrong has the higher loss"
    )
    print(f"\n| {head} | its student, {' | '.join(RULES.values())} |")
    print("| --- |" + " ---: |" * (4 + len(RULES)))
    for method in CONTROLS:
        row = of[None, method]
        empty = "  |" * (len(RULES) - 1)
        print(f"| {row['label']} |  |  |  |  | {mean_and_spread(row['by_seed'], 1)} |{empty}")
    for name in TEACHERS:
        row = of[name, "guided"]
        about = (
            f"{row['teacher_exact']:.1f} | {row['bits_per_byte_corpus']:.3f} | "
            f"{row['bits_per_byte_clean']:.3f} | {row['tells_wrong']:.3f} "
            f"({row['tells_wrong_low']:.3f} to {row['tells_wrong_high']:.3f})"
        )
        found = [mean_and_spread(of[name, rule]["by_seed"], 1) for rule in RULES]
        print(f"| {name} | {about} | {' | '.join(found)} |")
    table = {"study": "teachers", "title": "Students against their teachers", "rows": rows}
    (out / "teachers.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    *others, own = TEACHERS
    series = {told: [f"{teacher} {rule}" for teacher in others] for rule, told in RULES.items()}
    figure = FigurePlan(
        kind="lines",
        x={row["row"]: TEACHERS[row["teacher"]].steps for row in rows if row["teacher"]},
        log_x=True,
        series=series | {"published, the student's vocabulary": [f"{own} guided"]},
        reference="cpt",
        x_label="steps that the teacher was trained for",
    )
    draw(table, figure, out / "teachers.svg")


if __name__ == "__main__":
    main()
