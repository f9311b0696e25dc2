"""The store's format, reader, checks and export."""

import hashlib
import json
import pickle
import struct

import numpy as np
import pytest
from safetensors import safe_open

from vocagnolm.alignment import align, carry
from vocagnolm.errors import StoreError
from vocagnolm.storage import Folder
from vocagnolm.store import (
    LossStore,
    StoreWriter,
    export_parquet,
    inspect_store,
    verify_store,
)
from vocagnolm.store.format import (
    Shard,
    encode_shard,
    narrowest_unsigned,
    read_shard,
    shard_name,
    to_float16,
)


def made_shard(number, documents, seed, first=None, longest_token=9):
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 40, documents)
    tokens = int(counts.sum())
    nll = draw.exponential(2.0, tokens)
    nll[np.cumsum(counts) - counts] = np.nan
    first = number * documents if first is None else first
    return Shard(
        number=number,
        first_document=first,
        document_span=documents,
        document_hash=draw.integers(0, 256, (documents, 16)).astype(np.uint8),
        document_index=np.arange(first, first + documents, dtype="<u8"),
        token_count=counts.astype("<u4"),
        token_bytes=narrowest_unsigned(draw.integers(0, longest_token, tokens)),
        nll=to_float16(nll),
    )


def write_store(path, shards):
    corpus = {"documents": sum(s.document_span for s in shards), "sources": []}
    identity = {"teacher": {"name": "t"}, "corpus": corpus, "scoring": {}}
    writer = StoreWriter(path, identity, len(shards))
    writer.begin()
    for shard in shards:
        writer.write_shard(shard)
    writer.finish()
    writer.tidy()
    return path


@pytest.fixture
def shards():
    return [made_shard(0, 7, 0), made_shard(1, 7, 1, longest_token=300), made_shard(2, 7, 2)]


@pytest.fixture
def store(tmp_path, shards):
    return write_store(tmp_path / "store", shards)


def documents_of(shards):
    for shard in shards:
        ends = np.cumsum(shard.token_count.astype(int))
        for low, high in zip(ends - shard.token_count, ends, strict=True):
            yield shard.token_bytes[low:high], shard.nll[low:high].astype(np.float32)


def test_what_was_written_is_read(store, shards):
    loss_store = LossStore.open(store)
    expected = list(documents_of(shards))
    assert len(loss_store) == len(expected) == 21
    for (token_bytes, nll), (lengths, values) in zip(loss_store, expected, strict=True):
        assert token_bytes.dtype == np.int64 and nll.dtype == np.float32
        np.testing.assert_array_equal(token_bytes, lengths)
        np.testing.assert_array_equal(nll, values)
    np.testing.assert_array_equal(loss_store[-1][1], expected[-1][1])
    with pytest.raises(IndexError):
        loss_store[21]


def test_slices_spans_and_a_line_about_the_store(store):
    loss_store = LossStore.open(store)
    two, three = loss_store[5:9:3]
    np.testing.assert_array_equal(two[1], loss_store[5][1])
    np.testing.assert_array_equal(three[1], loss_store[8][1])
    assert len(loss_store[-2:]) == 2 and loss_store[30:] == []
    token_bytes, _ = loss_store[3]
    spans = loss_store.spans(3)
    assert spans.dtype == np.int64 and spans[0, 0] == 0
    np.testing.assert_array_equal(spans[:, 1] - spans[:, 0], token_bytes)
    np.testing.assert_array_equal(spans[1:, 0], spans[:-1, 1])
    tokens = sum(len(nll) for _, nll in loss_store)
    assert repr(loss_store) == f"LossStore({str(store)!r}, 21 documents, {tokens} tokens)"


def test_documents_are_found_by_hash(store, shards):
    loss_store = LossStore.open(store)
    hashes = np.concatenate([s.document_hash for s in shards])
    for index, row in enumerate(hashes):
        assert loss_store.find(row.tobytes()) == index
        assert loss_store.document_hash(index) == row.tobytes()
        assert loss_store.document_index(index) == index
    near = bytes(hashes[3][:8]) + bytes(8)  # the same first half, another document
    assert loss_store.find(near) is None
    assert loss_store.find(bytes(16)) is None
    with pytest.raises(ValueError, match="16 bytes"):
        loss_store.find(b"short")


def test_a_text_finds_its_own_losses(tmp_path):
    """Also behind documents that were skipped, and only those."""
    texts = ["one", "two two", "three three three"]
    shard = made_shard(0, 3, 0)
    shard.document_hash[:] = [list(hashlib.sha256(t.encode()).digest()[:16]) for t in texts]
    shard.document_index[:] = [0, 2, 3]
    shard.document_span, shard.skipped = 4, [{"document": 1, "place": "a:2", "reason": "empty"}]
    loss_store = LossStore.open(write_store(tmp_path / "s", [shard]))
    assert [loss_store.of(text) for text in texts] == [0, 1, 2]
    with pytest.raises(StoreError, match="does not hold this text: 'four"):
        loss_store.of("four")
    for losses in (loss_store[1][1][:-1], np.append(loss_store[1][1], 0)):
        with pytest.raises(ValueError, match="teacher values"):
            carry(align(loss_store.spans(1), loss_store.spans(1)), losses)


