"""`vocagnolm study run`: do what is missing, then one table and one figure.

As many processes as you like take the tasks of a study one by one. One that makes no table:

    python -m vocagnolm_studies.run STUDY.yaml --folder FOLDER

A task is claimed by a lock that dies with its process, and it is done when its file is there: kill
any of them at any moment and start again. What failed is tried again by a worker that starts later;
what ran out of memory beside other tasks, as soon as one of these is done.
"""

import argparse
import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vocagnolm.base.files import claim, write_json, write_text
from vocagnolm.errors import MissingExtraError, StudyError
from vocagnolm_studies.design import load_study
from vocagnolm_studies.figures import draw
from vocagnolm_studies.table import markdown, study_table
from vocagnolm_studies.tasks import StudyTasks, Task, release_memory

_WAIT_SECONDS = 1.0
Say = Callable[[str], None]


def run_study(
    source: str | Path,
    folder: str | Path,
    *,
    materials: str | Path | None = None,
    overrides: Iterable[str] = (),
    only_table: bool = False,
    deadline: float | None = None,
    say: Say = print,
) -> tuple[dict[str, Any], str]:
    """The study's table as data and as markdown. Both are also written to `FOLDER/NAME.json` and
    `NAME.md`, and the figure to `NAME.svg`."""
    if materials is not None and not Path(materials).is_dir():
        raise StudyError(
            f"There is no folder {materials} (--materials). It holds the models and texts of the "
            "study: research/miniature-protocols.md says how it is filled."
        )
    study = load_study(source, overrides, materials=materials)
    home = StudyTasks(study, folder)
    if not only_table:
        outcome = work(home, deadline=deadline, say=say)
        for name in outcome.failed:
            report = home.folder / "failed" / f"{name}.txt"
            say(f"{name} failed: {report} says why. The same command tries it again.")
        _explain_waiting(home, outcome.left, outcome.failed, say)
    table = study_table(home)
    if not table["rows"]:
        raise StudyError(f"No run of '{study.name}' in {folder} is finished: there is no table.")
    text = markdown(table)
    out = home.folder
    write_json(out / f"{study.name}.json", table)
    write_text(out / f"{study.name}.md", text)
    try:
        draw(table, study.figure, out / f"{study.name}.svg")
    except (MissingExtraError, StudyError) as error:
        say(f"no figure: {error}")
    return table, text


def _explain_waiting(home: StudyTasks, left: list[str], failed: list[str], say: Say) -> None:
    """Files that nobody makes: the user has to bring them."""
    tasks = home.tasks()
    made = {task.done for task in tasks}
    for task in tasks:
        if task.name in left and task.name not in failed:
            missing = [path for path in task.needs if not path.exists() and path not in made]
            if missing:
                say(f"{task.name} waits for {', '.join(map(str, missing))}")


@dataclass(frozen=True)
class Outcome:
    finished: list[str]
    failed: list[str]
    left: list[str]
    """Tasks that are not done: out of time, or waiting for something that is not there."""


