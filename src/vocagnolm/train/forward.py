"""From a causal language model to the objective, without ever making the logits.

The model's own forward is replaced on the instance: called with a `micro_batch` it runs the
decoder and hands hidden states and head to the objective; called as usual it is what it was. The
loss is made *inside* forward because that is where DDP prepares its reduction and FSDP has the
root's parameters (the head) gathered.
"""

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vocagnolm.errors import TrainingError
from vocagnolm.model.nll import head_of
from vocagnolm.objective import (
    Head,
    Implementation,
    ObjectiveConfig,
    Teacher,
    objective_loss,
    student_nll,
)

_PROBE_TOKENS = 8


@dataclass(kw_only=True)
class MicroBatch:
    """One call of the guided forward. B sequences, T positions; labels and guidance are shifted:
    entry t belongs to the token that position t predicts."""

    input_ids_BT: Tensor
    labels_BT: Tensor
    config: ObjectiveConfig
    position_ids_BT: Tensor | None = None
    guidance_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    teacher: Teacher | None = None
    sequence_index_B: Tensor | None = None
    step: int = 0
    selected_BT: Tensor | None = None
    nll_BT: Tensor | None = None
    denominator: Tensor | None = None
    only_nll: bool = False
    """First pass of a selection over several micro-batches: nll alone, without gradient."""
    impl: Implementation = "auto"


def install_guided_forward(model: nn.Module) -> None:
    """Teach the causal LM inside `model` to take a `micro_batch`. Installing twice is harmless."""
    causal_lm = causal_lm_of(model)
    if getattr(causal_lm, "_vocagnolm_forward", False):
        return
    verify_head(causal_lm)
    plain_forward = causal_lm.forward

    def forward(
        self: PreTrainedModel, *args: Any, micro_batch: MicroBatch | None = None, **kwargs: Any
    ) -> Any:
        if micro_batch is None:
            return plain_forward(*args, **kwargs)
        return _guided_forward(self, micro_batch)

    # on the instance, past nn.Module's attribute checks: this is a method, not a submodule
    causal_lm.__dict__["forward"] = types.MethodType(forward, causal_lm)
    causal_lm.__dict__["_vocagnolm_forward"] = True


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


def objective_head(model: PreTrainedModel, vocabulary_size: int | None = None) -> Head:
    head = head_of(model)
    return Head(
        weight=head.weight,
        bias=head.bias,
        softcap=head.softcap,
        scale=head.scale,
        vocabulary_size=vocabulary_size,
    )


def last_hidden(
    model: PreTrainedModel, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None
) -> Tensor:
    """Hidden states after the final norm [B, T, D]. Positions that start again mark documents:
    transformers then keeps attention inside each of them."""
    kwargs: dict[str, Any] = {"input_ids": input_ids_BT, "use_cache": False}
    if position_ids_BT is not None:
        kwargs["position_ids"] = position_ids_BT
    decoder: Any = model.base_model
    return decoder(**kwargs).last_hidden_state


@torch.no_grad()
def verify_head(model: PreTrainedModel) -> None:
    """Our head on the decoder's output must give the model's own logits: architectures differ in
    scales and caps, and a silent difference would train another model."""
    training = model.training
    model.eval()
    rows = model.get_output_embeddings().weight.shape[0]
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None] * 7 % rows
    own = model(input_ids=ids, use_cache=False).logits.float()
    head = head_of(model)
    ours = head.logits(last_hidden(model, ids))
    model.train(training)
    tolerance = 1e-3 if model.dtype == torch.float32 else 3e-2
    if own.shape != ours.shape or not torch.allclose(own, ours, rtol=tolerance, atol=tolerance):
        raise TrainingError(
            f"{type(model).__name__} makes its logits in a way that is not known here (weight, "
            "bias, scale and soft cap of the head do not explain them). "
            "Please report the architecture."
        )


def _guided_forward(model: PreTrainedModel, batch: MicroBatch) -> dict[str, Any]:
    hidden = last_hidden(model, batch.input_ids_BT, batch.position_ids_BT)
    head = objective_head(model)
    if batch.only_nll:
        return {"nll": student_nll(hidden, head, batch.labels_BT, impl=batch.impl)}
    output = objective_loss(
        hidden,
        head,
        batch.labels_BT,
        batch.guidance_BT,
        batch.config,
        impl=batch.impl,
        step=batch.step,
        sequence_index_B=batch.sequence_index_B,
        entropy_BT=batch.entropy_BT,
        teacher=batch.teacher,
        selected_BT=batch.selected_BT,
        nll_BT=batch.nll_BT,
        denominator=batch.denominator,
    )
    return {
        "loss": output.loss,
        "nll": output.nll_BT,
        "selected": output.selected_BT,
        "stats": output.stats,
    }
