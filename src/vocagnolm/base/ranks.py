"""The processes of one run: alone, or started together by torchrun."""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocagnolm.errors import VocagnolmError

# Ranks wait for the slowest at the end; shards may differ by hours.
_TIMEOUT = datetime.timedelta(days=30)


def world_size() -> int:
    """The number of processes that were started together, as the environment says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    count: int = 1
    group: "dist.ProcessGroup | None" = None
    """Whose processes these are; None: the default group's."""

    @classmethod
    def of(cls, group: "dist.ProcessGroup | None" = None) -> "Ranks":
        """The processes of the given group, of the default one, or this process alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(group), dist.get_world_size(group), group=group)

    @property
    def leads(self) -> bool:
        return self.rank == 0

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
            carried = [outcome]
            dist.broadcast_object_list(carried, src=0)
            outcome = carried[0]
        result, failure = outcome
        if failure is not None:
            raise failure
        return result

    def wait_for_all(self) -> None:
        if self.count > 1:
            dist.barrier()

    def sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, "SUM")

    def max(self, value: Tensor) -> Tensor:
        return self._reduce(value, "MAX")

    def gather(self, value: Tensor) -> Tensor:
        """Every rank's value, [count, *value.shape]; all values have the same shape."""
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


@contextlib.contextmanager
def running_ranks(*, tensors: bool = False) -> Iterator[Ranks]:
    """The processes that torchrun has started, as the environment says. A group that the caller
    has already made is used and left alone. `tensors`: GPUs send each other tensors; otherwise the
    processes exchange a few small messages, which needs no GPU."""
    if world_size() == 1:
        yield Ranks()
        return
    _take_gpu()
    ours = not dist.is_initialized()
    if ours:
        backend = "cpu:gloo,cuda:nccl" if tensors and torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        yield Ranks.of()
    finally:
        if ours:
            dist.destroy_process_group()


def _take_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
