"""One training objective."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from vocagnolm.methods import CHOOSABLE_WEIGHTINGS, METHODS, Method

Compare = Literal["token", "stretch"]
MixBy = Literal["constant", "reducible"]
Unmapped = Literal["include", "exclude", "mean"]
Scope = Literal["sequence", "batch", "global"]
Normalise = Literal["all", "selected"]
ChunkChoice = Literal["teacher", "random"]
KlDirection = Literal["forward", "reverse"]
Pairing = Literal["bytes", "index"]
"""Which predictions uld compares across two tokenisations: those of tokens that begin at the same
byte, or the n-th with the n-th of a document, cut to the shorter, as its authors do."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """One training objective. The guidance itself (which teacher, max / mean / sum over the
    teacher's tokens) is decided before, when teacher losses are carried to student tokens."""

    method: str = "guided"
    """cpt: every token. guided: top `keep` of the mapped tokens by student nll - guidance.
    distill: every token (or the top `keep`), towards the teacher's likeliest tokens beside the one
    that follows.
    rho1: the same rule for one shared vocabulary (optionally with `entropy_keep`). random: a
    random `keep` of them. no_teacher: top `keep` by student nll alone (a control). chunk: whole
    chunks of a sequence by their mean excess, or at random. kld, uld: every token, plus
    `distill_weight` times the distance to the teacher's distribution. alm: every token, plus
    `distill_weight` times the distance of the two probabilities of each stretch."""
    compare: Compare = "token"
    """token: a token's nll against the teacher's loss carried to it, as published. stretch: both
    models' losses of the smallest piece of text at whose ends both have a boundary (alm always)."""
    weighting: str = "top_k"
    """guided, distill, rho1. top_k: the top `keep` count, the rest does not. reducible: every
    mapped token counts by the share of the student's loss S that the teacher's T shows to be
    reducible, `floor + (1 - floor) * max(0, 1 - T / S)`; `keep` is not read."""
    floor: float = 0.2
    """reducible: what a token counts at least."""
    keep: float = None  # type: ignore[assignment]
    """Share of the mapped tokens that is trained on (chunk: of the chunks); left out: 0.4, and 1
    for distill. k = keep * n rounded half up, and at least 1 when keep > 0 and n > 0."""
    unmapped: Unmapped = "include"
    """Tokens without guidance: include (always trained on), exclude (never), mean (they compete
    with the mean loss of the scope's teacher tokens as theirs)."""
    scope: Scope = "batch"
    """Among which tokens the top `keep` is taken: each sequence, the micro-batch of one device,
    or all ranks and accumulation steps of an optimiser step."""
    normalise: Normalise = "all"
    """Divide the summed loss by all predicted tokens (equation 3 of the paper), or by the
    selected ones: the sum of their weights."""
    mix: float = 0.5
    """distill: the loss is the cross entropy against `(1 - mix) * label + mix * targets`, where the
    targets are the teacher's alternatives and the label has what they leave. 0 is cpt."""
    mix_end: float | None = None
    """distill: the mix at the end of a run, see `at`; None: it stays."""
    mix_hold: float = 0.0
    """distill: share of a run before the mix begins to change."""
    mix_by: MixBy = "constant"
    """distill. reducible: every token's mix is `mix * max(0, 1 - T / S)`, by the student's loss S
    and the teacher's T."""
    distill_weight: float = 0.5
    """kld, uld, alm: lambda. 0 is cpt."""
    cross_entropy: float = 1.0
    """alm: weight of the cross entropy beside it. 0: the distance alone, as published."""
    temperature: float = 100.0
    """alm: tau; probabilities are compared as p^(1/tau)."""
    positive: bool = False
    """alm: cut off negative weights (where the student is surer than the teacher)."""
    kl_direction: KlDirection = "forward"
    """kld: KL(teacher || student), or `reverse`, KL(student || teacher), as equation 5 prints."""
    entropy_keep: float | None = None
    """rho1 only: second criterion. Of the mapped tokens only this share, the ones where the
    reference model's entropy is lowest, may be selected; `keep` stays a share of all mapped
    tokens, so that both variants train on equally many. None: excess alone."""
    n_chunks: int = 16
    """chunk only: chunks per sequence, cut by position, equal up to one token."""
    chunk_choice: ChunkChoice = "teacher"
    """chunk only: by mean excess over the teacher, or at random."""
    seed: int = 0
    """random choices depend on (seed, step, sequence, position) alone: no generator to save."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("method", METHODS),
            ("unmapped", get_args(Unmapped)),
            ("scope", get_args(Scope)),
            ("normalise", get_args(Normalise)),
            ("chunk_choice", get_args(ChunkChoice)),
            ("kl_direction", get_args(KlDirection)),
            ("compare", get_args(Compare)),
            ("weighting", CHOOSABLE_WEIGHTINGS),
            ("mix_by", get_args(MixBy)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}"
                )
        if self.keep is None:
            object.__setattr__(self, "keep", self.rule.keep)
        for name in ("keep", "floor", "mix", "mix_end", "mix_hold"):
            if name == "mix_end" and self.mix_end is None:
                continue
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        for name in ("distill_weight", "cross_entropy"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.temperature <= 0.0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.weighting != "top_k" and not self.rule.by_excess:
            raise ValueError(f"weighting {self.weighting} belongs to guided, distill and rho1")
        if self.mix_hold == 1.0:
            raise ValueError("mix_hold must be below 1: the mix could never change")
        if self.compare == "stretch" and not self.rule.guidance:
            raise ValueError(f"compare stretch needs a method with guidance, not {self.method}")
        if self.rule.weighting is not None and self.normalise == "selected":
            raise ValueError(
                f"{self.method} may have weights of both signs: normalise by all tokens"
            )
        if self.n_chunks < 1:
            raise ValueError(f"n_chunks must be at least 1, got {self.n_chunks}")
        if self.entropy_keep is not None:
            if not self.rule.entropy:
                raise ValueError(f"entropy_keep belongs to method rho1, not {self.method}")
            if not self.keep <= self.entropy_keep <= 1.0:
                raise ValueError(
                    f"entropy_keep must lie between keep ({self.keep}) and 1, "
                    f"got {self.entropy_keep}"
                )

    @property
    def rule(self) -> Method:
        return METHODS[self.method]

    def at(self, progress: float) -> "ObjectiveConfig":
        """As it is after this share of a run, from 0 at the first step to 1 at the last."""
        if self.mix_end is None or not self.rule.alternatives:
            return self
        moved = max(0.0, progress - self.mix_hold) / (1.0 - self.mix_hold)
        return replace(self, mix=self.mix + (self.mix_end - self.mix) * moved, mix_end=None)

    @property
    def by_stretch(self) -> bool:
        return self.compare == "stretch" or self.rule.by_stretch

    @property
    def by_chance(self) -> bool:
        """No teacher is asked, whatever the method is called."""
        return self.rule.unit == "chunk" and self.chunk_choice == "random"

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
