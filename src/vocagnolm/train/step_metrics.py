"""What a step was like: its numbers, and a Trainer that measures, checks and tells them without the
host waiting for the device."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.errors import TrainingError
from vocagnolm.model.runtime import HostCopy, Moment
from vocagnolm.objective import Targets
from vocagnolm.objective.loss import BINS, SUMS, measures
from vocagnolm.processes import Ranks
from vocagnolm.train.checkpoint import CheckpointedTrainer
from vocagnolm.train.console import Requests

# Dense bfloat16 peak of a device in TFLOP/s, as its maker states it; the longest match counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "A10": 125.0,
    "A40": 149.7,
    "B200": 2250.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H200": 989.0,
    "H800": 989.0,
    "L4": 121.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
}


class StepMeter:
    """Collects the micro-batches of a step on the device, and never waits for it."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._means: list[dict[str, Tensor]] = []

    def add(self, output: dict[str, Any], targets: Targets) -> None:
        loss = output["loss"].detach().float()
        # filled in, not sent: a number that is copied to a device is waited for
        tokens = loss.new_full((1,), targets.labels_BT.numel())
        self._rows.append(torch.cat([loss[None], tokens, output["sums"]]))
        self._means.append(output["means"])

    def finish(self, ranks: Ranks, **sums: float) -> "Totals":
        """Totals over micro-batches and ranks; the meter is empty again. What else is to be summed
        over the ranks travels along: requests, which all ranks must know of in the same step, and
        seconds."""
        names = sorted(self._means[0])
        rows = [
            torch.cat([row, *(means[name].float()[None] for name in names)])
            for row, means in zip(self._rows, self._means, strict=True)
        ]
        count = len(rows) * ranks.count
        # fp64 where there is one: the sum must not depend on how a step is split
        stacked = torch.stack(rows)
        total = (stacked if stacked.is_mps else stacked.double()).sum(0)
        further = [total.new_full((1,), float(value)) for value in sums.values()]
        total = ranks.sum(torch.cat([total, *further]))
        self._rows, self._means = [], []
        return Totals(total, count, names, list(sums))


class Totals:
    """The totals of a step, on their way to the host."""

    def __init__(self, total: Tensor, count: int, means: Sequence[str], further: Sequence[str]):
        self._values = HostCopy(total)
        self._count, self._means, self._further = count, means, further

    @property
    def arrives(self) -> Moment:
        return self._values.moment

    def read(self) -> dict[str, float]:
        """Measures as plain numbers; waits for the step, and for nothing after it."""
        values = self._values.numpy().tolist()
        end = 2 + len(SUMS) + BINS
        means = zip(self._means, values[end:], strict=False)
        return {
            "loss": values[0],
            "tokens": values[1],
            **measures(values[2:end]),
            **{name: value / self._count for name, value in means},
            **dict(zip(self._further, values[end + len(self._means) :], strict=True)),
        }


class DataWait:
    """Seconds that were spent waiting for data."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Since it was last asked."""
        taken, self._seconds = self._seconds, 0.0
        return taken


def flops_per_token(parameters: int, layers: int, hidden: int, block_size: int) -> float:
    """Forward and backward of plain training: 6 N + 12 layers x hidden x length (PaLM, app. B)."""
    return 6.0 * parameters + 12.0 * layers * hidden * block_size


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, where its name is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_TFLOPS if key in name]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


# ---- a Trainer whose steps are measured ----


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
            "data_wait_share": min(1.0, waited / ranks.count / seconds),
            "processes": ranks.count,
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
