"""Settings: dataclasses whose fields hold their type, default, limits and help text, and the YAML
files that recipes and studies are written in. Every mistake is named once, with what was expected.

The command line makes its options from the same fields, so this imports nothing heavy.
"""

import contextlib
import copy
import dataclasses
import difflib
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from vocagnolm.base.strangers import require_file
from vocagnolm.errors import SettingError, UsageError

Tree = dict[str, Any]
YAML_SUFFIXES = (".yaml", ".yml")
MOST = sys.float_info.max
REQUIRED = dataclasses.MISSING


# ---- fields ----


_LIMITS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "ge": (operator.ge, "of at least {:,}"),
    "gt": (operator.gt, "above {:,}"),
    "le": (operator.le, "up to {:,}"),
    "lt": (operator.lt, "below {:,}"),
    "min_length": (lambda value, limit: len(value) >= limit, "of at least {} entries"),
    "max_length": (lambda value, limit: len(value) <= limit, "of at most {} entries"),
    "pattern": (lambda value, pattern: re.fullmatch(pattern, value), "matching {}"),
}


class Limits:
    """What a value may be, beyond its type: `Annotated[int, Limits(ge=1)]`."""

    def __init__(self, **limits: Any):
        self.limits = limits

    def __contains__(self, value: Any) -> bool:
        return all(_LIMITS[name][0](value, limit) for name, limit in self.limits.items())

    def __str__(self) -> str:
        words = (_LIMITS[name][1].format(limit) for name, limit in self.limits.items())
        return " and ".join(words).replace("of at least 1 entries", "that is not empty")


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A name out of a table, which may have grown when a value is checked:
    `Annotated[str, OneOf(METHODS)]`."""

    table: Collection[str]

    def __contains__(self, name: Any) -> bool:
        return name in self.table

    def __str__(self) -> str:
        return "one of " + ", ".join(self.table)


def key(
    help_text: str = "",
    default: Any = None,
    *,
    unset: str | None = None,
    option: str | None = None,
    metavar: str | None = None,
    **limits: Any,
) -> Any:
    """A field with its help text and its limits, see `Limits`. A `default` of `REQUIRED` means that
    there is none, and a class stands for what it makes. `unset` says what None stands for; `option`
    and `metavar` are how the command line writes it, where not by the field's name."""
    about = {"help": help_text, "unset": unset, "option": option, "metavar": metavar}
    metadata = {**about, "limits": Limits(**limits) if limits else None}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True)
