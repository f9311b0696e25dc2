"""Losses of rows of logits and their gradients as two Triton kernels, each of which reads the raw
products once.

`objective.head` has the same two operations in torch, and says what their numbers mean: logits are
`softcap(scale * (x + bias))`. The matrix products stay cuBLAS's, where most of the time is spent.
Without a GPU the kernels run under TRITON_INTERPRET=1 (tests).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _logits(x, bias_ptr, columns, inside, scale, softcap, BIAS: tl.constexpr, CAP: tl.constexpr):
    """Raw products -> logits in fp32; -inf outside the row."""
    z = x.to(tl.float32)
    if BIAS:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    z *= scale
    if CAP:
        # tanh by exp, without libdevice: absolute error below 1e-7 * cap; exp may overflow to inf
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))
    return tl.where(inside, z, -float("inf"))


@triton.jit
def _losses_kernel(
    x_ptr,
    label_ptr,
    bias_ptr,
    nll_ptr,
    lse_ptr,
    entropy_ptr,
    row_stride,
    scale,
    softcap,
    V: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: a running maximum and sum per lane, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * row_stride
    lane = tl.arange(0, BLOCK)
    # A finite start instead of -inf: -inf - -inf would be NaN. No logit is smaller.
    highest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)  # sum of exp(z - highest) * (z - highest)
    for start in range(0, V, BLOCK):
        columns = start + lane
        inside = columns < V
        x = tl.load(x_row + columns, mask=inside, other=0.0)
        z = _logits(x, bias_ptr, columns, inside, scale, softcap, BIAS, CAP)
        new_highest = tl.maximum(highest, z)
        shift = highest - new_highest
        shrink = tl.exp(shift)
        below = z - new_highest
        e = tl.exp(below)
        if ENTROPY:
            weighted = (weighted + total * shift) * shrink + tl.where(e > 0, e * below, 0.0)
        total = total * shrink + e
        highest = new_highest
    top = tl.max(highest, 0)
    shift = highest - top
    shrink = tl.exp(shift)
    whole = tl.sum(total * shrink, 0)
    lse = top + tl.log(whole)
    label = tl.load(label_ptr + row)
    x_label = tl.load(x_row + label)
    z_label = _logits(x_label, bias_ptr, label, label < V, scale, softcap, BIAS, CAP)
    tl.store(nll_ptr + row, lse - z_label)
    tl.store(lse_ptr + row, lse)
    if ENTROPY:
        # -sum p log p with log p = (z - top) - log(whole): no large numbers cancel
        centred = tl.sum((weighted + total * shift) * shrink, 0)
        tl.store(entropy_ptr + row, tl.log(whole) - centred / whole)


@triton.jit
def _gradient_kernel(
    x_ptr,
    label_ptr,
    lse_ptr,
    bias_ptr,
    soft_id_ptr,
    soft_weight_ptr,
    factor_ptr,
    row_stride,
    scale,
    softcap,
    V: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    SOFT: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK columns of a row, in place. SOFT: tokens beside the label. FACTOR: the
    softmax is multiplied by a number for each row, and the label has no part in it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    x_block = x_ptr + row * row_stride + columns
    x = tl.load(x_block, mask=inside, other=0.0)
    z = _logits(x, bias_ptr, columns, inside, scale, softcap, BIAS, CAP)
    g = tl.exp(z - tl.load(lse_ptr + row))
    if FACTOR:
        g *= tl.load(factor_ptr + row)
    left = 1.0
    for k in tl.static_range(SOFT):
        weight = tl.load(soft_weight_ptr + row * SOFT + k)
        g -= tl.where(columns == tl.load(soft_id_ptr + row * SOFT + k), weight, 0.0)
        left -= weight
    if not FACTOR:
        g -= tl.where(columns == tl.load(label_ptr + row), left, 0.0)
    if CAP:
        ratio = tl.where(inside, z / softcap, 0.0)
        g *= 1.0 - ratio * ratio
    g *= scale
    tl.store(x_block, g.to(x_ptr.dtype.element_ty), mask=inside)


def losses(
    x_NV: Tensor,
    labels_N: Tensor,
    bias_V: Tensor | None,
    softcap: float | None,
    scale: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(nll, log-sum-exp, entropy or None) [N] in float32."""
    n, v = x_NV.shape
    assert x_NV.stride(1) == 1 and labels_N.is_contiguous()
    nll = torch.empty(n, dtype=torch.float32, device=x_NV.device)
    lse = torch.empty_like(nll)
    entropy = torch.empty_like(nll) if with_entropy else None
    if n:
        _losses_kernel[(n,)](
            x_NV,
            labels_N,
            x_NV if bias_V is None else bias_V,
            nll,
            lse,
            nll if entropy is None else entropy,
            x_NV.stride(0),
            scale,
            softcap or 1.0,
            V=v,
            BIAS=bias_V is not None,
            CAP=softcap is not None,
            ENTROPY=with_entropy,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return nll, lse, entropy


def gradient_(
    x_NV: Tensor,
    labels_N: Tensor,
    lse_N: Tensor,
    bias_V: Tensor | None,
    softcap: float | None,
    scale: float,
    soft_ids_NK: Tensor | None,
    soft_weights_NK: Tensor | None,
    factor_N: Tensor | None = None,
) -> Tensor:
    """Overwrites the raw products by the gradient of their nll, against the label or against soft
    targets; with factors by `factor * softmax - weights`."""
    n, v = x_NV.shape
    ids, weights = labels_N, lse_N  # placeholders: not read without soft targets
    if soft_ids_NK is not None and soft_weights_NK is not None:
        ids, weights = soft_ids_NK.contiguous(), soft_weights_NK.float().contiguous()
    assert x_NV.stride(1) == 1 and labels_N.is_contiguous() and lse_N.is_contiguous()
    if n:
        _gradient_kernel[(n, triton.cdiv(v, _BLOCK))](
            x_NV,
            labels_N,
            lse_N,
            x_NV if bias_V is None else bias_V,
            ids,
            weights,
            lse_N if factor_N is None else factor_N.float().contiguous(),
            x_NV.stride(0),
            scale,
            softcap or 1.0,
            V=v,
            BIAS=bias_V is not None,
            CAP=softcap is not None,
            SOFT=0 if soft_ids_NK is None else ids.shape[1],
            FACTOR=factor_N is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return x_NV
