"""Attention in which all rows of a batch share one prefix.

The worked examples before a question are the same for a whole task: some 700 tokens of prefix for
100 of question. Their keys and values are computed once and kept once, not once a row. A query
attends to the shared part together with the queries of all other rows and to its own row's part
alone; the two are joined under one softmax, so that the result is that of ordinary attention. In
layers with a sliding window a query sees the end of the shared part alone, as far as it reaches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # each [1, heads, tokens, size]

_NAME = "vocagnolm_shared_prefix"
_GROW_TOKENS = 64
_MAX_SCORES = 2**26  # elements of a score matrix that are held at a time

_UNSEEN = -1e30  # not infinite: of a row that sees no shared key the sum must stay a number


@dataclass
class Prefix:
    """The shared part. A layer with a sliding window keeps the last tokens that any row sees."""

    tokens: int
    layers: list[KeysAndValues]
    windows: list[int | None]
    positions: torch.Tensor | None = None
    """[rows, queries]: where the queries of the step under way stand in their texts."""


_active: Prefix | None = None  # while a batch is under way


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`key` and `value` are the rows' own part; the shared part is the active prefix."""
    if _active is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    shared_key, shared_value = _active.layers[layer]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = _active.windows[layer]
    fused = window is None and _is_fused(query.device, query.dtype, query.shape[-1])
    scores = key.shape[2] if fused else key.shape[2] + shared_key.shape[2]
    rows = max(1, _MAX_SCORES // (query.shape[1] * query.shape[2] * scores))
    parts = [
        _attend(
            query[at : at + rows],
            key[at : at + rows],
            value[at : at + rows],
            _rows_mask(attention_mask, at, rows, query, key),
            shared_key[0],
            shared_value[0],
            scale,
            None if window is None else _seen(_active, shared_key.shape[2], window, at, rows),
        )
        for at in range(0, len(query), rows)
    ]
    return torch.cat(parts), None


def _seen(prefix: Prefix, kept: int, window: int, at: int, rows: int) -> torch.Tensor:
    """Which of the last `kept` shared tokens each query sees [B, Q, P]."""
    assert prefix.positions is not None
    place = torch.arange(prefix.tokens - kept, prefix.tokens, device=prefix.positions.device)
    return prefix.positions[at : at + rows, :, None] - place < window


def _rows_mask(
    mask: torch.Tensor | None, at: int, rows: int, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    if mask is not None:
        return mask if len(mask) == 1 else mask[at : at + rows]
    if query.shape[2] == 1:
        return None
    # transformers leaves the mask out where it is plainly causal
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(
        key.shape[2] - query.shape[2]
    )[None, None]


def _attend(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    mask_B1QK: torch.Tensor | None,
    shared_key_GPD: torch.Tensor,
    shared_value_GPD: torch.Tensor,
    scale: float,
    seen_BQP: torch.Tensor | None = None,
) -> torch.Tensor:
    """B rows, H query heads in G groups, Q queries, K own keys, P shared keys, D numbers each."""
    B, H, Q, D = query_BHQD.shape
    G = key_BGKD.shape[1]
    query = (query_BHQD * scale).reshape(B, G, H // G, Q, D)
    of_group = query.transpose(0, 1).reshape(G, -1, D)
    if seen_BQP is not None:
        seen_BQP = seen_BQP[:, None].expand(-1, H // G, -1, -1).reshape(-1, seen_BQP.shape[-1])
    shared, lse = _attend_shared(of_group, shared_key_GPD, shared_value_GPD, seen_BQP)
    shared = shared.reshape(G, B, H // G, Q, -1).transpose(0, 1)
    lse = lse.reshape(G, B, H // G, Q, 1).transpose(0, 1)
    own = torch.einsum("bgrqd,bgkd->bgrqk", query, key_BGKD).float()
    if mask_B1QK is not None:
        mask = mask_B1QK[:, :, None]
        own = own.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else own + mask
    # The shared part enters the softmax like one more key, with its sum as weight.
    top = torch.maximum(lse, own.amax(-1, keepdim=True))
    weight, own = (lse - top).exp_(), (own - top).exp_()
    total = weight + own.sum(-1, keepdim=True)
    out = torch.einsum("bgrqk,bgkd->bgrqd", own.to(query.dtype), value_BGKD)
    out = (out + weight.to(out.dtype) * shared) / total.to(out.dtype)
    return out.reshape(B, H, Q, -1).transpose(1, 2).contiguous()


def _attend_shared(
    query_GND: torch.Tensor,
    key_GPD: torch.Tensor,
    value_GPD: torch.Tensor,
    seen_NP: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of N scaled queries to the shared keys alone, and log sum exp of their scores."""
    if seen_NP is None and _is_fused(query_GND.device, query_GND.dtype, query_GND.shape[-1]):
        return _fused(query_GND, key_GPD, value_GPD)
    scores = (query_GND @ key_GPD.transpose(1, 2)).float()
    if seen_NP is not None:
        scores = scores.masked_fill_(~seen_NP, _UNSEEN)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(query_GND.dtype) @ value_GPD, lse


def _fused(
    query_GND: torch.Tensor, key_GPD: torch.Tensor, value_GPD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch's flash attention, without the matrix of scores."""
    one = (query_GND[None], key_GPD[None], value_GPD[None])
    if query_GND.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*one, scale=1.0)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*one, scale=1.0)
    return out[0], lse[0]


@cache
def _is_fused(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether flash attention is there for such tensors and gives what it should. Half precision
    on a GPU alone: the answers of a CPU stay what they are."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, tokens, size, generator=random).to(device, dtype) for tokens in (48, 80, 80)
    )
    scores = query.float() @ key.float().transpose(1, 2)
    expected = scores.softmax(-1) @ value.float(), scores.logsumexp(-1)
    try:
        found = _fused(query, key, value)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a.float(), b, rtol=2e-2, atol=2e-2)
        for a, b in zip(found, expected, strict=True)
    )


class GrowingLayer(DynamicLayer):
    """Keys and values in a buffer with room to spare: no copy of everything at every token."""

    _buffers: KeysAndValues | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeysAndValues:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        needed = held + key_states.shape[-2]
        if self._buffers is None or needed > self._buffers[0].shape[-2]:
            old = self._buffers
            self._buffers = (
                _with_room(key_states, needed + _GROW_TOKENS),
                _with_room(value_states, needed + _GROW_TOKENS),
            )
            if old is not None:
                for buffer, before in zip(self._buffers, old, strict=True):
                    buffer[:, :, :held] = before[:, :, :held]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, held:needed] = states
        self.keys, self.values = (buffer[:, :, :needed] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._buffers is not None:
            held = self.get_seq_length()
            self._buffers = (self._buffers[0][indices], self._buffers[1][indices])
            self.keys, self.values = (buffer[:, :, :held] for buffer in self._buffers)


def _with_room(states: torch.Tensor, tokens: int) -> torch.Tensor:
    return states.new_empty(*states.shape[:2], tokens, states.shape[-1])


def new_cache(model: PreTrainedModel, shared: bool) -> Cache:
    """A cache for the rows' own part; for models with special layers, their own kind of cache."""
    if shared or has_plain_layers(model):
        return Cache(layer_class_to_replicate=GrowingLayer)
    return DynamicCache(config=model.config)


def has_plain_layers(model: PreTrainedModel) -> bool:
    """Only full attention: no sliding windows, no recurrent layers."""
    return all(kind is DynamicLayer for kind in _layer_kinds(model))


def can_drop_rows(model: PreTrainedModel) -> bool:
    return all(issubclass(kind, DynamicLayer) for kind in _layer_kinds(model))


def _layer_kinds(model: PreTrainedModel) -> list[type]:
    return [type(layer) for layer in DynamicCache(config=model.config).layers]


def enable_shared_prefix(model: PreTrainedModel) -> bool:
    """Switch the model to attention that can share a prefix; False where it cannot be done."""
    config = model.config.get_text_config()
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap or getattr(config, "attention_chunk_size", None):  # chunks are kept like windows
        return False
    kinds = _layer_kinds(model)
    if not set(kinds) <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return False
    if len(kinds) != config.num_hidden_layers:  # some layers read another one's keys
        return False
    if model.config._attn_implementation != "sdpa":
        return False
    if not getattr(model, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(_NAME, shared_prefix_attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    return bool(model.config._attn_implementation == _NAME)


def disable_shared_prefix(model: PreTrainedModel) -> None:
    if model.config._attn_implementation == _NAME:
        model.set_attn_implementation("sdpa")


def read_prefix(model: PreTrainedModel, ids: list[int]) -> Prefix:
    """One pass over the shared tokens."""
    cache = DynamicCache(config=model.config)
    input_ids = torch.tensor([ids], device=model.device)
    model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    found = Prefix(len(ids), [], [])
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None and layer.values is not None
        found.layers.append((layer.keys, layer.values))
        found.windows.append(getattr(layer, "sliding_window", None))
    return found


def tell_positions(positions: torch.Tensor) -> None:
    """Before every step of a model: where its queries stand."""
    if _active is not None:
        _active.positions = positions


@contextmanager
def sharing(prefix: Prefix | None) -> Iterator[None]:
    """Within, attention sees `prefix` before every row."""
    global _active
    before, _active = _active, prefix
    try:
        yield
    finally:
        _active = before
