"""A job makes a folder shard by shard, and this is the one way in which processes divide it.

Every process claims a shard by creating a small file in the folder, which only one of them can do:
first the shards of its own share, in order, then what nobody has claimed of the other shares that
have begun. A claim stays when its process dies, and the same command, started again, takes it over.
Of two processes that make the same shard the first commit counts, so nothing is lost but time.
"""

import contextlib
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vocagnolm.errors import UsageError
from vocagnolm.storage import storage_of

if TYPE_CHECKING:
    from vocagnolm.base.ranks import Ranks
    from vocagnolm.jobs.cluster import Connection

CLAIM_FOLDER = "claims"

# ---- shares ----


@dataclass(frozen=True)
class Share:
    """Share `number` of `count`, from 1, of all shards and not only of the missing ones: these
    change while others work, so a shard could be left to nobody."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"--share {self}: the work is split into at least one share, 1/1.")
        if not 1 <= self.number <= self.count:
            raise UsageError(
                f"--share {self}: the shares of {self.count} are 1/{self.count} to "
                f"{self.count}/{self.count}."
            )

    @classmethod
    def parse(cls, text: str) -> "Share":
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None:
            raise UsageError(f"--share {text}: expected I/N, for example 3/8, the third of eight.")
        return cls(int(match[1]), int(match[2]))

    def shards(self, shard_count: int) -> range:
        return range(self.number - 1, shard_count, self.count)

    def part(self, rank: int, ranks: int) -> "Share":
        """The share of one of `ranks` processes that divide this share."""
        return Share(self.number + rank * self.count, self.count * ranks)

    def of_shards(self, numbers: Collection[int]) -> list[str]:
        """The shares to which these shards belong."""
        return [f"{n + 1}/{self.count}" for n in sorted({m % self.count for m in numbers})]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


# ---- what a job is ----


@dataclass(frozen=True)
class Amount:
    """How much of a shard was made, or of several."""

    documents: float = 0
    tokens: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Whatever else a job counts, by name."""

    def __add__(self, other: "Amount") -> "Amount":
        names = {**self.counts, **other.counts}
        counts = {n: self.counts.get(n, 0) + other.counts.get(n, 0) for n in names}
        return Amount(self.documents + other.documents, self.tokens + other.tokens, counts)


class ShardWorker(Protocol):
    """Makes shards in one process, each in three steps, which `Pipeline` calls for different shards
    at a time."""

    def load(self) -> None:
        """Prepare for the first `start`; `read` is called meanwhile."""
        ...

    def read(self, number: int) -> Any:
        """Do what can be done beside the shard before, and return the shard for the next steps."""
        ...

    def start(self, shard: Any, on_part: Callable[[Amount], None]) -> Amount:
        """Make the shard, and return its amount. The last of its work may still be queued on a
        device. `on_part` is called after every batch with what is made so far of this shard."""
        ...

    def finish(self, shard: Any) -> Amount:
        """Wait for what is queued, and write the shard. Returns what is only known now."""
        ...


@dataclass(frozen=True)
class Begun:
    """What the leading process tells the others, once it has begun the folder."""

    missing: list[int]
    """The shards that are to be made, of those that `Job.begin` was asked for."""
    damage: dict[int, str]
    """What was wrong with those that are there and damaged."""
    state: Any = None
    """Whatever else the job needs in every process."""


