"""Several processes: how they are launched, FSDP2 and HSDP, and checkpoints of which every process
writes its part."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from vocagnolm.errors import TrainingError, UsageError
from vocagnolm.files import as_write_error


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def refuse_lone_process() -> None:
    """Without a GPU `accelerate launch --num_processes 2` starts one process and says nothing: it
    leaves the others to MPI. What it sets for several gives it away."""
    launched = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ
    if launched and "RANK" not in os.environ:
        raise UsageError(
            "accelerate launch was asked for several processes and has started one: without GPUs "
            "it starts no others. Use torchrun: torchrun --nproc-per-node N -m vocagnolm train "
            "RECIPE"
        )


# ---- FSDP2 and HSDP ----


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


# ---- sharded checkpoints ----


PARTS = "parts"


def has_parts(checkpoint: str | Path) -> bool:
    return (Path(checkpoint) / PARTS).is_dir()


class ShardWriter:
    """Writes one checkpoint at a time in the background. All processes must call it alike."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def begin(
        self, checkpoint: Path, model: nn.Module, optimizer: Any, finish: Callable[[], None]
    ) -> None:
        """Returns as soon as weights and optimizer are copied. `finish` is called in each process
        once its part is on the disk; in the first, once all of them are."""
        self.wait()
        if self._group is None or self._thread is None:
            # the thread's messages must not mix with those of the training
            self._group = dist.new_group(backend="gloo")
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        writer = FileSystemWriter(checkpoint / PARTS)
        written: Any = async_save(state, storage_writer=writer, process_group=self._group)
        self._pending = self._thread.submit(_finish, written, finish, checkpoint.name)

    def wait(self) -> None:
        """Until the checkpoint that was begun is whole; its error, where there was one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _finish(written: "Future[Any]", finish: Callable[[], None], name: str) -> None:
    with as_write_error(name):
        try:
            written.result()
        except CheckpointException as error:
            reasons = [failure[0] for failure in error.failures.values()]
            raise OSError(str(reasons[0] if reasons else error)) from error
        finish()


def clear(checkpoint: Path) -> None:
    """Away with what a killed run of perhaps another number of processes has left of it."""
    shutil.rmtree(checkpoint / PARTS, ignore_errors=True)
    for path in checkpoint.glob("rng_state*.pth"):
        path.unlink()


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    state = {"model": get_model_state_dict(model)}
    load(state, storage_reader=FileSystemReader(checkpoint / PARTS))
    set_model_state_dict(model, state["model"])


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, storage_reader=FileSystemReader(checkpoint / PARTS))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def refuse_unsharded(checkpoint: str | Path) -> None:
    """A run of one process was once not sharded, whatever its recipe said."""
    if (Path(checkpoint) / "optimizer.pt").is_file():
        raise TrainingError(
            f"{checkpoint} was written by one process of an older version, without sharding. Set "
            "train.parallel to ddp in the run's recipe.yaml and in yours to go on with it."
        )
