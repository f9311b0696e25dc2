"""From a corpus to a store: right numbers, right bytes, right complaints."""

import dataclasses
import gzip
import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from faults_kit import LONG
from score.teacher_kit import (
    SETTINGS,
    ArithmeticTeacher,
    TellingTeacher,
    save_teacher,
    store_bytes,
    write_corpus,
)
from training_kit import free_port, run_processes
from typer.testing import CliRunner

from vocagnolm.alignment import align, carry, load_tokenizer
from vocagnolm.base.ranks import Ranks
from vocagnolm.cli import app
from vocagnolm.data.corpus import document_hash, open_corpus
from vocagnolm.errors import BusyError, CorpusError, ModelError, ScoreError, StoreError, UsageError
from vocagnolm.model.load import open_model
from vocagnolm.score import LocalTeacher, Share, score_corpus, score_shard
from vocagnolm.score.run import shared_corpus
from vocagnolm.store import LossStore, inspect_store, verify_store
from vocagnolm.store.format import encode_shard, shard_name
from vocagnolm.store.writer import store_lock


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl")


def change(**changes):
    return dataclasses.replace(SETTINGS, **changes)


@pytest.mark.parametrize("bos", [True, False])
def test_the_store_holds_the_plain_model_s_numbers(tmp_path, corpus, bos):
    from transformers import AutoModelForCausalLM

    folder = save_teacher(tmp_path / "t", bos=bos, seed=3)
    score_corpus(folder, corpus, tmp_path / "s", settings=SETTINGS)
    store = LossStore.open(tmp_path / "s")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    prefix = [tokenizer.id_of("<|endoftext|>")] if bos else []
    texts = [json.loads(line)["text"] for line in corpus.open()]
    assert len(store) == len(texts)
    compared = 0
    for index, text in enumerate(texts):
        token_bytes, nll = store[index]
        assert token_bytes.sum() == len(text.encode())
        assert store.find(document_hash(text)) == index
        ids = tokenizer.spans(text).ids.tolist()
        assert len(ids) == len(nll) and np.isnan(nll[0]) == (not bos)
        shown = ids[: 64 - len(prefix)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prefix + shown])).logits[0].double()
        targets = torch.tensor((prefix + shown)[1:])
        expected = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
        expected = expected.numpy().astype(np.float16).astype(np.float32)
        found = nll[: len(shown)][-len(expected) :]
        # float16 rounding may fall to the other side: one step of it
        np.testing.assert_allclose(found, expected, rtol=1.1e-3)
        compared += len(expected)
    assert compared > 500


def test_any_student_aligns_with_the_store_as_with_the_live_teacher(tmp_path, teacher, corpus):
    import made

    score_corpus(teacher, corpus, tmp_path / "s", settings=SETTINGS)
    store = LossStore.open(tmp_path / "s")
    live = load_tokenizer(teacher)
    for student in (made.sentencepiece_bpe(), made.unigram(byte_fallback=True), made.byte_level()):
        student = load_tokenizer(student)
        for index, line in enumerate(corpus.open()):
            text = json.loads(line)["text"]
            token_bytes, nll = store[index]
            ends = np.cumsum(token_bytes)
            stored = np.stack([ends - token_bytes, ends], axis=1)
            ours = student.spans(text).spans
            from_store, from_live = align(ours, stored), align(ours, live.spans(text).spans)
            np.testing.assert_array_equal(from_store.first, from_live.first)
            np.testing.assert_array_equal(from_store.last, from_live.last)
            carry(from_store, nll, how="max")


def test_a_shard_is_a_pure_function_of_its_number(tmp_path, teacher, corpus):
    score_corpus(teacher, corpus, tmp_path / "s", settings=SETTINGS)
    opened = open_corpus(corpus)
    one = LocalTeacher(open_model(teacher, device="cpu"), SETTINGS)
    identity = inspect_store(tmp_path / "s")
    for number in (3, 0, 4):  # in any order
        shard = score_shard(opened, one, SETTINGS, number)
        digest = json.loads(_header(tmp_path / "s" / shard_name(number)))["identity"]
        assert encode_shard(shard, digest) == (tmp_path / "s" / shard_name(number)).read_bytes()
    assert identity["shards"] == 5


