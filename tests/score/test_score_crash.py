"""Killed at any moment and run again, a store comes out byte for byte the same."""

import dataclasses
import os
import random
import resource
import signal
import time

import pytest
from faults_kit import in_child, kill_at, some, was_killed, write_points
from score.teacher_kit import (
    SETTINGS,
    TEACHERS,
    ArithmeticTeacher,
    save_teacher,
    store_bytes,
    write_corpus,
)
from training_kit import fresh_process

from vocagnolm.base import files
from vocagnolm.errors import StoreError, WriteError
from vocagnolm.score import score_corpus
from vocagnolm.store import LossStore, verify_store


@pytest.mark.parametrize("version", TEACHERS)
def test_killed_at_every_step_of_writing(tmp_path, version):
    corpus = write_corpus(tmp_path / "c.jsonl", documents=13)
    teacher, settings = TEACHERS[version]

    def score(out):
        return lambda: score_corpus(teacher(), corpus, out, settings=settings)

    steps = write_points(score(tmp_path / "whole"))
    expected = store_bytes(tmp_path / "whole")
    assert len(steps) > 20
    for number, step in some(enumerate(steps, start=1), 10):
        out = tmp_path / f"killed-{number}"
        kill_at(number, score(out))
        if not (out / "manifest.json").exists():
            with pytest.raises(StoreError):
                LossStore.open(out)
        score(out)()
        assert store_bytes(out) == expected, f"killed at {step}"


def test_killed_again_and_again_at_random_moments(tmp_path):
    """With a real model; every run gets a little further."""
    fresh_process()
    teacher = save_teacher(tmp_path)
    corpus = write_corpus(tmp_path / "c.jsonl", documents=40)
    draw = random.Random(0)

    settings = dataclasses.replace(SETTINGS, alternatives="sampled:3")

    def work(out):
        return lambda: score_corpus(teacher, corpus, out, settings=settings)

    def dying(out, seconds):
        def run():
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its own processor time, on any machine
            work(out)()

        return run

    work(tmp_path / "whole")()
    expected = store_bytes(tmp_path / "whole")
    started = time.process_time()
    work(tmp_path / "warm")()
    longest = time.process_time() - started
    out = tmp_path / "out"
    kills = 0
    for share in sorted(draw.random() ** 2 for _ in range(8)):  # one that ends leaves no more to do
        kills += was_killed(in_child(dying(out, share * longest)))
    assert kills
    work(out)()
    assert store_bytes(out) == expected
    assert verify_store(out) == []


def test_a_full_disk_keeps_what_was_done(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "c.jsonl")
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "whole", settings=SETTINGS)
    out = tmp_path / "s"
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 8:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(WriteError, match=r"No space left on device.*run the same command again"):
        score_corpus(ArithmeticTeacher(), corpus, out, settings=SETTINGS)
    assert not list(out.rglob("*.tmp"))
    summary = score_corpus(ArithmeticTeacher(), corpus, out, settings=SETTINGS)
    assert summary.found_shards > 0
    assert store_bytes(out) == store_bytes(tmp_path / "whole")


def test_a_limit_on_the_size_of_files_is_a_message_not_a_broken_store(tmp_path):
    """The kernel's own refusal, in the middle of a write."""
    corpus = write_corpus(tmp_path / "c.jsonl")
    out = tmp_path / "s"

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
        try:
            score_corpus(ArithmeticTeacher(), corpus, out, settings=SETTINGS)
        except WriteError as error:
            (tmp_path / "message").write_text(str(error))

    assert not was_killed(in_child(work))
    assert "File too large" in (tmp_path / "message").read_text()
    assert not list(out.rglob("*.tmp"))
    score_corpus(ArithmeticTeacher(), corpus, out, settings=SETTINGS)
    assert verify_store(out) == []
