"""The figures of studies. Needs the extra `plots`.

`draw` makes the one figure of a study's table: bars, lines over a number, answers against bits per
byte, or gains against the teachers' strength. The others show what is measured without training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.base.plots import COLOURS, INK, LINE, SOFT, new_figure, new_panels, save_figure
from vocagnolm.errors import StudyError, UsageError
from vocagnolm_studies.design import FigurePlan, PanelPlan

if TYPE_CHECKING:
    from vocagnolm_studies.granularity import GranularityStudy
    from vocagnolm_studies.labels import LabelStudy
    from vocagnolm_studies.selection import SelectionStudy

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
    title = table["title"] or table["study"]
    if plan.kind == "frontier":
        return _draw_frontier(rows, values, plan, title, path, table.get("tuning", []))
    kinds = {"bars": _draw_bars, "lines": _draw_lines}
    return kinds[plan.kind](rows, values, plan, title, path)


def _draw_bars(
    rows: Rows, values: Measured, plan: FigurePlan, title: str, path: str | Path
) -> Path:
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
    shown = plan.panels or [plan]
    matplotlib, figure, panels = new_panels(max(6.4, 4.4 * len(shown)), 4.2, len(shown))
    for axes, panel in zip(panels, shown, strict=True):
        _draw_panel(axes, panel, rows, values)
    panels[0].set_ylabel(f"{_unit(plan.measure)}\n(mean and spread over seeds)", color=SOFT)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return save_figure(matplotlib, figure, path)


def _draw_frontier(
    rows: Rows,
    values: Measured,
    plan: FigurePlan,
    title: str,
    path: str | Path,
    tuning: Sequence[dict[str, Any]],
) -> Path:
    """Up is more right answers, left is fewer bits per byte: what lies beside both of the
    reference's lines, above and to the left, is better in both. If learning rates were tuned by
    accuracy, a panel on the left shows one curve per tuned row over these rates."""
    bits = {
        name: [text["mean"] for text in rows[name]["bits_per_byte"].values()] for name in values
    }
    places = {name: sum(means) / len(means) for name, means in bits.items() if means}
    curves = {name: p for name, p in _curves_over_rates(tuning).items() if name in places}
    matplotlib, figure, panels = new_panels(10.0, 5.0, 2 if curves else 1)
    axes = panels[-1]
    if plan.reference in places:
        style = {"color": SOFT, "linestyle": "--", "linewidth": 1, "zorder": 0.5}
        axes.axhline(values[plan.reference][0], **style)
        axes.axvline(places[plan.reference], **style)
    of = {name: at for at, names in enumerate(plan.series.values()) for name in names}
    for at, names in enumerate(plan.series.values()):
        shown = [name for name in names if name in places]
        curve = ([places[name] for name in shown], [values[name][0] for name in shown])
        axes.plot(*curve, color=COLOURS[at % len(COLOURS)], linewidth=1, zorder=0.8)
    for number, (name, x) in enumerate(places.items(), 1):
        mean, spread = values[name]
        colour = COLOURS[of[name] % len(COLOURS)] if name in of else SOFT
        line = {"color": colour, "linewidth": 0.8, "zorder": 0.6}
        axes.errorbar(x, mean, _known(spread), capsize=2, alpha=0.5, **line)
        axes.plot([], [], linestyle="", label=f"{number}  {rows[name]['label']}")
        _numbered(axes, [x], [mean], number, colour, linestyle="")
        if name in curves:
            own = COLOURS[list(curves).index(name) % len(COLOURS)]
            _draw_rates(panels[0], curves[name], number, own)
    axes.margins(x=0.06, y=0.08)
    legend = {"frameon": False, "fontsize": 8, "labelcolor": INK, "handlelength": 0}
    if curves:  # below both panels
        figure.set_size_inches(10.0, 4.8 + 0.1 * len(places))
        figure.legend(loc="outside lower left", ncols=2, **legend)
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), **legend)
    axes.set_xlabel("bits per byte, mean over held-out texts", color=SOFT)
    axes.set_ylabel(f"{_unit(plan.measure)}\n(mean and spread over seeds)", color=SOFT)
    if curves:
        panels[0].margins(x=0.12, y=0.1)
        panels[0].set_xlabel("bits per byte, mean over validation texts", color=SOFT)
        panels[0].set_ylabel(f"{_unit(plan.measure)}\n(validation questions, one seed)", color=SOFT)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return save_figure(matplotlib, figure, path)


def _curves_over_rates(tuning: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Row -> its tuning runs, for rows with several learning rates and both measures."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for entry in tuning:
        if {"row", "validation_accuracy", "validation_bits_per_byte"} <= entry.keys():
            curves.setdefault(entry["row"], []).append(entry)
    return {row: points for row, points in curves.items() if len(points) > 1}


def _draw_rates(axes: Any, points: Sequence[dict[str, Any]], number: int, colour: str) -> None:
    """Accuracy against bits per byte at every learning rate that was tried."""
    bits = [point["validation_bits_per_byte"] for point in points]
    answers = [point["validation_accuracy"] for point in points]
    _numbered(axes, bits, answers, number, colour, linewidth=1)
    for point, *place in zip(points, bits, answers, strict=True):
        mantissa, _, exponent = f"{point['learning_rate']:.2e}".partition("e")
        rate = f"{float(mantissa):g}e{int(exponent)}"
        beside = {"xytext": (7, -9), "textcoords": "offset points", "fontsize": 6.5}
        axes.annotate(rate, place, color=colour, **beside)


def _numbered(
    axes: Any, x: Sequence[float], y: Sequence[float], number: int, colour: str, **line: Any
) -> None:
    """Points that carry the number of their row in the legend."""
    axes.plot(x, y, marker="o", markersize=11, color=colour, **line)
    text = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
    for place in zip(x, y, strict=True):
        axes.annotate(str(number), place, **text)


def _draw_panel(axes: Any, panel: PanelPlan, rows: Rows, values: Measured) -> None:
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
    rows = {row["row"]: row for row in table["rows"]}
    points = []
    for entry in table["comparisons"]:
        row = rows.get(entry["a"], {})
        teacher = table["teachers"].get(row.get("teacher"))
        if entry["b"] != plan.reference or teacher is None:
            continue
        # rows share few seeds with the reference, or none: all seeds against its mean
        every, zero = entry["all_seeds"], rows[entry["b"]]["accuracy"]
        seeds = [score for score in row["accuracy_by_seed"].values() if score is not None]
        points.append(
            TeacherPoint(
                name=f"{row['label']}\n{teacher['label']}",
                bits_per_byte=teacher["bits_per_byte"],
                accuracy=rows.get(f"teacher-{row['teacher']}", {}).get("accuracy"),
                gain=every["difference"],
                interval=every["interval"] and tuple(every["interval"]),
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


# ---- Figure 5: gains against the teachers' strength ----


@dataclass(frozen=True, kw_only=True)
class TeacherPoint:
    """A row of Figure 5: the strength of its teacher, and what the students gained."""

    name: str
    bits_per_byte: float
    """Those of the teacher on the corpus."""
    accuracy: float | None = None
    """The teacher's own, where it was measured."""
    gain: float
    interval: tuple[float, float] | None = None
    """None: not known, with one seed."""
    seed_gains: Sequence[float] = ()


