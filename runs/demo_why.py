"""When does it help to choose tokens? The demo's students in other settings, one thing changed at a
time: how much of the corpus is wrong, how much is junk, how many tokens are read, the rate, the
normalisation.

    python runs/demo_why.py [--seeds 3] [--out out/why]
    python runs/demo_why.py --long [--out out/why-long]     # does a gain last: up to 2M tokens

Prints tables of exact answers (in brackets: bits per byte of clean text), and leaves them with a
figure in the folder. 108 runs, about half an hour on two cores, and as much for the 36 long ones;
what is finished is not done again.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.progress import track

from vocagnolm import statistics
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students
from vocagnolm.demo.corpus import Problem
from vocagnolm.demo.pipeline import mean_and_spread
from vocagnolm.recipe import Recipe
from vocagnolm.workers import WorkerPool
from vocagnolm_studies.design import FigurePlan, PanelPlan
from vocagnolm_studies.figures import draw

PROBLEMS = 400
METHODS = ("cpt", "random", "guided")
LABELS = {
    "cpt": "plain pretraining",
    "random": "random 40 %",
    "guided": "guided, 40 %",
    "reducible": "reducible share, floor 0.2",
}


@dataclass(frozen=True)
class Setting:
    """The demo's own, unless said otherwise."""

    wrong: float = 0.3
    junk: float = 0.3
    tokens: int = 250_000
    rate: float = 4e-3
    normalise: Literal["all", "selected"] = "all"
    documents: int = 12_000
    """Enough for the largest budget: every token is seen once."""

    @property
    def corpus(self) -> str:
        return f"wrong-{100 * self.wrong:g}-junk-{100 * self.junk:g}"

    @property
    def shares(self) -> dict[str, float]:
        clean = 1 - self.wrong - self.junk
        return {corpus.CLEAN: clean, corpus.WRONG: self.wrong, corpus.JUNK: self.junk}

    def __str__(self) -> str:
        name = f"{self.corpus}-tokens-{self.tokens}-rate-{self.rate:g}"
        return name if self.normalise == "all" else f"{name}-{self.normalise}"


USUAL = Setting()
Sweeps = dict[str, Mapping[float | str, Setting]]
SWEEPS: Sweeps = {
    "wrong pages in the corpus, % (30 % junk)": {
        100 * share: replace(USUAL, wrong=share) for share in (0.0, 0.1, 0.3, 0.5)
    },
    "junk in the corpus, % (nothing wrong)": {
        100 * share: replace(USUAL, wrong=0.0, junk=share) for share in (0.0, 0.3, 0.6)
    },
    "tokens, thousands": {
        n / 1000: replace(USUAL, tokens=n) for n in (62_500, 125_000, 250_000, 500_000)
    },
    "learning rate": {f"{r:g}": replace(USUAL, rate=r) for r in (1.33e-3, 4e-3, 1.2e-2)},
    "loss divided by": {
        "all tokens": USUAL,
        "the selected": replace(USUAL, normalise="selected"),
    },
}
LONG: Sweeps = {
    "tokens, thousands": {
        n / 1000: replace(USUAL, tokens=n, documents=48_000)
        for n in (250_000, 500_000, 1_000_000, 2_000_000)
    },
}


def recipe_of(out: Path, setting: Setting, method: str, seed: int) -> Recipe:
    budget = students.Budget(tokens=setting.tokens)
    recipe = students.recipe_of(out / setting.corpus, method, seed, budget)
    recipe.optimizer.learning_rate = setting.rate
    recipe.optimizer.min_learning_rate = setting.rate / 20
    recipe.objective.normalise = setting.normalise
    recipe.run.folder = str(out / "runs" / f"{setting}-{method}-{seed}")
    return recipe


def make_corpora(
    out: Path, settings: Sequence[Setting], methods: Sequence[str] = METHODS
) -> tuple[Path, list[Problem]]:
    """Every corpus with its store and blocks; problems that none of them has."""
    corpora = {one.corpus: corpus.corpus_documents(one.documents, one.shares) for one in settings}
    problems = corpus.held_out_problems(PROBLEMS, [d for docs in corpora.values() for d in docs])
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems)
    for one in {one.corpus: one for one in settings}.values():
        folder = out / one.corpus
        corpus.write_jsonl(folder / "corpus.jsonl", corpora[one.corpus])
        students.score(students.TEACHER, folder / "corpus.jsonl", folder / "store")
        for method in methods:
            if method in ("guided", "reducible"):  # the others train on the blocks of the first
                prepare(recipe_of(out, one, method, 0))
    return held_out, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: out/why, or out/why-long")
    parser.add_argument(
        "--long",
        action="store_true",
        help="plain, guided and reducible students of up to 2M tokens, instead of all sweeps",
    )
    given = parser.parse_args()
    out: Path = given.out or Path("out/why-long" if given.long else "out/why")
    students.quiet()
    sweeps = LONG if given.long else SWEEPS
    methods = ("cpt", "guided", "reducible") if given.long else METHODS
    settings = list(dict.fromkeys(one for sweep in sweeps.values() for one in sweep.values()))
    held_out, problems = make_corpora(out, settings, methods)
    os.environ["OMP_NUM_THREADS"] = "1"
    runs = {
        (one, method, seed): recipe_of(out, one, method, seed)
        for seed in range(given.seeds)
        for one in settings
        for method in methods
    }
    with WorkerPool(os.cpu_count() or 1) as pool:
        job = students.train_and_measure
        jobs = {key: pool.submit(job, recipe, held_out, problems) for key, recipe in runs.items()}
        found = {key: jobs[key].result() for key in track(jobs, "runs")}
    write_results(out, found, sweeps, given.seeds)


def write_results(
    out: Path, found: dict[tuple[Setting, str, int], dict[str, float]], sweeps: Sweeps, seeds: int
) -> None:
    tried = {method for _, method, _ in found}
    labels = {method: name for method, name in LABELS.items() if method in tried}
    rows, panels = [], []
    for label, sweep in sweeps.items():
        print(f"\n| {label} | {' | '.join(labels.values())} |\n| --- |{' ---: |' * len(labels)}")
        series: dict[str, list[str]] = {name: [] for name in labels.values()}
        places = {}
        for place, one in sweep.items():
            cells = []
            for method, name in labels.items():
                runs = [found[one, method, seed] for seed in range(seeds)]
                exact = [100 * run["exact"] for run in runs]
                bits = [run["bits_per_byte"] for run in runs]
                row = f"{label}-{place}-{method}"
                mean, spread = statistics.mean_and_spread(exact)
                rows.append({
                    "row": row, "label": name, "seeds": list(range(seeds)), "place": place,
                    "accuracy": mean, "accuracy_spread": spread, "by_seed": exact,
                    "bits_per_byte_by_seed": bits,
                })  # fmt: skip
                series[name].append(row)
                if isinstance(place, float):
                    places[row] = place
                cells.append(f"{mean_and_spread(exact, 1)} ({sum(bits) / len(bits):.3f})")
            shown = place if isinstance(place, str) else f"{place:g}"
            print(f"| {shown} | {' | '.join(cells)} |")
        if places:
            log_x = "tokens" in label
            panels.append(PanelPlan(x=places, series=series, x_label=label, log_x=log_x))
    table = {"study": "why", "title": "Exact answers in the demo's setting", "rows": rows}
    (out / "why.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    draw(table, FigurePlan(kind="lines", panels=panels), out / "why.svg")


if __name__ == "__main__":
    main()
