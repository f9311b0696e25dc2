"""However the work is divided, interrupted and resumed: the folder has the same bytes, and nothing
is asked twice."""

import dataclasses
import itertools
import json
import os
import random
import signal
import time

import pytest
from faults_kit import flip_bit, in_child, kill_at, some, was_killed, write_points
from training_kit import fresh_process, run_processes
from write.write_kit import (
    SETTINGS,
    PlayedWriter,
    folder_bytes,
    played_answer,
    rows_of,
    save_writer,
    write_prompts,
)

from vocagnolm.data.corpus import open_corpus
from vocagnolm.errors import CorpusError, StoreError, WriteError
from vocagnolm.score import Share, write_answers
from vocagnolm.store import LossStore, verify_store


@pytest.fixture
def lab(tmp_path):
    """Prompts of four shards, a folder for them, and the files that one run makes."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 14)
    write_answers(PlayedWriter(), prompts, tmp_path / "whole")
    return prompts, tmp_path / "out", folder_bytes(tmp_path / "whole")


def write(prompts, out, share=None, writer=None):
    share = None if share is None else Share.parse(share)
    return write_answers(writer or PlayedWriter(), prompts, out, share=share)


def test_killed_at_every_step_of_writing(lab, tmp_path):
    prompts, _, whole = lab
    steps = write_points(lambda: write(prompts, tmp_path / "again"))
    assert folder_bytes(tmp_path / "again") == whole and len(steps) > 60
    for number, step in some(enumerate(steps, start=1), 14):
        out = tmp_path / f"killed-{number}"
        kill_at(number, lambda out=out: write(prompts, out))
        if not (out / "manifest.json").exists():
            with pytest.raises(StoreError):
                LossStore.open(out)
        done = {int(path.name[:6]) for path in (out / "shards").glob("0*.safetensors")}
        writer = PlayedWriter()
        write(prompts, out, writer=writer)
        assert folder_bytes(out) == whole, f"killed at {step}"
        places = {f"prompts.jsonl:{n + 1}" for n in range(14) if n // 4 not in done}
        assert sorted(writer.asked) == sorted(places), "an answer that was there was asked again"


def test_killed_again_and_again_at_random_moments(tmp_path):
    """With a real model; every run gets a little further."""
    fresh_process()
    teacher = save_writer(tmp_path / "teacher")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 24)
    settings = dataclasses.replace(SETTINGS, max_new_tokens=12)

    def work(out):
        return write_answers(teacher, prompts, out, settings=settings)

    def dying(out, seconds):
        def run():
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its own processor time, on any machine
            work(out)

        return run

    work(tmp_path / "whole")
    whole = folder_bytes(tmp_path / "whole")
    started = time.process_time()
    work(tmp_path / "warm")
    longest = time.process_time() - started
    out, draw = tmp_path / "out", random.Random(0)
    kills = sum(
        was_killed(in_child(dying(out, share * longest)))
        for share in sorted(draw.random() ** 2 for _ in range(6))
    )
    assert kills
    work(out)
    assert folder_bytes(out) == whole and verify_store(out) == []


@pytest.mark.parametrize("order", itertools.permutations(["1/3", "2/3", "3/3"]))
def test_the_last_share_completes_the_folder_in_any_order(lab, order):
    prompts, out, whole = lab
    for done, share in enumerate(order, start=1):
        summary = write(prompts, out, share)
        assert summary.folder["complete"] == (done == 3)
        assert summary.missing_shares == sorted(order[done:])
        if done < 3:
            with pytest.raises(CorpusError, match="still being written"):
                open_corpus(out)
    assert folder_bytes(out) == whole


class Slow(PlayedWriter):
    def write(self, *given):
        time.sleep(0.05)
        return super().write(*given)


def test_processes_on_the_same_and_on_other_shares_do_no_harm(lab):
    prompts, out, whole = lab
    names = ["1/3", "1/3", "2/3", "3/3", "3/3"]
    children = [in_child(lambda name=name: write(prompts, out, name, Slow())) for name in names]
    assert not any(was_killed(child) for child in children)
    assert folder_bytes(out) == whole


def write_as_rank(prompts, out):
    summary = write_answers(Slow(), prompts, out)
    assert summary.folder["complete"] and summary.written_shards


def test_the_ranks_of_torchrun_make_the_folder_of_one(lab):
    prompts, out, whole = lab
    run_processes(write_as_rank, 2, prompts, out)
    assert folder_bytes(out) == whole


def test_of_two_teachers_that_write_other_answers_the_first_counts(lab):
    """As servers do. What the second wrote beside is removed; nothing is of both."""
    prompts, out, _ = lab

    class Other(PlayedWriter):
        def __init__(self, shift, before=lambda: None):
            super().__init__()
            self.shift, self.before = shift, before

        def write(self, reads, seeds, on_tokens=None):
            self.before()
            for number, answer, _ in super().write(reads, seeds):
                yield number, answer, played_answer(seeds[number][answer] + self.shift)

    def overtaken():
        second.before = lambda: None
        write(prompts, out, "1/2", Other(0))

    second = Other(1, overtaken)
    write(prompts, out, "1/2", second)
    write(prompts, out, "2/2", Other(0))
    assert verify_store(out) == []
    first = write(prompts, out.with_name("first"), writer=Other(0)).folder
    assert folder_bytes(out) == folder_bytes(out.with_name("first")) and first["complete"]


def test_what_is_damaged_is_found_and_written_again(lab):
    prompts, out, whole = lab
    write(prompts, out)
    names = [name for name in whole if name not in ("README.md", "manifest.json")]
    for name in names:
        for share in (0.02, 0.5, 0.99):
            flip_bit(out / name, share)
            problems = verify_store(out)
            assert problems and name in problems[0], (name, share)
            (out / name).write_bytes(whole[name])
        flip_bit(out / name)
        summary = write(prompts, out)
        assert folder_bytes(out) == whole, name
        assert len(summary.mended) == (name != "vocabulary.safetensors")
    flip_bit(out / "manifest.json")
    with pytest.raises(StoreError, match=r"manifest\.json is"):
        verify_store(out)
    write(prompts, out)
    assert folder_bytes(out) == whole
    lost = next(name for name in names if name.startswith("data/"))
    (out / lost).unlink()
    assert any(lost in problem for problem in verify_store(out))
    assert lost in write(prompts, out).mended[0] and folder_bytes(out) == whole
    (out / "data" / "000001-00000000.jsonl").write_text("{}\n")
    assert "000001-00000000.jsonl: not in the manifest" in verify_store(out)[0]
    write(prompts, out)
    assert folder_bytes(out) == whole


def test_a_full_disk_keeps_what_was_done(lab, monkeypatch):
    prompts, out, whole = lab
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 14:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr("vocagnolm.base.files.os.fsync", full)
    with pytest.raises(WriteError, match=r"No space left on device.*run the same command again"):
        write(prompts, out)
    monkeypatch.undo()
    assert write(prompts, out).found_shards > 0
    assert folder_bytes(out) == whole


def test_other_settings_prompts_or_teachers_are_refused_and_nothing_is_changed(lab, tmp_path):
    prompts, out, whole = lab
    write(prompts, out)

    class Changed(PlayedWriter):
        settings = dataclasses.replace(PlayedWriter.settings, samples=2)

    with pytest.raises(StoreError, match=r"writing.samples: the store has 3, this run has 2"):
        write(prompts, out, writer=Changed())
    other = write_prompts(tmp_path / "other.jsonl", 14, seed=5)
    with pytest.raises(StoreError, match=r"corpus\.fingerprint"):
        write(other, out)
    assert folder_bytes(out) == whole
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data").mkdir()
    (tmp_path / "mine" / "data" / "letters.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match=r"not empty and not a loss store \(it holds data\)"):
        write(prompts, tmp_path / "mine")


def test_nothing_is_asked_of_a_folder_that_is_complete(lab):
    prompts, out, _ = lab
    write(prompts, out)
    (out / "README.md").write_text("my own card")
    writer = PlayedWriter()
    summary = write(prompts, out, writer=writer)
    assert (summary.written_shards, summary.found_shards, writer.asked) == (0, 4, [])
    assert (out / "README.md").read_text() == "my own card"


def test_progress_counts_answers_that_finished_and_are_right(lab):
    prompts, out, _ = lab
    seen = []

    class Graded(PlayedWriter):
        settings = dataclasses.replace(PlayedWriter.settings, grade="mixed")

    write_answers(Graded(), prompts, out, answer_field="answer", on_progress=seen.append)
    last = seen[-1]
    assert last.documents == last.total_documents == 42 and last.tokens == 42
    kept = rows_of(out)
    assert last.counts == {
        "answers": 42,
        "finished": len(kept),
        "marked": len(kept),
        "right": sum(row["right"] for row in kept),
    }
    written = json.loads((out / "manifest.json").read_text())["written"]
    assert (written["marked_answers"], written["right_answers"]) == (
        last.counts["marked"],
        last.counts["right"],
    )
