"""Static figures for papers (PNG, SVG or PDF, by the file's ending). Needs the extra `plots`."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.alignment import TextTokenizer
from vocagnolm.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from vocagnolm.study.compare_selections import SelectionStudy
    from vocagnolm.study.granularity import GranularityStudy

# Okabe and Ito's colours: told apart by everyone, and by their grey value in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, SOFT, LINE = "#23252a", "#5d6066", "#d9d5ca"
FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> tuple[Any, Any, Any]:
    """(pyplot-free) matplotlib Figure with one Axes: no global state, no display."""
    matplotlib, figure, (axes,) = new_panels(width, height, 1)
    return matplotlib, figure, axes


def new_panels(width: float, height: float, count: int) -> tuple[Any, Any, list[Any]]:
    """The same with several Axes side by side, over one y axis."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plots", "drawing a figure") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LINE)
        axes.tick_params(colors=SOFT, length=0)
        axes.set_axisbelow(True)
    return matplotlib, figure, panels


def save_figure(matplotlib: Any, figure: Any, path: str | Path) -> Path:
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise UsageError(
            f"{target} ends in {target.suffix or 'nothing'!r}; expected one of {', '.join(FORMATS)}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # text stays text in an SVG, and the same data give the same bytes
    settings = {"svg.fonttype": "none", "svg.hashsalt": "vocagnolm"}
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(target.suffix.lower())
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # an emoji in a token
        figure.savefig(target, dpi=200, metadata=metadata)
    return target


def overlap_bars(
    student: TextTokenizer, teachers: Sequence[TextTokenizer], path: str | Path
) -> Path:
    """Figure 1: the share of each teacher's vocabulary that the student has too, by raw strings
    (the paper's definition) and by bytes."""
    from vocagnolm.alignment import vocabulary_overlap

    title = f"Vocabulary shared with {student.name} ({student.vocabulary_size:,} tokens)"
    room_for_title = 1.0 + 0.085 * len(title)
    matplotlib, figure, axes = new_figure(max(1.6 + 1.15 * len(teachers), room_for_title), 3.4)
    overlaps = [vocabulary_overlap(student, teacher) for teacher in teachers]
    for at, (label, values) in enumerate(
        [
            ("equal strings", [overlap.raw for overlap in overlaps]),
            ("equal bytes", [overlap.bytes for overlap in overlaps]),
        ]
    ):
        places = [place + (at - 0.5) * 0.38 for place in range(len(teachers))]
        bars = axes.bar(places, [100 * v for v in values], 0.34, color=COLOURS[at], label=label)
        axes.bar_label(bars, [_percent(v) for v in values], padding=2, fontsize=8, color=INK)
    axes.set_xticks(
        range(len(teachers)), [f"{t.name}\n{t.vocabulary_size:,}" for t in teachers], color=INK
    )
    axes.set_ylim(0, 112)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_ylabel("shared with the student, %", color=SOFT)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return save_figure(matplotlib, figure, path)


def _percent(share: float) -> str:
    # 99.95 % must not read as 100
    return f"{share:.2%}" if 0.99 < share < 1 else f"{share:.1%}"


def tokenisation_rows(tokenizers: Sequence[TextTokenizer], text: str, path: str | Path) -> Path:
    """Figure 2: one text as the rows of several tokenizers, all over one axis of its bytes."""
    encoded = text.encode()
    width = min(max(3.0 + 0.14 * len(encoded), 5.0), 24.0)
    matplotlib, figure, axes = new_figure(width, 0.8 + 0.55 * len(tokenizers))
    for row, tokenizer in enumerate(tokenizers):
        one = tokenizer.spans(text)
        for at, (start, end) in enumerate(one.spans.tolist()):
            if start == end:
                continue
            axes.add_patch(
                matplotlib.patches.FancyBboxPatch(
                    (start + 0.06, -row - 0.32),
                    max(end - start - 0.12, 0.1),
                    0.64,
                    boxstyle="round,pad=0,rounding_size=0.12",
                    facecolor=("#e3eff8", "#fdeeda")[at % 2],
                    edgecolor=LINE,
                    linewidth=0.7,
                )
            )
            axes.text(
                (start + end) / 2,
                -row,
                _printable(encoded[start:end]),
                ha="center",
                va="center",
                family="monospace",
                fontsize=9,
                color=INK,
                parse_math=False,
            )
        name = f"{tokenizer.name}  ({len(one)})"
        axes.text(-0.6, -row, name, ha="right", va="center", fontsize=9, color=SOFT)
    axes.set_xlim(0, max(len(encoded), 1))
    axes.set_ylim(-len(tokenizers) + 0.4, 0.6)
    axes.set_axis_off()
    return save_figure(matplotlib, figure, path)


def _printable(token: bytes) -> str:
    """A token's text for print; bytes that are no character on their own in hexadecimal."""
    try:
        text = token.decode().replace(" ", "␣")
    except UnicodeDecodeError:
        return token.hex().upper()
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


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
    names = list(study.by_source)
    labels = {row.name: row.label for row in study.rows}
    sources = list(study.by_source[names[0]])
    matplotlib, figure, axes = new_figure(1.8 + 1.2 * max(len(sources), 2), 3.6)
    width = 0.84 / len(names)
    for at, name in enumerate(names):
        places = [place + (at - (len(names) - 1) / 2) * width for place in range(len(sources))]
        values = [100 * study.by_source[name][source]["kept"] for source in sources]
        bars = axes.bar(places, values, 0.9 * width, color=COLOURS[at], label=labels[name])
        axes.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=7, color=INK)
    axes.set_xticks(range(len(sources)), sources, color=INK)
    axes.margins(y=0.22)  # room for the legend
    axes.set_ylabel("kept tokens, %", color=SOFT)
    axes.set_title(f"{study.student} × {study.teacher}", loc="left", fontsize=11, color=INK)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return save_figure(matplotlib, figure, path)


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
