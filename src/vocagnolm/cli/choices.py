"""Options that several commands share: recipes, corpora, where a model runs and in which
precision."""

from enum import StrEnum
from typing import Any

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


FORMAT_HELP = (
    "What a record holds: a text, or a conversation as `messages`, or as `prompt` and "
    "`completion`; auto: by the fields of the first. corpus.format in a recipe."
)
TEMPLATE_HELP = (
    "Conversations: a chat template (Jinja file, folder with one, or plain) in place of the "
    "model's own."
)
STUDENT_TEMPLATE_HELP = f"The student's side. {TEMPLATE_HELP}"
TEACHER_TEMPLATE_HELP = f"The teacher's side. {TEMPLATE_HELP}"
TEMPLATE_OPTION_HELP = "Conversations: a further variable of the template, name=value."


class Format(StrEnum):
    auto = "auto"
    text = "text"
    messages = "messages"
    prompt_completion = "prompt_completion"


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


def template_options(given: list[str]) -> dict[str, Any]:
    """`name=value`, the value as in YAML."""
    from vocagnolm.errors import UsageError
    from vocagnolm.recipe.schema import apply_override

    found: dict[str, Any] = {}
    for option in given:
        apply_override(found, option, UsageError, steps_of=lambda path: [path])
    return found
