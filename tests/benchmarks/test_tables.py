"""The tables of the benchmarks' pages and the results that are kept say the same."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs/benchmarks.md", ROOT / "research/benchmarks.md")
KEPT = sorted((ROOT / "research/results/benchmarks").glob("*.json"))
NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
Rows = list[list[str]]


def page_tables(text: str) -> list[Rows]:
    """Every Markdown table below its heading: rows of cells."""
    tables = re.findall(r"^\|(?: *:?-+:? *\|)+\n((?:\|.*(?:\n|$))+)", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in tables
    ]


def numbers(rows: Rows) -> str:
    """The numbers of each row. In a first cell that is a name, they are part of the name."""
    found = []
    for name, *cells in rows:
        measured = cells if re.search(r"[A-Za-z]", name) else [name, *cells]
        found.append([NUMBER.findall(cell) for cell in measured])
    return json.dumps(found)


def test_pages_and_kept_results_hold_the_same_numbers():
    shown = [table for page in PAGES for table in page_tables(page.read_text(encoding="utf-8"))]
    kept = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in KEPT}
    tables = [table["rows"] for one in kept.values() for table in one["tables"]]
    assert len(shown) > 30
    on_pages, in_files = Counter(map(numbers, shown)), Counter(map(numbers, tables))
    assert not on_pages - in_files, f"on a page and in no file: {on_pages - in_files}"
    assert not in_files - on_pages, f"in a file and on no page: {in_files - on_pages}"


def test_what_is_kept_says_where_it_comes_from():
    for file in KEPT:
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        assert list(kept) == ["source", "script", "command", "date", "machine", "tables"], file
        assert kept["source"] in ("page", "script") and kept["machine"], file
        if kept["script"] is not None:
            assert (ROOT / kept["script"]).is_file() and kept["script"] in kept["command"], file


def test_a_benchmark_keeps_its_tables(tmp_path, monkeypatch, capsys):
    target = tmp_path / "kept.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py", "--json", str(target)])
    record.keep(str(target), "first", [{"way": "a", "ms": 1.25}, {"way": "b", "peak": 1234.5}])
    record.keep(str(target), "second", [{"n": 3}])
    record.keep(None, "not asked for", [{"n": 4}])
    kept = json.loads(target.read_text())
    assert (kept["source"], kept["script"]) == ("script", "benchmarks/some.py")
    assert kept["command"] == f"python benchmarks/some.py --json {target}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"]) and "cores" in kept["machine"]
    assert [table["title"] for table in kept["tables"]] == ["first", "second"]
    assert kept["tables"][0]["columns"] == ["way", "ms", "peak"]
    assert kept["tables"][0]["rows"] == [["a", "1.25", ""], ["b", "", "1234"]]
    record.keep(record.STDOUT, "printed", [{"n": 5}])
    assert json.loads(capsys.readouterr().out) == {"title": "printed", "rows": [{"n": 5}]}
