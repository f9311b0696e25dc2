"""What is held against what: a token's loss against the teacher's loss carried to it, or the losses
of a whole stretch of text under both models, which are the same event.

Shape letters: B sequences, T positions, N tokens in a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vocagnolm.objective.batch import Targets

# Sums that decide are taken in integers (1 / 2^20 nats), because a float sum depends on the order
# and so on the device and on how a batch is split.
FIXED_POINT = float(1 << 20)
LARGEST_NATS = 1e6


@dataclass(frozen=True)
class Compared:
    """Per token [B, T]: the two losses that are compared, of the token or of its stretch."""

    own_BT: Tensor
    teacher_BT: Tensor
    """NaN where unmapped."""
    first_BT: Tensor | None
    """By stretch: position of the stretch's first token. Equal for its tokens alone."""


def compared(nll_BT: Tensor, targets: Targets, teacher_BT: Tensor | None = None) -> Compared:
    """`teacher_BT`: the guidance with its gaps filled (`unmapped: mean`)."""
    assert targets.guidance_BT is not None
    teacher = targets.guidance_BT.float() if teacher_BT is None else teacher_BT
    stretch = targets.stretch_BT
    if stretch is None:
        return Compared(nll_BT, teacher, None)
    B, T = stretch.shape
    mapped = targets.mapped_BT
    rows = torch.arange(B, device=stretch.device)[:, None] * T
    own = stretch_losses(nll_BT.flatten(), (stretch + rows).flatten(), mapped.flatten(), B * T)
    position = torch.arange(T, device=stretch.device).expand(B, T)
    # unmapped tokens stand for themselves, wherever they lie
    first = torch.full_like(stretch, T).scatter_reduce(
        1, stretch, torch.where(mapped, position, T), "amin"
    )
    return Compared(
        own.view(B, T), teacher, torch.where(mapped, first.gather(1, stretch), position)
    )


def stretch_losses(nll_N: Tensor, stretch_N: Tensor, mapped_N: Tensor, stretches: int) -> Tensor:
    """Each token's stretch's loss; an unmapped token's own."""
    if nll_N.dtype == torch.float64:
        values, back = torch.where(mapped_N, nll_N, 0.0), 1.0
    else:
        values, back = torch.where(mapped_N, fixed_point(nll_N), 0), FIXED_POINT
    sums = torch.zeros(stretches, dtype=values.dtype, device=values.device)
    sums = sums.scatter_add(0, stretch_N, values)
    tokens = torch.zeros(stretches, dtype=torch.int64, device=values.device)
    tokens = tokens.scatter_add(0, stretch_N, mapped_N.long())
    whole = (sums.double() / back).to(nll_N.dtype).gather(0, stretch_N)
    # a stretch of one token is that token, to the last bit
    return torch.where(mapped_N & (tokens.gather(0, stretch_N) > 1), whole, nll_N)


def fixed_point(nats: Tensor) -> Tensor:
    limited = nats.float().nan_to_num(nan=LARGEST_NATS).clamp(-LARGEST_NATS, LARGEST_NATS)
    return (limited * FIXED_POINT).round().long()
