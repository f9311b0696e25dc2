"""Reading a recipe: YAML with `extends`, `section.key=value` overrides, unknown keys refused."""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from vocagnolm.errors import RecipeError
from vocagnolm.recipe.sections import (
    SECTIONS,
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


@dataclass(kw_only=True)
class Recipe:
    """One run, a section a stage."""

    student: StudentSection = field(default_factory=StudentSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    corpus: CorpusSection = field(default_factory=CorpusSection)
    store: StoreSection = field(default_factory=StoreSection)
    data: DataSection = field(default_factory=DataSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lora: LoraSection = field(default_factory=LoraSection)
    train: TrainSection = field(default_factory=TrainSection)
    run: RunSection = field(default_factory=RunSection)

    @property
    def student_tokenizer(self) -> str | None:
        return self.student.tokenizer or self.student.model

    @property
    def teacher_tokenizer(self) -> str | None:
        return self.teacher.tokenizer or self.teacher.model

    @property
    def needs_guidance(self) -> bool:
        """Whether the objective reads guidance (one number per token) at all."""
        method = self.objective.method
        if method == "chunk":
            return self.objective.chunk_choice == "teacher"
        return method in ("guided", "rho1")

    @property
    def needs_online_teacher(self) -> bool:
        """kld and uld compare distributions, which no store holds."""
        return self.objective.method in ("kld", "uld") or (
            self.teacher.online and self.needs_guidance
        )

    @property
    def needs_block_text(self) -> bool:
        """Whether the teacher must read the block's text with its own tokenizer. kld and rho1
        presuppose one vocabulary: there the teacher reads the student's ids."""
        return self.needs_online_teacher and self.objective.method not in ("kld", "rho1")

    @property
    def needs_teacher_losses(self) -> bool:
        """Whether chunks of the teacher's own sequence are compared, beyond carried guidance."""
        return self.objective.method == "chunk" and self.needs_guidance

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, follow its `extends`, apply `section.key=value` overrides."""
    tree = _read_tree(Path(path), seen=())
    for override in overrides:
        _apply_override(tree, override)
    return recipe_from_dict(tree, origin=str(path))


def recipe_from_dict(tree: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """Build a recipe from nested mappings; every section and key is checked."""
    sections: dict[str, Any] = {}
    for name, content in tree.items():
        if name not in SECTIONS:
            raise RecipeError(_unknown("section", str(name), SECTIONS, origin))
        if content is None:
            content = {}
        if not isinstance(content, Mapping):
            raise RecipeError(f"{origin}: section '{name}' must hold keys, found {content!r}.")
        sections[name] = _build_section(name, content, origin)
    return Recipe(**sections)


def recipe_difference(old: Recipe, new: Recipe, ignore: frozenset[str] = frozenset()) -> list[str]:
    """`section.key: old -> new` for every key that differs and is not ignored."""
    lines = []
    new_tree = new.to_dict()
    for section, content in old.to_dict().items():
        for name, value in content.items():
            path, other = f"{section}.{name}", new_tree[section][name]
            if value != other and path not in ignore:
                lines.append(f"{path}: {value!r} -> {other!r}")
    return lines


def _read_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in seen:
        raise RecipeError(f"{path}: `extends` goes in a circle: {' -> '.join(map(str, seen))}.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"The recipe {path} cannot be read ({error.strerror or error}). "
            "Give the path of a YAML file; the shipped ones are in recipes/."
        ) from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} must hold sections ({', '.join(SECTIONS)}), found {tree!r:.80}.")
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise RecipeError(f"{path}: `extends` names one recipe file, found {parent!r}.")
    return _merge(_read_tree(path.parent / parent, (*seen, resolved)), tree)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Section by section, key by key; a value of the child replaces that of the parent."""
    merged = dict(base)
    for section, content in over.items():
        if isinstance(content, Mapping) and isinstance(merged.get(section), Mapping):
            merged[section] = {**merged[section], **content}
        else:
            merged[section] = content
    return merged


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    section, dot, name = path.strip().partition(".")
    if not (equals and dot and name):
        raise RecipeError(f"--set wants section.key=value, found {override!r}.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {path}: {text!r} is not a YAML value: {error}") from error
    name, *inner = name.split(".")  # student.config.hidden_size=64 reaches into a mapping
    if section not in SECTIONS:
        raise RecipeError(_unknown("section", section, SECTIONS, "--set"))
    content = tree[section] = dict(tree.get(section) or {})
    for step in inner:
        content[name] = dict(content.get(name) or {})
        content, name = content[name], step
    content[name] = value


def _build_section(section: str, content: Mapping[str, Any], origin: str) -> Any:
    cls = SECTIONS[section]
    hints = typing.get_type_hints(cls)
    known = {entry.name for entry in fields(cls)}
    values = {}
    for name, value in content.items():
        if name not in known:
            raise RecipeError(_unknown(f"key in section '{section}'", str(name), known, origin))
        values[name] = _checked(value, hints[name], f"{origin}: {section}.{name}")
    return cls(**values)


def _checked(value: Any, hint: Any, where: str) -> Any:
    """The value as its type wants it, or an error that names the key."""
    if get_origin(hint) in (Union, types.UnionType):
        alternatives = get_args(hint)
        if value is None and type(None) in alternatives:
            return None
        for alternative in alternatives:
            if alternative is not type(None):
                try:
                    return _checked(value, alternative, where)
                except RecipeError:
                    continue
    elif get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
    elif hint is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 8e-5 as a string
        except (TypeError, ValueError):
            pass
    elif get_origin(hint) is list and isinstance(value, list | tuple):
        return [_checked(item, get_args(hint)[0], where) for item in value]
    elif get_origin(hint) is dict and isinstance(value, Mapping):
        return dict(value)
    elif hint in (int, bool, str) and type(value) is hint:
        return value
    raise RecipeError(f"{where} is {value!r}, expected {_describe(hint)}.")


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _describe(a) for a in get_args(hint))
    if get_origin(hint) is list:
        return "a list"
    if get_origin(hint) is dict:
        return "a mapping"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]


def _unknown(what: str, name: str, known: Iterable[str], origin: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f" Did you mean '{near[0]}'?" if near else f" Known: {', '.join(sorted(known))}."
    return f"{origin}: unknown {what}: '{name}'.{hint}"
