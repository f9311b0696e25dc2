"""Checkpoints that are known to be whole.

A checkpoint is many files, and a kill may come between any two; a disk may also forget a bit. So a
marker with every file's size and checksum is written last, and only marked folders whose files
agree with it are resumed from. Only folders with a marker of ours are ever removed.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, set_seed

from vocagnolm.errors import TrainingError
from vocagnolm.files import as_write_error, file_digests, read_json, remove, sync_tree, write_json
from vocagnolm.train.parallel import (
    ShardWriter,
    clear,
    full_state_dict,
    has_parts,
    load_optimizer,
    load_weights,
    refuse_unsharded,
    shard_on_cpu,
    shard_within_machines,
)

MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)$")


@dataclass(frozen=True)
class Resumable:
    """Where a run can go on, and what could not be used."""

    path: Path | None
    step: int
    damaged: list[str]
    """`checkpoint-20: what is wrong`, newer ones that were passed over."""


def mark_complete(checkpoint: Path, step: int, world_size: int) -> None:
    """All files of `checkpoint-STEP` are there: say so, durably."""
    sync_tree(checkpoint)
    paths = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MARKER)
    files = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, file_digests(paths), strict=True)
    }
    write_json(checkpoint / MARKER, {"step": step, "world_size": world_size, "files": files})


def unmark(checkpoint: Path) -> None:
    """A damaged checkpoint is about to be written again: its old marker must not vouch for it."""
    (checkpoint / MARKER).unlink(missing_ok=True)


def damage(checkpoint: Path, *, read: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. `read`: also compare every byte."""
    try:
        files = read_json(checkpoint / MARKER, TrainingError, "", {"files": dict})["files"]
    except FileNotFoundError:
        return "it was never finished"
    except TrainingError as error:
        return str(error)
    for name, entry in files.items():
        size = entry["bytes"] if isinstance(entry, dict) else entry  # older markers: sizes alone
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is cut short or missing"
    checked = {name: entry for name, entry in files.items() if isinstance(entry, dict)}
    if read:
        digests = file_digests([checkpoint / name for name in checked])
        for (name, entry), digest in zip(checked.items(), digests, strict=True):
            if entry["sha256"] != digest:
                return f"{name} does not match its checksum"
    return None


def newest_complete(folder: str | Path, *, read: bool = True) -> Resumable:
    """The newest checkpoint that is whole. Those that were never finished are passed over without
    a word: a kill while one is written is no damage."""
    damaged: list[str] = []
    for step, path in sorted(_checkpoints(Path(folder)), reverse=True):
        wrong = damage(path, read=read)
        if wrong is None:
            return Resumable(path, step, damaged)
        if (path / MARKER).exists():
            damaged.append(f"{path.name}: {wrong}")
    return Resumable(None, 0, damaged)


def prune_checkpoints(folder: str | Path, keep: int) -> None:
    """Remove complete checkpoints but the newest `keep` (at least one)."""
    found = sorted(_checkpoints(Path(folder)))
    complete = [path for _, path in found if damage(path, read=False) is None]
    for path in complete[: -max(1, keep)]:
        remove(path / MARKER)  # first: a half-removed folder must not pass for complete
        shutil.rmtree(path)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = [(_NAME.match(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [(int(match.group(1)), path) for match, path in named if match]


# ---- checkpoints of the Trainer ----


_SCHEDULER = "scheduler.pt"


class CheckpointedTrainer(Trainer):
    def __init__(
        self, *, keep_checkpoints: int | None = None, within_machines: bool = False, **kwargs: Any
    ):
        """`keep_checkpoints`: the newest so many; None: all. `within_machines`: with FSDP, shard
        within each machine and keep their copies alike."""
        self.keep_checkpoints = keep_checkpoints
        self.within_machines = within_machines
        self._shards = ShardWriter()
        super().__init__(**kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        asked_for_fsdp = getattr(self.args, "fsdp_plugin_args", None) is not None
        if asked_for_fsdp and self.accelerator.distributed_type == DistributedType.MULTI_CPU:
            shard_on_cpu(self.accelerator, self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled and self.within_machines:
            shard_within_machines(self.accelerator)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        if _internal_call:  # of a checkpoint, which gets its parts
            return
        # the Trainer's own gathering leaves sharded tensors behind on a CPU
        model: Any = self.model
        state_dict = full_state_dict(model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state_dict)

    def gathered_weights(self) -> dict[str, Any] | None:
        """All weights where they are sharded, else None. All ranks must call it."""
        model: Any = self.model
        return full_state_dict(model) if self.is_fsdp_enabled else None

    def save_merged(self, folder: Path, state_dict: dict[str, Any] | None) -> None:
        """The trained student as an ordinary model folder, adapters merged."""
        model: Any = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        model.save_pretrained(folder, state_dict=state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        assert self.args.output_dir is not None
        step = self.state.global_step
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{step}"
        self.finish_saving()
        if self.args.should_save:
            unmark(checkpoint)
            clear(checkpoint)
        self._wait_for_all()  # nothing is written before that
        with as_write_error(f"the checkpoint of step {step}"):
            super()._save_checkpoint(model, trial)
            if self.is_fsdp_enabled:
                sharded: Any = self.model
                self._shards.begin(
                    checkpoint, sharded, self.optimizer, lambda: self._complete(checkpoint, step)
                )
                return
        self._wait_for_all()  # every rank has written its part
        self._complete(checkpoint, step)

    def _wait_for_all(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def _complete(self, checkpoint: Path, step: int) -> None:
        if not self.args.should_save:
            return
        mark_complete(checkpoint, step, self.args.world_size)
        if self.keep_checkpoints is not None:
            prune_checkpoints(checkpoint.parent, self.keep_checkpoints)

    def finish_saving(self) -> None:
        """Until the newest checkpoint is whole; a sharded one is written in the background."""
        self._shards.wait()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self.is_fsdp_enabled and has_parts(resume_from_checkpoint):
            sharded: Any = self.model
            load_weights(Path(resume_from_checkpoint), sharded)
            return
        if self.is_fsdp_enabled:
            refuse_unsharded(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (self.is_fsdp_enabled and has_parts(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        sharded: Any = self.model
        scheduler: Any = self.lr_scheduler
        load_optimizer(Path(checkpoint), sharded, self.optimizer)
        scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Where there were fewer processes, or another number of them and one now, a process finds
        no state of its own: it must not draw what it or another has drawn before."""
        if checkpoint is not None:
            drawn = self.args.seed + 1_000_003 * self.state.global_step
            set_seed((drawn + self.args.process_index) % 2**32)
        super()._load_rng_state(checkpoint)
