"""Documents keep their number and place, whatever holds them and whatever is wrong with them."""

import gzip
import hashlib
import json
import os
import pickle
import shlex
import sys

import pytest

from vocagnolm.data.corpus import document_hash, open_corpus, read_texts
from vocagnolm.errors import CorpusError, MissingExtraError, optional

TEXTS = [f"document {i} " + "wörd " * (i % 7) for i in range(700)]


def write_jsonl(path, texts=TEXTS, field="text"):
    path.write_text("".join(json.dumps({"title": "t", field: t}) + "\n" for t in texts))
    return path


def texts_of(corpus, *place):
    return [d.text for d in corpus.read(*place)]


def jsonl_gz(folder):
    source = write_jsonl(folder / "x.jsonl").read_bytes()
    (folder / "x.jsonl").unlink()
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(source))
    return path


def jsonl_zst(folder):
    zstandard = pytest.importorskip("zstandard")
    source = write_jsonl(folder / "x.jsonl").read_bytes()
    (folder / "x.jsonl").unlink()
    path = folder / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(source))
    return path


def parquet(folder):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"text": TEXTS, "n": range(700)}), folder / "a.parquet", row_group_size=111
    )
    return folder / "a.parquet"


def folder_of_files(folder):
    inner = folder / "b"
    inner.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS[:300])
    write_jsonl(inner / "c.ndjson", TEXTS[300:699])
    (folder / "z.txt").write_text(TEXTS[699])
    (folder / "notes.pdf").write_bytes(b"not read")
    return folder


