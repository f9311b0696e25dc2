"""From losses to weights: what each token counts in the loss.

A choice among tokens (`selection`) gives 0 and 1. The other rules look at one stretch (or token) at
a time, at its loss S under the student and T under the teacher; no gradient flows through a weight.
A new weighting is one function in `WEIGHTINGS` and its name in `methods.CHOOSABLE_WEIGHTINGS`.

Shape letters: B sequences, T positions, N tokens in a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vocagnolm.objective.batch import Targets
from vocagnolm.objective.config import ObjectiveConfig
from vocagnolm.objective.selection import (
    Ranks,
    ScoredBatch,
    filled_guidance,
    select_batches,
    stretch_losses,
)

# Below this a loss is rounding: nothing is left to reduce, and 1 / S must stay finite.
_SMALLEST_NATS = 1e-4


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """The weights of one optimiser step, seen from one rank."""

    weights: list[Tensor]
    """fp32 [B, T] for each of this rank's micro-batches."""
    denominator: Tensor
    """What to divide the summed loss by, over all ranks and micro-batches."""


@torch.no_grad()
def weigh_step(
    batches: Sequence[ScoredBatch],
    config: ObjectiveConfig,
    *,
    step: int = 0,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> StepWeights:
    """Weights of a whole optimiser step: all micro-batches of this rank, with scope global together
    with those of all other ranks. Every rank must call it, with equally many micro-batches."""
    if not batches:
        raise ValueError("weigh_step needs at least one micro-batch")
    ranks = Ranks.of(group)
    weights = weigh_batches(batches, config, step, ranks)
    if config.normalise == "all":
        total = torch.stack([b.valid_BT.sum() for b in batches]).sum()
    elif config.graded:
        total = torch.stack([w.double().sum() for w in weights]).sum()
    else:
        total = torch.stack([(w != 0).sum() for w in weights]).sum()
    return StepWeights(weights=weights, denominator=ranks.sum(total))


def weigh_batches(
    batches: Sequence[ScoredBatch], config: ObjectiveConfig, step: int, ranks: Ranks
) -> list[Tensor]:
    if not config.graded:
        return [chosen.float() for chosen in select_batches(batches, config, step, ranks)]
    filled = filled_guidance([b.targets for b in batches], config, ranks)
    weights = []
    for batch, teacher in zip(batches, filled, strict=True):
        rows = FlatTargets.of(batch.targets, teacher, config)
        weights.append(rows.weights(batch.nll_BT.flatten(), config).view(batch.nll_BT.shape))
    return weights


@dataclass(frozen=True)
class FlatTargets:
    """What a rule needs of tokens in a row, besides their losses. Any run of tokens that cuts no
    stretch can be weighed by itself."""

    valid_N: Tensor
    mapped_N: Tensor
    compared_N: Tensor
    """Tokens whose loss is held against the teacher's: the mapped, and with `unmapped: mean` the
    others too, each for itself."""
    teacher_N: Tensor
    stretch_N: Tensor
    """int64, ascending; equal for the tokens of a stretch."""

    @classmethod
    def of(
        cls, targets: Targets, teacher_BT: Tensor | None, config: ObjectiveConfig
    ) -> "FlatTargets":
        if teacher_BT is None:
            raise ValueError(f"method {config.method} needs guidance_BT, got None")
        B, T = targets.labels_BT.shape
        mapped = targets.mapped_BT
        position = torch.arange(B * T, device=mapped.device)
        stretch = position
        if config.by_stretch:
            if targets.stretch_BT is None:
                raise ValueError("compare stretch needs stretch_BT, got None")
            begins = torch.ones_like(mapped)
            begins[:, 1:] = targets.stretch_BT[:, 1:] != targets.stretch_BT[:, :-1]
            stretch = begins.flatten().long().cumsum(0) - 1
        compared = targets.valid_BT if config.unmapped == "mean" else mapped
        return cls(
            targets.valid_BT.flatten(),
            mapped.flatten(),
            compared.flatten(),
            teacher_BT.flatten(),
            stretch,
        )

    def __getitem__(self, rows: slice | Tensor) -> "FlatTargets":
        return FlatTargets(
            self.valid_N[rows],
            self.mapped_N[rows],
            self.compared_N[rows],
            self.teacher_N[rows],
            self.stretch_N[rows],
        )

    def __len__(self) -> int:
        return len(self.valid_N)

    @property
    def begins_N(self) -> Tensor:
        """Where a stretch begins."""
        begins = torch.ones_like(self.valid_N)
        begins[1:] = self.stretch_N[1:] != self.stretch_N[:-1]
        return begins

    def losses(self, nll_N: Tensor) -> Tensor:
        """The student's loss of every token's stretch."""
        return stretch_losses(nll_N, self._number_N, self.mapped_N, len(self))

    @property
    def _number_N(self) -> Tensor:
        return self.begins_N.long().cumsum(0) - 1

    @torch.no_grad()
    def weights(self, nll_N: Tensor, config: ObjectiveConfig) -> Tensor:
        assert config.graded_by is not None
        weighting = WEIGHTINGS[config.graded_by]
        found = weighting(self.losses(nll_N), self.teacher_N.to(nll_N.dtype), config)
        rest = 0.0 if config.unmapped == "exclude" else 1.0
        weights = torch.where(self.compared_N, found, rest)
        # a loss that is not a number must reach the total, be seen and stop the run
        weights = torch.where(torch.isnan(nll_N), 1.0, weights)
        return torch.where(self.valid_N, weights, 0.0)

    @torch.no_grad()
    def distance(self, nll_N: Tensor, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
        """alm: (sum over stretches of tau times the divergence, number of stretches)."""
        compared, number = self.compared_N, self._number_N
        tokens = torch.zeros(len(self), dtype=nll_N.dtype, device=nll_N.device)
        tokens = tokens.scatter_add(0, number, compared.to(nll_N.dtype)).gather(0, number)[compared]
        own = self.losses(nll_N)[compared].clamp(min=_SMALLEST_NATS)
        teacher, tau = self.teacher_N[compared].to(nll_N.dtype), config.temperature
        a, not_a, not_b = (
            torch.exp(-teacher / tau),
            -torch.expm1(-teacher / tau),
            -torch.expm1(-own / tau),
        )
        kl = a * (own - teacher) / tau + torch.special.xlogy(not_a, not_a / not_b)
        # every token of a stretch carries its part
        return tau * (kl / tokens).sum(), (1 / tokens).sum()


def reducible_weights(own: Tensor, teacher: Tensor, config: ObjectiveConfig) -> Tensor:
    """The share of the student's loss that the teacher shows to be reducible."""
    share = (1.0 - teacher / own.clamp(min=_SMALLEST_NATS)).clamp(min=0.0)
    return config.floor + (1.0 - config.floor) * share


def likelihood_weights(own: Tensor, teacher: Tensor, config: ObjectiveConfig) -> Tensor:
    """Approximate Likelihood Matching (arXiv 2503.20083) as a weight: with a = p_T^(1/tau) and
    b = p_S^(1/tau) of a stretch, the derivative by S of tau * KL(Bernoulli(a) || Bernoulli(b)) is
    (a - b) / (1 - b) = 1 - (1 - a) / (1 - b), the same for all its tokens; negative where the
    student is surer than the teacher. The factor tau makes lambda weigh the same for every tau."""
    tau = config.temperature
    surprise = torch.expm1(-teacher / tau) / torch.expm1(-own.clamp(min=_SMALLEST_NATS) / tau)
    pull = 1.0 - surprise
    if config.positive:
        pull = pull.clamp(min=0.0)
    return config.cross_entropy + config.distill_weight * pull


# (student's loss, teacher's loss, config) of tokens in a row, or of their stretches -> weights
Weighting = Callable[[Tensor, Tensor, ObjectiveConfig], Tensor]
WEIGHTINGS: dict[str, Weighting] = {
    "reducible": reducible_weights,
    "likelihood": likelihood_weights,
}
"""What tokens count where none is left out: by `objective.weighting`, or by a row of `METHODS`."""