@pytest.mark.parametrize("key", ["sha256", "first_document", "tokens", "nll_sum"])
@pytest.mark.parametrize("where", ["shards", "totals"])
def test_a_manifest_whose_key_is_renamed_is_damaged(store, where, key):
    manifest = json.loads((store / "manifest.json").read_text())
    entry = manifest["totals"] if where == "totals" else manifest["shards"][1]
    if key not in entry:
        return
    del manifest["content_sha256"]
    entry[f"{key}2"] = entry.pop(key)
    (store / "manifest.json").write_text(json.dumps(manifest))
    for use in (LossStore.open, verify_store, inspect_store):
        with pytest.raises(StoreError, match=f"is damaged: its '{key}' is None"):
            use(store)


def test_of_equal_documents_the_first_is_found(tmp_path):
    one, two = made_shard(0, 4, 0), made_shard(1, 4, 1)
    two.document_hash[2] = one.document_hash[1]
    loss_store = LossStore.open(write_store(tmp_path / "s", [one, two]))
    assert loss_store.find(one.document_hash[1].tobytes()) == 1


def test_a_store_travels_to_worker_processes(store):
    loss_store = LossStore.open(store)
    loss_store[0]
    copy = pickle.loads(pickle.dumps(loss_store))
    np.testing.assert_array_equal(copy[5][1], loss_store[5][1])


def test_a_shard_is_a_safetensors_file(store, shards):
    with safe_open(store / shard_name(1), "np") as file:
        assert set(file.keys()) == {
            "document_hash",
            "document_index",
            "nll",
            "token_bytes",
            "token_count",
        }
        np.testing.assert_array_equal(file.get_tensor("nll"), shards[1].nll)
        assert file.get_tensor("token_bytes").dtype == np.uint16
        about = json.loads(file.metadata()["vocagnolm"])
    assert about["shard"] == 1 and about["first_document"] == 7


