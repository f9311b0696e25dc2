"""A study: a grid of recipes, described in one YAML file, and how that file is read. No torch.

```yaml
extends: setting                 # a shipped study, or a file; mappings merge ({} empties)
title: what the table says
base: {student: ..., corpus: ...}   # sections of a recipe
teachers: {strong: {model: ...}}    # scored once each
start: {train.tokens: 3000000}      # optional plain phase that all runs start from
rows:                               # one row of the table each, a run per seed
  guided: {teacher: strong, set: {objective.method: guided}, seeds: [1, 2, 3]}
use: [cpt, guided]                  # which rows this study shows; default: all
comparisons: [[guided, cpt]]        # paired tests; [a, b, c, d] tests (a - b) - (c - d)
granularity: {teacher: strong, chunks: [8, 16]}   # optional: IoU and IoS beside the accuracies
```

A shipped FILE.yaml may hold further studies, `parts`, whose names are FILE-PART: each extends the
file's own study, or the one that it names.

Studies that share a setting share a folder: a run that another study has finished is not run again.
"""

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from vocagnolm.errors import StudyError
from vocagnolm.recipe import Recipe, recipe_from_dict
from vocagnolm.recipe.schema import (
    YAML_SUFFIXES,
    Limits,
    Schema,
    Tree,
    apply_override,
    build,
    key,
    merge,
    parse_yaml,
    read_tree,
    unknown,
)

SHIPPED = Path(__file__).parent / "studies"
START = "start"
"""A teacher's model that is what the students start from."""
Exchange = Literal["shuffled", "uniform"]
PositiveInt = Annotated[int, Limits(gt=0)]
NonNegativeInt = Annotated[int, Limits(ge=0)]


class Plan(Schema):
    """A section of a study's file. It is read, not changed."""


class TeacherPlan(Plan):
    """A model that scores the corpus: a given one, or one that the study trains first."""

    model: str | None = None
    """A model, or `start` for what the students start from."""
    tokenizer: str | None = None
    label: str | None = None
    measured: bool = False
    """Whether its own answers to the questions are a row, as in table 4 of the paper."""
    score: dict[str, Any] = key(default={})
    """Settings of scoring for this teacher, over those of the study."""
    train: dict[str, Any] | None = None
    """Instead of a model: overrides of a plain run that makes the teacher out of the students'
    start. It then has the student's vocabulary (kld, rho1)."""


class TuningPlan(Plan):
    """One seed, a small grid, a validation measure; the best learning rate is then fixed."""

    learning_rates: Annotated[list[float], Limits(min_length=1)]
    rows: dict[str, str]
    """Tuning group -> the row that is run for it. Rows name their group with `tuned`."""
    seed: NonNegativeInt = 100
    set: dict[str, Any] = key(default={})
    """Overrides of the tuning runs, for example fewer tokens."""
    by: Literal["bits_per_byte", "accuracy"] = "bits_per_byte"
    """What chooses: `bits_per_byte` of the validation texts, or `accuracy` on the validation
    questions. The two may disagree: choose by what will be claimed."""


class EvaluationPlan(Plan):
    """What is measured on every finished run."""

    held_out: dict[str, str] = key(default={})
    """Name -> jsonl file with a `text` field: bits per byte. A field `counts` in it names the parts
    of a text that count (`[[start, stop], ...]`, in characters), given what stands before them."""
    validation: dict[str, str] = key(default={})
    """Name -> jsonl file of texts for choosing learning rates, never reported as a result."""
    requests: str | None = None
    """Rendered questions (`vocagnolm.evaluate.render.write_requests`): greedy answers."""
    validation_requests: str | None = None
    """Other questions, for choosing learning rates by accuracy. Those that are also among
    `requests` are answered there, and left out of what is reported."""
    apart: list[str] = key(default=[])
    """Tasks that are reported, and not part of the average."""
    compared: str | None = None
    """Rendered questions with options, the right one first: their log-likelihoods."""
    samples: NonNegativeInt = 0
    """So many drawn answers to every `samples_every`-th question, beside the greedy one."""
    samples_every: PositiveInt = 4
    samples_temperature: float = key(default=0.7, gt=0)
    max_new_tokens: PositiveInt = 256
    batch_size: PositiveInt | None = None
    dtype: str = "auto"
    device: str = "auto"
    context: PositiveInt = 1024


