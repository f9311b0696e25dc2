"""Corpora at an address: copied once, and what a local corpus is."""

import gzip
import http.server
import json
import pickle
import threading

import pytest
from bucket_kit import BUCKET, CuttingProxy
from score.teacher_kit import SETTINGS, ArithmeticTeacher, store_bytes, write_corpus

from vocagnolm.data import sources
from vocagnolm.data.corpus import open_corpus
from vocagnolm.errors import CorpusError, MissingExtraError, UsageError
from vocagnolm.score import score_corpus
from vocagnolm.storage import Bucket
from vocagnolm.storage.bucket import PATIENCE_VARIABLE


@pytest.fixture
def corpus(address, tmp_path):
    """Two files below one address, and the same in a folder."""
    folder = tmp_path / "local"
    (folder / "sub").mkdir(parents=True)
    lines = write_corpus(folder / "a.jsonl", documents=300).read_bytes()
    (folder / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(lines[: len(lines) // 2] + b"\n"))
    place = Bucket(address)
    for path in (folder / "a.jsonl", folder / "sub" / "b.jsonl.gz"):
        place.put(path.relative_to(folder).as_posix(), path.read_bytes())
    place.put("notes.bin", b"no documents")
    return folder


def test_folder_pattern_and_file_are_what_they_are_locally(corpus, address):
    assert open_corpus(address).describe() == open_corpus(corpus).describe()
    there = open_corpus(f"{address}/*.jsonl")
    here = open_corpus(corpus / "a.jsonl")
    assert there.describe() == here.describe()
    assert list(there.read(280, 290)) == list(here.read(280, 290))
    single = open_corpus(f"{address}/sub/b.jsonl.gz")
    assert single.describe() == open_corpus(corpus / "sub" / "b.jsonl.gz").describe()


def test_a_file_is_copied_once_and_again_when_it_changes(corpus, address, monkeypatch):
    copied = []
    real = sources.RemoteFile._copy
    monkeypatch.setattr(
        sources.RemoteFile, "_copy", lambda f, path: copied.append(f.name) or real(f, path)
    )
    for _ in range(2):
        open_corpus(f"{address}/a.jsonl")
    assert copied == ["a.jsonl"]
    Bucket(address).put("a.jsonl", json.dumps({"text": "another"}).encode() + b"\n")
    assert [document.text for document in open_corpus(f"{address}/a.jsonl")] == ["another"]
    assert copied == ["a.jsonl", "a.jsonl"]


def test_sent_to_another_machine_it_makes_a_copy_of_its_own(corpus, address, tmp_path, monkeypatch):
    sent = pickle.dumps(open_corpus(f"{address}/a.jsonl"))
    monkeypatch.setenv("VOCAGNOLM_CACHE", str(tmp_path / "elsewhere"))
    arrived = pickle.loads(sent)
    assert not arrived.changed_sources()
    assert list(arrived.read(5, 9)) == list(open_corpus(corpus / "a.jsonl").read(5, 9))
    assert arrived.sources[0].path.is_relative_to(tmp_path / "elsewhere")


def test_it_is_scored_as_the_local_one(corpus, address, tmp_path):
    for name, path in (("here", corpus / "a.jsonl"), ("there", f"{address}/a.jsonl")):
        score_corpus(ArithmeticTeacher(), path, tmp_path / name, settings=SETTINGS)
    assert store_bytes(tmp_path / "here") == store_bytes(tmp_path / "there")


def test_reads_that_are_cut(corpus, address, server, monkeypatch):
    seen = []

    def cut(head):
        if "a.jsonl" in head and head.startswith("GET"):
            seen.append(head)
            return ("answer", 5000) if len(seen) < 3 else None
        return None

    proxy = CuttingProxy(server, cut)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    sources.forget_client(address)
    there = open_corpus(f"{address}/a.jsonl")
    assert there.fingerprint == open_corpus(corpus / "a.jsonl").fingerprint
    assert proxy.cuts


def test_what_is_not_there_or_not_allowed(corpus, address, env, monkeypatch):
    with pytest.raises(CorpusError, match=r"nothing.jsonl does not exist"):
        open_corpus(f"{address}/nothing.jsonl")
    with pytest.raises(CorpusError, match=r"s3://nobody-has-this/x.jsonl does not exist"):
        open_corpus("s3://nobody-has-this/x.jsonl")
    with pytest.raises(CorpusError, match="holds no file that can be read"):
        open_corpus(f"{address}/*.bin")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    sources.forget_client(address)
    with pytest.raises(CorpusError, match="does not accept the credentials") as told:
        open_corpus(f"{address}/a.jsonl")
    assert "wrong" not in str(told.value) and "\n" not in str(told.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", env["AWS_SECRET_ACCESS_KEY"])  # put right: heard
    assert (
        open_corpus(f"{address}/a.jsonl").fingerprint == open_corpus(corpus / "a.jsonl").fingerprint
    )


def test_packages_and_kinds_of_addresses(monkeypatch, env):
    with pytest.raises(UsageError, match=r"ftp://x/a.jsonl.*s3://, gs://, hf://, https://"):
        open_corpus("ftp://x/a.jsonl")
    for package, address in (("s3fs", f"s3://{BUCKET}/a.jsonl"), ("gcsfs", "gs://b/a.jsonl")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"needs the package '{package}'.*pip install"):
            open_corpus(address)


def test_https_without_folders(corpus, env, tmp_path, monkeypatch):
    """A plain web server, which knows no ETag; a query is no part of the name."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(corpus))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{web.server_address[1]}"
        there = open_corpus(f"{base}/a.jsonl?download=true")
        assert there.describe() == open_corpus(corpus / "a.jsonl").describe()
        with pytest.raises(CorpusError, match=r"none.jsonl does not exist"):
            open_corpus(f"{base}/none.jsonl")
        web.shutdown()
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.1")
    with pytest.raises(CorpusError, match=r"cannot be read.*Check the address"):
        open_corpus(f"{base}/a.jsonl")
