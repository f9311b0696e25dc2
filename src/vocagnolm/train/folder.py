"""A run folder: one recipe, one number of processes. No torch."""

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vocagnolm import __version__
from vocagnolm.errors import TrainingError
from vocagnolm.recipe import Recipe, load_recipe, recipe_difference
from vocagnolm.train.schedule import Schedule

# Keys that change nothing of what is trained: a run may go on with others.
RUNTIME_KEYS = frozenset(
    {
        "run.log_every",
        "run.report_to",
        "run.keep_checkpoints",
        "train.loader_workers",
        "train.device",
        "student.bits_per_byte",
        "data.part_documents",
        "data.extra_columns",
    }
)


def run_folder(recipe: Recipe) -> Path:
    if not recipe.run.folder:
        raise TrainingError("The recipe does not say where the run goes: set run.folder.")
    return Path(recipe.run.folder)


def read_run(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return about
    except FileNotFoundError:
        return {}


def refuse_other_run(folder: Path, recipe: Recipe, world_size: int, found: dict[str, Any]) -> None:
    """A run folder belongs to one recipe and one number of processes."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise TrainingError(f"{folder} is not empty and not a run. Choose another run.folder.")
        return
    if not _has_begun(folder):
        return
    difference = recipe_difference(load_recipe(path), recipe, RUNTIME_KEYS)
    if found and found["schedule"]["world_size"] != world_size and not found.get("finished"):
        difference.append(f"processes: {found['schedule']['world_size']} -> {world_size}")
    if difference:
        raise TrainingError(
            f"{folder} holds a run with another recipe:\n  "
            + "\n  ".join(difference)
            + "\nGive these settings back to go on with it, or choose another run.folder."
        )


def _has_begun(folder: Path) -> bool:
    """Whether a step was ever made: a run that failed before (a model that does not load) must not
    hold its folder against the corrected recipe."""
    made = (folder / "metrics.jsonl", folder / "model", *(folder / "checkpoints").glob("*"))
    return any(path.exists() for path in made)


def begin_run(folder: Path, recipe: Recipe, schedule: Schedule) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    begun = _has_begun(folder)
    if not begun or not (folder / "recipe.yaml").exists():
        _write(folder / "recipe.yaml", recipe.to_yaml())
    if not begun or not (folder / "run.json").exists():
        about = {
            "finished": False,
            "schedule": asdict(schedule),
            "versions": {
                "vocagnolm": __version__,
                "torch": version("torch"),
                "transformers": version("transformers"),
                "python": platform.python_version(),
            },
        }
        _write(folder / "run.json", json.dumps(about, indent=1) + "\n")


def finish_run(folder: Path) -> None:
    _write(folder / "run.json", json.dumps({**read_run(folder), "finished": True}, indent=1) + "\n")


def run_summary(folder: Path) -> dict[str, Any]:
    """What `vocagnolm train` prints at the end."""
    about = read_run(folder)
    from vocagnolm.train.metrics import read_metrics

    records = read_metrics(folder / "metrics.jsonl")
    schedule = about["schedule"]
    return {
        "run": str(folder),
        "model": str(folder / "model"),
        "finished": about["finished"],
        "steps": schedule["steps"],
        "tokens": schedule["steps"] * schedule["batch_blocks"] * schedule["block_size"],
        "last": records[-1] if records else None,
    }


def _write(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)
