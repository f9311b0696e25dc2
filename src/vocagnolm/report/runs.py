"""Run folders as page data: recipe, curves, and the selection sample where there is one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.errors import VocagnolmError
from vocagnolm.evaluate.results import Evaluation, in_order, read_results
from vocagnolm.evaluate.settings import marks
from vocagnolm.evaluate.suite import AVERAGES, TASKS
from vocagnolm.files import json_digest, local_path, parse_json
from vocagnolm.recipe.schema import parse_yaml
from vocagnolm.report.html import write_page
from vocagnolm.report.kept import statistics
from vocagnolm.report.page_data import Measure, Page, ResultGroup, Results, Run
from vocagnolm.report.sampling import Sample, has_sample, read_sample
from vocagnolm.report.settings import environment, setting_names
from vocagnolm.train.folder import with_current_names

CURVE_POINTS = 100
"""A curve on a page has no more points than this; longer ones are means over equal bins."""
CURVES = (
    "nll_kept",
    "nll_all",
    "kept_share",
    "mapped_share",
    "learning_rate",
    "tokens_per_second",
)


class RunError(VocagnolmError):
    """A folder is not a run, or its files cannot be read."""


def read_run(folder: str | Path, name: str | None = None, setting: str | None = None) -> Run:
    """One run folder: `metrics.jsonl` and `recipe.yaml`, either of which may be missing."""
    path = local_path(folder)
    recipe_file, metrics_file = path / "recipe.yaml", path / "metrics.jsonl"
    if not path.is_dir() or not (recipe_file.is_file() or metrics_file.is_file()):
        raise RunError(
            f"{path} is not a run folder: expected recipe.yaml and metrics.jsonl in it. "
            "Give the folder that `vocagnolm train` wrote (run.folder in the recipe)"
        )
    recipe = recipe_file.read_text("utf-8", "replace") if recipe_file.is_file() else None
    steps = read_metrics(metrics_file) if metrics_file.is_file() else []
    curves, per_point = training_curves(steps)
    return Run(
        name=name or path.name,
        method=_method(recipe),
        setting=setting,
        curves=curves,
        steps_per_point=per_point,
        recipe=recipe,
        environment=_environment_of(path),
        facts=_facts(steps),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a run. A last line cut short by a crash is left out; where a resumed run
    wrote a step again, the later line counts."""
    steps: dict[int, dict[str, Any]] = {}
    lines = path.read_text("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError:
            if number == len(lines):
                continue
            raise RunError(
                f"{path}, line {number}: not JSON. Expected one object for each step; "
                "remove the damaged line to read the rest"
            ) from None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            steps[record["step"]] = with_current_names(record)
    return [steps[step] for step in sorted(steps)]


def training_curves(
    steps: Sequence[dict[str, Any]],
) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Metric -> points, and how many steps one point stands for."""
    per_point = max(1, math.ceil(len(steps) / CURVE_POINTS))
    curves = {}
    # what is minimised depends on the normalisation; it stands in only where nothing better is
    known = any("nll_kept" in record for record in steps)
    for metric in CURVES if known else ("loss", *CURVES):
        pairs = [
            (float(record["step"]), float(record[metric]))
            for record in steps
            if isinstance(record.get(metric), int | float) and math.isfinite(record[metric])
        ]
        if len(pairs) > 1:
            bins = [pairs[at : at + per_point] for at in range(0, len(pairs), per_point)]
            curves[metric] = [_mean_point(points) for points in bins]
    return curves, per_point


def _mean_point(points: list[tuple[float, float]]) -> tuple[float, float]:
    step, value = np.mean(np.array(points), axis=0)
    return round(float(step), 1), float(f"{value:.5g}")


def _method(recipe: str | None) -> str | None:
    if recipe is None:
        return None
    try:
        content = parse_yaml(recipe)
    except ValueError:
        return None
    objective = content.get("objective") if isinstance(content, dict) else None
    method = objective.get("method") if isinstance(objective, dict) else None
    return str(method) if method else None


def _environment_of(run: Path) -> dict[str, str]:
    """The versions that `train` wrote into run.json."""
    try:
        content = parse_json((run / "run.json").read_text(encoding="utf-8"))
        return {str(name): str(value) for name, value in content["versions"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}  # an older run, or one of another program: the page does without


def _facts(steps: Sequence[dict[str, Any]]) -> dict[str, str]:
    if not steps:
        return {}
    last = steps[-1]
    facts = {"steps": f"{last['step']:,}"}
    if isinstance(last.get("tokens"), int | float):
        facts["tokens"] = f"{int(last['tokens']):,}"
    if isinstance(last.get("loss"), int | float):
        facts["last loss"] = f"{last['loss']:.4f}"
    return facts


def report_page(
    runs: Sequence[str | Path],
    *,
    title: str | None = None,
    subtitle: str | None = None,
    results: Results | None = None,
    notes: Sequence[str] = (),
) -> Page:
    """The page for finished runs: their evaluations and curves side by side, and the text of the
    first run that has a selection sample."""
    folders = [Path(run) for run in runs]
    if not folders:
        raise RunError("no run was given: expected one or more run folders")
    names = _names(folders)
    settings = setting_names(folders, names)
    read = [read_run(*one) for one in zip(folders, names, settings, strict=True)]
    sample = next((s for s in map(_sample_of, folders) if s is not None), None) or Sample()
    return Page(
        title=title or (read[0].name if len(read) == 1 else f"{len(read)} runs, side by side"),
        subtitle=subtitle,
        passages=sample.passages,
        selection=sample.selection,
        statistics=statistics(sample.passages),
        preflight=sample.preflight,
        results=results or evaluation_results(folders, read),
        runs=read,
        environment=environment(),
        notes=list(notes),
    )


def write_report(
    runs: Sequence[str | Path], html: str | Path, *, sample_documents: int = 16
) -> Path:
    """`vocagnolm report --html`: makes a selection sample when no run has one yet. Where that
    cannot be done (no store, no model, a corpus that has moved) the page says why."""
    folders = [Path(run) for run in runs]
    notes = []
    if sample_documents and not any(has_sample(folder) for folder in folders):
        note = _make_sample(folders, sample_documents)
        if note is not None:
            notes.append(note)
    return write_page(report_page(folders, notes=notes), html)


def _make_sample(folders: Sequence[Path], documents: int) -> str | None:
    """Try the guided runs first; the reason of the last failure when all fail."""
    from vocagnolm.report.sampling import write_sample

    guided_first = sorted(folders, key=lambda folder: read_run(folder).method != "guided")
    reason = None
    for folder in guided_first:
        try:
            write_sample(folder, documents=documents)
            return None
        except VocagnolmError as error:
            reason = str(error)
    return f"The page shows no text, because no selection sample could be made: {reason}"


def evaluation_results(folders: Sequence[Path], runs: Sequence[Run]) -> Results | None:
    """What `vocagnolm evaluate` left in the runs: a column for each task, a row for each setting
    with its seeds. Scores made under other conditions have a column of their own, named after what
    differs. None when no run was evaluated."""
    evaluations = [_evaluation(folder) for folder in folders]
    scores: list[dict[str, _Score]] = [{} for _ in folders]
    tasks = in_order(name for one in evaluations if one is not None for name in one.tasks)
    for task in (order := [*tasks, *AVERAGES, "bits_per_byte"]):
        held = [(at, one) for at, one in enumerate(evaluations) if _score(one, task) is not None]
        apart = marks([_conditions(one, task) for _, one in held])
        for (at, one), mark in zip(held, apart, strict=True):
            score = _score(one, task)
            assert score is not None
            scores[at][f"{task} ({mark})" if mark else task] = score
    names = list(dict.fromkeys(name for one in scores for name in one))
    if not names:
        return None
    names.sort(key=lambda column: (order.index(column.partition(" ")[0]), column))
    rows = list(dict.fromkeys(run.setting or run.name for run in runs))
    groups = []
    for row in rows:
        mine = [s for s, run in zip(scores, runs, strict=True) if (run.setting or run.name) == row]
        table = [[s.get(name, _Score()) for s in mine] for name in names]
        groups.append(
            ResultGroup(
                name=row,
                values=[[score.value for score in seeds] for seeds in table],
                errors=[[score.error for score in seeds] for seeds in table],
            )
        )
    measures = [
        Measure(name=name.replace("bits_per_byte", "bits per byte"), better="lower", digits=4)
        if name.startswith("bits_per_byte")
        else Measure(name=name, unit="%", digits=1)
        for name in names
    ]
    return Results(measures=measures, groups=groups)


@dataclass(frozen=True)
class _Score:
    value: float | None = None
    error: float | None = None
    """Standard error over questions."""


def _evaluation(folder: Path) -> Evaluation | None:
    try:
        return read_results(folder / "evaluation" / "results.json")
    except FileNotFoundError:
        return None


def _score(evaluation: Evaluation | None, name: str) -> _Score | None:
    """Of a task, an average or the text; None where it was not measured."""
    if evaluation is None:
        return None
    if name == "bits_per_byte":
        bits = evaluation.bits_per_byte
        return None if bits is None else _Score(bits)
    if name in AVERAGES:
        mean = evaluation.averages()[name]
        return None if mean is None else _Score(mean, evaluation.average_stderrs()[name])
    task = evaluation.tasks.get(name)
    return None if task is None else _Score(task.score, task.stderr)


def _conditions(evaluation: Evaluation | None, name: str) -> dict[str, Any]:
    if evaluation is None:
        return {}
    if name not in AVERAGES:
        known = evaluation.conditions.get(name, {})
        # older evaluations know their protocol alone
        return known or ({"protocol": evaluation.protocol} if name in TASKS else {})
    parts = [_conditions(evaluation, task) for task in AVERAGES[name]]
    shared = {key: [part.get(key) for part in parts] for part in parts for key in part}
    return {
        key: values[0] if len({str(value) for value in values}) == 1 else json_digest(values)[:8]
        for key, values in shared.items()
    }


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with as many parents as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(p[-2:]) for p in parts]


def _sample_of(folder: Path) -> Sample | None:
    return read_sample(folder) if has_sample(folder) else None
