"""Texts of more than a megabyte are several documents, everywhere the same ones."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_kit import documents, recipe_dict, save_tokenizer, write_store
from typer.testing import CliRunner

from vocagnolm import guide
from vocagnolm.cli import app
from vocagnolm.data import corpus as module
from vocagnolm.data import packing, sources
from vocagnolm.data.corpus import open_corpus, split_text
from vocagnolm.data.packing import _Column
from vocagnolm.data.prepare import prepare
from vocagnolm.data.prompts import open_prompts
from vocagnolm.errors import CorpusError, EvaluationError, WriteError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.store import LossStore

LIMIT = 1000
LONG = "".join(documents(12))
LINE = "word " * 500


@pytest.fixture(autouse=True, scope="module")
def small():
    """What counts as long is shorter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONGEST_TEXT", LIMIT)
        patch.setattr(sources, "LONGEST_TEXT", LIMIT)
        yield


@given(
    st.lists(
        st.sampled_from(["a line\n", "word ", "é", "東京", "👩\u200d👧", "x" * 400, "\r\n", LINE])
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
        max_size=120,
    )
)
def test_pieces_join_to_the_text_and_end_with_lines_where_there_are_some(parts):
    text = "".join(parts)
    pieces = split_text(text)
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode()) <= LIMIT for piece in pieces) or pieces == [text] == [""]
    for piece, behind in pairwise(pieces):
        if "\n" in piece:
            assert piece.endswith("\n")
        elif " " in piece[1:]:
            assert behind.startswith(" ")
    assert len(text.encode()) > LIMIT or pieces == [text]


ROWS = ["short", LONG, "", LINE, "also short", LONG + "more"]


def write_as(kind: str, folder: Path) -> tuple[str, dict]:
    """The rows in a file of a kind, each with the number of its row in another field."""
    rows = [{"text": text, "row": str(n)} for n, text in enumerate(ROWS)]
    path = folder / f"corpus.{kind}"
    if kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    elif kind == "txt":  # paragraphs: a blank line is none
        texts = [text.replace("\n", "\r").rstrip("\r") for text in ROWS if text]
        path.write_bytes("\n\n".join(texts).encode())
        return str(path), {"split": "blank_line"}
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    return str(path), {}


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt"])
def test_documents_are_numbered_with_the_pieces_of_long_texts(kind, tmp_path):
    path, options = write_as(kind, tmp_path)
    texts = (
        [text.replace("\n", "\r").rstrip("\r") for text in ROWS if text] if kind == "txt" else ROWS
    )
    corpus = open_corpus([path, path], **options)
    pieces = [(n, piece) for n, text in enumerate(texts * 2) for piece in split_text(text)]
    assert len(corpus) == len(pieces) > 2 * len(texts) and corpus.split_texts == 6
    read = list(corpus)
    assert [document.index for document in read] == list(range(len(pieces)))
    assert [(d.record, d.text or "") for d in read] == pieces
    for start, stop in ((0, 3), (2, 3), (4, 9), (7, len(corpus)), (5, 5), (3, 10**6)):
        assert list(corpus.read(start, stop)) == read[start:stop]
    assert [corpus.record_of(n) for n in range(len(corpus))] == [n for n, _ in pieces]
    places = {document.place for document in read if document.record < len(texts)}
    assert any(place.endswith("part 2 of 3") for place in places), places
    if kind != "txt":
        rows = open_corpus([path, path], text_field="row")
        assert len(rows) == 2 * len(ROWS) and rows.field(corpus.record_of(6)) == "3"
    about = corpus.describe()
    assert about["split_texts"] == 6 and about["documents"] == len(pieces)
    assert sum(source["documents"] for source in about["sources"]) == len(pieces)
    assert [d.text for d in open_corpus(path, limit=3, **options)] == [d.text for d in read[:3]]


