"""What does distillation bring in the demo's setting, at what price, and is it the teacher? Every
rule has its own best rate, chosen on problems that are used for nothing else.

    python runs/demo_distill.py [--seeds 5] [--out out/demo-distill]

Prints a table, and leaves it with a figure in the folder (protocol and results:
research/distillation.md). 136 runs, about 40 minutes on two cores; what is finished is not done
again.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import track

from vocagnolm import statistics
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students
from vocagnolm.demo.corpus import Problem
from vocagnolm.recipe import Recipe, recipe_from_dict
from vocagnolm.workers import WorkerPool
from vocagnolm_studies.controls import write_exchanged_blocks
from vocagnolm_studies.design import Exchange, FigurePlan
from vocagnolm_studies.figures import draw

RATES = (2e-3, 4e-3, 8e-3)
TUNING_SEED = 100
TUNING_PROBLEMS = 400
BUDGET = students.Budget()
MOST = 16
"""Alternatives in the stores; rules take the first few."""
MIXED: dict[str, Any] = {"method": "distill", "keep": 1.0, "alternatives": 4, "mix": 0.5}
PURE = MIXED | {"mix": 1.0}
SHARE = {"weighting": "reducible", "floor": 0.2}


@dataclass(frozen=True)
class Rule:
    label: str
    objective: dict[str, Any] = field(default_factory=dict)
    store: str = "teacher"
    targets: Exchange | None = None


RULES = {
    "cpt": Rule("every token", {"method": "cpt"}),
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


def recipe_of(out: Path, name: str, rate: float, seed: int) -> Recipe:
    rule = RULES[name]
    objective = rule.objective
    tree = students.recipe_of(out, "cpt", seed, BUDGET).to_dict()
    tree["objective"] = objective
    tree["optimizer"] |= {"learning_rate": rate, "min_learning_rate": rate / 20}
    tree["run"]["folder"] = str(out / "runs" / f"{name}-{rate:g}-{seed}")
    tree["store"]["path"] = str(out / f"store-{rule.store}")
    if rule.store == "own":
        tree["teacher"]["tokenizer"] = str(students.START)
    blocks = "-".join(
        [
            "blocks",
            rule.store,
            str(objective.get("alternatives", objective.get("compare", "plain"))),
            *(["starts"] if objective.get("inside") is False else []),
        ]
    )
    tree["data"]["blocks"] = str(out / blocks)
    return recipe_from_dict(tree, origin=f"rule {name}")


def make_materials(out: Path) -> tuple[Path, list[Problem], list[Problem]]:
    """Corpus, stores and blocks; problems to choose rates by, and problems to report."""
    documents = corpus.corpus_documents(BUDGET.documents)
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    problems = corpus.held_out_problems(BUDGET.problems + TUNING_PROBLEMS, documents)
    reported, choosing = problems[: BUDGET.problems], problems[BUDGET.problems :]
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, reported)
    for store, teacher, alternatives in (
        ("teacher", students.TEACHER, str(MOST)),
        ("drawn", students.TEACHER, "sampled:4"),
        ("own", students.START, str(MOST)),
    ):
        students.score(teacher, out / "corpus.jsonl", out / f"store-{store}", alternatives)
    for name, rule in RULES.items():
        recipe = recipe_of(out, name, RATES[0], 0)
        if rule.objective["method"] != "cpt":
            prepare(recipe)
        if rule.targets is not None:  # three runs share these
            exchange(recipe, rule.targets, TUNING_SEED)
    return held_out, reported, choosing


def exchange(recipe: Recipe, targets: Exchange, seed: int) -> str:
    """Blocks whose targets are not the teacher's of that place."""
    from vocagnolm.alignment import load_tokenizer

    source = Path(recipe.data.blocks or "")
    target = source.with_name(f"{source.name}-{targets}-{seed}")
    vocabulary = len(load_tokenizer(students.START).vocabulary)
    write_exchanged_blocks(source, target, targets, vocabulary, seed)
    return str(target)


def train(
    out: Path, name: str, rate: float, seed: int, held_out: Path, problems: Sequence[Problem]
) -> dict[str, float]:
    recipe = recipe_of(out, name, rate, seed)
    targets = RULES[name].targets
    if targets is not None:
        recipe.data.blocks = exchange(recipe, targets, seed)
    return students.train_and_measure(recipe, held_out, problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/demo-distill"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    out: Path = given.out
    students.quiet()
    held_out, reported, choosing = make_materials(out)
    os.environ["OMP_NUM_THREADS"] = "1"
    with WorkerPool(given.workers) as pool:
        tried = {
            (name, rate): pool.submit(train, out, name, rate, TUNING_SEED, held_out, choosing)
            for name in RULES
            for rate in RATES
        }
        tuning = {key: tried[key].result()["exact"] for key in track(tried, "rates")}
        best = {name: max(RATES, key=lambda rate: tuning[name, rate]) for name in RULES}
        runs = {
            (name, seed): pool.submit(train, out, name, best[name], seed, held_out, reported)
            for seed in range(given.seeds)
            for name in RULES
        }
        found = {key: runs[key].result() for key in track(runs, "runs")}
    rows = [
        {
            "row": name,
            "label": rule.label,
            "learning_rate": best[name],
            "tuning": {f"{rate:g}": 100 * tuning[name, rate] for rate in RATES},
            "exact": [100 * found[name, seed]["exact"] for seed in range(given.seeds)],
            "clean": [found[name, seed]["bits_per_byte"] for seed in range(given.seeds)],
        }
        for name, rule in RULES.items()
    ]
    write_results(out, rows)


def printed(rows: list[dict[str, Any]]) -> str:
    """Differences are paired over seeds: mean and standard error."""
    plain = rows[0]
    lines = [
        "| rule | rate | exact answers, % | over every token | bits per byte | over every token |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [row["label"], f"{row['learning_rate']:g}"]
        for measure, digits in (("exact", 1), ("clean", 4)):
            mean, spread = statistics.mean_and_spread(row[measure])
            pairs = zip(row[measure], plain[measure], strict=True)
            gain, gain_spread = statistics.mean_and_spread([a - b for a, b in pairs])
            error = (gain_spread or 0.0) / len(row[measure]) ** 0.5
            cells.append(f"{mean:.{digits}f} ± {spread or 0.0:.{digits}f}")
            cells.append("" if row is plain else f"{gain:+.{digits}f} ± {error:.{digits}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_results(out: Path, rows: list[dict[str, Any]]) -> None:
    print(printed(rows))
    for row in rows:
        row["accuracy"], row["accuracy_spread"] = statistics.mean_and_spread(row["exact"])
        bits, spread = statistics.mean_and_spread(row["clean"])
        row["bits_per_byte"] = {"clean": {"mean": bits, "spread": spread}}
    title = "Rules of distillation in the demo's setting"
    table = {"study": "demo-distill", "title": title, "rows": rows}
    (out / "demo-distill.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    series = {"mix": ["quarter", "half", "one"]}
    series |= {name: [name] for name in ("own", "shuffled", "smoothed")}
    plan = FigurePlan(kind="frontier", reference="cpt", series=series)
    draw(table, plan, out / "demo-distill.svg")


if __name__ == "__main__":
    main()
