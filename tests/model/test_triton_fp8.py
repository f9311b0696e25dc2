"""The kernels that round to fp8, against their torch twins: on a GPU, or in Triton's interpreter
(TRITON_INTERPRET=1) where triton is installed."""

import os

import pytest
import torch
from torch.nn.functional import silu

from vocagnolm.model.fp8 import rounded_both, rounded_rows

triton_fp8 = pytest.importorskip("vocagnolm.model.triton_fp8", exc_type=ImportError)
pytestmark = [] if os.environ.get("TRITON_INTERPRET") == "1" else [pytest.mark.gpu]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same(ours, twin):
    """Scales to the last digits. Values to one step of e4m3 where they lie in the middle of two;
    the interpreter rounds some numbers under a power of two wrongly, to half of it."""
    (rounded, scale), (wanted, wanted_scale) = ours, twin
    assert rounded.dtype == torch.float8_e4m3fn and rounded.is_contiguous()
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
    rounded, wanted = rounded.float(), wanted.float()
    if not rounded.is_cuda:
        known = (wanted.abs().log2() % 1 == 0) & (2 * rounded == wanted)
        rounded = torch.where(known, wanted, rounded)
    torch.testing.assert_close(rounded, wanted, rtol=1 / 8, atol=2**-9)
    assert (rounded != wanted).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(5, 16), (9, 48), (33, 576), (3, 4096), (2, 18944)])
def test_rows(dtype, count, width):
    torch.manual_seed(0)
    x = (3 * torch.randn(count, width + 16, device=DEVICE)).to(dtype)[:, :width]
    gate = torch.randn(count, width, device=DEVICE).to(dtype)
    x[0] = 0
    same(triton_fp8.round_rows(x), rounded_rows(x))
    product = silu(gate.float()) * x.float()
    same(triton_fp8.round_gated(gate, x), rounded_rows(product))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (160, 48), (48, 272)])
def test_rows_and_columns_at_once(dtype, rows, columns):
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=DEVICE).to(dtype)
    factors = torch.rand(rows, 1, device=DEVICE), torch.rand(columns, 1, device=DEVICE)
    for values in (x, x.t().contiguous().t()):
        ours, wanted = triton_fp8.round_both(values, *factors), rounded_both(x, *factors)
        same(ours[:2], wanted[:2])
        same(ours[2:], wanted[2:])
    rounded = ours[0]
    assert torch.equal(triton_fp8.transpose(rounded).float(), rounded.float().t())


@pytest.mark.gpu  # the interpreter makes a number of it
def test_a_nan_stays_in_its_row():
    x = torch.randn(2, 32, device=DEVICE)
    x[0, 3] = torch.nan
    rounded, _ = triton_fp8.round_rows(x)
    assert torch.isnan(rounded.float()).any(1).tolist() == [True, False]
