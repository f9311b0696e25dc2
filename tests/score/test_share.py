"""Shares: machines that know nothing of each other make the store of one process."""

import dataclasses
import itertools
import json
import os
import signal
import time

import pytest
from faults_kit import flip_bit, in_child, kill_at, some, was_killed, write_points
from score.teacher_kit import TEACHERS, save_teacher, store_bytes, write_corpus
from training_kit import run_processes
from typer.testing import CliRunner

from vocagnolm.base.files import folder_lock
from vocagnolm.cli import app
from vocagnolm.errors import BusyError, StoreError, UsageError
from vocagnolm.score import Share, score_corpus
from vocagnolm.store import LossStore, verify_store
from vocagnolm.store import writer as store_writer
from vocagnolm.store.format import shard_name
from vocagnolm.store.writer import store_lock

ArithmeticTeacher, SETTINGS = TEACHERS["alternatives"]


@pytest.fixture
def lab(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")  # five shards
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "whole", settings=SETTINGS)
    return corpus, tmp_path / "s", store_bytes(tmp_path / "whole")


def score(corpus, out, share=None, teacher=None):
    share = None if share is None else Share.parse(share)
    return score_corpus(teacher or ArithmeticTeacher(), corpus, out, settings=SETTINGS, share=share)


class Slow(ArithmeticTeacher):
    def nll(self, documents, on_tokens=None):
        time.sleep(0.05)
        return super().nll(documents, on_tokens)


class Dying(ArithmeticTeacher):
    """Is killed once its first shard is written and its second claimed; `died` is there then."""

    def __init__(self, out, died, after=0):
        super().__init__()
        self.first, self.died, self.calls = out / shard_name(after), died, 0

    def nll(self, documents, on_tokens=None):
        self.calls += 1
        while self.calls == 2:
            if self.first.exists():
                self.died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().nll(documents, on_tokens)


@pytest.mark.parametrize("order", itertools.permutations(["1/3", "2/3", "3/3"]))
def test_the_last_share_completes_the_store_in_any_order(lab, order):
    corpus, out, whole = lab
    for done, share in enumerate(order, start=1):
        summary = score(corpus, out, share)
        assert summary.store["complete"] == (done == 3)
        assert summary.missing_shares == sorted(order[done:])
        if done < 3:
            with pytest.raises(StoreError, match="not complete"):
                LossStore.open(out)
    assert store_bytes(out) == whole


@pytest.mark.parametrize("shares", [3, 7])
def test_processes_side_by_side_make_the_store_of_one(lab, shares):
    corpus, out, whole = lab
    names = [f"{number}/{shares}" for number in range(1, shares + 1)]
    children = [in_child(lambda name=name: score(corpus, out, name, Slow())) for name in names]
    assert not any(was_killed(child) for child in children)
    assert store_bytes(out) == whole


def test_several_processes_on_the_same_share_do_no_harm(lab):
    corpus, out, whole = lab
    names = ["1/2", "1/2", "2/2", "2/2", "1/2"]
    children = [in_child(lambda name=name: score(corpus, out, name, Slow())) for name in names]
    assert not any(was_killed(child) for child in children)
    assert store_bytes(out) == whole


def test_shares_are_of_all_shards_however_many_are_done(lab):
    corpus, out, whole = lab
    score(corpus, out, "2/3")  # shards 1 and 4: what is left is 0, 2, 3
    summary = score(corpus, out, "1/2")  # shards 0, 2, 4
    assert summary.scored_shards == 2 and summary.found_shards == 1
    assert summary.missing_shards == [3] and summary.missing_shares == ["2/2"]
    assert score(corpus, out, "2/2").store["complete"]
    assert store_bytes(out) == whole


def test_a_share_killed_at_any_step_of_writing_is_run_again(lab, tmp_path):
    corpus, _, whole = lab

    def last(out):
        score(corpus, out, "1/2")
        return lambda: score(corpus, out, "2/2")

    steps = write_points(last(tmp_path / "all"))
    assert store_bytes(tmp_path / "all") == whole
    for number in some(range(1, len(steps) + 1), 12):
        out = tmp_path / f"killed-{number}"
        run = last(out)
        kill_at(number, run)
        assert run().store["complete"]
        assert store_bytes(out) == whole, f"killed at {steps[number - 1]}"


