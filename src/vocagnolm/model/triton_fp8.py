"""Rounding to fp8 as Triton kernels: what surrounds the products of `fp8`.

A compiler's own kernels for this read rows several times and reach a third of the memory's rate.
These read as little as possible: a row is kept in registers between finding its largest value and
rounding. 448 is the largest number of e4m3. Without a GPU the kernels run under TRITON_INTERPRET=1
(tests).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FP8 = torch.float8_e4m3fn
# Tiles of the kernels that read rows and columns. They were measured.
_AMAX = {"STRIP": 256, "ROWS": 16, "COLUMNS": 256, "num_warps": 4}
_BOTH = {"ROWS": 128, "COLUMNS": 64, "num_warps": 4}
_TRANSPOSE = {"ROWS": 128, "COLUMNS": 64, "num_warps": 4}
# values that a program of `_rows_kernel` holds at least, and for each of its warps
_ROW_VALUES, _WARP_VALUES = 4096, 2048


@triton.jit
def _values(x_ptr, gate_ptr, rows, columns, inside, x_stride, gate_stride, GATED: tl.constexpr):
    x = tl.load(x_ptr + rows * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_ptr + rows * gate_stride + columns, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
        x *= gate * tl.sigmoid(gate)
    return x


@triton.jit
def _rows_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    scale_ptr,
    count,
    x_stride,
    gate_stride,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
):
    """A row lies in registers in two parts, FIRST and REST wide: a row of 18,944 values in one part
    would have to be 32,768 wide."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = row[:, None]
    columns = tl.arange(0, FIRST)[None, :]
    inside = (rows < count) & (columns < WIDTH)
    x = _values(x_ptr, gate_ptr, rows, columns, inside, x_stride, gate_stride, GATED)
    amax = tl.max(tl.abs(x), 1)
    if REST > 0:
        others = FIRST + tl.arange(0, REST)[None, :]
        within = (rows < count) & (others < WIDTH)
        y = _values(x_ptr, gate_ptr, rows, others, within, x_stride, gate_stride, GATED)
        amax = tl.maximum(amax, tl.max(tl.abs(y), 1))
    amax = tl.maximum(amax, 1e-12)
    tl.store(scale_ptr + row, amax / 448.0, mask=row < count)
    factor = (448.0 / amax)[:, None]
    tl.store(out_ptr + rows * WIDTH + columns, (x * factor).to(tl.float8e4nv), mask=inside)
    if REST > 0:
        tl.store(out_ptr + rows * WIDTH + others, (y * factor).to(tl.float8e4nv), mask=within)


