"""Matrix products in fp8 (e4m3), with a scale for every row of both sides.

For scoring, weights are rounded once. For training, weights keep their precision and are rounded
before every product, like activations and gradients. Sums, norms and attention are not changed. On
a GPU one kernel multiplies, and those of `triton_fp8` round. On a CPU the same rounding is emulated
slowly, as a reference for the tests.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from vocagnolm.errors import UsageError
from vocagnolm.model.runtime import find_layers
from vocagnolm.objective.head import OnChunk, Transform, has_triton, row_operations

HEAD_TOO = True
"""Whether `--dtype fp8` means the head's product as well as the decoder's: a head in bfloat16 buys
back a quarter of what fp8 changes in a selection, and costs 6 % of the rate."""

FP8_WIDTH = 1024
"""The width of a student from which on fp8 makes training faster: products grow with the square of
the width, rounding does not."""

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_HOPPER = (9, 0)
# what the kernel asks of both sides of a weight
_MULTIPLE = 16
# Rows of a weight that are rounded at a time: float32 copies of a whole head would be 4 GB.
_STRIP_ROWS = 8192
_PROBE_ROWS = 128
_PROJECTIONS = "gate_proj", "up_proj", "down_proj"
# Layers that read the same rows as others.
_SHARED = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"


def require_fp8(device: torch.device, setting: str = "--dtype") -> None:
    """Refuse a device without fp8 products."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise UsageError(
        f"{setting} fp8 needs a GPU of the Hopper generation (H100, H200) or newer, and this is "
        f"{name}. Use {setting} bfloat16."
    )


def rounded_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values rounded to e4m3 with a scale per row: (e4m3, scale [..., 1] in float32). The largest
    value of every row becomes e4m3's largest."""
    scale = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
    return (values.float() / scale).clamp(-_LARGEST, _LARGEST).to(_FP8), scale


# ---- rounding: operators, which a compiler leaves alone, with a fast version for GPUs ----


