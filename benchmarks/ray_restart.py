"""How long a Ray cluster takes to get over a death: a worker's process, or a node. Two cores, no
GPU, about three minutes.

    PYTHONPATH=src python benchmarks/ray_restart.py [--rounds N]

A head and two nodes on this machine, one worker each, with a teacher so small that loading it is
starting Python and importing torch and transformers. `heard` is the time from the kill until the
call that was running fails in the driver, `answers` until a new process says hello, `ready` until
it has its teacher. A killed node loses its raylet and its worker together, and a new node is added
as soon as the driver has heard of it.
"""

import argparse
import json
import os
import pickle
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from record import STDOUT, add_json, keep, note_rounds
from shapes import tiny_model

from vocagnolm.jobs.cluster import ShardActor, import_ray
from vocagnolm.score import ScoreSettings
from vocagnolm.score.plan import CorpusSource, TeacherSource, describe, make_plan
from vocagnolm.score.work import open_worker

OBJECT_STORE_BYTES = 80 * 2**20


class Sleeper(ShardActor):
    def where(self) -> tuple[str, int]:
        """Its node and its process."""
        return import_ray().get_runtime_context().get_node_id(), os.getpid()

    def sleep(self) -> None:
        time.sleep(3600)


def planned(folder: Path) -> bytes:
    """What a worker is made from."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "a short text"}) + "\n", "utf-8")
    settings = ScoreSettings(device="cpu", threads=1)
    teacher = TeacherSource(tiny_model(folder / "teacher", 300, layers=2))
    source = CorpusSource.of(corpus)
    about = describe(teacher.open(settings), settings)
    plan = make_plan(
        about, source.open(), str(folder / "store"), teacher_source=teacher, corpus_source=source
    )
    return pickle.dumps(partial(open_worker, plan.out, plan.save()))


def until_ready(ray: Any, actor: Any, since: float) -> tuple[float, float]:
    ray.get(actor.hello.remote())
    answers = time.monotonic() - since
    ray.get(actor.load.remote())
    return answers, time.monotonic() - since


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    add_json(parser)
    given = parser.parse_args()
    ray = import_ray()
    from ray import cluster_utils

    made_of: Any = cluster_utils  # its types are partly missing
    with tempfile.TemporaryDirectory() as name:
        opened = planned(Path(name))
        small = {"object_store_memory": OBJECT_STORE_BYTES}
        head = {"num_cpus": 0, "include_dashboard": False, **small}
        cluster = made_of.Cluster(initialize_head=True, head_node_args=head)
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        made = ray.remote(num_cpus=1)(Sleeper)
        actors = [made.remote(opened) for _ in nodes]
        for actor in actors:
            until_ready(ray, actor, time.monotonic())
        times: dict[str, list[tuple[float, float, float]]] = {"worker": [], "node": []}
        for _ in range(given.rounds):
            for what in times:
                places = ray.get([actor.where.remote() for actor in actors])
                at, pid = next(
                    (at, pid) for at, (node, pid) in enumerate(places) if node == nodes[-1].node_id
                )
                sleeping = actors[at].sleep.remote()
                time.sleep(1.0)
                since = time.monotonic()
                if what == "node":
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                os.kill(pid, signal.SIGKILL)
                try:
                    ray.get(sleeping)
                except ray.exceptions.RayActorError:
                    heard = time.monotonic() - since
                if what == "node":
                    nodes.append(cluster.add_node(num_cpus=1, **small))
                actors[at] = made.remote(opened)
                times[what].append((heard, *until_ready(ray, actors[at], since)))
        ray.shutdown()
        cluster.shutdown()
    names = ("heard", "answers", "ready")
    rows = [
        {
            "killed": what,
            **{n: median(v) for n, v in zip(names, zip(*each, strict=True), strict=True)},
        }
        for what, each in times.items()
    ]
    note_rounds({what: [ready for *_, ready in each] for what, each in times.items()})
    keep(given.json, f"seconds after a death, medians of {given.rounds}", rows)
    for row in rows if given.json != STDOUT else ():
        print(row)


if __name__ == "__main__":
    main()
