"""From a causal language model to its decoder and its head, with a probe: architectures end in many
ways, and a silent difference would score or train another model."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from vocagnolm.errors import ModelError
from vocagnolm.model.sharding import VocabularyPart, held_here
from vocagnolm.objective.head import Head, Transform

# ---- positions ----

_KNOWN = ContextVar("rows hold one document each", default=False)
_SEARCH = "find_packed_sequence_indices"


@contextlib.contextmanager
def one_document_a_row() -> Iterator[None]:
    """transformers looks through the positions of every batch for a second document, also through
    those that it has made itself, and the host waits for the device's answer before it can launch
    the first layer. Inside this context the answer is known: there is none."""
    _teach_transformers()
    token = _KNOWN.set(True)
    try:
        yield
    finally:
        _KNOWN.reset(token)


@functools.cache
def _teach_transformers() -> None:
    search: Any = getattr(masking_utils, _SEARCH, None)
    if search is None:  # another version, which has its own way
        return

    @functools.wraps(search)
    def unless_known(position_ids: Any) -> Any:
        return None if _KNOWN.get() else search(position_ids)

    setattr(masking_utils, _SEARCH, unless_known)


# ---- decoder and head ----


_PROBE_TOKENS = 16
# what configurations call the factor on the logits, and the power with which they mean it:
# Granite divides by logits_scaling, HyperCLOVA X multiplies
_SCALES = {
    "logit_scale": (1,),
    "lm_head_multiplier": (1,),
    "logits_scaling": (-1, 1),
    "logits_mup_width_multiplier": (-1,),
}
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class HeadForm:
    """How a model's logits come from its last linear layer: known once, while the layer's weights
    change (and are gathered anew under FSDP)."""

    softcap: float | None = None
    scale: float = 1.0

    def head(self, model: PreTrainedModel, vocabulary_size: int | None = None) -> Head:
        """Where several processes hold the model together: the rows of this one."""
        linear: Any = model.get_output_embeddings()
        return Head(
            weight=held_here(model, linear.weight),
            bias=held_here(model, getattr(linear, "bias", None)),
            softcap=self.softcap,
            scale=self.scale,
            vocabulary_size=vocabulary_size,
        )

    def transform(self, bias: Tensor | None) -> Transform:
        """From the products of a head that has no plain weight."""
        return Transform(None if bias is None else bias.float(), self.softcap, self.scale)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part that ends in hidden states. Llama 4's text model does not name it as its base."""
    base = model.base_model
    if base is not model:
        return base
    return next(part for part in model.children() if isinstance(part, PreTrainedModel))


def run_decoder(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    position_ids_BT: Tensor | None = None,
    **options: Any,
) -> Any:
    """The decoder's outputs. Positions that start again mark documents: most architectures of
    transformers then keep attention inside each of them (`separates_documents` finds out). No
    attention mask: rows may be padded on the right only."""
    if position_ids_BT is not None:
        options["position_ids"] = position_ids_BT
        return decoder_of(model)(input_ids=input_ids_BT, use_cache=False, **options)
    with one_document_a_row():
        return decoder_of(model)(input_ids=input_ids_BT, use_cache=False, **options)


def last_hidden(
    model: PreTrainedModel, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None
) -> Tensor:
    """Hidden states after the final norm [B, T, D]."""
    hidden: Tensor = run_decoder(model, input_ids_BT, position_ids_BT).last_hidden_state
    return hidden


@torch.no_grad()
def head_form(model: PreTrainedModel) -> HeadForm | None:
    """The form of head that gives the model's own logits on a few tokens; None where weight, bias,
    scale and soft cap do not explain them."""
    rows = model.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, rows, (1, _PROBE_TOKENS), generator=generator).to(model.device)
    training = model.training
    model.eval()
    try:
        part = VocabularyPart.of(model)
        own = model(input_ids=ids, use_cache=False).logits.float()
        own = own if part is None else own[..., part.columns]
        hidden = last_hidden(model, ids)
        tolerance = 1e-4 if model.dtype == torch.float32 else 2e-2
        largest = own.abs().max().clamp(min=1e-6)
        for form in _candidates(model.config.get_text_config()):
            ours = form.head(model).logits(hidden).float()
            fits = own.shape == ours.shape and (own - ours).abs().max() <= tolerance * largest
            if fits if part is None else part.all_agree(bool(fits)):
                return form
    except (AttributeError, RuntimeError, TypeError, StopIteration, ValueError):
        pass  # no decoder of the usual kind
    finally:
        model.train(training)
    return None


def _candidates(config: Any) -> Iterator[HeadForm]:
    softcap = next((value for name in _SOFTCAPS if (value := _number(config, name))), None)
    found = [(_number(config, name), powers) for name, powers in _SCALES.items()]
    factors = [[value**power for power in powers] for value, powers in found if value]
    for chosen in itertools.product(*factors):
        scale = 1.0
        for factor in chosen:
            scale *= factor
        yield HeadForm(softcap, scale)


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@torch.no_grad()
def separates_documents(model: PreTrainedModel) -> bool:
    """Whether positions that start again keep a document from seeing the one before it: two
    documents, the first exchanged, must leave the second's hidden states alone."""
    rows = model.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(1)
    first, other, second = torch.randint(0, rows, (3, 1, _PROBE_TOKENS), generator=generator)
    positions = torch.arange(_PROBE_TOKENS).repeat(2)[None].to(model.device)
    training = model.training
    model.eval()
    try:
        one, two = (
            last_hidden(model, torch.cat([before, second], 1).to(model.device), positions)
            for before in (first, other)
        )
    except TypeError:  # it takes no positions at all
        return False
    finally:
        model.train(training)
    one, two = one[:, _PROBE_TOKENS:].float(), two[:, _PROBE_TOKENS:].float()
    # half precision may round otherwise in another place of a batch; leaking is far larger
    tolerance = 1e-5 if model.dtype == torch.float32 else 1e-2
    return bool((one - two).abs().max() <= tolerance * one.abs().max())


# ---- mixtures of experts ----


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