class RowPlan(Plan):
    """One row of a table: the same recipe under several seeds."""

    label: str | None = None
    teacher: str | None = None
    also: list[str] = key(default=[])
    """Further teachers, whose stores are combined with the first one's (`store.combine`)."""
    against: str | None = None
    """For `corpus.keep_documents` by difference: the teacher whose store is the reference."""
    set: dict[str, Any] = key(default={})
    """Overrides of the recipe: `section.key: value`."""
    grid: dict[str, list[Any]] = key(default={})
    """`section.key: [values]`: the row becomes one row per combination, named `ROW-VALUE`."""
    seeds: list[NonNegativeInt] = key(default=[1, 2, 3], min_length=1)
    tuned: str | None = None
    """Take the learning rate that was tuned for this group."""
    matched_to: str | None = None
    """Random selection with the kept share per source of this row's first run."""
    targets: Exchange | None = None
    """Distillation towards other targets: `shuffled`, those of another place with the same label,
    or `uniform`, any tokens in place of the teacher's (label smoothing of the same mass)."""
    priority: int = 0
    """Smaller numbers run first; within one number, seed by seed."""


class GranularityPlan(Plan):
    """How well chunks of equal number cover each other's text, measured with the tokenizers of
    the student and of one teacher. No model is needed."""

    teacher: str
    chunks: Annotated[list[PositiveInt], Limits(min_length=1)]
    """Numbers of chunks in a block; token-level alignment is measured too."""
    documents: PositiveInt = 1000
    """So many documents of the corpus, from its beginning."""


class PanelPlan(Plan):
    """Rows by a number `x`, one line a series."""

    x: dict[str, float] = key(default={})
    """Row -> place on the x axis."""
    series: dict[str, list[str]] = key(default={})
    """Name of a line -> its rows."""
    reference: str | None = None
    """A row drawn as a line of its own; the zero of kind `strength`."""
    x_label: str = ""
    log_x: bool = False


class FigurePlan(PanelPlan):
    """kind `bars`: one bar per row. kind `lines`: one panel, or several side by side. kind
    `frontier`: accuracy against bits per byte, with one curve per series and, in a second panel,
    one per tuned row over its learning rates. kind `strength`: what the rows that are compared with
    `reference` gain over it, over all seeds of both, against their teachers' own accuracy, or
    unless all of them are `measured`, their bits per byte on the corpus."""

    kind: Literal["bars", "lines", "frontier", "strength"] = "bars"
    measure: str = "accuracy"
    panels: list[PanelPlan] = key(default=[])
    """Several panels (lines), instead of the one that the figure's own keys describe."""


class Study(Plan):
    name: str
    title: str = ""
    base: dict[str, Any] = key(default={})
    teachers: dict[str, TeacherPlan] = key(default={})
    start: dict[str, Any] | None = None
    score: dict[str, Any] = key(default={})
    """Settings of scoring, as in `ScoreSettings`."""
    score_files: list[str] = key(default=[])
    """The files that the teachers read; default: the corpora of all rows. Set it if rows use
    subsets: documents are found by content, so one store serves them all."""
    tune: TuningPlan | None = None
    evaluate: EvaluationPlan = field(default_factory=EvaluationPlan)
    rows: dict[str, RowPlan] = key(default={})
    use: list[str] = key(default=[])
    comparisons: list[Annotated[list[str], Limits(min_length=2, max_length=4)]] = key(default=[])
    """Two rows, or four: is the difference of the first two larger than that of the other two?"""
    granularity: GranularityPlan | None = None
    figure: FigurePlan = field(default_factory=FigurePlan)
    source_field: str = "source"
    """Field of the corpus that names a document's source, for kept shares per source."""
    keep_models: bool = False
    """Keep the trained models; otherwise they are removed after evaluation."""
    prepare_workers: PositiveInt = 1


@dataclass(frozen=True)
class RunPlan:
    """One run: a row under one seed."""

    name: str
    row: str
    seed: int
    overrides: dict[str, Any]
    teacher: str | None = None
    also: tuple[str, ...] = ()
    against: str | None = None
    tuned: str | None = None
    matched_to: str | None = None
    targets: Exchange | None = None
    order: tuple[int, int, int] = (0, 0, 0)
    """Priority, seed, place of the row."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """Every teacher that the run reads from or compares with."""
        return tuple(name for name in (self.teacher, *self.also, self.against) if name is not None)


def expand_rows(rows: Mapping[str, RowPlan]) -> dict[str, RowPlan]:
    """Every combination of a row's grid is a row of its own."""
    expanded: dict[str, RowPlan] = {}
    for name, row in rows.items():
        keys = list(row.grid)
        for values in itertools.product(*row.grid.values()):
            settings = {**row.set, **dict(zip(keys, values, strict=True))}
            full = "-".join([name, *(_short(value) for value in values)])
            label = row.label and ", ".join([row.label, *map(str, values)])
            expanded[full] = replace(row, set=settings, grid={}, label=label)
    return expanded