def test_a_share_killed_while_others_work(lab):
    corpus, out, whole = lab
    died = out.with_name("died")

    class Working(ArithmeticTeacher):
        """At its first shard until the other one dies."""

        def nll(self, documents, on_tokens=None):
            while not died.exists():
                time.sleep(0.01)
            return super().nll(documents, on_tokens)

    victim = in_child(lambda: score(corpus, out, "1/2", Dying(out, died)))
    other = in_child(lambda: score(corpus, out, "2/2", Working()))
    assert was_killed(victim) and not was_killed(other)
    assert score(corpus, out, "1/2").store["complete"]
    assert store_bytes(out) == whole


def test_claims_of_a_share_that_died_wait_until_it_is_started_again(lab):
    """Also those of other shares' shards, which it had claimed to help."""
    corpus, out, whole = lab
    died = out.with_name("died")
    assert was_killed(in_child(lambda: score(corpus, out, "1/3", Dying(out, died))))
    assert (out / "claims" / "000003").exists() and not (out / shard_name(3)).exists()
    summary = score(corpus, out, "2/3")  # the third has not begun, and is left alone
    assert summary.scored_shards == 2 and summary.missing_shards == [2, 3]
    assert summary.missing_shares == ["1/3", "3/3"]

    def helping():
        """Share 3 makes its own shard, and is killed with one that it takes from share 1."""
        (out / "claims" / "000003").unlink()
        score(corpus, out, "3/3", Dying(out, died, after=2))

    assert was_killed(in_child(helping))
    assert (out / "claims" / "000003").read_bytes().startswith(b"3/3 ")
    assert not score(corpus, out, "2/3").store["complete"]
    assert score(corpus, out, "3/3").store["complete"]
    assert store_bytes(out) == whole


def score_as_rank(corpus, out, settings):
    """Rank 1 waits with its first shard until the other has taken its second."""

    class Waiting(ArithmeticTeacher):
        def nll(self, documents, on_tokens=None):
            while os.environ["RANK"] == "1" and not (out / shard_name(3)).exists():
                time.sleep(0.01)
            return super().nll(documents, on_tokens)

    summary = score_corpus(Waiting(), corpus, out, settings=settings)
    assert summary.store["complete"]
    assert summary.scored_shards == {"0": 4, "1": 1}[os.environ["RANK"]]


def test_a_rank_that_is_done_takes_the_shards_of_one_that_is_slow(lab):
    corpus, out, whole = lab
    run_processes(score_as_rank, 2, corpus, out, SETTINGS)
    assert store_bytes(out) == whole


def test_without_a_share_the_rest_is_scored_by_one(lab):
    corpus, out, whole = lab
    score(corpus, out, "2/3")
    summary = score(corpus, out)
    assert summary.scored_shards == 3 and summary.found_shards == 2
    assert store_bytes(out) == whole


def test_on_a_complete_store_a_share_mends_its_own_shards(lab):
    corpus, out, whole = lab
    score(corpus, out)
    (out / shard_name(4)).unlink()
    assert score(corpus, out, "2/2").missing_shares == ["1/2"]
    assert score(corpus, out, "1/2").scored_shards == 1
    for number in (1, 2):
        flip_bit(out / shard_name(number))
    with pytest.raises(StoreError, match=r"000001.*checksum. Run the shares 2/2 again"):
        score(corpus, out, "1/2")
    assert len(verify_store(out)) == 1
    assert score(corpus, out, "2/2").scored_shards == 1
    again = score(corpus, out, "2/2")
    assert again.scored_shards == 0 and again.store["complete"]
    assert store_bytes(out) == whole


