"""`store compare`, `store rank`: several teachers over one corpus."""

import json

import numpy as np
import pytest
from training_kit import documents, save_tokenizer, write_store
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.teachers import best_shares, compare_stores
from vocagnolm.errors import StoreError
from vocagnolm.store import LossStore
from vocagnolm.store.analysis import document_bits, rank_documents


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    texts = documents(24)
    with (folder / "corpus.jsonl").open("w") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"text": text, "source": f"half {number // 12}"}) + "\n")
    save_tokenizer(folder / "one", kind="bytes")
    save_tokenizer(folder / "two", kind="pieces")
    write_store(folder / "a", texts, folder / "one", seed=0)
    write_store(folder / "b", texts[:20], folder / "two", seed=1)
    return folder, texts


def bits(entries):
    nats = sum(float(nll.sum(dtype=np.float64)) for _, nll in entries)
    return nats / np.log(2) / sum(int(width.sum(dtype=np.int64)) for width, _ in entries)


def test_bits_per_byte_side_by_side(lab):
    folder, texts = lab
    stores = [LossStore.open(folder / name) for name in "ab"]
    read = open_corpus(folder / "corpus.jsonl")
    names = open_corpus(folder / "corpus.jsonl", text_field="source")
    found = compare_stores([folder / "a", folder / "b"], read, sources=names)
    assert found["documents"] == 20
    for number, store in enumerate(stores):
        entries = [store[i] for i in range(20)]
        assert found["stores"][number]["bits_per_byte"] == pytest.approx(bits(entries))
        for source, part in zip(found["sources"], (range(12), range(12, 20)), strict=True):
            expected = bits([store[i] for i in part])
            assert source["bits_per_byte"][number] == pytest.approx(expected)
    assert [s["name"] for s in found["sources"]] == ["half 0", "half 1"]
    better = [bits([stores[0][i]]) < bits([stores[1][i]]) for i in range(20)]
    assert found["stores"][0]["best_share"] == pytest.approx(np.mean(better))
    assert best_shares(stores) == pytest.approx([np.mean(better), 1 - np.mean(better)])
    # the widest stretches, in words, with both models' losses of exactly that text
    row = found["stretches"][0]
    low, high = row["bytes"]
    assert texts[row["document"]].encode()[low:high].decode() == row["text"]
    for number, store in enumerate(stores):
        spans = store.spans(row["document"])
        _, nll = store[row["document"]]
        inside = (spans[:, 0] >= low) & (spans[:, 0] < high)
        assert spans[inside][0, 0] == low and spans[inside][-1, 1] == high
        assert row["nats"][number] == pytest.approx(float(nll[inside].sum(dtype=np.float64)))
    gaps = [abs(r["nats"][0] - r["nats"][1]) for r in found["stretches"]]
    assert gaps == sorted(gaps, reverse=True)


def test_the_share_of_tokens_on_which_they_differ(lab):
    folder, _ = lab
    found = compare_stores([folder / "a", folder / "b", folder / "a"])
    assert found["stores"][2]["apart_share"] == 0.0
    assert 0.1 < found["stores"][1]["apart_share"] < 1.0
    assert found["sources"] == [] and found["stretches"][0]["text"] is None


def test_rank_by_bits_and_by_difference(lab):
    folder, _ = lab
    ranks = rank_documents(folder / "a")
    mine = document_bits(LossStore.open(folder / "a")).bits_per_byte
    assert [row["document"] for row in ranks.rows(0, 24)] == np.argsort(mine).tolist()
    other = document_bits(LossStore.open(folder / "b")).bits_per_byte
    ranks = rank_documents(folder / "a", folder / "b")
    order = np.argsort(-(other - mine[:20])).tolist()
    assert [row["document"] for row in ranks.rows(0, 20)] == order
    assert ranks.rows(23, 24)[0]["difference"] is None  # not in the second store: last


def test_commands(lab, tmp_path):
    folder, _ = lab
    run = CliRunner().invoke
    a, b, corpus = (str(folder / name) for name in ("a", "b", "corpus.jsonl"))
    shown = run(app, ["store", "compare", a, b, "--corpus", corpus, "--source-field", "source"])
    assert shown.exit_code == 0, shown.output
    assert "half 1" in shown.output and "20 documents" in shown.output
    plot = tmp_path / "p.png"
    result = run(app, ["store", "compare", a, b, "--json", "--plot", str(plot)])
    assert json.loads(result.stdout)["documents"] == 20 and plot.stat().st_size > 1000
    table = tmp_path / "ranks.parquet"
    result = run(app, ["store", "rank", a, "--against", b, "--out", str(table), "--json"])
    assert json.loads(result.stdout)["by"] == "difference"
    import pyarrow.parquet as pq

    assert pq.read_table(table).num_rows == 24
    assert "difference" in run(app, ["store", "rank", a, "--against", b]).output


def test_a_store_is_read_with_its_text_beside_it(lab, tmp_path):
    import pyarrow.parquet as pq

    folder, _ = lab
    run = CliRunner().invoke
    a, corpus, out = str(folder / "a"), folder / "corpus.jsonl", tmp_path / "a.parquet"
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    result = run(app, ["store", "export", a, "--corpus", str(corpus), "--out", str(out)])
    assert result.exit_code == 0, result.output
    rows = pq.read_table(out).to_pylist()
    assert [row["text"] for row in rows] == [texts[row["document_index"]] for row in rows]
    for row in rows:
        assert b"".join(row["tokens"]).decode() == row["text"]
        assert [len(token) for token in row["tokens"]] == row["token_bytes"]

    ranked = run(app, ["store", "rank", a, "--corpus", str(corpus), "--top", "2", "--json"])
    shown = json.loads(ranked.stdout)["shown"]
    assert len(shown) == 4
    for row in shown:
        assert row["text"] and " ".join(texts[row["document"]].split()).startswith(row["text"])
    assert shown[0]["text"] in run(app, ["store", "rank", a, "--corpus", str(corpus)]).stdout

    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "another text"}) + "\n")
    refused = run(
        app, ["store", "export", a, "--corpus", str(other), "--out", str(tmp_path / "x.parquet")]
    )
    assert "the corpus does not hold document" in str(refused.exception)
    assert not (tmp_path / "x.parquet").exists()
    refused = run(app, ["store", "rank", a, "--corpus", str(other)])
    assert "is not the one that was scored" in str(refused.exception)


def test_stores_of_other_corpora_are_refused(lab, tmp_path):
    folder, _ = lab
    strange = write_store(tmp_path / "s", documents(5, seed=7), folder / "one")
    with pytest.raises(StoreError, match="no document in common"):
        compare_stores([folder / "a", strange])
    with pytest.raises(StoreError, match="no document in common"):
        rank_documents(folder / "a", strange)
    with pytest.raises(StoreError, match="at least two"):
        compare_stores([folder / "a"])
