"""The chunked head against the obvious computation in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vocagnolm.model import token_nll
from vocagnolm.objective import Head


def reference(hidden, weight, labels, bias=None, softcap=None, scale=1.0):
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def problem(tokens, rows, size, dtype, spread=1.0):
    generator = torch.Generator().manual_seed(tokens * rows + size)
    hidden = (torch.randn(tokens, size, generator=generator) * spread).to(dtype)
    weight = torch.randn(rows, size, generator=generator).to(dtype)
    labels = torch.randint(0, rows, (tokens,), generator=generator)
    labels[0], labels[-1] = 0, rows - 1
    return hidden, weight, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "rows", "size"), [(1, 2, 1), (7, 33, 5), (300, 5003, 24)])
@pytest.mark.parametrize("chunk", [None, 1, 64])
def test_equals_the_reference(dtype, tokens, rows, size, chunk):
    hidden, weight, labels = problem(tokens, rows, size, dtype)
    found = token_nll(hidden, Head(weight=weight), labels, chunk=chunk)
    assert found.dtype == torch.float32
    # The inputs are rounded, the arithmetic is not: one tolerance for all three dtypes.
    torch.testing.assert_close(
        found.double(), reference(hidden, weight, labels), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("scale", [1.0, 0.0625])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bias_softcap_and_scale(dtype, softcap, scale, with_bias):
    hidden, weight, labels = problem(50, 4100, 16, dtype, spread=5.0)
    bias = torch.linspace(-2, 2, 4100).to(dtype) if with_bias else None
    options = {"bias": bias, "softcap": softcap, "scale": scale}
    found = token_nll(hidden, Head(weight=weight, **options), labels)
    expected = reference(hidden, weight, labels, **options)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_the_thousands_do_not_overflow(dtype):
    hidden, weight, labels = problem(20, 3000, 8, dtype, spread=500.0)
    found = token_nll(hidden, Head(weight=weight), labels)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(
        found.double(), reference(hidden, weight, labels), atol=1e-2, rtol=1e-4
    )


def test_no_tokens():
    head = Head(weight=torch.zeros(9, 4))
    assert token_nll(torch.zeros(0, 4), head, torch.zeros(0, dtype=int)).shape == (0,)


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and "detach" not in str(func):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_whole_batch_never_exist(dtype):
    tokens, rows, size = 4096, 20_000, 4
    hidden, weight, labels = problem(tokens, rows, size, dtype)
    with LargestTensor() as largest:
        token_nll(hidden, Head(weight=weight), labels)
    assert largest.numel <= 32 * 2**20 // 4 < tokens * rows / 9