MAKERS = {
    "jsonl": lambda folder: write_jsonl(folder / "a.jsonl"),
    "gz": jsonl_gz,
    "zst": jsonl_zst,
    "parquet": parquet,
    "folder": folder_of_files,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_gives_the_same_documents(kind, tmp_path):
    corpus = open_corpus(MAKERS[kind](tmp_path))
    assert len(corpus) == 700
    assert texts_of(corpus) == TEXTS
    assert [d.index for d in corpus] == list(range(700))
    # any range, in any order: forward, backward, across files and seek marks
    for start, stop in [(0, 3), (250, 260), (256, 257), (690, 900), (5, 600), (600, 601), (0, 0)]:
        assert texts_of(corpus, start, stop) == TEXTS[start:stop]


def test_a_limit_cuts_the_corpus_and_changes_its_fingerprint(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    whole, part = open_corpus(path), open_corpus(path, limit=10)
    assert texts_of(part) == TEXTS[:10]
    assert whole.fingerprint != part.fingerprint


def test_several_corpora_follow_each_other(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", TEXTS[:2])
    b = write_jsonl(tmp_path / "b.jsonl", TEXTS[2:5])
    corpus = open_corpus([a, b])
    assert texts_of(corpus) == TEXTS[:5]
    assert [d.place for d in corpus] == [
        "a.jsonl:1",
        "a.jsonl:2",
        "b.jsonl:1",
        "b.jsonl:2",
        "b.jsonl:3",
    ]


def test_the_fingerprint_is_the_content(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first = open_corpus(write_jsonl(one / "a.jsonl")).fingerprint
    assert open_corpus(write_jsonl(two / "moved.jsonl")).fingerprint == first
    assert open_corpus(jsonl_gz(two)).fingerprint == first
    changed = [*TEXTS[:-1], TEXTS[-1] + "!"]
    assert open_corpus(write_jsonl(one / "a.jsonl", changed)).fingerprint != first


def test_broken_documents_keep_their_number_and_say_what_and_where(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "fine"}\n'
        b"\n"
        b"not json\n"
        b'{"text": ""}\n'
        b'{"text": "lone \\ud800"}\n'
        b'{"other": 1}\n'
        b'{"text": 7}\n'
        b'{"text": "\xff"}\n'
        b'{"text": "' + b"x" * 60 + b'"}\n'
        b"[1]\n"
        b'{"text": "last, without a newline"}'
    )
    corpus = open_corpus(path, max_document_bytes=50)
    found = [(d.index, d.place, (d.problem or "").split(":")[0]) for d in corpus]
    assert found == [
        (0, "a.jsonl:1", ""),
        (1, "a.jsonl:3", "not JSON"),
        (2, "a.jsonl:4", "empty"),
        (3, "a.jsonl:5", "lone surrogate"),
        (4, "a.jsonl:6", "no field 'text'"),
        (5, "a.jsonl:7", "field 'text' holds int, not text"),
        (6, "a.jsonl:8", "not UTF-8"),
        (7, "a.jsonl:9", "huge"),
        (8, "a.jsonl:10", "not JSON"),
        (9, "a.jsonl:11", ""),
    ]
    assert all((d.text is None) == (d.problem is not None) for d in corpus)


def test_text_is_read_as_it_is(tmp_path):
    text = "a\r\nb\u2028c\x00\ufeffd 👩‍👧"
    (tmp_path / "a.txt").write_bytes(text.encode())
    write_jsonl(tmp_path / "b.jsonl", [text])
    assert texts_of(open_corpus(tmp_path)) == [text, text]
    assert document_hash(text) == hashlib.sha256(text.encode()).digest()[:16]


def test_a_wrong_text_field_is_told_with_the_right_one(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", field="texts")
    with pytest.raises(CorpusError, match=r"a.jsonl:1 .* texts, title.*--text-field texts"):
        open_corpus(path)
    assert len(open_corpus(path, text_field="texts")) == 700


def test_parquet_with_a_wrong_text_field(tmp_path):
    with pytest.raises(CorpusError, match=r"a.parquet\[0\] .* n, text"):
        open_corpus(parquet(tmp_path), text_field="body")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"x", "unknown ending"),
        ("a.jsonl", b"", "no documents"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9000)[:-40], "to its end"),
        ("a.parquet", b"PAR1", "cannot be read as parquet"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        open_corpus(tmp_path / name)


def test_a_missing_file_and_an_empty_folder(tmp_path):
    with pytest.raises(CorpusError, match="does not exist"):
        open_corpus(tmp_path / "nowhere.jsonl")
    with pytest.raises(CorpusError, match="no file that can be read"):
        open_corpus(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    corpus = open_corpus(path)
    corpus.require_unchanged()
    path.write_text(path.read_text() + '{"text": "more"}\n')
    with pytest.raises(CorpusError, match="changed while"):
        corpus.require_unchanged()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_an_edit_that_keeps_size_and_time_is_noticed_and_new_rights_are_none(tmp_path, name):
    path = tmp_path / name
    opened = gzip.open if name.endswith(".gz") else open
    for digit in "12":
        with opened(path, "wt") as file:
            file.write(f'{{"text": "one {digit}"}}\n')
        if digit == "1":
            corpus, before = open_corpus(path), path.stat()
            path.chmod(0o600)
            corpus.require_unchanged()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    with pytest.raises(CorpusError, match="changed while"):
        corpus.require_unchanged()


def test_a_dataset_of_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"body": TEXTS[:20], "n": range(20)})
    asked = []

    def load(name, split):
        asked.append((name, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    corpus = open_corpus("someone/corpus:test", text_field="body")
    assert asked == [("someone/corpus", "test")]
    assert texts_of(corpus) == TEXTS[:20]
    assert next(corpus.read(3)).place == "someone/corpus:test[3]"


@pytest.mark.parametrize(
    ("package", "make"),
    [("pyarrow", parquet), ("zstandard", jsonl_zst), ("datasets", lambda _: "someone/corpus")],
)
def test_a_missing_extra_is_named(package, make, tmp_path, monkeypatch):
    path = make(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"vocagnolm\[data\]"):
        open_corpus(path)


def test_zstandard_frames_are_all_read_and_a_cut_is_noticed(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": t}).encode() + b"\n" for t in TEXTS]
    frames = zstandard.compress(b"".join(lines[:99])) + zstandard.compress(b"".join(lines[99:]))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frames)
    assert texts_of(open_corpus(path)) == TEXTS
    path.write_bytes(frames[:-20])
    with pytest.raises(CorpusError, match="cut short"):
        open_corpus(path)


TEXT = "\n  First line.\r\nIts second.\n\n \t\n\nAlone\n\nLast é, no break"


@pytest.mark.parametrize(
    ("split", "texts", "places"),
    [
        ("none", [TEXT], ["a.txt"]),
        (
            "blank_line",
            ["  First line.\r\nIts second.", "Alone", "Last é, no break"],
            ["a.txt:2", "a.txt:7", "a.txt:9"],
        ),
        (
            "line",
            ["  First line.", "Its second.", "Alone", "Last é, no break"],
            ["a.txt:2", "a.txt:3", "a.txt:7", "a.txt:9"],
        ),
    ],
)
def test_a_text_file_is_one_document_or_is_split(split, texts, places, tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    corpus = open_corpus(tmp_path / "a.txt", split=split)
    assert texts_of(corpus) == texts and len(corpus) == len(texts)
    assert [d.place for d in corpus] == places
    assert texts_of(corpus, len(texts) - 1) == texts[-1:]


def test_a_split_belongs_to_the_corpus_only_where_it_is_used(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    plain, split = open_corpus(path), open_corpus(path, split="line")
    assert len(plain) == len(split) == 1 and plain.fingerprint != split.fingerprint
    assert "split" not in plain.describe() and split.describe()["split"] == "line"
    parts = ("text", "1", hashlib.sha256(b"one\n").hexdigest())
    before = hashlib.sha256(b"".join(part.encode() + b"\0" for part in parts)).hexdigest()
    assert plain.fingerprint == before  # as in stores that are there already
    with pytest.raises(CorpusError, match="for text files"):
        open_corpus(write_jsonl(tmp_path / "b.jsonl"), split="line")


def test_what_is_left_out_is_counted_by_reason(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{broken\n{"text": ""}\n{"title": "x"}\n\n{also broken\n')
    texts, left_out = read_texts(path)
    assert texts == ["good"] and left_out.documents == 4
    assert left_out.reasons == {"not JSON": 2, "empty": 1, "no field 'text'": 1}
    assert left_out.lines()[0] == "left out 4 documents: 2 not JSON, 1 empty, 1 no field 'text'"
    assert left_out.first[0]["place"] == "a.jsonl:2"
    path.write_text("{broken\n")
    with pytest.raises(CorpusError, match=r"None of the 1 .*a\.jsonl:1: not JSON"):
        read_texts(path)


def split_text(folder):
    path = folder / "a.txt"
    path.write_text("\n".join(TEXTS))
    return path


@pytest.mark.parametrize("kind", [*MAKERS, "text"])
def test_a_corpus_goes_to_another_process(tmp_path, monkeypatch, kind):
    (MAKERS | {"text": split_text})[kind](tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    split = "line" if kind == "text" else "none"
    corpus = open_corpus(tmp_path.name, split=split)
    half = corpus.read(300)
    assert next(half).index == 300  # in the middle of an open file
    sent = pickle.dumps(corpus)
    monkeypatch.chdir(tmp_path)  # there
    monkeypatch.setattr(hashlib, "sha256", None)  # nothing is counted or hashed again
    monkeypatch.setattr(hashlib, "file_digest", None)
    arrived = pickle.loads(sent)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert len(arrived) == len(corpus) == 700
    assert arrived.describe() == corpus.describe()
    assert not arrived.changed_sources()
    assert list(arrived) == list(pickle.loads(sent).read())
    assert texts_of(arrived, 555, 560) == TEXTS[555:560]
    assert texts_of(arrived, 3, 5) == TEXTS[3:5]
    for source in arrived.sources:
        source.path.write_bytes(source.path.read_bytes() + b"\n")
    assert len(arrived.changed_sources()) == len(arrived.sources)


def test_a_hub_dataset_goes_to_another_process(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS[:20]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    corpus = open_corpus("someone/corpus")
    sent = pickle.dumps(corpus)
    assert len(sent) < 1000  # the rows are loaded there
    arrived = pickle.loads(sent)
    assert texts_of(arrived) == TEXTS[:20] and arrived.describe() == corpus.describe()


def test_a_missing_package_is_told_in_another_process_too():
    error = MissingExtraError("pyarrow", "data", "reading a.parquet")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_package_that_cannot_be_imported_is_not_said_to_be_missing(tmp_path, monkeypatch):
    """As peft 0.17 beside transformers 5, or lm-eval without a package that it needs."""
    (tmp_path / "too_old.py").write_text("from json import gone")
    (tmp_path / "half_there.py").write_text("import it_needs_this")
    monkeypatch.syspath_prepend(tmp_path)
    for name, reason in (("too_old", "cannot import name 'gone'"), ("half_there", "No module")):
        wanted = (
            rf"'{name.replace('_', '-')}', which is installed but cannot be .*{reason}.*--upgrade"
        )
        with pytest.raises(MissingExtraError, match=wanted) as told:
            optional(name, "eval", "Evaluation")
        assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)
    with pytest.raises(MissingExtraError, match=r"'not-there', which is not installed\. Install"):
        optional("not_there.inner", "eval", "Evaluation")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,n\none,1\ntwo,2\n"),
        ("a.tsv", "text\tn\none\t1\ntwo\t2\n"),
        ("a.json", '[{"text": "one"}, {"text": "two"}]'),
    ],
)
def test_a_table_is_refused_with_the_line_that_converts_it(tmp_path, monkeypatch, name, content):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match="unknown ending") as no:
        open_corpus(tmp_path / name)
    _, _, code = shlex.split(str(no.value).partition("converts it: ")[2])
    exec(code)
    texts = [document.text for document in open_corpus(tmp_path / "a.jsonl").read()]
    assert texts == ["one", "two"]
