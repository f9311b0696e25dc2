"""The few collectives a selection needs, or none of them outside torch.distributed."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """A process group, or one process on its own."""

    size: int = 1
    rank: int = 0
    group: "dist.ProcessGroup | None" = None

    @classmethod
    def of(cls, group: "dist.ProcessGroup | None" = None) -> "Ranks":
        """The given group, the default one, or a single process."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_world_size(group), dist.get_rank(group), group)

    def sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, "SUM")

    def max(self, value: Tensor) -> Tensor:
        return self._reduce(value, "MAX")

    def gather(self, value: Tensor) -> Tensor:
        """[size, *value.shape]; every rank gives the same shape."""
        if self.size == 1:
            return value[None]
        parts = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(parts, value.contiguous(), group=self.group)
        return torch.stack(parts)

    def _reduce(self, value: Tensor, operation: str) -> Tensor:
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value, op=getattr(dist.ReduceOp, operation), group=self.group)
        return value