def plan_runs(study: Study) -> list[RunPlan]:
    """The runs of the rows in use, in the order in which they are started."""
    rows = expand_rows(study.rows)
    names = list(study.use or rows)
    for name in list(names):
        target = rows[name].matched_to
        if target is not None and target not in names:
            names.append(target)  # its shares are needed
    runs = []
    for place, name in enumerate(names):
        row = rows[name]
        for seed in row.seeds:
            runs.append(
                RunPlan(
                    name=f"{name}-s{seed}",
                    row=name,
                    seed=seed,
                    overrides=dict(row.set),
                    teacher=row.teacher,
                    also=tuple(row.also),
                    against=row.against,
                    tuned=row.tuned,
                    matched_to=row.matched_to,
                    targets=row.targets,
                    order=(row.priority, seed, place),
                )
            )
    return sorted(runs, key=lambda run: run.order)


def recipe_with(base: Mapping[str, Any], overrides: Mapping[str, Any], origin: str) -> Recipe:
    """A recipe from base sections and `section.key` overrides."""
    tree = copy.deepcopy(dict(base))
    for path, value in overrides.items():
        section, dot, key = path.partition(".")
        if not dot:
            raise StudyError(f"{origin}: an override is `section.key: value`, found '{path}'.")
        content = tree[section] = dict(tree.get(section) or {})
        content[key] = value
    recipe = recipe_from_dict(tree, origin=origin)
    if recipe.corpora:
        raise StudyError(f"{origin}: a study trains on one corpus. Give corpus instead of corpora.")
    return recipe


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def shipped_studies() -> dict[str, str]:
    """The title of every shipped study by its name."""
    titles = {}
    for path in SHIPPED.glob("*.yaml"):
        tree = parse_yaml(path.read_text(encoding="utf-8"))
        titles[path.stem] = tree.get("title")
        for part, own in tree.get("parts", {}).items():
            titles[f"{path.stem}-{part}"] = own["title"]
    return {name: titles[name] for name in sorted(titles) if name != "setting"}


def load_study(
    source: str | Path, overrides: Iterable[str] = (), *, materials: str | Path | None = None
) -> Study:
    """Load a study of the package by name, or a YAML file. Overrides: `rows.cpt.seeds=[1]`.
    `MATERIALS/` in the file stands for the folder `materials`."""
    path = Path(source)
    named = path.suffix not in YAML_SUFFIXES
    tree = _shipped_tree(str(source)) if named else _file_tree(path)
    for override in overrides:
        apply_override(tree, override, StudyError, _steps)
    tree = _placed({"name": str(source) if named else path.stem, **tree}, materials, source)
    return study_from_dict(tree, origin=str(source))


def _shipped_tree(name: str) -> Tree:
    """A shipped study with everything that it extends: that of the file `NAME.yaml`, or for
    `FILE-PART` the part `PART` of `FILE.yaml`."""
    path = SHIPPED / f"{name}.yaml"
    if path.is_file():
        tree = _file_tree(path)
        tree.pop("parts", None)
        return tree
    for dash in (at for at, character in enumerate(name) if character == "-"):
        path = SHIPPED / f"{name[:dash]}.yaml"
        parts = _file_tree(path).get("parts", {}) if path.is_file() else {}
        if name[dash + 1 :] in parts:
            own = dict(parts[name[dash + 1 :]])
            return merge(_shipped_tree(own.pop("extends", path.stem)), own)
    raise StudyError(
        f"There is no study '{name}'. The shipped ones are: {', '.join(shipped_studies())}; or "
        "give the path of a YAML file."
    )


def _file_tree(path: Path) -> Tree:
    advice = "`vocagnolm study list` names the shipped studies."
    return read_tree(path, StudyError, advice, named=_shipped_tree)


def _steps(path: str) -> list[str]:
    """Recipe keys carry a dot of their own: start.train.tokens is start -> "train.tokens"."""
    steps = path.split(".")
    if steps[0] == "start":
        return ["start", ".".join(steps[1:])]
    if steps[0] == "teachers" and steps[2:3] == ["train"]:
        return [*steps[:3], ".".join(steps[3:])]
    if "set" in steps[:-2]:
        at = steps.index("set")
        return [*steps[: at + 1], ".".join(steps[at + 1 :])]
    return steps


