"""`GuidedTrainer`: Hugging Face's Trainer with the guided objective as its loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from vocagnolm.model.runtime import torch_threads
from vocagnolm.objective import (
    Decided,
    Implementation,
    ObjectiveConfig,
    ScoredBatch,
    StepWeights,
    Targets,
    count_kept,
    weigh_step,
)
from vocagnolm.objective.ranks import Ranks
from vocagnolm.train.collate import BlockCollator, batch_targets
from vocagnolm.train.forward import (
    MicroBatch,
    causal_lm_of,
    install_guided_forward,
    require_separation,
)
from vocagnolm.train.metered import MeteredTrainer
from vocagnolm.train.online import OnlineTeacher


@dataclass
class StepPlan:
    """The micro-batches of one optimizer step, and what was decided over all of them."""

    targets: list[Targets] = field(default_factory=list)
    decided: list[Decided] = field(default_factory=list)
    passed: int = 0

    @property
    def denominator(self) -> Any:
        return self.decided[0].denominator if self.decided else None

    def next(self) -> tuple[Targets, Decided]:
        self.passed += 1
        return self.targets[self.passed - 1], self.decided[self.passed - 1]


class GuidedTrainer(MeteredTrainer):
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
        router_loss: bool | None = None,
        **kwargs: Any,
    ):
        install_guided_forward(model, router_loss=router_loss)
        if getattr(data_collator, "document_mask", False):
            require_separation(causal_lm_of(model), "The student")
            if teacher is not None:
                require_separation(teacher.model, "The teacher")
        args.remove_unused_columns = False  # guidance is no argument of the model's forward
        self.objective = objective
        self.teacher = teacher
        self.impl = impl
        self.before_training: Callable[[], None] | None = None
        self.keep_selection = False
        self.last_selection: tuple[Tensor, Tensor] | None = None
        """Labels and weights of the newest micro-batch, where they are kept for a tracker."""
        self._plan = StepPlan()
        super().__init__(
            model=model, args=args, data_collator=data_collator or BlockCollator(), **kwargs
        )
        # our losses are divided by the tokens of the whole step already
        self.loss_is_scaled_for_ga = True
        if teacher is not None:
            teacher.to(self.args.device)

    # ---- one optimizer step ----

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """All micro-batches of the next step: the place to look at the step as a whole."""
        batches = []
        for _ in range(num_batches):
            with self._data.waiting():
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
                batch.update(self.teacher.guide(batch), counts=None)
        targets = [self._targets(batch, number) for number, batch in enumerate(batches)]
        several = len(batches) > 1
        micro_batches = len(batches) * self.args.world_size
        if (config.reaches_over_step and several) or (
            config.counts_by_losses and micro_batches > 1
        ):
            nll = [self._score(b, t) for b, t in zip(batches, targets, strict=True)]
            weighed = self._weigh(targets, nll)
            decided = [
                Decided(
                    denominator=weighed.denominator,
                    weights_BT=weights,
                    nll_BT=losses,
                    micro_batches=micro_batches,
                )
                for weights, losses in zip(weighed.weights, nll, strict=True)
            ]
            return StepPlan(targets, decided)
        denominator: Tensor | None = None
        if config.normalise == "all" or config.selects_all:
            predicted = torch.stack([t.valid_BT.sum() for t in targets]).sum()
            denominator = Ranks.of().sum(predicted)
        elif not (config.reaches_over_step or config.counts_by_losses):
            # how many tokens are kept does not depend on which, so losses are not needed here
            blank = [torch.zeros(t.labels_BT.shape, device=t.labels_BT.device) for t in targets]
            denominator = self._weigh(targets, blank).denominator
        # else one micro-batch: counted where the selection is made
        shared = Decided(denominator=denominator, micro_batches=micro_batches)
        kept = [count_kept(batch.get("counts"), config) for batch in batches]
        return StepPlan(targets, [replace(shared, kept=count) for count in kept])

    @torch.no_grad()
    def _score(self, inputs: dict[str, Any], targets: Targets) -> Tensor:
        """The first of two passes. Without dropout: it draws no random numbers, whose state a
        resumed run restores only after this."""
        batch = self._micro_batch(inputs, targets, self.objective, only_nll=True)
        model: Any = self.model_wrapped
        model.eval()
        with self.compute_loss_context_manager():
            nll: Tensor = model(micro_batch=batch)["nll"]
        model.train()
        return nll

    def _weigh(self, targets: list[Targets], nll: list[Tensor]) -> StepWeights:
        scored = [ScoredBatch(t, losses) for t, losses in zip(targets, nll, strict=True)]
        return weigh_step(scored, self.objective, step=self.state.global_step)

    def _targets(self, inputs: dict[str, Any], number: int) -> Targets:
        return batch_targets(inputs, self._sequence_index(inputs, number))

    def _micro_batch(
        self, inputs: dict[str, Any], targets: Targets, config: ObjectiveConfig, **more: Any
    ) -> MicroBatch:
        return MicroBatch(
            input_ids_BT=inputs["input_ids"],
            position_ids_BT=inputs.get("position_ids"),
            targets=targets,
            config=config,
            step=self.state.global_step,
            impl=self.impl,
            **more,
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
        targets, decided = self._plan.next()
        objective = self.objective.at(self.state.global_step / max(1, self.state.max_steps - 1))
        output = self._forward(model, inputs, targets, objective, decided)
        self._has_guidance = targets.guidance_BT is not None
        self._meter.add(output, targets)
        if self.keep_selection:
            self.last_selection = (targets.labels_BT, output["weights"])
        self._losses.append((output["loss"].detach(), inputs.get("block")))
        # DDP and FSDP average gradients over ranks, and the denominator counts all of them
        loss = output["loss"] * self.args.world_size
        return (loss, output) if return_outputs else loss

    def _forward(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        targets: Targets,
        config: ObjectiveConfig,
        decided: Decided,
    ) -> dict[str, Any]:
        teacher = None
        if self.teacher is not None and self.teacher.distils:
            teacher = self.teacher.distribution(inputs)
        micro_batch = self._micro_batch(inputs, targets, config, teacher=teacher, decided=decided)
        output: dict[str, Any] = model(micro_batch=micro_batch)
        return output

    def first_blocks(self, count: int) -> dict[str, Any]:
        """As a micro-batch on the device."""
        dataset: Any = self.train_dataset
        batch = self.data_collator([dataset[place] for place in range(count)])
        prepared: dict[str, Any] = self._prepare_inputs(batch)
        return prepared

    def try_pass(self, inputs: dict[str, Any]) -> None:
        """Forward and backward of a micro-batch by itself, for a measurement. Nothing is left of
        it but gradients, and no other rank takes part."""
        config = self.objective
        if config.scope == "global":
            config = replace(config, scope="batch")
        if self.teacher is not None and not self.teacher.distils:
            inputs = {**inputs, **self.teacher.guide(inputs), "counts": None}
        model: Any = self.model
        targets = self._targets(inputs, 0)
        decided = Decided(
            denominator=targets.valid_BT.sum(), kept=count_kept(inputs.get("counts"), config)
        )
        model.train()
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            output = self._forward(model, inputs, targets, config, decided)
        output["loss"].backward()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The student is as it will be trained (Liger's layers, checkpointing), on its device, and
        not wrapped yet."""
        # Beside a GPU the CPU does small things, such as pinning a batch, and waking its
        # threads takes longer than the work: 6 ms an operation were measured.
        with torch_threads(1 if self.args.device.type == "cuda" else None):
            if self.before_training is not None:
                self.before_training()
            return super()._inner_training_loop(*args, **kwargs)

    def split_steps(self, micro_batch: int, accumulation: int) -> None:
        """Otherwise than the arguments said. Before the training."""
        self.args.per_device_train_batch_size = self._train_batch_size = micro_batch
        self.args.gradient_accumulation_steps = accumulation

    def _plain_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Evaluation: mean nll of all tokens."""
        targets = Targets(labels_BT=inputs["labels"])
        plain = ObjectiveConfig(method="cpt")
        output = model(micro_batch=self._micro_batch(inputs, targets, plain))
        return (output["loss"], {"loss": output["loss"]}) if return_outputs else output["loss"]
