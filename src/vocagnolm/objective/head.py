"""A language model's last linear layer, as the objective and the scorer see it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

# ---- rows of logits ----

Implementation = Literal["auto", "reference", "chunked", "fused"]


@dataclass(frozen=True)
class Transform:
    """From raw products to logits: `z = softcap(scale * (x + bias))`."""

    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, x_NV: Tensor) -> Tensor:
        """Logits in fp32 (fp64 stays); a tensor of its own only where something changes."""
        z = x_NV if x_NV.dtype == torch.float64 else x_NV.float()
        if self.bias is not None:
            z = z + self.bias
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z

    def chain(self, gradient_NV: Tensor, z_NV: Tensor) -> Tensor:
        """Gradient by the logits `z` -> gradient by the raw products (also the bias's)."""
        if self.softcap is not None:
            gradient_NV = gradient_NV * (1.0 - (z_NV / self.softcap).square())
        return gradient_NV * self.scale if self.scale != 1.0 else gradient_NV

    def at(self, x_NV: Tensor, columns_NK: Tensor) -> Tensor:
        """Logits of some columns of each row [N, K]."""
        picked = x_NV.gather(1, columns_NK)
        z = picked if picked.dtype == torch.float64 else picked.float()
        bias = None if self.bias is None else self.bias[columns_NK]
        return Transform(bias, self.softcap, self.scale)(z)


class SoftRows(NamedTuple):
    """Tokens that take part of the label's place in a row's target: with weights c, the target is
    `(1 - sum c) * label + sum_k c_k * token_k`."""

    ids_NK: Tensor
    """int64"""
    weights_NK: Tensor
    """In the dtype of the losses."""

    def distance(self, x_NV: Tensor, labels_N: Tensor, transform: Transform) -> Tensor:
        """What the cross entropy against the target is above that against the label [N]:
        sum_k c_k (z_label - z_k)."""
        z = transform.at(x_NV, torch.cat([labels_N[:, None], self.ids_NK], dim=1))
        return (self.weights_NK * (z[:, :1] - z[:, 1:])).sum(1)


class RowLosses(NamedTuple):
    nll_N: Tensor
    lse_N: Tensor
    """log-sum-exp of the logits: all that the gradient needs to know of the whole row."""
    entropy_N: Tensor | None


class RowOperations(NamedTuple):
    """The two functions in which the chunked and the fused head differ."""

    losses: Callable[[Tensor, Tensor, Transform, bool], RowLosses]
    gradient_: Callable[[Tensor, Tensor, Tensor, Transform, SoftRows | None], Tensor]


def losses(
    x_NV: Tensor, labels_N: Tensor, transform: Transform, with_entropy: bool = False
) -> RowLosses:
    """nll and log-sum-exp of each row in fp32, and its entropy if asked for."""
    z = transform(x_NV)
    lse = torch.logsumexp(z, dim=-1)
    nll = lse - z.gather(1, labels_N[:, None]).squeeze(1)
    entropy = None
    if with_entropy:
        log_p = z - lse[:, None]
        p = torch.exp(log_p)
        entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)  # a masked logit has 0 * -inf
    return RowLosses(nll, lse, entropy)


def gradient_(
    x_NV: Tensor,
    labels_N: Tensor,
    lse_N: Tensor,
    transform: Transform,
    soft: SoftRows | None = None,
) -> Tensor:
    """Overwrites the raw products by d nll / d x = (softmax - target) through the transform; the
    target is the label, or with `soft` the label and some tokens beside it."""
    z = transform(x_NV)
    own = transform.softcap is None  # z is not needed again: work in place
    g = torch.sub(z, lse_N[:, None], out=z) if own else z - lse_N[:, None]
    g.exp_()
    # one-hot by scatter: each row has one label, so no two writes meet
    ones = g.new_full((g.shape[0], 1), -1.0)
    if soft is not None:
        ones += soft.weights_NK.sum(1, keepdim=True)
        g.scatter_add_(1, soft.ids_NK, -soft.weights_NK.to(g.dtype))
    g.scatter_add_(1, labels_N[:, None], ones)
    g = transform.chain(g, z)
    return x_NV if g is x_NV else x_NV.copy_(g)


TORCH_ROWS = RowOperations(losses, gradient_)


def row_operations(impl: Implementation, hidden: Tensor) -> RowOperations:
    """Torch's row operations, or Triton's (which know no fp64)."""
    usable = hidden.device.type == "cuda" and hidden.dtype != torch.float64 and _has_triton()
    if impl == "chunked" or (impl == "auto" and not usable):
        return TORCH_ROWS
    if impl not in ("auto", "fused"):
        raise ValueError(f"impl must be auto, reference, chunked or fused; got {impl!r}")
    if not _has_triton() or hidden.dtype == torch.float64:
        raise ValueError(
            "impl='fused' needs the package 'triton', which comes with torch for CUDA, and no "
            "fp64; use impl='auto' or 'chunked' here"
        )
    from vocagnolm.objective.triton_rows import TRITON_ROWS

    return TRITON_ROWS


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


# ---- products into float32 ----


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """a @ b into `out`, which may be wider than the operands."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def accumulate(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """out += a @ b, summed in the dtype of `out`."""
    if out.dtype == a.dtype:
        return out.addmm_(a, b)
    if fused_accumulation(a.device, a.dtype):
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(torch.mm(a, b, out_dtype=out.dtype))


def needs_width(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4 and not fp32_output(device, dtype)


@cache
def fp32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Can this device multiply `dtype` matrices into an fp32 result? (CUDA can, cuBLAS.)"""
    one = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        wide = torch.mm(one, one, out_dtype=torch.float32, out=one.float())
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((wide == 16).all())


@cache
def fused_accumulation(device: torch.device, dtype: torch.dtype) -> bool:
    """Can it also add to the fp32 result in the same call?"""
    one = torch.ones(16, 16, dtype=dtype, device=device)
    total = one.float()
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((total == 17).all())


# ---- the head ----


@dataclass(frozen=True, kw_only=True)
class Head:
    """A language model's last linear layer: `logits = softcap(scale * (hidden @ weight.T + bias))`.

        head = Head(weight=model.lm_head.weight)                # Llama, Qwen, Mistral, ...
        head = Head(weight=model.lm_head.weight, softcap=30.0)  # Gemma 2
        head.logits(hidden)                                     # [..., V]: the model's own

    Pass the model's parameter itself: `objective_loss` gives it its gradient. `weight` may be tied
    to the embedding: the gradient of the head is then added to the embedding's as usual. It must
    be an ordinary tensor on the hidden states' device. Under FSDP2 the parameter is a sharded
    DTensor outside the root module's forward: call the objective from inside that forward (where
    the root's parameters are gathered), so that FSDP's own hooks reduce the gradient.
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
    def rows(self) -> int:
        """Tokens that the distribution is over: those of the tokenizer where that is known."""
        return self.vocabulary_size or self.weight.shape[0]

    @property
    def transform(self) -> Transform:
        return Transform(self.bias, self.softcap, self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V], fp32 unless the model is fp64: all of them at once."""
        return self.transform(linear(hidden, self.weight))
