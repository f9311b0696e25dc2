"""What the objective is given and what it gives back."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from vocagnolm.objective.statistics import statistics

Method = Literal["cpt", "guided", "random", "chunk", "rho1", "no_teacher", "kld", "uld"]
Unmapped = Literal["include", "exclude", "mean"]
Scope = Literal["sequence", "batch", "global"]
Normalise = Literal["all", "selected"]
ChunkChoice = Literal["teacher", "random"]
Implementation = Literal["auto", "reference", "chunked", "fused"]

# Methods whose loss reads the teacher's whole distribution, not one number a token.
DISTILLING = frozenset({"kld", "uld"})
# Methods that train on every token.
SELECTING_ALL = frozenset({"cpt"}) | DISTILLING
# Methods that rank tokens by student nll minus guidance.
NEEDS_GUIDANCE = frozenset({"guided", "rho1", "chunk"})

IGNORE_INDEX = -100
"""Label of a position that has no next token to predict; as in `torch.nn.functional`."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A language model's last linear layer: `logits = softcap(scale * (hidden @ weight.T + bias))`.

    `weight` may be tied to the embedding: the gradient of the head is then added to the
    embedding's as usual. It must be an ordinary tensor on the hidden states' device. Under FSDP2
    the parameter is a sharded DTensor outside the root module's forward: call the objective from
    inside that forward (where the root's parameters are gathered), so that FSDP's own hooks
    reduce the gradient.
    """

    weight: Tensor
    """[V, D]. Rows beyond the tokenizer (padding of the embedding) count in the softmax, as they
    do in transformers; labels never point there."""
    bias: Tensor | None = None
    """[V] or None."""
    softcap: float | None = None
    """Gemma's soft cap: `cap * tanh(logits / cap)`."""
    scale: float = 1.0
    """Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`."""
    vocabulary_size: int | None = None
    """Number of rows the tokenizer can produce; None: all of them. Only kld reads it."""

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise ValueError(f"Head.weight must be [vocabulary, hidden], got {self.weight.shape}")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"Head.bias must be [{self.weight.shape[0]}], got {list(self.bias.shape)}"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"Head.softcap must be positive or None, got {self.softcap}")

    @property
    def plain(self) -> bool:
        """Logits are the bare matrix product."""
        return self.bias is None and self.softcap is None and self.scale == 1.0


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """An online teacher's view of the same text, for kld and uld (no gradient flows into it)."""

    hidden: Tensor
    """[B, U, D_T] last hidden states of the teacher; U may differ from the student's T."""
    head: Head
    position_BT: Tensor | None = None
    """[B, T] int64: which teacher position predicts what student position t predicts, -1 where
    the two are not aligned. None: the same position (same tokenizer)."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """One training objective. The guidance itself (which teacher, max / mean / sum over the
    teacher's tokens) is decided before, when teacher losses are carried to student tokens."""

    method: Method = "guided"
    """cpt: every token. guided: top `keep` of the mapped tokens by student nll - guidance.
    rho1: the same rule for one shared vocabulary (optionally with `entropy_keep`). random: a
    random `keep` of them. no_teacher: top `keep` by student nll alone (a control). chunk: whole
    chunks of a sequence by their mean excess, or at random. kld, uld: every token, plus
    `distill_weight` times the distance to the teacher's distribution."""
    keep: float = 0.4
    """Share of the mapped tokens that is trained on (chunk: of the chunks). k = keep * n rounded
    half up, and at least 1 when keep > 0 and n > 0."""
    unmapped: Unmapped = "include"
    """Tokens without guidance: include (always trained on), exclude (never), mean (they compete
    with the scope's mean guidance as theirs)."""
    scope: Scope = "batch"
    """Among which tokens the top `keep` is taken: each sequence, the micro-batch of one device,
    or all ranks and accumulation steps of an optimiser step."""
    normalise: Normalise = "all"
    """Divide the summed loss by all predicted tokens (equation 3 of the paper), or by the
    selected ones."""
    distill_weight: float = 0.5
    """kld, uld: lambda. 0 is cpt."""
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
            ("method", Method),
            ("unmapped", Unmapped),
            ("scope", Scope),
            ("normalise", Normalise),
            ("chunk_choice", ChunkChoice),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(allowed))}; "
                    f"got {getattr(self, name)!r}"
                )
        if not 0.0 <= self.keep <= 1.0:
            raise ValueError(f"keep must be between 0 and 1, got {self.keep}")
        if self.distill_weight < 0.0:
            raise ValueError(f"distill_weight must not be negative, got {self.distill_weight}")
        if self.n_chunks < 1:
            raise ValueError(f"n_chunks must be at least 1, got {self.n_chunks}")
        if self.entropy_keep is not None:
            if self.method != "rho1":
                raise ValueError(f"entropy_keep belongs to method rho1, not {self.method}")
            if not self.keep <= self.entropy_keep <= 1.0:
                raise ValueError(
                    f"entropy_keep must lie between keep ({self.keep}) and 1, "
                    f"got {self.entropy_keep}"
                )

    @property
    def selects_all(self) -> bool:
        """Every predicted token is trained on, whatever the losses are: no first phase needed."""
        if self.method in SELECTING_ALL:
            return True
        return self.keep == 1.0 and self.unmapped != "exclude" and self.entropy_keep in (None, 1.0)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOutput:
    """`loss` carries the gradient; everything else is detached."""

    loss: Tensor
    nll_BT: Tensor
    """Student nll in nats, fp32; 0 where the label is ignored."""
    selected_BT: Tensor
    """bool: tokens with W = 1."""
    denominator: Tensor
    """What the summed loss was divided by; 0 when nothing was there."""
    valid_BT: Tensor
    guidance_BT: Tensor | None = None
    distill_stats: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def stats(self) -> dict[str, Tensor]:
        """For the training log, computed when first read: loss_selected, loss_all,
        selected_share, mapped_share; with guidance excess_p10, excess_p50, excess_p90; kld and
        uld add distill_loss and aligned_share, kld teacher_dropped_mass. 0-dim tensors on the
        device: reading a number waits for the device."""
        return self.distill_stats | statistics(
            self.nll_BT, self.selected_BT, self.valid_BT, self.guidance_BT
        )


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Dtype of the head's matrix products: autocast's where it is on, as for any linear layer."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype
