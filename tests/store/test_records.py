"""Records of finished shards: a run that goes on does not read them, a complete store has none."""

import json

import pytest
from faults_kit import flip_bit
from score.teacher_kit import SETTINGS, ArithmeticTeacher, store_bytes, write_corpus
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import ScoreError, StoreError
from vocagnolm.score import score_corpus
from vocagnolm.store import LossStore, inspect_store, verify_store, writer
from vocagnolm.store.format import shard_name


class Stopping(ArithmeticTeacher):
    """Scores so many shards, then fails."""

    def __init__(self, shards, device=None):
        self.left = shards
        self.device_name = device

    def nll(self, documents, on_tokens=None):
        self.left -= 1
        if self.left < 0:
            raise ScoreError("stopped")
        return super().nll(documents, on_tokens)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl")


def score(corpus, out, shards=99, device=None):
    return score_corpus(Stopping(shards, device), corpus, out, settings=SETTINGS)


@pytest.fixture
def half(tmp_path, corpus):
    """Three of five shards, and what the store becomes."""
    score(corpus, tmp_path / "whole")
    with pytest.raises(ScoreError, match="stopped"):
        score(corpus, tmp_path / "s", shards=3)
    return tmp_path / "s", store_bytes(tmp_path / "whole")


def test_going_on_reads_no_shard_that_has_a_record(half, corpus, monkeypatch):
    out, whole = half
    record = json.loads((out / "records" / "000001.json").read_text())
    path = out / shard_name(1)
    assert record["file_bytes"] == path.stat().st_size and record["file"] == shard_name(1)

    def unread(path):
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(writer.files, "file_digest", unread)
    monkeypatch.setattr("vocagnolm.store.format.ShardFile.damage", unread)
    summary = score(corpus, out)
    assert summary.found_shards == 3 and summary.scored_shards == 2
    monkeypatch.undo()
    assert store_bytes(out) == whole and not (out / "records").exists()


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"{}", b'{"identity": "x"}'])
def test_a_shard_without_a_record_is_read(half, corpus, content):
    out, whole = half
    for number in (0, 1):
        record = out / "records" / f"00000{number}.json"
        record.unlink() if content is None else record.write_bytes(content)
    flip_bit(out / shard_name(1))
    summary = score(corpus, out)
    assert summary.found_shards == 2 and len(summary.mended) == 1
    assert store_bytes(out) == whole


def test_a_record_of_another_size_or_run_does_not_count(half, corpus):
    out, whole = half
    (out / shard_name(0)).write_bytes((out / shard_name(0)).read_bytes()[:-9])
    record = out / "records" / "000001.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"identity": "another"}))
    flip_bit(out / shard_name(1))
    summary = score(corpus, out)
    assert summary.found_shards == 1 and len(summary.mended) == 2
    assert store_bytes(out) == whole


def test_a_shard_that_changed_behind_its_record_is_no_part_of_a_complete_store(half, corpus):
    out, whole = half
    flip_bit(out / shard_name(1))
    with pytest.raises(StoreError, match=r"000001.*have changed since .* same command again"):
        score(corpus, out)
    assert not inspect_store(out)["complete"]
    assert len(score(corpus, out).mended) == 1
    assert store_bytes(out) == whole and verify_store(out) == []


def test_damage_behind_a_manifest_is_found_by_every_reader_and_mended(half, corpus):
    out, whole = half
    score(corpus, out)
    flip_bit(out / shard_name(1))
    assert any("000001" in problem for problem in verify_store(out))
    with pytest.raises(Exception, match="checksum"):
        list(LossStore.open(out))
    assert len(score(corpus, out).mended) == 1  # of a complete store every shard is read
    assert store_bytes(out) == whole and verify_store(out) == []


def test_a_store_of_an_earlier_version_goes_on(half, corpus):
    out, whole = half
    for record in (out / "records").iterdir():
        record.unlink()
    (out / "records").rmdir()
    assert score(corpus, out).found_shards == 3
    assert store_bytes(out) == whole
    assert inspect_store(out)["complete"]


def test_the_gpu_is_noted_for_every_shard_and_decides_nothing(tmp_path, corpus):
    out = tmp_path / "s"
    with pytest.raises(ScoreError, match="stopped"):
        score(corpus, out, shards=3, device="GPU one")
    assert inspect_store(out)["devices"] == {"GPU one": 3}
    score(corpus, out, device="GPU two")
    listed = json.loads((out / "manifest.json").read_text())["shards"]
    assert [entry["device"] for entry in listed] == ["GPU one"] * 3 + ["GPU two"] * 2
    assert inspect_store(out)["devices"] == {"GPU one": 3, "GPU two": 2}
    assert verify_store(out) == []
    shown = CliRunner().invoke(app, ["store", "inspect", str(out)]).output
    assert "GPU one (3 shards), GPU two (2 shards)" in shown

    before = store_bytes(out)
    assert score(corpus, out, device="GPU three").scored_shards == 0
    assert store_bytes(out) == before
    flip_bit(out / shard_name(4))
    score(corpus, out, device="GPU three")
    assert inspect_store(out)["devices"] == {"GPU one": 3, "GPU two": 1, "GPU three": 1}


def test_shards_and_identity_are_those_of_a_store_without_devices(half, tmp_path, corpus):
    _, whole = half
    score(corpus, tmp_path / "named", device="GPU one")
    named = store_bytes(tmp_path / "named")
    manifest = json.loads(named.pop("manifest.json"))
    for entry in manifest["shards"]:
        assert entry.pop("device") == "GPU one"
    without = json.loads(whole.pop("manifest.json"))
    assert manifest.pop("content_sha256") != without.pop("content_sha256")
    assert manifest == without
    assert named == whole


def test_a_flipped_partial_manifest_is_made_again(half, corpus):
    out, whole = half
    partial = out / "manifest.partial.json"
    partial.write_text(partial.read_text().replace('"shard_count": 5', '"shard_count": 6'))
    with pytest.raises(StoreError, match=r"manifest\.partial\.json is damaged: .* checksum"):
        inspect_store(out)
    assert score(corpus, out).store["complete"]
    assert store_bytes(out) == whole


def test_a_stray_shard_stops_nothing_and_its_remedy_is_named(half, corpus):
    out, whole = half
    (out / "shards" / "000099.safetensors").write_bytes(b"stray")
    (out / "manifest.partial.json").write_text("{")
    assert score(corpus, out).store["complete"]
    assert verify_store(out) == ["shards/000099.safetensors: not in the manifest; remove it"]
    (out / "shards" / "000099.safetensors").unlink()
    assert store_bytes(out) == whole
