"""The guided loss in Hugging Face's Trainer and in every trainer derived from it.

    class GuidedSFTTrainer(GuidedTrainerMixin, SFTTrainer): ...
    GuidedSFTTrainer(model, args, train_dataset=guide(dataset, store, tokenizer)).train()

The mixin computes the loss itself, inside the forward pass of the causal language model. So it does
not depend on what a trainer, peft or Liger make of the model's own loss, and no [tokens,
vocabulary] logits are held.
"""

import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.modeling_outputs import CausalLMOutput

from vocagnolm.base.ranks import Ranks
from vocagnolm.errors import TrainingError, UsageError, VocagnolmWarning
from vocagnolm.model.runtime import head_form, router_loss_of, run_decoder
from vocagnolm.objective import COLUMNS, Head, ObjectiveConfig
from vocagnolm.objective.loss import SUMS, guided_output, measures
from vocagnolm.train.collate import GuidedCollator
from vocagnolm.train.student import causal_lm_of, require_precision


@dataclass(frozen=True)
class _Guided:
    """The inputs of the loss of one micro-batch, beside the hidden states."""

    labels: Tensor
    columns: Mapping[str, Tensor]
    config: ObjectiveConfig
    step: int
    items: Tensor | int | None
    """Labels of the whole optimizer step; None: the micro-batch is divided by its own."""
    micro_batches: int
    """Number of micro-batches of the step in this process."""


@dataclass
class _Measured:
    """The guided losses that a trainer has computed with gradient."""

    losses: int = 0
    sums: list[Tensor] = field(default_factory=list)
    means: list[dict[str, Tensor]] = field(default_factory=list)
    """Sums and means since the last log."""
    step: int = -1
    micro_batch: int = 0
    """The latest micro-batch, counted within its step."""

    def next_micro_batch(self, step: int) -> int:
        self.step, self.micro_batch = step, self.micro_batch + 1 if step == self.step else 0
        return self.micro_batch


