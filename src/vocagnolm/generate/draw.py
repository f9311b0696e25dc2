"""Tokens drawn from a model's distribution: by one uniform number for each, over the inverse of the
distribution in the order of ids, so that a draw is a function of its number and the logits alone.
Their losses and alternatives are those of the model as it is, at temperature 1.

Shape letters: N rows, V columns of the vocabulary, G groups of columns, K alternatives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vocagnolm.alternatives import FOLLOWS_BIT, ID_SHIFT, NLL_STEPS, NOTHING, STEPS_PER_NAT
from vocagnolm.model.nll import uniform_numbers
from vocagnolm.objective.head import has_triton

GROUP = 128
"""Columns whose sums are taken together: a draw finds its group first, then its column."""
_EMPTY = NOTHING - (1 << 32)  # as a signed number


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: at a temperature (0: the likeliest), among the likeliest tokens that
    together hold `top_p` of the probability."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")


class Groups(NamedTuple):
    """Sums over the groups of columns of every row [N, G], each relative to the group's maximum."""

    top: Tensor
    """The largest logit."""
    sum: Tensor
    """The sum of exp(z - top)."""
    hot: Tensor
    """The sum of exp((z - top) / temperature)."""


class Drawn(NamedTuple):
    ids: Tensor
    """int64 [N]"""
    nll: Tensor
    """float32 [N] in nats, at temperature 1."""
    packed: Tensor | None
    """int32 [N, K]: the likeliest tokens, as `vocagnolm.alternatives` packs them."""


def grouped(z_NV: Tensor, temperature: float) -> Groups:
    """The reference of the GPU's kernel, and what a CPU runs."""
    z = F.pad(z_NV, (0, -z_NV.shape[1] % GROUP), value=float("-inf")).unflatten(1, (-1, GROUP))
    top = z.amax(-1)
    below = z - top.clamp(min=torch.finfo(z.dtype).min)[..., None]
    return Groups(top, below.exp().sum(-1), (below / temperature).exp().sum(-1))


def choose(
    logits_NV: Tensor, seeds_N: Tensor, known: int, sampling: Sampling, alternatives: int = 0
) -> Drawn:
    """One token per row of float32 logits, among the first `known` columns: those that the
    tokenizer can spell. `seeds_N`: the draw is a pure function of this number."""
    temperature = sampling.temperature or 1.0
    sums = _sums(logits_NV)(logits_NV, temperature)
    highest = sums.top.amax(1, keepdim=True)
    lse = highest[:, 0] + ((sums.top - highest).exp() * sums.sum).sum(1).log()
    z = logits_NV[:, :known]
    if sampling.temperature == 0:
        ids = z.argmax(1)
    elif sampling.top_p < 1:
        kept = _nucleus(z, temperature, sampling.top_p)
        ids = _inverse(kept, _sums(kept)(kept, temperature), seeds_N, temperature)
    elif known < logits_NV.shape[1]:
        ids = _inverse(z, _sums(z)(z, temperature), seeds_N, temperature)
    else:
        ids = _inverse(z, sums, seeds_N, temperature)
    nll = lse - logits_NV.gather(1, ids[:, None])[:, 0]
    packed = _likeliest(logits_NV, sums.top, lse, ids, alternatives) if alternatives else None
    return Drawn(ids, nll, packed)


def _sums(z_NV: Tensor) -> Callable[[Tensor, float], Groups]:
    if z_NV.is_cuda and has_triton():
        from vocagnolm.generate.triton_groups import triton_grouped

        return triton_grouped
    return grouped


def _inverse(z_NV: Tensor, sums: Groups, seeds_N: Tensor, temperature: float) -> Tensor:
    """Where the running sum of the probabilities passes a uniform number. Sums of groups first,
    then inside one, in float64: a running sum of 150,000 numbers in float32 would be no sum."""
    highest = sums.top.amax(1, keepdim=True)
    upto = (((sums.top - highest) / temperature).exp().double() * sums.hot).cumsum(1)
    wanted = uniform_numbers(seeds_N, 1) * upto[:, -1:]
    group = torch.searchsorted(upto, wanted, right=True)
    group = torch.minimum(group, torch.searchsorted(upto, upto[:, -1:].contiguous()))
    before = F.pad(upto, (1, 0)).gather(1, group)
    columns = group * GROUP + torch.arange(GROUP, device=z_NV.device)
    inside = z_NV.gather(1, columns.clamp(max=z_NV.shape[1] - 1))
    p = ((inside - highest) / temperature).exp().double()
    p = torch.where(columns < z_NV.shape[1], p, 0.0).cumsum(1)
    index = torch.searchsorted(p, (wanted - before).contiguous(), right=True)
    # where rounding passes over the last column that has any probability
    index = torch.minimum(index, torch.searchsorted(p, p[:, -1:].contiguous()))
    return (group * GROUP + index)[:, 0]


def _nucleus(z_NV: Tensor, temperature: float, top_p: float) -> Tensor:
    """Logits of the likeliest tokens that together hold `top_p`; -inf elsewhere. The smallest
    probability among them is found by bisection over the bits of a float, which for positive
    numbers have their order: no sorting, and nothing for which a host must wait."""
    p_NV = (z_NV / temperature).softmax(-1)
    bits = p_NV.view(torch.int32)
    kept = torch.zeros_like(bits[:, :1])
    left = torch.full_like(kept, int(torch.tensor(1.0).view(torch.int32)) + 1)
    for _ in range(31):
        middle = (kept + left) // 2
        enough = (p_NV * (bits >= middle)).sum(1, keepdim=True, dtype=torch.float64) >= top_p
        kept, left = torch.where(enough, middle, kept), torch.where(enough, left, middle)
    return z_NV.masked_fill(bits < kept, float("-inf"))


def _likeliest(z_NV: Tensor, top_NG: Tensor, lse_N: Tensor, drawn_N: Tensor, count: int) -> Tensor:
    """The `count` largest logits lie in the `count` groups with the largest maxima."""
    V = z_NV.shape[1]
    chosen = top_NG.topk(min(count, top_NG.shape[1])).indices
    columns = (chosen[:, :, None] * GROUP + torch.arange(GROUP, device=z_NV.device)).flatten(1)
    inside = z_NV.gather(1, columns.clamp(max=V - 1))
    values, index = inside.masked_fill(columns >= V, float("-inf")).topk(count)
    ids = columns.gather(1, index)
    nll = lse_N[:, None] - values
    steps = (nll * STEPS_PER_NAT).round().clamp(0, NLL_STEPS).nan_to_num(0.0).long()
    packed = (ids << ID_SHIFT) | steps | torch.where(ids == drawn_N[:, None], FOLLOWS_BIT, 0)
    return torch.where(torch.isfinite(nll), packed, _EMPTY).to(torch.int32)
