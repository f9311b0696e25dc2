"""Hugging Face's Trainer with checkpoints that are known to be whole, sharded or not, and that any
number of processes can go on with."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, set_seed

from vocagnolm.files import as_write_error
from vocagnolm.train.checkpoint import mark_complete, prune_checkpoints, unmark
from vocagnolm.train.sharding import full_state_dict, shard_on_cpu, shard_within_machines
from vocagnolm.train.shards import (
    ShardWriter,
    clear,
    has_parts,
    load_optimizer,
    load_weights,
    refuse_unsharded,
)

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