def test_a_text_file_conversations_and_prompts(tmp_path):
    (tmp_path / "book.txt").write_text(LONG)
    book = open_corpus(tmp_path / "book.txt")
    assert "".join(document.text or "" for document in book) == LONG
    assert next(iter(book)).place == f"book.txt: part 1 of {len(book)}"
    talk = {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "x"}]}
    (tmp_path / "talk.jsonl").write_text(json.dumps(talk) + "\n")
    talks = open_corpus(tmp_path / "talk.jsonl")
    assert len(talks) == 1 and not talks.split_texts and "split_texts" not in talks.describe()
    prompts = open_prompts(tmp_path / "book.txt")
    assert len(prompts) == 1 and [prompt.problem for prompt in prompts.read()] == [None]


def test_a_file_that_grew_long_while_it_was_read(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "short"}) + "\n")
    corpus = open_corpus(path)
    path.write_text(json.dumps({"text": LONG}) + "\n")
    with pytest.raises(CorpusError, match=r"corpus.jsonl changed while it was being read"):
        list(corpus)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("long")
    save_tokenizer(folder / "student", kind="bytes")
    save_tokenizer(folder / "teacher", kind="pieces")
    path, _ = write_as("jsonl", folder)
    texts = [document.text for document in open_corpus(path) if document.text]
    write_store(folder / "store", texts, folder / "teacher", alternatives=2)
    return folder


def test_blocks_hold_them_as_documents_and_the_command_says_so(lab, tmp_path):
    blocks = {"blocks": str(tmp_path / "blocks")}
    tree = recipe_dict(lab, data=blocks, objective={"method": "distill"})
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    done = CliRunner().invoke(app, ["prepare", str(tmp_path / "recipe.yaml"), "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "3 texts of more than 1 MB were split at line ends into several" in done.stdout
    manifest = prepare(recipe_from_dict(tree))
    corpus = open_corpus(lab / "corpus.jsonl")
    assert manifest["summary"]["documents"] == len(corpus) - 1  # the empty one
    assert manifest["summary"]["missing_documents"] == 0
    assert manifest["summary"]["mapped_share"] > 0.95
    assert manifest["inputs"]["corpus"]["split_texts"] == 3


def test_rows_of_a_dataset_are_guided_by_their_pieces(lab):
    """A row is not split; what the store holds of its pieces is laid end to end."""
    row = guide([{"text": LONG}], lab / "store", lab / "student")[0]
    store = LossStore.open(lab / "store")
    held = [store[store.find(module.document_hash(piece))] for piece in split_text(LONG)]
    assert len(held) > 2
    guidance = np.array(row["guidance"])
    assert np.isfinite(guidance).mean() > 0.95 and np.array(row["target_p"]).any()
    known = np.concatenate([nll for _, nll in held]).astype(np.float16)
    assert np.isin(guidance[np.isfinite(guidance)].astype(np.float16), known).all()


def test_parts_that_count_are_not_named_in_long_texts(lab):
    from vocagnolm.alignment import load_tokenizer
    from vocagnolm.evaluate.bits import _counting

    corpus = open_corpus(lab / "corpus.jsonl")
    (long,) = corpus.read(1, 2)
    tokens = load_tokenizer(str(lab / "student")).spans(long.text)
    with pytest.raises(EvaluationError, match="part 1 of 3: parts that count cannot be named"):
        _counting(tokens, long, corpus)


# ---- long columns of blocks ----


def test_long_columns_wait_on_the_disk(lab, tmp_path, monkeypatch):
    def blocks(name: str) -> dict:
        tree = recipe_dict(lab, data={"blocks": str(tmp_path / name)})
        return {part["name"]: part["sha256"] for part in prepare(recipe_from_dict(tree))["parts"]}

    expected = blocks("memory")
    monkeypatch.setattr(_Column, "MOST_BYTES", 1000)
    assert blocks("disk") == expected

    def refuse(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "TemporaryFile", refuse)
    with pytest.raises(WriteError, match=r"No space left on device.*run the same command again"):
        blocks("full")
