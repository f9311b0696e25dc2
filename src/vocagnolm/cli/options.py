"""Options made from the fields of settings: name, default, choices, limits and help text stand in
`vocagnolm.recipe.sections` alone."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import typer

from vocagnolm.errors import SettingError, UsageError
from vocagnolm.recipe.schema import Limits, OneOf, Schema, apply_override, fields_of, hints
from vocagnolm.recipe.sections import (
    CorpusSection,
    EngineSection,
    ObjectiveSection,
    PromptsSection,
    QuestionsSection,
    RaySection,
    ScoreSection,
    ServerSection,
    SpendingSection,
    StudentSection,
    TeacherSection,
    WriteSection,
)

Given = dict[str, Any]
"""What the user gave, by the names of the fields; the rest has the defaults of the section."""

RECIPE = typer.Argument(..., help="A recipe: YAML file, or name from `vocagnolm recipe list`.")
SET = typer.Option([], "--set", help="Override a key: section.key=value. Can be repeated.")
STUDENT = typer.Option(
    ..., help="The student's tokenizer: folder, tokenizer.json, tokenizer.model, GGUF or hub id."
)
TEACHER = typer.Option(..., help="The teacher's tokenizer, in the same form.")
JSON = typer.Option(False, "--json", help="Print one JSON object.")
QUIET = typer.Option(False, "--quiet", help="No progress on stderr.")


PANELS = {
    CorpusSection: "Corpus",
    EngineSection: "Model",
    ObjectiveSection: "Selection",
    PromptsSection: "Prompts",
    QuestionsSection: "Benchmarks",
    RaySection: "Ray cluster",
    ScoreSection: "Scoring",
    ServerSection: "Server",
    SpendingSection: "Server",
    WriteSection: "Writing",
}
"""What the options of a section stand under in the help."""


RARE: dict[type[Schema], tuple[str, ...] | None] = {
    RaySection: None,
    ServerSection: None,
    SpendingSection: None,
    ScoreSection: (
        *("stride", "shard_documents", "bos", "template_options", "compiled", "threads"),
        *("shard_teacher", "strict", "max_nonfinite_share"),
    ),
}
"""Fields whose options only `--help-all` shows; None: all of a section."""


class _Group(NamedTuple):
    section: type[Schema]
    names: tuple[str, ...]
    recipe_key: str


def options(section: type[Schema], *names: str, recipe_key: str = "") -> Any:
    """In place of a parameter's default: options for these fields, or for all. The function that
    `with_options` decorates gets what was given of them as one mapping."""
    return _Group(section, names or tuple(hints(section)), recipe_key)


def option(
    section: type[Schema],
    name: str,
    declared: str | None = None,
    *,
    before: str = "",
    recipe_key: str = "",
    **changes: Any,
) -> Any:
    """One option for a field of a section; `changes` replace what `typer.Option` is given."""
    about = fields_of(section)[name]
    kind, limits = _kind(section, name)
    default = about.default
    if isinstance(kind, type) and issubclass(kind, Enum) and default is not None:
        default = kind(default)
    elif kind == list[str]:
        default = []
    elif kind is str and default is not None:
        default = str(default)
    listed = " Can be repeated." if kind == list[str] else ""
    where = f" In a recipe: {recipe_key}.{name}." if recipe_key else ""
    given = {
        "default": default,
        "help": f"{before}{_sentence(about.metadata['help'], kind)}{listed}{where}",
        "metavar": about.metadata["metavar"],
        "show_default": about.metadata["unset"] or True,
        "min": limits.get("ge"),
        "max": limits.get("le"),
    } | changes
    names = (declared or _declared(section, name)).split(",")
    return typer.Option(given.pop("default"), *names, **given)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters stand for options of their own where they are `options(...)`."""
    parameters, groups = [], {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if not isinstance(parameter.default, _Group):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group = parameter.default
        for name in group.names:
            parameters.append(
                inspect.Parameter(
                    f"{parameter.name}_{name}",
                    parameter.kind,
                    default=option(
                        group.section,
                        name,
                        recipe_key=group.recipe_key,
                        rich_help_panel=PANELS.get(group.section),
                        hidden=_is_rare(group.section, name),
                    ),
                    annotation=_kind(group.section, name)[0],
                )
            )
    context = inspect.Parameter("_context", parameters[0].kind, annotation=typer.Context)
    if any(_is_rare(group.section, name) for group in groups.values() for name in group.names):
        parameters.append(
            inspect.Parameter(_HELP_ALL, context.kind, default=_show_all, annotation=bool)
        )

    @functools.wraps(function)
    def command(_context: typer.Context, **values: Any) -> None:
        values.pop(_HELP_ALL, None)
        for name, group in groups.items():
            taken = {field: values.pop(f"{name}_{field}") for field in group.names}
            source = _context.get_parameter_source
            typed = [n for n in taken if getattr(source(f"{name}_{n}"), "name", "") != "DEFAULT"]
            values[name] = _checked(group.section, {n: taken[n] for n in typed})
        function(**values)

    command.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [context, *parameters]}
    return command


