"""A language model's last linear layer, and its losses without ever holding [tokens, vocabulary].

Phase 1 (`row_losses`): nll of every token, without gradient, accurate to fp32 so that the
selection does not depend on bf16 rounding of the logits (bf16 logits are off by up to 0.08 nats).
Phase 2 (`summed_loss`): forward and backward of the selected tokens alone. Its gradients are
computed during the forward pass, chunk by chunk, as Liger does, and only scaled in backward.

With T tokens, of which a share s is selected, that is (2 + 6 s) T D V operations instead of
6 T D V: 4.4 for the paper's 40 %. Keeping the logits of phase 1 would save 2 s T D V more, but
exact logits are fp32 and moving them costs what the product costs.

Shape letters: N tokens, K selected tokens (or tokens of a soft target), D hidden size, V rows of
the head, B sequences of T positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Implementation = Literal["auto", "reference", "chunked", "fused"]
IGNORE_INDEX = -100
"""Label of a position that has no next token to predict; as in `torch.nn.functional`."""

_MIB = 1 << 20
# Half precision on a CPU: rows of the weight that are converted to float32 at a time, and tokens
# whose logits of such a strip are alive (near the caches).
_STRIP_ROWS = 2048
_STRIP_TOKENS = 32 * _MIB // (4 * _STRIP_ROWS)

# ---- the head ----


@dataclass(frozen=True)
class Transform:
    """Turns raw products into logits: `z = softcap(scale * (x + bias))`."""

    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, x_NV: Tensor) -> Tensor:
        """The logits in fp32, or fp64 for fp64. A new tensor is made only if a number changes."""
        z = x_NV if x_NV.dtype == torch.float64 else x_NV.float()
        if self.bias is not None:
            z = z + self.bias
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z

    def chain(self, gradient_NV: Tensor, z_NV: Tensor) -> Tensor:
        """The gradient by the raw products, given that by the logits `z`. It is also the bias's."""
        if self.softcap is not None:
            gradient_NV = gradient_NV * (1.0 - (z_NV / self.softcap).square())
        return gradient_NV * self.scale if self.scale != 1.0 else gradient_NV

    def at(self, x_NV: Tensor, columns_NK: Tensor) -> Tensor:
        """The logits of some columns of each row [N, K]."""
        bias = None if self.bias is None else self.bias[columns_NK]
        return replace(self, bias=bias)(x_NV.gather(1, columns_NK))


