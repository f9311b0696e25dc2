"""One training objective."""

from dataclasses import replace

import torch
from torch import Tensor

from vocagnolm.recipe.schema import key
from vocagnolm.recipe.sections import KlDirection as KlDirection
from vocagnolm.recipe.sections import LossSection
from vocagnolm.recipe.sections import Pairing as Pairing


class ObjectiveConfig(LossSection, frozen=True):  # type: ignore[misc]  # the recipe's is not
    """One training objective: the keys of a recipe's `objective` that the loss reads, by the same
    names and with the same defaults, and a seed. The guidance itself (which teacher, max / mean /
    sum over the teacher's tokens) is decided before, when teacher losses are carried to student
    tokens.

    Of n tokens `keep * n` are kept, rounded half up, and at least 1 where `keep` and n are not 0;
    for chunk, of the chunks. reducible: a token counts `floor + (1 - floor) * max(0, 1 - T / S)`,
    by the student's loss S and the teacher's T; `keep` is not read. distill: the loss is the cross
    entropy against `(1 - mix) * label + mix * targets`, where the targets are the teacher's
    alternatives and the label has what they leave; `mix_by` reducible multiplies the mix with
    `max(0, 1 - T / S)`. rho1 with `entropy_keep`: `keep` stays a share of all mapped tokens, so
    that both variants train on equally many."""

    seed: int = key("random choices depend on (seed, step, sequence, position) alone", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting != "top_k" and not self.rule.by_excess:
            raise ValueError(f"weighting {self.weighting} belongs to guided, distill and rho1")
        if self.compare == "stretch" and not self.rule.guidance:
            raise ValueError(f"compare stretch needs a method with guidance, not {self.method}")
        if self.rule.weighting is not None and self.normalise == "selected":
            raise ValueError(
                f"{self.method} may have weights of both signs: normalise by all tokens"
            )
        if self.entropy_keep is not None:
            if not self.rule.entropy:
                raise ValueError(f"entropy_keep belongs to method rho1, not {self.method}")
            if not self.keep <= self.entropy_keep:
                raise ValueError(
                    f"entropy_keep must lie between keep ({self.keep}) and 1, "
                    f"got {self.entropy_keep}"
                )

    def at(self, progress: float) -> "ObjectiveConfig":
        """As it is after this share of a run, from 0 at the first step to 1 at the last."""
        if self.mix_end is None or not self.rule.alternatives:
            return self
        moved = max(0.0, progress - self.mix_hold) / (1.0 - self.mix_hold)
        return replace(self, mix=self.mix + (self.mix_end - self.mix) * moved, mix_end=None)

    @property
    def graded_by(self) -> str | None:
        """The weighting by which every token counts, as its own stretch decides; None: some tokens
        are chosen, and count alike."""
        if self.rule.weighting is not None:
            return self.rule.weighting
        return self.weighting if self.rule.selects and self.weighting != "top_k" else None

    @property
    def graded(self) -> bool:
        return self.graded_by is not None

    @property
    def reaches_over_step(self) -> bool:
        """The weights of a micro-batch depend on the other micro-batches and ranks of its step."""
        if self.scope != "global" or self.selects_all:
            return False
        return not self.graded or self.unmapped == "mean"

    @property
    def counts_by_losses(self) -> bool:
        """What the loss is divided by is known only when the losses are."""
        whole_units = self.graded or self.by_stretch or self.rule.unit == "chunk"
        return self.normalise == "selected" and whole_units and not self.selects_all

    @property
    def selects_all(self) -> bool:
        """Every predicted token counts fully, whatever the losses are: no first phase needed."""
        if self.graded:
            return False
        if not self.rule.selects:
            return True
        return self.keep == 1.0 and self.unmapped != "exclude" and self.entropy_keep in (None, 1.0)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Dtype of the head's matrix products: autocast's where it is on, as for any linear layer."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype
