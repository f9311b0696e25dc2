"""The training loop, to be read top to bottom.

One optimizer step: the next micro-batches are sent to the device; what they need to know of each
other is decided over all of them (`plan_step`); each passes forward (`GuidedStudent`) and backward;
gradients are clipped; optimizer and scheduler step; the measures are read; now and then a
checkpoint is saved. The host never waits for a GPU in between: it reads the measures of a step
while the next one is under way.

Shape letters: B sequences of T positions.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    TrainingArguments,
    enable_full_determinism,
    get_scheduler,
    set_seed,
)

from vocagnolm.base.ranks import Ranks
from vocagnolm.errors import TrainingError
from vocagnolm.model.runtime import Moment, router_loss_of, run_decoder
from vocagnolm.objective import (
    Decided,
    Implementation,
    ObjectiveConfig,
    Targets,
    Teacher,
    objective_loss,
    student_nll,
)
from vocagnolm.objective.selection import ScoredBatch, count_kept, weigh_step
from vocagnolm.recipe import Recipe
from vocagnolm.train.checkpoint import Checkpoints, TrainingState
from vocagnolm.train.collate import GuidedCollator, batch_targets
from vocagnolm.train.metrics import Report, StepMeter, require_finite
from vocagnolm.train.parallel import share
from vocagnolm.train.settings import Schedule, build_optimizer, objective_config
from vocagnolm.train.student import causal_lm_of, require_precision, understood_head
from vocagnolm.train.teacher import OnlineTeacher

Batch = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """The parts of a run that every step uses, whatever the schedule."""

    student: "GuidedStudent"
    order: Any
    """The blocks in the order of training, as a map-style dataset."""
    collator: GuidedCollator
    teacher: OnlineTeacher | None = None


@dataclass
class Requests:
    """Requests that signals have made of a run. They are looked at between two steps."""

    stop: bool = False
    save: bool = False
    interrupted: bool = False
    """The stop was asked for with Ctrl-C."""


class TrainingLoop:
    """Trains a student on blocks as a recipe says, from its first step or from a checkpoint."""

    def __init__(
        self,
        setup: Setup,
        recipe: Recipe,
        schedule: Schedule,
        arguments: TrainingArguments,
        *,
        report: Report | None = None,
        requests: Requests | None = None,
        read_behind: int | None = None,
    ):
        """`report` gets the measures of each step. `read_behind`: how many steps the host may be
        ahead of the one whose measures it waits for; None: one on a GPU, which then always has work
        queued, none elsewhere."""
        (enable_full_determinism if arguments.full_determinism else set_seed)(recipe.run.seed)
        self.setup, self.student, self.teacher = setup, setup.student, setup.teacher
        self.recipe, self.schedule, self.arguments = recipe, schedule, arguments
        self.report, self.requests = report or Report(), requests or Requests()
        self.objective = objective_config(recipe)
        self.device, self.ranks = arguments.device, Ranks.of()
        self.read_behind = int(self.device.type == "cuda") if read_behind is None else read_behind
        self.sharded = recipe.train.parallel != "ddp"
        self.model: nn.Module = self.student
        """The student as the processes hold it together."""
        if self.sharded or self.ranks.count > 1:
            half = recipe.train.half_precision
            self.model = share(self.student, recipe.train.parallel, arguments, half=half)
        self.optimizer = build_optimizer(self.student.model, arguments)
        self.scheduler = get_scheduler(
            "cosine_with_min_lr",
            self.optimizer,
            num_warmup_steps=recipe.optimizer.warmup_steps,
            num_training_steps=schedule.steps,
            scheduler_specific_kwargs={"min_lr": recipe.optimizer.min_learning_rate},
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=arguments.fp16)
        self.state = TrainingState(self.student.model, self.optimizer, self.scheduler, self.scaler)
        self.checkpoints = Checkpoints(recipe.run, sharded=self.sharded)
        self.step = 0
        """Steps that were made, though the device may still be at the last of them."""
        self.stopped = False
        """Training stopped early on request."""
        self.last_record: dict[str, Any] = {}
        self.gradient_norm: Tensor | None = None
        self._meter, self._unread = StepMeter(), deque[StepMeter]()
        self._waited, self._last_moment = 0.0, Moment(self.device)
        self._saved_at = time.monotonic()
        self._broken: Tensor | None = None
        """1 on the device once a loss was not finite: no weight changes after that."""

    def run(self, checkpoint: Path | None = None, step: int = 0) -> None:
        """Train to the last step, resuming from `checkpoint`, which was written after `step`."""
        self.step = step
        if checkpoint is not None:
            self.checkpoints.load(checkpoint, self.state, self.device)
        self.model.train()
        if hasattr(self.optimizer, "train"):  # optimizers that need no schedule
            self.optimizer.train()
        self._last_moment = Moment(self.device)
        steps = self.steps()
        if checkpoint is not None:
            self.checkpoints.load_random_numbers(checkpoint, step)
        while self.step < self.schedule.steps and not self.stopped:
            self.train_step(next(steps))
        self.checkpoints.wait()

    # ---- batches ----

    def steps(self) -> Iterator[list[Batch]]:
        """The micro-batches of this rank for each step, from the next one on."""
        batches = iter(self._loader())
        per_step = range(self.schedule.accumulation)
        return ([self.next_batch(batches) for _ in per_step] for _ in itertools.count())

    def _loader(self) -> DataLoader[Any]:
        """The micro-batches of this rank, from the next step on."""
        given, workers = self.arguments, self.recipe.train.loader_workers
        return DataLoader(
            self.setup.order,
            batch_sampler=self._micro_batches(),
            collate_fn=self.setup.collator,
            num_workers=workers,
            pin_memory=self.device.type != "cpu",
            prefetch_factor=given.dataloader_prefetch_factor if workers else None,
            persistent_workers=given.dataloader_persistent_workers and workers > 0,
            multiprocessing_context=given.dataloader_multiprocessing_context if workers else None,
        )

    def _micro_batches(self) -> Iterator[list[int]]:
        """The positions of each micro-batch's blocks in the training order. Micro-batches are dealt
        to the ranks in turn, so that a step holds the same blocks however it is split."""
        size = self.schedule.micro_batch
        for step in range(self.step, self.schedule.steps):
            for number in range(self.schedule.accumulation):
                place = number * self.ranks.count + self.ranks.rank
                first = step * self.schedule.batch_blocks + place * size
                yield list(range(first, first + size))

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """The next micro-batch on the device; the time that it is waited for is measured."""
        began = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - began
        return sent(batch, self.device)

    # ---- one step ----

    def train_step(self, batches: list[Batch]) -> None:
        """One optimizer step on the micro-batches of this rank."""
        plan = plan_step(batches, self.objective, self.score, step=self.step, teacher=self.teacher)
        config = self.objective.at(self.step / max(1, self.schedule.steps - 1))
        for number, (batch, (targets, decided)) in enumerate(zip(batches, plan, strict=True)):
            # gradients are exchanged after the last micro-batch; with FSDP after each, so that no
            # process holds more than its shard of them
            only_here = self.ranks.count > 1 and not self.sharded and number + 1 < len(batches)
            with self.model.no_sync() if only_here else nullcontext():  # type: ignore[operator]
                output = self.forward(batch, targets, config, decided)
                # DDP and FSDP average gradients over ranks, and the denominator counts all of them
                self.scaler.scale(output["loss"] * self.ranks.count).backward()
            self._meter.add(output, targets, batch.get("block"))
        self.clip_gradients()
        self.check_finite()
        rate = self.scheduler.get_last_lr()[0]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.model.zero_grad()
        self.step += 1
        self.end_step(rate)
        if self.report.wants_texts(self.step):
            self.report.texts(self.step, targets.labels_BT, output["weights"])

    def forward(
        self, batch: Batch, targets: Targets, config: ObjectiveConfig, decided: Decided
    ) -> dict[str, Any]:
        """The loss of a micro-batch, and what is measured on the way."""
        options: dict[str, Any] = {"teacher": self.teacher, "decided": decided}
        passed = MicroBatch.of(batch, targets, config, step=self.step, **options)
        output: dict[str, Any] = self.model(passed)
        return output

    @torch.no_grad()
    def score(self, batch: Batch, targets: Targets) -> Tensor:
        """The student's losses [B, T], for the first of two passes. Without dropout: it draws no
        random numbers."""
        passed = MicroBatch.of(batch, targets, self.objective, step=self.step, only_nll=True)
        self.model.eval()
        nll: Tensor = self.model(passed)["nll"]
        self.model.train()
        return nll

    def clip_gradients(self) -> None:
        self.scaler.unscale_(self.optimizer)
        longest = self.recipe.optimizer.max_grad_norm or math.inf
        norm: Any = torch.nn.utils.clip_grad_norm_(self.student.parameters(), longest)
        self.gradient_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def check_finite(self) -> None:
        """Stop the run before a loss that is not finite changes the weights: at once or, where the
        host does not wait, when the step is read. Until then the optimizer skips its steps."""
        skips = getattr(self.optimizer, "_step_supports_amp_scaling", False) and all(
            group["fused"]  # a checkpoint of another optimizer may have turned it off
            for group in self.optimizer.param_groups
        )
        losses = self._meter.losses
        if self.read_behind == 0 or not skips or self.scaler.is_enabled():
            require_finite(self.step + 1, losses, self.ranks.rank)
            return
        broken = (~torch.isfinite(torch.stack([loss for loss, _ in losses]))).any().float()
        broken = self.ranks.max(broken)
        self._broken = broken if self._broken is None else torch.maximum(self._broken, broken)
        self.optimizer.found_inf = self._broken  # type: ignore[attr-defined]  # as GradScaler does

    # ---- after a step ----

    def end_step(self, learning_rate: float) -> None:
        """Send the step's measures to the host, and read those of earlier steps; all of them where
        something depends on them: a checkpoint, a line of the log, the end."""
        # the clock of the first process decides for all, in the same step
        save = self.requests.save or (self.ranks.leads and self._checkpoint_is_due())
        stop, waited = self.requests.stop, self._waited
        self._meter.finish(self.step, learning_rate, stop=stop, save=save, waited=waited)
        self._unread.append(self._meter)
        self._meter, self._waited = StepMeter(), 0.0
        last = self.step == self.schedule.steps
        every = self.recipe.run.save_every
        saves = every > 0 and (last or self.step % every == 0)
        logs = self.step % self.recipe.run.log_every == 0
        saves |= self._read_steps(0 if saves or logs or last else self.read_behind)
        if saves:
            self._read_steps(0)
            self.checkpoints.save(self.step, self.state)
            self._last_moment = Moment(self.device)  # writing is no part of the next step
            self._saved_at = time.monotonic()

    def _checkpoint_is_due(self) -> bool:
        """Whether the newest checkpoint, or the start, is `run.save_minutes` ago."""
        minutes = self.recipe.run.save_minutes
        return minutes > 0 and time.monotonic() - self._saved_at > 60 * minutes

    def _read_steps(self, behind: int) -> bool:
        """Read and report all steps but the newest `behind`; whether one of them asks for a
        checkpoint."""
        saves = False
        while len(self._unread) > behind:
            meter = self._unread.popleft()
            measures = meter.read()
            if not math.isfinite(measures["loss"]):
                require_finite(meter.number, meter.losses, self.ranks.rank)
                raise TrainingError(
                    f"The loss is {measures['loss']} in step {meter.number}: see the error of "
                    f"another rank."
                )
            seconds = meter.ended.seconds_since(self._last_moment)
            self._last_moment = meter.ended
            stop, save, waited = (measures.pop(name) for name in ("stop", "save", "waited"))
            tokens = int(measures["tokens"])
            self.last_record = {
                "step": meter.number,
                **measures,
                "tokens": tokens * meter.number,
                "tokens_per_second": tokens / seconds,
                "data_wait_share": min(1.0, waited / self.ranks.count / seconds),
                "processes": self.ranks.count,
                "learning_rate": meter.learning_rate,
            }
            self.report.step(self.last_record, self.gradient_norm)
            if stop or save:  # one rank was asked: all of them act, after the same step
                saves, self.requests.save = True, False
            self.stopped |= bool(stop)
        return saves


def sent(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; from pinned memory, without waiting for it."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


# ---- what the micro-batches of a step need to know of each other ----


def plan_step(
    batches: list[Batch],
    config: ObjectiveConfig,
    score: Callable[[Batch, Targets], Tensor],
    *,
    step: int,
    teacher: OnlineTeacher | None = None,
) -> list[tuple[Targets, Decided]]:
    """The targets of each micro-batch, and what is decided over all micro-batches and ranks: the
    divisor of the loss, and the weights where tokens of several micro-batches compete. `score`
    gives the student's losses, for a first pass."""
    if teacher is not None and not teacher.distils:
        for batch in batches:
            batch.update(teacher.guide(batch), counts=None)
    ranks = Ranks.of()
    targets = []
    for number, batch in enumerate(batches):
        rows, device = len(batch["input_ids"]), batch["input_ids"].device
        first = (number * ranks.count + ranks.rank) * rows
        targets.append(batch_targets(batch, torch.arange(first, first + rows, device=device)))
    micro_batches = len(batches) * ranks.count

    def weigh(nll: list[Tensor]) -> Any:
        scored = [ScoredBatch(t, losses) for t, losses in zip(targets, nll, strict=True)]
        return weigh_step(scored, config, step=step)

    if (config.reaches_over_step and len(batches) > 1) or (
        config.counts_by_losses and micro_batches > 1
    ):
        nll = [score(batch, t) for batch, t in zip(batches, targets, strict=True)]
        weighed = weigh(nll)
        shared = Decided(denominator=weighed.denominator, micro_batches=micro_batches)
        decided = [
            replace(shared, weights_BT=weights, nll_BT=losses)
            for weights, losses in zip(weighed.weights, nll, strict=True)
        ]
        return list(zip(targets, decided, strict=True))
    denominator: Tensor | None = None
    if config.normalise == "all" or config.selects_all:
        denominator = ranks.sum(torch.stack([t.valid_BT.sum() for t in targets]).sum())
    elif not (config.reaches_over_step or config.counts_by_losses):
        # how many tokens are kept does not depend on which, so losses are not needed here
        blank = [torch.zeros(t.labels_BT.shape, device=t.labels_BT.device) for t in targets]
        denominator = weigh(blank).denominator
    # else there is one micro-batch, which counts where its selection is made
    kept = [count_kept(batch.get("counts"), config) for batch in batches]
    shared = Decided(denominator=denominator, micro_batches=micro_batches)
    return [(t, replace(shared, kept=count)) for t, count in zip(targets, kept, strict=True)]


