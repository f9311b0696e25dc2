"""The matrix products of a decoder in fp8 (e4m3), with a scale for every row of both sides.

Weights are rounded once, activations before every product; sums, norms, attention and the head stay
as they are. On a GPU one kernel multiplies, on a CPU the same rounding is emulated, slowly: that is
the reference of the tests.
"""

import torch
from torch import Tensor, nn

from vocagnolm.errors import UsageError
from vocagnolm.model.compiled import find_layers

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_HOPPER = (9, 0)
# what the kernel asks of both sides of a weight
_MULTIPLE = 16


def require_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER:
        return
    found = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise UsageError(
        f"--dtype fp8 needs a GPU of the Hopper generation (H100, H200) or newer, and this is "
        f"{found}. Use --dtype bfloat16."
    )


def rounded_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3, scale [..., 1] in float32): the largest value of every row becomes e4m3's largest."""
    scale = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
    return (values.float() / scale).clamp(-_LARGEST, _LARGEST).to(_FP8), scale


class Fp8Linear(nn.Module):
    """In place of an nn.Linear, for inference."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, scale = rounded_rows(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        rounded, scale = rounded_rows(rows)
        if x.is_cuda:
            out = torch._scaled_mm(
                rounded,
                self.weight.t(),
                scale_a=scale,
                scale_b=self.scale.t(),
                out_dtype=x.dtype,
                use_fast_accum=True,
            )
        else:
            product = (rounded.float() * scale) @ (self.weight.float() * self.scale).t()
            out = product.to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        shaped: Tensor = out.unflatten(0, x.shape[:-1])
        return shaped


def to_fp8(model: nn.Module) -> int:
    """Exchange the linear layers of the decoder's layers, in place; how many."""
    count = 0
    for layer in find_layers(model) or ():
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and not any(n % _MULTIPLE for n in child.weight.shape):
                    setattr(parent, name, Fp8Linear(child))
                    count += 1
    if count == 0:
        raise UsageError(
            f"--dtype fp8: no linear layers were found in the decoder of {type(model).__name__}. "
            "Use --dtype bfloat16."
        )
    return count