@dataclass(frozen=True, kw_only=True)
class Head:
    """A language model's last linear layer: `logits = softcap(scale * (hidden @ weight.T + bias))`.

        head = Head(weight=model.lm_head.weight)                # Llama, Qwen, Mistral, ...
        head = Head(weight=model.lm_head.weight, softcap=30.0)  # Gemma 2
        head.logits(hidden)                                     # [..., V]: the model's own

    Pass the model's parameter itself: `objective_loss` computes its gradient. `weight` may be tied
    to the embedding; the gradients are then added as usual. It must be an ordinary tensor on the
    device of the hidden states. Under FSDP2 the parameter is a sharded DTensor outside the root
    module's forward: call the objective from inside that forward (where the root's parameters are
    gathered), so that FSDP's own hooks reduce the gradient.
    """

    weight: Tensor
    """[V, D]. Rows beyond the tokenizer (padding of the embedding) count in the softmax, as in
    transformers; labels never refer to them."""
    bias: Tensor | None = None
    """[V] or None."""
    softcap: float | None = None
    """Gemma's soft cap: `cap * tanh(logits / cap)`."""
    scale: float = 1.0
    """Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`."""
    vocabulary_size: int | None = None
    """Number of rows that the tokenizer can produce; None: all of them. Used only by kld."""

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise ValueError(f"Head.weight must be [vocabulary, hidden], got {self.weight.shape}")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"Head.bias must be [{len(self.weight)}], got {list(self.bias.shape)}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"Head.softcap must be positive or None, got {self.softcap}")

    @property
    def rows(self) -> int:
        """Number of tokens in the distribution: those of the tokenizer, if known."""
        return self.vocabulary_size or self.weight.shape[0]

    @property
    def transform(self) -> Transform:
        return Transform(self.bias, self.softcap, self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of all tokens at once, in fp32 unless the model is fp64."""
        return self.transform(F.linear(hidden, self.weight))


# ---- the reference: full logits, slow and obvious; every fast path must match it ----


def token_nll(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The nll of each token [B, T]; 0 where the label is ignored."""
    flat = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return flat.view(labels_BT.shape)


def soft_distance(
    logits_BTV: Tensor, labels_BT: Tensor, ids_BTK: Tensor, weights_BTK: Tensor
) -> Tensor:
    """[B, T]: by how much the cross entropy against `(1 - sum w) * label + sum_k w_k * token_k`
    exceeds that against the label; 0 where the label is ignored."""
    log_p = F.log_softmax(logits_BTV, dim=-1)
    target = torch.zeros_like(log_p).scatter_add(2, ids_BTK, weights_BTK.to(log_p.dtype))
    label = labels_BT.clamp(min=0)[:, :, None]
    left = 1.0 - weights_BTK.sum(2, keepdim=True).to(log_p.dtype)
    target = target.scatter_add(2, label, left)
    above = -(target * log_p).sum(2) + log_p.gather(2, label)[:, :, 0]
    return torch.where(labels_BT != IGNORE_INDEX, above, 0.0)


def weighted_sum(logits_BTV: Tensor, labels_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """The sum of the nll of the tokens, each times its weight."""
    labels_BT = torch.where(weights_BT != 0, labels_BT, IGNORE_INDEX)
    if ((weights_BT == 0) | (weights_BT == 1)).all():
        return F.cross_entropy(
            logits_BTV.flatten(0, 1),
            labels_BT.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
    return (token_nll(logits_BTV, labels_BT) * weights_BT).sum()


# ---- rows of logits ----


class SoftRows(NamedTuple):
    """Tokens that share a row's target with the label: with weights c, the target is
    `(1 - sum c) * label + sum_k c_k * token_k`."""

    ids_NK: Tensor
    """int64"""
    weights_NK: Tensor
    """The weights c, in the dtype of the losses."""

    def distance(self, x_NV: Tensor, labels_N: Tensor, transform: Transform) -> Tensor:
        """By how much the cross entropy against the target exceeds that against the label [N]:
        sum_k c_k (z_label - z_k)."""
        z = transform.at(x_NV, torch.cat([labels_N[:, None], self.ids_NK], dim=1))
        return (self.weights_NK * (z[:, :1] - z[:, 1:])).sum(1)


class SparseRows(NamedTuple):
    """A gradient by rows of logits: `scale * softmax`, and a value at each of some columns."""

    scale_N: Tensor
    ids_NK: Tensor
    """int64; what several columns of a row give the same id is added up."""
    values_NK: Tensor


Bucket = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(log p [N, K], r [N, K], P [N], R [N]) -> a divergence [N], and its gradient by the logits: the
factor of the softmax [N], and what is added at the listed tokens [N, K]. See
`objective.on_policy`."""


class BucketRows(NamedTuple):
    """A teacher's probabilities r of some tokens of each row, listed once each; all others are one
    bucket with what is left."""

    ids_NK: Tensor
    """int64; any id where r is 0: such an entry lists nothing."""
    r_NK: Tensor
    bucket: Bucket

    def settled(
        self, x_NV: Tensor, lse_N: Tensor, transform: Transform
    ) -> tuple[Tensor, SparseRows]:
        """The divergence of each row [N] and its gradient by the logits."""
        r = self.r_NK.to(lse_N.dtype)
        log_p = transform.at(x_NV, self.ids_NK) - lse_N[:, None]
        log_p = torch.where(r > 0, log_p, -torch.inf)
        rest = (1.0 - log_p.exp().sum(1)).clamp(min=0.0)
        left = (1.0 - r.sum(1)).clamp(min=0.0)
        divergence, scale, values = self.bucket(log_p, r, rest, left)
        return divergence, SparseRows(scale, self.ids_NK, values)


class RowLosses(NamedTuple):
    """Losses of rows of logits."""

    nll_N: Tensor
    lse_N: Tensor
    """log-sum-exp of the logits: all that the gradient needs to know of the whole row."""
    entropy_N: Tensor | None


class RowOperations(NamedTuple):
    """The two functions in which the chunked and the fused head differ."""

    losses: Callable[[Tensor, Tensor, Transform, bool], RowLosses]
    gradient_: Callable[[Tensor, Tensor, Tensor, Transform, SoftRows | SparseRows | None], Tensor]


def losses(
    x_NV: Tensor, labels_N: Tensor, transform: Transform, with_entropy: bool = False
) -> RowLosses:
    """The nll and log-sum-exp of each row in fp32, and its entropy if asked for."""
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
    soft: SoftRows | SparseRows | None = None,
) -> Tensor:
    """Overwrites the raw products by d nll / d x = (softmax - target) through the transform; the
    target is the label, or with `soft` the label and some tokens beside it. `SparseRows` are a
    gradient of their own, in which the label has no part."""
    z = transform(x_NV)
    own = transform.softcap is None  # z is not needed again: work in place
    g = torch.sub(z, lse_N[:, None], out=z) if own else z - lse_N[:, None]
    g.exp_()
    if isinstance(soft, SparseRows):
        g *= soft.scale_N.to(g.dtype)[:, None]
        g.scatter_add_(1, soft.ids_NK, soft.values_NK.to(g.dtype))
    else:
        # one-hot by scatter: each row has one label, so no two writes meet
        of_label = g.new_full((g.shape[0], 1), -1.0)
        if soft is not None:
            of_label += soft.weights_NK.sum(1, keepdim=True)
            g.scatter_add_(1, soft.ids_NK, -soft.weights_NK.to(g.dtype))
        g.scatter_add_(1, labels_N[:, None], of_label)
    g = transform.chain(g, z)
    return x_NV if g is x_NV else x_NV.copy_(g)


TORCH_ROWS = RowOperations(losses, gradient_)


def fused_losses(
    x_NV: Tensor, labels_N: Tensor, transform: Transform, with_entropy: bool = False
) -> RowLosses:
    """`losses` in one Triton kernel."""
    from vocagnolm.objective import triton_rows

    how = transform.bias, transform.softcap, transform.scale
    return RowLosses(*triton_rows.losses(x_NV, labels_N, *how, with_entropy))


def fused_gradient_(
    x_NV: Tensor,
    labels_N: Tensor,
    lse_N: Tensor,
    transform: Transform,
    soft: SoftRows | SparseRows | None = None,
) -> Tensor:
    """`gradient_` in one Triton kernel."""
    from vocagnolm.objective import triton_rows

    how = transform.bias, transform.softcap, transform.scale
    if isinstance(soft, SparseRows):
        entries = soft.ids_NK, -soft.values_NK
        return triton_rows.gradient_(x_NV, labels_N, lse_N, *how, *entries, soft.scale_N)
    ids, weights = (None, None) if soft is None else soft
    return triton_rows.gradient_(x_NV, labels_N, lse_N, *how, ids, weights)


TRITON_ROWS = RowOperations(fused_losses, fused_gradient_)


def row_operations(impl: Implementation, hidden: Tensor) -> RowOperations:
    """The row operations of an implementation: torch's, or Triton's, which have no fp64."""
    usable = hidden.device.type == "cuda" and hidden.dtype != torch.float64 and has_triton()
    if impl == "chunked" or (impl == "auto" and not usable):
        return TORCH_ROWS
    if impl not in ("auto", "fused"):
        raise ValueError(f"impl must be auto, reference, chunked or fused; got {impl!r}")
    if not has_triton() or hidden.dtype == torch.float64:
        raise ValueError(
            "impl='fused' needs the package 'triton', which comes with torch for CUDA, and no "
            "fp64; use impl='auto' or 'chunked' here"
        )
    return TRITON_ROWS


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


# ---- products into float32 ----


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write a @ b into `out`, which may be wider than the operands."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def accumulate(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Add a @ b to `out`, summed in the dtype of `out`."""
    if out.dtype == a.dtype:
        return out.addmm_(a, b)
    if fused_accumulation(a.device, a.dtype):
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(torch.mm(a, b, out_dtype=out.dtype))


def needs_width(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4 and not fp32_output(device, dtype)


@cache
def fp32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device can multiply `dtype` matrices into an fp32 result, as cuBLAS can."""
    return _gives(16, torch.ones(16, 16, dtype=dtype, device=device), torch.mm)


@cache
def fused_accumulation(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device can also add a product to an fp32 result in the same call."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    return _gives(17, ones, lambda *pair, **into: torch.addmm(into["out"], *pair, **into))


def _gives(expected: int, ones: Tensor, multiply: Callable[..., Tensor]) -> bool:
    """Whether a multiplication of matrices of ones works and gives what it should."""
    result = ones.float()
    try:
        multiply(ones, ones, out_dtype=torch.float32, out=result)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((result == expected).all())


# ---- phase 1 ----


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of the head's matrix products: autocast's if it is on, as for any linear layer."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


@contextmanager
def isolated(hidden: Tensor) -> Iterator[torch.dtype]:
    """Turn gradients and autocast off inside; gives the dtype that autocast would have used."""
    dtype = compute_dtype(hidden)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        yield dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@cache
def _chunk_bytes(device: torch.device, exact: bool) -> int:
    """The memory that the logits of a chunk may take. Phase 1 needs no large chunks; phase 2 is
    fastest when all selected tokens fit, because the gradient of the weight is then one product."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return min(512 * _MIB if exact else 2048 * _MIB, memory // 20)
    if device.type == "cpu":
        return 64 * _MIB
    return 256 * _MIB


@dataclass(frozen=True)
class Workspace:
    """The head's tensors, detached, in the dtype the matrix products run in."""

    hidden_ND: Tensor
    weight_VD: Tensor
    transform: Transform
    rows: RowOperations
    parameter_dtype: torch.dtype
    """The dtype of the head's weight itself: fp32 under autocast."""

    @classmethod
    def of(
        cls,
        hidden_ND: Tensor,
        head: Head,
        rows: RowOperations,
        dtype: torch.dtype,
        *,
        widen: bool = True,
    ) -> "Workspace":
        """A head's tensors. `widen`: in float32 if the device has no other way to fp32-accurate
        logits. Without it such a workspace serves `row_losses` alone, which then converts the
        weight strip by strip."""
        if widen and needs_width(hidden_ND.device, dtype):
            dtype = torch.float32
        bias = None if head.bias is None else head.bias.detach().to(accumulation_dtype(dtype))
        return cls(
            hidden_ND.detach().to(dtype).contiguous(),
            head.weight.detach().to(dtype),
            Transform(bias, head.softcap, head.scale),
            rows,
            head.weight.dtype,
        )

    @property
    def wide(self) -> torch.dtype:
        """The dtype of losses and sums: fp64 for fp64, else fp32."""
        return accumulation_dtype(self.hidden_ND.dtype)

    def chunk_tokens(self, bytes_per_token: int, *, exact: bool) -> int:
        """The number of tokens whose logits fit the memory of a chunk."""
        tokens = _chunk_bytes(self.hidden_ND.device, exact) // bytes_per_token
        return tokens // 128 * 128 if tokens >= 128 else max(16, tokens)

    def logits(self, index_K: Tensor) -> Tensor:
        """The fp32 logits of some tokens, for callers that hold few at a time."""
        shape = (len(index_K), self.weight_VD.shape[0])
        out = torch.empty(shape, dtype=self.wide, device=index_K.device)
        x = product(self.hidden_ND.index_select(0, index_K), self.weight_VD.t(), out=out)
        return self.transform(x)


OnChunk = Callable[[int, int, Tensor, RowLosses], None]
"""Called with each chunk: first and last token, their raw products, their losses."""


def row_losses(
    work: Workspace,
    labels_N: Tensor,
    *,
    with_entropy: bool = False,
    chunk: int | None = None,
    on_chunk: OnChunk | None = None,
) -> RowLosses:
    """Phase 1: the losses of all tokens, without gradient. Labels must be rows of the head (replace
    ignored ones before, drop them after). `chunk`: the tokens whose logits are alive at a time."""
    hidden, weight = work.hidden_ND, work.weight_VD
    n, dtype = hidden.shape[0], work.wide
    if needs_width(hidden.device, hidden.dtype):
        assert not with_entropy and on_chunk is None
        return _losses_by_strips(work, labels_N, chunk or _STRIP_TOKENS)
    nll = torch.empty(n, dtype=dtype, device=hidden.device)
    lse = torch.empty_like(nll)
    entropy = torch.empty_like(nll) if with_entropy else None
    size = chunk or work.chunk_tokens(weight.shape[0] * dtype.itemsize, exact=True)
    size = max(1, min(n, size))
    buffer = torch.empty(size, weight.shape[0], dtype=dtype, device=hidden.device)
    for a in range(0, n, size):
        b = min(a + size, n)
        x = product(hidden[a:b], weight.t(), out=buffer[: b - a])
        part = work.rows.losses(x, labels_N[a:b], work.transform, with_entropy)
        nll[a:b], lse[a:b] = part.nll_N, part.lse_N
        if entropy is not None and part.entropy_N is not None:
            entropy[a:b] = part.entropy_N
        if on_chunk is not None:
            on_chunk(a, b, x, part)
    return RowLosses(nll, lse, entropy)


def _losses_by_strips(work: Workspace, labels_N: Tensor, chunk: int) -> RowLosses:
    """`row_losses` for half precision on a CPU, in strips of the vocabulary with a running maximum
    and sum (online log-sum-exp): each weight is converted to float32 once, not once per chunk."""
    hidden, rows = work.hidden_ND.float(), work.weight_VD.shape[0]
    n = hidden.shape[0]
    peak = torch.full((n,), -torch.inf)
    total, chosen = torch.zeros(n), torch.zeros(n)
    for low in range(0, rows, _STRIP_ROWS):
        high = min(low + _STRIP_ROWS, rows)
        strip = work.weight_VD[low:high].float()
        bias = None if work.transform.bias is None else work.transform.bias[low:high]
        transform = replace(work.transform, bias=bias)
        for a in range(0, n, chunk):
            part = slice(a, min(a + chunk, n))
            logits = transform(torch.mm(hidden[part], strip.t()))
            new_peak = torch.maximum(peak[part], logits.amax(dim=1))
            here = (labels_N[part] >= low) & (labels_N[part] < high)
            column = (labels_N[part] - low).clamp(0, high - low - 1)
            picked = logits.gather(1, column[:, None]).squeeze(1)
            chosen[part] = torch.where(here, picked, chosen[part])
            added = logits.sub_(new_peak[:, None]).exp_().sum(dim=1)
            total[part] = total[part] * torch.exp(peak[part] - new_peak) + added
            peak[part] = new_peak
    lse = peak + torch.log(total)
    return RowLosses(lse - chosen, lse, None)


# ---- phase 2 ----


@dataclass
class Gradients:
    """The gradients of a sum over tokens. `weight_VD` may be fp32 for a bf16 parameter, so that it
    is rounded once."""

    hidden_KD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None


class Wanted(NamedTuple):
    """The gradients that are needed: a frozen head (LoRA) costs no product for its weight."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, hidden: Tensor, head: Head) -> "Wanted":
        on = torch.is_grad_enabled()
        return cls(
            *(on and t is not None and t.requires_grad for t in (hidden, head.weight, head.bias))
        )


# (first, last, raw products of these tokens) -> d loss / d products, maybe in the same memory
GradientOfRows = Callable[[int, int, Tensor], Tensor]
# (which of the K tokens, their losses) -> their weights, or their targets beside the label
WeighRows = Callable[[slice, Tensor], Tensor]
SoftenRows = Callable[[slice, Tensor], SoftRows | BucketRows]
CutChunks = Callable[[list[int]], list[int]]


def backward_chunks(
    work: Workspace,
    wanted: Wanted,
    gradient_of_rows: GradientOfRows,
    *,
    exact: bool = False,
    logits_per_token: int | None = None,
    weights_K: Tensor | None = None,
    cut_chunks: CutChunks | None = None,
) -> Gradients:
    """Run the head over chunks of tokens; the caller turns raw products into their gradient.
    `exact`: hand out the products in fp32 instead of the tensors' dtype. `logits_per_token`:
    how many logits the caller holds at a time, if not just the products. `weights_K`: the weight of
    each token, known after its chunk; it is applied to the narrow side of the products."""
    hidden, weight = work.hidden_ND, work.weight_VD
    (n, _), v, wide = hidden.shape, weight.shape[0], work.wide
    logit_dtype = wide if exact else hidden.dtype
    token_bytes = logit_dtype.itemsize * (logits_per_token or v)
    size = max(1, min(n, work.chunk_tokens(token_bytes, exact=exact)))
    # A single bf16 chunk is summed in fp32 inside the matrix product: no accumulator is needed.
    # fp16 always gets one, because a sum over tokens may leave its range.
    narrow = n <= size and hidden.dtype == work.parameter_dtype != torch.float16
    weight_dtype = hidden.dtype if narrow else wide
    out = Gradients(
        torch.empty_like(hidden) if wanted.hidden else None,
        weight.new_empty(weight.shape, dtype=weight_dtype) if wanted.weight else None,
        torch.zeros(v, dtype=wide, device=hidden.device) if wanted.bias else None,
    )
    if n == 0 and out.weight_VD is not None:
        out.weight_VD.zero_()
    ends = [min(a + size, n) for a in range(0, n, size)]
    if cut_chunks is not None:
        ends = cut_chunks(ends)
    widest = max((b - a for a, b in pairwise([0, *ends])), default=0)
    buffer = torch.empty(max(size, widest), v, dtype=logit_dtype, device=hidden.device)
    for a, b in pairwise([0, *ends]):
        x = product(hidden[a:b], weight.t(), out=buffer[: b - a])
        g = gradient_of_rows(a, b, x).to(hidden.dtype)
        inputs = hidden[a:b]
        if out.hidden_KD is not None:
            torch.mm(g, weight, out=out.hidden_KD[a:b])
        if weights_K is not None:
            counts = weights_K[a:b].to(hidden.dtype)
            inputs = inputs * counts[:, None]
            if out.hidden_KD is not None:
                out.hidden_KD[a:b] *= counts[:, None]
            if out.bias_V is not None:
                out.bias_V += torch.mv(g.t().to(wide), counts.to(wide))
        elif out.bias_V is not None:
            out.bias_V += g.sum(0, dtype=wide)
        if out.weight_VD is not None:
            combine = product if a == 0 else accumulate
            combine(g.t(), inputs, out=out.weight_VD)
    return out


class Summed(NamedTuple):
    """The result of phase 2 for its K tokens."""

    total: Tensor
    """The weighted sum of their losses, with gradient."""
    nll_K: Tensor
    """The nll of the labels."""
    weights_K: Tensor | None
    distance_K: Tensor | None
    """By how much each loss exceeds the label's nll; None without soft targets."""
    entropy_K: Tensor | None = None
    """The entropy of the student's distribution, if asked for."""


def summed_loss(
    hidden_ND: Tensor,
    head: Head,
    labels_N: Tensor,
    index_K: Tensor,
    rows: RowOperations,
    losses: RowLosses | None,
    *,
    weigh: WeighRows | None = None,
    soften: SoftenRows | None = None,
    cut_chunks: CutChunks | None = None,
    with_entropy: bool = False,
) -> Summed:
    """Phase 2: the summed loss of the tokens `index_K`, with gradient. `losses` are those of phase
    1 for all N tokens; None if there was no phase 1. `weigh` gives the weights of tokens, `soften`
    their targets beside the label: both are called chunk by chunk, as the losses become known.
    `cut_chunks` moves the ends of chunks so that tokens which are weighed together are in one."""
    wanted = Wanted.of(hidden_ND, head)
    labels_K = labels_N.index_select(0, index_K)
    with isolated(hidden_ND) as dtype:
        work = Workspace.of(hidden_ND.index_select(0, index_K), head, rows, dtype)
        one_pass = any(wanted) or soften is not None or with_entropy
        if losses is not None:
            losses_K = RowLosses(losses.nll_N[index_K], losses.lse_N[index_K], None)
        elif one_pass:  # filled by the one pass below
            nll_K = torch.empty(len(index_K), dtype=work.wide, device=hidden_ND.device)
            losses_K = RowLosses(nll_K, torch.empty_like(nll_K), None)
        else:
            losses_K = row_losses(work, labels_K)
        nll_K = losses_K.nll_N
        weights_K = None if weigh is None else torch.ones_like(nll_K)
        distance_K = None if soften is None else torch.zeros_like(nll_K)
        entropy_K = torch.zeros_like(nll_K) if with_entropy else None

        def gradient_of_rows(a: int, b: int, x: Tensor) -> Tensor:
            part = slice(a, b)
            if losses is None:
                nll_K[part], losses_K.lse_N[part], entropy = rows.losses(
                    x, labels_K[part], work.transform, with_entropy
                )
                if entropy_K is not None and entropy is not None:
                    entropy_K[part] = entropy
            if weigh is not None and weights_K is not None:
                weights_K[part] = weigh(part, nll_K[part])
            soft: SoftRows | SparseRows | None = None
            if soften is not None and distance_K is not None:
                softened = soften(part, nll_K[part])
                if isinstance(softened, BucketRows):
                    divergence, soft = softened.settled(x, losses_K.lse_N[part], work.transform)
                    distance_K[part] = divergence - nll_K[part]
                else:
                    soft = softened
                    distance_K[part] = soft.distance(x, labels_K[part], work.transform)
            return rows.gradient_(x, labels_K[part], losses_K.lse_N[part], work.transform, soft)

        if one_pass:
            gradients = backward_chunks(
                work,
                wanted,
                gradient_of_rows,
                exact=not any(wanted),
                weights_K=weights_K,
                cut_chunks=cut_chunks,
            )
        elif weigh is not None:
            weights_K = weigh(slice(0, len(index_K)), nll_K)
    loss_K = nll_K if distance_K is None else nll_K + distance_K
    total = loss_K.sum() if weights_K is None else (loss_K * weights_K).sum()
    if any(wanted):
        total = attach(total, gradients, hidden_ND, head, index_K)
    return Summed(total, nll_K, weights_K, distance_K, entropy_K)


def attach(
    loss: Tensor, gradients: Gradients, hidden_ND: Tensor, head: Head, index_K: Tensor
) -> Tensor:
    """The loss as a node of the graph that has its gradients already."""
    apply = cast(Callable[..., Tensor], _Attached.apply)
    return apply(hidden_ND, head.weight, head.bias, loss, gradients, index_K)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        gradients: Gradients,
        index_K: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.index_K = gradients, index_K
        ctx.hidden_shape, ctx.hidden_dtype = hidden_ND.shape, hidden_ND.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        gradients: Gradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "backward was already called on this loss; compute it again instead of using "
                "retain_graph"
            )
        ctx.gradients = None  # scaled in place below: they may be as large as the head

        def scaled(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
            return None if gradient is None else gradient.mul_(upstream).to(dtype=dtype)

        hidden = scaled(gradients.hidden_KD, ctx.hidden_dtype)
        if hidden is not None:
            whole = torch.zeros(ctx.hidden_shape, dtype=hidden.dtype, device=hidden.device)
            hidden = whole.index_copy_(0, ctx.index_K, hidden)
        weight = scaled(gradients.weight_VD, ctx.weight_dtype)
        return hidden, weight, scaled(gradients.bias_V, ctx.bias_dtype), None, None, None
