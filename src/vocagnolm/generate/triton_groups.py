"""`draw.grouped` as a Triton kernel: a row of logits is read once.

Without a GPU the kernel runs under TRITON_INTERPRET=1 (tests).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocagnolm.generate.draw import GROUP, Groups

_GROUPS_EACH = 32


@triton.jit
def _grouped_kernel(
    z_ptr, top_ptr, sum_ptr, hot_ptr, row_stride, V, G, cold,
    EACH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * EACH + tl.arange(0, EACH)
    columns = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    z = tl.load(z_ptr + row * row_stride + columns, mask=columns < V, other=-float("inf"))
    top = tl.max(z, 1)
    below = z - tl.maximum(top, -3e38)[:, None]
    place = row * G + group
    tl.store(top_ptr + place, top, mask=group < G)
    tl.store(sum_ptr + place, tl.sum(tl.exp(below), 1), mask=group < G)
    tl.store(hot_ptr + place, tl.sum(tl.exp(below * cold), 1), mask=group < G)


def triton_grouped(z_NV: Tensor, temperature: float) -> Groups:
    N, V = z_NV.shape
    G = -(-V // GROUP)
    assert z_NV.stride(1) == 1 and z_NV.dtype == torch.float32
    groups = Groups(*(torch.empty(N, G, device=z_NV.device) for _ in range(3)))
    _grouped_kernel[(N, triton.cdiv(G, _GROUPS_EACH))](
        z_NV, *groups, z_NV.stride(0), V, G, 1.0 / temperature,
        EACH=_GROUPS_EACH, WIDTH=GROUP, num_warps=4,
    )  # fmt: skip
    return groups
