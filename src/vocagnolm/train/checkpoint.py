"""Checkpoints that are known to be complete.

A checkpoint is many files, and a kill may come between any two; a disk may also lose a bit. So a
marker with every file's size and checksum is written last, and only marked folders whose files
agree with it are resumed from. Only folders with a marker of ours are ever removed, and unfinished
ones of an earlier step than a complete one.

```
checkpoint-N/model.safetensors  optimizer.pt          the whole student, by the first process
checkpoint-N/parts/             instead of both: the shards, each by its process (FSDP)
checkpoint-N/scheduler.pt       rng_state[_RANK].pth  scaler.pt (fp16)
checkpoint-N/complete.json      the marker
```
"""

import pickle
import random
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
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
from transformers import set_seed
from transformers.trainer_pt_utils import safe_globals

from vocagnolm.base.files import (
    as_write_error,
    damaged_file,
    file_records,
    read_json,
    remove,
    sync_tree,
    write_json,
)
from vocagnolm.base.ranks import Ranks
from vocagnolm.errors import TrainingError
from vocagnolm.recipe import RunSection

MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)$")


@dataclass(frozen=True)
class Resumable:
    """The checkpoint from which a run can continue, and those that cannot be used."""

    path: Path | None
    step: int
    damaged: list[str]
    """Newer checkpoints that were passed over: `checkpoint-20: what is wrong`."""


def mark_complete(checkpoint: Path, step: int, world_size: int) -> None:
    """Write the marker that all files of a checkpoint are on the disk."""
    sync_tree(checkpoint)
    files = file_records(checkpoint, MARKER)
    about = {"step": step, "world_size": world_size, "files": files}
    write_json(checkpoint / MARKER, about, sealed=True)


