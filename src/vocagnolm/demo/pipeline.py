"""The whole pipeline on an embedded example: `vocagnolm demo`. Read it from top to bottom.

A student with a SentencePiece vocabulary goes on learning from a noisy web of math problems, guided
by a teacher with a byte-level vocabulary. Four methods, the same start, the same tokens, several
seeds; measured on clean held-out problems. All numbers come out of this run. Interrupted, it goes
on where it stopped; remove its folder to begin again.
"""

import dataclasses
import itertools
import os
import time
from concurrent.futures import as_completed
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vocagnolm.alignment import load_tokenizer
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students, verdict
from vocagnolm.demo.corpus import Problem
from vocagnolm.pair import compare
from vocagnolm.recipe import Recipe
from vocagnolm.report import report_page, write_page
from vocagnolm.report.runs import write_sample
from vocagnolm.workers import WorkerPool

console = Console(highlight=False)


def run_demo(out: Path, budget: students.Budget = students.Budget()) -> None:
    started = time.monotonic()
    students.quiet()
    held_out, problems = make_corpus(out, budget)
    compare_vocabularies()
    score(out)
    recipes = {
        (method, seed): students.recipe_of(out, method, seed, budget, alternatives=True)
        for seed in range(budget.seeds)
        for method in students.METHODS
    }
    manifest = prepare(next(iter(recipes.values())))
    step(
        f"prepare: {manifest['tokens']:,} student tokens in blocks, each with its guidance and its "
        "targets"
    )
    before, measured = train_all(recipes, held_out, problems, budget)
    page = make_page(out, recipes, before, measured, budget)
    print_results(before, measured)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    console.print(f"[bold]{page}[/bold] shows every token. {minutes} min {seconds:02d} s in all.")


def step(text: str) -> None:
    console.print(f"[bold green]✓[/bold green] {text}")


def make_corpus(out: Path, budget: students.Budget) -> tuple[Path, list[Problem]]:
    """A noisy corpus to learn from, and clean problems to be measured on."""
    documents = corpus.corpus_documents(budget.documents)
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    problems = corpus.held_out_problems(budget.problems, documents)
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems)
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in corpus.SHARES.items())
    step(f"corpus: {budget.documents:,} documents ({shares}), {len(problems)} held-out problems")
    return held_out, problems


def compare_vocabularies() -> None:
    student, teacher = load_tokenizer(students.START), load_tokenizer(students.TEACHER)
    texts = [text for _, text in itertools.islice(corpus.noisy_documents(1), 200)]
    (pair,) = compare(student, [teacher], texts)
    step(
        f"pair: {student.kind}, {student.vocabulary_size} tokens, guided by {teacher.kind}, "
        f"{teacher.vocabulary_size} tokens; {pair.overlap.raw:.0%} shared, "
        f"{pair.one_to_one_share:.0%} one to one, {pair.ios:.0%} covered"
    )


def score(out: Path) -> None:
    kept = students.ALTERNATIVES
    students.score(students.TEACHER, out / "corpus.jsonl", out / "store", kept)
    size = sum(file.stat().st_size for file in (out / "store").rglob("*") if file.is_file())
    step(
        f"score: the teacher read the corpus once; its losses and {kept} alternatives a token take "
        f"{size / 1e6:.1f} MB"
    )


def train_all(
    recipes: dict[tuple[str, int], Recipe],
    held_out: Path,
    problems: list[Problem],
    budget: students.Budget,
) -> tuple[dict[str, float], dict[str, list[dict[str, float]]]]:
    """All students, as many side by side as there are cores; and the start for comparison."""
    workers = max(1, min(os.cpu_count() or 1, 8, len(recipes)))
    done: dict[tuple[str, int], dict[str, float]] = {}
    # one thread per student, also in the libraries that read this at their start
    os.environ["OMP_NUM_THREADS"] = "1"
    with WorkerPool(workers) as pool:
        job = students.train_and_measure
        pending = {
            pool.submit(job, recipe, held_out, problems): key for key, recipe in recipes.items()
        }
        first = pool.submit(students.measure, students.START, held_out, problems)
        for future in as_completed(pending):
            method, seed = key = pending[future]
            done[key] = future.result()
            step(
                f"train {len(done)}/{len(recipes)}: {method}, seed {seed}: "
                f"{done[key]['exact']:.1%} exact, {done[key]['bits_per_byte']:.3f} bits per byte"
            )
        before = first.result()
    measured = {
        method: [done[method, seed] for seed in range(budget.seeds)] for method in students.METHODS
    }
    return before, measured


def make_page(
    out: Path,
    recipes: dict[tuple[str, int], Recipe],
    before: dict[str, float],
    measured: dict[str, list[dict[str, float]]],
    budget: students.Budget,
) -> Path:
    folders = [Path(recipe.run.folder or "") for recipe in recipes.values()]
    guided = Path(recipes["guided", 0].run.folder or "")
    # what the start of the training sees: there the selection has the most to say
    write_sample(guided, documents=60, model=students.START)
    note = (
        f"Every student went on from the same start ({before['exact']:.1%} exact, "
        f"{before['bits_per_byte']:.3f} bits per byte) with the same {budget.tokens:,} tokens, the "
        f"same settings and the same order of blocks; a seed decides that order. Measured on "
        f"{budget.problems} problems whose questions do not occur in the corpus. A toy, and a "
        "setting chosen so that there is something to learn: see docs/limits.md."
    )
    page = report_page(
        folders,
        title="Does a teacher with another vocabulary help?",
        subtitle="The demo: a small student goes on learning from a noisy web of math problems.",
        results=verdict.results_of(measured, note),
    )
    page = dataclasses.replace(page, recipe=recipes["guided", 0].to_yaml())
    return write_page(page, out / "report.html")


def print_results(before: dict[str, float], measured: dict[str, list[dict[str, float]]]) -> None:
    results = verdict.results_of(measured)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("method")
    for measure in results.measures:
        table.add_column(f"{measure.name}, {measure.unit}", justify="right")
    table.add_row("start", f"{100 * before['exact']:.1f}", f"{before['bits_per_byte']:.3f}")
    for group in results.groups:
        cells = []
        for values, measure in zip(group.values, results.measures, strict=True):
            cells.append(verdict.mean_and_spread(values, measure.digits))
        table.add_row(group.name, *cells)
    console.print()
    console.print(table)
    console.print(f"\n{results.verdict}\n")
