"""Studies in the demo's setting, on a CPU: tiny students of the demo, one thing changed at a time.

    python runs/demo.py why         # how much of the corpus is wrong or junk, tokens, rate
    python runs/demo.py why-long    # does a gain last: up to 2M tokens
    python runs/demo.py teachers    # weaker teachers, and one with the student's vocabulary
    python runs/demo.py distill     # distillation, its price, and whether it is the teacher
    python runs/demo.py heal        # a student with 2-bit weights
    python runs/demo.py peers       # ULD and GOLD's loss (pip install --no-deps trl==1.16.0)

Each prints its tables and leaves them in its folder (`--out`), most with a figure; the published
ones are in research/results (protocols and results: research/demo-setting.md for the first three,
research/distillation.md for the others). In `distill`, `heal` and `peers` every rule has its own
best rate, chosen on problems that are used for nothing else. A study takes half an hour to an hour
on two cores; what is finished is not done again.
"""

import argparse
import json
import math
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import demo_models
import torch
from demo_documents import STEP_TOKENS, Documents, train_on_documents
from rich.progress import track
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from vocagnolm.alignment import load_tokenizer
from vocagnolm.base.children import WorkerPool
from vocagnolm.base.files import write_json
from vocagnolm.base.statistics import mean_and_spread, mean_error
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students
from vocagnolm.demo.corpus import Problem
from vocagnolm.demo.pipeline import mean_and_spread as printed_spread
from vocagnolm.demo.students import Record
from vocagnolm.recipe import Recipe, recipe_from_dict
from vocagnolm.train.folder import read_metrics
from vocagnolm_studies.controls import write_exchanged_blocks
from vocagnolm_studies.design import Exchange, FigurePlan, PanelPlan
from vocagnolm_studies.figures import draw
from vocagnolm_studies.labels import LabelFields
from vocagnolm_studies.selection import selection_study

BUDGET = students.Budget()
Table = dict[str, Any]
Rows = list[dict[str, Any]]


def write_table(out: Path, name: str, table: Table) -> None:
    (out / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


# ---- when does it help to choose tokens? ----


@dataclass(frozen=True)
class Setting:
    """A corpus and a student's training; the defaults are the demo's own."""

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
LONG_SWEEPS: Sweeps = {
    "tokens, thousands": {
        n / 1000: replace(USUAL, tokens=n, documents=48_000)
        for n in (250_000, 500_000, 1_000_000, 2_000_000)
    },
}
WHY_METHODS = {
    "cpt": "plain pretraining",
    "random": "random 40 %",
    "guided": "guided, 40 %",
    "reducible": "reducible share, floor 0.2",
}
WITH_STORE = ("guided", "reducible")


def why_recipe(out: Path, setting: Setting, method: str, seed: int) -> Recipe:
    budget = students.Budget(tokens=setting.tokens)
    recipe = students.recipe_of(out / setting.corpus, method, seed, budget)
    recipe.optimizer.learning_rate = setting.rate
    recipe.optimizer.min_learning_rate = setting.rate / 20
    recipe.objective.normalise = setting.normalise
    recipe.run.folder = str(out / "runs" / f"{setting}-{method}-{seed}")
    return recipe


def why_materials(
    out: Path, settings: Sequence[Setting], methods: Sequence[str]
) -> tuple[Path, list[Problem]]:
    """Every corpus with its store and blocks, and problems that none of them has."""
    by_corpus = {setting.corpus: setting for setting in settings}
    corpora = {n: corpus.corpus_documents(s.documents, s.shares) for n, s in by_corpus.items()}
    problems = corpus.held_out_problems(
        BUDGET.problems, [document for documents in corpora.values() for document in documents]
    )
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems)
    for name, setting in by_corpus.items():
        folder = out / name
        corpus.write_jsonl(folder / "corpus.jsonl", corpora[name])
        students.score(students.TEACHER, folder / "corpus.jsonl", folder / "store")
        for method in methods:
            if method in WITH_STORE:  # the others train on the blocks of the first
                prepare(why_recipe(out, setting, method, 0))
    return held_out, problems


