"""The load-balancing loss of mixtures of experts, as the model itself computes it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.errors import ModelError
from vocagnolm.model.lm_head import run_decoder


@dataclass(frozen=True)
class RouterLoss:
    """Of the router's logits of all layers."""

    function: Callable[..., Tensor]
    experts: int
    experts_per_token: int
    weight: float
    """The model's own coefficient beside the cross entropy."""

    def __call__(self, router_logits: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = self.function(router_logits, self.experts, self.experts_per_token)
        return self.weight * loss


def router_loss_of(model: PreTrainedModel, wanted: bool | None = None) -> RouterLoss | None:
    """The router loss that transformers adds to this model's own loss; None for models without
    experts, and where it is not wanted. `wanted` None: as the configuration says, whose
    `output_router_logits` turns it on in transformers too."""
    config: Any = model.config.get_text_config()
    if wanted is None:
        wanted = bool(getattr(config, "output_router_logits", False))
    weight = getattr(config, "router_aux_loss_coef", getattr(config, "aux_loss_coef", None))
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if not wanted or not weight:
        return None
    experts: Any = getattr(model, "num_experts", None)
    per_token: Any = getattr(model, "num_experts_per_tok", None)
    if function is None or experts is None or per_token is None:
        raise ModelError(
            f"{type(model).__name__} has a router loss that is not known here. "
            "Set train.router_loss to false to train without it."
        )
    loss = RouterLoss(function, experts, per_token, float(weight))
    _require_same(model, loss)
    return loss


@torch.no_grad()
def _require_same(model: PreTrainedModel, loss: RouterLoss) -> None:
    ids = torch.arange(1, 9, device=model.device)[None]
    training = model.training
    model.eval()
    own = model(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss
    ours = loss(run_decoder(model, ids, output_router_logits=True).router_logits)
    model.train(training)
    if not torch.allclose(loss.weight * own, ours, rtol=1e-2, atol=1e-6):
        raise ModelError(
            f"{type(model).__name__} computes its router loss in a way that is not known here. "
            "Set train.router_loss to false to train without it."
        )
