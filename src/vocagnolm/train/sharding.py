"""Turning FSDP2 on: over all processes (`fsdp2`), or within each machine, whose copies are then
kept alike (`hsdp`); on CPUs, and for a single process too."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch._C._distributed_c10d import HashStore

from vocagnolm.errors import TrainingError

_PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
_SWITCH = "ACCELERATE_USE_FSDP"  # accelerate sets it for good


@contextlib.contextmanager
def sharding_group(*, accelerator: bool) -> Iterator[None]:
    """What FSDP needs around it: a process that nobody has started together with others gets a
    group of its own, so that one process goes on with the shards of several. `accelerator`: the
    run is not on a CPU."""
    alone = "LOCAL_RANK" not in os.environ
    before = {name: os.environ.get(name) for name in (*_PLACE, _SWITCH)}
    if alone:
        os.environ.update(_PLACE)
        backend = None if accelerator else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if alone:
            dist.destroy_process_group()
            AcceleratorState._reset_state(reset_partial_state=True)


def shard_on_cpu(accelerator: Accelerator, plugin_args: dict[str, Any]) -> None:
    """accelerate turns FSDP on for accelerators only and falls back to DDP on CPUs without a
    word. torch shards on a CPU as well, through the very same code of accelerate: it has only to
    be told."""
    plugin = FullyShardedDataParallelPlugin(**plugin_args)
    shared = AcceleratorState._shared_state
    shared["distributed_type"] = DistributedType.FSDP
    shared["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2


def shard_within_machines(accelerator: Accelerator) -> None:
    """Give accelerate a mesh of machines x processes. One machine alone is plain FSDP."""
    processes = accelerator.num_processes
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    machines, rest = divmod(processes, here)
    if rest or (here == 1 and machines > 1):
        raise TrainingError(
            f"train.parallel: hsdp shards within a machine, over the same number of processes on "
            f"each, and at least two. Here are {here} of {processes} processes. Start as many on "
            "every machine (torchrun --nproc-per-node), or use fsdp2, which shards over all."
        )
    if machines == 1:
        return
    config = ParallelismConfig(dp_replicate_size=machines, dp_shard_size=here)
    shared = AcceleratorState._shared_state
    shared["parallelism_config"] = config
    shared["device_mesh"] = config.get_device_mesh(accelerator.device.type)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """All weights on the CPU of rank 0, gathered from the shards."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
