"""Study files: from YAML to a `Study`, with mistakes named. No torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vocagnolm.errors import StudyError
from vocagnolm.recipe.schema import apply_override, build, parse_yaml, read_tree, unknown
from vocagnolm.study.design import START, FigurePlan, Study, expand_rows

SHIPPED = Path(__file__).parent / "studies"


def shipped_studies() -> dict[str, str]:
    """Name -> title."""
    trees = {p.stem: parse_yaml(p.read_text(encoding="utf-8")) for p in SHIPPED.glob("*.yaml")}
    return {name: trees[name]["title"] for name in sorted(trees) if name != "setting"}


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
    advice = f"The shipped studies are: {', '.join(shipped_studies())}."
    tree = read_tree(path, StudyError, advice)
    for override in overrides:
        apply_override(tree, override, StudyError, _steps)
    tree = _placed({"name": path.stem, **tree}, materials, path)
    return study_from_dict(tree, origin=str(path))


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
                "(docs/log/miniature-protocols.md says what it must hold)."
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
        given = [
            ("teacher", row.teacher),
            ("against", row.against),
            *(("also", n) for n in row.also),
        ]
        for key, one in given:
            if one is not None:
                _require(one, set(study.teachers), f"{origin}: rows.{name}.{key}", "teacher")
        if row.teacher is None and (row.also or row.against):
            raise StudyError(f"{origin}: rows.{name} has `also` or `against` without a `teacher`.")
        if row.matched_to is not None:
            _require(row.matched_to, known, f"{origin}: rows.{name}.matched_to", "row")
            if rows[row.matched_to].matched_to or rows[row.matched_to].teacher is None:
                raise StudyError(
                    f"{origin}: rows.{name}.matched_to is {row.matched_to}, which has no teacher "
                    "of its own. Name a guided row."
                )
        if row.targets is not None and row.set.get("objective.method") != "distill":
            raise StudyError(f"{origin}: rows.{name}.targets is for rows of method distill.")
        if row.tuned is not None:
            groups = set(study.tune.rows) if study.tune else set()
            _require(row.tuned, groups, f"{origin}: rows.{name}.tuned", "tuning group")
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
