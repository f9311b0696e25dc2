"""Study files: from YAML to a `Study`, with mistakes named. No torch."""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from vocagnolm.errors import StudyError
from vocagnolm.study.design import (
    FIGURE_KINDS,
    EvaluationPlan,
    FigurePlan,
    GranularityPlan,
    PanelPlan,
    RowPlan,
    Study,
    TeacherPlan,
    TuningPlan,
    expand_rows,
)

SHIPPED = Path(__file__).parent / "studies"


def shipped_studies() -> list[str]:
    return sorted(p.stem for p in SHIPPED.glob("*.yaml") if p.stem != "setting")


def load_study(
    source: str | Path, overrides: Iterable[str] = (), *, materials: str | Path | None = None
) -> Study:
    """A shipped study by name, or a YAML file. Overrides: `rows.cpt.seeds=[1]`. `MATERIALS/` in
    the file stands for the folder `materials`."""
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        path = SHIPPED / f"{source}.yaml"
        if not path.is_file():
            raise StudyError(
                f"There is no study '{source}'. The shipped ones are: "
                f"{', '.join(shipped_studies())}; or give the path of a YAML file."
            )
    tree = _read(path, ())
    for override in overrides:
        _override(tree, override)
    tree = _placed({"name": path.stem, **tree}, materials, path)
    return study_from_dict(tree, origin=str(path))


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise StudyError(f"{path}: `extends` goes in a circle.")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise StudyError(
            f"The study {path} cannot be read ({error.strerror}). The shipped ones are: "
            f"{', '.join(shipped_studies())}."
        ) from error
    except yaml.YAMLError as error:
        raise StudyError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise StudyError(f"{path} must hold the keys of a study, found {tree!r:.60}.")
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    return _merge(_read(path.parent / str(parent), (*seen, path.resolve())), tree)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, dict)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals:
        raise StudyError(f"--set wants key=value, found {override!r}.")
    steps = path.strip().split(".")
    # recipe keys carry a dot of their own: start.train.tokens is start -> "train.tokens"
    if steps[0] == "start":
        steps = ["start", ".".join(steps[1:])]
    elif steps[0] == "teachers" and steps[2:3] == ["train"]:
        steps = [*steps[:3], ".".join(steps[3:])]
    elif "set" in steps[:-2]:
        at = steps.index("set")
        steps = [*steps[: at + 1], ".".join(steps[at + 1 :])]
    content = tree
    for step in steps[:-1]:
        content[step] = dict(content.get(step) or {})
        content = content[step]
    content[steps[-1]] = yaml.safe_load(text)


def _placed(value: Any, materials: str | Path | None, origin: Path) -> Any:
    """The tree with `MATERIALS/` replaced."""
    if isinstance(value, dict):
        return {key: _placed(inner, materials, origin) for key, inner in value.items()}
    if isinstance(value, list):
        return [_placed(inner, materials, origin) for inner in value]
    if isinstance(value, str) and value.startswith("MATERIALS/"):
        if materials is None:
            raise StudyError(
                f"{origin} needs models and texts: give their folder with --materials "
                "(docs/experiments.md says what it must hold)."
            )
        return str(Path(materials) / value.removeprefix("MATERIALS/"))
    return value