def damage(checkpoint: Path, *, read: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. `read`: also compare checksums."""
    try:
        files = read_json(checkpoint / MARKER, TrainingError, "", {"files": dict})["files"]
    except FileNotFoundError:
        return "it was never finished"
    except TrainingError as error:
        return str(error)
    return damaged_file(checkpoint, files, read=read)


def newest_complete(folder: str | Path, *, read: bool = True) -> Resumable:
    """The newest checkpoint that is complete. Unfinished ones are passed over without a word: a
    kill while a checkpoint is written is no damage."""
    damaged: list[str] = []
    for step, path in sorted(_checkpoints(Path(folder)), reverse=True):
        wrong = damage(path, read=read)
        if wrong is None:
            return Resumable(path, step, damaged)
        if (path / MARKER).exists():
            damaged.append(f"{path.name}: {wrong}")
    return Resumable(None, 0, damaged)


def prune_checkpoints(folder: str | Path, keep: int) -> None:
    """Remove complete checkpoints but the newest `keep`, and unfinished ones before the last."""
    paths = [path for _, path in sorted(_checkpoints(Path(folder)))]
    complete = [path for path in paths if damage(path, read=False) is None]
    for path in complete[: -max(1, keep)]:
        remove(path / MARKER)  # first: a half-removed folder must not pass for complete
    for path in paths[: paths.index(complete[-1])] if complete else []:
        if not (path / MARKER).exists():
            shutil.rmtree(path)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = [(_NAME.match(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [(int(match.group(1)), path) for match, path in named if match]


# ---- what a checkpoint holds ----


PARTS = "parts"
_OPTIMIZER, _SCHEDULER, _SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"


@dataclass
class TrainingState:
    """The objects whose state changes from step to step."""

    model: Any
    """The student that is saved: a transformers or peft model, its weights perhaps sharded."""
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler

    def shards(self) -> dict[str, Any]:
        """The weights and optimizer moments that this process holds."""
        moments = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": get_model_state_dict(self.model), "optimizer": moments}


class Checkpoints:
    """Saves and loads the state of a run. All processes must make the same calls."""

    def __init__(self, run: RunSection, *, sharded: bool):
        assert run.folder is not None
        self.folder, self.sharded = Path(run.folder) / "checkpoints", sharded
        self.keep, self.seed = run.keep_checkpoints, run.seed
        self.ranks = Ranks.of()
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save(self, step: int, state: TrainingState) -> None:
        """Write a checkpoint. Shards are copied at once and written in the background, everything
        else before this returns."""
        self.wait()
        checkpoint = self.folder / f"checkpoint-{step}"
        with as_write_error(f"the checkpoint of step {step}"):
            if self.ranks.leads:
                _clear(checkpoint)
            self.ranks.wait_for_all()  # nothing is written before that
            _save_random_numbers(checkpoint, self.ranks)
            if self.ranks.leads:
                torch.save(state.scheduler.state_dict(), checkpoint / _SCHEDULER)
                if state.scaler.is_enabled():
                    torch.save(state.scaler.state_dict(), checkpoint / _SCALER)
            if self.sharded:
                self._save_shards(checkpoint, step, state)
                return
            if self.ranks.leads:
                # the names of the running model, which some architectures do not save under
                names = (
                    {} if hasattr(state.model, "peft_config") else {"save_original_format": False}
                )
                state.model.save_pretrained(checkpoint, **names)
                torch.save(state.optimizer.state_dict(), checkpoint / _OPTIMIZER)
        self.ranks.wait_for_all()  # every process has written its part
        self._complete(checkpoint, step)

    def _save_shards(self, checkpoint: Path, step: int, state: TrainingState) -> None:
        if self._group is None or self._thread is None:
            # the thread's messages must not mix with those of the training
            self._group = dist.new_group(backend="gloo")
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        writer = FileSystemWriter(checkpoint / PARTS)
        written = async_save(state.shards(), storage_writer=writer, process_group=self._group)
        self._pending = self._thread.submit(self._finish, written, checkpoint, step)

    def _finish(self, written: Any, checkpoint: Path, step: int) -> None:
        """Wait until this process has written its shards, and, in the first process, all others
        theirs; then complete the checkpoint."""
        with as_write_error(checkpoint.name):
            try:
                written.result()
            except CheckpointException as error:
                reasons = [failure[0] for failure in error.failures.values()]
                raise OSError(str(reasons[0] if reasons else error)) from error
            self._complete(checkpoint, step)

    def _complete(self, checkpoint: Path, step: int) -> None:
        if self.ranks.leads:
            mark_complete(checkpoint, step, self.ranks.count)
            prune_checkpoints(self.folder, self.keep)

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete; raises its error, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, checkpoint: Path, state: TrainingState, device: torch.device) -> None:
        if self.sharded:
            _load_shards(checkpoint, state)
        else:
            _load_weights(checkpoint, state.model)
            destination = device if self.ranks.count > 1 and device.type != "cpu" else "cpu"
            state.optimizer.load_state_dict(_load(checkpoint / _OPTIMIZER, destination))
        state.scheduler.load_state_dict(_load(checkpoint / _SCHEDULER))
        if (checkpoint / _SCALER).is_file():
            state.scaler.load_state_dict(_load(checkpoint / _SCALER))

    def load_random_numbers(self, checkpoint: Path, step: int) -> None:
        """Restore the state of the random numbers. A process that has none, because the number of
        processes has changed, is seeded so that it repeats no draw of its own or of others."""
        set_seed((self.seed + 1_000_003 * step + self.ranks.rank) % 2**32)
        path = checkpoint / _random_numbers(self.ranks)
        if not path.is_file():
            return
        with safe_globals():
            states = _load(path)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            cuda = states["cuda"]  # in 0.1.0 a list, with the state of every device
            here = cuda if isinstance(cuda, torch.Tensor) else cuda[torch.cuda.current_device()]
            torch.cuda.set_rng_state(here)


def _random_numbers(ranks: Ranks) -> str:
    return "rng_state.pth" if ranks.count == 1 else f"rng_state_{ranks.rank}.pth"


def _save_random_numbers(checkpoint: Path, ranks: Ranks) -> None:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    torch.save(states, checkpoint / _random_numbers(ranks))


def _clear(checkpoint: Path) -> None:
    """Remove what a killed run, perhaps with another number of processes, has left in a
    checkpoint's folder, and the marker of a damaged one, which must not vouch for what follows."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint / PARTS, ignore_errors=True)
    for path in checkpoint.glob("rng_state*.pth"):
        path.unlink()


def _load(path: Path, device: torch.device | str = "cpu") -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise TrainingError(
            f"{path} is not a valid checkpoint and was not loaded: it may contain foreign code. "
            f"Find out who wrote it, and remove its folder to continue from the previous "
            f"checkpoint."
        ) from None


def _load_weights(checkpoint: Path, model: Any) -> None:
    if hasattr(model, "peft_config"):
        model.load_adapter(str(checkpoint), model.active_adapters[0], is_trainable=True)
        return
    weights: dict[str, Any] = {}
    for path in checkpoint.glob("model*.safetensors"):
        weights |= load_file(path)
    _, unexpected = model.load_state_dict(weights, strict=False)  # tied ones are saved once
    if unexpected or not weights:
        raise TrainingError(
            f"{checkpoint} does not hold the weights of this student ({len(unexpected)} unknown "
            "names). It may be from an older version; continue with that version, or use --restart."
        )


def _load_shards(checkpoint: Path, state: TrainingState) -> None:
    if (checkpoint / _OPTIMIZER).is_file():  # 0.1.0 did not shard a run of one process
        raise TrainingError(
            f"{checkpoint} was written by one process of an older version, without sharding. Set "
            "train.parallel to ddp in the run's recipe.yaml and in yours to continue it."
        )
    shards = state.shards()
    load(shards, storage_reader=FileSystemReader(checkpoint / PARTS))
    set_model_state_dict(state.model, shards["model"])
    set_optimizer_state_dict(state.model, state.optimizer, shards["optimizer"])