class Schema:
    """Named values. Its classes are dataclasses with keywords only, and what is made is checked:
    `ScoreSettings(context=0)` is a `SettingError`, which is a `ValueError`.

    The methods here do for all of them what `dataclass` would write and compile for each: that
    would take 15 ms of every start of the command line."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys that an earlier release had -> what to write instead."""

    def __init_subclass__(cls, frozen: bool = False) -> None:
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        if frozen:
            cls.__setattr__ = _refuse  # type: ignore[assignment, method-assign]

    def __init__(self, **values: Any) -> None:
        for name, field in fields_of(type(self)).items():
            if name in values:
                self.__dict__[name] = values.pop(name)
            elif field.default is not dataclasses.MISSING:
                self.__dict__[name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                self.__dict__[name] = field.default_factory()
            else:
                raise TypeError(f"{type(self).__name__} needs '{name}'")
        if values:
            raise TypeError(f"{type(self).__name__} has no setting '{min(values)}'")
        self.__post_init__()

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            if not fits(hint, value := getattr(self, name)):
                raise SettingError(f"{name} is {value!r:.60}, expected {describe(hint)}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({named})"


def _refuse(self: Schema, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot change {name}: make another with `replace`")


Model = TypeVar("Model", bound=Schema)
_HINTS: dict[Any, dict[str, Any]] = {}


def fields_of(schema: type[Schema]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]


def hints(schema: type[Schema]) -> dict[str, Any]:
    """The type of every field, its limits included. What is None by default may be None, also
    where the type says otherwise, since the class then finds a value (`keep`)."""
    if schema in _HINTS:
        return _HINTS[schema]
    resolved = get_type_hints(schema, include_extras=True)
    for name, field in fields_of(schema).items():
        if field.default is None:
            resolved[name] |= None
        if limits := field.metadata.get("limits"):
            resolved[name] = Annotated[resolved[name], limits]
    _HINTS[schema] = {name: resolved[name] for name in fields_of(schema)}
    return _HINTS[schema]


def fits(hint: Any, value: Any) -> bool:
    """Whether the value is of the type and within the limits. Strictly: "123" is no number."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(inner[0], value) and (
            value is None or all(value in option for option in inner[1:])
        )
    if origin in (Union, UnionType):
        return any(fits(option, value) for option in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if hint is float:
        number = isinstance(value, Real) and not isinstance(value, bool)
        return number and -MOST <= value <= MOST  # not NaN, not infinite
    if hint is int:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and abs(value) < 2**63  # what a library in C++ can hold
    if hint is str:
        return isinstance(value, str) and "\0" not in value  # which no path has
    if origin is None:
        return hint is Any or isinstance(value, hint)
    if not isinstance(value, origin) or isinstance(value, str):
        return False
    parts = [*value.values()] if isinstance(value, Mapping) else value
    return all(fits(inner[-1], part) for part in parts)


def describe(hint: Any) -> str:
    """A type in words: an integer of at least 1 or null."""
    names = {int: "an integer", float: "a number", bool: "true or false"}
    names |= {str: "a string", Path: "a path", NoneType: "null"}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None and hint in names:
        return names[hint]
    if origin is Annotated:
        if isinstance(inner[1], OneOf):
            return str(inner[1])
        first, separator, rest = describe(inner[0]).partition(" or ")
        return f"{first} {inner[1]}{separator}{rest}"
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(map(describe, inner))
    if isinstance(origin or hint, type) and issubclass(origin or hint, Mapping | Schema):
        return "a mapping"
    return "a value" if origin is None else "a list"


# ---- from mappings ----


def build(schema: type[Model], tree: Any, origin: str, error: type[UsageError]) -> Model:
    """The checked object, or one message for each key that is wrong."""
    lines: list[str] = []
    made = _read(schema, tree, (), lines)
    if lines:
        raise error("\n".join(f"{origin}: {line}" for line in dict.fromkeys(lines)))
    return made  # type: ignore[no-any-return]


def _read(hint: Any, value: Any, path: tuple[str, ...], lines: list[str]) -> Any:
    """The value as the type wants it: mappings become settings, and whole numbers, and 8e-5, which
    YAML 1.1 reads as a text, become floats. `lines` gets a message for whatever does not fit."""
    whole, limits = hint, None
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)[:2]
    for option in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        inner = get_args(option)
        if isinstance(option, type) and issubclass(option, Schema) and isinstance(value, Mapping):
            return _read_schema(option, value, path, lines)
        if (
            get_origin(option) is list
            and isinstance(value, list)
            and (not limits or value in limits)
        ):
            return [_read(inner[0], v, (*path, str(at)), lines) for at, v in enumerate(value)]
        if get_origin(option) is dict and isinstance(value, Mapping):
            return {k: _read(inner[1], v, (*path, str(k)), lines) for k, v in value.items()}
        if option is float and isinstance(value, str | int) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                value = float(value)
    if not fits(whole, value):
        wanted = describe(whole) if path else "keys with values"
        wanted += " without zero bytes" if "\0" in str(value) else ""
        lines.append(f"{'.'.join(path) or 'it'} is {value!r:.60}, expected {wanted}.")
    return value


def _read_schema(
    schema: type[Schema], tree: Mapping[str, Any], path: tuple[str, ...], lines: list[str]
) -> Schema | None:
    known, values, before = hints(schema), {}, len(lines)
    for name, value in tree.items():
        if name in known:
            values[name] = _read(known[name], value, (*path, name), lines)
        else:
            new = schema.renamed.get(str(name))
            where = ".".join((*path, str(name)))
            lines.append(
                unknown("key", str(name), known, ".".join(path))
                if new is None
                else f"{where} is gone. Write {new}."
            )
    for name, field in fields_of(schema).items():
        nothing = field.default is field.default_factory is dataclasses.MISSING
        if nothing and name not in tree:
            lines.append(f"{'.'.join((*path, name))} is missing.")
    return schema(**values) if len(lines) == before else None


def unknown(what: str, name: str, known: Iterable[str], where: str = "") -> str:
    """`unknown key 'rate' in optimizer. Did you mean ...?`"""
    listed = sorted(known)
    near = difflib.get_close_matches(name, listed, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(listed)}."
    return f"unknown {what} '{name}'{f' in {where}' if where else ''}. {hint}"


# ---- files and overrides ----


def read_tree(
    path: Path,
    error: type[UsageError],
    advice: str,
    *,
    named: Callable[[str], Tree] | None = None,
    seen: tuple[Path, ...] = (),
) -> Tree:
    """A YAML file as a mapping, its `extends` followed: mappings merge (an empty one empties),
    everything else of the child replaces the parent's. `extends` is a file beside this one, or a
    name for `named`."""
    resolved = path.resolve()
    if resolved in seen:
        raise error(f"{path}: `extends` goes in a circle: {' -> '.join(map(str, seen))}.")
    try:
        require_file(path, error, 4 * MOST_YAML_BYTES)
        tree = parse_yaml(path.read_bytes().decode())
    except OSError as failure:
        raise error(f"{path} cannot be read ({failure.strerror or failure}). {advice}") from None
    except ValueError as failure:
        raise error(f"{path} is not valid YAML: {failure}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise error(f"{path} must hold keys with values, found {tree!r:.60}. {advice}")
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise error(f"{path}: `extends` names one file, found {parent!r:.60}.")
    if named is not None and Path(parent).suffix not in YAML_SUFFIXES:
        return merge(named(parent), tree)
    seen = (*seen, resolved)
    return merge(read_tree(path.parent / parent, error, advice, named=named, seen=seen), tree)


MOST_YAML_BYTES = 2**20
_MOST_VALUES = 100_000


def parse_yaml(text: str) -> Any:
    """The content of a YAML text; ValueError for whatever is wrong with it: a key that is given
    twice, of which YAML itself would keep the last without a word, and aliases that would unfold
    to a flood."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := sorted(name for name, count in names.items() if count > 1):
                line = node.start_mark.line + 1
                raise ValueError(
                    f"the key '{twice[0]}' is given twice in the mapping of line {line}"
                )
            return super().construct_mapping(node, deep)

    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"it has more than {MOST_YAML_BYTES:,} characters")
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{error!s:.500}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except TypeError as error:  # a key that is a list or a mapping
        raise ValueError(str(error)) from None
    _require_bounded(value)
    return value


def _require_bounded(value: Any) -> None:
    """Aliases share what they stand for, but whoever walks through it meets it each time."""
    waiting, met = [(value, 0)], 0
    while waiting:
        node, depth = waiting.pop()
        met += 1
        if met > _MOST_VALUES or depth > _DEEPEST:
            raise ValueError(f"it unfolds to more than {_MOST_VALUES:,} values, or too deeply")
        if isinstance(node, dict):
            waiting += [(inner, depth + 1) for inner in node.values()]
        elif isinstance(node, list | set | tuple):
            waiting += [(inner, depth + 1) for inner in node]


_DEEPEST = 50


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Mappings merge, key by key; an empty one empties. Everything else of `over` replaces."""
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[name] = merge(old, value) if both and value else value  # type: ignore[arg-type]
    return merged


def apply_override(
    tree: Tree,
    override: str,
    error: type[UsageError],
    steps_of: Callable[[str], list[str]] = lambda path: path.split("."),
    option: str = "--set",
) -> None:
    """`a.b.c=value`, in place. `steps_of` splits the path where keys hold dots of their own."""
    path, equals, text = override.partition("=")
    steps = steps_of(path.strip())
    if not equals or not all(steps):
        path_words = " with a path like section.key" if option == "--set" else ""
        raise error(f"{option} expects key=value{path_words}, found {override!r}.")
    try:
        value = parse_yaml(text)
    except ValueError as failure:
        raise error(f"{option} {path}: {text!r:.60} is not a YAML value: {failure}") from None
    content = tree
    for step in steps[:-1]:
        inner = content.get(step)
        if inner is not None and not isinstance(inner, Mapping):
            raise error(f"{option} {path}: '{step}' is {inner!r:.60}, there are no keys below it.")
        content[step] = dict(inner or {})
        content = content[step]
    content[steps[-1]] = value
