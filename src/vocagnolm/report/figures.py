"""Static figures for papers (PNG, SVG or PDF, by the file's ending). Needs the extra `plots`."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.align import TextTokenizer
from vocagnolm.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from vocagnolm.study.granularity import GranularityStudy

# Okabe and Ito's colours: told apart by everyone, and by their grey value in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, SOFT, LINE = "#23252a", "#5d6066", "#d9d5ca"
FORMATS = (".png", ".svg", ".pdf")


def _figure(width: float, height: float) -> tuple[Any, Any, Any]:
    """(pyplot-free) matplotlib Figure with one Axes: no global state, no display."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plots", "drawing a figure") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(colors=SOFT, length=0)
    axes.set_axisbelow(True)
    return matplotlib, figure, axes


def _save(matplotlib: Any, figure: Any, path: str | Path) -> Path:
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
    from vocagnolm.align import vocabulary_overlap

    matplotlib, figure, axes = _figure(1.6 + 1.15 * max(len(teachers), 2), 3.4)
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
    axes.set_title(
        f"Vocabulary shared with {student.name} ({student.vocabulary_size:,} tokens)",
        loc="left",
        fontsize=11,
        color=INK,
    )
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return _save(matplotlib, figure, path)


def _percent(share: float) -> str:
    # 99.95 % must not read as 100
    return f"{share:.2%}" if 0.99 < share < 1 else f"{share:.1%}"


def tokenisation_rows(tokenizers: Sequence[TextTokenizer], text: str, path: str | Path) -> Path:
    """Figure 2: one text as the rows of several tokenizers, all over one axis of its bytes."""
    encoded = text.encode()
    width = min(max(3.0 + 0.14 * len(encoded), 5.0), 24.0)
    matplotlib, figure, axes = _figure(width, 0.8 + 0.55 * len(tokenizers))
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
    return _save(matplotlib, figure, path)


def _printable(token: bytes) -> str:
    """A token's text for print; bytes that are no character on their own in hexadecimal."""
    try:
        text = token.decode().replace(" ", "␣")
    except UnicodeDecodeError:
        return token.hex().upper()
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def granularity_curve(study: "GranularityStudy", path: str | Path) -> Path:
    """Figure 3: IoU and IoS of chunk alignment against the number of chunks."""
    matplotlib, figure, axes = _figure(5.4, 3.5)
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
    return _save(matplotlib, figure, path)


@dataclass(frozen=True, kw_only=True)
class TeacherPoint:
    """One teacher of Figure 5: its own score, and the scores of the students it guided."""

    name: str
    teacher_score: float
    student_scores: Sequence[float]
    """One for every seed."""


def teacher_strength(
    points: Sequence[TeacherPoint],
    path: str | Path,
    *,
    baseline: Sequence[float] = (),
    baseline_name: str = "cpt",
    score_name: str = "average score",
) -> Path:
    """Figure 5: what a student gains against its teacher's own strength, every seed a dot."""
    matplotlib, figure, axes = _figure(5.4, 3.7)
    ordered = sorted(points, key=lambda point: point.teacher_score)
    means = [sum(p.student_scores) / len(p.student_scores) for p in ordered]
    axes.plot([p.teacher_score for p in ordered], means, "-", color=LINE, zorder=1)
    for at, (point, mean) in enumerate(zip(ordered, means, strict=True)):
        colour = COLOURS[at % len(COLOURS)]
        places = [point.teacher_score] * len(point.student_scores)
        axes.scatter(places, point.student_scores, s=22, color=colour, alpha=0.6, linewidths=0)
        axes.scatter([point.teacher_score], [mean], s=70, marker="_", color=INK, zorder=3)
        axes.annotate(
            point.name,
            (point.teacher_score, max(point.student_scores)),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=INK,
        )
    if baseline:
        level = sum(baseline) / len(baseline)
        axes.axhline(level, color=SOFT, linestyle="--", linewidth=1)
        if len(baseline) > 1:
            axes.axhspan(min(baseline), max(baseline), color=SOFT, alpha=0.12, linewidth=0)
        axes.annotate(
            f"{baseline_name} (no teacher)",
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=SOFT,
        )
    axes.margins(x=0.14, y=0.2)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_xlabel(f"teacher's own {score_name}", color=SOFT)
    axes.set_ylabel(f"student's {score_name}", color=SOFT)
    return _save(matplotlib, figure, path)
