"""Reading, scoring and writing go on beside each other, and change no byte."""

import threading
import time

import numpy as np
import pytest
import torch
from score.teacher_kit import SETTINGS, ArithmeticTeacher, save_teacher, store_bytes, write_corpus
from torch.utils._python_dispatch import TorchDispatchMode

from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.errors import ScoreError
from vocagnolm.model import NllModel, load_causal_lm
from vocagnolm.score import score_corpus
from vocagnolm.store.writer import StoreWriter

SHARDS = 5  # 23 documents, 5 to a shard
STEP_SECONDS = 0.3


class Clock:
    """When each step began and ended; every one takes its time, asleep and not at work."""

    def __init__(self):
        self.spans = {"read": [], "score": [], "write": []}

    def take(self, name):
        began = time.monotonic()
        time.sleep(STEP_SECONDS)
        self.spans[name].append((began, time.monotonic()))

    def beside(self, one, other):
        """Whether the two shared some time."""
        (a, b), (c, d) = self.spans[one[0]][one[1]], self.spans[other[0]][other[1]]
        return max(a, c) < min(b, d)


class PatientTeacher(ArithmeticTeacher):
    """As on a device."""

    def __init__(self, clock):
        self.clock = clock

    def tokenize(self, texts):
        self.clock.take("read")
        return super().tokenize(texts)

    def nll(self, documents, on_tokens=None):
        self.clock.take("score")
        return super().nll(documents, on_tokens)


def test_tokenising_and_writing_cost_no_time_of_their_own(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "c.jsonl")
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "a", settings=SETTINGS)
    clock, real = Clock(), StoreWriter.write_shard

    def write_shard(self, shard):
        clock.take("write")
        real(self, shard)

    monkeypatch.setattr(StoreWriter, "write_shard", write_shard)
    score_corpus(PatientTeacher(clock), corpus, tmp_path / "b", settings=SETTINGS)
    assert {len(spans) for spans in clock.spans.values()} == {SHARDS}
    for shard in range(SHARDS - 1):
        assert clock.beside(("score", shard), ("read", shard + 1))
        assert clock.beside(("score", shard + 1), ("write", shard))
    assert store_bytes(tmp_path / "a") == store_bytes(tmp_path / "b")


class StartingTeacher(ArithmeticTeacher):
    """Of two steps, as on a device: the numbers come when it is through, and then it either has
    more to do or runs dry."""

    def __init__(self):
        self.started = 0
        self.ends = []
        self._changed = threading.Condition()

    def start(self, documents, on_tokens=None):
        with self._changed:
            self.started += 1
            number = self.started
            self._changed.notify_all()

        def losses():
            with self._changed:
                more = self._changed.wait_for(lambda: self.started > number, timeout=5)
            self.ends.append((number, "goes on" if more else "runs dry"))
            return ArithmeticTeacher.nll(self, documents, on_tokens)

        return losses


def test_the_next_shard_is_started_before_the_last_is_waited_for(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl")
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "a", settings=SETTINGS)
    teacher = StartingTeacher()
    score_corpus(teacher, corpus, tmp_path / "b", settings=SETTINGS)
    assert teacher.ends == [*((n, "goes on") for n in range(1, SHARDS)), (SHARDS, "runs dry")]
    assert store_bytes(tmp_path / "a") == store_bytes(tmp_path / "b")


class BrokenTeacher(ArithmeticTeacher):
    calls = 0

    def nll(self, documents, on_tokens=None):
        self.calls += 1
        found = super().nll(documents, on_tokens)
        return [np.full_like(n, np.inf) for n in found] if self.calls == 2 else found


@pytest.mark.parametrize("documents", [10, 23])
def test_an_error_of_a_shard_that_is_finished_aside_ends_the_run(tmp_path, documents):
    """Also of the last one, with nothing begun after it."""
    corpus = write_corpus(tmp_path / "c.jsonl", documents)
    teacher = BrokenTeacher()
    with pytest.raises(ScoreError, match="of shard 1 "):
        score_corpus(teacher, corpus, tmp_path / "s", settings=SETTINGS)
    assert teacher.calls <= 3
    assert {path.stem[-1] for path in (tmp_path / "s" / "shards").iterdir()} == {"0"}


class Waits(TorchDispatchMode):
    """Operations whose answer the host needs: it would wait for the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in ("is_nonzero", "_local_scalar", "aten.nonzero")):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", ["0", "3", "sampled:3"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_no_batch_asks_the_device_anything(tmp_path, kind, kept):
    model = load_causal_lm(save_teacher(tmp_path / "t", kind=kind), device="cpu")
    spec = AlternativesSpec.parse(kept)
    ours = NllModel(model, context=64, stride=16, batch_tokens=128, alternatives=spec)
    documents = [np.arange(n) % 416 for n in (40, 150, 7)]
    with Waits() as waits:
        scores = ours.start(documents)
    assert waits.found == []
    assert all(np.isfinite(one.nll[1:]).all() for one in scores())
    with Waits() as waits, torch.no_grad():  # the same model outside of ours: it does ask
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    assert waits.found
