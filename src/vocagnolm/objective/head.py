"""The head in two phases, never holding [tokens, vocabulary].

Phase 1 (`token_losses`): nll of every token, without gradient, accurate to fp32 so that the
selection does not depend on bf16 rounding of the logits (bf16 logits are off by up to 0.08 nats).
Phase 2 (`summed_loss`): forward and backward of the selected tokens alone. Its gradients are
computed during the forward pass, chunk by chunk, as Liger does, and only scaled in backward.

With T tokens, of which a share s is selected, that is (2 + 6 s) T D V operations instead of
6 T D V: 4.4 for the paper's 40 %. Keeping the logits of phase 1 would save 2 s T D V more, but
exact logits are fp32 and moving them costs what the product costs.

Shape letters: N tokens, K selected tokens, D hidden size, V rows of the head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vocagnolm.objective.config import Head, compute_dtype
from vocagnolm.objective.rows import RowLosses, RowOperations, Transform

_MIB = 1 << 20


@dataclass(frozen=True)
class Workspace:
    """The head's tensors, detached, in the dtype the matrix products run in."""

    hidden_ND: Tensor
    weight_VD: Tensor
    transform: Transform
    rows: RowOperations
    parameter_dtype: torch.dtype
    """Of the head's weight itself: fp32 under autocast."""

    @classmethod
    def of(
        cls, hidden_ND: Tensor, head: Head, rows: RowOperations, dtype: torch.dtype
    ) -> "Workspace":
        if dtype.itemsize < 4 and not _fp32_output(hidden_ND.device, dtype):
            dtype = torch.float32  # the only way to fp32-accurate logits on this device
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
        """The dtype of losses and sums."""
        return accumulation_dtype(self.hidden_ND.dtype)

    def chunk_tokens(self, bytes_per_token: int, *, exact: bool) -> int:
        """Tokens whose logits fit the budget: large enough to keep the device busy."""
        tokens = _chunk_bytes(self.hidden_ND.device, exact) // bytes_per_token
        return tokens // 128 * 128 if tokens >= 128 else max(16, tokens)

    def logits(self, index_K: Tensor) -> Tensor:
        """fp32 logits of some tokens; for callers that hold few at a time."""
        shape = (len(index_K), self.weight_VD.shape[0])
        out = torch.empty(shape, dtype=self.wide, device=index_K.device)
        x = _product(self.hidden_ND.index_select(0, index_K), self.weight_VD.t(), out=out)
        return self.transform(x)


def token_losses(work: Workspace, labels_N: Tensor, *, with_entropy: bool = False) -> RowLosses:
    """Phase 1. Labels must be rows of the head (replace ignored ones before, drop them after)."""
    hidden, weight = work.hidden_ND, work.weight_VD
    n, dtype = hidden.shape[0], work.wide
    nll = torch.empty(n, dtype=dtype, device=hidden.device)
    lse = torch.empty_like(nll)
    entropy = torch.empty_like(nll) if with_entropy else None
    size = min(n, work.chunk_tokens(weight.shape[0] * dtype.itemsize, exact=True))
    buffer = torch.empty(size, weight.shape[0], dtype=dtype, device=hidden.device)
    for a in range(0, n, size):
        b = min(a + size, n)
        x = _product(hidden[a:b], weight.t(), out=buffer[: b - a])
        part = work.rows.losses(x, labels_N[a:b], work.transform, with_entropy)
        nll[a:b], lse[a:b] = part.nll_N, part.lse_N
        if entropy is not None and part.entropy_N is not None:
            entropy[a:b] = part.entropy_N
    return RowLosses(nll, lse, entropy)


@dataclass
class Gradients:
    """Of a sum over tokens. `weight` may be fp32 for a bf16 parameter: it is rounded once."""

    hidden_KD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None


@dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for: a frozen head (LoRA) costs no product for its weight."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, hidden: Tensor, head: Head) -> "Wanted":
        on = torch.is_grad_enabled()
        return cls(
            on and hidden.requires_grad,
            on and head.weight.requires_grad,
            on and head.bias is not None and head.bias.requires_grad,
        )

    @property
    def anything(self) -> bool:
        return self.hidden or self.weight or self.bias


# (first, last, raw products of these tokens) -> d loss / d products, maybe in the same memory
GradientOfRows = Callable[[int, int, Tensor], Tensor]


