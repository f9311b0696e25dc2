"""`attention.attend_to_slots` as a Triton kernel, which also keeps the new keys and values: one
program for a row and a group of heads reads the row's keys once, and only those that it has.

Without a GPU the kernel runs under TRITON_INTERPRET=1 (tests).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64
_LEAST_ROWS = 16  # of a matrix that tl.dot takes


@triton.jit
def _scores(q, k, scale, softcap, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """[R, BLOCK] from queries [R, D] and keys [BLOCK, D]."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CAP:
        # tanh by exp, without libdevice; exp may overflow to inf
        s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
    return s


@triton.jit
def _join(m, total, acc, s, v, PRECISION: tl.constexpr):
    """A block of scores and values into the running maximum, sum and output."""
    top = tl.maximum(m, tl.max(s, 1))
    shrink = tl.exp(m - top)
    p = tl.exp(s - top[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return top, total, acc


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, slot_ptr, position_ptr, pk_ptr, pv_ptr, out_ptr,
    q_row, k_row, v_row, keys_slot, keys_head, values_slot, values_head, out_row,
    P, window, scale, softcap,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row)
    r, d, e = tl.arange(0, RP), tl.arange(0, DP), tl.arange(0, EP)
    lane = tl.arange(0, BLOCK)
    heads = (r < R)[:, None] & (d < D)[None, :]
    q = tl.load(
        q_ptr + row * q_row + (group * R + r)[:, None] * D + d[None, :], mask=heads, other=0.0
    )
    k_new = tl.load(k_ptr + row * k_row + group * D + d, mask=d < D, other=0.0)
    v_new = tl.load(v_ptr + row * v_row + group * E + e, mask=e < E, other=0.0)
    keys = keys_ptr + slot * keys_slot + group * keys_head
    values = values_ptr + slot * values_slot + group * values_head
    tl.store(keys + position * D + d, k_new, mask=d < D)
    tl.store(values + position * E + e, v_new, mask=e < E)
    # the new token first, from registers: so no row is without a key
    m = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    if CAP:
        m = softcap * (1.0 - 2.0 / (tl.exp(2.0 * m / softcap) + 1.0))
    total = tl.full((RP,), 1.0, tl.float32)
    acc = tl.zeros((RP, EP), tl.float32) + v_new.to(tl.float32)[None, :]
    first = position * 0
    if WINDOW:
        first = tl.maximum(P + position - window + 1, 0)
    for start in range((first // BLOCK) * BLOCK, P, BLOCK):
        j = start + lane
        inside = (j < P) & (j >= first)
        k = tl.load(
            pk_ptr + group * P * D + j[:, None] * D + d[None, :],
            mask=inside[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        v = tl.load(
            pv_ptr + group * P * E + j[:, None] * E + e[None, :],
            mask=inside[:, None] & (e < E)[None, :], other=0.0,
        )  # fmt: skip
        s = _scores(q, k, scale, softcap, CAP, PRECISION)
        s = tl.where(inside[None, :], s, -1e30)
        m, total, acc = _join(m, total, acc, s, v, PRECISION)
    first = tl.maximum(first - P, 0)
    for start in range((first // BLOCK) * BLOCK, position, BLOCK):
        j = start + lane
        inside = (j < position) & (j >= first)
        k = tl.load(
            keys + j[:, None] * D + d[None, :],
            mask=inside[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        v = tl.load(
            values + j[:, None] * E + e[None, :],
            mask=inside[:, None] & (e < E)[None, :], other=0.0,
        )  # fmt: skip
        s = _scores(q, k, scale, softcap, CAP, PRECISION)
        s = tl.where(inside[None, :], s, -1e30)
        m, total, acc = _join(m, total, acc, s, v, PRECISION)
    out = acc / total[:, None]
    places = out_ptr + row * out_row + (group * R + r)[:, None] * E + e[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=(r < R)[:, None] & (e < E)[None, :])


def attend_writing(
    query_BHD: Tensor,
    key_BGD: Tensor,
    value_BGD: Tensor,
    keys_SGLD: Tensor,
    values_SGLD: Tensor,
    slot_B: Tensor,
    position_B: Tensor,
    prefix: tuple[Tensor, Tensor],
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """[B, H, D]: keeps the new keys and values at their positions, and attends to all before."""
    B, H, D = query_BHD.shape
    G, E = value_BGD.shape[1:]
    query, key, value = (x.contiguous() for x in (query_BHD, key_BGD, value_BGD))
    slot_B, position_B = slot_B.contiguous(), position_B.contiguous()
    shared_key, shared_value = (x.contiguous() for x in prefix)
    out = torch.empty(B, H, E, dtype=query.dtype, device=query.device)
    R = H // G
    _attend_kernel[(B, G)](
        query, key, value, keys_SGLD, values_SGLD, slot_B, position_B, shared_key, shared_value,
        out,
        query.stride(0), key.stride(0), value.stride(0),
        keys_SGLD.stride(0), keys_SGLD.stride(1), values_SGLD.stride(0), values_SGLD.stride(1),
        out.stride(0),
        shared_key.shape[2], window or 0, scale, softcap or 1.0,
        R=R, D=D, E=E,
        RP=max(_LEAST_ROWS, triton.next_power_of_2(R)),
        DP=max(_LEAST_ROWS, triton.next_power_of_2(D)),
        EP=max(_LEAST_ROWS, triton.next_power_of_2(E)),
        WINDOW=window is not None, CAP=bool(softcap),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
