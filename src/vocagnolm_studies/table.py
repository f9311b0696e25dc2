"""The table of a study, from what its runs have left: markdown and JSON. Needs no model.

Rows are compared pairwise: paired over questions, seeds and both; unpaired over all seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vocagnolm.base.statistics import (
    AllSeeds,
    bootstrap_interval,
    compare_means,
    mean_and_spread,
    paired_interval,
    paired_t_p,
    sign_flip_p,
)
from vocagnolm.recipe.methods import METHODS
from vocagnolm_studies.design import GranularityPlan, RowPlan, recipe_with
from vocagnolm_studies.evaluation import Marks, average_accuracy, read_results
from vocagnolm_studies.folder import EVALUATION, StudyFolder, read_result

Bits = Mapping[str, float]
"""Text -> bits per byte."""


def study_table(home: StudyFolder) -> dict[str, Any]:
    """The rows, comparisons, tuning runs and teachers of the study so far, as plain data."""
    study = home.study
    results = read_results(home)
    measured = home.measured_teachers()
    asked = {
        f"teacher-{name}": RowPlan(label=study.teachers[name].label or name, teacher=name)
        for name in measured
    }
    plans = {**home.rows, **asked}
    rows = []
    for name in ["start", *asked, *(study.use or home.rows)]:
        seeds = results.get(name)
        if seeds:
            rows.append(_row(name, plans.get(name), seeds))
    comparisons = [entry for names in study.comparisons if (entry := _comparison(names, results))]
    planned = {run.name: home.run_folder(run) for run in home.runs}
    planned |= {f"teacher-{name}": folder for name, folder in measured.items()}
    table = {
        "study": study.name,
        "title": study.title,
        "rows": rows,
        "comparisons": comparisons,
        "tuning": _tuning(home),
        "teachers": _teachers(home),
        "student_bits_per_byte": study.base.get("student", {}).get("bits_per_byte"),
        "missing": sorted(n for n, at in planned.items() if not (at / EVALUATION).exists()),
    }
    if study.granularity is not None:
        _add_granularity(table, home, study.granularity)
    return table


def _comparison(
    names: list[str], results: dict[str, dict[int, dict[str, Any]]]
) -> dict[str, Any] | None:
    """Two rows compared, or two differences of two rows each; None while a side has no runs."""
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
    comparison = compare_rows(*marks, single_b=b == "start")  # one start for all seeds
    return {"a": a, "b": b, **comparison.as_json(), "bits_per_byte": compare_bits(*bits)}


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
        graded = [r["grades"] | r["apart"] for r in seeds.values() if "grades" in r]
        for task in graded[0]:
            values = [100 * sum(g[task].values()) / len(g[task]) for g in graded]
            row["tasks"][task] = mean_and_spread(values)[0]
    for name_ in ("choosing", "drawn", "ranked"):
        marks = {s: average_accuracy(r[name_]) for s, r in sorted(seeds.items()) if name_ in r}
        if marks:
            row[name_], row[f"{name_}_spread"] = mean_and_spread([*marks.values()])
            row[f"{name_}_by_seed"] = marks
    for name_ in some["held_out"]:
        values = [result["held_out"][name_] for result in seeds.values()]
        mean, spread = mean_and_spread(values)
        row["bits_per_byte"][name_] = {"mean": mean, "spread": spread}
    selection = [r["selection"] for r in seeds.values() if "selection" in r]
    if selection:
        row["kept_by_source"] = selection[0]
    return row


def _add_granularity(table: dict[str, Any], home: StudyFolder, plan: GranularityPlan) -> None:
    """Add IoU and IoS to the rows that train on an alignment with this teacher: those of their
    chunks, whoever chooses them, or of tokens."""
    path = home.granularity_file(plan)
    if not path.is_file():
        table["granularity"] = None
        table["missing"].append(path.stem)
        return
    overlaps = table["granularity"] = read_result(path)
    chunks = {point["n"]: point for point in overlaps["chunks"]}
    for row in table["rows"]:
        name = row["row"]
        if name not in home.rows:
            continue  # the start
        settings = home.rows[name]
        objective = recipe_with(home.study.base, settings.set, f"row {name}").objective
        point = None
        if METHODS[objective.method].unit == "chunk" and settings.teacher in (None, plan.teacher):
            point = chunks.get(objective.n_chunks)
        elif METHODS[objective.method].by_excess and settings.teacher == plan.teacher:
            # a matched row keeps tokens by chance, whatever its teacher
            point = overlaps["token_level"] if settings.matched_to is None else None
        if point is not None:
            row["iou"], row["ios"] = point["iou"], point["ios"]


def _tuning(home: StudyFolder) -> list[dict[str, Any]]:
    entries = []
    rows = home.study.tune.rows if home.study.tune is not None else {}
    for path in sorted((home.folder / "tuning").glob(f"*/{EVALUATION}")):
        result = read_result(path)
        bits = result["validation"]
        entry = {"group": result["group"], "learning_rate": result["learning_rate"]}
        if entry["group"] in rows:
            entry["row"] = rows[entry["group"]]
        if bits:
            entry["validation_bits_per_byte"] = sum(bits.values()) / len(bits)
        if "validation_accuracy" in result:
            entry["validation_accuracy"] = result["validation_accuracy"]
        entries.append(entry)
    return sorted(entries, key=lambda entry: (entry["group"], entry["learning_rate"]))


def _teachers(home: StudyFolder) -> dict[str, Any]:
    teachers = {}
    for path in sorted((home.folder / "stores").glob("*.json")):
        plan = home.study.teachers.get(path.stem)
        label = (plan.label if plan else None) or path.stem
        teachers[path.stem] = {"label": label, **read_result(path)}
    return teachers


def markdown(table: dict[str, Any]) -> str:
    """The table as Markdown: rows, then comparisons in accuracy and in bits per byte."""
    tasks = list(dict.fromkeys(t for row in table["rows"] for t in row["tasks"]))
    texts = list(dict.fromkeys(t for row in table["rows"] for t in row["bits_per_byte"]))
    overlaps = {"IoU": "iou", "IoS": "ios"} if "granularity" in table else {}
    extra = [name for name in _FURTHER if any(name in row for row in table["rows"])]
    head = ["row", "runs", "lr", *overlaps, *(["average"] if tasks else []), *tasks]
    head += [_FURTHER[name] for name in extra]
    head += [f"bpb {text}" for text in texts]
    lines = [f"**{table['title'] or table['study']}**", "", _line(head)]
    lines.append(_line(["---", *("---:" for _ in head[1:])]))
    for row in table["rows"]:
        cells = [row["label"], str(len(row["seeds"])), _rate(row["learning_rate"])]
        cells += [_percent(row.get(measure)) for measure in overlaps.values()]
        if tasks:
            cells.append(_with_spread(row.get("accuracy"), row.get("accuracy_spread"), 2))
            cells += [_with_spread(row["tasks"].get(task), None, 1) for task in tasks]
        cells += [_with_spread(row.get(name), row.get(f"{name}_spread"), 2) for name in extra]
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


_FURTHER = {"choosing": "choosing", "drawn": "drawn answers", "ranked": "likeliest is right"}
"""Further measures in percent, and their columns: accuracy on the questions that choose learning
rates, of answers that are drawn, and of choosing the likeliest option."""


def seed_interval(comparison: Mapping[str, Any]) -> tuple[float, float] | None:
    """Student's 95 % interval over the seed differences of a comparison of the table; None with
    fewer than two shared seeds."""
    return paired_interval(np.array(comparison["seed_differences"]))


def _comparison_lines(comparisons: list[dict[str, Any]]) -> list[str]:
    """First on the seeds that both rows have, then on all seeds of either."""
    head = ["comparison", "difference", "95 %, questions and seeds", "95 %, seeds (t)"]
    head += ["p (questions)", "p (seeds)", "shared seeds"]
    head += ["all seeds: difference", "p (Welch)", "all seeds"]
    lines = [_line(head), _line(["---", *("---:" for _ in head[1:])])]
    for entry in comparisons:
        cells = [f"{entry['a']} - {entry['b']}"]
        if entry["seeds"]:
            cells += [f"{entry['difference']:+.2f}", _interval(entry["interval"], 2)]
            cells += [_interval(seed_interval(entry), 2), f"{entry['p_questions']:.4f}"]
            cells += [_p(entry["p_seeds"]), str(len(entry["seeds"]))]
        else:
            cells += [""] * 6
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
            bits = entry.get("bits_per_byte", {}).get(text)  # tables of 0.1.0 have none
            cell = "" if bits is None else f"{bits['difference']:+.4f}"
            if bits is not None and bits["interval"] is not None:
                cell += f" ({_interval(bits['interval'], 4)})"
            cells.append(cell)
        lines.append(_line(cells))
    return lines


def _interval(interval: Sequence[float] | None, digits: int) -> str:
    return "" if interval is None else " to ".join(f"{end:+.{digits}f}" for end in interval)


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


# ---- comparisons of rows ----


@dataclass(frozen=True)
class Comparison:
    """Difference a - b of the average accuracy over tasks, in percentage points, on the seeds
    that both rows have. Without such seeds, only `all_seeds` says something."""

    difference: float | None
    seeds: list[int]
    seed_differences: list[float]
    p_questions: float | None
    """Two-sided sign-flip test over questions, seeds averaged: these runs, other questions."""
    p_seeds: float | None
    """Two-sided paired t test over seeds: these questions, other runs. None with one seed."""
    interval: tuple[float, float] | None
    """95 % bootstrap over questions and seeds together."""
    all_seeds: AllSeeds

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def mark_gaps(a: Mapping[int, Marks], b: Mapping[int, Marks]) -> dict[int, Marks]:
    """a - b question by question, on the seeds that both rows have. Two of these, compared, are a
    difference of differences."""
    return {
        seed: {
            task: {q: marks[q] - b[seed][task][q] for q in marks} for task, marks in a[seed].items()
        }
        for seed in sorted(a.keys() & b.keys())
    }


def bit_gaps(a: Mapping[int, Bits], b: Mapping[int, Bits]) -> dict[int, Bits]:
    """a - b text by text, on the seeds that both rows have."""
    shared = sorted(a.keys() & b.keys())
    return {seed: {text: a[seed][text] - b[seed][text] for text in a[seed]} for seed in shared}


def compare_rows(
    a: Mapping[int, Marks], b: Mapping[int, Marks], *, single_b: bool = False
) -> Comparison:
    """Compare two rows, given as seed -> marks, in a way that every task counts the same. With
    `single_b`, b is one model, the start say, that every seed of a is compared with."""
    all_seeds = compare_means(*([average_accuracy(g) for g in row.values()] for row in (a, b)))
    if single_b:
        (only,) = b.values()
        b = dict.fromkeys(a, only)
    seeds = sorted(set(a) & set(b))
    if not seeds:
        return Comparison(None, [], [], None, None, None, all_seeds)
    tasks = sorted(a[seeds[0]])
    differences, weights, strata = [], [], []
    for number, task in enumerate(tasks):
        questions = sorted(a[seeds[0]][task])
        marks = np.array(
            [[float(a[s][task][q]) - float(b[s][task][q]) for q in questions] for s in seeds]
        )
        differences.append(marks)
        weights.append(np.full(len(questions), 100 / (len(tasks) * len(questions))))
        strata.append(np.full(len(questions), number))
    difference_SQ = np.concatenate(differences, axis=1)
    weight_Q, stratum_Q = np.concatenate(weights), np.concatenate(strata)
    by_seed = difference_SQ @ weight_Q
    return Comparison(
        difference=float(by_seed.mean()),
        seeds=seeds,
        seed_differences=[float(value) for value in by_seed],
        p_questions=sign_flip_p(difference_SQ.mean(0) * weight_Q),
        p_seeds=paired_t_p(by_seed) if len(seeds) > 1 else None,
        interval=bootstrap_interval(difference_SQ * weight_Q, stratum_Q),
        all_seeds=all_seeds,
    )


def compare_bits(a: Mapping[int, Bits], b: Mapping[int, Bits]) -> dict[str, dict[str, Any]]:
    """Differences a - b in bits per byte of every held-out text, on the seeds that both rows have,
    with Student's 95 % over them. Rows are given as seed -> text -> bits per byte."""
    gaps = bit_gaps(a, b)
    by_text = {}
    for text in next(iter(gaps.values()), ()):
        differences = np.array([bits[text] for bits in gaps.values()])
        by_text[text] = {
            "difference": float(differences.mean()),
            "seed_differences": [float(value) for value in differences],
            "interval": paired_interval(differences),
        }
    return by_text
