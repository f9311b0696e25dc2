"""The whole pipeline on an embedded example: `vocagnolm demo`. Read it from top to bottom.

A student with a SentencePiece vocabulary goes on learning from a noisy web of math problems, guided
by a teacher with a byte-level vocabulary. Four methods, the same start, the same tokens, several
seeds; measured on clean held-out problems. Beside them students that learn from the answers which
the teacher itself wrote to the web's questions. All numbers come out of this run. Interrupted, it
goes on where it stopped; remove its folder to begin again.
"""

import dataclasses
import itertools
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from vocagnolm.alignment import load_tokenizer
from vocagnolm.base import statistics
from vocagnolm.base.children import WorkerPool
from vocagnolm.base.files import write_text
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students
from vocagnolm.demo.corpus import Problem
from vocagnolm.evaluate.render import Request, write_requests
from vocagnolm.evaluate.results import format_table
from vocagnolm.recipe import Recipe
from vocagnolm.report import Measure, ResultGroup, Results, report_page, write_page
from vocagnolm.report.comparison import compare
from vocagnolm.report.runs import write_sample

console = Console(highlight=False)


def run_demo(out: Path, budget: students.Budget = students.Budget()) -> None:
    started = time.monotonic()
    students.quiet()
    held_out, problems, questions = make_corpus(out, budget)
    compare_vocabularies()
    score(out)
    recipes = {
        (method, seed): students.recipe_of(out, method, seed, budget, alternatives=True)
        for seed in range(budget.seeds)
        for method in students.METHODS
    }
    written = {
        (name, seed): students.written_recipe_of(out, name, seed, budget)
        for seed in range(budget.seeds)
        for name in students.WRITTEN
    }
    prepare_blocks("prepare", next(iter(recipes.values())))
    measured = train_all(out, recipes, written, held_out, problems, questions)
    results = results_of(measured)
    page = make_page(out, recipes, results, budget)
    print_results(results)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    console.print(f"[bold]{page}[/bold] shows every token. {minutes} min {seconds:02d} s in all.")


def step(text: str) -> None:
    console.print(f"[bold green]✓[/bold green] {text}")


def make_corpus(out: Path, budget: students.Budget) -> tuple[Path, list[Problem], list[str]]:
    """A noisy corpus to learn from, clean problems to be measured on, and the corpus's questions,
    which the teacher answers."""
    documents = corpus.corpus_documents(budget.documents)
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    problems = corpus.held_out_problems(budget.problems, documents)
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems)
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in corpus.SHARES.items())
    step(f"corpus: {budget.documents:,} documents ({shares}), {len(problems)} held-out problems")
    return held_out, problems, corpus.questions_of(documents)


def prepare_blocks(name: str, recipe: Recipe) -> None:
    tokens = prepare(recipe)["tokens"]
    step(f"{name}: {tokens:,} student tokens in blocks, each with its guidance and its targets")


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
        f"score: the teacher read the corpus once; its losses and {kept} alternatives per token "
        f"take {size / 1e6:.1f} MB"
    )


