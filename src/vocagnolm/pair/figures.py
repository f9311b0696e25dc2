"""Figures of a pair: overlap, tokenisations, granularity, kept sources. Needs the extra `plots`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vocagnolm.alignment import TextTokenizer
from vocagnolm.errors import UsageError
from vocagnolm.plots import COLOURS, INK, LINE, SOFT, new_figure, save_figure

if TYPE_CHECKING:
    from vocagnolm.pair.granularity import GranularityStudy
    from vocagnolm.pair.labels import LabelStudy
    from vocagnolm.pair.selections import SelectionStudy


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
