"""The training loop, to be read top to bottom.

One optimizer step: the next micro-batches are sent to the device, what they need to know of each
other is decided over all of them, each is passed forward and backward, gradients are clipped,
optimizer and scheduler step, the measures are read; now and then a checkpoint is saved. The host
never waits for a GPU in between: it reads the measures of a step when the next one is under way.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainingArguments, enable_full_determinism, get_scheduler, set_seed

from vocagnolm.errors import TrainingError
from vocagnolm.model.runtime import Moment
from vocagnolm.objective import Decided, ObjectiveConfig, Targets
from vocagnolm.objective.selection import ScoredBatch, count_kept, weigh_step
from vocagnolm.processes import Ranks
from vocagnolm.recipe import Recipe
from vocagnolm.train.checkpoint import Checkpoints, TrainingState
from vocagnolm.train.metrics import StepMeter, Trackers, require_finite
from vocagnolm.train.parallel import Requests, share
from vocagnolm.train.settings import Schedule, build_optimizer, objective_config
from vocagnolm.train.student import BlockCollator, GuidedStudent, MicroBatch, batch_targets
from vocagnolm.train.teacher import OnlineTeacher

Batch = dict[str, Any]


class TrainingLoop:
    """Trains a student on blocks as a recipe says, from its first step or from a checkpoint."""

    def __init__(
        self,
        student: GuidedStudent,
        blocks: Any,
        recipe: Recipe,
        schedule: Schedule,
        arguments: TrainingArguments,
        *,
        collator: BlockCollator,
        teacher: OnlineTeacher | None = None,
        read_behind: int | None = None,
    ):
        """`blocks`: in the order of the training. `read_behind`: how many steps the host may be
        ahead of the one whose measures it waits for; None: one on a GPU, which then always has
        work queued, none elsewhere."""
        (enable_full_determinism if arguments.full_determinism else set_seed)(recipe.run.seed)
        self.student, self.teacher = student, teacher
        self.recipe, self.schedule, self.arguments = recipe, schedule, arguments
        self.blocks, self.collator = blocks, collator
        self.objective = objective_config(recipe)
        self.device, self.ranks = arguments.device, Ranks.of()
        self.sharded = recipe.train.parallel != "ddp"
        self.model: Any = student
        """The student as the processes hold it together, once the training has begun."""
        if not self.sharded:  # shards are sent when they are made
            student.to(self.device)
        if teacher is not None:
            teacher.to(self.device)
        self.read_behind = int(self.device.type == "cuda") if read_behind is None else read_behind
        self.step = 0
        """Steps that were made, though the device may still be at the last of them."""
        self.stopped = False
        """Left before its last step, because it was asked to."""
        self.last_record: dict[str, Any] = {}
        self.on_step: Callable[[dict[str, Any]], None] = lambda record: None
        """Called in the first process with the measures of each step."""
        self.requests = Requests()
        self.trackers: Trackers | None = None

    def run(self, checkpoint: Path | None = None, step: int = 0) -> None:
        """All steps that are left; `checkpoint`: the one after `step`."""
        self._begin(checkpoint, step)
        batches = iter(self._loader())
        if checkpoint is not None:
            self.checkpoints.load_random_numbers(checkpoint, step)
        while self.step < self.schedule.steps and not self.stopped:
            self._step([self.next_batch(batches) for _ in range(self.schedule.accumulation)])
        self.checkpoints.wait()
        if self.trackers is not None:
            self.trackers.end()

    def _begin(self, checkpoint: Path | None, step: int) -> None:
        optimizer = self.recipe.optimizer
        half, parallel = self.recipe.train.half_precision, self.recipe.train.parallel
        self.model = share(self.student, parallel, self.arguments, half=half)
        self.optimizer = build_optimizer(self.student.model, self.arguments)
        self.scheduler = get_scheduler(
            "cosine_with_min_lr",
            self.optimizer,
            num_warmup_steps=optimizer.warmup_steps,
            num_training_steps=self.schedule.steps,
            scheduler_specific_kwargs={"min_lr": optimizer.min_learning_rate},
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.arguments.fp16)
        self.state = TrainingState(self.student.model, self.optimizer, self.scheduler, self.scaler)
        self.checkpoints = Checkpoints(self.recipe.run, sharded=self.sharded)
        self.step, self.stopped = step, False
        if checkpoint is not None:
            self.checkpoints.load(checkpoint, self.state, self.device)
        self.model.train()
        if hasattr(self.optimizer, "train"):  # those that need no schedule
            self.optimizer.train()
        self._meter, self._unread = StepMeter(), deque[StepMeter]()
        self._waited, self._last_moment = 0.0, Moment(self.device)
        self._broken: Tensor | None = None
        """On the device, 1 once a loss was not finite: no weight changes after that."""
        self.gradient_norm: Tensor | None = None
        if self.trackers is not None:
            self.trackers.begin()

    # ---- batches ----

    def _loader(self) -> DataLoader[Any]:
        """This rank's micro-batches from the next step on."""
        given, workers = self.arguments, self.recipe.train.loader_workers
        return DataLoader(
            self.blocks,
            batch_sampler=self._micro_batches(),
            collate_fn=self.collator,
            num_workers=workers,
            pin_memory=self.device.type != "cpu",
            prefetch_factor=given.dataloader_prefetch_factor if workers else None,
            persistent_workers=given.dataloader_persistent_workers and workers > 0,
            multiprocessing_context=given.dataloader_multiprocessing_context if workers else None,
        )

    def _micro_batches(self) -> Iterator[list[int]]:
        """Places of their blocks. Micro-batches are dealt to the ranks in turn: then a step holds
        the same blocks however it is split."""
        size = self.schedule.micro_batch
        for step in range(self.step, self.schedule.steps):
            for number in range(self.schedule.accumulation):
                place = number * self.ranks.count + self.ranks.rank
                first = step * self.schedule.batch_blocks + place * size
                yield list(range(first, first + size))

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        began = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - began
        return self.sent(batch)

    def sent(self, batch: Batch) -> Batch:
        """To the device; from pinned memory, without waiting for it."""
        return {
            name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }

    # ---- one step ----

    def _step(self, batches: list[Batch]) -> None:
        plan = plan_step(batches, self.objective, self.score, step=self.step, teacher=self.teacher)
        config = self.objective.at(self.step / max(1, self.schedule.steps - 1))
        for number, (batch, (targets, decided)) in enumerate(zip(batches, plan, strict=True)):
            # gradients are exchanged after the last micro-batch; with FSDP after each, so that no
            # process holds more than its shard of them
            only_here = self.ranks.count > 1 and not self.sharded and number + 1 < len(batches)
            with self.model.no_sync() if only_here else nullcontext():
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
        if self.trackers is not None and self.trackers.wants_texts(self.step):
            self.trackers.show(self.step, targets.labels_BT, output["weights"])

    def forward(
        self, batch: Batch, targets: Targets, config: ObjectiveConfig, decided: Decided
    ) -> dict[str, Any]:
        teacher = None
        if self.teacher is not None and self.teacher.distils:
            teacher = self.teacher.distribution(batch)
        micro_batch = MicroBatch.of(
            batch, targets, config, step=self.step, teacher=teacher, decided=decided
        )
        with self._autocast():
            output: dict[str, Any] = self.model(micro_batch)
        return output

    @torch.no_grad()
    def score(self, batch: Batch, targets: Targets) -> Tensor:
        """The first of two passes. Without dropout: it draws no random numbers."""
        micro_batch = MicroBatch.of(batch, targets, self.objective, step=self.step, only_nll=True)
        self.model.eval()
        with self._autocast():
            nll: Tensor = self.model(micro_batch)["nll"]
        self.model.train()
        return nll

    def _autocast(self) -> Any:
        """Sharded weights are gathered in bfloat16, and need none."""
        half = torch.float16 if self.arguments.fp16 else torch.bfloat16
        wanted = self.arguments.fp16 or (self.recipe.train.half_precision and not self.sharded)
        return torch.autocast(self.device.type, half, enabled=wanted)

    def clip_gradients(self) -> None:
        self.scaler.unscale_(self.optimizer)
        longest = self.recipe.optimizer.max_grad_norm or math.inf
        norm: Any = torch.nn.utils.clip_grad_norm_(self.student.parameters(), longest)
        self.gradient_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def check_finite(self) -> None:
        """Before the weights change: a loss that is not finite stops the run, at once or, where
        the host does not wait, when the step is read. Till then the optimizer skips its steps."""
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
        """The step's measures are on their way. Read are those of steps before, and all where
        something depends on them."""
        stop, save, waited = self.requests.stop, self.requests.save, self._waited
        self._meter.finish(self.step, learning_rate, stop=stop, save=save, waited=waited)
        self._unread.append(self._meter)
        self._meter, self._waited = StepMeter(), 0.0
        last = self.step == self.schedule.steps
        every = self.recipe.run.save_every
        saves = every > 0 and (last or self.step % every == 0)
        logs = self.step % self.recipe.run.log_every == 0
        saves |= self._read(0 if saves or logs or last else self.read_behind)
        if saves:
            self._read(0)
            self.checkpoints.save(self.step, self.state)
            self._last_moment = Moment(self.device)  # writing is no part of the next step
            if self.trackers is not None:
                self.trackers.saved()

    def _read(self, behind: int) -> bool:
        """All steps but the newest `behind`; whether one of them asks for a checkpoint."""
        saves = False
        while len(self._unread) > behind:
            made = self._unread.popleft()
            found = made.read()
            if not math.isfinite(found["loss"]):
                require_finite(made.number, made.losses, self.ranks.rank)
                raise TrainingError(
                    f"The loss is {found['loss']} in step {made.number}: see the error of "
                    f"another rank."
                )
            seconds = made.ended.seconds_since(self._last_moment)
            self._last_moment = made.ended
            stop, save, waited = (found.pop(name) for name in ("stop", "save", "waited"))
            tokens = int(found["tokens"])
            self.last_record = {
                "step": made.number,
                **found,
                "tokens": tokens * made.number,
                "tokens_per_second": tokens / seconds,
                "data_wait_share": min(1.0, waited / self.ranks.count / seconds),
                "processes": self.ranks.count,
                "learning_rate": made.learning_rate,
            }
            if self.ranks.rank == 0:
                self.on_step(self.last_record)
            if self.trackers is not None:
                self.trackers.step(self.last_record, self.gradient_norm)
            if stop or save:  # one rank was asked: all of them act, after the same step
                saves, self.requests.save = True, False
            self.stopped |= bool(stop)
        return saves


# ---- what is decided over all micro-batches of a step ----


def plan_step(
    batches: list[Batch],
    config: ObjectiveConfig,
    score: Callable[[Batch, Targets], Tensor],
    *,
    step: int,
    teacher: OnlineTeacher | None = None,
) -> list[tuple[Targets, Decided]]:
    """Targets of each micro-batch, and what it needs to know of the others, here and on other
    ranks: what the loss is divided by, and the weights where tokens of several compete. `score`
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
    # else one micro-batch: counted where the selection is made
    kept = [count_kept(batch.get("counts"), config) for batch in batches]
    shared = Decided(denominator=denominator, micro_batches=micro_batches)
    return [(t, replace(shared, kept=count)) for t, count in zip(targets, kept, strict=True)]
