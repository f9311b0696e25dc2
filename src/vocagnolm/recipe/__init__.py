"""Recipes: one YAML file describes a run, with one section per stage.

The command line makes its options from `recipe.sections`; what reads files is imported on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vocagnolm.recipe.sections import (
    CorpusSection,
    DataSection,
    LoraSection,
    ObjectiveSection,
    OptimizerSection,
    RunSection,
    StoreSection,
    StudentSection,
    TeacherSection,
    TrainSection,
)

if TYPE_CHECKING:
    from vocagnolm.recipe.load import Recipe, load_recipe, recipe_difference, recipe_from_dict

__all__ = [
    "CorpusSection",
    "DataSection",
    "LoraSection",
    "ObjectiveSection",
    "OptimizerSection",
    "Recipe",
    "RunSection",
    "StoreSection",
    "StudentSection",
    "TeacherSection",
    "TrainSection",
    "load_recipe",
    "recipe_difference",
    "recipe_from_dict",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("vocagnolm.recipe.load"), name)
    raise AttributeError(f"module 'vocagnolm.recipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