def test_a_damaged_shard_of_another_share_is_named(lab):
    corpus, out, whole = lab
    score(corpus, out, "1/2")
    (out / shard_name(2)).write_bytes((out / shard_name(2)).read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"000002.* is damaged.* Run the shares 1/2 again"):
        score(corpus, out, "2/2")
    assert score(corpus, out, "1/2").store["complete"]
    assert store_bytes(out) == whole


def test_one_run_for_all_and_shares_keep_out_of_each_other_s_way(lab, monkeypatch):
    corpus, out, whole = lab
    monkeypatch.setattr(store_writer, "_FINISHING_SECONDS", 0.3)
    with store_lock(out), pytest.raises(BusyError, match=r"--share I/N"):
        score(corpus, out, "1/2")
    with store_lock(out, shared=True):
        with pytest.raises(BusyError, match="another process"):
            score(corpus, out)
        score(corpus, out, "1/2")
        last = score(corpus, out, "2/2")  # the holder may still be writing: not completed
        assert not last.store["complete"] and last.missing_shards == []
    assert score(corpus, out, "2/2").store["complete"]
    assert store_bytes(out) == whole


def test_a_share_waits_for_one_that_writes_the_manifest(tmp_path):
    def hold():
        with folder_lock(tmp_path, ""):
            (tmp_path / "held").touch()
            time.sleep(0.5)

    child = in_child(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.005)
    with (
        folder_lock(tmp_path, "", shared=True, patience=30),
        folder_lock(tmp_path, "", shared=True),
        pytest.raises(BusyError),
        folder_lock(tmp_path, ""),
    ):
        pass
    assert not was_killed(child)
    with folder_lock(tmp_path, ""):
        pass
    assert not (tmp_path / ".lock").exists()


def test_of_two_gpus_on_one_shard_the_first_counts(lab):
    """Their bytes may differ: shard and record must be of one of them."""
    corpus, out, _ = lab

    class Gpu(ArithmeticTeacher):
        def __init__(self, name, shift, before=lambda: None):
            self.device_name, self.shift, self.before = name, shift, before

        def nll(self, documents, on_tokens=None):
            self.before()
            found = super().nll(documents, on_tokens)
            return [dataclasses.replace(one, nll=one.nll + self.shift) for one in found]

    def overtaken():
        second.before = lambda: None
        score(corpus, out, "1/2", Gpu("first", 0.0))

    second = Gpu("second", 0.25, overtaken)
    score(corpus, out, "1/2", second)
    assert score(corpus, out, "2/2", Gpu("first", 0.0)).store["devices"] == {"first": 5}
    assert verify_store(out) == []


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "1", "a/b", "1/3/2", "-1/3", ""])
def test_a_share_that_is_none(text):
    with pytest.raises(UsageError, match="--share"):
        Share.parse(text)


def test_the_command_says_what_is_missing(tmp_path):
    teacher = save_teacher(tmp_path / "t")
    corpus = write_corpus(tmp_path / "c.jsonl")
    command = ["score", "--teacher", teacher, "--corpus", corpus, "--out", tmp_path / "s"]
    command += ["--device", "cpu", "--context", 64, "--shard-documents", 5, "--threads", 1]

    def run(*more):
        result = CliRunner().invoke(app, [str(part) for part in (*command, *more)])
        assert result.exit_code == 0, result.output
        return result.stdout

    def inspected(*more):
        return CliRunner().invoke(app, ["store", "inspect", str(tmp_path / "s"), *more]).stdout

    told = run("--share", "2/4")
    assert "1 of 5, 20.0%; missing: 0, 2-4\n" in inspected()
    assert json.loads(inspected("--json"))["missing_shards"] == [[0, 0], [2, 4]]
    assert "1 shards scored" in told
    assert "NOT COMPLETE: 4 of 5 shards are missing (the first is 0)" in told
    assert "of the shares 1/4, 3/4, 4/4" in told and "without --share" in told
    told = json.loads(run("--share", "1/4", "--json"))
    assert told["missing_shards"] == [2, 3] and told["missing_shares"] == ["3/4", "4/4"]
    assert "NOT COMPLETE" not in run()
    assert "5 of 5\n" in inspected()
    assert verify_store(tmp_path / "s") == []
