"""A recipe: its sections together, read from YAML with `extends` and overrides; and the recipes
that come with the package, by name: `laptop`, `paper/cpt`, ..."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vocagnolm.base.files import local_path, require_nameable
from vocagnolm.errors import RecipeError
from vocagnolm.recipe import sections
from vocagnolm.recipe.methods import Method
from vocagnolm.recipe.schema import (
    YAML_SUFFIXES,
    Schema,
    Tree,
    apply_override,
    build,
    merge,
    parse_yaml,
    read_tree,
    unknown,
)
from vocagnolm.storage import require_storage


class Recipe(Schema):
    """A run, with one section per stage."""

    student: sections.StudentSection = field(default_factory=sections.StudentSection)
    teacher: sections.TeacherSection = field(default_factory=sections.TeacherSection)
    corpus: sections.CorpusSection = field(default_factory=sections.CorpusSection)
    store: sections.StoreSection = field(default_factory=sections.StoreSection)
    data: sections.DataSection = field(default_factory=sections.DataSection)
    objective: sections.ObjectiveSection = field(default_factory=sections.ObjectiveSection)
    optimizer: sections.OptimizerSection = field(default_factory=sections.OptimizerSection)
    lora: sections.LoraSection = field(default_factory=sections.LoraSection)
    train: sections.TrainSection = field(default_factory=sections.TrainSection)
    run: sections.RunSection = field(default_factory=sections.RunSection)

    @property
    def method(self) -> Method:
        return self.objective.rule

    @property
    def student_tokenizer(self) -> str | None:
        return self.student.tokenizer or self.student.model

    @property
    def teacher_tokenizer(self) -> str | None:
        return self.teacher.tokenizer or self.teacher.model

    @property
    def needs_guidance(self) -> bool:
        """Whether the objective uses guidance (one number per token)."""
        return self.method.guidance and not self.objective.by_chance

    @property
    def needs_online_teacher(self) -> bool:
        """Whether the method needs whole distributions, which no store contains."""
        return self.method.distance is not None or (self.teacher.online and self.needs_guidance)

    @property
    def needs_block_text(self) -> bool:
        """Whether the teacher must read the text of a block with its own tokenizer. With a shared
        vocabulary it reads the student's ids."""
        return self.needs_online_teacher and not self.method.one_vocabulary

    @property
    def needs_teacher_losses(self) -> bool:
        """Whether all losses of the teacher's own tokens are needed in addition to guidance: for
        chunks of its sequence, or for their mean with unmapped tokens."""
        chunks = self.method.unit == "chunk" and not self.needs_stretches
        return self.needs_guidance and (chunks or self.objective.unmapped == "mean")

    @property
    def needs_stretches(self) -> bool:
        """Whether whole stretches of text are compared."""
        return self.objective.by_stretch and self.needs_guidance

    @property
    def needs_targets(self) -> bool:
        """Whether the teacher's alternatives in the student's vocabulary are needed."""
        return self.method.alternatives

    @property
    def stores(self) -> list[str]:
        """The loss stores: none, one or several."""
        path = self.store.path
        return [] if path is None else [path] if isinstance(path, str) else path

    def store_problems(self) -> list[str]:
        """Contradictions in the settings of the stores."""
        stores, problems = self.stores, []
        if len(stores) < 2 and self.store.combine is not None:
            problems.append(
                f"store.combine joins several stores, store.path names {len(stores)}: list the "
                "stores there, or remove store.combine."
            )
        if twice := sorted({path for path in stores if stores.count(path) > 1}):
            problems.append(f"store.path names {', '.join(twice)} twice.")
        extra = "teacher_losses" in self.data.extra_columns
        if len(stores) > 1 and (self.needs_teacher_losses or extra):
            problems.append(
                "chunks and unmapped: mean read all losses of one teacher's own tokens: give one "
                "store, or objective.compare: stretch for chunks."
            )
        weights = self.store.weights
        if weights is not None and len(weights) != len(stores):
            problems.append(
                f"store.weights has {len(weights)} entries, store.path names {len(stores)} stores: "
                "give one for each."
            )
        elif weights is not None and (min(weights) < 0 or sum(weights) <= 0):
            problems.append("store.weights must not be negative, and not all of them 0.")
        chosen = self.corpus.keep_documents
        if chosen is not None and not stores:
            problems.append("corpus.keep_documents needs store.path: the teacher's losses decide.")
        if chosen is not None and (chosen.by == "difference") != (chosen.against is not None):
            problems.append(
                "corpus.keep_documents by difference needs `against`: the loss store of a small "
                "reference model (or of the student) for the same corpus."
                if chosen.against is None
                else f"corpus.keep_documents by {chosen.by} reads no second store: leave out "
                "`against`, or choose by difference."
            )
        return problems

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return asdict(self)

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def load_recipe(source: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, or a recipe of the package (`laptop`, `paper/cpt`); follow its `extends`,
    and apply `section.key=value` overrides."""
    require_nameable(source)
    path = Path(source)
    if path.suffix in YAML_SUFFIXES or path.is_file():
        advice = "`vocagnolm recipe list` names the shipped recipes."
        tree = read_tree(path, RecipeError, advice, named=lambda name: shipped_recipe(name).tree())
    else:
        tree = shipped_recipe(str(source)).tree()
    for override in overrides:
        apply_override(tree, override, RecipeError)
    return recipe_from_dict(tree, origin=str(source))


def recipe_from_dict(tree: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """Build a recipe from nested mappings. Every section and key is checked."""
    # a section without keys is read as null
    sections = {name: {} if content is None else content for name, content in tree.items()}
    recipe = build(Recipe, sections, origin, RecipeError)
    for store in recipe.stores:
        require_storage(store, hub=True)
    if recipe.data.blocks is not None:
        require_storage(recipe.data.blocks)
    for path in (recipe.data.cache, recipe.run.folder):
        if path is not None:
            local_path(path)
    return recipe


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


# ---- recipes that come with the package ----


FOLDER = Path(__file__).parent / "recipes"
BEST = "guided-qwen2.5-math-instruct"
"""The run of the paper that paper.yaml shows, every key explained."""
_LINE = re.compile(r"  (?P<name>\w+): (?P<value>.*?)(?P<comment>\s+#.*)?$")


@dataclass(frozen=True)
class Shipped:
    name: str
    shows: str
    about: str
    after: str | None
    text: str
    """The whole recipe, every key with its comment where there is one."""

    def tree(self) -> Tree:
        tree: Tree = parse_yaml(self.text)
        parent = tree.pop("extends", None)
        return tree if parent is None else merge(read_tree(FOLDER / parent, RecipeError, ""), tree)


@cache
def shipped_recipes() -> dict[str, Shipped]:
    found = {}
    for path in sorted(set(FOLDER.glob("*.yaml")) - set(FOLDER.glob("paper*.yaml"))):
        text = path.read_text(encoding="utf-8")
        about = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        found[path.stem] = Shipped(path.stem, "", about, None, text)
    complete = (FOLDER / "paper.yaml").read_text(encoding="utf-8")
    runs = parse_yaml((FOLDER / "paper-runs.yaml").read_text(encoding="utf-8"))["runs"]
    for name, run in runs.items():
        after = f"paper/{run['after']}" if "after" in run else None
        changes = {"run.folder": f"out/paper/runs/{name}", **run["set"]}
        text = complete if name == BEST else with_changes(complete, run["about"], changes)
        found[f"paper/{name}"] = Shipped(f"paper/{name}", run["shows"], run["about"], after, text)
    return found


def shipped_recipe(name: str) -> Shipped:
    known = shipped_recipes()
    if name not in known:
        hint = unknown("recipe", name, known).partition("Known:")[0].strip()
        raise RecipeError(
            f"{hint} Give the path of a YAML file, or a name of `vocagnolm recipe list`."
        )
    return known[name]


def with_changes(complete: str, about: str, changes: dict[str, Any]) -> str:
    """The complete recipe with other values, its comments kept: it shows every key on a line."""
    import yaml

    left = dict(changes)
    lines, section = [f"# {about[0].upper()}{about[1:]}."], ""
    for line in complete.splitlines():
        if line.startswith("#"):
            continue
        if line and not line.startswith(" "):
            section = line.partition(":")[0]
        match = _LINE.match(line)
        if match is not None and (path := f"{section}.{match['name']}") in left:
            value = yaml.safe_dump(left.pop(path), default_flow_style=True).partition("\n")[0]
            bare = f"  {match['name']}: {value}"
            line = f"{bare:29} {(match['comment'] or '').strip()}".rstrip()
        lines.append(line)
    assert not left, f"not in the complete recipe: {left}"
    return "\n".join(lines) + "\n"
