"""Where the seconds of a run go: told apart, and all of them."""

import dataclasses
import json
import os
import time

import pytest
import torch
from score.teacher_kit import SETTINGS, ArithmeticTeacher, save_teacher, write_corpus
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import ScoreError
from vocagnolm.model import nll, open_model, runtime
from vocagnolm.model.nll import NllModel, RowScores
from vocagnolm.score import score_corpus
from vocagnolm.score.run import Times
from vocagnolm.score.teacher import LocalTeacher

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class SlowTeacher(ArithmeticTeacher):
    """Loads for a while, and reads meanwhile."""

    def __init__(self):
        self.events = []

    def load(self):
        self.events.append("loading")
        deadline = time.monotonic() + 120
        while "tokenised" not in self.events and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        self.events.append("loaded")

    def tokenize(self, texts):
        out = super().tokenize(texts)
        self.events.append("tokenised")
        return out


def test_times_add_up_and_the_first_shard_is_tokenised_while_weights_are_loaded(tmp_path):
    teacher, corpus = SlowTeacher(), write_corpus(tmp_path / "c.jsonl")
    started = time.perf_counter()
    summary = score_corpus(teacher, corpus, tmp_path / "s", settings=SETTINGS)
    passed = time.perf_counter() - started
    times = summary.times
    assert teacher.events.index("tokenised") < teacher.events.index("loaded")
    assert times.loading >= 0.2 and times.compiling == 0
    assert times.scoring == summary.seconds > 0 and times.start > 0 and times.finishing > 0
    assert times.loading + times.scoring < times.total <= passed

    again = score_corpus(teacher, corpus, tmp_path / "s", settings=SETTINGS)
    assert again.times.loading < times.loading
    assert teacher.events.count("loading") == 1


@pytest.mark.slow
def test_compiling_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", _slowly_compiled(torch.compile))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    corpus = write_corpus(tmp_path / "c.jsonl", documents=4)
    settings = dataclasses.replace(SETTINGS, compiled=True)
    summary = score_corpus(save_teacher(tmp_path / "t"), corpus, tmp_path / "s", settings=settings)
    assert summary.times.compiling >= 0.3
    assert summary.times.scoring == summary.seconds


def test_a_teacher_that_is_loaded_has_gone_through_its_head_once(tmp_path, monkeypatch):
    """What a device does at the first use of a kernel belongs to loading; and it runs out of memory
    there with the same advice."""
    passes = []
    monkeypatch.setattr(
        NllModel, "rows_scores", lambda self, ids, *_: passes.append(ids) or RowScores(ids[0], None)
    )
    monkeypatch.setattr(nll, "compile_layers", lambda *_: True)
    settings = dataclasses.replace(SETTINGS, compiled=True)
    teacher = LocalTeacher(open_model(save_teacher(tmp_path / "t"), device="cpu"), settings)
    teacher.load()
    teacher.load()
    assert len(passes) == 1

    def too_large(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(NllModel, "rows_scores", too_large)
    with pytest.raises(ScoreError, match="smaller --batch-tokens"):
        LocalTeacher(open_model(str(tmp_path / "t"), device="cpu"), settings).load()


def _slowly_compiled(real):
    def backend(graph, inputs):
        time.sleep(0.3)
        return graph.forward

    return lambda function, **options: real(function, **options | {"backend": backend})


def test_the_command_tells_them(tmp_path):
    corpus, teacher = write_corpus(tmp_path / "c.jsonl"), save_teacher(tmp_path / "t")
    command = ["score", "--teacher", teacher, "--corpus", corpus, "--device", "cpu", "--context"]

    def run(*more):
        return CliRunner().invoke(app, [str(word) for word in (*command, "64", *more)]).stdout

    told = json.loads(run("--out", tmp_path / "a", "--json"))
    assert set(told["times"]) == {"start", "loading", "compiling", "scoring", "finishing"}
    assert told["times"]["scoring"] == told["seconds"]
    assert "seconds: start " in run("--out", tmp_path / "b")
    assert "seconds: start " not in run("--out", tmp_path / "b")  # nothing was scored


def test_imports_belong_to_the_start():
    times = Times(start=1, loading=2, compiling=3, scoring=4, finishing=5)
    assert times.with_earlier(2.5).start == 3.5 and times.with_earlier(2.5).total == 17.5
    assert str(times).endswith(
        "start 1.0, loading 2.0, compiling 3.0, scoring 4.0, finishing 5.0; 15.0 in all"
    )


@pytest.mark.parametrize("given", [None, "torch", "user"])
def test_compiled_graphs_are_kept_in_the_user_s_cache(tmp_path, monkeypatch, given):
    monkeypatch.setenv("VOCAGNOLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, default_cache_dir() if given == "torch" else str(tmp_path))
    if given is None:
        monkeypatch.delenv(VARIABLE)
    runtime.prepare_compiler()
    own = str(tmp_path / "cache" / "compiled")
    assert os.environ[VARIABLE] == (str(tmp_path) if given == "user" else own)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VOCAGNOLM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv(VARIABLE, default_cache_dir())
    runtime.prepare_compiler()
    assert os.environ[VARIABLE] == default_cache_dir()
