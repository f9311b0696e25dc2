"""One model over several GPUs of a machine, by the plan that transformers has for its
architecture: every process holds a part of each matrix, and all of them pass through it together.
"""

import importlib.util
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from vocagnolm.errors import ModelError, UsageError

# of a GPU's memory: the rest is for activations, logits and what torch itself takes
_ROOM_FOR_WEIGHTS = 0.85
_HEADS = ("num_attention_heads", "num_key_value_heads")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def loading_options(size: int) -> dict[str, Any]:
    """What `from_pretrained` is told, in each of the `size` processes of a group."""
    if importlib.util.find_spec("transformers.distributed.mixin") is None:
        raise ModelError(
            "--shard-teacher needs a newer transformers: pip install --upgrade transformers"
        )
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}


def possible_sizes(name: str, config: Any) -> list[int]:
    """Into how many parts a model can be split: whole attention heads to each."""
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise UsageError(
            f"--shard-teacher: transformers has no tensor-parallel plan for {name} "
            f"({text.model_type}), so it cannot be split over GPUs. Leave --shard-teacher out: one "
            "GPU must hold all of it."
        )
    heads = [value for key in _HEADS if isinstance(value := getattr(text, key, None), int)]
    common = math.gcd(*heads)
    return [size for size in range(1, common + 1) if common % size == 0]


def require_divisible(name: str, config: Any, size: int) -> None:
    possible = possible_sizes(name, config)
    if size in possible:
        return
    text = config.get_text_config()
    heads = ", ".join(f"{getattr(text, key)} {key}" for key in _HEADS if hasattr(text, key))
    raise UsageError(
        f"--shard-teacher {size}: the heads of {name} ({heads}) cannot be shared by {size} GPUs. "
        f"Use one of {', '.join(map(str, possible))}."
    )


def fewest_parts(name: str, config: Any, weight_bytes: int, memory_bytes: int) -> int:
    """As few GPUs of so much memory as hold the weights."""
    possible = possible_sizes(name, config)
    needed = weight_bytes / (memory_bytes * _ROOM_FOR_WEIGHTS)
    for size in possible:
        if size >= needed:
            return size
    raise UsageError(
        f"--shard-teacher auto: {name} has {weight_bytes / 2**30:,.0f} GiB of weights, which "
        f"{possible[-1]} GPUs of {memory_bytes / 2**30:,.0f} GiB do not hold, and it cannot be "
        "split into more parts. Use larger GPUs, or weights that are quantised."
    )


def loaded_bytes(files: tuple[Path, ...], dtype: torch.dtype) -> int:
    """What the weights of safetensors files take in memory, floating-point ones in `dtype`."""
    total = 0
    for path in files:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            tensors = json.loads(file.read(length))
        tensors.pop("__metadata__", None)
        for about in tensors.values():
            first, last = about["data_offsets"]
            width = _FLOATS.get(about["dtype"])
            total += (last - first) * dtype.itemsize // width if width else last - first
    return total


def held_here(model: PreTrainedModel, parameter: Any) -> Any:
    """This process's rows of a parameter of the head; all of it where the model is not split."""
    if _is_split(model) and isinstance(parameter, DTensor):
        return parameter.to_local()
    return parameter


def _is_split(model: PreTrainedModel) -> bool:
    # a DTensor may be FSDP's as well
    return (getattr(model, "tp_size", None) or 1) > 1


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of a head that this process holds, where several hold the model together."""

    first: int
    rows: int
    rows_each: int
    """Of every process but the last."""
    device: torch.device
    group: Any

    @classmethod
    def of(cls, model: PreTrainedModel) -> "VocabularyPart | None":
        head: Any = model.get_output_embeddings()
        weight = head.weight
        if not (_is_split(model) and isinstance(weight, DTensor)):
            return None
        if weight.placements != (Shard(0),):
            raise ValueError(f"a head that is split as {weight.placements} is not known")
        mesh = weight.device_mesh
        rows_each = -(-weight.shape[0] // mesh.size())
        here = weight.to_local()
        first = mesh.get_local_rank() * rows_each
        return cls(first, here.shape[0], rows_each, here.device, mesh.get_group())

    @property
    def columns(self) -> slice:
        """Of logits for the whole vocabulary."""
        return slice(self.first, self.first + self.rows)

    def local(self, labels_N: Tensor) -> Tensor:
        """Labels as rows of this part; those of others become any row."""
        return (labels_N - self.first).clamp(0, self.rows - 1)

    def combine(self, nll_N: Tensor, lse_N: Tensor, labels_N: Tensor) -> Tensor:
        """nll over the whole vocabulary, from each process's own over its rows."""
        own = torch.stack([nll_N, lse_N])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        nll_PN, lse_PN = torch.stack(parts, dim=1).unbind()
        owner_1N = (labels_N // self.rows_each)[None]
        beside_N = lse_PN.logsumexp(dim=0) - lse_PN.gather(0, owner_1N)[0]
        nll: Tensor = nll_PN.gather(0, owner_1N)[0] + beside_N
        return nll

    def all_agree(self, opinion: bool) -> bool:
        """Every process must go the same way, or they would wait for each other."""
        vote = torch.tensor(float(opinion), device=self.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self.group)
        return bool(vote > 0)
