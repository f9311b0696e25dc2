"""The likeliest tokens of a distribution, or tokens drawn from it, out of a chunk of logits.

Two steps, because several processes may hold the vocabulary together: *choose* among the logits of
this process, chunk by chunk, and *finish* for all tokens at once, as packed numbers
(`vocagnolm.alternatives`).

Shape letters: N tokens, V rows of the head, K alternatives, P processes, G groups of columns.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vocagnolm.alternatives import (
    FOLLOWS_BIT,
    ID_SHIFT,
    NLL_STEPS,
    NOTHING,
    STEPS_PER_NAT,
    AlternativesSpec,
)
from vocagnolm.model.runtime import VocabularyPart
from vocagnolm.objective.head import Transform
from vocagnolm.objective.selection import mixed_bits

# Columns that are looked at together: the likeliest K tokens lie in the K groups with the largest
# maxima, so that only these are searched. A GPU's own search passes over a row many times.
_GROUP = 128
_ONE_BY_ONE = 16
_EMPTY = NOTHING - (1 << 32)  # as a signed number


@dataclass
class AlternativeChoice:
    """The alternatives of N tokens, being chosen. `seeds_N`: for draws, one number a token."""

    spec: AlternativesSpec
    values_NK: Tensor
    """Logits."""
    ids_NK: Tensor
    lse_N: Tensor
    """Over the rows of the head that this process holds."""
    seeds_N: Tensor | None

    @classmethod
    def of(
        cls, spec: AlternativesSpec, count: int, device: torch.device, seeds_N: Tensor | None = None
    ) -> "AlternativeChoice":
        assert not spec.sampled or seeds_N is not None
        values = torch.empty(count, spec.count, device=device)
        ids = torch.empty(count, spec.count, dtype=torch.int64, device=device)
        return cls(spec, values, ids, torch.empty(count, device=device), seeds_N)

    def choose(self, first: int, last: int, x_NV: Tensor, lse_N: Tensor, how: Transform) -> None:
        """Tokens `first..last`, from their raw products."""
        z = how(x_NV).float()
        if self.spec.sampled:
            assert self.seeds_N is not None
            uniform = uniform_numbers(self.seeds_N[first:last], self.spec.count)
            values, ids = drawn(z, lse_N.float(), uniform)
        else:
            values, ids = likeliest(z, self.spec.count)
        self.values_NK[first:last], self.ids_NK[first:last] = values, ids
        self.lse_N[first:last] = lse_N

    def finish(self, labels_N: Tensor, part: VocabularyPart | None = None) -> Tensor:
        """Packed, int32 [N, K]."""
        values, ids, lse = self.values_NK, self.ids_NK, self.lse_N
        if part is not None:
            values, ids, lse = self._joined(part)
        nll = lse[:, None] - values
        steps = (nll * STEPS_PER_NAT).round().clamp(0, NLL_STEPS)
        packed = (ids << ID_SHIFT) | steps.nan_to_num(0.0).long()
        packed |= torch.where(ids == labels_N[:, None], FOLLOWS_BIT, 0)
        return torch.where(torch.isfinite(nll), packed, _EMPTY).to(torch.int32)

    def _joined(self, part: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
        """Over all processes' rows of the head."""
        size = dist.get_world_size(part.group)

        def gathered(own: Tensor) -> Tensor:
            parts = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(parts, own.contiguous(), group=part.group)
            return torch.stack(parts, dim=1)

        values_NPK, lse_NP = gathered(self.values_NK), gathered(self.lse_N)
        ids_NPK = gathered(self.ids_NK + part.first)
        lse = lse_NP.logsumexp(dim=1)
        if not self.spec.sampled:
            values, index = values_NPK.flatten(1).topk(self.spec.count)
            return values, ids_NPK.flatten(1).gather(1, index), lse
        # which process's draw counts is drawn by what its rows weigh
        assert self.seeds_N is not None
        uniform = uniform_numbers(~self.seeds_N, self.spec.count)
        weight = (lse_NP - lse[:, None]).double().exp().cumsum(1)
        owner = torch.searchsorted(weight, (uniform * weight[:, -1:]).contiguous(), right=True)
        owner = owner.clamp(max=size - 1)[:, None]
        return values_NPK.gather(1, owner)[:, 0], ids_NPK.gather(1, owner)[:, 0], lse


def likeliest(z_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(logits, columns) [N, K] of the largest, in order."""
    groups = z_NV.shape[1] // _GROUP
    if not z_NV.is_cuda or groups <= 4 * count:
        return z_NV.topk(count)
    return by_groups(z_NV, count)


def by_groups(z_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same in two small searches instead of a large one: `count` groups of columns first."""
    n, v = z_NV.shape
    groups = v // _GROUP
    grouped = z_NV[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    _, chosen = _largest(grouped.amax(-1), count)
    inside = grouped.gather(1, chosen[:, :, None].expand(n, count, _GROUP)).flatten(1)
    beyond = groups * _GROUP  # columns of no whole group: all are looked at
    if beyond < v:
        inside = torch.cat([inside, z_NV[:, beyond:]], dim=1)
    values, index = _largest(inside, count)
    group = chosen.gather(1, (index // _GROUP).clamp(max=count - 1))
    column = group * _GROUP + index % _GROUP
    return values, torch.where(index < count * _GROUP, column, beyond + index - count * _GROUP)


def _largest(x_NM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` of a tensor that is not needed afterwards. A few of a short row are sooner found one
    after the other than by a GPU's search."""
    if count > _ONE_BY_ONE:
        found, where = x_NM.topk(count)
        return found, where
    values, indices = [], []
    for _ in range(count):
        value, index = x_NM.max(dim=1, keepdim=True)
        values.append(value)
        indices.append(index)
        x_NM.scatter_(1, index, float("-inf"))
    return torch.cat(values, dim=1), torch.cat(indices, dim=1)


def drawn(z_NV: Tensor, lse_N: Tensor, uniform_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, columns) [N, K] of tokens drawn with replacement: where the running sum of the
    probabilities passes a uniform number. Sums of groups first, then inside one, in float64: a
    running sum of 150,000 numbers in float32 would be no sum."""
    v = z_NV.shape[1]
    p = (z_NV - lse_N[:, None]).exp_()
    if v % _GROUP:
        p = F.pad(p, (0, -v % _GROUP))
    p_NGC = p.unflatten(1, (-1, _GROUP))
    upto = p_NGC.sum(-1, dtype=torch.float64).cumsum(1)
    wanted = (uniform_NK * upto[:, -1:]).contiguous()
    group = torch.searchsorted(upto, wanted, right=True).clamp(max=upto.shape[1] - 1)
    before = F.pad(upto, (1, 0)).gather(1, group)
    inside = p_NGC.gather(1, group[:, :, None].expand(*group.shape, _GROUP)).double().cumsum(-1)
    left = (wanted - before)[:, :, None].contiguous()
    index = torch.searchsorted(inside, left, right=True)[:, :, 0]
    # where rounding passes over the last of them
    last = torch.searchsorted(inside, inside[:, :, -1:].contiguous())[:, :, 0]
    ids = group * _GROUP + torch.minimum(index, last)
    return z_NV.gather(1, ids), ids


def uniform_numbers(seeds_N: Tensor, count: int) -> Tensor:
    """float64 [N, K] in [0, 1): a pure function of the seeds."""
    draw = torch.arange(count, device=seeds_N.device)
    bits = mixed_bits(mixed_bits(seeds_N)[:, None] + draw)
    return (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) / float(1 << 53)
