"""A recipe: its sections together, read from YAML with `extends` and overrides; and the recipes
that come with the package, by name: `laptop`, `paper/cpt`, ..."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from vocagnolm.base.files import differences, local_path, require_nameable
from vocagnolm.errors import RecipeError
from vocagnolm.recipe import sections
from vocagnolm.recipe.methods import Method
from vocagnolm.recipe.schema import (
    YAML_SUFFIXES,
    Schema,
    Tree,
    apply_override,
    build,
    fields_of,
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
    corpora: dict[str, sections.NamedCorpusSection] = field(default_factory=dict)
    """Several corpora instead of `corpus` and `store`, by their names."""
    data: sections.DataSection = field(default_factory=sections.DataSection)
    objective: sections.ObjectiveSection = field(default_factory=sections.ObjectiveSection)
    rounds: sections.RoundsSection = field(default_factory=sections.RoundsSection)
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
    def in_rounds(self) -> bool:
        """Whether the student is trained in rounds on what it writes, not on blocks."""
        return self.method.on_policy or bool(self.rounds.prompts)

    def rounds_problems(self) -> list[str]:
        """Contradictions in the settings of rounds."""
        if not self.in_rounds:
            return []
        problems = []
        if not self.method.on_policy:
            problems.append(
                f"rounds.prompts is set and objective.method is {self.objective.method}: set "
                "objective.method to on_policy."
            )
        if not self.rounds.prompts:
            problems.append(
                f"objective.method {self.objective.method} trains on what the student writes: set "
                "rounds.prompts."
            )
        if self.student.model is None:
            problems.append(
                "rounds need a student that answers: set student.model, for example to the result "
                "of distillation."
            )
        if self.teacher.model is None:
            problems.append("rounds need teacher.model" + self._tokenizer_alone() + ".")
        if self.train.parallel != "ddp":
            problems.append(
                f"train.parallel {self.train.parallel} is not for rounds, in which every process "
                "writes with the whole student: use ddp."
            )
        if self.train.micro_batch == "auto":
            problems.append("train.micro_batch auto is not for rounds: give a number.")
        rounds, answers = self.rounds, self.rounds.prompts_per_round * self.rounds.samples
        if answers < rounds.updates_per_round:
            problems.append(
                f"rounds.updates_per_round is {rounds.updates_per_round}, expected at most the "
                f"{answers} answers of a round."
            )
        if rounds.grade is not None and rounds.answer_field is None:
            problems.append("rounds.grade needs rounds.answer_field, the expected answer.")
        if rounds.held_out and rounds.grade is None:
            problems.append("rounds.held_out needs rounds.grade, the kind of the expected answer.")
        if self.rounds.offline_share:
            if not (self.corpus.files and self.stores):
                problems.append("rounds.offline_share needs corpus.files and store.path.")
            if self.objective.divergence == "sampled_token":
                problems.append(
                    "rounds.offline_share is for forward and reverse: the student did not draw "
                    "the tokens of a corpus."
                )
        return problems

    def _tokenizer_alone(self) -> str:
        return "" if self.teacher.server is None else ", whose tokenizer is read for the server"

    @property
    def stores(self) -> list[str]:
        """The loss stores, of all corpora: none, one or several."""
        if self.corpora:
            return [path for recipe in self.by_corpus().values() for path in recipe.stores]
        path = self.store.path
        return [] if path is None else [path] if isinstance(path, str) else path

    @property
    def shares(self) -> dict[str, Fraction]:
        """The exact shares of several corpora, which add up to 1. They are in the order of the
        names, so that a run does not depend on the order in which a recipe lists its corpora."""
        given = {name: Fraction(str(float(corpus.share))) for name, corpus in self.corpora.items()}
        return {name: given[name] / sum(given.values()) for name in sorted(given)}

    def by_corpus(self) -> dict[str, "Recipe"]:
        """For each of several corpora the recipe that prepares and reads its blocks, by name; a
        recipe with one `corpus` is its own, under an empty name. A corpus without a store is
        trained plainly beside others that have one."""
        if not self.corpora:
            return {"": self}
        return {name: self._alone(self.corpora[name], name) for name in sorted(self.corpora)}

    def _alone(self, corpus: sections.NamedCorpusSection, name: str) -> "Recipe":
        keys = fields_of(sections.CorpusSection)
        plain = corpus.store.path is None
        blocks = self.data.blocks
        return replace(
            self,
            corpora={},
            corpus=sections.CorpusSection(**{key: getattr(corpus, key) for key in keys}),
            store=corpus.store,
            data=replace(self.data, blocks=blocks and f"{blocks.rstrip('/')}/{name}"),
            objective=sections.ObjectiveSection(method="cpt") if plain else self.objective,
        )

    def corpora_problems(self) -> list[str]:
        """What several corpora cannot do together."""
        problems = []
        without = [name for name, corpus in self.corpora.items() if corpus.store.path is None]
        if self.corpora and self.needs_online_teacher:
            problems.append(
                "corpora: an online teacher reads one corpus. Score the corpora into stores, or "
                "give `corpus`."
            )
        elif self.needs_guidance and len(without) == len(self.corpora) > 0:
            problems.append(
                f"objective.method {self.objective.method} needs the store of at least one of the "
                "corpora: set corpora.NAME.store.path (see `vocagnolm score`)."
            )
        elif self.needs_guidance and without and self.objective.unmapped != "include":
            problems.append(
                f"objective.unmapped is {self.objective.unmapped}, and no token of corpora."
                f"{without[0]} has guidance, since it has no store. Set objective.unmapped: "
                "include to train on it plainly, or give it a store."
            )
        return problems

    def store_problems(self) -> list[str]:
        """Contradictions in the settings of corpora and stores."""
        if self.corpora:
            return self.corpora_problems() + [
                f"corpora.{name}: {problem}"
                for name, recipe in self.by_corpus().items()
                for problem in recipe.store_problems()
            ]
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
        tree = asdict(self)
        if not self.corpora:  # written only where they are used
            del tree["corpora"]
        return tree

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
    _require_corpora(recipe, origin)
    for store in recipe.stores:
        require_storage(store, hub=True)
    if recipe.data.blocks is not None:
        require_storage(recipe.data.blocks)
    for path in (recipe.data.cache, recipe.run.folder):
        if path is not None:
            local_path(path)
    return recipe


def _require_corpora(recipe: Recipe, origin: str) -> None:
    """Refuse several corpora beside one, and names that no folder has."""
    if not recipe.corpora:
        return
    empty = {"corpus": sections.CorpusSection(), "store": sections.StoreSection()}
    if both := [name for name, section in empty.items() if getattr(recipe, name) != section]:
        raise RecipeError(
            f"{origin}: corpora and {both[0]} are both given. Each of the corpora has files and "
            f"store of its own: move {' and '.join(both)} into corpora, or remove corpora "
            f"({both[0]}: {{}} empties what a recipe extends)."
        )
    for name in recipe.corpora:
        if not isinstance(name, str) or not _CORPUS_NAME.fullmatch(name):
            raise RecipeError(
                f"{origin}: corpora: {name!r:.60} cannot be the name of a corpus, which also names "
                "a folder. Use letters, digits, '-' and '_'."
            )


def recipe_difference(old: Recipe, new: Recipe, ignore: frozenset[str] = frozenset()) -> list[str]:
    """`section.key: old -> new` for every key that differs and is not ignored."""
    lines = []
    old_tree, new_tree = old.to_dict(), new.to_dict()
    for section, content in old_tree.items():
        if section == "corpora":
            continue
        for name, value in content.items():
            path, other = f"{section}.{name}", new_tree[section][name]
            if value != other and path not in ignore:
                lines.append(f"{path}: {value!r} -> {other!r}")
    old_corpora, new_corpora = old_tree.get("corpora", {}), new_tree.get("corpora", {})
    different = differences(old_corpora, new_corpora, "corpora")
    lines += [f"{path}: {before!r} -> {now!r}" for path, before, now in different]
    return lines


# ---- recipes that come with the package ----


FOLDER = Path(__file__).parent / "recipes"
BEST = "guided-qwen2.5-math-instruct"
"""The run of the paper that paper.yaml shows, every key explained."""
_CORPUS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
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
    recipes = {}
    for path in sorted(set(FOLDER.glob("*.yaml")) - set(FOLDER.glob("paper*.yaml"))):
        text = path.read_text(encoding="utf-8")
        about = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        recipes[path.stem] = Shipped(path.stem, "", about, None, text)
    complete = (FOLDER / "paper.yaml").read_text(encoding="utf-8")
    runs = parse_yaml((FOLDER / "paper-runs.yaml").read_text(encoding="utf-8"))["runs"]
    for name, run in runs.items():
        after = f"paper/{run['after']}" if "after" in run else None
        changes = {"run.folder": f"out/paper/runs/{name}", **run["set"]}
        text = complete if name == BEST else with_changes(complete, run["about"], changes)
        recipes[f"paper/{name}"] = Shipped(f"paper/{name}", run["shows"], run["about"], after, text)
    return recipes


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
