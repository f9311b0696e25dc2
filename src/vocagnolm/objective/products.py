"""Products of half precision into float32, as far as a device can make them."""

from functools import cache

import torch
from torch import Tensor


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
