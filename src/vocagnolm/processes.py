"""The processes of one run: alone, or started together by torchrun."""

import contextlib
import datetime
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from vocagnolm.errors import VocagnolmError

# Ranks wait for the slowest at the end; shards may differ by hours.
_PATIENCE = datetime.timedelta(days=30)
# Of the leading process, which may serve the store, with others that heard of an error.
_FAREWELL = datetime.timedelta(seconds=10)
# torchrun's store takes no value over 8 MiB.
_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Ranks:
    rank: int
    count: int
    team_size: int = 1
    """Processes that hold one model together."""

    @classmethod
    def of_group(cls) -> "Ranks":
        """The group that is running, or this process alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def team(self) -> int:
        return self.rank // self.team_size

    @property
    def teams(self) -> int:
        return self.count // self.team_size

    @property
    def leads_team(self) -> bool:
        return self.rank % self.team_size == 0

    def decide(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the leading process; all get its result, or its error."""
        outcome: Any = None
        if self.leads:
            try:
                outcome = (work(), None)
            except VocagnolmError as error:
                if self.count == 1:
                    raise
                outcome = (None, error)
        if self.count > 1:
            outcome = self._told(outcome)
        result, failure = outcome
        if failure is not None:
            raise failure
        return result

    def _told(self, message: Any) -> Any:
        """The leading process's message, to all."""
        carried = [message]
        dist.broadcast_object_list(carried, src=0)
        return carried[0]

    def wait_for_all(self) -> None:
        if self.count > 1:
            dist.barrier()


@dataclass(frozen=True)
class TeamRanks(Ranks):
    """Every `team_size` processes are a group of torch.distributed by themselves, because
    transformers splits a model over all processes of a group. What concerns all teams goes through
    the key-value store that torchrun serves."""

    store: Any = None
    _steps: Iterator[int] = field(default_factory=itertools.count)

    def _told(self, message: Any) -> Any:
        key = f"message {next(self._steps)}"
        if not self.leads:
            return pickle.loads(self._read(key))
        content = pickle.dumps(message)
        starts = range(0, len(content), _PIECE_BYTES)
        for number, start in enumerate(starts):
            self.store.set(f"{key} {number}", content[start : start + _PIECE_BYTES])
        self.store.set(key, str(len(starts)))
        return message

    def _read(self, key: str) -> bytes:
        self.store.wait([key], _PATIENCE)
        return b"".join(self.store.get(f"{key} {n}") for n in range(int(self.store.get(key))))

    def wait_for_all(self) -> None:
        key = f"barrier {next(self._steps)}"
        if self.store.add(f"{key} came", 1) == self.count:
            self.store.set(key, "all")
        self.store.wait([key], _PATIENCE)

    def part(self, patience: datetime.timedelta) -> None:
        """The leading process leaves last: it may serve the store."""
        self.store.set(f"gone {self.rank}", "")
        if self.leads:
            self.store.wait([f"gone {rank}" for rank in range(self.count)], patience)


@contextlib.contextmanager
def running_ranks() -> Iterator[Ranks]:
    """The ranks as torchrun tells them through the environment. A group that the caller has
    already made is used and left alone."""
    count = _started_together()
    if count == 1:
        yield Ranks(0, 1)
        return
    _take_gpu()
    ours = not dist.is_initialized()
    if ours:
        # gloo: a few small messages, and it needs no GPU
        dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        if ours:
            dist.destroy_process_group()


@contextlib.contextmanager
def running_teams(choose: Callable[[int], int]) -> Iterator[Ranks]:
    """The same for models that several processes hold together. `choose` is asked in the leading
    process how many make a team, and told how many there are on its machine."""
    count = _started_together()
    if count == 1:
        yield Ranks(0, 1, choose(1))
        return
    if dist.is_initialized():
        raise ValueError("teams are groups of their own: do not initialise torch.distributed")
    _take_gpu()
    store, rank, count = next(rendezvous("env://"))
    everyone = TeamRanks(rank, count, store=distributed_c10d.PrefixStore("vocagnolm", store))
    farewell = _FAREWELL
    try:
        size = everyone.decide(lambda: choose(int(os.environ.get("LOCAL_WORLD_SIZE", str(count)))))
        ranks = replace(everyone, team_size=size)
        if size > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=distributed_c10d.PrefixStore(f"team {ranks.team}", store),
                rank=rank % size,
                world_size=size,
                timeout=_PATIENCE,
            )
        yield ranks
        farewell = _PATIENCE
    finally:
        with contextlib.suppress(dist.DistError):
            everyone.part(farewell)
        if dist.is_initialized():
            dist.destroy_process_group()


def _started_together() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _take_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
