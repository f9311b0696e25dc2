"""What static figures share (PNG, SVG or PDF, by the file's ending). Needs the extra `plots`."""

import warnings
from pathlib import Path
from typing import Any

from vocagnolm.base.files import local_path
from vocagnolm.errors import UsageError, optional

# Okabe and Ito's colours: distinct for everyone, and by their grey value in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, SOFT, LINE = "#23252a", "#5d6066", "#d9d5ca"
FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> tuple[Any, Any, Any]:
    """(pyplot-free) matplotlib Figure with one Axes: no global state, no display."""
    matplotlib, figure, (axes,) = new_panels(width, height, 1)
    return matplotlib, figure, axes


def new_panels(width: float, height: float, count: int) -> tuple[Any, Any, list[Any]]:
    """A figure with several Axes side by side that share their y axis."""
    matplotlib = optional("matplotlib", "plots", "drawing a figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
    target = local_path(path)
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


# ---- two teachers, document by document ----


def document_scatter(comparison: dict[str, Any], path: str | Path) -> Path:
    """Bits per byte of every document: one panel for each store against the first
    (`data.teachers.compare_stores`)."""
    stores = comparison["stores"]
    matplotlib, figure, panels = new_panels(4.2 * (len(stores) - 1), 4.0, len(stores) - 1)
    rows = comparison["document_bits_per_byte"]
    longest = max(value for row in rows for value in row if value != float("inf"))
    for number, axes in enumerate(panels, 1):
        axes.plot([0, longest], [0, longest], color=LINE, linewidth=1)
        axes.scatter(
            [row[number] for row in rows],
            [row[0] for row in rows],
            s=8,
            alpha=0.5,
            color=COLOURS[(number - 1) % len(COLOURS)],
            linewidths=0,
        )
        axes.set_xlabel(f"{stores[number]['teacher']}, bits per byte", color=INK)
    panels[0].set_ylabel(f"{stores[0]['teacher']}, bits per byte", color=INK)
    return save_figure(matplotlib, figure, path)
