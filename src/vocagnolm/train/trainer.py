"""`GuidedTrainer`: Hugging Face's Trainer with the guided objective as its loss."""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, TrainingArguments

from vocagnolm.errors import TrainingError
from vocagnolm.model.runtime import (
    HeadForm,
    RouterLoss,
    head_form,
    router_loss_of,
    run_decoder,
    separates_documents,
    torch_threads,
)
from vocagnolm.objective import (
    Decided,
    Implementation,
    ObjectiveConfig,
    ScoredBatch,
    StepWeights,
    Targets,
    Teacher,
    count_kept,
    objective_loss,
    student_nll,
    weigh_step,
)
from vocagnolm.processes import Ranks
from vocagnolm.train.collate import BlockCollator, batch_targets
from vocagnolm.train.online import OnlineTeacher
from vocagnolm.train.step_metrics import MeteredTrainer

# ---- the forward pass ----


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One call of the guided forward: what the student reads, and how its loss is made."""

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


def install_guided_forward(model: nn.Module, *, router_loss: bool | None = None) -> None:
    """Teach the causal LM inside `model` to take a `micro_batch`. Installing twice is harmless.
    `router_loss`: whether a mixture of experts also learns to balance them; None: as its
    configuration says."""
    causal_lm = causal_lm_of(model)
    if getattr(causal_lm, "_vocagnolm_forward", False):
        return
    form = understood_head(causal_lm)
    router = router_loss_of(causal_lm, router_loss)
    plain_forward = causal_lm.forward

    def forward(
        self: PreTrainedModel, *args: Any, micro_batch: MicroBatch | None = None, **kwargs: Any
    ) -> Any:
        if micro_batch is None:
            return plain_forward(*args, **kwargs)
        return _guided_forward(self, form, router, micro_batch)

    # on the instance, past nn.Module's attribute checks: this is a method, not a submodule
    causal_lm.__dict__["forward"] = types.MethodType(forward, causal_lm)
    causal_lm.__dict__["_vocagnolm_forward"] = True


def understood_head(model: PreTrainedModel) -> HeadForm:
    """The student's head, which the objective reads directly."""
    form = head_form(model)
    if form is None:
        raise TrainingError(
            f"{type(model).__name__} makes its logits in a way that is not known here (weight, "
            "bias, scale and soft cap of the head do not explain them). "
            "Please report the architecture."
        )
    return form


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a peft wrapper, or the model itself."""
    unwrap: Any = getattr(model, "get_base_model", None)
    inner = model if unwrap is None else unwrap()
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:
        raise TrainingError(
            f"{type(inner).__name__} is not a causal language model of transformers with a head. "
            "Load the student with AutoModelForCausalLM."
        )
    if hasattr(inner.get_output_embeddings(), "base_layer"):
        raise TrainingError(
            "An adapter sits on the language-model head, which the objective reads directly. "
            "Leave the head out of lora.targets."
        )
    return inner


def require_separation(model: PreTrainedModel, who: str) -> None:
    """For `document_mask`: not every architecture keeps packed documents apart."""
    if not separates_documents(model):
        raise TrainingError(
            f"{who} ({type(model).__name__}) lets a document see the one packed before it: its "
            "architecture knows no positions that start again. Set data.document_mask to false, "
            "or use another model."
        )


def _gather_head(model: PreTrainedModel) -> None:
    """FSDP gathers the head with the final norm. Behind an adapter accelerate does not find that
    norm and shards the head by itself, and its own forward, which would gather it, is not run."""
    output: Any = model.get_output_embeddings()
    if isinstance(output, FSDPModule):
        output.unshard()


def _guided_forward(
    model: PreTrainedModel, form: HeadForm, router: RouterLoss | None, batch: MicroBatch
) -> dict[str, Any]:
    options = {} if router is None or batch.only_nll else {"output_router_logits": True}
    decoded = run_decoder(model, batch.input_ids_BT, batch.position_ids_BT, **options)
    _gather_head(model)
    hidden, head = decoded.last_hidden_state, form.head(model)
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
    if router is not None:
        balance = router(decoded.router_logits)
        loss = loss + balance / batch.decided.micro_batches
        means["router_loss"] = balance.detach()
    # a plain dictionary: the only shape in which FSDP finds the tensors that its hooks hang on
    weights = output.weights_BT.detach()
    return {"loss": loss, "sums": output.sums, "means": means, "weights": weights}


# ---- the trainer ----


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