def _placed(value: Any, materials: str | Path | None, origin: str | Path) -> Any:
    """A part of a study's file with `MATERIALS/` replaced by the folder."""
    if isinstance(value, dict):
        return {key: _placed(inner, materials, origin) for key, inner in value.items()}
    if isinstance(value, list):
        return [_placed(inner, materials, origin) for inner in value]
    if isinstance(value, str) and value.startswith("MATERIALS/"):
        if materials is None:
            raise StudyError(
                f"{origin} needs models and texts: give their folder with --materials "
                "(research/miniature-protocols.md says what it must hold)."
            )
        return str(Path(materials) / value.removeprefix("MATERIALS/"))
    return value


def study_from_dict(tree: Mapping[str, Any], origin: str = "study") -> Study:
    """Build a study; unknown keys, rows and teachers are errors."""
    study = build(Study, tree, origin, StudyError)
    rows = expand_rows(study.rows)
    known = set(rows)
    for name in study.use:
        _require(name, known, f"{origin}: use", "row")
    for names in study.comparisons:
        if len(names) == 3:
            raise StudyError(f"{origin}: comparisons are of two rows or of four, not {names}.")
        comparable = known | {"start"} if len(names) == 2 else known
        for name in names:
            _require(name, comparable, f"{origin}: comparisons", "row")
    for name, teacher in study.teachers.items():
        if (teacher.model is None) == (teacher.train is None):
            raise StudyError(f"{origin}: teachers.{name} must have either `model` or `train`.")
        if teacher.model == START and study.start is None:
            raise StudyError(f"{origin}: teachers.{name} is the start: set `start`, too.")
    for name, row in rows.items():
        _check_row(row, study, rows, f"{origin}: rows.{name}")
    if study.tune is not None:
        for group, name in study.tune.rows.items():
            _require(name, known, f"{origin}: tune.rows.{group}", "row")
        if study.tune.by == "accuracy" and study.evaluate.validation_requests is None:
            raise StudyError(
                f"{origin}: tune.by is accuracy, but there are no questions to choose by: set "
                "evaluate.validation_requests (not the questions that are reported)."
            )
    if study.granularity is not None:
        teachers, where = set(study.teachers), f"{origin}: granularity.teacher"
        _require(study.granularity.teacher, teachers, where, "teacher")
    _check_figure(study.figure, known | {"start"}, f"{origin}: figure")
    return study


def _check_row(row: RowPlan, study: Study, rows: Mapping[str, RowPlan], where: str) -> None:
    named = [("teacher", row.teacher), ("against", row.against), *(("also", n) for n in row.also)]
    for place, teacher in named:
        if teacher is not None:
            _require(teacher, set(study.teachers), f"{where}.{place}", "teacher")
    if row.teacher is None and (row.also or row.against):
        raise StudyError(f"{where} has `also` or `against` without a `teacher`.")
    if row.matched_to is not None:
        _require(row.matched_to, set(rows), f"{where}.matched_to", "row")
        if rows[row.matched_to].matched_to or rows[row.matched_to].teacher is None:
            raise StudyError(
                f"{where}.matched_to is {row.matched_to}, which has no teacher of its own. Name a "
                "guided row."
            )
    if row.targets is not None and row.set.get("objective.method") != "distill":
        raise StudyError(f"{where}.targets is for rows of method distill.")
    if row.tuned is not None:
        groups = set(study.tune.rows) if study.tune else set()
        _require(row.tuned, groups, f"{where}.tuned", "tuning group")


def _check_figure(plan: FigurePlan, rows: set[str], where: str) -> None:
    if plan.kind == "strength" and plan.reference is None:
        raise StudyError(f"{where}: kind strength needs `reference`, the row to gain over.")
    for panel in (plan, *plan.panels):
        if panel.reference is not None:
            _require(panel.reference, rows, f"{where}.reference", "row")
        for line, names in panel.series.items():
            for name in names:
                _require(name, rows, f"{where}.series: {line}", "row")
                if name not in panel.x and plan.kind != "frontier":
                    raise StudyError(f"{where}.x has no place for '{name}' of the line '{line}'.")


def _require(name: str, known: set[str], where: str, what: str) -> None:
    if name not in known:
        raise StudyError(f"{where}: {unknown(what, name, known)}")