def why(given: argparse.Namespace, *, long: bool = False) -> None:
    out: Path = given.out
    students.quiet()
    sweeps = LONG_SWEEPS if long else SWEEPS
    methods = [m for m in WHY_METHODS if m != ("random" if long else "reducible")]
    settings = list(dict.fromkeys(s for sweep in sweeps.values() for s in sweep.values()))
    held_out, problems = why_materials(out, settings, methods)
    os.environ["OMP_NUM_THREADS"] = "1"
    with WorkerPool(given.workers) as pool:
        jobs = {
            (setting, method, seed): pool.submit(
                students.train_and_measure,
                why_recipe(out, setting, method, seed),
                held_out,
                problems,
            )
            for seed in range(given.seeds)
            for setting in settings
            for method in methods
        }
        runs = {key: jobs[key].result() for key in track(jobs, "runs")}
    rows: Rows = []
    panels = []
    for label, sweep in sweeps.items():
        names = [WHY_METHODS[method] for method in methods]
        print(f"\n| {label} | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}")
        series: dict[str, list[str]] = {name: [] for name in names}
        places = {}
        for place, setting in sweep.items():
            cells = []
            for method in methods:
                by_seed = [runs[setting, method, seed] for seed in range(given.seeds)]
                row = why_row(f"{label}-{place}-{method}", method, place, by_seed)
                rows.append(row)
                series[WHY_METHODS[method]].append(row["row"])
                if isinstance(place, float):
                    places[row["row"]] = place
                bits = statistics.fmean(row["bits_per_byte_by_seed"])
                cells.append(f"{printed_spread(row['by_seed'], 1)} ({bits:.3f})")
            shown = place if isinstance(place, str) else f"{place:g}"
            print(f"| {shown} | {' | '.join(cells)} |")
        if places:
            log_x = "tokens" in label
            panels.append(PanelPlan(x=places, series=series, x_label=label, log_x=log_x))
    table = {"study": "why", "title": "Exact answers in the demo's setting", "rows": rows}
    write_table(out, "why", table)
    draw(table, FigurePlan(kind="lines", panels=panels), out / "why.svg")


def why_row(name: str, method: str, place: float | str, by_seed: Sequence[Record]) -> Table:
    exact = [100 * run["exact"] for run in by_seed]
    mean, spread = mean_and_spread(exact)
    return {
        "row": name,
        "label": WHY_METHODS[method],
        "seeds": list(range(len(by_seed))),
        "place": place,
        "accuracy": mean,
        "accuracy_spread": spread,
        "by_seed": exact,
        "bits_per_byte_by_seed": [run["bits_per_byte"] for run in by_seed],
    }


# ---- how strong must a teacher be? ----


def own_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """The student's, instead of one made from the texts."""
    return Tokenizer.from_file(str(students.START / "tokenizer.json"))


SHIPPED = demo_models.PLANS[0]
USUAL_TEACHER = f"{SHIPPED.steps} steps, the demo's"
OWN_VOCABULARY = f"{SHIPPED.steps} steps, the student's vocabulary"
TEACHERS = {
    **{f"{n} steps": replace(SHIPPED, steps=n) for n in (100, 200, 250, 300, 375, 450, 600)},
    USUAL_TEACHER: SHIPPED,
    OWN_VOCABULARY: replace(SHIPPED, tokenizer=own_tokenizer),
}
CONTROLS = {"cpt": "none: plain pretraining", "random": "none: random 40 %"}
TAUGHT = {
    "guided": "published: top 40 % by token",
    "reducible": "reducible share, floor 0.2",
    "alm": "likelihood matching",
}


def taught_recipe(out: Path, teacher: str, method: str, seed: int) -> Recipe:
    """A student's recipe; the controls do not look at the teacher."""
    folder = out / "teachers" / teacher
    recipe = students.recipe_of(folder, method, seed, BUDGET)
    recipe.teacher.tokenizer = str(folder / "model")
    recipe.corpus.files = [str(out / "corpus.jsonl")]
    return recipe


