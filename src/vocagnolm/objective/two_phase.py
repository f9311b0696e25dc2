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
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from vocagnolm.objective.config import compute_dtype
from vocagnolm.objective.head import (
    Head,
    RowLosses,
    RowOperations,
    SoftRows,
    Transform,
    accumulate,
    needs_width,
    product,
)

_MIB = 1 << 20
# Half precision on a CPU: rows of the weight that are converted to float32 at a time, and tokens
# whose logits of such a strip are alive (near the caches).
_STRIP_ROWS = 2048
_STRIP_TOKENS = 32 * _MIB // (4 * _STRIP_ROWS)


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
        cls,
        hidden_ND: Tensor,
        head: Head,
        rows: RowOperations,
        dtype: torch.dtype,
        *,
        widen: bool = True,
    ) -> "Workspace":
        """`widen`: in float32 where the device has no other way to fp32-accurate logits; without
        it only `token_losses` can be asked for, which then converts the weight strip by strip."""
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
        x = product(self.hidden_ND.index_select(0, index_K), self.weight_VD.t(), out=out)
        return self.transform(x)


# (first, last, raw products of these tokens, their losses)
SeeRows = Callable[[int, int, Tensor, RowLosses], None]


def token_losses(
    work: Workspace,
    labels_N: Tensor,
    *,
    with_entropy: bool = False,
    chunk: int | None = None,
    see: SeeRows | None = None,
) -> RowLosses:
    """Phase 1. Labels must be rows of the head (replace ignored ones before, drop them after).
    `chunk`: tokens whose logits are alive at a time. `see` is shown every chunk."""
    hidden, weight = work.hidden_ND, work.weight_VD
    n, dtype = hidden.shape[0], work.wide
    if needs_width(hidden.device, hidden.dtype):
        assert not with_entropy and see is None
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
        if see is not None:
            see(a, b, x, part)
    return RowLosses(nll, lse, entropy)


def _losses_by_strips(work: Workspace, labels_N: Tensor, chunk: int) -> RowLosses:
    """The same for half precision on a CPU, in strips of the vocabulary with a running maximum and
    sum (online log-sum-exp): each weight is converted to float32 once, not once per chunk."""
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
    weights_K: Tensor | None = None,
    cut_chunks: Callable[[list[int]], list[int]] | None = None,
) -> Gradients:
    """Runs the head over chunks of tokens; the caller turns raw products into their gradient.
    `exact`: hand out the products in fp32 instead of the tensors' dtype. `logits_per_token`:
    how many logits the caller holds at a time, if not just the products. `weights_K`: what each
    token counts, known once its chunk is through; applied to the narrow side of the products."""
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
    """What phase 2 gives of its K tokens."""

    total: Tensor
    """The weighted sum of their losses, with gradient."""
    nll_K: Tensor
    """Of their labels."""
    weights_K: Tensor | None
    distance_K: Tensor | None
    """With soft targets: what each loss is above the label's nll."""


def summed_loss(
    hidden_ND: Tensor,
    head: Head,
    labels_N: Tensor,
    index_K: Tensor,
    rows: RowOperations,
    losses: RowLosses | None,
    weigh: "Weigh | None" = None,
    soften: "Soften | None" = None,
) -> Summed:
    """Phase 2, of the tokens `index_K`. `losses` are phase 1's, for all N tokens; None: this is the
    one and only phase. `weigh`: the tokens count by weights. `soften`: their targets are not the
    labels alone."""
    wanted = Wanted.of(hidden_ND, head)
    labels_K = labels_N.index_select(0, index_K)
    with isolated(hidden_ND) as dtype:
        work = Workspace.of(hidden_ND.index_select(0, index_K), head, rows, dtype)
        one_pass = wanted.anything or soften is not None
        if losses is not None:
            losses_K = RowLosses(losses.nll_N[index_K], losses.lse_N[index_K], None)
        elif one_pass:  # filled by the one pass below
            nll_K = torch.empty(len(index_K), dtype=work.wide, device=hidden_ND.device)
            losses_K = RowLosses(nll_K, torch.empty_like(nll_K), None)
        else:
            losses_K = token_losses(work, labels_K)
        weights_K = None if weigh is None else torch.ones_like(losses_K.nll_N)
        distance_K = None if soften is None else torch.zeros_like(losses_K.nll_N)
        if not one_pass:
            if weigh is not None:
                weights_K = weigh.rows(0, len(index_K), losses_K.nll_N)
            return Summed(_total(losses_K.nll_N, weights_K), losses_K.nll_N, weights_K, None)

        def gradient_of_rows(a: int, b: int, x: Tensor) -> Tensor:
            if losses is None:
                part = rows.losses(x, labels_K[a:b], work.transform, False)
                losses_K.nll_N[a:b], losses_K.lse_N[a:b] = part.nll_N, part.lse_N
            if weigh is not None and weights_K is not None:
                weights_K[a:b] = weigh.rows(a, b, losses_K.nll_N[a:b])
            soft = None
            if soften is not None and distance_K is not None:
                soft = soften.rows(a, b, losses_K.nll_N[a:b])
                distance_K[a:b] = soft.distance(x, labels_K[a:b], work.transform)
            return rows.gradient_(x, labels_K[a:b], losses_K.lse_N[a:b], work.transform, soft)

        def cut(ends: list[int]) -> list[int]:
            for one in (weigh, soften):
                ends = ends if one is None else one.cut(ends)
            return ends

        gradients = backward_chunks(
            work,
            wanted,
            gradient_of_rows,
            exact=not wanted.anything,
            weights_K=weights_K,
            cut_chunks=cut,
        )
    nll_K = losses_K.nll_N
    total = _total(nll_K if distance_K is None else nll_K + distance_K, weights_K)
    if wanted.anything:
        total = attach(total, gradients, hidden_ND, head, index_K)
    return Summed(total, nll_K, weights_K, distance_K)


def _total(loss_K: Tensor, weights_K: Tensor | None) -> Tensor:
    return loss_K.sum() if weights_K is None else (loss_K * weights_K).sum()


class Weigh(Protocol):
    """Gives the selected tokens their weights, chunk by chunk, as their losses become known."""

    def rows(self, a: int, b: int, nll: Tensor) -> Tensor: ...

    def cut(self, ends: list[int]) -> list[int]:
        """Ends of chunks, moved so that what is weighed together lies in one chunk."""
        ...


class Soften(Protocol):
    """Gives the selected tokens their targets beside the label, likewise."""

    def rows(self, a: int, b: int, nll: Tensor) -> SoftRows: ...

    def cut(self, ends: list[int]) -> list[int]: ...


def attach(
    loss: Tensor, gradients: Gradients, hidden_ND: Tensor, head: Head, index_K: Tensor
) -> Tensor:
    """The loss with its ready-made gradients, as a node of the graph."""
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
