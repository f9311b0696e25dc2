"""A thousand GPUs on paper: hours, wasted work, and requests a second at the bucket when machines
die, hang and come back, and the bucket fails one request in a thousand. A minute on one core.

    PYTHONPATH=src python benchmarks/cluster_simulation.py [--gpus 1000] [--tokens 15e9]

The queue is the one that a run uses (`ShardQueue`), on a simulated clock. A machine has eight GPUs
and dies on average once a day; a new one takes its place after some minutes, and each of its
workers loads the teacher again. A worker hangs now and then. Shards take a time that varies with
their documents. Every shard is one PUT of the shard and one of its record, each of which fails as
often as the bucket is away and is tried again.
"""

import argparse
import heapq
import itertools
import json
import random
from collections import Counter
from statistics import mean

from vocagnolm.score.work import ShardQueue

GPUS_PER_MACHINE = 8
TOKENS_PER_DOCUMENT = 1000.0
SHARD_BYTES_PER_TOKEN = 3.6
SPREAD = 0.25  # of the time of a shard, as a share of it
MACHINE_SECONDS = 24 * 3600.0  # between two deaths of a machine
REPLACED_SECONDS = 300.0
LOAD_SECONDS = 90.0
HANG_SHARE = 1e-5  # of shards whose worker hangs
RETRY_SECONDS = 1.0
TICK_SECONDS = 5.0  # an idle worker asks again


class Run:
    def __init__(self, given: argparse.Namespace, seed: int):
        self.given = given
        self.random = random.Random(seed)
        documents = given.tokens / TOKENS_PER_DOCUMENT
        self.shards = -(-int(documents) // given.shard_documents)
        self.shard_seconds = given.shard_documents * TOKENS_PER_DOCUMENT / given.rate
        self.now = 0.0
        self.queue = ShardQueue(range(self.shards), clock=lambda: self.now)
        self.events: list[tuple[float, int, str, int, int]] = []
        self._order = itertools.count()
        self.life = Counter[int]()
        """Of every worker how often it was started: what an earlier process had to do is void."""
        self.working: dict[int, tuple[int, float]] = {}
        self.seconds = {"wasted": 0.0, "loading": 0.0, "idle": 0.0}
        self.requests: list[float] = []
        self.deaths = 0

    def at(self, seconds: float, what: str, worker: int) -> None:
        event = (self.now + seconds, next(self._order), what, worker, self.life[worker])
        heapq.heappush(self.events, event)

    def go(self) -> dict[str, float]:
        for worker in range(self.given.gpus):
            self.at(LOAD_SECONDS, "idle", worker)
        for machine in range(self.given.gpus // GPUS_PER_MACHINE):
            self.at(self.random.expovariate(1 / MACHINE_SECONDS), "dies", -1 - machine)
        ticks = 0.0
        while self.queue.open:
            self.now, _, what, worker, life = heapq.heappop(self.events)
            if what == "dies":
                self.die(-1 - worker)
            elif life == self.life[worker]:
                getattr(self, what)(worker)
            if self.now > ticks:  # as the driver does
                ticks = self.now + 60.0
                for one in [*self.working]:
                    if self.queue.is_stuck(one):
                        self.restart(one, LOAD_SECONDS)
        busy = self.given.gpus * self.now
        per_second = Counter(int(second) for second in self.requests)
        sizes = self.given.shard_documents * TOKENS_PER_DOCUMENT * SHARD_BYTES_PER_TOKEN
        return {
            "hours": self.now / 3600,
            "ideal_hours": self.shards * self.shard_seconds / self.given.gpus / 3600,
            "machines_lost": self.deaths,
            "scored_twice_or_lost": self.seconds["wasted"] / busy,
            "loading": self.seconds["loading"] / busy,
            "idle": self.seconds["idle"] / busy,
            "requests_a_second": len(self.requests) / self.now,
            "most_requests_in_a_second": max(per_second.values()),
            "megabytes_a_second": self.shards * sizes / self.now / 1e6,
            "set_aside": len(self.queue.set_aside),
        }

    def idle(self, worker: int) -> None:
        claim = self.queue.claim(worker)
        if claim is None:
            self.seconds["idle"] += TICK_SECONDS
            self.at(TICK_SECONDS, "idle", worker)
            return
        self.working[worker] = claim[0], self.now
        if self.random.random() < HANG_SHARE:
            return  # nothing is heard of it again
        took = self.shard_seconds * self.random.lognormvariate(0.0, SPREAD)
        while True:  # shard and record
            self.requests += [self.now + took, self.now + took]
            if self.random.random() < self.given.availability**2:
                break
            took += RETRY_SECONDS
        self.at(took, "done", worker)

    def done(self, worker: int) -> None:
        number, began = self.working.pop(worker)
        if not self.queue.finished(worker, number):
            self.seconds["wasted"] += self.now - began
        self.idle(worker)

    def die(self, machine: int) -> None:
        self.deaths += 1
        first = machine * GPUS_PER_MACHINE
        for worker in range(first, first + GPUS_PER_MACHINE):
            self.restart(worker, REPLACED_SECONDS + LOAD_SECONDS)
        self.at(self.random.expovariate(1 / MACHINE_SECONDS), "dies", -1 - machine)

    def restart(self, worker: int, seconds: float) -> None:
        if worker in self.working:
            self.seconds["wasted"] += self.now - self.working.pop(worker)[1]
        self.queue.give_back(worker, "its machine died")
        self.life[worker] += 1
        self.seconds["loading"] += seconds
        self.at(seconds, "idle", worker)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--tokens", type=float, default=15e9)
    parser.add_argument("--rate", type=float, default=30_000.0, help="Tokens a second of a GPU.")
    parser.add_argument("--shard-documents", type=int, default=1024)
    parser.add_argument("--availability", type=float, default=0.999)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found = [Run(given, seed).go() for seed in range(given.rounds)]
    print(json.dumps({name: round(mean(one[name] for one in found), 4) for name in found[0]}))


if __name__ == "__main__":
    main()