def backward_chunks(
    work: Workspace,
    wanted: Wanted,
    gradient_of_rows: GradientOfRows,
    *,
    exact: bool = False,
    logits_per_token: int | None = None,
) -> Gradients:
    """Runs the head over chunks of tokens; the caller turns raw products into their gradient.
    `exact`: hand out the products in fp32 instead of the tensors' dtype. `logits_per_token`:
    how many logits the caller holds at a time, if not just the products."""
    hidden, weight = work.hidden_ND, work.weight_VD
    (n, _), v = hidden.shape, weight.shape[0]
    wide = work.wide
    logit_dtype = wide if exact else hidden.dtype
    token_bytes = logit_dtype.itemsize * (logits_per_token or v)
    size = max(1, min(n, work.chunk_tokens(token_bytes, exact=exact)))
    # A single bf16 chunk is summed in fp32 inside the matrix product: no accumulator is needed.
    # fp16 always gets one, because a sum over tokens may leave its range.
    narrow = n <= size and hidden.dtype == work.parameter_dtype != torch.float16
    weight_dtype = hidden.dtype if narrow else wide
    out = Gradients(
        torch.empty_like(hidden) if wanted.hidden else None,
        torch.empty(weight.shape, dtype=weight_dtype, device=hidden.device)
        if wanted.weight
        else None,
        torch.zeros(v, dtype=wide, device=hidden.device) if wanted.bias else None,
    )
    if n == 0 and out.weight_VD is not None:
        out.weight_VD.zero_()
    buffer = torch.empty(size, v, dtype=logit_dtype, device=hidden.device)
    for a in range(0, n, size):
        b = min(a + size, n)
        x = _product(hidden[a:b], weight.t(), out=buffer[: b - a])
        g = gradient_of_rows(a, b, x).to(hidden.dtype)
        if out.hidden_KD is not None:
            torch.mm(g, weight, out=out.hidden_KD[a:b])
        if out.bias_V is not None:
            out.bias_V += g.sum(0, dtype=wide)
        if out.weight_VD is not None:
            combine = _product if a == 0 else _accumulate
            combine(g.t(), hidden[a:b], out=out.weight_VD)
    return out


def summed_loss(
    hidden_ND: Tensor,
    head: Head,
    labels_N: Tensor,
    index_K: Tensor,
    rows: RowOperations,
    losses: RowLosses | None,
) -> tuple[Tensor, Tensor]:
    """Phase 2: (sum of the nll of the tokens `index_K`, their nll without gradient).
    `losses` are phase 1's, for all N tokens; None: this is the one and only phase."""
    wanted = Wanted.of(hidden_ND, head)
    labels_K = labels_N.index_select(0, index_K)
    with isolated(hidden_ND) as dtype:
        work = Workspace.of(hidden_ND.index_select(0, index_K), head, rows, dtype)
        if losses is not None:
            losses_K = RowLosses(losses.nll_N[index_K], losses.lse_N[index_K], None)
        elif wanted.anything:  # filled by the one pass below
            nll_K = torch.empty(len(index_K), dtype=work.wide, device=hidden_ND.device)
            losses_K = RowLosses(nll_K, torch.empty_like(nll_K), None)
        else:
            losses_K = token_losses(work, labels_K)
        if not wanted.anything:
            return losses_K.nll_N.sum(), losses_K.nll_N

        def gradient_of_rows(a: int, b: int, x: Tensor) -> Tensor:
            if losses is None:
                part = rows.losses(x, labels_K[a:b], work.transform, False)
                losses_K.nll_N[a:b], losses_K.lse_N[a:b] = part.nll_N, part.lse_N
            return rows.gradient_(x, labels_K[a:b], losses_K.lse_N[a:b], work.transform)

        gradients = backward_chunks(work, wanted, gradient_of_rows)
    return attach(losses_K.nll_N.sum(), gradients, hidden_ND, head, index_K), losses_K.nll_N


def attach(
    loss: Tensor, gradients: Gradients, hidden_ND: Tensor, head: Head, index_K: Tensor
) -> Tensor:
    """The loss with its ready-made gradients, as a node of the graph."""
    attached: Tensor = _Attached.apply(hidden_ND, head.weight, head.bias, loss, gradients, index_K)
    return attached


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
                "this loss was already sent backward once and its gradients were handed over; "
                "compute it again instead of using retain_graph"
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


@contextmanager
def isolated(hidden: Tensor) -> Iterator[torch.dtype]:
    """No gradient and no autocast inside; gives the dtype that autocast would have used."""
    dtype = compute_dtype(hidden)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        yield dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """a @ b into `out`, which may be wider than the operands."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _accumulate(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """out += a @ b, summed in the dtype of `out`."""
    if out.dtype == a.dtype:
        return out.addmm_(a, b)
    if _fused_accumulation(a.device, a.dtype):
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(torch.mm(a, b, out_dtype=out.dtype))


@cache
def _fp32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Can this device multiply `dtype` matrices into an fp32 result? (CUDA can, cuBLAS.)"""
    one = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        wide = torch.mm(one, one, out_dtype=torch.float32, out=one.float())
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((wide == 16).all())


@cache
def _fused_accumulation(device: torch.device, dtype: torch.dtype) -> bool:
    """Can it also add to the fp32 result in the same call?"""
    one = torch.ones(16, 16, dtype=dtype, device=device)
    total = one.float()
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((total == 17).all())


@cache
def _chunk_bytes(device: torch.device, exact: bool) -> int:
    """Budget for the logits of one chunk. Phase 1 needs no large chunks; phase 2 is fastest when
    all selected tokens fit, because the gradient of the weight is then one product."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return min(512 * _MIB if exact else 2048 * _MIB, memory // 20)
    if device.type == "cpu":
        return 64 * _MIB
    return 256 * _MIB
