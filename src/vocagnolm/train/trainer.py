"""`GuidedTrainer`: the guided objective in Hugging Face's Trainer, for those who have one."""

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer, TrainingArguments

from vocagnolm.model.runtime import router_loss_of
from vocagnolm.objective import Decided, Implementation, ObjectiveConfig, Targets
from vocagnolm.processes import Ranks
from vocagnolm.train.loop import plan_step
from vocagnolm.train.metrics import StepMeter
from vocagnolm.train.student import (
    BlockCollator,
    MicroBatch,
    causal_lm_of,
    guided_forward,
    require_precision,
    require_separation,
    understood_head,
)
from vocagnolm.train.teacher import OnlineTeacher


class GuidedTrainer(Trainer):
    """Trains any causal LM with any method of the objective, from blocks of ids and guidance.

    It uses ordinary `TrainingArguments`, callbacks, checkpoints and trackers. Give it a map-style
    dataset of blocks (`vocagnolm.data.blocks`), or of dictionaries with `input_ids` and `guidance`
    [L], and `labels` if not every token is predicted (`vocagnolm.guide`); L may vary. Unlike a
    plain Trainer, it reads a step ahead, so that tokens of several micro-batches and processes can
    compete (scope global), and it never holds all logits. `vocagnolm train` has its own loop, which
    resumes exactly and reads losses as late as possible.
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
        self.impl: Implementation = impl
        self._plan: list[tuple[Targets, Decided]] = []
        self._meter = StepMeter()
        super().__init__(
            model=model, args=args, data_collator=data_collator or BlockCollator(), **kwargs
        )
        # the loss is divided by the tokens of the whole step: with this, and a number of items from
        # `get_batch_samples`, every version of transformers adds up micro-batches undivided
        self.model_accepts_loss_kwargs = True
        if teacher is not None:
            teacher.to(self.args.device)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """All micro-batches of the next step, with what they need to know about each other."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._meter = StepMeter()
        self._plan = plan_step(
            batches, self.objective, self._score, step=self.state.global_step, teacher=self.teacher
        )
        return batches, items

    @torch.no_grad()
    def _score(self, inputs: dict[str, Any], targets: Targets) -> Tensor:
        model: Any = self.model_wrapped
        model.eval()
        nll: Tensor = model(micro_batch=self._micro_batch(inputs, targets, only_nll=True))["nll"]
        model.train()
        return nll

    def _micro_batch(
        self,
        inputs: dict[str, Any],
        targets: Targets,
        config: ObjectiveConfig | None = None,
        **more: Any,
    ) -> MicroBatch:
        step, config = self.state.global_step, config or self.objective
        return MicroBatch.of(inputs, targets, config, step=step, impl=self.impl, **more)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:  # an evaluation: mean nll of all tokens
            plain = ObjectiveConfig(method="cpt")
            targets = Targets(labels_BT=inputs["labels"])
            loss = model(micro_batch=self._micro_batch(inputs, targets, plain))["loss"]
            return (loss, {"loss": loss}) if return_outputs else loss
        targets, decided = self._plan.pop(0)
        config = self.objective.at(self.state.global_step / max(1, self.state.max_steps - 1))
        teacher = None
        if self.teacher is not None and self.teacher.distils:
            teacher = self.teacher.distribution(inputs)
        batch = self._micro_batch(inputs, targets, config, teacher=teacher, decided=decided)
        output = model(micro_batch=batch)
        self._meter.add(output, targets, inputs.get("block"))
        # DDP and FSDP average gradients over ranks, and the denominator counts all of them
        loss = output["loss"] * Ranks.of().count
        return (loss, output) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics of the latest step to the Trainer's own."""
        if "loss" in logs and self._meter.losses:
            self._meter.finish(self.state.global_step, 0.0)
            found, self._meter = self._meter.read(), StepMeter()
            logs = {**{name: value for name, value in found.items() if value is not None}, **logs}
        super().log(logs, start_time)


def install_guided_forward(model: nn.Module, *, router_loss: bool | None = None) -> None:
    """Let the causal LM inside `model` take a `micro_batch`, through whatever the Trainer wraps it
    in. Installing twice is harmless. `router_loss`: as of `GuidedStudent`."""
    causal_lm = causal_lm_of(model)
    require_precision(model)
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
        head: Any = self.get_output_embeddings()
        if isinstance(head, FSDPModule):  # its own forward, which would gather it, is not run
            head.unshard()
        return guided_forward(self, form, router, micro_batch)

    # on the instance, past nn.Module's attribute checks: this is a method, not a submodule
    causal_lm.__dict__["forward"] = types.MethodType(forward, causal_lm)
    causal_lm.__dict__["_vocagnolm_forward"] = True
