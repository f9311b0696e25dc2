"""The short runs of a try: their recipes, and their students."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from vocagnolm.errors import VocagnolmError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.report import Results, report_page, write_page
from vocagnolm.report.runs import write_sample
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.run import train
from vocagnolm.train.settings import usual_learning_rate
from vocagnolm.tryout.folder import Facts, Tryout

STEPS = 100
"""Steps of a short run, where its text has enough tokens for them."""


@dataclass(frozen=True)
class Material:
    """What a student is trained on, and how long."""

    files: Sequence[str]
    tokens: int
    """The number of the student's tokens."""
    longest: int | None = None
    """The student's tokens in the longest conversation; None for texts, which blocks may cut."""
    store: str | None = None
    reading: Facts | None = None
    """More keys of `corpus`."""


def run_recipe(
    tryout: Tryout,
    parameters: int,
    material: Material,
    method: str,
    place: Path,
    name: str = "",
    *,
    whole: bool = False,
) -> dict[str, Facts]:
    """The recipe of a short run under `place`, or of one over a whole corpus, as a mapping."""
    files, settings = tryout.files[tryout.student], tryout.settings
    tokens = material.tokens
    most = min(2048 if whole or material.longest else 1024, files.max_context or 1024)
    block = 2 ** int(math.log2(max(min(128, tokens / 4), tokens / STEPS)))
    if material.longest is not None:
        block = 2 ** math.ceil(math.log2(max(64, material.longest)))
    block = min(block, most)
    batch = max(1, min(64, tokens // (block * STEPS)))
    fits = [n for n in (1, 2, 4, 8) if batch % n == 0 and (tryout.on_gpu or n * block <= 2048)]
    micro_batch = max(fits, default=1)
    rate = settings.learning_rate or usual_learning_rate(parameters, block * batch)
    tree: dict[str, Facts] = {
        "student": {"model": tryout.student},
        "corpus": {"files": [*material.files], **(material.reading or {})},
        "data": {"blocks": str(place / "blocks"), "block_size": block, "missing": "drop"},
        "objective": {"method": method},
        "optimizer": {
            "learning_rate": rate,
            "min_learning_rate": rate / 10,
            "warmup_steps": min(STEPS, tokens // (block * batch) // 10),
        },
        "train": {
            "batch_blocks": batch,
            "micro_batch": micro_batch,
            "device": "auto" if tryout.on_gpu else "cpu",
            "dtype": "bfloat16" if tryout.on_gpu else "float32",
        },
        "run": {"folder": str(place / "runs" / (name or method)), "seed": settings.seed},
    }
    if material.store is not None:
        tree["store"] = {"path": material.store}
    if not whole:
        tree["run"] |= {"save_every": 0, "log_every": 10**6}
        if material.store is not None:  # blocks that serve all methods
            tree["data"]["extra_columns"] = ["targets"]
    return tree


def train_short(tree: dict[str, Any]) -> Facts:
    """Train a student by a recipe, and say how that went."""
    recipe = recipe_from_dict(tree)
    done = train(recipe)
    records = read_metrics(Path(done["run"]) / "metrics.jsonl")
    return {
        "folder": done["run"],
        "model": str(done["model"]),
        "steps": done["steps"],
        "tokens": done["tokens"],
        "learning_rate": recipe.optimizer.learning_rate,
        "rate": median(record["tokens_per_second"] for record in records),
    }


def write_run_page(
    folders: Sequence[Path], shown: Path, results: Results, title: str, subtitle: str, seed: int
) -> Path:
    """The page of a try, beside `runs/`. `shown`: the run whose text is shown token by token."""
    notes = []
    if not (shown / "tokens.json").is_file():
        try:
            write_sample(shown, documents=8, seed=seed)
        except VocagnolmError as error:
            notes = [f"The page shows no text, because no sample could be made: {error}"]
    page = report_page(folders, title=title, subtitle=subtitle, results=results, notes=notes)
    return write_page(page, shown.parents[1] / "report.html")
