"""What recipes and studies share: YAML with `extends`, overrides, and typed keys (pydantic), with
every mistake named once, in our words."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from vocagnolm.errors import UsageError

Tree = dict[str, Any]
YAML_SUFFIXES = (".yaml", ".yml")


class Schema(BaseModel):
    """A mapping of known keys. Types are taken strictly: "123" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


def key(help_text: str, default: Any = None, **limits: Any) -> Any:
    """A key with its help text; `limits` as in pydantic: ge, gt, le, lt."""
    return Field(default, description=help_text, **limits)


def _as_number(value: Any) -> Any:
    """YAML 1.1 reads 8e-5 as a text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


@dataclass(frozen=True)
class OneOf:
    """A name out of a table, which may have grown when a file is read:
    `Annotated[str, OneOf(METHODS)]`."""

    table: Collection[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return AfterValidator(self._known).__get_pydantic_core_schema__(source, handler)

    def _known(self, name: str) -> str:
        if name not in self.table:
            raise ValueError(f"expected {self}")
        return name

    def __str__(self) -> str:
        return "one of " + ", ".join(self.table)


Number = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]
"""A finite number."""

Model = TypeVar("Model", bound=Schema)


# ---- reading ----


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


def parse_yaml(text: str) -> Any:
    """ValueError for whatever is wrong with it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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
) -> None:
    """`a.b.c=value`, in place. `steps_of` splits the path where keys hold dots of their own."""
    path, equals, text = override.partition("=")
    steps = steps_of(path.strip())
    if not equals or not all(steps):
        raise error(f"--set wants key=value with a path like section.key, found {override!r}.")
    try:
        value = parse_yaml(text)
    except ValueError as failure:
        raise error(f"--set {path}: {text!r:.60} is not a YAML value: {failure}") from None
    content = tree
    for step in steps[:-1]:
        inner = content.get(step)
        if inner is not None and not isinstance(inner, Mapping):
            raise error(f"--set {path}: '{step}' is {inner!r:.60}, there are no keys below it.")
        content[step] = dict(inner or {})
        content = content[step]
    content[steps[-1]] = value


# ---- checking ----


def build(schema: type[Model], tree: Any, origin: str, error: type[UsageError]) -> Model:
    """The checked object, or one message for each key that is wrong."""
    try:
        return schema.model_validate(tree)
    except ValidationError as failure:
        lines = dict.fromkeys(_line(schema, tree, entry) for entry in failure.errors())
        raise error("\n".join(f"{origin}: {line}" for line in lines)) from None


def _line(schema: type[BaseModel], tree: Any, entry: Any) -> str:
    place, known, fields = _locate(schema, tree, entry["loc"])
    if entry["type"] == "extra_forbidden":
        return unknown("key", str(entry["loc"][-1]), fields, ".".join(place[:-1]))
    name = ".".join(place) or "it"
    if entry["type"] == "missing":
        return f"{name} is missing."
    wanted = "keys with values" if known is None else expected(known)
    if known is not None and place[-1].isdigit():  # an element of a list
        wanted = " or ".join(map(describe, get_args(known.annotation)))
    return f"{name} is {entry['input']!r:.60}, expected {wanted}."


def _locate(
    schema: type[BaseModel], tree: Any, loc: tuple[Any, ...]
) -> tuple[list[str], FieldInfo | None, list[str]]:
    """Path of an error in the tree's own keys (pydantic adds branches of unions), the field that
    it is about, and the names of its siblings."""
    place: list[str] = []
    field: FieldInfo | None = None
    current: type[BaseModel] | None = schema
    siblings: list[str] = list(schema.model_fields)
    for step in loc:
        inside = isinstance(tree, Mapping) and step in tree
        if current is not None:
            siblings = list(current.model_fields)
            if step in current.model_fields:
                field = current.model_fields[step]
                current = _inner(field.annotation)
            elif not inside:
                continue
        elif not inside and not (isinstance(tree, list) and isinstance(step, int)):
            continue
        place.append(str(step))
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            tree = None
    return place, field, siblings


def _inner(hint: Any) -> type[BaseModel] | None:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint
    return next((found for a in get_args(hint) if (found := _inner(a)) is not None), None)


def expected(field: FieldInfo) -> str:
    """What a key takes, in words: a whole number of at least 1 or null."""
    for entry in field.metadata:
        if isinstance(entry, OneOf):
            return str(entry)
    first, separator, rest = describe(field.annotation).partition(" or ")
    return f"{first}{_bounds(field.metadata)}{separator}{rest}"


_LIMITS = {
    "ge": "of at least {:,}",
    "gt": "above {:,}",
    "le": "up to {:,}",
    "lt": "below {:,}",
    "min_length": "of at least {} entries",
    "max_length": "of at most {} entries",
}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _bounds(metadata: Iterable[Any]) -> str:
    found = [
        words.format(getattr(limit, name))
        for limit in metadata
        for name, words in _LIMITS.items()
        if getattr(limit, name, None) is not None
    ]
    return " " + " and ".join(found) if found else ""


def describe(hint: Any) -> str:
    """A type in words."""
    arguments = get_args(hint)
    if hint in _NAMES:
        return _NAMES[hint]
    if (metadata := getattr(hint, "__metadata__", None)) is not None:  # Annotated
        inner = [m for entry in metadata for m in getattr(entry, "metadata", [entry])]
        return f"{describe(arguments[0])}{_bounds(inner)}"
    name = getattr(getattr(hint, "__origin__", hint), "__name__", str(hint))
    if name == "Literal":
        return "one of " + ", ".join(map(str, arguments))
    if name == "list":
        return "a list"
    if name == "dict" or _inner(hint) is hint:
        return "a mapping"
    return " or ".join("null" if a is type(None) else describe(a) for a in arguments) or "a value"


def unknown(what: str, name: str, known: Iterable[str], where: str = "") -> str:
    """`unknown key 'rate' in optimizer. Did you mean ...?`"""
    listed = sorted(known)
    near = difflib.get_close_matches(name, listed, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(listed)}."
    return f"unknown {what} '{name}'{f' in {where}' if where else ''}. {hint}"