def study_from_dict(tree: Mapping[str, Any], origin: str = "study") -> Study:
    """Build a study; unknown keys, rows and teachers are errors."""
    study: Study = _build(Study, tree, origin)
    rows = expand_rows(study.rows)
    known = set(rows)
    for name in study.use:
        _require(name, known, f"{origin}: use", "row")
    for pair in study.comparisons:
        if len(pair) != 2:
            raise StudyError(f"{origin}: a comparison names two rows, found {pair!r}.")
        for name in pair:
            _require(name, known | {"start"}, f"{origin}: comparisons", "row")
    for name, teacher in study.teachers.items():
        if (teacher.model is None) == (teacher.train is None):
            raise StudyError(f"{origin}: teachers.{name} must have either `model` or `train`.")
    for name, row in rows.items():
        if row.teacher is not None:
            _require(row.teacher, set(study.teachers), f"{origin}: rows.{name}.teacher", "teacher")
        if row.matched_to is not None:
            _require(row.matched_to, known, f"{origin}: rows.{name}.matched_to", "row")
            if rows[row.matched_to].matched_to or rows[row.matched_to].teacher is None:
                raise StudyError(
                    f"{origin}: rows.{name}.matched_to is {row.matched_to}, which has no teacher "
                    "of its own. Name a guided row."
                )
        if row.tuned is not None:
            groups = set(study.tune.rows) if study.tune else set()
            _require(row.tuned, groups, f"{origin}: rows.{name}.tuned", "tuning group")
    if study.tune is not None:
        for group, name in study.tune.rows.items():
            _require(name, known, f"{origin}: tune.rows.{group}", "row")
        _require(study.tune.by, {"bits_per_byte", "accuracy"}, f"{origin}: tune.by", "measure")
        if study.tune.by == "accuracy" and study.evaluate.validation_requests is None:
            raise StudyError(
                f"{origin}: tune.by is accuracy, but there are no questions to choose by: set "
                "evaluate.validation_requests (not the questions that are reported)."
            )
    if study.granularity is not None:
        _check_granularity(study.granularity, set(study.teachers), f"{origin}: granularity")
    _check_figure(study.figure, known | {"start"}, f"{origin}: figure")
    return study


def _check_granularity(plan: GranularityPlan, teachers: set[str], where: str) -> None:
    _require(plan.teacher, teachers, f"{where}.teacher", "teacher")
    chunks = plan.chunks
    if not isinstance(chunks, list) or not chunks or not all(map(_is_count, chunks)):
        raise StudyError(f"{where}.chunks must be numbers like [8, 16], found {chunks!r:.60}.")
    if not _is_count(plan.documents):
        raise StudyError(
            f"{where}.documents must be a whole number above 0, found {plan.documents!r:.60}."
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _check_figure(plan: FigurePlan, rows: set[str], where: str) -> None:
    _require(plan.kind, set(FIGURE_KINDS), f"{where}.kind", "kind")
    if plan.kind == "strength" and plan.reference is None:
        raise StudyError(f"{where}: kind strength needs `reference`, the row to gain over.")
    for panel in (plan, *plan.panels):
        if panel.reference is not None:
            _require(panel.reference, rows, f"{where}.reference", "row")
        for line, names in panel.series.items():
            for name in names:
                _require(name, rows, f"{where}.series: {line}", "row")
                if name not in panel.x:
                    raise StudyError(f"{where}.x has no place for '{name}' of the line '{line}'.")


def _build(cls: Any, content: Any, where: str) -> Any:
    """A dataclass from a mapping, its own dataclasses built likewise."""
    if not isinstance(content, Mapping):
        raise StudyError(f"{where} must hold keys, found {content!r:.60}.")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in content.items():
        _require(str(key), set(hints), where, "key")
        values[str(key)] = _value(hints[str(key)], value, f"{where}: {key}")
    try:
        return cls(**values)
    except TypeError as error:
        raise StudyError(f"{where}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for alternative in alternatives:
        if isinstance(alternative, type) and alternative in _NESTED and value is not None:
            return _build(alternative, value, where)
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] in _NESTED:
        if not isinstance(value, Mapping):
            raise StudyError(f"{where} must hold names, found {value!r:.60}.")
        return {str(k): _build(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if len(args) == 1 and args[0] in _NESTED:
        if not isinstance(value, list):
            raise StudyError(f"{where} must be a list, found {value!r:.60}.")
        return [_build(args[0], v, f"{where}.{at}") for at, v in enumerate(value)]
    if hint == list[float]:
        return [float(v) for v in value]  # YAML 1.1 reads 1e-4 as a string
    return value


_NESTED = (
    TeacherPlan,
    TuningPlan,
    EvaluationPlan,
    RowPlan,
    GranularityPlan,
    FigurePlan,
    PanelPlan,
)


def _require(name: str, known: set[str], where: str, what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(sorted(known))}."
        raise StudyError(f"{where}: unknown {what} '{name}'. {hint}")
