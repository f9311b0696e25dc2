"""The paper's Figure 5: what students gain against their teachers' strength. Needs `plots`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vocagnolm.plots import COLOURS, INK, LINE, SOFT, new_figure, save_figure


@dataclass(frozen=True, kw_only=True)
class TeacherPoint:
    """A row of Figure 5: the strength of its teacher, and what the students gained."""

    name: str
    bits_per_byte: float
    """Of the teacher, on the corpus."""
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
    a 95 % interval, and every seed as a dot. Stronger teachers stand on the right; rows of one
    teacher stand side by side."""
    matplotlib, figure, axes = new_figure(6.4, 4.4)
    labels = []
    for at, (point, place) in enumerate(zip(points, _side_by_side(points), strict=True)):
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
    if student_bits_per_byte is not None:
        axes.axvline(student_bits_per_byte, color=SOFT, linestyle=":", linewidth=1, zorder=1)
        _note(axes, "the student itself", (student_bits_per_byte, 0), ("data", "axes fraction"))
    axes.margins(x=0.3, y=0.14)
    axes.invert_xaxis()
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_xlabel(
        "teacher's bits per byte on the corpus (stronger \N{RIGHTWARDS ARROW})", color=SOFT
    )
    axes.set_ylabel("gain in accuracy, points\n(mean, 95 % interval, seeds)", color=SOFT)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    _label_points(figure, axes, labels)
    return save_figure(matplotlib, figure, path)


def _side_by_side(points: Sequence[TeacherPoint]) -> list[float]:
    """Where to draw the points: at their bits per byte, but a step apart where these are equal."""
    bits = [point.bits_per_byte for point in points]
    step = 0.03 * ((max(bits) - min(bits)) or max(bits)) if bits else 0.0
    return [
        own + step * (bits[:at].count(own) - (bits.count(own) - 1) / 2)
        for at, own in enumerate(bits)
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