def make_teacher(out: Path, name: str) -> dict[str, float]:
    """Make a teacher with its store and blocks, and measure its bits per byte on the corpus and how
    often a wrong result has a higher loss than a right one, as `study selection --label` does."""
    students.one_thread()
    folder = out / "teachers" / name
    demo_models.make_model(TEACHERS[name], folder / "model")
    bits = students.score(folder / "model", out / "corpus.jsonl", folder / "store")
    for method in TAUGHT:
        prepare(taught_recipe(out, name, method, 0))
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
    area = labels.areas["results"]["teacher loss"]
    return {
        "bits_per_byte_corpus": bits,
        "tells_wrong": area.value,
        "tells_wrong_low": area.low,
        "tells_wrong_high": area.high,
    }


def teachers(given: argparse.Namespace) -> None:
    out: Path = given.out
    students.quiet()
    documents = corpus.corpus_documents(BUDGET.documents)
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    corpus.write_labelled(out / "labelled.jsonl", documents)
    problems = corpus.held_out_problems(BUDGET.problems, documents)
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: Rows = []
    with WorkerPool(given.workers) as pool:
        made = {name: pool.submit(make_teacher, out, name) for name in TEACHERS}
        about = {name: future.result() for name, future in made.items()}

        def train(name: str, method: str) -> list[Future[Record]]:
            recipes = [taught_recipe(out, name, method, seed) for seed in range(given.seeds)]
            job = students.train_and_measure
            return [pool.submit(job, recipe, held_out, problems) for recipe in recipes]

        jobs: dict[tuple[str | None, str], list[Future[Record]]] = {
            (None, method): train(USUAL_TEACHER, method) for method in CONTROLS
        }
        jobs |= {(name, method): train(name, method) for method in TAUGHT for name in TEACHERS}
        for (teacher, method), seeds in track(jobs.items(), "students"):
            shares = [100 * seed.result()["exact"] for seed in seeds]
            rows.append({"teacher": teacher, "method": method, "by_seed": shares})
    for row in rows:
        if row["teacher"] is not None:
            model = out / "teachers" / row["teacher"] / "model"
            itself = students.measure(model, held_out, problems)
            row |= about[row["teacher"]]
            row["bits_per_byte_clean"] = itself["bits_per_byte"]
            row["teacher_exact"] = 100 * itself["exact"]
        row["row"] = " ".join(filter(None, (row["teacher"], row["method"])))
        row["label"] = CONTROLS.get(row["row"], row["row"])
        row["accuracy"], row["accuracy_spread"] = mean_and_spread(row["by_seed"])
    print_teachers({(row["teacher"], row["method"]): row for row in rows})
    table = {"study": "teachers", "title": "Students against their teachers", "rows": rows}
    write_table(out, "teachers", table)
    others = [name for name in TEACHERS if name != OWN_VOCABULARY]
    series = {label: [f"{name} {method}" for name in others] for method, label in TAUGHT.items()}
    figure = FigurePlan(
        kind="lines",
        x={row["row"]: TEACHERS[row["teacher"]].steps for row in rows if row["teacher"]},
        log_x=True,
        series=series | {"published, the student's vocabulary": [f"{OWN_VOCABULARY} guided"]},
        reference="cpt",
        x_label="steps that the teacher was trained for",
    )
    draw(table, figure, out / "teachers.svg")


def print_teachers(rows: Mapping[tuple[str | None, str], Table]) -> None:
    head = (
        "teacher | exact answers | bits per byte, corpus | clean text | wrong has the higher loss"
    )
    print(f"\n| {head} | its student, {' | '.join(TAUGHT.values())} |")
    print("| --- |" + " ---: |" * (4 + len(TAUGHT)))
    for method, label in CONTROLS.items():
        empty = "  |" * (len(TAUGHT) - 1)
        exact = printed_spread(rows[None, method]["by_seed"], 1)
        print(f"| {label} |  |  |  |  | {exact} |{empty}")
    for name in TEACHERS:
        row = rows[name, "guided"]
        about = (
            f"{row['teacher_exact']:.1f} | {row['bits_per_byte_corpus']:.3f} | "
            f"{row['bits_per_byte_clean']:.3f} | {row['tells_wrong']:.3f} "
            f"({row['tells_wrong_low']:.3f} to {row['tells_wrong_high']:.3f})"
        )
        exact = " | ".join(printed_spread(rows[name, m]["by_seed"], 1) for m in TAUGHT)
        print(f"| {name} | {about} | {exact} |")


