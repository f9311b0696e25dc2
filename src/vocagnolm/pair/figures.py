"""Figures of a pair: overlap, tokenisations. Needs the extra `plots`."""

from collections.abc import Sequence
from pathlib import Path

from vocagnolm.alignment import TextTokenizer
from vocagnolm.plots import COLOURS, INK, LINE, SOFT, new_figure, save_figure


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