# ---- the forward pass ----


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The argument of one call of `GuidedStudent`: what the student reads, and how its loss is
    made."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor | None = None
    targets: Targets
    config: ObjectiveConfig
    step: int = 0
    teacher: Teacher | None = None
    decided: Decided = field(default_factory=Decided)
    only_nll: bool = False
    """First pass of a selection over several micro-batches: nll alone, without gradient."""
    impl: Implementation = "auto"

    @classmethod
    def of(
        cls,
        batch: Batch,
        targets: Targets,
        config: ObjectiveConfig,
        *,
        teacher: OnlineTeacher | None = None,
        **more: Any,
    ) -> "MicroBatch":
        """`teacher`: one that is asked for its distribution, if the method compares distributions;
        its guidance is part of the targets."""
        distils = teacher is not None and teacher.distils
        return cls(
            input_ids_BT=batch["input_ids"],
            position_ids_BT=batch.get("position_ids"),
            targets=targets,
            config=config,
            teacher=teacher.distribution(batch) if teacher is not None and distils else None,
            **more,
        )


class GuidedStudent(nn.Module):
    """A causal LM, or its peft wrapper, whose forward takes a `MicroBatch` and gives its loss: the
    module that DDP and FSDP wrap."""

    causal_lm: PreTrainedModel

    def __init__(
        self,
        model: nn.Module,
        *,
        router_loss: bool | None = None,
        autocast: torch.dtype | None = None,
    ):
        """`router_loss`: whether a mixture of experts also learns to balance them; None: as its
        configuration says. `autocast`: the dtype of the arithmetic; None: that of the weights."""
        super().__init__()
        self.model = model
        require_precision(model)
        self.__dict__["causal_lm"] = causal_lm_of(model)  # which is a part of `model`
        self.form = understood_head(self.causal_lm)
        self.router = router_loss_of(self.causal_lm, router_loss)
        self.autocast = autocast

    def forward(self, batch: MicroBatch) -> dict[str, Any]:
        dtype, device = self.autocast or torch.bfloat16, batch.input_ids_BT.device.type
        with torch.autocast(device, dtype, enabled=self.autocast is not None):
            return self._forward(batch)

    def _forward(self, batch: MicroBatch) -> dict[str, Any]:
        model, routes = self.causal_lm, self.router is not None and not batch.only_nll
        options = {"output_router_logits": True} if routes else {}
        decoded = run_decoder(model, batch.input_ids_BT, batch.position_ids_BT, **options)
        hidden, head = decoded.last_hidden_state, self.form.head(model)
        if batch.only_nll:
            return {"nll": student_nll(hidden, head, batch.targets.labels_BT, impl=batch.impl)}
        output = objective_loss(
            hidden,
            head,
            batch.targets,
            batch.config,
            step=batch.step,
            teacher=batch.teacher,
            decided=batch.decided,
            impl=batch.impl,
        )
        loss, means = output.loss, dict(output.distill_stats)
        if self.router is not None:
            balance = self.router(decoded.router_logits)
            loss = loss + balance / batch.decided.micro_batches
            means["router_loss"] = balance.detach()
        # a plain dictionary: the only shape in which FSDP finds the tensors that its hooks hang on
        weights = output.weights_BT.detach()
        return {"loss": loss, "sums": output.sums, "means": means, "weights": weights}
