"""The processes of one run: alone, or started together by torchrun."""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vocagnolm.errors import VocagnolmError

# Ranks wait for the slowest at the end; shards may differ by hours.
_PATIENCE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    rank: int
    count: int

    @classmethod
    def of_group(cls) -> "Ranks":
        """The group that is running, or this process alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def decide(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the leading process; all get its result, or its error."""
        outcome: list[Any] = [None]
        if self.leads:
            try:
                outcome = [(work(), None)]
            except VocagnolmError as error:
                if self.count == 1:
                    raise
                outcome = [(None, error)]
        if self.count > 1:
            dist.broadcast_object_list(outcome, src=0)
        result, failure = outcome[0]
        if failure is not None:
            raise failure
        return result

    def wait_for_all(self) -> None:
        if self.count > 1:
            dist.barrier()


@contextlib.contextmanager
def running_ranks() -> Iterator[Ranks]:
    """The ranks as torchrun tells them through the environment. A group that the caller has
    already made is used and left alone."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Ranks(0, 1)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    ours = not dist.is_initialized()
    if ours:
        # gloo: a few small messages, and it needs no GPU
        dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        if ours:
            dist.destroy_process_group()
