"""A teacher that all processes of torchrun hold together."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from faults_kit import LONG
from score.teacher_kit import SETTINGS, ArithmeticTeacher, save_teacher, store_bytes, write_corpus
from training_kit import run_processes
from transformers import AutoConfig
from typer.testing import CliRunner

from vocagnolm.base.ranks import running_ranks
from vocagnolm.cli import app
from vocagnolm.errors import StoreError, UsageError
from vocagnolm.report.comparison import SAMPLE
from vocagnolm.score import LocalTeacher, RayCluster, Server, Share, score_corpus
from vocagnolm.score.plan import TeacherSource
from vocagnolm.store import LossStore

pytestmark = pytest.mark.slow

TEXTS = [text * 4 for text in SAMPLE[:6]]


# processes wait for each other in every batch: there are few
SPLIT = dataclasses.replace(SETTINGS, shard_teacher=True, batch_tokens=2048)


def losses(folder, settings):
    # Qwen's own tokenizer class takes no other tokenizer: a Llama beside it brings one
    files = TeacherSource(str(folder.parent / "llama")).find(settings)
    config = AutoConfig.from_pretrained(folder)
    teacher = LocalTeacher(dataclasses.replace(files, folder=folder, config=config), settings)
    return np.concatenate(teacher.nll(teacher.tokenize(TEXTS)))


def save_losses(folders):
    with running_ranks(tensors=True) as ranks:
        for folder in folders:
            np.save(folder / f"{ranks.rank}.npy", losses(folder, SPLIT))


# 417 rows: the second process has one less than the first
KINDS = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": False, "final_logit_softcapping": 0.3, "head_dim": 8},
}


def test_two_processes_give_the_losses_of_one(tmp_path):
    save_teacher(tmp_path / "llama")
    folders = []
    for kind, config in KINDS.items():
        for tied in {config["tie_word_embeddings"], *((True, False) if LONG else ())}:
            changes = config | {"kind": kind, "tie_word_embeddings": tied, "vocab_size": 417}
            folders.append(save_teacher(tmp_path / f"{kind}-{tied}", **changes))
    run_processes(save_losses, 2, folders)
    for folder in folders:
        alone = losses(folder, SETTINGS)
        first, second = (np.load(folder / f"{rank}.npy") for rank in range(2))
        assert np.isfinite(alone).all() and alone.std() > 0.01
        np.testing.assert_allclose(first, alone, rtol=0, atol=1e-5)
        assert np.array_equal(first, second)


def score(folder, corpus, out, settings, **options):
    summary = score_corpus(folder, corpus, out, settings=settings, **options)
    Path(f"{out}-{os.environ['RANK']}").write_text(json.dumps(summary.scored_shards))


def test_the_store_of_two_processes_has_the_same_bytes_every_time(tmp_path):
    folder, corpus = save_teacher(tmp_path / "t"), write_corpus(tmp_path / "corpus.jsonl")
    settings = dataclasses.replace(SPLIT, alternatives=3)
    whole = dataclasses.replace(SETTINGS, alternatives=3)
    score_corpus(folder, corpus, tmp_path / "one", settings=whole)
    run_processes(score, 2, folder, corpus, tmp_path / "two", settings)
    for number in (2, 1):  # two such runs, each with a share
        given = (folder, corpus, tmp_path / "shares", settings)
        run_processes(_score_share, 2, *given, f"{number}/2")
    assert store_bytes(tmp_path / "two") == store_bytes(tmp_path / "shares")
    assert [int(Path(f"{tmp_path / 'two'}-{rank}").read_text()) for rank in (0, 1)] == [5, 5]

    one, two = LossStore.open(tmp_path / "one"), LossStore.open(tmp_path / "two")
    for place in range(len(one)):
        np.testing.assert_allclose(two[place][1], one[place][1], rtol=1e-3, atol=1e-3)
    assert two.manifest["identity"]["scoring"]["shard_teacher"] == 2
    assert "shard_teacher" not in one.manifest["identity"]["scoring"]
    # the last bits differ: another number is another store
    with pytest.raises(StoreError, match=r"shard_teacher"):
        score_corpus(folder, corpus, tmp_path / "two", settings=whole)


def _score_share(folder, corpus, out, settings, share):
    score(folder, corpus, out, settings, share=Share.parse(share))


def refused(folder, corpus, out, settings, message):
    with pytest.raises(UsageError, match=message):
        score_corpus(folder, corpus, out, settings=settings)


@pytest.mark.parametrize(
    ("kind", "processes", "message"),
    [
        ("gpt2", 2, r"no tensor-parallel plan for t \(gpt2\).*Remove --shard-teacher"),
        ("llama", 3, r"2 num_key_value_heads\) cannot be shared by 3 .*--nproc_per_node 1, 2\."),
    ],
)
def test_what_cannot_be_split_is_told_before_anything_is_loaded(tmp_path, kind, processes, message):
    folder, corpus = save_teacher(tmp_path / "t", kind=kind), write_corpus(tmp_path / "c.jsonl")
    run_processes(refused, processes, folder, corpus, tmp_path / "s", SPLIT, message)
    assert not (tmp_path / "s" / "shards").exists()


def test_without_torchrun_the_command_is_told(tmp_path):
    folder, corpus = save_teacher(tmp_path / "t"), write_corpus(tmp_path / "c.jsonl")
    options = ["--teacher", folder, "--corpus", corpus, "--out", tmp_path / "s"]
    words = [str(word) for word in ("score", *options, "--shard-teacher")]
    alone = CliRunner().invoke(app, words).exception
    assert isinstance(alone, UsageError)
    assert "this one runs alone. Start: torchrun --nproc_per_node 2 -m vocagnolm" in str(alone)


def test_what_does_not_go_together(tmp_path, monkeypatch):
    corpus, out = write_corpus(tmp_path / "c.jsonl"), tmp_path / "s"
    with pytest.raises(ValueError, match="by name"):
        score_corpus(ArithmeticTeacher(), corpus, out, settings=SPLIT)
    with pytest.raises(UsageError, match="--server: remove it"):
        score_corpus("t", corpus, out, settings=SPLIT, server=Server(url="localhost:1"))
    with pytest.raises(UsageError, match=r"--ray cannot be combined.*--share.*--server"):
        score_corpus("t", corpus, out, settings=SPLIT, cluster=RayCluster())
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = dataclasses.replace(SPLIT, device="auto")
    with pytest.raises(UsageError, match=r"4 run here on 2 GPUs.*--nproc_per_node 2"):
        score_corpus("t", corpus, out, settings=gpu)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
        score_corpus("t", corpus, out, settings=SPLIT)
