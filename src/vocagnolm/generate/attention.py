"""Attention for answers that are being written: every row has a slot in a static cache of keys and
values, and all rows may share one prefix, which is kept once.

The worked examples before a question are the same for all of them: some 700 tokens of prefix for
100 of question. A query attends to the shared part and to its own slot under one softmax. A slot
keeps its row's tokens from the first one behind the prefix; rows of any length stand side by side
without padding, and a slot whose answer has ended is taken by the next one.

Shape letters: B rows, Q queries of a row, H query heads in G groups, K own keys, P shared keys,
D numbers of a key, L tokens of a slot.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vocagnolm.objective.head import has_triton

NAME = "vocagnolm_slots"
"""The attention's name among those of transformers. No mask belongs to it: positions say all."""
_UNSEEN = -1e30  # not infinite: the sum of a row that sees no shared key must stay a number
_MAX_SCORES = 2**26  # elements of a matrix of scores that are held at a time
_LARGEST_HEAD = 256  # numbers of a key that the GPU's kernel takes


@dataclass(frozen=True)
class Prefix:
    """Keys and values [1, G, P, D] of the tokens that all rows share, one pair per layer."""

    tokens: int = 0
    layers: Sequence[tuple[Tensor, Tensor]] = ()


@dataclass
class Slots:
    """Keys and values [slots, G, L, D] of the rows' own tokens, one pair per layer; allocated when
    the first tokens come, whose heads say how large they are."""

    count: int
    tokens: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, layer: int, key_BGQD: Tensor, value_BGQD: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            made = (
                new.new_zeros(self.count, new.shape[1], self.tokens, new.shape[3])
                for new in (key_BGQD, value_BGQD)
            )
            keys, values = made
            self.layers[layer] = keys, values
        return self.layers[layer]


@dataclass
class Pass:
    """What attention must know of the forward pass under way."""

    positions_BQ: Tensor
    """Where the queries stand among their row's own tokens."""
    windows: Sequence[int | None]
    """How far back a query sees in every layer, itself included."""
    prefix: Prefix
    slots: Slots | None = None
    """Where keys and values are kept; None: they are not."""
    slot_BN: Tensor | None = None
    """The slots of each row. A prompt with several answers is read once and kept in each of their
    slots; a row that writes has one."""
    writing: bool = False
    """One query a row, which sees all that its slot holds. False: whole texts are read, each row
    from its first own token on."""
    aligned: bool = False
    """Row b has slot b: nothing need be gathered."""
    captured: list[tuple[Tensor, Tensor]] | None = None
    """Collects the keys and values of the pass, one pair per layer."""
    layer: int = -1
    """The layer that attended last: layers attend in order, each once in a pass."""


_pass: Pass | None = None


@contextmanager
def attending(under_way: Pass) -> Iterator[None]:
    """Within, the model's attention is that of this pass."""
    global _pass
    before, _pass = _pass, under_way
    try:
        yield
    finally:
        _pass = before


# ---- a model with this attention ----