def _header(path):
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return file.metadata()["vocagnolm"]


def test_two_runs_give_the_same_bytes_and_a_third_does_nothing(tmp_path, teacher, corpus):
    first = score_corpus(teacher, corpus, tmp_path / "a", settings=SETTINGS)
    score_corpus(teacher, corpus, tmp_path / "b", settings=SETTINGS)
    before = store_bytes(tmp_path / "a")
    assert before == store_bytes(tmp_path / "b")
    again = score_corpus(teacher, corpus, tmp_path / "a", settings=SETTINGS)
    assert first.scored_shards == 5 and first.found_shards == 0 and first.tokens > 0
    assert again.scored_shards == 0 and again.found_shards == 5
    assert store_bytes(tmp_path / "a") == before
    assert verify_store(tmp_path / "a") == []


def score_on_the_command_line(words, said):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (result.output, result.exception)
    if result.stdout:  # of the leading process
        said.write_text(result.stdout)


def test_two_processes_of_torchrun_give_the_same_bytes(tmp_path, teacher, corpus):
    score_corpus(teacher, corpus, tmp_path / "one", settings=SETTINGS)
    words = [
        *("score", "--teacher", str(teacher), "--corpus", str(corpus)),
        *("--out", str(tmp_path / "two"), "--device", "cpu", "--context", "64", "--stride", "16"),
        *("--batch-tokens", "256", "--shard-documents", "5", "--threads", "1", "--json"),
    ]
    said = tmp_path / "said.json"
    if LONG:
        launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
        port = ("--master_port", str(free_port()), "-m", "vocagnolm")
        command = [sys.executable, *launcher, *port, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said.write_text(done.stdout)
    else:
        run_processes(score_on_the_command_line, 2, words, said)
    summary = json.loads(said.read_text())  # of rank 0, which has done as many as it could claim
    assert summary["store"]["complete"] and summary["scored_shards"] <= 5
    assert summary["found_shards"] == 0 and not summary["missing_shards"]
    assert store_bytes(tmp_path / "one") == store_bytes(tmp_path / "two")


class OtherRank(Ranks):
    """A process that is not the leading one: it gets what the leading one made."""

    def decide(self, work):
        return pickle.loads(pickle.dumps(work()))


def test_ranks_do_not_hash_the_corpus_that_the_first_has_hashed(corpus):
    opened = []

    def leading():
        opened.append(open_corpus(corpus))
        if len(opened) == 1 and touch:
            os.utime(corpus, ns=(1, 1))  # copied to this machine at another time
        return opened[-1]

    touch = False
    got = shared_corpus(leading, OtherRank(1, 2))
    assert len(opened) == 1 and got.fingerprint == opened[0].fingerprint

    touch, opened[:] = True, []
    got = shared_corpus(leading, OtherRank(1, 2))
    assert len(opened) == 2 and got is opened[1]

    def edited():
        opened.append(open_corpus(corpus))
        corpus.write_text(corpus.read_text() + '{"text": "more"}\n')
        return opened[-1]

    with pytest.raises(CorpusError, match=r"process 1 is not that of the plan.*same files"):
        shared_corpus(edited, OtherRank(1, 2))


BROKEN = (
    '{"text": ""}\n{"text": "lone \\ud800"}\nnot json\n{"other": 1}\n'
    '{"text": "' + "x" * 4000 + '"}\n'
)


def test_documents_that_cannot_be_scored_are_counted_with_their_place(tmp_path, teacher, corpus):
    corpus.write_text(corpus.read_text() + BROKEN)
    summary = score_corpus(
        teacher, corpus, tmp_path / "s", settings=SETTINGS, max_document_bytes=3000
    )
    store = summary.store
    assert store["documents"] == 23 and store["skipped"] == 5
    assert [entry["place"] for entry in store["skipped_documents"]] == [
        f"corpus.jsonl:{line}" for line in range(24, 29)
    ]
    assert set(store["skipped_reasons"]) == {
        "empty",
        "lone surrogate",
        "not JSON",
        "no field 'text'",
        "huge",
    }
    assert verify_store(tmp_path / "s") == []
    with pytest.raises(ScoreError, match=r"corpus.jsonl:24 \(document 23\).*empty"):
        score_corpus(teacher, corpus, tmp_path / "t", settings=change(strict=True))


def test_a_tokenizer_that_loses_text_leaves_documents_out(tmp_path, corpus):
    import made

    folder = save_teacher(tmp_path / "t", vocab_size=600)
    made.wordpiece().save(str(folder / "tokenizer.json"))
    with pytest.raises(ScoreError, match=r"none of the 23 .* does not tile.* byte"):
        score_corpus(folder, corpus, tmp_path / "s", settings=SETTINGS)


class Faulty(ArithmeticTeacher):
    bad = 1

    def nll(self, documents, on_tokens=None):
        out = super().nll(documents, on_tokens)
        longest = max(out, key=len)
        longest[1 : 1 + self.bad] = [np.inf, np.nan, -np.inf][: self.bad]
        return out


def test_nan_and_infinity_are_masked_counted_and_limited(tmp_path, corpus):
    settings = change(max_nonfinite_share=0.01)
    teacher = Faulty()
    summary = score_corpus(teacher, corpus, tmp_path / "s", settings=settings)
    assert summary.store["nonfinite"] == 5  # one in every shard
    values = np.concatenate([nll for _, nll in LossStore.open(tmp_path / "s")])
    assert np.isnan(values).sum() == 5 + 23 and not np.isinf(values).any()
    teacher.bad = 3
    with pytest.raises(ScoreError, match=r"3 of .* tokens of shard 0 \(first in corpus.jsonl"):
        score_corpus(teacher, corpus, tmp_path / "t", settings=change(max_nonfinite_share=0.001))
    with pytest.raises(StoreError, match="not complete"):
        LossStore.open(tmp_path / "t")


def test_other_settings_are_refused_and_named(tmp_path, teacher, corpus):
    out = tmp_path / "s"
    score_corpus(teacher, corpus, out, settings=SETTINGS)
    before = store_bytes(out)

    def refused(match, *, model=teacher, source=corpus, settings=SETTINGS, **options):
        with pytest.raises(StoreError, match=match):
            score_corpus(model, source, out, settings=settings, **options)
        assert store_bytes(out) == before

    refused("scoring.dtype.*float32.*bfloat16", settings=change(dtype="bfloat16"))
    refused("scoring.context", settings=change(context=48))
    refused("scoring.stride", settings=change(stride=8))
    refused("batch_tokens", settings=change(batch_tokens=512))
    refused("shard_documents", settings=change(shard_documents=4))
    refused("prefix_ids", settings=change(bos="none"))
    refused("corpus.documents", limit_documents=10)
    (tmp_path / "other").mkdir()
    refused("teacher.fingerprint", model=save_teacher(tmp_path / "other", seed=9))
    # the same weights with another tokenizer
    renamed = tmp_path / "same"
    renamed.mkdir()
    for file in teacher.iterdir():
        (renamed / file.name).write_bytes(file.read_bytes())
    import made

    made.byte_level(350).save(str(renamed / "tokenizer.json"))
    refused("tokenizer.fingerprint", model=renamed)
    corpus.write_text(corpus.read_text().replace("1: ", "1; ", 1))
    refused("corpus.fingerprint")


def test_a_compressed_copy_of_the_corpus_scores_to_the_same_shards(tmp_path, corpus):
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "a", settings=SETTINGS)
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    score_corpus(ArithmeticTeacher(), packed, tmp_path / "b", settings=SETTINGS)
    a, b = LossStore.open(tmp_path / "a"), LossStore.open(tmp_path / "b")
    assert all((x[1].tobytes() == y[1].tobytes()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kept", [False, True])
def test_a_corpus_edited_while_it_is_scored_makes_no_store(tmp_path, corpus, kept):
    """`kept`: with the size and the time that it had."""
    before = corpus.stat()

    class Editor(ArithmeticTeacher):
        def nll(self, documents, on_tokens=None):
            text = corpus.read_text()
            corpus.write_text(text.replace("1: ", "1; ", 1) if kept else text + "\n")
            if kept:
                os.utime(corpus, ns=(before.st_atime_ns, before.st_mtime_ns))
            return super().nll(documents, on_tokens)

    with pytest.raises(CorpusError, match="changed while"):
        score_corpus(Editor(), corpus, tmp_path / "s", settings=SETTINGS)
    with pytest.raises(StoreError, match="not complete"):
        LossStore.open(tmp_path / "s")


def test_only_one_run_writes_to_a_store(tmp_path, corpus):
    with (
        store_lock(tmp_path / "s"),
        pytest.raises(BusyError, match=r"another process \(pid \d+ on .*torchrun"),
    ):
        score_corpus(ArithmeticTeacher(), corpus, tmp_path / "s", settings=SETTINGS)
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "s", settings=SETTINGS)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_shard_is_scored_again(tmp_path, corpus, damage):
    out = tmp_path / "s"
    score_corpus(ArithmeticTeacher(), corpus, out, settings=SETTINGS)
    before = store_bytes(out)
    path = out / shard_name(2)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[-9] ^= 4
        path.write_bytes(content if damage == "flipped" else content[:-9])
    assert any("000002" in problem for problem in verify_store(out))
    summary = score_corpus(ArithmeticTeacher(), corpus, out, settings=SETTINGS)
    assert summary.scored_shards == 1
    assert len(summary.mended) == (damage != "missing")
    assert store_bytes(out) == before


def test_a_folder_with_other_things_is_left_alone(tmp_path, corpus):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        score_corpus(ArithmeticTeacher(), corpus, tmp_path / "s", settings=SETTINGS)
    assert (tmp_path / "s" / "thesis.tex").read_text() == "precious"


def test_wrong_settings_are_told(tmp_path, teacher, corpus):
    for settings, message in [
        (change(context=4096), "reads at most 128"),
        (change(stride=64), "leaves no room"),
        (change(bos="<nope>"), "no such token"),
    ]:
        with pytest.raises(UsageError, match=message):
            score_corpus(teacher, corpus, tmp_path / "s", settings=settings)
    with pytest.raises(ValueError, match="batch_tokens"):
        change(batch_tokens=0)


def test_progress_reaches_the_end(tmp_path, corpus):
    seen = []
    score_corpus(
        ArithmeticTeacher(), corpus, tmp_path / "s", settings=SETTINGS, on_progress=seen.append
    )
    assert seen[-1].documents == seen[-1].total_documents == 23
    assert [p.documents for p in seen] == sorted(p.documents for p in seen)


def test_a_store_without_a_shard_is_left_to_the_corrected_command(tmp_path, teacher, corpus):
    out, broken = tmp_path / "s", tmp_path / "broken"
    shutil.copytree(teacher, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError):
        score_corpus(broken, corpus, out, settings=SETTINGS)
    score_corpus(teacher, corpus, out, settings=SETTINGS)
    assert LossStore.open(out).manifest["identity"]["teacher"]["name"] == teacher.name


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("teacher", [ArithmeticTeacher, TellingTeacher])
def test_a_corpus_without_a_usable_document_leaves_the_folder_to_the_repaired_one(
    tmp_path, teacher, shares
):
    out, kept = tmp_path / "out", 2 if teacher is TellingTeacher else 0
    settings = change(alternatives=kept)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": 3}\n' * 12)

    def scored(corpus, out):
        for number in range(1, shares + 1):
            share = None if shares == 1 else Share(number, shares)
            last = score_corpus(teacher(), corpus, out, settings=settings, share=share)
        return last

    for _ in range(2):  # said again, as long as nothing was corrected
        with pytest.raises(ScoreError, match=r"none of the 12 .*broken.jsonl:1.*not complete"):
            scored(broken, out)
    about = inspect_store(out)
    assert not about["complete"] and about["skipped"] == 12
    with pytest.raises(StoreError, match="not complete"):
        LossStore.open(out)
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    assert scored(corpus, out).store["complete"]
    scored(corpus, tmp_path / "fresh")
    assert store_bytes(out) == store_bytes(tmp_path / "fresh")
    with pytest.raises(StoreError, match="other settings or another corpus"):
        scored(broken, out)
