"""Commands that read a corpus take it in the same words and count what they leave out."""

import json

import made
import pytest
from typer.testing import CliRunner

from vocagnolm.cli import app


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    student = made.save("sentencepiece prepend", folder / "student")
    teacher = made.save("byte-level NFC", folder / "teacher")
    return ["--student", str(student), "--teacher", str(teacher)]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    path.write_text('{"text": "two and two"}\n{broken\n{"text": ""}\n')
    return str(path)


def call(*arguments):
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("command", [["compare"], ["study", "granularity"]])
def test_lines_left_out_are_counted(command, pair, broken):
    told = call(*command, *pair, "--corpus", broken)
    assert "left out 2 documents: 1 not JSON, 1 empty" in told and "c.jsonl:2: not JSON" in told
    values = json.loads(call(*command, *pair, "--corpus", broken, "--json"))
    left_out = values.get("left_out") or values["corpus"]["left_out"]
    assert left_out["documents"] == 2 and left_out["reasons"] == {"not JSON": 1, "empty": 1}


def test_compare_reads_hub_datasets_and_several_files(pair, broken, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["from the hub", "and more"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    corpora = ["--corpus", "someone/corpus", "--corpus", broken]
    assert json.loads(call("compare", *pair, *corpora, "--json"))["corpus"]["documents"] == 3


def test_compare_splits_a_text_file(pair, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\nand more\n")
    for split, documents in (("none", 1), ("blank_line", 2), ("line", 3)):
        told = call("compare", *pair, "--corpus", str(path), "--split", split, "--json")
        assert json.loads(told)["corpus"]["documents"] == documents
