"""One table of a study from what its runs have left: markdown and JSON. Needs no model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.files import write_json
from vocagnolm.methods import METHODS
from vocagnolm.statistics import mean_and_spread
from vocagnolm.study.design import GranularityPlan, RowPlan, recipe_with
from vocagnolm.study.evaluation import ANSWERS_FILE, Grades, grade_answers, questions_of
from vocagnolm.study.folder import EVALUATION, SELECTION, read_result
from vocagnolm.study.laboratory import Laboratory
from vocagnolm.study.rows import (
    average_accuracy,
    bit_gaps,
    compare_bits,
    compare_rows,
    mark_gaps,
)

if TYPE_CHECKING:
    from vocagnolm.evaluate.render import Request

GRADES_FILE = "grades.json"


def read_results(laboratory: Laboratory) -> dict[str, dict[int, dict[str, Any]]]:
    """Row -> seed -> evaluation of the finished runs, with grades where there are answers."""
    requests = laboratory.study.evaluate.requests
    questions = questions_of(requests) if requests is not None and Path(requests).exists() else {}
    wanted = [(run.row, run.seed, laboratory.run_folder(run)) for run in laboratory.runs]
    if laboratory.study.start is not None:
        wanted.insert(0, ("start", 0, laboratory.folder / "runs" / "start-s0"))
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for row, seed, folder in wanted:
        path = folder / EVALUATION
        if not path.is_file():
            continue
        found = read_result(path)
        answered = questions and (folder / ANSWERS_FILE).is_file()
        if answered or (folder / GRADES_FILE).is_file():
            found["grades"] = _grades(folder, questions)
            found["accuracy"] = average_accuracy(found["grades"])
        if (folder / SELECTION).is_file():
            found["selection"] = read_result(folder / SELECTION)
        results.setdefault(row, {})[seed] = found
    return results


def _grades(folder: Path, questions: dict[tuple[str, int], "Request"]) -> Grades:
    """Grading takes seconds a run: kept beside the answers."""
    path = folder / GRADES_FILE
    if path.is_file():
        kept = read_result(path)
        return {task: {int(q): bool(v) for q, v in marks.items()} for task, marks in kept.items()}
    grades = grade_answers(folder / ANSWERS_FILE, questions)
    write_json(path, {t: {q: int(v) for q, v in m.items()} for t, m in grades.items()}, indent=None)
    return grades


def study_table(laboratory: Laboratory) -> dict[str, Any]:
    """Everything the study has found so far, as plain data."""
    study = laboratory.study
    results = read_results(laboratory)
    order = ["start", *(study.use or laboratory.rows)]
    rows = []
    for name in order:
        seeds = results.get(name)
        if seeds:
            rows.append(_row(name, laboratory.rows.get(name), seeds))
    comparisons = [found for names in study.comparisons if (found := _comparison(names, results))]
    planned = {run.name for run in laboratory.runs}
    done = {
        run.name for run in laboratory.runs if (laboratory.run_folder(run) / EVALUATION).exists()
    }
    table = {
        "study": study.name,
        "title": study.title,
        "rows": rows,
        "comparisons": comparisons,
        "tuning": _tuning(laboratory),
        "teachers": _teachers(laboratory),
        "student_bits_per_byte": study.base.get("student", {}).get("bits_per_byte"),
        "missing": sorted(planned - done),
    }
    if study.granularity is not None:
        _add_granularity(table, laboratory, study.granularity)
    return table


def _comparison(
    names: list[str], results: dict[str, dict[int, dict[str, Any]]]
) -> dict[str, Any] | None:
    """Of two rows, or of two differences, each of two rows; None while a side has no runs."""
    marks, bits = (
        [{s: r[key] for s, r in results.get(n, {}).items() if key in r} for n in names]
        for key in ("grades", "held_out")
    )
    a, b = names[0], names[-1]
    if len(names) == 4:
        a, b = f"({names[0]} - {names[1]})", f"({names[2]} - {names[3]})"
        marks = [mark_gaps(*marks[:2]), mark_gaps(*marks[2:])]
        bits = [bit_gaps(*bits[:2]), bit_gaps(*bits[2:])]
    if not all(marks):
        return None
    found = compare_rows(*marks, one_b=b == "start")  # one start for all seeds
    return {"a": a, "b": b, **found.as_json(), "bits_per_byte": compare_bits(*bits)}


def _row(name: str, plan: RowPlan | None, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    some = next(iter(seeds.values()))
    row: dict[str, Any] = {
        "row": name,
        "label": (plan.label if plan else None) or name,
        "teacher": plan.teacher if plan else None,
        "seeds": sorted(seeds),
        "learning_rate": some.get("learning_rate"),
        "bits_per_byte": {},
        "tasks": {},
    }
    scores = [result["accuracy"] for result in seeds.values() if "accuracy" in result]
    if scores:
        row["accuracy"], row["accuracy_spread"] = mean_and_spread(scores)
        row["accuracy_by_seed"] = {s: r.get("accuracy") for s, r in sorted(seeds.items())}
        graded = [result["grades"] for result in seeds.values() if "grades" in result]
        for task in graded[0]:
            values = [100 * sum(g[task].values()) / len(g[task]) for g in graded]
            row["tasks"][task] = mean_and_spread(values)[0]
    for name_ in some["held_out"]:
        values = [result["held_out"][name_] for result in seeds.values()]
        mean, spread = mean_and_spread(values)
        row["bits_per_byte"][name_] = {"mean": mean, "spread": spread}
    selection = [r["selection"] for r in seeds.values() if "selection" in r]
    if selection:
        row["kept_by_source"] = selection[0]
    return row


def _add_granularity(table: dict[str, Any], laboratory: Laboratory, plan: GranularityPlan) -> None:
    """IoU and IoS to the rows that train on an alignment with this teacher: of their chunks,
    whoever chooses them, or of tokens."""
    path = laboratory.granularity_file(plan)
    if not path.is_file():
        table["granularity"] = None
        table["missing"].append(path.stem)
        return
    found = table["granularity"] = read_result(path)
    chunks = {point["n"]: point for point in found["chunks"]}
    for row in table["rows"]:
        name = row["row"]
        if name not in laboratory.rows:
            continue  # the start
        settings = laboratory.rows[name]
        objective = recipe_with(laboratory.study.base, settings.set, f"row {name}").objective
        point = None
        if METHODS[objective.method].unit == "chunk" and settings.teacher in (None, plan.teacher):
            point = chunks.get(objective.n_chunks)
        elif METHODS[objective.method].by_excess and settings.teacher == plan.teacher:
            # a matched row keeps tokens by chance, whatever its teacher
            point = found["token_level"] if settings.matched_to is None else None
        if point is not None:
            row["iou"], row["ios"] = point["iou"], point["ios"]


def _tuning(laboratory: Laboratory) -> list[dict[str, Any]]:
    found = []
    for path in sorted((laboratory.folder / "tuning").glob(f"*/{EVALUATION}")):
        result = read_result(path)
        bits = result["validation"]
        entry = {"group": result["group"], "learning_rate": result["learning_rate"]}
        if bits:
            entry["validation_bits_per_byte"] = sum(bits.values()) / len(bits)
        if "validation_accuracy" in result:
            entry["validation_accuracy"] = result["validation_accuracy"]
        found.append(entry)
    return sorted(found, key=lambda entry: (entry["group"], entry["learning_rate"]))


def _teachers(laboratory: Laboratory) -> dict[str, Any]:
    found = {}
    for path in sorted((laboratory.folder / "stores").glob("*.json")):
        plan = laboratory.study.teachers.get(path.stem)
        label = (plan.label if plan else None) or path.stem
        found[path.stem] = {"label": label, **read_result(path)}
    return found


def markdown(table: dict[str, Any]) -> str:
    """The table as people read it."""
    tasks = list(dict.fromkeys(t for row in table["rows"] for t in row["tasks"]))
    texts = list(dict.fromkeys(t for row in table["rows"] for t in row["bits_per_byte"]))
    overlaps = {"IoU": "iou", "IoS": "ios"} if "granularity" in table else {}
    head = ["row", "runs", "lr", *overlaps, *(["average"] if tasks else []), *tasks]
    head += [f"bpb {text}" for text in texts]
    lines = [f"**{table['title'] or table['study']}**", "", _line(head)]
    lines.append(_line(["---", *("---:" for _ in head[1:])]))
    for row in table["rows"]:
        cells = [row["label"], str(len(row["seeds"])), _rate(row["learning_rate"])]
        cells += [_percent(row.get(measure)) for measure in overlaps.values()]
        if tasks:
            cells.append(_with_spread(row.get("accuracy"), row.get("accuracy_spread"), 2))
            cells += [_with_spread(row["tasks"].get(task), None, 1) for task in tasks]
        for text in texts:
            bits = row["bits_per_byte"].get(text, {})
            cells.append(_with_spread(bits.get("mean"), bits.get("spread"), 4))
        lines.append(_line(cells))
    if table["comparisons"]:
        lines += ["", *_comparison_lines(table["comparisons"])]
        lines += ["", *_bits_lines(table["comparisons"], texts)]
    if table["missing"]:
        lines += ["", f"Not run yet: {', '.join(table['missing'])}."]
    return "\n".join(lines) + "\n"


def _comparison_lines(comparisons: list[dict[str, Any]]) -> list[str]:
    """First on the seeds that both rows have, then on all seeds of either."""
    head = ["comparison", "difference", "95 %", "p (questions)", "p (seeds)", "shared seeds"]
    head += ["all seeds: difference", "p (Welch)", "all seeds"]
    lines = [_line(head), _line(["---", *("---:" for _ in head[1:])])]
    for entry in comparisons:
        cells = [f"{entry['a']} - {entry['b']}"]
        if entry["seeds"]:
            low, high = entry["interval"]
            cells += [f"{entry['difference']:+.2f}", f"{low:+.2f} to {high:+.2f}"]
            cells += [f"{entry['p_questions']:.4f}", _p(entry["p_seeds"]), str(len(entry["seeds"]))]
        else:
            cells += [""] * 5
        every = entry["all_seeds"]
        cells += [f"{every['difference']:+.2f}", _p(every["p"])]
        lines.append(_line([*cells, f"{every['n_a']} and {every['n_b']}"]))
    return lines


def _bits_lines(comparisons: list[dict[str, Any]], texts: list[str]) -> list[str]:
    lines = [_line(["bits per byte, shared seeds", *texts])]
    lines.append(_line(["---", *("---:" for _ in texts)]))
    for entry in comparisons:
        cells = [f"{entry['a']} - {entry['b']}"]
        for text in texts:
            bits = entry["bits_per_byte"].get(text)
            cell = "" if bits is None else f"{bits['difference']:+.4f}"
            if bits is not None and bits["interval"] is not None:
                low, high = bits["interval"]
                cell += f" ({low:+.4f} to {high:+.4f})"
            cells.append(cell)
        lines.append(_line(cells))
    return lines


def _p(p: float | None) -> str:
    if p is None:
        return ""
    return f"{p:.3f}" if p >= 0.0005 else "<0.001"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _with_spread(mean: float | None, spread: float | None, digits: int) -> str:
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