def train_all(
    out: Path,
    recipes: dict[tuple[str, int], Recipe],
    written: dict[tuple[str, int], Recipe],
    held_out: Path,
    problems: list[Problem],
    questions: list[str],
) -> "Measured":
    """Train the students, as many side by side as there are cores; and measure their start. The
    teacher writes meanwhile, for those that learn from its answers."""
    every = recipes | written
    workers = max(1, min(os.cpu_count() or 1, 8, len(every)))
    done: dict[tuple[str, int], students.Record] = {}
    # one thread per student, also in the libraries that read this at their start
    os.environ["OMP_NUM_THREADS"] = "1"
    with WorkerPool(workers) as pool:
        job = students.train_and_measure
        writing = pool.submit(students.write, out, questions)
        pending = {
            pool.submit(job, recipe, held_out, problems): key for key, recipe in recipes.items()
        }
        first = pool.submit(students.measure, students.START, held_out, problems)
        folder = writing.result()
        step(
            f"write: the teacher answered {folder['documents']:,} questions of the corpus in "
            f"{folder['scored_tokens']:,} tokens ({folder['mean_nll']:.3f} nats each)"
        )
        prepare_blocks("prepare its answers", next(iter(written.values())))
        pending |= {
            pool.submit(job, recipe, held_out, problems): key for key, recipe in written.items()
        }
        for future in as_completed(pending):
            method, seed = key = pending[future]
            done[key] = future.result()
            step(
                f"train {len(done)}/{len(every)}: {method}, seed {seed}: "
                f"{done[key]['exact']:.1%} exact, {done[key]['bits_per_byte']:.3f} bits per byte"
            )
        start = first.result()
    names = dict.fromkeys(method for method, _ in every)
    seeds = range(len(every) // len(names))
    return {START: [start]} | {name: [done[name, seed] for seed in seeds] for name in names}


def make_page(
    out: Path, recipes: dict[tuple[str, int], Recipe], results: Results, budget: students.Budget
) -> Path:
    folders = [Path(recipe.run.folder or "") for recipe in recipes.values()]
    guided = Path(recipes["guided", 0].run.folder or "")
    # what the start of the training sees: there the selection has the most to say
    write_sample(guided, documents=120, model=students.START, source_field="kind")
    note = (
        f"Every student went on from the same start with the same {budget.tokens:,} tokens, the "
        "same settings and the same order of blocks; a seed decides that order. Measured on "
        f"{budget.problems} problems whose questions do not occur in the corpus. Intervals are "
        "95 %: seeds and problems, or texts, drawn again. Students of written answers are trained "
        "on answers alone and forget the pages around them, which their bits per byte show. A toy, "
        "and a setting chosen so that there is something to learn: see docs/limits.md."
    )
    page = report_page(
        folders,
        title="Does a teacher with another vocabulary help?",
        subtitle="The demo: continued pretraining of a small student on a noisy web of math "
        "problems.",
        results=dataclasses.replace(results, note=note),
    )
    return write_page(page, out / "report.html")


def print_results(results: Results) -> None:
    rows = [["method", *(f"{measure.name}, {measure.unit}" for measure in results.measures)]]
    digits = [measure.digits for measure in results.measures]
    rows += [[group.name, *map(mean_and_spread, group.values, digits)] for group in results.groups]
    console.print(f"\n{format_table(rows, rule=False)}\n\n{results.verdict}\n")


# ---- what the runs say, in words: paired over seeds, problems and texts ----


START = "start"
MEASURES = {
    "exact": Measure(name="Exact answers", unit="%", better="higher", digits=1),
    "bits_per_byte": Measure(name="Bits per byte", unit="clean text", better="lower", digits=4),
}
ABOUT = {
    START: "before training",
    "cpt": "without a teacher",
    "random": "without, random tokens",
    "guided": "guided by the teacher",
    "distill": "distilled from the teacher",
    "written, plain": "on the teacher's answers",
    "written, distilled": "on them, distilled",
}
CONTROLS = {"cpt": "without a teacher", "random": "with as many tokens at random"}
WITH_TEACHER: dict[str, tuple[str, dict[str, str]]] = {
    "guided": ("Guided by the teacher", CONTROLS),
    "distill": ("Distilled from the teacher", CONTROLS),
    "written, plain": (
        "Trained on what the teacher wrote",
        {"cpt": "on what the web holds", "guided": "guided by the teacher there"},
    ),
    "written, distilled": (
        "Distilled from what the teacher wrote",
        {"written, plain": "on its text alone"},
    ),
}
"""Methods that are held against others, and what all of them are called."""
Measured = Mapping[str, Sequence[students.Record]]
"""Method (or the start) -> one record of measures for every seed, in the same order."""


def results_of(measured: Measured) -> Results:
    """A row for every method, each mean with its interval over seeds, problems and texts."""
    groups = []
    for method, records in measured.items():
        parts = [parts_of(key, records) for key in MEASURES]
        values: list[list[float | None]] = [part.sum(1).tolist() for part in parts]
        intervals: list[tuple[float, float] | None] = [interval_of(part) for part in parts]
        if sum(records[0]["answers"]) == 0 and len(records) == 1:
            # none was right, whichever problems are drawn: as many may still be by chance
            n = np.array(float(len(records[0]["answers"])))
            intervals[0] = (0.0, 100 * (1 - float(statistics.wilson_lower(n, n))))
        about = ABOUT.get(method)
        groups.append(ResultGroup(name=method, values=values, intervals=intervals, about=about))
    return Results(measures=list(MEASURES.values()), groups=groups, verdict=verdict(measured))


def parts_of(key: str, records: Sequence[students.Record]) -> NDArray[np.float64]:
    """What every problem or text adds to a measure [seeds, problems or texts]."""
    if key == "exact":
        right_SQ = np.array([record["answers"] for record in records], np.float64)
        return np.asarray(100 * right_SQ / right_SQ.shape[1])
    documents_SD2 = np.array([record["documents"] for record in records], np.float64)
    return np.asarray(documents_SD2[..., 0] / documents_SD2[..., 1].sum(1, keepdims=True))


def interval_of(parts_SQ: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval over seeds and problems or texts; both are drawn again."""
    return statistics.bootstrap_interval(parts_SQ, np.zeros(parts_SQ.shape[1], np.int64))


def verdict(measured: Measured) -> str:
    """What methods with a teacher gain over each control, first in answers and then in bits per
    byte."""
    sentences = []
    for key, measure in MEASURES.items():
        for method, (name, controls) in WITH_TEACHER.items():
            if method in measured:
                ours = parts_of(key, measured[method])
                clauses = [
                    f"{said} {_against(measure, ours, parts_of(key, measured[control]))}"
                    for control, said in controls.items()
                    if control in measured
                ]
                value = f"{ours.sum(1).mean():.{measure.digits}f}"
                what = "% exact answers" if key == "exact" else "bits per byte"
                sentences.append(f"{name}: {value} {what}; {'; '.join(clauses)}.")
    return "\n".join([*sentences, "In brackets: the difference and its 95 % interval."])


def _against(measure: Measure, ours_SQ: NDArray[np.float64], theirs_SQ: NDArray[np.float64]) -> str:
    """A control's mean and the paired difference to it: `60.9 (+25.2, +20.1 to +30.4)`."""
    low, high = interval_of(ours_SQ - theirs_SQ)
    other, difference = theirs_SQ.sum(1).mean(), (ours_SQ - theirs_SQ).sum(1).mean()
    digits, unclear = measure.digits, ", not clear" if low <= 0 <= high else ""
    signed = [f"{value:+.{digits}f}" for value in (difference, low, high)]
    return f"{other:.{digits}f} ({signed[0]}, {signed[1]} to {signed[2]}{unclear})"


def mean_and_spread(values: Sequence[float | None], digits: int) -> str:
    """Mean ± standard deviation over seeds."""
    mean, spread = statistics.mean_and_spread([value for value in values if value is not None])
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


# ---- what `vocagnolm study run toy` needs ----


TASK = "gsm8k"  # how its answers are read: "The answer is 7."


def write_materials(folder: Path) -> None:
    """The demo's corpus, models, problems and prompts in one folder. The models get the chat
    template in which they read questions and answers."""
    budget = students.Budget()
    documents = corpus.corpus_documents(budget.documents)
    problems = corpus.held_out_problems(budget.problems, documents)
    corpus.write_jsonl(folder / "corpus.jsonl", documents)
    corpus.write_jsonl(folder / "right.jsonl", [d for d in documents if d[0] == corpus.CLEAN])
    corpus.write_labelled(folder / "labelled.jsonl", documents)
    for name, texts in corpus.specialists(budget.documents).items():
        corpus.write_jsonl(folder / f"{name}.jsonl", texts)
    corpus.write_held_out(folder / "held-out.jsonl", problems)
    corpus.write_prompts(folder / "prompts.jsonl", 2_000)
    tokens = students.NEW_TOKENS
    requests = [
        Request(TASK, index, problem.prompt, str(problem.answer), ("\nQuestion:",), tokens)
        for index, problem in enumerate(problems)
    ]
    write_requests(folder / "requests.jsonl", requests)
    for model in (students.START, students.TEACHER):
        shutil.copytree(model, folder / model.name, dirs_exist_ok=True)
        write_text(folder / model.name / "chat_template.jinja", students.TEMPLATE)
