"""Recipes: one YAML file that describes a run, a section a stage."""

from vocagnolm.recipe.load import Recipe, load_recipe, recipe_difference, recipe_from_dict
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
