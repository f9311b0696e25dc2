"""`GuidedTrainer`: Hugging Face's Trainer with the guided objective as its loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.errors import TrainingError
from vocagnolm.objective import (
    IGNORE_INDEX,
    Implementation,
    ObjectiveConfig,
    ScoredBatch,
    StepSelection,
    select_step,
)
from vocagnolm.objective.ranks import Ranks
from vocagnolm.train.checkpoint import mark_complete, prune_checkpoints, unmark
from vocagnolm.train.collate import BlockCollator
from vocagnolm.train.forward import MicroBatch, install_guided_forward
from vocagnolm.train.metrics import StepMeter, Stopwatch, step_record
from vocagnolm.train.online import OnlineTeacher

StepListener = Callable[[dict[str, Any]], None]


@dataclass
class StepPlan:
    """What the micro-batches of one optimizer step share."""

    denominator: Tensor | None = None
    selection: StepSelection | None = None
    """Made beforehand where the selection reaches over several micro-batches."""
    nll: list[Tensor] = field(default_factory=list)
    next_micro_batch: int = 0


class GuidedTrainer(Trainer):
    """Trains any causal LM by any method of the objective, from blocks of ids and guidance.

    Ordinary `TrainingArguments`, callbacks, checkpoints and trackers. Give it a map-style dataset
    of blocks (`vocagnolm.data.blocks`), or of dictionaries with `input_ids` and `guidance` [L].
    """

    objective: ObjectiveConfig

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        objective: ObjectiveConfig,
        data_collator: Any = None,
        teacher: OnlineTeacher | None = None,
        impl: Implementation = "auto",
        keep_checkpoints: int | None = None,
        on_step: StepListener | None = None,
        **kwargs: Any,
    ):
        install_guided_forward(model)
        args.remove_unused_columns = False  # guidance is no argument of the model's forward
        args.logging_nan_inf_filter = False  # a loss that is not finite stops the run
        self.objective = objective
        self.teacher = teacher
        self.impl = impl
        self.keep_checkpoints = keep_checkpoints
        self.on_step = on_step
        self.last_record: dict[str, Any] = {}
        self._plan = StepPlan()
        self._meter = StepMeter()
        self._watch = Stopwatch()
        self._learning_rate = 0.0
        self._losses: list[tuple[Tensor, Tensor | None]] = []
        self._has_guidance = False
        super().__init__(
            model=model, args=args, data_collator=data_collator or BlockCollator(), **kwargs
        )
        # our losses are divided by the tokens of the whole step already
        self.loss_is_scaled_for_ga = True
        self.add_callback(_StepCallback(self))
        if teacher is not None:
            teacher.to(self.args.device)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        asked_for_fsdp = getattr(self.args, "fsdp_plugin_args", None) is not None
        if asked_for_fsdp and self.accelerator.distributed_type == DistributedType.MULTI_CPU:
            shard_on_cpu(self.accelerator, self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    # ---- one optimizer step ----

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """All micro-batches of the next step: the place to look at the step as a whole."""
        batches = []
        for _ in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is not None:
                batches.append(self._prepare_inputs(batch))
        if batches:
            self._plan = self._plan_step(batches)
        return batches, self._plan.denominator

    def _plan_step(self, batches: list[dict[str, Any]]) -> StepPlan:
        config = self.objective
        if self.teacher is not None and not self.teacher.distils:
            for batch in batches:
                batch["guidance"], batch["entropy"] = self.teacher.guide(batch)
        several = len(batches) > 1
        sizes_unknown = config.normalise == "selected" and config.method == "chunk"
        if not config.selects_all and (
            (config.scope == "global" and several)
            or (sizes_unknown and (several or self.args.world_size > 1))
        ):
            nll = [self._score(batch, number) for number, batch in enumerate(batches)]
            chosen = self._select(batches, nll)
            return StepPlan(denominator=chosen.denominator, selection=chosen, nll=nll)
        if config.normalise == "selected" and not config.selects_all:
            if config.scope == "global" or sizes_unknown:
                return StepPlan()  # one micro-batch: counted where the selection is made
            # how many tokens are kept does not depend on which, so losses are not needed here
            blank = [torch.zeros(b["labels"].shape, device=b["labels"].device) for b in batches]
            return StepPlan(denominator=self._select(batches, blank).denominator)
        predicted = [(batch["labels"] != IGNORE_INDEX).sum() for batch in batches]
        return StepPlan(denominator=Ranks.of().sum(torch.stack(predicted).sum()))

    @torch.no_grad()
    def _score(self, batch: dict[str, Any], number: int) -> Tensor:
        """The first of two passes. Without dropout: it draws no random numbers, whose state a
        resumed run restores only after this."""
        scored = self._micro_batch(batch, number)
        scored.only_nll = True
        model: Any = self.model_wrapped
        model.eval()
        with self.compute_loss_context_manager():
            nll: Tensor = model(micro_batch=scored)["nll"]
        model.train()
        return nll

    def _select(self, batches: list[dict[str, Any]], nll: list[Tensor]) -> StepSelection:
        scored = [
            ScoredBatch(
                nll_BT=losses,
                labels_BT=batch["labels"],
                guidance_BT=batch.get("guidance"),
                entropy_BT=batch.get("entropy"),
                sequence_index_B=self._sequence_index(batch, number),
            )
            for number, (batch, losses) in enumerate(zip(batches, nll, strict=True))
        ]
        return select_step(scored, self.objective, step=self.state.global_step)

    def _micro_batch(self, inputs: dict[str, Any], number: int) -> MicroBatch:
        return MicroBatch(
            input_ids_BT=inputs["input_ids"],
            labels_BT=inputs["labels"],
            config=self.objective,
            position_ids_BT=inputs.get("position_ids"),
            guidance_BT=inputs.get("guidance"),
            entropy_BT=inputs.get("entropy"),
            sequence_index_B=self._sequence_index(inputs, number),
            step=self.state.global_step,
            impl=self.impl,
        )

    def _sequence_index(self, inputs: dict[str, Any], number: int) -> Tensor:
        """Places of the sequences in the whole step, in the order in which accelerate deals
        batches to ranks: then a step is the same step however it is split."""
        rows = inputs["input_ids"].shape[0]
        first = (number * self.args.world_size + self.args.process_index) * rows
        return torch.arange(first, first + rows, device=inputs["input_ids"].device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:
            return self._plain_loss(model, inputs, return_outputs)
        plan = self._plan
        number = plan.next_micro_batch
        plan.next_micro_batch += 1
        batch = self._micro_batch(inputs, number)
        batch.denominator = plan.denominator
        if plan.selection is not None:
            batch.selected_BT = plan.selection.selected[number]
            batch.nll_BT = plan.nll[number]
        if self.teacher is not None and self.teacher.distils:
            batch.teacher = self.teacher.distribution(inputs)
        output = model(micro_batch=batch)
        self._has_guidance = batch.guidance_BT is not None
        self._meter.add(output, batch.labels_BT, batch.guidance_BT)
        self._losses.append((output["loss"].detach(), inputs.get("block")))
        # DDP and FSDP average gradients over ranks, and the denominator counts all of them
        loss = output["loss"] * self.args.world_size
        return (loss, output) if return_outputs else loss

    def _plain_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Evaluation: mean nll of all tokens."""
        batch = self._micro_batch(inputs, 0)
        batch.config = ObjectiveConfig(method="cpt")
        output = model(micro_batch=batch)
        return (output["loss"], {"loss": output["loss"]}) if return_outputs else output["loss"]

    # ---- around the step ----

    def check_finite(self) -> None:
        """Before the weights change: a loss that is not finite stops the run."""
        losses = torch.stack([loss for loss, _ in self._losses])
        self._learning_rate = self._get_learning_rate()
        if not bool(torch.isfinite(losses).all()):
            number = int((~torch.isfinite(losses)).nonzero()[0])
            blocks = self._losses[number][1]
            named = "" if blocks is None else f", blocks {blocks.tolist()}"
            raise TrainingError(
                f"The loss is {float(losses[number])} in step {self.state.global_step + 1}, "
                f"micro-batch {number} of rank {self.args.process_index}{named}. The weights are "
                "still those of the step before; the newest checkpoint is untouched. Lower "
                "optimizer.learning_rate, or look at these blocks."
            )
        self._losses = []

    def end_step(self) -> None:
        """After the weights have changed: the step's record, on every rank."""
        totals = self._meter.finish(Ranks.of())
        seconds = self._watch.lap()
        record = step_record(totals, has_guidance=self._has_guidance)
        tokens = int(totals["tokens"])
        self.last_record = {
            "step": self.state.global_step,
            **record,
            "tokens": tokens * self.state.global_step,
            "tokens_per_second": tokens / seconds,
            "learning_rate": self._learning_rate,
        }
        if self.on_step is not None and self.is_world_process_zero():
            self.on_step(self.last_record)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trackers see the step's measures beside the Trainer's own."""
        if "loss" in logs and self.last_record:
            ours = {k: v for k, v in self.last_record.items() if v is not None and k != "step"}
            logs = {**ours, **logs}
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        # the Trainer's own gathering leaves sharded tensors behind on a CPU
        model: Any = self.model
        state_dict = full_state_dict(model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state_dict)

    def save_merged(self, folder: Path) -> None:
        """The trained student as an ordinary model folder: adapters merged, shards gathered. All
        ranks must call it."""
        model: Any = self.model
        state_dict = full_state_dict(model) if self.is_fsdp_enabled else None
        if not self.is_world_process_zero():
            return
        model = self.accelerator.unwrap_model(model)
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        model.save_pretrained(folder, state_dict=state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save and self.args.output_dir:
            unmark(self.args.output_dir, self.state.global_step)
        super()._save_checkpoint(model, trial)
        if dist.is_initialized():
            dist.barrier()  # every rank has written its part
        if self.args.should_save and self.args.output_dir:
            mark_complete(self.args.output_dir, self.state.global_step, self.args.world_size)
            if self.keep_checkpoints is not None:
                prune_checkpoints(self.args.output_dir, self.keep_checkpoints)


def shard_on_cpu(accelerator: Accelerator, plugin_args: dict[str, Any]) -> None:
    """accelerate turns FSDP on for accelerators only and falls back to DDP on CPUs without a
    word. torch shards on a CPU as well, through the very same code of accelerate: it has only to
    be told."""
    plugin = FullyShardedDataParallelPlugin(**plugin_args)
    shared = AcceleratorState._shared_state
    shared["distributed_type"] = DistributedType.FSDP
    shared["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """All weights on the CPU of rank 0, gathered from the shards."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


class _StepCallback(TrainerCallback):
    """Calls back into the trainer at the two moments of a step that have no method of their own."""

    def __init__(self, trainer: GuidedTrainer):
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._watch.lap()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.check_finite()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._watch.lap()  # writing a checkpoint is no part of the next step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.end_step()
