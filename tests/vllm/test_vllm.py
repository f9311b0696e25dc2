"""The client against a real vLLM: `make test-vllm`. A start takes a minute or more."""

import dataclasses
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from evaluation_kit import ROWS, make_model, write_rows
from score.server_kit import SERVER_SETTINGS, save_served_teacher, write_served_corpus
from score.teacher_kit import SETTINGS, write_corpus
from vllm_kit import MODEL, Vllm

from vocagnolm import LossStore
from vocagnolm.errors import ScoreError, StoreError, UsageError
from vocagnolm.evaluate import evaluate
from vocagnolm.score import Server, Share, score_corpus
from vocagnolm.store.format import shard_name

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("VOCAGNOLM_VLLM_PYTHON" not in os.environ, reason="`make test-vllm`"),
]


class Lab:
    def __init__(self, folder):
        self.folder = folder
        for name, seed in (("teacher", 0), ("other", 3)):
            (folder / name).mkdir()
            save_served_teacher(folder / name, seed=seed)
        self.corpus = write_served_corpus(folder / "corpus.jsonl")
        self.vllm = Vllm(folder)

    def score(self, out, corpus=None, **options):
        settings = options.pop("settings", SERVER_SETTINGS)
        server = options.pop("server", None) or Server(url=self.vllm.url, patience_seconds=600)
        given = {"settings": settings, "server": server} | options
        return score_corpus(self.folder / "teacher", corpus or self.corpus, out, **given)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    one = Lab(tmp_path_factory.mktemp("vllm"))
    try:
        one.vllm.start(one.folder / "teacher")
        yield one
    finally:
        one.vllm.kill()


def require_close(found, wanted, most):
    found, wanted = LossStore.open(found), LossStore.open(wanted)
    assert len(found) == len(wanted)
    for number in range(len(found)):
        (our_bytes, ours), (their_bytes, theirs) = found[number], wanted[number]
        assert np.array_equal(our_bytes, their_bytes)
        np.testing.assert_allclose(ours, theirs, atol=most)


def test_its_losses_are_those_of_the_local_teacher(lab, tmp_path):
    summary = lab.score(tmp_path / "s")
    assert summary.store["complete"] and summary.store["server"]["engine"] == "vllm"
    settings = dataclasses.replace(SETTINGS, shard_documents=SERVER_SETTINGS.shard_documents)
    score_corpus(lab.folder / "teacher", lab.corpus, tmp_path / "local", settings=settings)
    require_close(tmp_path / "s", tmp_path / "local", 0.01)  # float16 of a loss below 16
    assert lab.score(tmp_path / "s").scored_shards == 0


def test_alternatives_of_a_real_server(lab, tmp_path):
    score_corpus(
        lab.folder / "teacher",
        lab.corpus,
        tmp_path / "local",
        settings=dataclasses.replace(SETTINGS, alternatives=4),
    )
    settings = dataclasses.replace(SERVER_SETTINGS, alternatives=4)
    lab.score(tmp_path / "s", settings=settings)
    found, wanted = LossStore.open(tmp_path / "s"), LossStore.open(tmp_path / "local")
    for number in range(len(wanted)):
        ours, theirs = found.alternatives(number), wanted.alternatives(number)
        assert (ours.ids == theirs.ids).mean() > 0.98
        np.testing.assert_allclose(ours.probability, theirs.probability, rtol=0.02)
    with pytest.raises(ScoreError, match=r"Start the server with --max-logprobs 30"):
        lab.score(tmp_path / "z", settings=dataclasses.replace(SERVER_SETTINGS, alternatives=30))


def test_a_model_it_has_not_is_refused(lab, tmp_path):
    with pytest.raises(UsageError, match=f"among {MODEL}"):
        lab.score(tmp_path / "s", server=Server(url=lab.vllm.url, model="large"))


def test_slow_answers_are_waited_for(lab, tmp_path):
    stopped = threading.Event()

    def stop(_):
        if not stopped.is_set():
            stopped.set()
            lab.vllm.send(signal.SIGSTOP)
            threading.Timer(5, lab.vllm.send, [signal.SIGCONT]).start()

    began = time.monotonic()
    assert lab.score(tmp_path / "s", on_progress=stop).store["complete"]
    assert stopped.is_set() and time.monotonic() - began > 4


def test_killed_midway_and_started_again_it_loses_nothing(lab, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=40)
    settings = dataclasses.replace(SERVER_SETTINGS, shard_documents=5)
    lab.score(tmp_path / "whole", corpus, settings=settings)
    killed = threading.Event()

    def kill(_):
        if not killed.is_set() and (tmp_path / "s" / shard_name(1)).exists():
            killed.set()
            lab.vllm.kill()
            lab.vllm.start(lab.folder / "teacher", wait=False)

    summary = lab.score(tmp_path / "s", corpus, settings=settings, on_progress=kill)
    assert killed.is_set() and summary.store["complete"] and summary.scored_shards == 8
    require_close(tmp_path / "s", tmp_path / "whole", 0.01)


def test_another_model_under_the_same_name_cannot_go_on_with_a_store(lab, tmp_path):
    lab.score(tmp_path / "s", share=Share(1, 2))
    assert lab.score(tmp_path / "resumed", share=Share(1, 2)).missing_shards == [1]
    assert lab.score(tmp_path / "resumed").found_shards == 2
    lab.vllm.kill()
    lab.vllm.start(lab.folder / "other")
    with pytest.raises(StoreError, match=r"server.probe.measured: .* apart on the mean"):
        lab.score(tmp_path / "s")


def answers(out):
    files = (out / "evaluation/outputs").glob("*.jsonl")
    lines = {p.stem: p.read_text().splitlines() for p in files}
    return {name: [json.loads(line) for line in found] for name, found in lines.items()}


def test_evaluation_killed_midway_has_the_answers_of_the_local_model(lab, tmp_path):
    """All benchmarks, by generation and by likelihood; the model has a penalty of its own in
    generation_config.json, which a server would apply if it were not told."""
    folder = tmp_path / "model"
    folder.mkdir()
    make_model(folder, hidden_size=128, initializer_range=0.2)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "repetition_penalty": 1.5})
    )
    for name, rows in ROWS.items():
        write_rows(tmp_path / "benchmarks", name, rows)
    lab.vllm.kill()
    lab.vllm.start(folder, length=4096)
    killed = threading.Event()

    def kill(now):
        if not killed.is_set() and now.fresh >= 4:
            killed.set()
            lab.vllm.kill()
            lab.vllm.start(folder, length=4096, wait=False)

    asked = {"benchmarks": tmp_path / "benchmarks", "max_new_tokens": 12, "batch_size": 4}
    server = Server(url=lab.vllm.url, patience_seconds=600)
    for choices in ("generate", "likelihood"):
        here, there = tmp_path / f"{choices}-here", tmp_path / f"{choices}-there"
        evaluate(folder, device="cpu", out=here, choices=choices, **asked)
        evaluate(folder, server=server, out=there, choices=choices, on_progress=kill, **asked)
        assert answers(there) == answers(here)
    assert killed.is_set()
    text = write_corpus(tmp_path / "corpus.jsonl", documents=4)
    local = evaluate(folder, device="cpu", text=[text]).bits_per_byte
    assert evaluate(server=server, text=[text]).bits_per_byte == pytest.approx(local, rel=1e-3)
