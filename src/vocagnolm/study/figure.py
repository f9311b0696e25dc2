"""One figure of a study: bars, lines over a number, answers against bits per byte, or gains against
the teachers' strength. Needs the extra `plots`."""

from pathlib import Path
from typing import Any

from vocagnolm.errors import StudyError
from vocagnolm.study.design import FigurePlan, PanelPlan

Rows = dict[str, dict[str, Any]]
Measured = dict[str, tuple[float, float | None]]
"""Row -> mean and spread."""


def draw(table: dict[str, Any], plan: FigurePlan, path: str | Path) -> Path:
    if plan.kind == "strength":
        return _draw_strength(table, plan, path)
    rows = {row["row"]: row for row in table["rows"]}
    measured = {name: measure_of(row, plan.measure) for name, row in rows.items()}
    values = {name: value for name, value in measured.items() if value is not None}
    if not values:
        raise StudyError(f"No finished run has the measure '{plan.measure}' yet.")
    kinds = {"bars": _draw_bars, "lines": _draw_lines, "frontier": _draw_frontier}
    return kinds[plan.kind](rows, values, plan, table["title"] or table["study"], path)


def _draw_bars(
    rows: Rows, values: Measured, plan: FigurePlan, title: str, path: str | Path
) -> Path:
    from vocagnolm.plots import COLOURS, INK, SOFT, new_figure, save_figure

    names = list(values)
    matplotlib, figure, axes = new_figure(8.0, 1.1 + 0.24 * len(names))
    digits = 2 if plan.measure == "accuracy" else 4
    for place, name in enumerate(names):
        mean, spread = values[name]
        # the reference stands out by standing back
        colour = {"color": SOFT, "alpha": 0.55} if name == plan.reference else {"color": COLOURS[0]}
        axes.barh(place, mean, height=0.7, **colour)
        if spread is not None:
            axes.errorbar(mean, place, xerr=spread, color=INK, linewidth=1.2, capsize=2)
        text = f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
        axes.text(
            1.01,
            place,
            f"{text}  ({len(rows[name]['seeds'])})",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color=INK,
        )
    if plan.reference in values:
        axes.axvline(values[plan.reference][0], color=SOFT, linestyle="--", linewidth=1, zorder=0.5)
    labels = [rows[name]["label"] for name in names]
    axes.set_yticks(range(len(names)), labels, color=INK, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first on top
    axes.set_xlabel(f"{_unit(plan.measure)}: mean ± spread over seeds (runs)", color=SOFT)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return save_figure(matplotlib, figure, path)


def _draw_lines(
    rows: Rows, values: Measured, plan: FigurePlan, title: str, path: str | Path
) -> Path:
    from vocagnolm.plots import INK, SOFT, new_panels, save_figure

    shown = plan.panels or [plan]
    matplotlib, figure, panels = new_panels(max(6.4, 4.4 * len(shown)), 4.2, len(shown))
    for axes, panel in zip(panels, shown, strict=True):
        _draw_panel(axes, panel, rows, values)
    panels[0].set_ylabel(f"{_unit(plan.measure)}\n(mean and spread over seeds)", color=SOFT)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return save_figure(matplotlib, figure, path)


def _draw_frontier(
    rows: Rows, values: Measured, plan: FigurePlan, title: str, path: str | Path
) -> Path:
    """Up is more right answers, left is fewer bits per byte: what lies beside both of the
    reference's lines, above and to the left, is better in both."""
    from vocagnolm.plots import COLOURS, INK, SOFT, new_figure, save_figure

    matplotlib, figure, axes = new_figure(8.4, 5.4)
    bits = {name: [one["mean"] for one in rows[name]["bits_per_byte"].values()] for name in values}
    places = {name: sum(found) / len(found) for name, found in bits.items() if found}
    if plan.reference in places:
        style = {"color": SOFT, "linestyle": "--", "linewidth": 1, "zorder": 0.5}
        axes.axhline(values[plan.reference][0], **style)
        axes.axvline(places[plan.reference], **style)
    of = {name: at for at, names in enumerate(plan.series.values()) for name in names}
    for at, names in enumerate(plan.series.values()):
        shown = [name for name in names if name in places]
        curve = ([places[name] for name in shown], [values[name][0] for name in shown])
        axes.plot(*curve, color=COLOURS[at % len(COLOURS)], linewidth=1, zorder=0.8)
    for name, x in places.items():
        mean, spread = values[name]
        colour = COLOURS[of[name] % len(COLOURS)] if name in of else SOFT
        axes.errorbar(x, mean, _known(spread), marker="o", markersize=5, capsize=2, color=colour)
        beside = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 7.5, "color": INK}
        axes.annotate(rows[name]["label"], (x, mean), **beside)
    axes.margins(x=0.2, y=0.1)
    axes.set_xlabel("bits per byte, mean over held-out texts", color=SOFT)
    axes.set_ylabel(f"{_unit(plan.measure)}\n(mean and spread over seeds)", color=SOFT)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return save_figure(matplotlib, figure, path)


