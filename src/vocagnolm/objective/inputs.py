"""What the objective is given: the tensors of a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vocagnolm.objective.head import IGNORE_INDEX, Head
from vocagnolm.recipe.sections import KlDirection as KlDirection
from vocagnolm.recipe.sections import ObjectiveConfig as ObjectiveConfig
from vocagnolm.recipe.sections import Pairing as Pairing


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a micro-batch predicts, and what is known about it before the student reads it. Already
    shifted: entry t belongs to the token that position t predicts. B sequences, T positions.

        Targets(labels_BT=ids[:, 1:], guidance_BT=guidance[:, 1:])  # inputs: ids[:, :-1]
    """

    labels_BT: Tensor
    """int64; -100 is ignored."""
    guidance_BT: Tensor | None = None
    """Teacher nll assigned to these tokens, NaN where unmapped. None (random, no_teacher): every
    token counts as mapped."""
    entropy_BT: Tensor | None = None
    """Entropy of the reference model in nats; only for `entropy_keep`."""
    teacher_sums_B2: Tensor | None = None
    """Sum and number of the teacher's losses over each sequence, for `unmapped: mean`. None:
    computed from the guidance, which is the same for one vocabulary."""
    stretch_BT: Tensor | None = None
    """int64: index of each token's stretch in its sequence, for `compare: stretch`. A stretch is
    the smallest piece of text at whose ends both tokenizations have a boundary. `guidance_BT` is
    then the teacher's loss on the whole stretch, the same for all its tokens."""
    soft_ids_BTK: Tensor | None = None
    """int64 or int32: for distill, tokens other than the label that the teacher finds likely. Any
    valid id where `soft_p_BTK` is 0."""
    soft_p_BTK: Tensor | None = None
    """Their probabilities; the rest belongs to the label."""
    sequence_index_B: Tensor | None = None
    """int64: index of each sequence in the whole batch of the optimizer step. Used to break ties
    and for random choices. None: by micro-batch, rank and row, which is the order in which
    accelerate deals batches to ranks."""

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
        """Build targets from sequences of different lengths (lists, arrays or tensors). Labels are
        padded on the right with -100, guidance with NaN. Pad the inputs on the right too, with any
        token."""
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
        """Tokens that can be compared: all tokens of a stretch or none, because its loss under the
        student is unknown if one of its tokens is not predicted."""
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
    """Divisor of the summed loss. None: this micro-batch's count, or with scope global the count of
    all ranks."""
    weights_BT: Tensor | None = None
    """Weights of the tokens, if already decided (second pass of scope global, see `weigh_step`);
    bool or float."""
    nll_BT: Tensor | None = None
    """The losses on which the weights are based; phase 1 is then skipped."""
    kept: int | None = None
    """Number of tokens of this micro-batch that count, if known without its losses (`count_kept`);
    the host then does not wait for the device."""
    micro_batches: int = 1
    """Number of micro-batches of the step on all ranks, for means over them."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """An online teacher's predictions for the same text, for kld and uld (without gradient)."""

    hidden: Tensor
    """[B, U, D_T] Last hidden states of the teacher; U may differ from the student's T."""
    head: Head | None
    """None: `hidden` holds the logits themselves, for a head that is not supported."""
    position_BT: Tensor | None = None
    """[B, T] int64: the teacher position that predicts what student position t predicts, -1 if they
    are not aligned. None: the same position (same tokenizer)."""

    @property
    def rows(self) -> int:
        """Number of tokens in the teacher's distribution."""
        return self.hidden.shape[-1] if self.head is None else self.head.rows
