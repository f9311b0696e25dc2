"""Recipes: one YAML file describes a run, with one section per stage.

The command line makes its options from `recipe.sections`; what reads files is imported on first
use.
"""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names
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

__getattr__, __dir__ = lazy_names(__name__, {"load": __all__})
