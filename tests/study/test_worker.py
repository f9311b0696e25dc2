"""Tasks that fail: the others go on, and the next start tries them again."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from vocagnolm.study.task import Task
from vocagnolm.study.worker import work


def laboratory(folder: Path, broken: set[str]) -> SimpleNamespace:
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
    first = work(laboratory(folder, broken), say=quietly)
    assert (first.finished, first.failed, first.left) == (["b"], ["a"], ["a", "c"])
    assert "a ran out of memory" in (folder / "failed" / "a.txt").read_text()
    broken.clear()
    second = work(laboratory(folder, broken), say=quietly)
    assert (second.finished, second.failed, second.left) == (["a", "c"], [], [])
    assert list((folder / "failed").iterdir()) == []


def test_a_failure_of_a_worker_beside_it_is_not_tried_again(folder: Path) -> None:
    """It began before the other one failed."""
    _, b, c = laboratory(folder, set()).tasks()
    seen: list[str] = []

    def other_fails_meanwhile(line: str) -> None:
        seen.append(line)
        if line == "b: started":
            (folder / "failed" / "c.txt").write_text("failed there")

    (folder / "a").write_text("done")  # what c needs
    outcome = work(SimpleNamespace(folder=folder, tasks=lambda: [b, c]), say=other_fails_meanwhile)
    assert outcome.failed == ["c"] and not any(line.startswith("c:") for line in seen)
