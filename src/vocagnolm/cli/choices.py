"""Options that several commands share: recipes, corpora, where a model runs and in which
precision."""

from enum import StrEnum

RECIPE_HELP = "The recipe: a YAML file, or a name of `vocagnolm recipe list`."
CORPUS_HELP = (
    "jsonl (.gz, .zst), parquet or text file, folder of those, an address of these (s3://, gs://, "
    "hf://, https://), or hub dataset (owner/name, owner/name:split); give it several times."
)
TEXT_FIELD_HELP = "The field of a record that holds the text; corpus.text_field in a recipe."
SPLIT_HELP = (
    "A text file (.txt, .md, ...) is one document: none; or one for each blank_line between, or "
    "each line. corpus.split in a recipe."
)


class Split(StrEnum):
    none = "none"
    blank_line = "blank_line"
    line = "line"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ScoreDtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8 = "fp8"
