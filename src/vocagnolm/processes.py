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
from torch import Tensor

from vocagnolm.errors import VocagnolmError

# Ranks wait for the slowest at the end; shards may differ by hours.
_TIMEOUT = datetime.timedelta(days=30)
# After an error, the leading process waits this long for the others: it may serve the store.
_ERROR_TIMEOUT = datetime.timedelta(seconds=10)
# torchrun's store takes no value over 8 MiB.
_PIECE_BYTES = 4 * 2**20


def world_size() -> int:
    """Of the processes that were started together, as the environment says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    count: int = 1
    team_size: int = 1
    """Processes that hold one model together."""
    group: "dist.ProcessGroup | None" = None
    """Whose processes these are; None: the default group's."""

    @classmethod
    def of(cls, group: "dist.ProcessGroup | None" = None) -> "Ranks":
        """The given group, the default one, or this process alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(group), dist.get_world_size(group), group=group)

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
            outcome = self._broadcast(outcome)
        result, failure = outcome
        if failure is not None:
            raise failure
        return result

    def decide_in_team(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the process that leads this team; all of the team get its result."""
        if self.team_size == 1:
            return work()
        carried = [work() if self.leads_team else None]
        dist.broadcast_object_list(carried, src=0)  # teams are groups of their own
        return carried[0]

    def _broadcast(self, message: Any) -> Any:
        """The leading process's message, in every process."""
        carried = [message]
        dist.broadcast_object_list(carried, src=0)
        return carried[0]

    def wait_for_all(self) -> None:
        if self.count > 1:
            dist.barrier()

    def sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, "SUM")

    def max(self, value: Tensor) -> Tensor:
        return self._reduce(value, "MAX")

    def gather(self, value: Tensor) -> Tensor:
        """[count, *value.shape]; every rank gives the same shape."""
        if self.count == 1:
            return value[None]
        parts = [torch.empty_like(value) for _ in range(self.count)]
        dist.all_gather(parts, value.contiguous(), group=self.group)
        return torch.stack(parts)

    def _reduce(self, value: Tensor, operation: str) -> Tensor:
        if self.count == 1:
            return value
        value = value.clone()
        dist.all_reduce(value, op=getattr(dist.ReduceOp, operation), group=self.group)
        return value


@dataclass(frozen=True)
class TeamRanks(Ranks):
    """Every `team_size` processes are a group of torch.distributed by themselves, because
    transformers splits a model over all processes of a group. Messages between teams go through
    the key-value store that torchrun serves."""

    store: Any = None
    _steps: Iterator[int] = field(default_factory=itertools.count)

    def _broadcast(self, message: Any) -> Any:
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
        self.store.wait([key], _TIMEOUT)
        return b"".join(self.store.get(f"{key} {n}") for n in range(int(self.store.get(key))))

    def wait_for_all(self) -> None:
        key = f"barrier {next(self._steps)}"
        if self.store.add(f"{key} reached", 1) == self.count:
            self.store.set(key, "all")
        self.store.wait([key], _TIMEOUT)

    def leave(self, timeout: datetime.timedelta) -> None:
        """The leading process leaves last: it may serve the store."""
        self.store.set(f"left {self.rank}", "")
        if self.leads:
            self.store.wait([f"left {rank}" for rank in range(self.count)], timeout)


@contextlib.contextmanager
def running_ranks() -> Iterator[Ranks]:
    """The processes that torchrun has started, as the environment says. A group that the caller
    has already made is used and left alone."""
    if world_size() == 1:
        yield Ranks()
        return
    _take_gpu()
    ours = not dist.is_initialized()
    if ours:
        # gloo: a few small messages, and it needs no GPU
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield Ranks.of()
    finally:
        if ours:
            dist.destroy_process_group()


@contextlib.contextmanager
def running_teams(choose: Callable[[int], int]) -> Iterator[Ranks]:
    """The same for models that several processes hold together. `choose` is called in the leading
    process: from the number of processes on its machine to the number that make a team."""
    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import rendezvous

    if world_size() == 1:
        yield Ranks(team_size=choose(1))
        return
    if dist.is_initialized():
        raise ValueError("teams are groups of their own: do not initialise torch.distributed")
    _take_gpu()
    store, rank, count = next(rendezvous("env://"))
    everyone = TeamRanks(rank, count, store=distributed_c10d.PrefixStore("vocagnolm", store))
    timeout = _ERROR_TIMEOUT
    try:
        size = everyone.decide(lambda: choose(int(os.environ.get("LOCAL_WORLD_SIZE", str(count)))))
        ranks = replace(everyone, team_size=size)
        if size > 1:
            meeting = distributed_c10d.PrefixStore(f"team {ranks.team}", store)
            join_team(rank % size, size, store=meeting)
        yield ranks
        timeout = _TIMEOUT
    finally:
        with contextlib.suppress(dist.DistError):
            everyone.leave(timeout)
        if dist.is_initialized():
            dist.destroy_process_group()


def join_team(rank: int, size: int, **meeting: Any) -> None:
    """Make a group of the processes that hold a model together. `meeting`: where they find each
    other, as torch.distributed takes it."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=_TIMEOUT, **meeting)


def _take_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