class _NothingKept(CacheLayerMixin):
    """A layer of a cache that holds nothing: keys and values are those of the pass alone."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.14


class PassThroughCache(Cache):
    """Hands keys and values on to the attention, which keeps them itself. It never asks which
    layer they are of: a compiled layer would then be compiled anew for each."""

    def __init__(self, layers: int):
        kind: Any = _NothingKept
        super().__init__(layers=[kind() for _ in range(layers)])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def windows_of(model: PreTrainedModel) -> list[int | None] | None:
    """How far back the queries of every layer see; None for a model whose layers are not all of
    the kind that slots serve (recurrent ones, chunks, layers that read another one's keys)."""
    config: Any = model.config.get_text_config()
    layers = DynamicCache(config=model.config).layers
    if (
        not {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
        or len(layers) != config.num_hidden_layers
        or getattr(config, "attention_chunk_size", None)
        or model.config._attn_implementation != "sdpa"
        or not getattr(model, "_supports_attention_backend", False)
    ):
        return None
    return [getattr(layer, "sliding_window", None) for layer in layers]


def use_slots(model: PreTrainedModel) -> None:
    """Switch the model to this attention. Outside `attending` it is torch's own."""
    AttentionInterface.register(NAME, slot_attention)
    model.set_attn_implementation(NAME)


def use_own(model: PreTrainedModel) -> None:
    """Give the model its ordinary attention back."""
    if model.config._attn_implementation == NAME:
        model.set_attn_implementation("sdpa")


# ---- attention ----


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: [B, Q, H, D] from queries [B, H, Q, D] and new keys and values."""
    if _pass is None:
        own: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return own
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = torch.ops.vocagnolm.slots if torch.compiler.is_compiling() else _attend_in_pass
    return attend(query, key, value, scale, softcap or 0.0), None


def _attend_in_pass(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float
) -> Tensor:
    """Keeps new keys and values in their slots, and attends to all that a row has."""
    now = _pass
    assert now is not None
    now.layer += 1
    layer = now.layer
    if now.captured is not None:
        now.captured.append((key, value))
    window, prefix = now.windows[layer], _shared_part(now, layer, key, value)
    if now.slots is None:
        return _attend_reading(query, key, value, prefix, window, scale, softcap)
    assert now.slot_BN is not None
    keys, values = now.slots.of(layer, key, value)
    if not now.writing:
        for slot_B in now.slot_BN.unbind(1):
            keys[slot_B, :, : key.shape[2]] = key
            values[slot_B, :, : value.shape[2]] = value
        return _attend_reading(query, key, value, prefix, window, scale, softcap)
    slot_B, position_B = now.slot_BN[:, 0], now.positions_BQ[:, 0]
    if query.is_cuda and has_triton() and max(key.shape[3], value.shape[3]) <= _LARGEST_HEAD:
        from vocagnolm.generate.triton_slots import attend_writing

        new = (query[:, :, 0], key[:, :, 0], value[:, :, 0])
        written = attend_writing(
            *new, keys, values, slot_B, position_B, prefix, scale, window, softcap
        )
        return written[:, None]
    keys[slot_B, :, position_B] = key[:, :, 0]
    values[slot_B, :, position_B] = value[:, :, 0]
    if now.aligned:
        keys, values = keys[: len(query)], values[: len(query)]
    else:
        keys, values = keys[slot_B], values[slot_B]
    return attend_to_slots(query, keys, values, position_B, prefix, scale, window, softcap)


@torch.library.custom_op("vocagnolm::slots", mutates_args=())
def _attend_compiled(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float
) -> Tensor:
    return _attend_in_pass(query, key, value, scale, softcap)


@_attend_compiled.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float) -> Tensor:
    B, H, Q, _ = query.shape
    return query.new_empty(B, Q, H, value.shape[3])


def _shared_part(now: Pass, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if now.prefix.tokens:
        return now.prefix.layers[layer]
    return key.new_empty(1, *key.shape[1:2], 0, key.shape[3]), value.new_empty(
        1, *value.shape[1:2], 0, value.shape[3]
    )


def _attend_reading(
    query_BHQD: Tensor,
    key_BGQD: Tensor,
    value_BGQD: Tensor,
    prefix: tuple[Tensor, Tensor],
    window: int | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attention of a text that is read whole, its rows padded on the right: [B, Q, H, D]."""
    B, H, Q, _ = query_BHQD.shape
    G, P = key_BGQD.shape[1], prefix[0].shape[2]
    plain = P == 0 and (window is None or window >= Q)
    if plain and not softcap:
        grouped = key_BGQD.shape[-1] == value_BGQD.shape[-1]
        if not grouped:
            key_BGQD, value_BGQD = (x.repeat_interleave(H // G, 1) for x in (key_BGQD, value_BGQD))
        out = F.scaled_dot_product_attention(
            query_BHQD, key_BGQD, value_BGQD, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous()
    keys, values = (
        torch.cat([shared.expand(B, -1, -1, -1), own], 2).repeat_interleave(H // G, 1)
        for shared, own in zip(prefix, (key_BGQD, value_BGQD), strict=True)
    )
    here = torch.arange(Q, device=query_BHQD.device)[:, None] + P
    there = torch.arange(P + Q, device=query_BHQD.device)
    seen_QK = there <= here
    if window is not None:
        seen_QK &= here - there < window
    if not softcap:
        out = F.scaled_dot_product_attention(
            query_BHQD, keys, values, attn_mask=seen_QK, scale=scale
        )
        return out.transpose(1, 2).contiguous()
    rows = max(1, _MAX_SCORES // (H * Q * (P + Q)))
    parts = []
    for at in range(0, B, rows):
        here_B = slice(at, at + rows)
        scores = (query_BHQD[here_B] @ keys[here_B].transpose(2, 3)).float() * scale
        scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen_QK, -math.inf).softmax(-1).to(values.dtype)
        parts.append((weights @ values[here_B]).transpose(1, 2))
    return torch.cat(parts).contiguous()


def attend_to_slots(
    query_BH1D: Tensor,
    keys_BGLD: Tensor,
    values_BGLD: Tensor,
    position_B: Tensor,
    prefix: tuple[Tensor, Tensor],
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """The reference of the GPU's kernel, and what a CPU runs: one query a row, [B, 1, H, D]. Every
    product has the same shape whatever the rows hold, so that a row's numbers depend on that row
    alone, to the last bit."""
    B, H, _, _ = query_BH1D.shape
    G, L, P = keys_BGLD.shape[1], keys_BGLD.shape[2], prefix[0].shape[2]
    query = query_BH1D.reshape(B, G, H // G, -1)

    def capped(scores: Tensor) -> Tensor:
        scores = scores.float() * scale
        return softcap * torch.tanh(scores / softcap) if softcap else scores

    own = capped(query @ keys_BGLD.transpose(2, 3))  # [B, G, R, L]
    back = position_B[:, None] - torch.arange(L, device=query.device)
    seen_BL = back >= 0
    if window is not None:
        seen_BL &= back < window
    own = own.masked_fill(~seen_BL[:, None, None], -math.inf)
    top = own.amax(-1, keepdim=True)
    if P:
        of_group = query.transpose(0, 1).reshape(G, -1, query.shape[-1])
        shared = capped(of_group @ prefix[0][0].transpose(1, 2))  # [G, B R, P]
        if window is not None:
            reach = position_B[:, None] + P - torch.arange(P, device=query.device)
            unseen = (reach >= window).repeat_interleave(H // G, 0)
            shared = shared.masked_fill(unseen, _UNSEEN)
        # The shared part enters the softmax like one more key, with its sum as weight.
        lse = shared.logsumexp(-1, keepdim=True)
        weights = (shared - lse).exp().to(query.dtype)
        lse = lse.reshape(G, B, H // G, 1).transpose(0, 1)
        top = torch.maximum(top, lse)
    weight = (own - top).exp()
    total = weight.sum(-1, keepdim=True)
    out = weight.to(query.dtype) @ values_BGLD
    if P:
        joined = (weights @ prefix[1][0]).reshape(G, B, H // G, -1).transpose(0, 1)
        share = (lse - top).exp()
        total = total + share
        out = out + share.to(out.dtype) * joined
    return (out / total.to(out.dtype)).reshape(B, 1, H, -1)