def teacher_strength(
    points: Sequence[TeacherPoint],
    path: str | Path,
    *,
    reference: str = "plain pretraining",
    student_bits_per_byte: float | None = None,
    title: str = "",
) -> Path:
    """Figure 5: what students gain over the reference against their teachers' own strength, with
    a 95 % interval, and every seed as a dot. Their strength is their own accuracy, or unless all
    were measured, bits per byte. Stronger teachers stand on the right; rows of one teacher stand
    side by side."""
    matplotlib, figure, axes = new_figure(6.4, 4.4)
    labels = []
    scores = [point.accuracy for point in points if point.accuracy is not None]
    by_accuracy = len(scores) == len(points)
    places = _side_by_side(scores if by_accuracy else [point.bits_per_byte for point in points])
    for at, (point, place) in enumerate(zip(points, places, strict=True)):
        colour, seeds = COLOURS[at % len(COLOURS)], point.seed_gains
        interval = point.interval or (point.gain, point.gain)
        axes.vlines(place, *interval, color=colour, linewidth=1.8)
        hollow = {"facecolor": "white", "edgecolor": colour, "linewidth": 1, "zorder": 2.5}
        axes.scatter([place] * len(seeds), seeds, s=16, **hollow)
        axes.scatter([place], [point.gain], s=52, color=colour, zorder=3)
        reach = [*interval, *seeds]
        labels.append(_PointLabel(point.name, colour, place, point.gain, min(reach), max(reach)))
    axes.axhline(0, color=SOFT, linestyle="--", linewidth=1, zorder=1)
    _note(axes, reference, (0, 0), ("axes fraction", "data"))
    if student_bits_per_byte is not None and not by_accuracy:
        axes.axvline(student_bits_per_byte, color=SOFT, linestyle=":", linewidth=1, zorder=1)
        _note(axes, "the student itself", (student_bits_per_byte, 0), ("data", "axes fraction"))
    axes.margins(x=0.3, y=0.14)
    if not by_accuracy:
        axes.invert_xaxis()
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    strength = "own accuracy, %" if by_accuracy else "bits per byte on the corpus"
    axes.set_xlabel(f"teacher's {strength} (stronger \N{RIGHTWARDS ARROW})", color=SOFT)
    axes.set_ylabel("gain in accuracy, points\n(mean, 95 % interval, seeds)", color=SOFT)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    _label_points(figure, axes, labels)
    return save_figure(matplotlib, figure, path)


