"""What the objective gives back."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from vocagnolm.objective.batch import Targets
from vocagnolm.objective.statistics import batch_sums, measures


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
