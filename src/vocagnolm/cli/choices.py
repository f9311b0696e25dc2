"""Options that several commands share: recipes, where a model runs and in which precision."""

from enum import StrEnum

RECIPE_HELP = "The recipe: a YAML file, or a name of `vocagnolm recipe list`."


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
