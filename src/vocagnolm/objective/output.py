"""What the objective gives back."""

import bisect
import itertools
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from vocagnolm.objective.batch import Targets
from vocagnolm.objective.selection import compared

# ---- sums of a batch ----

SUMS = ("nll", "nll_kept", "kept", "weight", "predicted", "mapped")
QUANTILES = (0.1, 0.5, 0.9)
# The excess in a histogram: quantiles of a step are those of all its tokens, to this width.
_STEP_NATS = 0.02
_REACH_NATS = 20.0
BINS = round(2 * _REACH_NATS / _STEP_NATS) + 1


@torch.no_grad()
def batch_sums(nll_BT: Tensor, weights_BT: Tensor, targets: Targets) -> Tensor:
    """float32 [len(SUMS) + BINS] on the device; counts are exact to 16 M tokens."""
    kept = weights_BT != 0
    mapped = targets.mapped_BT if targets.guidance_BT is not None else torch.zeros_like(kept)
    sums = torch.stack(
        [
            torch.where(targets.valid_BT, nll_BT, 0.0).sum(),
            torch.where(kept, nll_BT, 0.0).sum(),
            kept.sum(),
            weights_BT.sum(),
            targets.valid_BT.sum(),
            mapped.sum(),
        ]
    ).float()
    histogram = torch.zeros(BINS, device=nll_BT.device)
    if targets.guidance_BT is not None:
        both = compared(nll_BT, targets)
        excess = (both.own_BT - both.teacher_BT).nan_to_num(0.0)
        place = ((excess + _REACH_NATS) / _STEP_NATS).round().clamp(0, BINS - 1).long()
        histogram = histogram.scatter_add(0, place.flatten(), mapped.flatten().float())
    return torch.cat([sums, histogram])


def measures(sums: list[float]) -> dict[str, float]:
    """The measures of all tokens behind the sums."""
    total = dict(zip(SUMS, sums, strict=False))
    predicted = max(total["predicted"], 1.0)
    found = {
        "nll_kept": total["nll_kept"] / max(total["kept"], 1.0),
        "nll_all": total["nll"] / predicted,
        "kept_share": total["kept"] / predicted,
        "weight_share": total["weight"] / predicted,
        "mapped_share": total["mapped"] / predicted,
    }
    below = list(itertools.accumulate(sums[len(SUMS) :]))
    if below[-1]:
        for q in QUANTILES:
            place = bisect.bisect_right(below, round(q * (below[-1] - 1)))
            found[f"excess_p{round(100 * q)}"] = place * _STEP_NATS - _REACH_NATS
    return found


# ---- the output ----


@dataclass(frozen=True, kw_only=True)
class ObjectiveOutput:
    """`loss` carries the gradient; everything else is detached."""

    loss: Tensor
    nll_BT: Tensor
    """Student nll in nats, fp32; 0 where the label is ignored."""
    weights_BT: Tensor
    """fp32: what each token counts in the loss; 0 and 1 where tokens are selected."""
    denominator: Tensor
    """What the summed loss was divided by; 0 when nothing was there."""
    targets: Targets
    distill_stats: dict[str, Tensor] = field(default_factory=dict)

    @property
    def selected_BT(self) -> Tensor:
        """bool: tokens that are trained on."""
        return self.weights_BT != 0

    @cached_property
    def sums(self) -> Tensor:
        """What a log needs of this micro-batch, in sums that add up over micro-batches and ranks
        (`objective.statistics`); on the device, no waiting."""
        return batch_sums(self.nll_BT, self.weights_BT, self.targets)

    @cached_property
    def stats(self) -> dict[str, float]:
        """For the training log: nll_kept, nll_all, kept_share, weight_share, mapped_share, with
        guidance excess_p10, excess_p50, excess_p90; distill, kld, uld and alm add distill_loss,
        distill target_mass, kld and uld aligned_share, kld teacher_dropped_mass. Reading it waits
        for the device."""
        return measures(self.sums.tolist()) | {
            name: float(value) for name, value in self.distill_stats.items()
        }
