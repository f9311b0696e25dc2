"""Is a student with 2-bit weights healed faster by distillation from a store than by every token?
In the demo's setting, on clean text, at two lengths; every rule has its own best rate.

    python runs/demo_heal.py [--seeds 5] [--out out/demo-heal]

A healthy student is made first, then its linear layers are rounded. Its teachers are the demo's,
whose vocabulary is another one, and the student as it was before. Prints a table, and leaves it in
the folder (protocol and results: research/distillation.md). What is finished is not done again.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from demo_distill import BUDGET, MIXED, PURE, TUNING_PROBLEMS, TUNING_SEED, Rule, printed
from rich.progress import track
from safetensors.torch import load_file, save_file

from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students
from vocagnolm.demo.corpus import Problem
from vocagnolm.recipe import Recipe, recipe_from_dict
from vocagnolm.workers import WorkerPool

BITS = 2
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
LENGTHS = (25_000, 100_000)
RULES = {
    "cpt": Rule("every token", {"method": "cpt"}),
    "guided": Rule("published: top 40 % by token", {"method": "guided"}),
    "half": Rule("distilled, mix 0.5", MIXED),
    "one": Rule("distilled, mix 1", PURE),
    "own-half": Rule("distilled, mix 0.5, from itself before rounding", MIXED, store="healthy"),
    "own-one": Rule("distilled, mix 1, from itself before rounding", PURE, store="healthy"),
}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Each row at the nearest of 2^BITS evenly spaced values."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (high - low) / (2**BITS - 1)
    found: torch.Tensor = ((weight - low) / step).round() * step + low
    return found


def damage(healthy: Path, target: Path) -> None:
    """The decoder's linear layers in few bits, made plain again; embeddings and norms stay."""
    shutil.copytree(healthy, target, dirs_exist_ok=True)
    weights = load_file(healthy / "model.safetensors")
    for name, weight in weights.items():
        if ".layers." in name and weight.ndim == 2:
            weights[name] = rounded(weight)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def recipe_of(out: Path, name: str, length: int, rate: float, seed: int) -> Recipe:
    rule = RULES[name]
    tree = students.recipe_of(out, "cpt", seed, BUDGET).to_dict()
    tree["student"]["model"] = str(out / "damaged")
    tree["objective"] = rule.objective
    tree["optimizer"] |= {"learning_rate": rate, "min_learning_rate": rate / 20, "warmup_steps": 5}
    tree["train"]["tokens"] = length
    tree["run"]["folder"] = str(out / "runs" / f"{name}-{length}-{rate:g}-{seed}")
    tree["store"]["path"] = str(out / f"store-{rule.store}")
    if rule.store == "healthy":
        tree["teacher"]["tokenizer"] = str(students.START)
    tree["data"]["blocks"] = str(out / f"blocks-{rule.store}-{rule.objective['method']}")
    return recipe_from_dict(tree, origin=f"rule {name}")


def make_materials(out: Path) -> tuple[Path, list[Problem], list[Problem]]:
    """Corpus, models, stores and blocks; problems to choose rates by, and problems to report."""
    documents = corpus.corpus_documents(BUDGET.documents, {corpus.CLEAN: 1.0})
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    problems = corpus.held_out_problems(BUDGET.problems + TUNING_PROBLEMS, documents)
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems[: BUDGET.problems])
    first = students.recipe_of(out, "cpt", 0, BUDGET)
    first.data.blocks, first.run.folder = str(out / "blocks-healthy"), str(out / "healthy-run")
    first.store.path = None
    prepare(first)
    students.train_and_measure(first, held_out, problems[: BUDGET.problems])
    healthy = out / "healthy-run/model"
    damage(healthy, out / "damaged")
    for store, teacher in (("teacher", students.TEACHER), ("healthy", healthy)):
        students.score(teacher, out / "corpus.jsonl", out / f"store-{store}", 4)
    for name in RULES:
        prepare(recipe_of(out, name, LENGTHS[0], RATES[0], 0))
    return held_out, problems[: BUDGET.problems], problems[BUDGET.problems :]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/demo-heal"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    out: Path = given.out
    students.one_thread()
    held_out, reported, choosing = make_materials(out)
    for name, model in (("before rounding", "healthy-run/model"), ("rounded", "damaged")):
        scores = students.measure(out / model, held_out, reported)
        print(f"{name}: {scores['exact']:.1%} exact, {scores['bits_per_byte']:.4f} bits per byte")
    os.environ["OMP_NUM_THREADS"] = "1"

    def submit(pool: Any, name: str, length: int, rate: float, seed: int, problems: Any) -> Any:
        recipe = recipe_of(out, name, length, rate, seed)
        return pool.submit(students.train_and_measure, recipe, held_out, problems)

    keys = [(name, length) for length in LENGTHS for name in RULES]
    with WorkerPool(given.workers) as pool:
        tried = {
            (*key, rate): submit(pool, *key, rate, TUNING_SEED, choosing)
            for key in keys
            for rate in RATES
        }
        tuning = {key: tried[key].result()["exact"] for key in track(tried, "rates")}
        best = {key: max(RATES, key=lambda rate: tuning[*key, rate]) for key in keys}
        runs = {
            (*key, seed): submit(pool, *key, best[key], seed, reported)
            for seed in range(given.seeds)
            for key in keys
        }
        found = {key: runs[key].result() for key in track(runs, "runs")}
    tables = []
    for length in LENGTHS:
        rows = [
            {
                "row": name,
                "label": rule.label,
                "learning_rate": best[name, length],
                "tuning": {f"{rate:g}": 100 * tuning[name, length, rate] for rate in RATES},
                "exact": [100 * found[name, length, s]["exact"] for s in range(given.seeds)],
                "clean": [found[name, length, s]["bits_per_byte"] for s in range(given.seeds)],
            }
            for name, rule in RULES.items()
        ]
        print(f"\n{length:,} tokens\n\n{printed(rows)}")
        tables.append({"tokens": length, "rows": rows})
    table = {
        "study": "demo-heal",
        "title": "Healing a student with 2-bit weights",
        "lengths": tables,
    }
    (out / "demo-heal.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