def _draw_panel(axes: Any, panel: PanelPlan, rows: Rows, values: Measured) -> None:
    from vocagnolm.plots import COLOURS, INK, LINE, SOFT

    if panel.reference in values:
        mean, spread = values[panel.reference]
        label = rows[panel.reference]["label"]
        axes.axhline(mean, color=SOFT, linestyle="--", linewidth=1, label=label)
        if spread is not None:
            axes.axhspan(mean - spread, mean + spread, color=SOFT, alpha=0.12, linewidth=0)
    for at, (label, names) in enumerate(panel.series.items()):
        finished = [name for name in names if name in values]
        if finished:
            axes.errorbar(
                [_beside(panel, panel.x[name], at) for name in finished],
                [values[name][0] for name in finished],
                [_known(values[name][1]) for name in finished],
                marker="os^D"[at % 4],
                capsize=3,
                color=COLOURS[at % len(COLOURS)],
                label=label,
            )
    _place_ticks(axes, panel)
    axes.margins(y=0.1)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_xlabel(panel.x_label, color=SOFT)
    # above the panel, where it hides nothing
    place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0)}
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, **place)


def _known(spread: float | None) -> float:
    """A spread to draw, or none: NaN leaves the error bar out."""
    return float("nan") if spread is None else spread


def _beside(panel: PanelPlan, x: float, series: int) -> float:
    """A little to the side, so that no error bar hides another."""
    low, high = min(panel.x.values()), max(panel.x.values())
    step = 0.01 * (series - (len(panel.series) - 1) / 2)
    return x * (high / low) ** step if panel.log_x else x + (high - low) * step


def _place_ticks(axes: Any, panel: PanelPlan) -> None:
    """At all places of the plan, also where nothing has been run yet."""
    places = sorted(set(panel.x.values()))
    if panel.log_x:
        axes.set_xscale("log", base=2)
    names = [f"{place / 1e6:g}M" if place >= 1e6 else f"{place:g}" for place in places]
    axes.set_xticks(places, names)
    axes.minorticks_off()
    if len(places) > 1:
        low, high = places[0], places[-1]
        room = (high / low) ** 0.06 if panel.log_x else 0.06 * (high - low)
        axes.set_xlim(*((low / room, high * room) if panel.log_x else (low - room, high + room)))


def _draw_strength(table: dict[str, Any], plan: FigurePlan, path: str | Path) -> Path:
    from vocagnolm.study.strength_figure import TeacherPoint, teacher_strength

    rows = {row["row"]: row for row in table["rows"]}
    points = []
    for entry in table["comparisons"]:
        row = rows.get(entry["a"], {})
        teacher = table["teachers"].get(row.get("teacher"))
        if entry["b"] != plan.reference or teacher is None:
            continue
        # rows share few seeds with the reference, or none: all seeds against its mean
        found, zero = entry["all_seeds"], rows[entry["b"]]["accuracy"]
        seeds = [score for score in row["accuracy_by_seed"].values() if score is not None]
        points.append(
            TeacherPoint(
                name=f"{row['label']}\n{teacher['label']}",
                bits_per_byte=teacher["bits_per_byte"],
                gain=found["difference"],
                interval=found["interval"] and tuple(found["interval"]),
                seed_gains=[score - zero for score in seeds],
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


def _unit(measure: str) -> str:
    if measure == "accuracy":
        return "average accuracy, %"
    return f"bits per byte, {measure.partition('.')[2]}"
