"""What the objective is given: its configuration, and the tensors of a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vocagnolm.methods import CHOOSABLE_WEIGHTINGS, METHODS, Method
from vocagnolm.objective.head import IGNORE_INDEX, Head

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
    compare: Literal["token", "stretch"] = "token"
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
    unmapped: Literal["include", "exclude", "mean"] = "include"
    """Tokens without guidance: include (always trained on), exclude (never), mean (they compete
    with the mean loss of the scope's teacher tokens as theirs)."""
    scope: Literal["sequence", "batch", "global"] = "batch"
    """Among which tokens the top `keep` is taken: each sequence, the micro-batch of one device,
    or all ranks and accumulation steps of an optimiser step."""
    normalise: Literal["all", "selected"] = "all"
    """Divide the summed loss by all predicted tokens (equation 3 of the paper), or by the
    selected ones: the sum of their weights."""
    mix: float = 0.5
    """distill: the loss is the cross entropy against `(1 - mix) * label + mix * targets`, where the
    targets are the teacher's alternatives and the label has what they leave. 0 is cpt."""
    mix_end: float | None = None
    """distill: the mix at the end of a run, see `at`; None: it stays."""
    mix_hold: float = 0.0
    """distill: share of a run before the mix begins to change."""
    mix_by: Literal["constant", "reducible"] = "constant"
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
    chunk_choice: Literal["teacher", "random"] = "teacher"
    """chunk only: by mean excess over the teacher, or at random."""
    seed: int = 0
    """random choices depend on (seed, step, sequence, position) alone: no generator to save."""

    def __post_init__(self) -> None:
        choices = _CHOICES | {"method": METHODS, "weighting": CHOOSABLE_WEIGHTINGS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}"
                )
        rule, entropy_keep = self.rule, self.entropy_keep
        if self.keep is None:
            object.__setattr__(self, "keep", rule.keep)
        for name in ("keep", "floor", "mix", "mix_end", "mix_hold"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {value}")
        for name in ("distill_weight", "cross_entropy"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.temperature <= 0.0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.n_chunks < 1:
            raise ValueError(f"n_chunks must be at least 1, got {self.n_chunks}")
        if self.mix_hold == 1.0:
            raise ValueError("mix_hold must be below 1: the mix could never change")
        if self.weighting != "top_k" and not rule.by_excess:
            raise ValueError(f"weighting {self.weighting} belongs to guided, distill and rho1")
        if self.compare == "stretch" and not rule.guidance:
            raise ValueError(f"compare stretch needs a method with guidance, not {self.method}")
        if rule.weighting is not None and self.normalise == "selected":
            raise ValueError(f"{self.method} has weights of both signs: normalise by all tokens")
        if entropy_keep is not None and not rule.entropy:
            raise ValueError(f"entropy_keep belongs to method rho1, not {self.method}")
        if entropy_keep is not None and not self.keep <= entropy_keep <= 1.0:
            raise ValueError(
                f"entropy_keep must lie between keep ({self.keep}) and 1, got {entropy_keep}"
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


_CHOICES = {
    name: get_args(hint)
    for name, hint in get_type_hints(ObjectiveConfig).items()
    if get_origin(hint) is Literal
}


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a micro-batch predicts, and what is known of it before the student has read it. Already
    shifted: entry t belongs to the token that position t predicts. B sequences, T positions.

        Targets(labels_BT=ids[:, 1:], guidance_BT=guidance[:, 1:])  # inputs: ids[:, :-1]
    """

    labels_BT: Tensor
    """int64; -100 is ignored."""
    guidance_BT: Tensor | None = None
    """Teacher nll carried to these tokens, NaN where unmapped. None (random, no_teacher): every
    token counts as mapped."""
    entropy_BT: Tensor | None = None
    """Entropy of the reference model in nats; only for `entropy_keep`."""
    teacher_sums_B2: Tensor | None = None
    """Sum and number of the losses of the teacher tokens behind each sequence, for `unmapped:
    mean`. None: of the guidance, which is the same for one vocabulary."""
    stretch_BT: Tensor | None = None
    """int64: number of each token's stretch in its sequence, for `compare: stretch`: the smallest
    piece of text at whose ends both tokenisations have a boundary. `guidance_BT` is then the
    teacher's loss of the whole stretch, the same for all its tokens."""
    soft_ids_BTK: Tensor | None = None
    """int64 or int32: for distill, tokens that the teacher finds likely beside the label. Any valid
    id where `soft_p_BTK` is 0."""
    soft_p_BTK: Tensor | None = None
    """Their probabilities; what they leave of 1 is the label's."""
    sequence_index_B: Tensor | None = None
    """int64: index of each sequence in the whole batch of the optimiser step. It breaks ties and
    feeds random choices. None: micro-batch by micro-batch, rank by rank, row by row, which is
    the order in which accelerate deals batches to ranks."""

    def __post_init__(self) -> None:
        for name in ("labels_BT", "guidance_BT"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(
                    f"{name} must be a tensor [B, T], got {type(value).__name__}; rows of unequal "
                    "length become one with Targets.from_rows(labels, guidance)"
                )

    @classmethod
    def from_rows(
        cls,
        labels: Sequence[Any],
        guidance: Sequence[Any] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> "Targets":
        """Sequences of unequal length, as lists, arrays or tensors: labels are padded on the right
        with -100, guidance with NaN. Pad the inputs on the right too, with any token."""
        if guidance is not None and len(labels) != len(guidance):
            raise ValueError(f"{len(labels)} rows of labels, {len(guidance)} of guidance")
        pairs = () if guidance is None else zip(labels, guidance, strict=True)
        for number, (row, known) in enumerate(pairs):
            if len(row) != len(known):
                raise ValueError(f"row {number} has {len(row)} labels and {len(known)} of guidance")

        def padded(rows: Sequence[Any], dtype: torch.dtype, fill: float) -> Tensor:
            tensors = [torch.as_tensor(row, dtype=dtype, device=device) for row in rows]
            return pad_sequence(tensors, batch_first=True, padding_value=fill)

        return cls(
            labels_BT=padded(labels, torch.int64, IGNORE_INDEX),
            guidance_BT=None if guidance is None else padded(guidance, torch.float32, torch.nan),
        )

    @cached_property
    def valid_BT(self) -> Tensor:
        return self.labels_BT != IGNORE_INDEX

    @cached_property
    def mapped_BT(self) -> Tensor:
        """Tokens that can be compared. Of a stretch all or none: its loss under the student is not
        known where one of its tokens is not predicted."""
        if self.guidance_BT is None:
            return self.valid_BT
        known = ~torch.isnan(self.guidance_BT)
        if self.stretch_BT is None:
            return self.valid_BT & known
        unseen = (known & ~self.valid_BT).to(torch.int32)
        broken = torch.zeros_like(unseen).scatter_reduce(1, self.stretch_BT, unseen, "amax")
        return self.valid_BT & known & (broken.gather(1, self.stretch_BT) == 0)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What was decided over all micro-batches of a step, for one of them."""

    denominator: Tensor | float | None = None
    """What the summed loss is divided by. None: this micro-batch's count, or with scope global the
    count of all ranks."""
    weights_BT: Tensor | None = None
    """What each token counts, decided already (second pass of scope global, see `weigh_step`);
    bool or float."""
    nll_BT: Tensor | None = None
    """The losses that it was decided by: phase 1 is then left out."""
    kept: int | None = None
    """How many tokens of this micro-batch count, where that is known without its losses
    (`count_kept`): then the host does not wait for the device."""
    micro_batches: int = 1
    """Micro-batches of the step on all ranks, for what is a mean over them."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """An online teacher's view of the same text, for kld and uld (no gradient flows into it)."""

    hidden: Tensor
    """[B, U, D_T] last hidden states of the teacher; U may differ from the student's T."""
    head: Head | None
    """None: `hidden` holds the logits themselves, for a head that is not understood."""
    position_BT: Tensor | None = None
    """[B, T] int64: which teacher position predicts what student position t predicts, -1 where
    the two are not aligned. None: the same position (same tokenizer)."""

    @property
    def rows(self) -> int:
        """Tokens that the teacher's distribution is over."""
        return self.hidden.shape[-1] if self.head is None else self.head.rows
