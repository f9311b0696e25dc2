"""What models are called on a page."""

import os
from pathlib import Path

from vocagnolm.recipe import Recipe

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