def rounded_both(
    values_NO: Tensor, row_factor_N1: Tensor, column_factor_O1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both roundings of a gradient: values times the columns' factors with a scale for each row
    [N, O], and values times the rows' factors with a scale for each column, transposed [O, N]."""
    by_column, scale = rounded_rows((values_NO * row_factor_N1).t())
    return *rounded_rows(values_NO * column_factor_O1.t()), by_column.contiguous(), scale


def _rounded_gated(gate_NI: Tensor, values_NI: Tensor) -> tuple[Tensor, Tensor]:
    return rounded_rows(silu(gate_NI) * values_NI)


def _transposed(values_NI: Tensor) -> Tensor:
    return values_NI.t().clone(memory_format=torch.contiguous_format)


def _triton(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
    def on_gpu(*tensors: Tensor) -> Any:
        if not has_triton():
            return slow(*tensors)
        from vocagnolm.model import triton_fp8

        return getattr(triton_fp8, name)(*tensors)

    return on_gpu


_LIBRARY = torch.library.Library("vocagnolm", "FRAGMENT")
for _name, _arguments, _results, _slow in (
    ("round_rows", "Tensor values", 2, rounded_rows),
    ("round_gated", "Tensor gate, Tensor values", 2, _rounded_gated),
    ("round_both", "Tensor values, Tensor row_factor, Tensor column_factor", 4, rounded_both),
    ("transpose", "Tensor values", 1, _transposed),
):
    _returned = ", ".join(["Tensor"] * _results)
    _LIBRARY.define(f"{_name}({_arguments}) -> ({_returned})")
    for _key in ("CPU", "Meta"):
        _LIBRARY.impl(_name, _slow, _key)
    _LIBRARY.impl(_name, _triton(_name, _slow), "CUDA")
_ROUNDING = torch.ops.vocagnolm


# ---- scoring ----


class Fp8Linear(nn.Module):
    """Replaces an nn.Linear for inference."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, *, shares_input: bool = False):
        """`shares_input`: other layers multiply the same rows. A compiler rounds these once."""
        super().__init__()
        self.shares_input = shares_input
        strips = linear.weight.detach().split(_STRIP_ROWS)
        weights, scales = zip(*map(rounded_rows, strips), strict=True)
        self.register_buffer("weight", torch.cat(weights))
        self.register_buffer("scale", torch.cat(scales))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out = self.of_rounded(*self._rounded(x.flatten(0, -2)), x.dtype)
        shaped: Tensor = out.unflatten(0, x.shape[:-1])
        return shaped

    def of_rounded(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        out = scaled_product(rows, scale, self.weight, self.scale, dtype)
        return out if self.bias is None else out + self.bias

    def product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """rows @ weight.T, without the bias."""
        return scaled_product(*self._rounded(rows), self.weight, self.scale, dtype)

    def _rounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rounded_rows(rows) if self.shares_input else _ROUNDING.round_rows(rows)

    def token_nll(
        self,
        hidden_ND: Tensor,
        labels_N: Tensor,
        transform: Transform,
        chunk: int,
        on_chunk: OnChunk | None = None,
    ) -> Tensor:
        """-log p(label) [N] if this layer is a head, with the float32 logits of `chunk` tokens at a
        time."""
        losses = row_operations("auto", hidden_ND).losses
        nll = torch.empty(len(hidden_ND), device=hidden_ND.device)

        def add(first: int, last: int) -> None:  # two chunks must never be alive together
            x = self.product(hidden_ND[first:last], torch.float32)
            part = losses(x, labels_N[first:last], transform, False)
            nll[first:last] = part.nll_N
            if on_chunk is not None:
                on_chunk(first, last, x, part)

        for first in range(0, len(nll), chunk):
            add(first, min(first + chunk, len(nll)))
        return nll


def scaled_product(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = True,
) -> Tensor:
    """The product of rounded rows with rounded rows. `fast`: the kernel adds up in fewer bits,
    which is too few for sums over many thousand tokens."""
    if not rows.is_cuda:
        with torch.autocast("cpu", enabled=False):
            return ((rows.float() * scale) @ (weight.float() * weight_scale).t()).to(dtype)
    if dtype != torch.float32 or _scales_into_float32(rows.device):
        return _multiplied(rows, weight, scale, weight_scale, dtype, fast)
    unit = torch.ones((1, 1), device=rows.device)
    return _multiplied(rows, weight, unit, unit, dtype, fast).mul_(scale).mul_(weight_scale.t())


# ---- training ----


class _Products(torch.autograd.Function):
    """rows @ weight.T, and the two products of its backward pass.

    In the forward pass each row of both sides has a scale. The sums of the backward pass run over
    these rows, so their scales cannot be applied to the result. They are multiplied into the
    gradient before it is rounded; rows and weight are not rounded a second time."""

    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        rows, row_scale = _ROUNDING.round_rows(rows_NI)
        weight, weight_scale = _ROUNDING.round_rows(weight_OI)
        ctx.save_for_backward(rows, row_scale, weight, weight_scale)
        ctx.dtypes = rows_NI.dtype, weight_OI.dtype
        return scaled_product(rows, row_scale, weight, weight_scale, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient_NO,) = gradients
        rows, row_scale, weight, weight_scale = ctx.saved_tensors
        dtype, unit = gradient_NO.dtype, torch.ones((rows.shape[1], 1), device=rows.device)
        if not ctx.needs_input_grad[1]:  # a frozen weight
            rounded, scale = _ROUNDING.round_rows(gradient_NO * weight_scale.t())
            of_rows = scaled_product(rounded, scale, _ROUNDING.transpose(weight), unit, dtype)
            return of_rows.to(ctx.dtypes[0]), None, None
        rounded, scale, transposed, transposed_scale = _ROUNDING.round_both(
            gradient_NO, row_scale, weight_scale
        )
        of_weight = scaled_product(
            transposed, transposed_scale, _ROUNDING.transpose(rows), unit, dtype, fast=False
        )
        of_rows = scaled_product(rounded, scale, _ROUNDING.transpose(weight), unit, dtype)
        return of_rows.to(ctx.dtypes[0]), of_weight.to(ctx.dtypes[1]), None


class Fp8TrainedLinear(nn.Linear):
    """An nn.Linear with fp8 products in the forward and backward pass, and an ordinary weight."""

    def forward(self, input: Tensor) -> Tensor:
        rows, device = input.flatten(0, -2), input.device.type
        if len(rows) % _MULTIPLE:  # the weight's gradient is a sum over them
            return super().forward(input)
        half = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if half else input.dtype
        out: Tensor = _Products.apply(rows.to(dtype), self.weight, dtype)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        shaped: Tensor = out.unflatten(0, input.shape[:-1])
        return shaped


def train_in_fp8(model: nn.Module) -> int:
    """Switch the linear layers of the decoder to fp8 products, in place, and return their number.
    Its first and last layer, from which more of the rounding's error comes than from others
    (benchmarks/fp8_layers.py), routers of experts, and layers of a shape that the kernel does not
    support are not changed."""
    layers = [*(find_layers(model) or ())]
    linears = [
        child
        for layer in layers[1:-1] or layers
        for parent in layer.modules()
        for name, child in parent.named_children()
        if _fits(child) and name not in ("gate", "router")
    ]
    if not linears:
        raise UsageError(
            f"train.dtype: fp8: no linear layers were found in the decoder of "
            f"{type(model).__name__}. Use train.dtype: bfloat16."
        )
    for linear in linears:
        linear.__class__ = Fp8TrainedLinear
    return len(linears)


# ---- the kernel ----


def _multiplied(
    rows: Tensor,
    weight: Tensor,
    scale: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    fast: bool = True,
) -> Tensor:
    return torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale.t(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


@cache
def _scales_into_float32(device: torch.device) -> bool:
    """Whether the kernel with a scale per row can give float32. cuBLAS 12.9 can on Hopper;
    elsewhere it gives half precision only, and the scales are applied to the product of bare
    rows."""
    rows, scale = rounded_rows(torch.ones(_PROBE_ROWS, _PROBE_ROWS, device=device))
    try:
        out = _multiplied(rows, rows, scale, scale, torch.float32)
    except (RuntimeError, ValueError):
        return False
    return bool((out - _PROBE_ROWS).abs().max() < 0.1)


def to_fp8(model: nn.Module) -> int:
    """Replace the linear layers of the decoder by fp8 ones, in place, and return their number."""
    count = 0
    for layer in find_layers(model) or ():
        count += _exchange(layer, _fits)
        _join_gates(layer)
    if count == 0:
        raise UsageError(
            f"--dtype fp8: no linear layers were found in the decoder of {type(model).__name__}. "
            "Use --dtype bfloat16."
        )
    return count


def _join_gates(layer: nn.Module) -> None:
    """Let gated MLPs round their input once, and silu(gate) * up while it is computed."""
    for module in layer.modules():
        projections = [getattr(module, name, None) for name in _PROJECTIONS]
        if all(isinstance(p, Fp8Linear) for p in projections) and _is_swiglu(module):
            module.forward = MethodType(_gated_mlp, module)


def _is_swiglu(module: nn.Module) -> bool:
    """Whether a module computes down(silu(gate(x)) * up(x)): its code is run with other functions
    as its projections."""
    stand_ins = dict(zip(_PROJECTIONS, (torch.sin, torch.exp, torch.neg), strict=True))
    own = SimpleNamespace(**{**vars(module), **module._modules, **stand_ins})
    x = torch.linspace(-3, 3, _MULTIPLE)
    try:
        result = type(module).forward(own, x)
    except (AttributeError, TypeError):
        return False
    return torch.is_tensor(result) and torch.equal(result, -(silu(x.sin()) * x.exp()))


def _gated_mlp(self: Any, x: Tensor) -> Tensor:
    rounded = _ROUNDING.round_rows(x.flatten(0, -2))
    gate, up = (p.of_rounded(*rounded, x.dtype) for p in (self.gate_proj, self.up_proj))
    out = self.down_proj.of_rounded(*_ROUNDING.round_gated(gate, up), x.dtype)
    shaped: Tensor = out.unflatten(0, x.shape[:-1])
    return shaped


def head_to_fp8(model: Any) -> bool:
    """Replace the model's head by an fp8 layer, in place, and keep an embedding that it shares its
    weight with. False if the kernel cannot take its shape."""
    head = model.get_output_embeddings()
    return _exchange(model, lambda module: module is head and _fits(module)) > 0


def _exchange(root: nn.Module, wanted: Callable[[nn.Module], bool]) -> int:
    places = [
        (parent, name)
        for parent in root.modules()
        for name, child in parent.named_children()
        if wanted(child)
    ]
    for parent, name in places:
        linear = Fp8Linear(getattr(parent, name), shares_input=name in _SHARED)
        setattr(parent, name, linear)
    return len(places)


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not any(n % _MULTIPLE for n in module.weight.shape)