class GuidedTrainerMixin:
    """Makes a trainer derived from transformers' Trainer train under a teacher's guidance. Write it
    before the trainer: `class T(GuidedTrainerMixin, SFTTrainer): ...`.

    Datasets have the columns of `vocagnolm.guide`. Everything else is the trainer's own: arguments,
    callbacks, checkpoints, adapters. The collator is `GuidedCollator` unless one is given, with
    TRL's `max_length`, `padding_free` and `packing`. The logs also have the measures of the
    objective (`nll_all`, `kept_share`, ...). Settings that are decided over a whole step (`scope:
    global`, `normalise: selected`) and methods that compare whole distributions are refused:
    `vocagnolm train` has them.

    After the first step it is checked that the loss has read the columns.
    """

    objective: ObjectiveConfig = ObjectiveConfig()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(GuidedTrainerMixin)]
        for base in before:
            if issubclass(base, Trainer) and not issubclass(base, GuidedTrainerMixin):
                raise UsageError(
                    f"class {cls.__name__}: GuidedTrainerMixin must stand before {base.__name__}, "
                    f"which otherwise computes the loss: class {cls.__name__}(GuidedTrainerMixin, "
                    f"{base.__name__})."
                )

    def __init__(self, *args: Any, objective: ObjectiveConfig | None = None, **kwargs: Any):
        """`objective`: the method; default: guided, 40 % kept. All other arguments are the
        trainer's."""
        if objective is not None:
            self.objective = objective
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.args.label_smoothing_factor:
            raise UsageError(
                "label_smoothing_factor: the guided loss has no label smoothing. Set it to 0."
            )
        if trainer.args.n_gpu > 1:
            raise UsageError(
                f"{type(self).__name__} was started as one process with {trainer.args.n_gpu} GPUs. "
                "Start one process per GPU: torchrun --nproc-per-node N, or accelerate launch."
            )
        if kwargs.get("data_collator", args[2] if len(args) > 2 else None) is None:
            trainer.data_collator = _collator_for(trainer.args)
        trainer.args.remove_unused_columns = False  # guidance is no argument of the model
        # the labels of the whole step are counted, and every version of transformers adds up
        # micro-batches that were divided by them
        trainer.model_accepts_loss_kwargs = True
        # Liger's layers run; its loss, which would replace the model's forward, does not
        off = {"fused_linear_cross_entropy": False, "cross_entropy": False}
        trainer.args.liger_kernel_config = {**(trainer.args.liger_kernel_config or {}), **off}
        require_precision(trainer.model)
        _install_forward(causal_lm_of(trainer.model))
        self._measured = _Measured()
        trainer.add_callback(_FirstStepCheck(trainer))

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        trainer: Any = self
        state, parts = trainer.state, getattr(trainer, "current_gradient_accumulation_steps", 1)
        config = self.objective.at(state.global_step / max(1, state.max_steps - 1))
        columns = {name: inputs[name] for name in COLUMNS if name in inputs}
        read = {k: v for k, v in inputs.items() if k != "labels" and k not in columns}
        if return_outputs and trainer.compute_metrics is not None:  # an evaluation of logits
            logits = model(**read, use_cache=False).logits
            loss: Any = guided_output(logits, inputs["labels"], columns, config).loss
            return loss, CausalLMOutput(loss=loss, logits=logits)
        place = state.global_step * parts + self._measured.next_micro_batch(state.global_step)
        guided = _Guided(inputs["labels"], columns, config, place, num_items_in_batch, parts)
        output = model(**read, guided=guided)
        if not isinstance(output, dict) or "guided_loss" not in output:
            raise TrainingError(
                f"The forward of {type(causal_lm_of(trainer.model)).__name__} was replaced after "
                "the trainer was made, so that the guided loss is not computed. Patch the model "
                "before."
            )
        loss = output["guided_loss"]
        if model.training:
            self._measured.losses += 1
            self._measured.sums.append(output["sums"])
            self._measured.means.append(output["means"])
        if num_items_in_batch is not None and trainer.args.average_tokens_across_devices:
            # DDP and FSDP average gradients over processes, and the labels of all were counted
            loss = loss * (trainer.accelerator.num_processes // trainer.get_tp_size())
        return (loss, CausalLMOutput(loss=loss)) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the measures of all steps since the last log to those of the trainer."""
        measured = self._measured
        if "loss" in logs and measured.sums:
            sums = Ranks.of().sum(torch.stack(measured.sums).double().sum(0)).tolist()
            means = {
                name: float(torch.stack([m[name] for m in measured.means]).mean())
                for name in measured.means[0]
            }
            measured.sums, measured.means = [], []
            logs = {**measures(sums), **means, **logs}
        super().log(logs, start_time)  # type: ignore[misc]

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, *rest: Any
    ) -> Any:
        """Replaces the preparation of TRL's SFTTrainer, which would tokenize, cut and pack the
        tokens and labels without the other columns."""
        names = getattr(dataset, "column_names", None) or next(iter(dataset))
        if "guidance" not in names:
            raise UsageError(
                f"The dataset has the columns {', '.join(names)}, and no guidance. Make them with "
                "vocagnolm.guide(dataset, store, tokenizer)."
            )
        shuffled = bool(getattr(args, "shuffle_dataset", False))
        if packing:
            from trl import pack_dataset

            dataset = dataset.select_columns([n for n in names if n in _PACKED])
            dataset = dataset.shuffle(seed=args.seed) if shuffled else dataset
            dataset = pack_dataset(dataset, args.max_length, args.packing_strategy)
        return dataset.shuffle(seed=args.seed) if shuffled else dataset


_PACKED = ("input_ids", "labels", *COLUMNS)


class GuidedTrainer(GuidedTrainerMixin, Trainer):  # type: ignore[misc]  # set in its init
    """transformers' Trainer under a teacher's guidance: see `GuidedTrainerMixin`."""


def _collator_for(args: Any) -> GuidedCollator:
    """The collator that treats lengths and packing as a trainer's arguments ask for."""
    free = getattr(args, "padding_free", False) and not getattr(args, "packing", False)
    return GuidedCollator(
        max_length=None if getattr(args, "packing", False) else getattr(args, "max_length", None),
        packing=bool(free),
        pad_to_multiple_of=getattr(args, "pad_to_multiple_of", None) or 1,
    )


class _FirstStepCheck(TrainerCallback):
    """Checks after the first step that a loss has read the guidance: plain training looks the
    same."""

    def __init__(self, trainer: Any):
        self.trainer, self.checked = trainer, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.checked:
            return
        self.checked, measured = True, self.trainer._measured
        if measured.losses:
            mapped = sum(float(sums[SUMS.index("mapped")]) for sums in measured.sums)
            if self.trainer.objective.rule.guidance and mapped == 0:
                warnings.warn(
                    "No token of the first step has guidance: without it every token is trained "
                    "on. Is this the store of these documents?",
                    VocagnolmWarning,
                    stacklevel=2,
                )
            return
        replaced = "compute_loss" in vars(self.trainer)
        owner = next(base for base in type(self.trainer).__mro__ if "compute_loss" in vars(base))
        cause = "the compute_loss that was set on the trainer" if replaced else owner.__name__
        raise TrainingError(
            f"The first step was plain training: the loss was computed by {cause}, which does not "
            "call compute_loss of GuidedTrainerMixin, and nothing read the guidance of the "
            "batches. Let it call super().compute_loss, or remove it."
        )


# ---- the forward pass ----


def _install_forward(model: PreTrainedModel) -> None:
    """Let the model's forward take `guided` and give the guided loss, through whatever a trainer
    wraps it in. Installing twice is harmless."""
    if getattr(model, "_takes_guided", False):
        return
    form, router = head_form(model), router_loss_of(model)
    plain = model.forward

    def forward(
        self: PreTrainedModel, *args: Any, guided: _Guided | None = None, **inputs: Any
    ) -> Any:
        if guided is None:
            return plain(*args, **inputs)
        read = {name: value for name, value in inputs.items() if value is not None}  # peft's
        head = None if form is None else _whole_head(form.head(self))
        if head is None:
            decoded = plain(**{**read, "use_cache": False})
            states = decoded.logits
        else:
            ids, positions = read.pop("input_ids"), read.pop("position_ids", None)
            read.pop("use_cache", None)
            routes = {} if router is None else {"output_router_logits": True}
            decoded = run_decoder(self, ids, positions, **{**read, **routes})
            states = decoded.last_hidden_state
        given: Any = {"num_items_in_batch": guided.items, "step": guided.step}
        output = guided_output(
            states, guided.labels, guided.columns, guided.config, head=head, **given
        )
        loss = output.loss
        if router is not None and torch.is_grad_enabled():
            loss = loss + router(decoded.router_logits) / guided.micro_batches
        # a plain dictionary: the only shape in which FSDP finds the tensors that its hooks hang on
        return {"guided_loss": loss, "sums": output.sums, "means": output.distill_stats}

    # on the instance, past nn.Module's attribute checks: this is a method, not a submodule
    model.__dict__["forward"] = types.MethodType(forward, model)
    model.__dict__["_takes_guided"] = True


def _whole_head(head: Head) -> Head | None:
    """The head with its whole weight, gathered from FSDP2's shards; None where DeepSpeed has
    partitioned it, so that only the model's own forward can use it."""
    if head.weight.numel() == 0:
        return None

    def whole(tensor: Any) -> Any:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    return replace(head, weight=whole(head.weight), bias=whole(head.bias))
