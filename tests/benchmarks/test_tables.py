"""The tables of the benchmarks' pages and the results that are kept say the same; where the raw
output of a script is kept, they follow from it. Tables of source `page` were copied from the page:
for them the first test only sees that the two do not drift apart."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
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


def measured_numbers(rows: Rows) -> list[list[list[str]]]:
    """The numbers of each row, by cell. In a first cell that is a name, they belong to the name."""
    found = []
    for name, *cells in rows:
        measured = cells if re.search(r"[A-Za-z]", name) else [name, *cells]
        found.append([NUMBER.findall(cell) for cell in measured])
    return found


def numbers(rows: Rows) -> str:
    return json.dumps(measured_numbers(rows))


def leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def unfounded(table: dict[str, Any]) -> list[str]:
    """Numbers of a table that no number of its raw output rounds to, as a share or in percent."""
    raw = [scale * value for value in leaves(table["raw"]) for scale in (1, 100, -1, -100)]
    wrong = []
    for number in (n for row in measured_numbers(table["rows"]) for cell in row for n in cell):
        digits, _, exponent = number.replace(",", "").partition("e")
        half = 0.5 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        if not any(abs(float(number.replace(",", "")) - value) <= 1.001 * half for value in raw):
            wrong.append(number)
    return wrong


def test_pages_and_kept_results_hold_the_same_numbers():
    shown = [table for page in PAGES for table in page_tables(page.read_text(encoding="utf-8"))]
    kept = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in KEPT}
    tables = [table["rows"] for content in kept.values() for table in content["tables"]]
    assert len(shown) > 30
    on_pages, in_files = Counter(map(numbers, shown)), Counter(map(numbers, tables))
    assert not on_pages - in_files, f"on a page and in no file: {on_pages - in_files}"
    assert not in_files - on_pages, f"in a file and on no page: {in_files - on_pages}"


def test_numbers_of_a_table_follow_from_the_raw_output():
    raw = [{"way": "a", "tokens/s": 74188.4, "share": 0.0361, "bits": 8.7e-05}]
    table = {"rows": [["**a**", "74,188", "3.6 %", "9e-5"]], "raw": raw}
    assert unfounded(table) == []
    assert unfounded({**table, "rows": [["a", "74,189", "3.7 %", "8e-5"]]}) == [
        "74,189",
        "3.7",
        "8e-5",
    ]
    for file in KEPT:
        for kept in json.loads(file.read_text(encoding="utf-8"))["tables"]:
            assert "raw" not in kept or unfounded(kept) == [], file


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
    kept = json.loads(target.read_text())
    assert (kept["source"], kept["script"]) == ("script", "benchmarks/some.py")
    assert kept["command"] == f"python benchmarks/some.py --json {target}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"]) and "cores" in kept["machine"]
    assert [table["title"] for table in kept["tables"]] == ["first", "second"]
    assert kept["tables"][0]["columns"] == ["way", "ms", "peak"]
    assert kept["tables"][0]["rows"] == [["a", "1.25", ""], ["b", "", "1234"]]
    assert kept["tables"][0]["raw"] == [{"way": "a", "ms": 1.25}, {"way": "b", "peak": 1234.5}]
    # single rounds go with the table that has their median
    record.note_rounds({"a": [1.0, 1.5]})
    record.keep(str(target), "third", [{"way": "a", "ms": 1.25}])
    third = json.loads(target.read_text())["tables"][2]
    assert third["rounds_ms"] == [{"a": [1.0, 1.5]}] and "rounds_ms" not in kept["tables"][0]
    assert unfounded(third) == []
    # a script whose call names no file keeps its output all the same
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py"])
    parser = argparse.ArgumentParser()
    record.add_json(parser)
    record.keep(parser.parse_args([]).json, "kept", [{"n": 4}])
    assert (tmp_path / "out/benchmarks/some.json").is_file()
    record.keep(record.STDOUT, "printed", [{"n": 5}])
    assert json.loads(capsys.readouterr().out) == {"title": "printed", "rows": [{"n": 5}]}
