"""A teacher that several processes hold together."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faults_kit import LONG
from score.teacher_kit import SETTINGS, ArithmeticTeacher, save_teacher, store_bytes, write_corpus
from training_kit import run_processes
from transformers import AutoConfig
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import StoreError, UsageError
from vocagnolm.model.load import fewest_parts, loaded_bytes, possible_sizes
from vocagnolm.pair import SAMPLE
from vocagnolm.processes import running_teams
from vocagnolm.score import LocalTeacher, score_corpus
from vocagnolm.score.cluster import worker_bundles
from vocagnolm.score.plan import TeacherSource
from vocagnolm.score.run import team_size
from vocagnolm.store import LossStore

pytestmark = pytest.mark.slow

GIB = 2**30
TEXTS = [text * 4 for text in SAMPLE[:6]]


def split(size, **changes):
    # processes wait for each other in every batch: there are few
    return dataclasses.replace(SETTINGS, shard_teacher=size, batch_tokens=2048, **changes)


def losses(folder, settings):
    # Qwen's own tokenizer class takes no other tokenizer: a Llama beside it brings one
    files = TeacherSource(str(folder.parent / "llama")).find(settings)
    config = AutoConfig.from_pretrained(folder)
    teacher = LocalTeacher(dataclasses.replace(files, folder=folder, config=config), settings)
    return np.concatenate(teacher.nll(teacher.tokenize(TEXTS)))


def save_losses(folders, size):
    with running_teams(lambda processes: size) as ranks:
        assert ranks.team_size == size
        for folder in folders:
            np.save(folder / f"{ranks.rank}.npy", losses(folder, split(size)))


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
    run_processes(save_losses, 2, folders, 2)
    for folder in folders:
        alone = losses(folder, SETTINGS)
        first, second = (np.load(folder / f"{rank}.npy") for rank in range(2))
        assert np.isfinite(alone).all() and alone.std() > 0.01
        np.testing.assert_allclose(first, alone, rtol=0, atol=1e-5)
        assert np.array_equal(first, second)


def score(folder, corpus, out, settings):
    summary = score_corpus(folder, corpus, out, settings=settings)
    assert summary.store["complete"]
    Path(f"{out}-{os.environ['RANK']}").write_text(str(summary.scored_shards))


def shards_of(out, processes):
    return [int(Path(f"{out}-{rank}").read_text()) for rank in range(processes)]


def test_two_teachers_of_two_processes_share_the_corpus(tmp_path):
    folder, corpus = save_teacher(tmp_path / "t"), write_corpus(tmp_path / "corpus.jsonl")
    score_corpus(folder, corpus, tmp_path / "one", settings=SETTINGS)
    run_processes(score, 2, folder, corpus, tmp_path / "two", split(2))
    run_processes(score, 4, folder, corpus, tmp_path / "four", split(2))
    assert shards_of(tmp_path / "two", 2) == [5, 5]
    first, also_first, second, also_second = shards_of(tmp_path / "four", 4)
    assert first == also_first and second == also_second and first + second == 5
    assert store_bytes(tmp_path / "two") == store_bytes(tmp_path / "four")

    one, two = LossStore.open(tmp_path / "one"), LossStore.open(tmp_path / "two")
    for place in range(len(one)):
        np.testing.assert_allclose(two[place][1], one[place][1], rtol=1e-3, atol=1e-3)
    assert two.manifest["identity"]["scoring"]["shard_teacher"] == 2
    assert "shard_teacher" not in one.manifest["identity"]["scoring"]
    # the last bits differ: another number is another store
    with pytest.raises(StoreError, match=r"shard_teacher"):
        score_corpus(folder, corpus, tmp_path / "two", settings=SETTINGS)


def decide_much(size):
    with running_teams(lambda processes: size) as ranks:
        assert ranks.decide(lambda: bytes(range(256)) * 80_000)[-1] == 255  # 20 MB
        ranks.wait_for_all()
        with pytest.raises(UsageError, match="no"):
            ranks.decide(_refuse)


def _refuse():
    raise UsageError("no")


def test_teams_share_decisions_of_any_size_and_errors():
    run_processes(decide_much, 4, 2)


def refused(folder, corpus, out, settings, message):
    with pytest.raises(UsageError, match=message):
        score_corpus(folder, corpus, out, settings=settings)


@pytest.mark.parametrize(
    ("kind", "size", "processes", "message"),
    [
        ("llama", 2, 3, r"3 processes run here.*--nproc_per_node 2 .*--shard-teacher 2"),
        ("gpt2", 2, 2, r"no tensor-parallel plan for t \(gpt2\).*Remove --shard-teacher"),
        ("llama", 4, 4, r"2 num_key_value_heads\) cannot be shared by 4.*one of 1, 2\."),
    ],
)
def test_what_cannot_be_split_is_told_before_anything_is_loaded(
    tmp_path, kind, size, processes, message
):
    folder, corpus = save_teacher(tmp_path / "t", kind=kind), write_corpus(tmp_path / "c.jsonl")
    run_processes(refused, processes, folder, corpus, tmp_path / "s", split(size), message)
    assert not (tmp_path / "s" / "shards").exists()


def test_without_torchrun_the_command_is_told(tmp_path):
    folder, corpus = save_teacher(tmp_path / "t"), write_corpus(tmp_path / "c.jsonl")
    options = ["--teacher", folder, "--corpus", corpus, "--out", tmp_path / "s"]

    def run(*more):
        return CliRunner().invoke(app, [str(word) for word in ("score", *options, *more)])

    alone = run("--shard-teacher", "2")
    assert isinstance(alone.exception, UsageError)
    assert "torchrun --nproc_per_node 2 -m vocagnolm score --shard-teacher 2" in str(
        alone.exception
    )
    assert "expected an integer of at least 1 or auto" in str(run("--shard-teacher", "0").exception)
    # no GPU: nothing to split
    assert run("--shard-teacher", "auto", "--device", "cpu", "--context", 64).exit_code == 0


def test_objects_are_not_split(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl")
    with pytest.raises(ValueError, match="by name"):
        score_corpus(ArithmeticTeacher(), corpus, tmp_path / "s", settings=split(2))


def test_on_ray_a_worker_has_room_for_all_of_a_teacher():
    assert worker_bundles(split(4, device="cuda")) == [{"GPU": 1, "CPU": 1}] * 4
    assert worker_bundles(split(2, device="cpu", threads=3)) == [{"CPU": 3}] * 2


def llama(heads, key_values):
    from transformers import LlamaConfig

    return LlamaConfig(num_attention_heads=heads, num_key_value_heads=key_values)


def test_as_few_gpus_as_hold_the_weights():
    seventy_billion = llama(64, 8)
    assert possible_sizes("t", seventy_billion) == [1, 2, 4, 8]
    weights = 141 * 10**9
    assert fewest_parts("t", seventy_billion, weights, 72 * GIB) == 4  # 2 x 66 GiB leave no room
    assert fewest_parts("t", seventy_billion, weights, 141 * GIB) == 2
    assert fewest_parts("t", seventy_billion, weights, 24 * GIB) == 8
    assert fewest_parts("t", llama(32, 4), 15 * 10**9, 24 * GIB) == 1
    with pytest.raises(UsageError, match=r"131 GiB of weights, which 8 GPUs of 16 GiB"):
        fewest_parts("t", seventy_billion, weights, 16 * GIB)


def test_the_size_of_the_weights_is_that_in_memory(tmp_path):
    folder = save_teacher(tmp_path / "t")
    teacher = TeacherSource(str(folder)).open(SETTINGS)
    assert isinstance(teacher, LocalTeacher)
    files = TeacherSource(str(folder)).find(SETTINGS).weight_files
    parameters = sum(p.numel() for p in teacher._model.model.parameters())
    assert loaded_bytes(files, torch.float32) == 4 * parameters
    assert loaded_bytes(files, torch.bfloat16) == 2 * parameters


def test_auto_asks_the_gpus_and_says_what_to_start(tmp_path, monkeypatch):
    source = TeacherSource(str(save_teacher(tmp_path / "t")))
    files = SimpleNamespace(fewest_shards=lambda: 2)
    monkeypatch.setattr(TeacherSource, "find", lambda self, settings: files)
    assert team_size(source, split("auto"), 4) == 2
    with pytest.raises(UsageError, match=r"auto: 2 processes.*alone.*--nproc_per_node 2"):
        team_size(source, split("auto"), 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"4 processes run here on 2 GPUs.*--nproc_per_node 2"):
        team_size(source, split(2, device="auto"), 4)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
        team_size(source, split(2), 2)