def work(
    home: StudyTasks,
    *,
    deadline: float | None = None,
    wait: bool = True,
    say: Say = print,
) -> Outcome:
    """Do tasks until none is left that can be done. `deadline` is a `time.time()` after which
    nothing should be under way: a task is not started if it is expected to take longer. `wait`:
    stay while other processes work on what is missing, or while files have yet to arrive (only with
    a deadline)."""
    folder = home.folder
    for name in ("claims", "failed", "times"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    tasks = home.tasks()
    finished: list[str] = []
    before = _failures(folder)

    def failed() -> set[str]:
        """Since this worker began, here or beside it, and not worth another try yet."""
        since = {name: t for name, t in _failures(folder).items() if before.get(name) != t}
        return {name for name, when in since.items() if not _has_room_since(folder, name, when)}

    while True:
        open_tasks = [task for task in tasks if not task.is_done]
        if not open_tasks:
            break
        broken = failed()
        to_do = [task for task in open_tasks if task.name not in broken]
        task = _take(to_do, folder, deadline, finished, say)
        if task is not None:
            continue
        claimed = any(_is_claimed(folder, task) for task in open_tasks)
        in_time = deadline is None or time.time() < deadline
        if not wait or not in_time or not (claimed or deadline is not None):
            break
        time.sleep(_WAIT_SECONDS)
    left = [task.name for task in tasks if not task.is_done]
    broken = failed()
    return Outcome(finished, [name for name in left if name in broken], left)


def _take(
    tasks: list[Task], folder: Path, deadline: float | None, finished: list[str], say: Say
) -> Task | None:
    """Do the first task that is ready and nobody has claimed."""
    seconds = _expected_seconds(folder, tasks) if deadline is not None else {}
    for task in tasks:
        if task.is_done or not task.is_ready:
            continue
        if deadline is not None and time.time() + seconds[task.kind] > deadline:
            continue
        with _claim(folder, task) as ours:
            if not ours or task.is_done:
                continue
            say(f"{task.name}: started")
            if _carry_out(task, folder, say):
                finished.append(task.name)
            else:
                release_memory()
            return task
    return None


def _carry_out(task: Task, folder: Path, say: Say) -> bool:
    """Whether it ended well; how it ended is on disk."""
    started = time.time()
    try:
        task.action()
    except Exception as error:  # one run that fails must not end the study
        report = "".join(traceback.format_exception(error))
        write_text(_failure(folder, task.name), report)
        say(f"{task.name}: failed: {error}")
        return False
    seconds = time.time() - started
    record = {"task": task.name, "kind": task.kind, "start": started, "seconds": seconds}
    write_json(folder / "times" / f"{task.name}.json", record)
    _failure(folder, task.name).unlink(missing_ok=True)
    say(f"{task.name}: done in {seconds:.1f} s")
    return True


def _failure(folder: Path, name: str) -> Path:
    return folder / "failed" / f"{name}.txt"


def _failures(folder: Path) -> dict[str, int]:
    """Task -> when it failed last."""
    times = {}
    for path in (folder / "failed").glob("*.txt"):
        with contextlib.suppress(OSError):  # done in the meantime
            times[path.stem] = path.stat().st_mtime_ns
    return times


def _has_room_since(folder: Path, name: str, when: int) -> bool:
    """Whether a task lacked memory at that time, and another one has ended since."""
    with contextlib.suppress(OSError):  # done in the meantime
        if "OutOfMemoryError" in _failure(folder, name).read_text(encoding="utf-8"):
            return any(p.stat().st_mtime_ns > when for p in (folder / "times").glob("*.json"))
    return False


def _expected_seconds(folder: Path, tasks: list[Task]) -> dict[str, float]:
    """What a task of each kind would take now, beside those under way; of a kind of run that is new
    here, what any run would. Tasks share the machine: one that took an hour beside two others is 20
    minutes of work. The least of its kind counts, since an idle machine makes nothing."""
    done: list[tuple[str, float, float]] = []
    for path in (folder / "times").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            done.append((record["kind"], record["start"], record["start"] + record["seconds"]))
    moments = sorted({moment for _, start, end in done for moment in (start, end)})
    shares = [  # of the machine, from one moment to the next
        (at, (to - at) / max(1, sum(start <= at < end for _, start, end in done)))
        for at, to in pairwise(moments)
    ]
    work: dict[str, float] = {}
    for kind, start, end in done:
        own = sum(share for at, share in shares if start <= at < end)
        work[kind] = min(own, work.get(kind, own))
    any_run = min((own for kind, own in work.items() if kind.startswith("run-")), default=0.0)
    under_way = sum(_is_claimed(folder, task) for task in tasks)
    return {
        task.kind: work.get(task.kind, any_run if task.kind.startswith("run-") else 0.0)
        * (under_way + 1)
        for task in tasks
    }


def _claim(folder: Path, task: Task) -> AbstractContextManager[bool]:
    return claim(folder / "claims" / f"{task.name}.lock")


def _is_claimed(folder: Path, task: Task) -> bool:
    with _claim(folder, task) as ours:
        return not ours


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vocagnolm_studies.run")
    parser.add_argument("study")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--materials")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--deadline", type=float, help="seconds since the epoch")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    began = time.time()

    def say(line: str) -> None:
        print(f"[{time.time() - began:7.1f}] {line}", flush=True)

    study = load_study(options.study, options.overrides, materials=options.materials)
    home = StudyTasks(study, options.folder)
    import vocagnolm.train.run  # noqa: F401  (seconds, better spent while files still arrive)

    outcome = work(home, deadline=options.deadline, say=say)
    say(f"end: {len(outcome.finished)} done here, left: {', '.join(outcome.left) or 'nothing'}")


if __name__ == "__main__":
    main()
