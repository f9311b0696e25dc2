"""Keeps what a benchmark measured: its tables as printed and as measured, with date, machine and
command, in the file that `--json` names, by default out/benchmarks/SCRIPT.json.

The tables of docs/benchmarks.md are kept in research/results/benchmarks/, in the same form; a test
compares the two. `source` is `script` for what a benchmark wrote, and `page` for older tables,
copied from the page, whose raw output was not kept.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STDOUT = "-"
_kept: dict[str, list[dict[str, Any]]] = {}
_rounds: list[dict[str, list[float]]] = []


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        default=f"out/benchmarks/{Path(sys.argv[0]).stem}.json",
        metavar="FILE",
        help="where the raw output is kept (default: %(default)s); without FILE, rows go to stdout "
        "and tables to stderr",
    )


def note_rounds(milliseconds: Mapping[str, Sequence[float]]) -> None:
    """Single rounds whose median a table will have; kept with the next table."""
    _rounds.append({name: list(values) for name, values in milliseconds.items()})


def keep(target: str, title: str, rows: list[dict[str, Any]]) -> None:
    """Add a table to the file that `--json` names, or print its rows where it names none."""
    if target == STDOUT:
        print(json.dumps({"title": title, "rows": rows}), flush=True)
        return
    columns, cells = table_of(rows)
    table = {"title": title, "columns": columns, "rows": cells, "raw": rows}
    if _rounds:
        table["rounds_ms"] = [*_rounds]
        _rounds.clear()
    tables = _kept.setdefault(target, [])
    tables.append(table)
    script = Path(sys.argv[0])
    content = {
        "source": "script",
        "script": f"benchmarks/{script.name}",
        "command": shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "tables": tables,
    }
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The columns, in the order in which rows name them, and the cells as they are printed."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[_cell(row.get(column)) for column in columns] for row in rows]


def machine() -> str:
    about = f"{platform.machine()}, {os.cpu_count()} cores"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        about += f", {torch.cuda.get_device_name()}"
    return about + (f", torch {torch.__version__}" if torch is not None else "")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return (
            f"{value:.1e}"
            if 0 < abs(value) < 1e-2
            else f"{value:.3g}"
            if value < 100
            else f"{value:.0f}"
        )
    return str(value)
