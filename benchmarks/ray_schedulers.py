"""Two ways to let Ray schedule shards, with a stand-in teacher that sleeps: Ray Data's
`map_batches` over a pool of actors, and plain actors of Ray Core that are awaited. No GPU.

    PYTHONPATH=src python benchmarks/ray_schedulers.py [--workers 2 8 32] [--faults]

`start` is the time until the first shard is done, `rate` the share of the ideal rate (workers
divided by the seconds of a shard) from then on. `--faults` kills one worker with its shard, stops
one with SIGSTOP, and gives a shard that kills every worker that takes it.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from record import STDOUT, add_json, keep

SHARD_SECONDS = 0.5
SHARDS_PER_WORKER = 12
LIMIT_SECONDS = 120.0


class Sleeper:
    """A teacher that needs a moment to load, and half a second a shard. Faults are files in a
    folder, and each is done once, or always for the shard that kills."""

    def __init__(self, folder: str):
        self._folder = Path(folder)
        time.sleep(0.5)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number in batch["item"]:
            self.work(int(number))
        return batch

    def work(self, number: int) -> int:
        for fault, sent in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            try:
                (self._folder / f"{fault}-{number}").unlink()
            except FileNotFoundError:
                continue
            os.kill(os.getpid(), sent)
        if (self._folder / f"poison-{number}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SHARD_SECONDS)
        with open(self._folder / "done.jsonl", "a") as file:
            file.write(json.dumps([number, time.time()]) + "\n")
        return number


def with_data(ray: Any, folder: str, shards: int, workers: int) -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    dataset = ray.data.from_items(list(range(shards)), override_num_blocks=shards)
    dataset.map_batches(
        Sleeper, fn_constructor_args=(folder,), batch_size=1, concurrency=workers, num_cpus=1
    ).materialize()


def with_core(ray: Any, folder: str, shards: int, workers: int) -> None:
    remote = ray.remote(max_restarts=-1, max_task_retries=0, num_cpus=1)(Sleeper)
    waiting, deaths = deque(range(shards)), dict.fromkeys(range(shards), 0)
    done: set[int] = set()
    held: dict[int, float] = {}

    async def worker() -> None:
        actor = remote.remote(folder)
        while len(done) < shards:
            if waiting:
                number = waiting.popleft()
            elif late := [
                n for n, since in held.items() if time.time() - since > 4 * SHARD_SECONDS
            ]:
                number = late[0]
            else:
                await asyncio.sleep(0.1)
                continue
            held[number] = time.time()
            try:
                await actor.work.remote(number)
                done.add(number)
            except ray.exceptions.RayError:
                deaths[number] += 1
                if deaths[number] < 3:
                    waiting.append(number)
                else:
                    done.add(number)  # set aside
                await asyncio.sleep(0.5)
            held.pop(number, None)

    async def run() -> None:
        tasks = [asyncio.create_task(worker()) for _ in range(workers)]
        while len(done) < shards:
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def measure(kind: str, workers: int, fault: str | None) -> dict[str, Any]:
    """In a process of its own: what hangs is killed."""
    folder = tempfile.mkdtemp()
    shards = SHARDS_PER_WORKER * workers
    if fault:
        (Path(folder) / f"{fault}-{workers + 1}").touch()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        import ray
        import ray.data

        ray.init(
            address="local",
            num_cpus=workers + 1,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        Path(folder, "began").write_text(str(time.time()))
        {"data": with_data, "core": with_core}[kind](ray, folder, shards, workers)
        Path(folder, "ended").write_text(str(time.time()))
        ray.shutdown()
        os._exit(0)
    deadline = time.monotonic() + LIMIT_SECONDS + SHARDS_PER_WORKER * SHARD_SECONDS + 2 * workers
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.1)
    began = float(Path(folder, "began").read_text())
    lines = Path(folder, "done.jsonl").read_text().splitlines()
    times = sorted(json.loads(line)[1] for line in lines)
    found = {
        "kind": kind,
        "workers": workers,
        "fault": fault,
        "start": round(times[0] - began, 1),
        "shards": f"{len({json.loads(line)[0] for line in lines})}/{shards}",
        "ended": Path(folder, "ended").exists(),
    }
    if found["ended"]:
        seconds = float(Path(folder, "ended").read_text()) - times[0]
        found["seconds"] = round(seconds, 1)
        found["rate"] = round((len(times) - 1) * SHARD_SECONDS / workers / seconds, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--faults", action="store_true")
    add_json(parser)
    given = parser.parse_args()
    rows = []
    for kind in ("core", "data"):
        for workers in given.workers:
            for fault in (None, "kill", "stop", "poison") if given.faults else (None,):
                rows.append(measure(kind, workers, fault))
                print(json.dumps(rows[-1]), flush=True)
    keep(None if given.json == STDOUT else given.json, "Ray actors and Ray Data", rows)


if __name__ == "__main__":
    main()