def test_the_format_can_be_read_with_what_the_documentation_says(store, shards):
    """Nothing but struct and json, as a reader in another language would."""
    raw = (store / "shards" / "000000.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    low, high = header["nll"]["data_offsets"]
    values = struct.unpack(f"<{(high - low) // 2}e", raw[8 + length + low : 8 + length + high])
    np.testing.assert_array_equal(np.array(values, np.float16), shards[0].nll)


def test_equal_shards_have_equal_bytes():
    assert encode_shard(made_shard(0, 9, 5), "x") == encode_shard(made_shard(0, 9, 5), "x")


def test_half_precision_saturates():
    values = np.array([0.0, -1e-7, 1e-3, 12.345, 70_000.0, np.nan], np.float32)
    found = to_float16(values)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[4] == 65504 and np.isnan(found[5])
    np.testing.assert_allclose(found[2:4].astype(float), values[2:4], rtol=1e-3)


def test_lengths_take_the_room_they_need():
    assert narrowest_unsigned(np.array([0, 255])).dtype == np.uint8
    assert narrowest_unsigned(np.array([256])).dtype == np.uint16
    assert narrowest_unsigned(np.array([70_000])).dtype == np.uint32
    assert narrowest_unsigned(np.zeros(0)).dtype == np.uint8


def test_inspect_adds_up(store, shards):
    about = inspect_store(store)
    nll = np.concatenate([s.nll for s in shards]).astype(float)
    lengths = np.concatenate([s.token_bytes.astype(int) for s in shards])
    scored = ~np.isnan(nll)
    assert about["complete"] and about["documents"] == 21 and about["tokens"] == len(nll)
    assert about["bytes"] == lengths.sum()
    assert about["mean_nll"] == pytest.approx(nll[scored].mean())
    assert about["bits_per_byte"] == pytest.approx(
        nll[scored].sum() / np.log(2) / lengths[scored].sum()
    )
    assert sum(about["histogram"]["counts"]) == scored.sum()
    assert about["histogram"]["counts"][0] == (nll[scored] < 0.5).sum()
    assert about["format_version"] == 1 and about["teacher"] == {"name": "t"}
    assert about["skipped"] == 0 and about["bytes_per_token"] > 3


def test_a_whole_store_verifies(store):
    assert verify_store(store) == []


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("where", [0, 5, 300, -1, -100])
def test_a_flipped_bit_is_found_wherever_it_is(store, where):
    flip(store / shard_name(1), where)
    problems = verify_store(store)
    assert problems and "000001.safetensors" in problems[0]


@pytest.mark.parametrize("keep", [0, 4, 100, 900, -1])
def test_a_truncated_shard_is_found(store, keep):
    path = store / shard_name(2)
    path.write_bytes(path.read_bytes()[:keep])
    assert "000002.safetensors" in verify_store(store)[0]
    with pytest.raises(StoreError, match=r"000002.safetensors.*store verify"):
        LossStore.open(store)[20]


def test_gaps_duplicates_and_strangers_are_found(tmp_path):
    gap, twice = made_shard(1, 5, 1), made_shard(2, 5, 2)
    gap.document_index[3:] += 1
    twice.document_index[3] = twice.document_index[2]
    path = write_store(tmp_path / "s", [made_shard(0, 5, 0), gap, twice])
    (path / shard_name(0)).rename(path / shard_name(7))
    problems = "\n".join(verify_store(path))
    assert "000000.safetensors is missing" in problems
    assert "000001.safetensors: documents are missing" in problems
    assert "000002.safetensors: a document appears twice" in problems
    assert "000007.safetensors: not in the manifest" in problems


def test_shards_that_changed_places_are_found(store):
    a, b = store / shard_name(0), store / shard_name(1)
    swap = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(swap)
    assert len(verify_store(store)) == 2


def test_an_incomplete_store_cannot_be_opened(tmp_path):
    writer = StoreWriter(tmp_path / "s", {"corpus": {"documents": 10}}, 2)
    writer.begin()
    writer.write_shard(made_shard(0, 5, 0))
    for use in (LossStore.open, verify_store):
        with pytest.raises(StoreError, match="not complete: 1 of 2 shards"):
            use(tmp_path / "s")
    about = inspect_store(tmp_path / "s")
    assert about["complete"] is False and about["documents"] == 5


@pytest.mark.parametrize("where", range(0, 2000, 37))
def test_a_flipped_bit_is_found_before_there_is_a_manifest(tmp_path, where):
    writer = StoreWriter(tmp_path / "s", {"corpus": {"documents": 10}}, 2)
    writer.begin()
    writer.write_shard(made_shard(0, 5, 0))
    assert writer.has_shard(0) == (True, None)
    (tmp_path / "s" / "records" / "000000.json").unlink()  # with it the shard is not read
    flip(tmp_path / "s" / shard_name(0), where % (tmp_path / "s" / shard_name(0)).stat().st_size)
    assert writer.absent_shards() == [1]
    writer.look()
    whole, damage = writer.has_shard(0)
    assert not whole and "000000.safetensors" in damage


def test_a_folder_that_is_no_store(tmp_path):
    for use in (LossStore.open, inspect_store, verify_store):
        with pytest.raises(StoreError, match="not a loss store"):
            use(tmp_path)


def test_another_format_version_is_refused(store):
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["content_sha256"]
    (store / "manifest.json").write_text(json.dumps(manifest | {"format_version": 3}))
    with pytest.raises(StoreError, match="version 3"):
        LossStore.open(store)


def test_the_bytes_of_a_shard_are_what_they_were():
    """Of the version that stores without alternatives have: as 0.2 first wrote it."""
    content = encode_shard(made_shard(0, 7, 0), "identity")
    assert hashlib.sha256(content).hexdigest() == (
        "061d634b16298293e8090ddc0725ac503e649818f8a8f03f962b43d9598679ec"
    )


def test_parquet_holds_the_same(store, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "store.parquet"
    assert export_parquet(store, out) == 21
    loss_store = LossStore.open(store)
    for index, row in enumerate(pq.read_table(out).to_pylist()):
        token_bytes, nll = loss_store[index]
        assert row["document_index"] == index
        assert row["document_hash"] == loss_store.document_hash(index).hex()
        assert row["token_bytes"] == token_bytes.tolist()
        found = [np.nan if value is None else value for value in row["nll"]]
        np.testing.assert_array_equal(np.array(found, np.float32), nll)
    with pytest.raises(StoreError, match="exists already"):
        export_parquet(store, out)


def test_nothing_is_read_before_it_is_asked_for(store):
    """A damaged shard does not stand in the way of the others."""
    (store / shard_name(1)).unlink()
    loss_store = LossStore.open(store)
    assert len(loss_store[0][0]) and len(loss_store[20][0])


def test_an_empty_shard(tmp_path):
    empty = Shard(
        number=0,
        first_document=0,
        document_span=1,
        document_hash=np.zeros((0, 16), np.uint8),
        document_index=np.zeros(0, "<u8"),
        token_count=np.zeros(0, "<u4"),
        token_bytes=np.zeros(0, "u1"),
        nll=np.zeros(0, "<f2"),
        skipped=[{"document": 0, "place": "a:1", "reason": "empty"}],
    )
    path = write_store(tmp_path / "s", [empty, made_shard(1, 3, 1, first=1)])
    assert verify_store(path) == []
    assert len(LossStore.open(path)) == 3
    assert read_shard(Folder(path), shard_name(0)).about["skipped"][0]["place"] == "a:1"
