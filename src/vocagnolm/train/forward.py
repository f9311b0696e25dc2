"""From a causal language model to the objective, without ever making the logits.

The model's own forward is replaced on the instance: called with a `micro_batch` it runs the
decoder and hands hidden states and head to the objective; called as usual it is what it was. The
loss is made *inside* forward because that is where DDP prepares its reduction and FSDP has the
root's parameters (the head) gathered.
"""

import types
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from vocagnolm.errors import TrainingError
from vocagnolm.model.lm_head import (
    HeadForm,
    RouterLoss,
    head_form,
    router_loss_of,
    run_decoder,
    separates_documents,
)
from vocagnolm.objective import (
    Decided,
    Implementation,
    ObjectiveConfig,
    Targets,
    Teacher,
    objective_loss,
    student_nll,
)


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