_HELP_ALL = "help_all"


def _print_all_help(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    for parameter in context.command.params:
        parameter.hidden = False  # type: ignore[attr-defined]
    typer.echo(context.get_help())
    raise typer.Exit


_show_all = typer.Option(
    False,
    "--help-all",
    callback=_print_all_help,
    is_eager=True,
    help="Show the rare options too, and exit.",
)


def _is_rare(section: type[Schema], name: str) -> bool:
    return section in RARE and ((names := RARE[section]) is None or name in names)


def require_asked(
    name: str, asked: str | list[str] | None, more: Given, model: str | None = None
) -> None:
    """Options such as `--server-requests` say how `--server` is used. `model`: how the command is
    given a model without a server."""
    if asked in (None, []) and more:
        if model is not None and "model" in more:
            raise UsageError(
                f"--model names the model on a server, and there is no --server. Give the model "
                f"{model} instead."
            )
        named = f"--{name}-{next(iter(more)).partition('_')[0]}"
        raise UsageError(f"{named} can only be used with --{name}.")


def _checked(section: type[Schema], typed: Given) -> Given:
    """The values as the fields hold them; what a field refuses is named by its option."""
    given = {name: _value(section, name, value) for name, value in typed.items()}
    try:
        section(**given)
    except SettingError as error:
        name, _, said = str(error).partition(" ")
        raise UsageError(f"{re.split('[,/]', _declared(section, name))[0]} {said}.") from None
    return given


def _value(section: type[Schema], name: str, value: Any) -> Any:
    hint = hints(section)[name]
    if isinstance(value, Enum):
        return value.value
    if get_origin(_members(hint)[0]) is Mapping:
        found: dict[str, Any] = {}
        for text in value:
            shown = _declared(section, name)
            apply_override(found, text, UsageError, lambda path: [path], option=shown)
        return found
    if isinstance(value, str) and value.isdecimal() and int in _members(hint):
        return int(value)
    return value


def _declared(section: type[Schema], name: str) -> str:
    about = fields_of(section)[name]
    if written := about.metadata["option"]:
        return str(written)
    dashed = name.replace("_", "-")
    return f"--{dashed}/--no-{dashed}" if _kind(section, name)[0] is bool else f"--{dashed}"


def _sentence(text: str, kind: Any) -> str:
    """A help text from a field's: `auto: the accelerator` begins with a choice, which stays."""
    choices = list(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else []
    begins = text.partition(":")[0] in choices
    return f"{text if begins else text[0].upper() + text[1:]}."


def _members(hint: Any) -> list[Any]:
    """The types of a union, without null and without what annotates them."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [one for part in get_args(hint) for one in _members(part)]
    return [] if hint is NoneType else [hint]


def _kind(section: type[Schema], name: str) -> tuple[Any, dict[str, Any]]:
    """The type that the command line reads, and its limits."""
    if (section, name) not in _KINDS:
        _KINDS[section, name] = _kind_of(hints(section)[name], name)
    return _KINDS[section, name]


def _kind_of(hint: Any, name: str) -> tuple[Any, dict[str, Any]]:
    about = get_args(hint)[1] if get_origin(hint) is Annotated else None
    first, *others = _members(hint)
    if isinstance(about, OneOf) or (get_origin(first) is Literal and not others):
        words = about.table if isinstance(about, OneOf) else get_args(first)
        return StrEnum(name, {word: word for word in words}), {}
    if get_origin(first) in (list, Mapping):
        return list[str], {}
    if first in (bool, int, float) and not others:
        return first, about.limits if isinstance(about, Limits) else {}
    return Path if Path in others else str, {}


_KINDS: dict[Any, tuple[Any, dict[str, Any]]] = {}
STUDENT_TEMPLATE = option(
    *(StudentSection, "chat_template", "--student-template"), before="For the student. "
)
TEACHER_TEMPLATE = option(
    *(TeacherSection, "chat_template", "--teacher-template"), before="For the teacher. "
)
