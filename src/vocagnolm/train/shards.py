"""Checkpoints of a sharded run: every process writes its part, while training goes on.

The parts are torch's (`torch.distributed.checkpoint`): they know which piece of which tensor they
hold, so that any number of processes can read them. The weights are first copied to host memory,
then written by a thread; the marker comes last, when all processes have written theirs. A kill
before that leaves a folder without a marker, and the checkpoint before it counts.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
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

from vocagnolm.errors import TrainingError
from vocagnolm.files import as_write_error

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