@triton.jit
def _amax_kernel(
    x_ptr,
    row_factor_ptr,
    column_factor_ptr,
    row_amax_ptr,
    column_amax_ptr,
    rows,
    columns,
    stride,
    STRIP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The largest of every row times the columns' factors, and of every column times the rows'. A
    program goes down a strip of rows, a few at a time."""
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    by_column = tl.load(column_factor_ptr + c, mask=c < columns, other=0.0)
    amax = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, STRIP, ROWS):
        r = tl.program_id(0).to(tl.int64) * STRIP + start + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        x = tl.load(x_ptr + r[:, None] * stride + c[None, :], mask=inside, other=0.0)
        x = tl.abs(x.to(tl.float32))
        by_row = tl.load(row_factor_ptr + r, mask=r < rows, other=0.0)
        tl.atomic_max(row_amax_ptr + r, tl.max(x * by_column[None, :], 1), mask=r < rows)
        amax = tl.maximum(amax, x * by_row[:, None])
    tl.atomic_max(column_amax_ptr + c, tl.max(amax, 0), mask=c < columns)


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(index of rows, of columns, which are inside) of this program's tile."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return r, c, (r < rows)[:, None] & (c < columns)[None, :]


@triton.jit
def _both_kernel(
    x_ptr,
    row_factor_ptr,
    column_factor_ptr,
    row_amax_ptr,
    column_amax_ptr,
    row_out_ptr,
    column_out_ptr,
    row_scale_ptr,
    column_scale_ptr,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    r, c, inside = _tile(rows, columns, ROWS, COLUMNS)
    x = tl.load(x_ptr + r[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    by_row = tl.load(row_factor_ptr + r, mask=r < rows, other=0.0)
    by_column = tl.load(column_factor_ptr + c, mask=c < columns, other=0.0)
    row_amax = tl.maximum(tl.load(row_amax_ptr + r, mask=r < rows, other=1.0), 1e-12)
    column_amax = tl.maximum(tl.load(column_amax_ptr + c, mask=c < columns, other=1.0), 1e-12)
    if tl.program_id(1) == 0:
        tl.store(row_scale_ptr + r, row_amax / 448.0, mask=r < rows)
    if tl.program_id(0) == 0:
        tl.store(column_scale_ptr + c, column_amax / 448.0, mask=c < columns)
    rounded = (x * by_column[None, :] * (448.0 / row_amax)[:, None]).to(tl.float8e4nv)
    tl.store(row_out_ptr + r[:, None] * columns + c[None, :], rounded, mask=inside)
    other = (x * by_row[:, None] * (448.0 / column_amax)[None, :]).to(tl.float8e4nv)
    tl.store(
        column_out_ptr + c[:, None] * rows + r[None, :], tl.trans(other), mask=tl.trans(inside)
    )


@triton.jit
def _transpose_kernel(
    x_ptr, out_ptr, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r, c, inside = _tile(rows, columns, ROWS, COLUMNS)
    x = tl.load(x_ptr + r[:, None] * stride + c[None, :], mask=inside, other=0)
    tl.store(out_ptr + c[:, None] * rows + r[None, :], tl.trans(x), mask=tl.trans(inside))


def round_rows(values_NI: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8.rounded_rows`."""
    return _round_rows(values_NI, values_NI, gated=False)


def round_gated(gate_NI: Tensor, values_NI: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8.rounded_rows` of silu(gate) * values."""
    return _round_rows(gate_NI, values_NI, gated=True)


def _round_rows(gate_NI: Tensor, values_NI: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
    values_NI, gate = _with_rows(values_NI), _with_rows(gate_NI)
    count, width = values_NI.shape
    out = torch.empty((count, width), dtype=_FP8, device=values_NI.device)
    scale = torch.empty((count, 1), device=values_NI.device)
    first = _power_of_2(width)
    rest = triton.next_power_of_2(width - first) if width > first else 0
    rows = _power_of_2(max(1, _ROW_VALUES // (first + rest)))
    warps = min(16, max(2, triton.next_power_of_2(first + rest) * rows // _WARP_VALUES))
    _rows_kernel[(triton.cdiv(count, rows),)](
        values_NI,
        gate,
        out,
        scale,
        count,
        values_NI.stride(0),
        gate.stride(0),
        WIDTH=width,
        FIRST=first,
        REST=rest,
        ROWS=rows,
        GATED=gated,
        num_warps=warps,
    )
    return out, scale


def round_both(
    values_NO: Tensor, row_factor_N1: Tensor, column_factor_O1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fp8.rounded_both`."""
    values_NO = _with_rows(values_NO)
    (rows, columns), device = values_NO.shape, values_NO.device
    amax = torch.zeros(rows + columns, device=device)
    by_row = torch.empty((rows, columns), dtype=_FP8, device=device)
    by_column = torch.empty((columns, rows), dtype=_FP8, device=device)
    row_scale = torch.empty((rows, 1), device=device)
    column_scale = torch.empty((columns, 1), device=device)
    factors = row_factor_N1.contiguous(), column_factor_O1.contiguous()
    size = rows, columns, values_NO.stride(0)
    given = values_NO, *factors, amax, amax[rows:]
    grid = triton.cdiv(rows, _AMAX["STRIP"]), triton.cdiv(columns, _AMAX["COLUMNS"])
    _amax_kernel[grid](*given, *size, **_AMAX)
    outs = by_row, by_column, row_scale, column_scale
    _both_kernel[_grid(rows, columns, _BOTH)](*given, *outs, *size, **_BOTH)
    return by_row, row_scale, by_column, column_scale


def transpose(values_NI: Tensor) -> Tensor:
    """A transposed copy of fp8 values."""
    (rows, columns), stride = values_NI.shape, values_NI.stride(0)
    out = torch.empty((columns, rows), dtype=values_NI.dtype, device=values_NI.device)
    given = values_NI.view(torch.uint8), out.view(torch.uint8), rows, columns, stride
    _transpose_kernel[_grid(rows, columns, _TRANSPOSE)](*given, **_TRANSPOSE)
    return out


def _grid(rows: int, columns: int, tile: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(rows, tile["ROWS"]), triton.cdiv(columns, tile["COLUMNS"])


def _power_of_2(number: int) -> int:
    """The largest that is not larger."""
    return 1 << (number.bit_length() - 1)


def _with_rows(values: Tensor) -> Tensor:
    return values if values.stride(1) == 1 else values.contiguous()