class Job(Protocol):
    """A folder that is made shard by shard. The bytes of a shard depend on its number alone."""

    @property
    def out(self) -> str | Path: ...
    @property
    def shard_count(self) -> int: ...
    @property
    def worker_needs(self) -> dict[str, float]:
        """What a worker takes of a cluster: `{"GPU": 1, "CPU": 1}`."""
        ...

    def documents_in(self, number: int) -> range:
        """The documents of a shard, by their numbers in the whole."""
        ...

    def lock(self, *, shared: bool) -> AbstractContextManager[None]:
        """Keep others away from the folder; or, `shared`, those that have not a share of it."""
        ...

    def begin(self, numbers: Sequence[int]) -> Begun:
        """Begin or resume the folder, and say which of these shards are missing. If there are any,
        write down the plan from which other processes work."""
        ...

    def join(self, begun: Begun) -> None:
        """Take over what the leading process has begun."""
        ...

    def absent(self) -> list[int]:
        """List the shards that have no file now."""
        ...

    def remote_worker(self) -> Callable[[], ShardWorker]:
        """A function that can be pickled and opens a worker on another machine, from the plan."""
        ...

    def finish(self, share: Share, worked: bool) -> tuple[list[int], Any]:
        """Complete the folder if no shard is missing. Returns the missing shards, and what the
        folder is now. `worked`: shards were missing when this run began."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a process is with the shards that it has to make, or a whole cluster."""

    documents: float
    total_documents: int
    tokens: int
    counts: Mapping[str, int] = field(default_factory=dict)
    shards: int = 0
    total_shards: int = 0
    workers: int | None = None
    """On a cluster: the number of workers that are alive."""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Done:
    """What was made in one run, by this process or by a cluster."""

    amount: Amount = Amount()
    seconds: float = 0.0
    """Counted from the end of `ShardWorker.load`."""
    shards: int = 0
    notes: tuple[str, ...] = ()
    """What happened to the workers of a cluster."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    begun: Begun
    done: Done
    left: list[int]
    """Shards that are missing now, left to other shares."""
    result: Any
    """What `Job.finish` says of the folder."""
    started: float
    """When the work began, by `time.perf_counter`."""
    ended: float


# ---- a run ----


def run_job(
    job: Job,
    worker: ShardWorker | None,
    share: Share,
    ranks: "Ranks",
    cluster: "Connection | None" = None,
    *,
    as_one: bool = False,
    on_progress: OnProgress | None = None,
) -> Outcome:
    """Make the shards of `share` that are missing, then help other shares, and complete the folder
    if nothing is missing in the end.

    worker: makes shards in this process; None where those of a `cluster` do.
    ranks: the processes of torchrun that divide this share among them.
    as_one: all ranks work on every shard together.
    """
    alone = share.count == 1
    parts = [share] if as_one else [share.part(rank, ranks.count) for rank in range(ranks.count)]
    claims = None if alone and len(parts) == 1 else Claims(job, share)
    with contextlib.ExitStack() as held:

        def begin() -> Begun:
            held.enter_context(job.lock(shared=not alone))
            begun = job.begin(share.shards(job.shard_count))
            if claims is not None and (begun.missing or job.absent()):
                claims.begin(begun.missing, parts)
            return begun

        begun: Begun = ranks.decide(begin)
        job.join(begun)
        started = time.perf_counter()
        if cluster is not None:
            done = cluster.run(job, begun.missing, on_progress)
        else:
            assert worker is not None
            ours = parts[0 if as_one else ranks.rank].shards(job.shard_count)
            numbers = [number for number in begun.missing if number in ours]
            following = _Order(numbers, claims).following
            if as_one:
                following = partial(ranks.decide, following)
            done = _work(job, worker, numbers, following, on_progress)
        ended = time.perf_counter()
        ranks.wait_for_all()

        def end() -> tuple[list[int], Any]:
            if not alone:  # of two that end together one must get the folder for itself
                held.close()
            return job.finish(share, bool(begun.missing))

        left, result = ranks.decide(end)
    return Outcome(begun, done, left, result, started, ended)


def _work(
    job: Job,
    worker: ShardWorker,
    numbers: Sequence[int],
    following: Callable[[], tuple[int, int | None] | None],
    on_progress: OnProgress | None,
) -> Done:
    """Make one shard after the other in this process. `numbers` are its own, which progress is
    measured by; the real number may become larger, because it helps others."""
    if (claimed := following()) is None:
        return Done()
    total = sum(len(job.documents_in(number)) for number in numbers)
    made, shards = Amount(), 0

    def note(part: Amount) -> None:
        if on_progress is not None:
            now = made + part
            most = max(total, int(now.documents))
            on_progress(Progress(now.documents, most, now.tokens, now.counts))

    with contextlib.closing(Pipeline(worker)) as pipeline:
        pipeline.read_ahead(claimed[0])
        worker.load()
        started = time.perf_counter()
        while claimed is not None:
            made += pipeline.make(*claimed, note)
            shards += 1
            note(Amount())
            claimed = following()
        made += pipeline.settle()
        note(Amount())
    return Done(made, time.perf_counter() - started, shards)


class Pipeline:
    """Makes one shard after the other. Meanwhile one thread reads the next, and another finishes
    the last, so that a process has at most two shards that are begun and not written."""

    def __init__(self, worker: ShardWorker):
        self._worker = worker
        self._reader = ThreadPoolExecutor(max_workers=1)
        self._ahead: tuple[int, Future[Any]] | None = None
        self._finisher = ThreadPoolExecutor(max_workers=1)
        self._behind: Future[Amount] | None = None

    def read_ahead(self, number: int) -> None:
        """Read a shard meanwhile: probably the next one."""
        self._ahead = number, self._reader.submit(self._worker.read, number)

    def make(
        self, number: int, ahead: int | None, on_part: Callable[[Amount], None] = lambda _: None
    ) -> Amount:
        """Make shard `number`, and read `ahead` meanwhile. The end of its work goes on beside the
        next call; `settle` waits for it. What only the end of the shard before has shown is part of
        the amount."""
        shard = self._take(number)
        if ahead is not None:
            self.read_ahead(ahead)
        amount = self._worker.start(shard, on_part)
        amount += self.settle()
        self._behind = self._finisher.submit(self._worker.finish, shard)
        return amount

    def settle(self) -> Amount:
        """Wait until all that was begun is written; its error, if it had one, is raised here."""
        behind, self._behind = self._behind, None
        return Amount() if behind is None else behind.result()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._finisher.shutdown()

    def _take(self, number: int) -> Any:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == number:
            return ahead[1].result()
        if ahead is not None:
            ahead[1].exception()  # two at once would read through one open file
        return self._worker.read(number)


# ---- who makes which shard ----


class Claims:
    """What the processes that make one folder know of each other: files in the folder, which
    hold the share whose process has claimed a shard."""

    def __init__(self, job: Job, share: Share):
        self._job, self._share = job, share
        self._storage = storage_of(job.out)

    def begin(self, missing: Sequence[int], parts: Sequence[Share]) -> None:
        """Mark these parts of our share as begun. Take over the shards that are `missing` of it,
        and what an earlier process of our share has claimed of others: it may be dead, and if it is
        not, the first commit counts."""
        there = self._storage.files(CLAIM_FOLDER)
        claimed = [n for n in {*missing, *self._job.absent()} if _claim(n) in there]
        ours = [n for n in claimed if n in missing or self._holder(n) == str(self._share)]
        self._storage.remove(*map(_claim, ours))
        for part in parts:
            self._storage.put(_marker(part), b"")

    def take(self, number: int) -> bool:
        """Whether this process is the first that claims a shard."""
        content = f"{self._share} {secrets.token_hex(8)}"  # a bucket tells two claims by it
        return self._storage.create(_claim(number), content.encode())

    def unclaimed(self) -> list[int]:
        """What nobody has claimed of the shares that have begun, from the end, which they reach
        last. A share that has not begun is left alone: its process may come on another day."""
        there = self._storage.files(CLAIM_FOLDER)
        markers = [_MARKER.fullmatch(name) for name in there]
        begun = [Share(int(match[1]), int(match[2])) for match in markers if match]
        open_to_us = {n for share in begun for n in share.shards(self._job.shard_count)}
        absent = open_to_us.intersection(self._job.absent())
        return sorted((n for n in absent if _claim(n) not in there), reverse=True)

    def _holder(self, number: int) -> str:
        try:
            return bytes(self._storage.read(_claim(number))).decode().partition(" ")[0]
        except FileNotFoundError:  # taken over at this moment
            return ""


def _claim(number: int) -> str:
    return f"{CLAIM_FOLDER}/{number:06d}"


def _marker(share: Share) -> str:
    """Name of the file that marks a share as begun."""
    return f"{CLAIM_FOLDER}/share-{share.number}-of-{share.count}"


_MARKER = re.compile(rf"{CLAIM_FOLDER}/share-(\d+)-of-(\d+)")


class _Order:
    """The shards that this process makes: its own, then what nobody has claimed."""

    def __init__(self, numbers: list[int], claims: Claims | None):
        """`claims`: None where no other process makes this folder."""
        self._waiting, self._claims = deque(numbers), claims
        self._helps = claims is not None

    def following(self) -> tuple[int, int | None] | None:
        """The next shard, claimed, and the one that is probably next; None at the end."""
        while self._waiting or self._helps:
            if not self._waiting:
                assert self._claims is not None
                self._waiting, self._helps = deque(self._claims.unclaimed()), False
                continue
            number = self._waiting.popleft()
            if self._claims is None or self._claims.take(number):
                return number, self._waiting[0] if self._waiting else None
        return None