# ---- rules that have their own rates ----

TUNING_SEED = 100
TUNING_PROBLEMS = 400
MIXED: dict[str, Any] = {"method": "distill", "keep": 1.0, "alternatives": 4, "mix": 0.5}
PURE = MIXED | {"mix": 1.0}
SHARE = {"weighting": "reducible", "floor": 0.2}
CPT = {"method": "cpt"}


@dataclass(frozen=True)
class Rule:
    label: str
    objective: dict[str, Any] = field(default_factory=dict)
    store: str = "teacher"
    targets: Exchange | None = None
    data: dict[str, Any] = field(default_factory=dict)
    """Settings of the blocks that are not the demo's."""


Train = Callable[..., Record]
"""(out, rule, tokens, rate, seed, held-out text, problems) -> what a student reaches."""


def problems_of(
    out: Path, shares: dict[str, float] | None = None
) -> tuple[Path, list[Problem], list[Problem]]:
    """Write the corpus and the held-out text, and give these with problems to report and problems
    to choose rates by."""
    documents = corpus.corpus_documents(BUDGET.documents, *([shares] if shares else []))
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    problems = corpus.held_out_problems(BUDGET.problems + TUNING_PROBLEMS, documents)
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems[: BUDGET.problems])
    return held_out, problems[: BUDGET.problems], problems[BUDGET.problems :]


def tuned_rows(
    pool: WorkerPool,
    train: Train,
    out: Path,
    labels: Mapping[tuple[str, int], str],
    rates: Sequence[float],
    seeds: int,
    materials: tuple[Path, list[Problem], list[Problem]],
) -> Rows:
    """A row for every rule and number of tokens: all rates with the tuning seed, then the seeds
    with the rate that solved most of the problems to choose by."""
    held_out, reported, choosing = materials
    tried = {
        (*key, rate): pool.submit(train, out, *key, rate, TUNING_SEED, held_out, choosing)
        for key in labels
        for rate in rates
    }
    tuning = {key: tried[key].result()["exact"] for key in track(tried, "rates")}
    best = {key: max(rates, key=lambda rate: tuning[*key, rate]) for key in labels}
    jobs = {
        (*key, seed): pool.submit(train, out, *key, best[key], seed, held_out, reported)
        for seed in range(seeds)
        for key in labels
    }
    runs = {key: jobs[key].result() for key in track(jobs, "runs")}
    rows = []
    for key, label in labels.items():
        by_seed = [runs[*key, seed] for seed in range(seeds)]
        speeds = [run["speed"] for run in by_seed if "speed" in run]
        rows.append(
            {
                "row": key[0],
                "label": label,
                "tokens": key[1],
                **({"tokens_per_second": statistics.median(speeds)} if speeds else {}),
                "learning_rate": best[key],
                "tuning": {f"{rate:g}": 100 * tuning[*key, rate] for rate in rates},
                "exact": [100 * run["exact"] for run in by_seed],
                "clean": [run["bits_per_byte"] for run in by_seed],
            }
        )
    return rows


