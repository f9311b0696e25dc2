"""A small laboratory for faults, and how many of them are tried: a few in every test run, all of
them with VOCAGNOLM_FAULTS=long (make faults)."""

import json
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from training_kit import recipe_dict

from vocagnolm.base import files

LONG = os.environ.get("VOCAGNOLM_FAULTS") == "long"
SEED = int(os.environ.get("VOCAGNOLM_FAULTS_SEED", "0"))
Thing = TypeVar("Thing")


def some(things: Iterable[Thing], n: int) -> list[Thing]:
    """n of them drawn by seed, or all in a long run."""
    listed = list(things)
    if LONG or len(listed) <= n:
        return listed
    places = sorted(random.Random(SEED).sample(range(len(listed)), n))
    return [listed[place] for place in places]


def examples(n: int) -> int:
    """How many of its examples hypothesis tries: a quarter of them, or all in a long run."""
    return n if LONG else n // 4


def tiny_tree(lab: Path, folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe of three steps with a checkpoint after each."""
    # given, it is not measured in every run
    sections["student"] = {"bits_per_byte": 8.0} | sections.get("student", {})
    sections["train"] = {"tokens": 3 * 4 * 32, "batch_blocks": 4} | sections.get("train", {})
    sections["run"] = {"folder": str(folder), "save_every": 1} | sections.get("run", {})
    return recipe_dict(lab, **sections)


def copy_of(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def write_recipe(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


def flip_bit(path: Path, share: float = 0.5) -> None:
    """One bit, at a share of the file's length."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    path.write_bytes(content)


Work = Callable[[], object]


def in_child(work: Work) -> int:
    """Run `work` in a forked process; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def was_killed(child: int, seconds: float = 120.0) -> bool:
    """Waits for the child's end; one that does not come to it is an error, not a hang, and one that
    crashed by itself was not killed."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
            assert not crashed, "the child crashed: does it use threads of its parent?"
            killed = os.WIFSIGNALED(status)
            assert killed or os.WEXITSTATUS(status) == 0, "the child failed by itself"
            return killed
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"the child did not end within {seconds:.0f} s")
        time.sleep(0.005)


def write_points(work: Work) -> list[str]:
    """Every step of writing that `work` passes: `synced model.safetensors`."""
    points: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "reached", lambda point, path: points.append(f"{point} {path.name}"))
        work()
    return points


def kill_at(number: int, work: Work) -> None:
    """Run `work` in a process of its own that dies at its `number`-th step of writing."""

    def dying() -> None:
        passed = 0

        def reached(point: str, path: object) -> None:
            nonlocal passed
            passed += 1
            if passed == number:
                os.kill(os.getpid(), signal.SIGKILL)

        files.reached = reached
        work()

    assert was_killed(in_child(dying)), f"step {number} was not reached"
