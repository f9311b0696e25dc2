"""Tasks that fail: the others go on, and the next start tries them again."""

import json
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vocagnolm.base.files import claim
from vocagnolm_studies.run import work
from vocagnolm_studies.tasks import Task


def home(folder: Path, broken: set[str]) -> SimpleNamespace:
    """Three tasks, the last of which needs the first; those in `broken` fail."""
    folder.mkdir(exist_ok=True)

    def act(name: str) -> None:
        if name in broken:
            raise RuntimeError(f"{name} ran out of memory")
        (folder / name).write_text("done")

    tasks = [
        Task(name, "run", folder / name, needs, partial(act, name))
        for name, needs in (("a", ()), ("b", ()), ("c", (folder / "a",)))
    ]
    return SimpleNamespace(folder=folder, tasks=lambda: tasks)


def quietly(line: str) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_task_that_fails_is_tried_once_a_start(folder: Path) -> None:
    broken = {"a"}
    first = work(home(folder, broken), say=quietly)
    assert (first.finished, first.failed, first.left) == (["b"], ["a"], ["a", "c"])
    assert "a ran out of memory" in (folder / "failed" / "a.txt").read_text()
    broken.clear()
    second = work(home(folder, broken), say=quietly)
    assert (second.finished, second.failed, second.left) == (["a", "c"], [], [])
    assert list((folder / "failed").iterdir()) == []


def test_a_failure_of_a_worker_beside_it_is_not_tried_again(folder: Path) -> None:
    """It began before the other one failed."""
    _, b, c = home(folder, set()).tasks()
    seen: list[str] = []

    def other_fails_meanwhile(line: str) -> None:
        seen.append(line)
        if line == "b: started":
            (folder / "failed" / "c.txt").write_text("failed there")

    (folder / "a").write_text("done")  # what c needs
    outcome = work(SimpleNamespace(folder=folder, tasks=lambda: [b, c]), say=other_fails_meanwhile)
    assert outcome.failed == ["c"] and not any(line.startswith("c:") for line in seen)


def out_of_memory_once(folder: Path, name: str, others: int) -> SimpleNamespace:
    """`name` finds no memory the first time; there are `others` beside it."""
    folder.mkdir(exist_ok=True)
    tries: list[str] = []

    def act(task: str) -> None:
        tries.append(task)
        if task == name and tries.count(name) == 1:
            raise torch.OutOfMemoryError("Tried to allocate 108.00 MiB.")
        (folder / task).write_text("done")

    names = [name, *(f"other{n}" for n in range(others))]
    tasks = [Task(task, "run", folder / task, (), partial(act, task)) for task in names]
    return SimpleNamespace(folder=folder, tasks=lambda: tasks, tries=tries)


def test_what_ran_out_of_memory_is_tried_again_when_another_task_is_done(folder: Path) -> None:
    lab = out_of_memory_once(folder, "large", others=2)
    outcome = work(lab, say=quietly)
    assert lab.tries == ["large", "other0", "large", "other1"]
    assert (outcome.failed, outcome.left) == ([], [])


def test_what_never_has_memory_ends(folder: Path) -> None:
    lab = out_of_memory_once(folder, "large", others=0)
    outcome = work(lab, say=quietly)
    assert lab.tries == ["large"] and outcome.failed == ["large"]


@pytest.mark.parametrize(
    ("left", "beside", "started"),
    [(900.0, 0, True), (400.0, 0, False), (900.0, 1, False), (1500.0, 1, True)],
)
def test_near_the_end_what_can_be_done_is_begun(
    folder: Path, left: float, beside: int, started: bool
) -> None:
    """Earlier runs took half an hour, three at a time: ten minutes of work each."""
    (folder / "times").mkdir(parents=True)
    for number in range(3):
        record = {"task": f"run{number}", "kind": "run-a", "start": 1000.0, "seconds": 1800.0}
        (folder / "times" / f"run{number}.json").write_text(json.dumps(record))
    names = ["b-s1", *(f"c-s{number}" for number in range(beside))]
    tasks = [
        Task(name, "run-b", folder / name, (), partial((folder / name).write_text, "done"))
        for name in names
    ]
    lab = SimpleNamespace(folder=folder, tasks=lambda: tasks)
    with ExitStack() as under_way:
        for name in names[1:]:
            assert under_way.enter_context(claim(folder / "claims" / f"{name}.lock"))
        work(lab, deadline=time.time() + left, wait=False, say=quietly)
    assert (folder / "b-s1").exists() == started
