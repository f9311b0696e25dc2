"""Two teachers' bits per byte, document by document."""

from pathlib import Path
from typing import Any

from vocagnolm.plots import COLOURS, INK, LINE, new_panels, save_figure


def document_scatter(found: dict[str, Any], path: str | Path) -> Path:
    """One panel for every store against the first (`data.teachers.compare_stores`)."""
    stores = found["stores"]
    matplotlib, figure, panels = new_panels(4.2 * (len(stores) - 1), 4.0, len(stores) - 1)
    rows = found["document_bits_per_byte"]
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