def _side_by_side(strengths: Sequence[float]) -> list[float]:
    """Where to draw points: at their strength, but a step apart where these are equal."""
    step = 0.03 * ((max(strengths) - min(strengths)) or max(strengths)) if strengths else 0.0
    return [
        own + step * (strengths[:at].count(own) - (strengths.count(own) - 1) / 2)
        for at, own in enumerate(strengths)
    ]


def _note(axes: Any, text: str, at: tuple[float, float], coordinates: tuple[str, str]) -> None:
    """A word on a line, at its beginning."""
    style = {"textcoords": "offset points", "xytext": (3, 3), "fontsize": 8, "color": SOFT}
    axes.annotate(text, at, xycoords=coordinates, **style)


@dataclass(frozen=True)
class _PointLabel:
    text: str
    colour: str
    x: float
    y: float
    low: float
    high: float
    """What is drawn at x reaches from low to high."""


def _label_points(figure: Any, axes: Any, labels: Sequence[_PointLabel]) -> None:
    """Each label beside its point, or above or below all that is drawn there: the first place
    where it hides least of the rest and of the other labels."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # settles the layout: extents are known from here on
    to_pixels = axes.transData.transform
    taken = [drawn.get_window_extent() for drawn in (*axes.texts, *axes.lines)]
    for label in labels:
        low, high = to_pixels((label.x, label.low)), to_pixels((label.x, label.high))
        taken.append(Bbox([low - 8, high + 8]))
    frame = axes.get_window_extent()
    for label in labels:
        on_the_right = to_pixels((label.x, label.y))[0] > frame.x0 + frame.width / 2
        beside = [(10, "left"), (-10, "right")]
        above, below = (label.high, 0, 7, "bottom"), (label.low, 0, -7, "top")
        places = [
            (label.y, dx, 0, side, vertical)
            for vertical in ("center", "bottom", "top")
            for dx, side in (beside[::-1] if on_the_right else beside)
        ]
        for y, dx, dy, vertical in (above, below):
            places += [(y, dx, dy, side, vertical) for side in ("center", "left", "right")]
        tried = []
        for y, dx, dy, horizontal, vertical in places:
            text = axes.annotate(
                label.text,
                (label.x, y),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=8,
                color=label.colour,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # over the grid
            )
            box = text.get_window_extent()
            outside = box.width * box.height - _shared_area(box, frame)
            tried.append((outside + sum(_shared_area(box, other) for other in taken), text, box))
        best = min(tried, key=lambda entry: entry[0])
        for entry in tried:
            if entry is not best:
                entry[1].remove()
        taken.append(best[2])


def _shared_area(a: Any, b: Any) -> float:
    """In pixels; a line counts as one pixel wide."""
    width = min(max(a.x1, a.x0 + 1), max(b.x1, b.x0 + 1)) - max(a.x0, b.x0)
    height = min(max(a.y1, a.y0 + 1), max(b.y1, b.y0 + 1)) - max(a.y0, b.y0)
    return float(max(width, 0) * max(height, 0))


# ---- what is measured without training ----


def granularity_curve(study: "GranularityStudy", path: str | Path) -> Path:
    """Figure 3: IoU and IoS of chunk alignment against the number of chunks."""
    matplotlib, figure, axes = new_figure(5.4, 3.5)
    chunks = [point for point in study.points if point.n_chunks is not None]
    token_level = next(point for point in study.points if point.n_chunks is None)
    places = [point.n_chunks for point in chunks]
    for at, (label, field) in enumerate([("IoS", "ios"), ("IoU", "iou")]):
        values = [100 * getattr(point, field) for point in chunks]
        axes.plot(places, values, "os"[at] + "-", color=COLOURS[at], label=f"chunks, {label}")
        axes.axhline(
            100 * getattr(token_level, field),
            color=COLOURS[at],
            linestyle="--",
            linewidth=1,
            label=f"token level, {label}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_ylim(0, 104)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_xlabel("chunks in a sequence", color=SOFT)
    axes.set_ylabel("overlap, %", color=SOFT)
    axes.set_title(f"{study.student} × {study.teacher}", loc="left", fontsize=11, color=INK)
    axes.legend(frameon=False, fontsize=8)
    return save_figure(matplotlib, figure, path)


def source_bars(study: "SelectionStudy", path: str | Path) -> Path:
    """The kept share of every source, for the reference and some other selections."""
    if study.by_source is None:
        raise UsageError(
            "There is nothing to draw: the corpus does not name the sources of its documents "
            "(--source-field)"
        )
    labels = {row.name: row.label for row in study.rows}
    series = {
        labels[name]: [share["kept"] for share in shares.values()]
        for name, shares in study.by_source.items()
    }
    return _kept_bars(study, list(next(iter(study.by_source.values()))), series, path)


def kind_bars(study: "SelectionStudy", path: str | Path) -> Path:
    """The kept share of every kind of stretch, compared by token and by stretch."""
    groups = [f"{kind}\n{share.tokens:.0%} of the tokens" for kind, share in study.by_kind.items()]
    series = {
        "compared by token": [share.by_token for share in study.by_kind.values()],
        "compared by whole stretches": [share.by_stretch for share in study.by_kind.values()],
    }
    return _kept_bars(study, groups, series, path)


def _kept_bars(
    study: "SelectionStudy", groups: list[str], series: dict[str, list[float]], path: str | Path
) -> Path:
    """A group of bars for each of `groups`, a bar for each of `series`."""
    matplotlib, figure, axes = new_figure(1.8 + 1.2 * max(len(groups), 2), 3.6)
    width = 0.84 / len(series)
    for at, (label, shares) in enumerate(series.items()):
        places = [place + (at - (len(series) - 1) / 2) * width for place in range(len(groups))]
        values = [100 * share for share in shares]
        bars = axes.bar(places, values, 0.9 * width, color=COLOURS[at], label=label)
        axes.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=7, color=INK)
    axes.set_xticks(range(len(groups)), groups, color=INK)
    axes.margins(y=0.22)  # room for the legend
    axes.set_ylabel("kept tokens, %", color=SOFT)
    axes.set_title(f"{study.student} × {study.teacher}", loc="left", fontsize=11, color=INK)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return save_figure(matplotlib, figure, path)


def label_areas(labels: "LabelStudy", path: str | Path) -> Path:
    """How well each measure tells the labels apart, with its interval, by part of the text."""
    height = 1.0 + 0.3 * sum(map(len, labels.areas.values()))
    matplotlib, figure, axes = new_figure(7.0, height)
    names: list[str] = []
    for part, areas in labels.areas.items():
        for colour, (measure, area) in zip(COLOURS, areas.items(), strict=False):
            row = len(names)
            axes.plot([area.low, area.high], [row, row], color=colour, linewidth=2)
            axes.plot(area.value, row, "o", color=colour, markersize=5)
            if area.within is not None:
                axes.plot(area.within, row, "o", color=colour, markersize=5, fillstyle="none")
            names.append(f"{part}: {measure}")
    axes.axvline(0.5, color=SOFT, linewidth=1)
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.invert_yaxis()
    grouped = any(a.within is not None for areas in labels.areas.values() for a in areas.values())
    axes.set_xlabel(
        f"how often a document with {labels.label}: false has the higher mean (0.5: a coin)"
        + ("\nfilled: all pairs, with 95 % interval; open: pairs of one group" if grouped else "")
    )
    return save_figure(matplotlib, figure, path)