def print_rows(rows: Rows) -> None:
    """Differences are paired over seeds: mean and standard error."""
    print(
        "| rule | rate | exact answers, % | over every token | bits per byte | over every token |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    plain = rows[0]
    for row in rows:
        cells = [row["label"], f"{row['learning_rate']:g}"]
        for measure, digits in (("exact", 1), ("clean", 4)):
            mean, spread = mean_and_spread(row[measure])
            gaps = [a - b for a, b in zip(row[measure], plain[measure], strict=True)]
            gain, error = statistics.fmean(gaps), mean_error(gaps) or 0.0
            cells.append(f"{mean:.{digits}f} ± {spread or 0.0:.{digits}f}")
            cells.append("" if row is plain else f"{gain:+.{digits}f} ± {error:.{digits}f}")
        print(f"| {' | '.join(cells)} |")


def ruled_tree(
    out: Path, rule: Rule, name: str, tokens: int, rate: float, seed: int
) -> dict[str, Any]:
    """The demo's recipe with a rule's objective, rate and store."""
    tree = students.recipe_of(out, "cpt", seed, BUDGET).to_dict()
    tree["objective"] = rule.objective
    tree["optimizer"] |= {"learning_rate": rate, "min_learning_rate": rate / 20}
    tree["train"]["tokens"] = tokens
    tree["store"]["path"] = str(out / f"store-{rule.store}")
    tree["run"]["folder"] = str(out / "runs" / f"{name}-{tokens}-{rate:g}-{seed}")
    return tree


# ---- what distillation brings, and whether it is the teacher ----

DISTILL_RATES = (2e-3, 4e-3, 8e-3)
MOST = "16"
"""Alternatives in the stores; rules take the first few."""
DISTILL_RULES = {
    "cpt": Rule("every token", CPT),
    "guided": Rule("published: top 40 % by token", {"method": "guided"}),
    "reducible": Rule("reducible share, floor 0.2", students.BY_STRETCH["reducible"]),
    "quarter": Rule("distilled, mix 0.25", MIXED | {"mix": 0.25}),
    "half": Rule("distilled, mix 0.5", MIXED),
    "one": Rule("distilled, mix 1", PURE),
    "falling": Rule(
        "distilled, mix 1 that falls to 0 over the last third",
        PURE | {"mix_end": 0.0, "mix_hold": 2 / 3},
    ),
    "weighted": Rule("distilled, mix 0.5, weighted by the reducible share", MIXED | SHARE),
    "selected": Rule("distilled, mix 0.5, the top 40 % by token alone", MIXED | {"keep": 0.4}),
    "share": Rule("distilled, the reducible share as the mix", PURE | {"mix_by": "reducible"}),
    "k1": Rule("distilled, mix 0.5, K 1", MIXED | {"alternatives": 1}),
    "k16": Rule("distilled, mix 0.5, K 16", MIXED | {"alternatives": 16}),
    "drawn": Rule("distilled, mix 0.5, 4 drawn", MIXED, store="drawn"),
    "starts": Rule("distilled, mix 0.5, shared starts alone", MIXED | {"inside": False}),
    # is it the teacher?
    "own": Rule("control: the start as its own teacher", MIXED, store="own"),
    "shuffled": Rule("control: alternatives of another place", MIXED, targets="shuffled"),
    "smoothed": Rule("control: label smoothing of the same mass", MIXED, targets="uniform"),
}


def distill_recipe(out: Path, name: str, tokens: int, rate: float, seed: int) -> Recipe:
    rule = DISTILL_RULES[name]
    tree = ruled_tree(out, rule, name, tokens, rate, seed)
    if rule.store == "own":
        tree["teacher"]["tokenizer"] = str(students.START)
    kind = rule.objective.get("alternatives", rule.objective.get("compare", "plain"))
    starts = "-starts" if rule.objective.get("inside") is False else ""
    tree["data"]["blocks"] = str(out / f"blocks-{rule.store}-{kind}{starts}")
    return recipe_from_dict(tree, origin=f"rule {name}")


def exchange(recipe: Recipe, targets: Exchange, seed: int) -> str:
    """Blocks whose targets are not those that the teacher gave at the place."""
    source = Path(recipe.data.blocks or "")
    target = source.with_name(f"{source.name}-{targets}-{seed}")
    vocabulary = len(load_tokenizer(students.START).vocabulary)
    write_exchanged_blocks(source, target, targets, vocabulary, seed)
    return str(target)


def train_distilled(
    out: Path, name: str, tokens: int, rate: float, seed: int, held_out: Path, problems: Any
) -> Record:
    recipe = distill_recipe(out, name, tokens, rate, seed)
    targets = DISTILL_RULES[name].targets
    if targets is not None:
        recipe.data.blocks = exchange(recipe, targets, seed)
    return students.train_and_measure(recipe, held_out, problems)


def distill(given: argparse.Namespace) -> None:
    out: Path = given.out
    students.quiet()
    materials = problems_of(out)
    for store, teacher, alternatives in (
        ("teacher", students.TEACHER, MOST),
        ("drawn", students.TEACHER, "sampled:4"),
        ("own", students.START, MOST),
    ):
        students.score(teacher, out / "corpus.jsonl", out / f"store-{store}", alternatives)
    for name, rule in DISTILL_RULES.items():
        recipe = distill_recipe(out, name, BUDGET.tokens, DISTILL_RATES[0], 0)
        if rule.objective != CPT:
            prepare(recipe)
        if rule.targets is not None:  # three runs share these
            exchange(recipe, rule.targets, TUNING_SEED)
    os.environ["OMP_NUM_THREADS"] = "1"
    labels = {(name, BUDGET.tokens): rule.label for name, rule in DISTILL_RULES.items()}
    with WorkerPool(given.workers) as pool:
        rates = DISTILL_RATES
        rows = tuned_rows(pool, train_distilled, out, labels, rates, given.seeds, materials)
    print_rows(rows)
    for row in rows:
        row["accuracy"], row["accuracy_spread"] = mean_and_spread(row["exact"])
        bits, spread = mean_and_spread(row["clean"])
        row["bits_per_byte"] = {"clean": {"mean": bits, "spread": spread}}
    title = "Rules of distillation in the demo's setting"
    table = {"study": "demo-distill", "title": title, "rows": rows}
    write_table(out, "demo-distill", table)
    series = {"mix": ["quarter", "half", "one"]}
    series |= {name: [name] for name in ("own", "shuffled", "smoothed")}
    plan = FigurePlan(kind="frontier", reference="cpt", series=series)
    draw(table, plan, out / "demo-distill.svg")


# ---- a student with 2-bit weights ----

HEAL_BITS = 2
HEAL_RATES = (5e-4, 1e-3, 2e-3, 4e-3)
HEAL_TOKENS = (25_000, 100_000)
HEAL_RULES = {
    "cpt": Rule("every token", CPT),
    "guided": Rule("published: top 40 % by token", {"method": "guided"}),
    "half": Rule("distilled, mix 0.5", MIXED),
    "one": Rule("distilled, mix 1", PURE),
    "own-half": Rule("distilled, mix 0.5, from itself before rounding", MIXED, store="healthy"),
    "own-one": Rule("distilled, mix 1, from itself before rounding", PURE, store="healthy"),
}


def rounded(weight: Tensor) -> Tensor:
    """Each row at the nearest of 2^HEAL_BITS evenly spaced values."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (high - low) / (2**HEAL_BITS - 1)
    plain: Tensor = ((weight - low) / step).round() * step + low
    return plain


def damage(healthy: Path, target: Path) -> None:
    """The decoder's linear layers in few bits, made plain again; embeddings and norms stay."""
    shutil.copytree(healthy, target, dirs_exist_ok=True)
    weights = load_file(healthy / "model.safetensors")
    for name, weight in weights.items():
        if ".layers." in name and weight.ndim == 2:
            weights[name] = rounded(weight)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def heal_recipe(out: Path, name: str, tokens: int, rate: float, seed: int) -> Recipe:
    rule = HEAL_RULES[name]
    tree = ruled_tree(out, rule, name, tokens, rate, seed)
    tree["student"]["model"] = str(out / "damaged")
    tree["optimizer"]["warmup_steps"] = 5
    if rule.store == "healthy":
        tree["teacher"]["tokenizer"] = str(students.START)
    tree["data"]["blocks"] = str(out / f"blocks-{rule.store}-{rule.objective['method']}")
    return recipe_from_dict(tree, origin=f"rule {name}")


def train_healed(
    out: Path, name: str, tokens: int, rate: float, seed: int, held_out: Path, problems: Any
) -> Record:
    recipe = heal_recipe(out, name, tokens, rate, seed)
    return students.train_and_measure(recipe, held_out, problems)


def heal(given: argparse.Namespace) -> None:
    out: Path = given.out
    students.one_thread()
    materials = problems_of(out, {corpus.CLEAN: 1.0})
    held_out, reported, _ = materials
    first = students.recipe_of(out, "cpt", 0, BUDGET)
    first.data.blocks, first.run.folder = str(out / "blocks-healthy"), str(out / "healthy-run")
    first.store.path = None
    prepare(first)
    students.train_and_measure(first, held_out, reported)
    healthy = out / "healthy-run/model"
    damage(healthy, out / "damaged")
    for store, teacher in (("teacher", students.TEACHER), ("healthy", healthy)):
        students.score(teacher, out / "corpus.jsonl", out / f"store-{store}", 4)
    for name in HEAL_RULES:
        prepare(heal_recipe(out, name, HEAL_TOKENS[0], HEAL_RATES[0], 0))
    for name, model in (("before rounding", healthy), ("rounded", out / "damaged")):
        scores = students.measure(model, held_out, reported)
        print(f"{name}: {scores['exact']:.1%} exact, {scores['bits_per_byte']:.4f} bits per byte")
    os.environ["OMP_NUM_THREADS"] = "1"
    labels = {(n, tokens): rule.label for tokens in HEAL_TOKENS for n, rule in HEAL_RULES.items()}
    with WorkerPool(given.workers) as pool:
        rows = tuned_rows(pool, train_healed, out, labels, HEAL_RATES, given.seeds, materials)
    by_tokens = {count: [row for row in rows if row["tokens"] == count] for count in HEAL_TOKENS}
    for count, some in by_tokens.items():
        print(f"\n{count:,} tokens\n")
        print_rows(some)
    lengths = [{"tokens": count, "rows": some} for count, some in by_tokens.items()]
    title = "Healing a student with 2-bit weights"
    write_table(out, "demo-heal", {"study": "demo-heal", "title": title, "lengths": lengths})


# ---- online losses of other projects, at equal tokens and in equal time ----

PEER_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
# as TRL has it by default; and matched tokens compared one by one, predictions where they belong
GOLD_DEFAULT = {"uld_use_hybrid_loss": False, "uld_token_merge_strategy": "observed"}
GOLD_HYBRID = {"uld_use_hybrid_loss": True, "uld_token_merge_strategy": "bayesian"}
LONGER, MASKED = {"block_size": 512}, {"document_mask": True}
PEER_RULES: dict[str, Rule | Documents] = {
    "cpt": Rule("every token", CPT),
    "guided": Rule("published: top 40 % by token", {"method": "guided"}),
    "alm": Rule("approximate likelihood matching", {"method": "alm"}),
    "half": Rule("distilled, mix 0.5", MIXED),
    "uld": Rule("ULD, online", {"method": "uld"}),
    "masked": Rule("every token, blocks, masked", CPT, data=MASKED),
    "longer": Rule("every token, blocks of 512", CPT, data=LONGER),
    "longer-masked": Rule("every token, blocks of 512, masked", CPT, data=LONGER | MASKED),
    "longer-masked-half": Rule(
        "distilled, mix 0.5, blocks of 512, masked", MIXED, data=LONGER | MASKED
    ),
    "documents": Documents("every token, whole documents", CPT),
    "documents-guided": Documents("published: top 40 %, whole documents", {"method": "guided"}),
    "documents-half": Documents(
        "distilled, mix 0.5, whole documents", {"method": "distill", "mix": 0.5}
    ),
    "gold": Documents("GOLD's loss as by default, online", gold=GOLD_DEFAULT),
    "hybrid": Documents("GOLD's hybrid loss, online", gold=GOLD_HYBRID),
    "hybrid-text": Documents("GOLD's hybrid loss and every token, online", CPT, GOLD_HYBRID),
}
ONLINE = ("uld", "gold", "hybrid", "hybrid-text")


def peer_recipe(out: Path, name: str, tokens: int, rate: float, seed: int) -> Recipe:
    rule = PEER_RULES[name]
    assert isinstance(rule, Rule)
    tree = ruled_tree(out, rule, name, tokens, rate, seed)
    tree["store"]["path"] = str(out / "store")
    if tokens < BUDGET.tokens:
        steps = math.ceil(tokens / STEP_TOKENS)
        tree["optimizer"]["warmup_steps"] = min(20, steps // 2)
    tree["run"]["log_every"] = 1
    if name in ONLINE:
        tree["teacher"] = {"model": str(students.TEACHER), "online": True}
        del tree["store"]
    blocks = f"blocks-{name if rule.data else rule.objective['method']}"
    tree["data"] |= {"blocks": str(out / blocks), **rule.data}
    tree["train"]["batch_blocks"] = STEP_TOKENS // tree["data"]["block_size"]
    tree["train"]["micro_batch"] = tree["train"]["batch_blocks"]
    return recipe_from_dict(tree, origin=f"rule {name}")


def train_peer(
    out: Path, name: str, tokens: int, rate: float, seed: int, held_out: Path, problems: Any
) -> Record:
    rule = PEER_RULES[name]
    if isinstance(rule, Rule):
        recipe = peer_recipe(out, name, tokens, rate, seed)
        measures = students.train_and_measure(recipe, held_out, problems)
        records = read_metrics(Path(recipe.run.folder or "") / "metrics.jsonl")
        return measures | {"speed": statistics.median(r["tokens_per_second"] for r in records)}
    folder = out / "runs" / f"{name}-{tokens}-{rate:g}-{seed}"
    measured = folder / "measures.json"
    if not measured.is_file():
        students.one_thread()
        torch.manual_seed(seed)
        speed = train_on_documents(out, rule, rate, tokens, seed, folder)
        measures = students.measure(folder / "model", held_out, problems)
        write_json(measured, measures | {"speed": speed})
    kept: Record = json.loads(measured.read_text(encoding="utf-8"))
    return kept


def peers(given: argparse.Namespace) -> None:
    out: Path = given.out
    students.quiet()
    materials = problems_of(out)
    students.score(students.TEACHER, out / "corpus.jsonl", out / "store", students.ALTERNATIVES)
    for name, rule in PEER_RULES.items():
        if isinstance(rule, Rule):
            prepare(peer_recipe(out, name, BUDGET.tokens, PEER_RATES[0], 0))
    os.environ["OMP_NUM_THREADS"] = "1"
    with WorkerPool(given.workers) as pool:

        def study(tokens: dict[str, int]) -> Rows:
            labels = {(name, count): PEER_RULES[name].label for name, count in tokens.items()}
            return tuned_rows(pool, train_peer, out, labels, PEER_RATES, given.seeds, materials)

        equal_tokens = study(dict.fromkeys(PEER_RULES, BUDGET.tokens))
        speed = {row["row"]: row["tokens_per_second"] for row in equal_tokens}
        time_of = {name: round(BUDGET.tokens * speed[name] / speed["cpt"]) for name in ONLINE}
        equal_time = study(time_of)
    equal_time = [r for r in equal_tokens if r["row"] in ("cpt", "half")] + equal_time
    for title, rows in (("equal tokens", equal_tokens), ("equal time", equal_time)):
        print(f"\n**{title}**\n")
        print_rows(rows)
        print()
        for row in rows:
            share = row["tokens_per_second"] / rows[0]["tokens_per_second"]
            print(f"{row['row']}: {row['tokens']:,} tokens, {share:.3f} x the speed of every token")
    write_table(out, "demo-peers", {"equal_tokens": equal_tokens, "equal_time": equal_time})


# ---- the command ----

STUDIES: dict[str, tuple[Callable[[argparse.Namespace], None], int]] = {
    "why": (why, 3),
    "why-long": (lambda given: why(given, long=True), 3),
    "teachers": (teachers, 3),
    "distill": (distill, 5),
    "heal": (heal, 5),
    "peers": (peers, 5),
}
"""Name -> what it does, and its number of seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, help="default: as published")
    parser.add_argument("--out", type=Path, help="default: out/demo-STUDY")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    study, seeds = STUDIES[given.study]
    given.seeds = given.seeds or seeds
    given.out = given.out or Path("out") / f"demo-{given.study}"
    study(given)


if __name__ == "__main__":
    main()
