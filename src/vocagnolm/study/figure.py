"""One figure of a study: bars, lines over a number, or gains against the teachers' strength. Needs
the extra `plots`."""

from pathlib import Path
from typing import Any

from vocagnolm.errors import StudyError
from vocagnolm.study.design import FigurePlan


def draw(table: dict[str, Any], plan: FigurePlan, path: str | Path) -> Path:
    if plan.kind == "strength":
        return _draw_strength(table, plan, path)
    from vocagnolm.report.figures import COLOURS, INK, SOFT, _figure, _save

    rows = {row["row"]: row for row in table["rows"]}
    measured = {name: measure_of(row, plan.measure) for name, row in rows.items()}
    values = {name: value for name, value in measured.items() if value is not None}
    if not values:
        raise StudyError(f"No finished run has the measure '{plan.measure}' yet.")
    matplotlib, figure, axes = _figure(6.4, 3.6)
    if plan.kind == "lines":
        for at, (label, names) in enumerate(plan.series.items()):
            shown = [name for name in names if name in values and name in plan.x]
            if shown:
                means = [values[name][0] for name in shown]
                spreads = [values[name][1] or 0.0 for name in shown]
                places = [plan.x[name] for name in shown]
                colour = COLOURS[at % len(COLOURS)]
                axes.errorbar(places, means, spreads, marker="o", color=colour, label=label)
        axes.set_xlabel(plan.x_label, color=SOFT)
    else:
        names = list(values)
        means = [values[name][0] for name in names]
        spreads = [values[name][1] or 0.0 for name in names]
        bars = axes.barh(range(len(names)), means, xerr=spreads, color=COLOURS[0], ecolor=SOFT)
        axes.bar_label(bars, [f"{mean:.2f}" for mean in means], padding=4, fontsize=8, color=INK)
        axes.set_yticks(range(len(names)), [rows[name]["label"] for name in names], color=INK)
        axes.invert_yaxis()
    if plan.reference is not None and plan.reference in values:
        line = axes.axhline if plan.kind == "lines" else axes.axvline
        line(values[plan.reference][0], color=SOFT, linestyle="--", label=plan.reference)
    if plan.kind == "lines":
        axes.legend(frameon=False, fontsize=8)
        axes.set_ylabel(plan.measure, color=SOFT)
    else:
        axes.set_xlabel(plan.measure, color=SOFT)
    axes.set_title(table["title"] or table["study"], loc="left", fontsize=11, color=INK)
    return _save(matplotlib, figure, path)


def _draw_strength(table: dict[str, Any], plan: FigurePlan, path: str | Path) -> Path:
    from vocagnolm.report.figures import TeacherPoint, teacher_strength

    rows = {row["row"]: row for row in table["rows"]}
    points = []
    for entry in table["comparisons"]:
        row = rows.get(entry["a"], {})
        teacher = table["teachers"].get(row.get("teacher"))
        if entry["b"] != plan.reference or teacher is None:
            continue
        points.append(
            TeacherPoint(
                name=f"{row['label']}\n{teacher['label']}",
                bits_per_byte=teacher["bits_per_byte"],
                gain=entry["difference"],
                interval=tuple(entry["interval"]),
                seed_gains=entry["seed_differences"],
            )
        )
    if plan.reference not in rows or not points:
        raise StudyError(
            f"Nothing to draw yet: no finished row with a scored teacher is compared with "
            f"'{plan.reference}'."
        )
    return teacher_strength(
        points,
        path,
        reference=rows[plan.reference]["label"],
        student_bits_per_byte=table["student_bits_per_byte"],
        title=table["title"] or table["study"],
    )


def measure_of(row: dict[str, Any], measure: str) -> tuple[float, float | None] | None:
    """`accuracy`, or `bits_per_byte.NAME`."""
    if measure == "accuracy":
        return (row["accuracy"], row["accuracy_spread"]) if "accuracy" in row else None
    kind, _, name = measure.partition(".")
    if kind != "bits_per_byte":
        raise StudyError(f"figure.measure is '{measure}'; expected accuracy or bits_per_byte.NAME.")
    bits = row["bits_per_byte"].get(name)
    return (bits["mean"], bits["spread"]) if bits else None
