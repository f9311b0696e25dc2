"""A table: command x {Ctrl-C, SIGTERM, kill -9, full disk, read-only folder} x step of writing.
What a command says last is compared with what lies on the disk, and the same command runs again, to
the same result."""

import errno
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
from faults.test_kills import digests
from faults_kit import LONG, SEED, some
from pipeline_kit import (
    MADE,
    PIPELINE,
    Ended,
    command,
    home_before,
    words_of,
)

from vocagnolm.base import files
from vocagnolm.train.checkpoint import newest_complete

FAULTS = ("ctrl-c", "SIGTERM", "kill -9", "full disk", "read-only")
SIGNALS = {"ctrl-c": signal.SIGINT, "SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}
ERRORS = {"full disk": errno.ENOSPC, "read-only": errno.EROFS}
# where the system itself may refuse; a rename needs no room
REFUSING = ("begin", "written", "begin removing", "begin moving")
# what differs between two runs: times, and paths in the recipe and the card
RESULTS = ("*.safetensors", "*.jsonl", "manifest.json", "settings.json", "results.json")
TIMED = ("metrics.jsonl", "run.json")


def failing(fault: str, at: int) -> None:
    """From its `at`-th step of writing on, the disk is full or read-only; or the signal comes."""
    passed = 0

    def reached(point: str, path: object) -> None:
        nonlocal passed
        passed += 1
        if fault in SIGNALS and passed == at:
            os.kill(os.getpid(), SIGNALS[fault])
        elif fault in ERRORS and passed >= at and point in REFUSING:
            raise OSError(ERRORS[fault], os.strerror(ERRORS[fault]), str(path))

    files.reached = reached


def results(folder: Path) -> dict[str, str]:
    found = {
        name: digest for pattern in RESULTS for name, digest in digests(folder, pattern).items()
    }
    return {
        name: digest
        for name, digest in found.items()
        if Path(name).name not in TIMED and "checkpoints" not in name
    }


def finished_units(folder: Path) -> dict[Path, tuple[int, int]]:
    """What a command may call finished, with what shows whether it was made anew."""
    patterns = ("shards/*.safetensors", "part-*.safetensors", "evaluation/outputs/gsm8k.jsonl")
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for pattern in patterns
        for path in folder.glob(pattern)
    }


def require_true(name: str, fault: str, ended: Ended, folder: Path) -> None:
    """The last words and the disk."""
    last = ended.said.strip().rpartition("\n")[2]
    where = (name, fault, ended)
    assert "Traceback" not in ended.said and "should not have" not in ended.said, where
    complete = newest_complete(folder / "checkpoints").step if name == "train" else None
    if ended.code == 0:  # nothing was left to stop
        return
    if fault == "kill -9":
        assert ended.code == -signal.SIGKILL, where
    elif fault == "SIGTERM" and ended.code == -signal.SIGTERM:
        assert name != "train" or complete is not None
    elif fault in SIGNALS:
        assert ended.code == 128 + SIGNALS[fault], where
        if stopped := re.search(r"stopped on request after step (\d+)", last):
            assert int(stopped[1]) == complete, where
        elif name == "train":
            named = re.search(r"the checkpoint of step (\d+)", last)
            assert (int(named[1]) if named else 0) == complete, where
            assert named or "has no checkpoint" in last or "no step was made" in last, where
        else:
            assert "is kept" in last and "same command" in last, where
    else:
        assert ended.code == 1 and os.strerror(ERRORS[fault]) in last, where
        said = {"full disk": "Free some space", "read-only": "may write to|its rights"}[fault]
        assert re.search(said, last), where


def cases() -> list[tuple[str, str]]:
    """All of the table in a long run, else three of its rows, each with another fault."""
    if LONG:
        return [(name, fault) for name in PIPELINE for fault in FAULTS]
    draw = random.Random(SEED)
    return [*zip(draw.sample(PIPELINE, 3), draw.sample(FAULTS, 3), strict=True)]


@pytest.mark.parametrize(("name", "fault"), cases())
def test_last_words_are_true_and_the_same_command_goes_on(material, whole, tmp_path, name, fault):
    steps = (whole.parent / f"{name}.steps").read_text().splitlines()
    numbers = [
        n
        for n, step in enumerate(steps, 1)
        if fault in SIGNALS or step.partition("\t")[0] in REFUSING
    ]
    for number in numbers if LONG else some(numbers, 1):
        home = tmp_path / f"{number}"
        words = words_of(name, material, home_before(name, whole, home))
        ended = command(words, tmp_path, lambda at=number: failing(fault, at))
        folder = home / MADE[name]
        require_true(name, fault, ended, folder)
        units = finished_units(folder)
        again = command(words, tmp_path)
        assert again.code == 0, (steps[number - 1], ended, again)
        assert results(folder) == results(whole / MADE[name]), (steps[number - 1], ended)
        kept = finished_units(folder)
        assert {path: kept.get(path) for path in units} == units, (steps[number - 1], ended)
        shutil.rmtree(home)
