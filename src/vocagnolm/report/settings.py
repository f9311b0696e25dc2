"""Which runs are seeds of one setting, and what sets the others apart."""

import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vocagnolm.errors import VocagnolmError
from vocagnolm.recipe import Recipe, recipe_from_dict
from vocagnolm.recipe.schema import parse_yaml
from vocagnolm.train.folder import RUNTIME_KEYS, read_run

PACKAGES = ("vocagnolm", "torch", "transformers", "tokenizers", "accelerate", "numpy")


def environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.system()}
    if machine := platform.machine():
        found["machine"] = f"{machine}, {os.cpu_count()} cores"
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# ---- names of models ----


# `train` leaves its models under these names, which say nothing outside the run folder
_OF_A_RUN = ("model", "start")


def model_name(source: str | Path) -> str:
    """A hub id as it is; a folder or file by its own name, and a run's model by its run."""
    path = Path(source)
    if not path.exists() and not path.is_absolute():
        return str(source)
    path = Path(os.path.abspath(path))
    in_a_run = path.name in _OF_A_RUN or path.name.startswith("checkpoint-")
    for folder in path.parents[:2]:
        if in_a_run and (folder / "recipe.yaml").is_file():
            return folder.name
    return path.name


def student_name(recipe: Recipe) -> str:
    """The student that a run began with."""
    if recipe.student.model is not None:
        return model_name(recipe.student.model)
    kind = (recipe.student.config or {}).get("model_type", "model")
    return f"{kind} from scratch"


# ---- settings of runs ----


# what a seed of one setting may differ in
_OF_A_SEED = frozenset({"run.seed", "run.folder", "run.save_every"}) | RUNTIME_KEYS
_NAMED = 3
"""Differing keys that a name holds; where there are more it says how many."""
_VALUE_LIMIT = 32

Setting = dict[str, Any]
"""`section.key` to value, of all that decides what is trained, but for the seed."""


def read_setting(run: Path) -> Setting | None:
    """None where the folder has no recipe that can be read."""
    try:
        content = parse_yaml((run / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    with contextlib.suppress(VocagnolmError):  # of another version: its own words are compared
        content = recipe_from_dict(content).to_dict()
    flat = _flat(content)
    blocks = _blocks(run)
    if blocks is not None:
        flat["blocks"] = blocks
    return {key: value for key, value in flat.items() if key not in _OF_A_SEED}


def setting_names(runs: Sequence[Path], names: Sequence[str]) -> list[str]:
    """A name for each run's setting; equal for the seeds of one. Settings of one method are told
    apart by what differs among them: `guided · objective.keep 0.4`. A run without a recipe is a
    setting of its own, under its own name."""
    settings = [read_setting(run) for run in runs]
    known: list[tuple[Setting | None, str]] = []
    result = []
    for setting, name in zip(settings, names, strict=True):
        found = next((label for other, label in known if setting and other == setting), None)
        if found is None:
            found = name if setting is None else _label(setting, settings) or name
            if found in (label for _, label in known):  # long values look alike in the short
                found = f"{found} · {name}"
            known.append((setting, found))
        result.append(found)
    return result


def _label(setting: Setting, settings: Sequence[Setting | None]) -> str | None:
    method = setting.get("objective.method")
    if not method:
        return None
    rivals = [other for other in settings if other and other.get("objective.method") == method]
    keys = dict.fromkeys(key for rival in rivals for key in rival)
    differing = [key for key in keys if any(s.get(key) != setting.get(key) for s in rivals)]
    parts = [f"{key} {_value(setting.get(key))}" for key in differing[:_NAMED]]
    if len(differing) > _NAMED:
        parts.append(f"{len(differing) - _NAMED} more")
    return " · ".join([str(method), *parts])


def _value(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= _VALUE_LIMIT else f"…{text[1 - _VALUE_LIMIT :]}"


def _flat(tree: Mapping[str, Any], above: str = "") -> Setting:
    """Sections and keys; values that are mappings themselves stay whole."""
    flat: Setting = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and not above:
            flat |= _flat(value, f"{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat


def _blocks(run: Path) -> str | None:
    """The blocks' fingerprint: equal recipes may have read other data."""
    try:
        found = read_run(run).get("blocks")
    except VocagnolmError:
        return None
    return found[:8] if isinstance(found, str) else None
