"""A Trainer whose steps are measured, checked and told, without the host waiting for the device."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.errors import TrainingError
from vocagnolm.model.runtime import Moment
from vocagnolm.objective.ranks import Ranks
from vocagnolm.train.checkpoint import CheckpointedTrainer
from vocagnolm.train.console import Requests
from vocagnolm.train.metrics import DataWait, StepMeter, Totals

StepListener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class MadeStep:
    """An optimizer step that the device may still be at."""

    number: int
    learning_rate: float
    losses: list[tuple[Tensor, Tensor | None]]
    """Of this rank's micro-batches, with their blocks."""
    has_guidance: bool
    totals: Totals


class MeteredTrainer(CheckpointedTrainer):
    def __init__(
        self,
        *,
        args: TrainingArguments,
        on_step: StepListener | None = None,
        read_behind: int | None = None,
        **kwargs: Any,
    ):
        """`read_behind`: how many steps the host may be ahead of the one whose totals it waits for;
        None: one on a GPU, which then has always work queued, none elsewhere."""
        args.logging_nan_inf_filter = False  # a loss that is not finite stops the run
        self.on_step = on_step
        self.last_record: dict[str, Any] = {}
        self.requests = Requests()
        self.stopped = False
        """Left before its last step, because it was asked to."""
        self._meter = StepMeter()
        self._data = DataWait()
        self._learning_rate = 0.0
        self._losses: list[tuple[Tensor, Tensor | None]] = []
        self._has_guidance = False
        self._unread: deque[MadeStep] = deque()
        self._broken: Tensor | None = None
        """On the device, 1 once a loss was not finite: no weight changes after that."""
        super().__init__(args=args, **kwargs)
        self.add_callback(_StepCallback(self))
        on_gpu = self.args.device.type == "cuda"
        self.read_behind = int(on_gpu) if read_behind is None else read_behind
        self.last_moment = Moment(self.args.device)

    def forget_steps(self) -> None:
        """Of a training before, which ended in an error."""
        self._unread.clear()
        self._losses, self._broken = [], None
        self.last_moment = Moment(self.args.device)

    def check_finite(self) -> None:
        """Before the weights change: a loss that is not finite stops the run, at once or, where
        the host does not wait, when the step is read. Till then the optimizer passes over."""
        self._learning_rate = self._get_learning_rate()
        optimizer: Any = self.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        skips = getattr(inner, "_step_supports_amp_scaling", False) and all(
            group["fused"]  # a checkpoint of another optimizer may have turned it off
            for group in inner.param_groups
        )
        if self.read_behind == 0 or not skips or self.accelerator.scaler is not None:
            self._require_finite(self.state.global_step + 1, self._losses)
            return
        losses = torch.stack([loss for loss, _ in self._losses])
        broken = Ranks.of().max((~torch.isfinite(losses)).any().float())
        self._broken = broken if self._broken is None else torch.maximum(self._broken, broken)
        inner.found_inf = self._broken  # what GradScaler tells an optimizer: leave all as it is

    def _require_finite(self, step: int, losses: list[tuple[Tensor, Tensor | None]]) -> None:
        values = torch.stack([loss for loss, _ in losses]).tolist()
        for number, (value, (_, blocks)) in enumerate(zip(values, losses, strict=True)):
            if math.isfinite(value):
                continue
            named = "" if blocks is None else f", blocks {blocks.tolist()}"
            raise TrainingError(
                f"The loss is {value} in step {step}, micro-batch {number} of rank "
                f"{self.args.process_index}{named}. The weights are still those of the step "
                "before; the newest checkpoint is untouched. Lower optimizer.learning_rate, or "
                "look at these blocks."
            )

    def end_step(self, control: TrainerControl) -> None:
        """After the weights have changed, or will have: the step's totals are on their way. Read
        are those of steps before, and all where something depends on them."""
        requests = self.requests
        totals = self._meter.finish(
            Ranks.of(), stop=requests.stop, save=requests.save, waited=self._data.take()
        )
        made = MadeStep(
            self.state.global_step, self._learning_rate, self._losses, self._has_guidance, totals
        )
        self._losses = []
        self._unread.append(made)
        self.read_steps(control, self.read_behind)
        if control.should_log or control.should_save or control.should_training_stop:
            self.read_steps(control)

    def read_steps(self, control: TrainerControl, behind: int = 0) -> None:
        """All but the newest `behind`."""
        while len(self._unread) > behind:
            self._read(self._unread.popleft(), control)

    def _read(self, made: MadeStep, control: TrainerControl) -> None:
        """A step's record, on every rank; waits for the device."""
        measured: dict[str, Any] = made.totals.read()
        if not math.isfinite(measured["loss"]):
            self._require_finite(made.number, made.losses)
            raise TrainingError(
                f"The loss is {measured['loss']} in step {made.number}: another rank says where."
            )
        ranks, seconds = Ranks.of(), made.totals.arrives.seconds_since(self.last_moment)
        self.last_moment = made.totals.arrives
        stop, save, waited = (measured.pop(name) for name in ("stop", "save", "waited"))
        tokens = int(measured["tokens"])
        if not made.has_guidance:
            measured["mapped_share"] = None
        self.last_record = {
            "step": made.number,
            **measured,
            "tokens": tokens * made.number,
            "tokens_per_second": tokens / seconds,
            "data_wait_share": min(1.0, waited / ranks.size / seconds),
            "processes": ranks.size,
            "learning_rate": made.learning_rate,
        }
        if self.on_step is not None and self.is_world_process_zero():
            self.on_step(self.last_record)
        # one rank was asked: all of them act, after the same step
        if stop or save:
            control.should_save = True
            self.requests.save = False
        if stop:
            control.should_training_stop = self.stopped = True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trackers see the step's measures beside the Trainer's own."""
        if "loss" in logs and self.last_record:
            ours = {k: v for k, v in self.last_record.items() if v is not None and k != "step"}
            logs = {**ours, **logs}
        super().log(logs, start_time)


class _StepCallback(TrainerCallback):
    """Calls back into the trainer at the two moments of a step that have no method of their own."""

    def __init__(self, trainer: MeteredTrainer):
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.forget_steps()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.read_steps(control)  # other callbacks may save or evaluate now

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.finish_saving()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.check_finite()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # writing a checkpoint is no part of the next step
        self.trainer.last_moment = Moment(args.device)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.end_step(control)
