"""The two kernels against their torch twins: on a GPU, or in Triton's interpreter
(TRITON_INTERPRET=1) where triton is installed."""

import os

import pytest
import torch
from objective.problems import listed, problem, soft_targets, some_stretches

from vocagnolm.objective import ObjectiveConfig, head, objective_loss
from vocagnolm.objective.head import TRITON_ROWS, SoftRows, SparseRows, Transform

pytest.importorskip("triton", exc_type=ImportError)
pytestmark = [] if os.environ.get("TRITON_INTERPRET") == "1" else [pytest.mark.gpu]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(5, 1), (3, 7), (2, 4096), (4, 5001)]
TRANSFORMS = [(False, None, 1.0), (True, 5.0, 0.5), (False, 30.0, 1.0), (True, None, 2.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("N", "V"), SHAPES)
@pytest.mark.parametrize(("bias", "softcap", "scale"), TRANSFORMS)
def test_kernels_equal_their_torch_twins(dtype, N, V, bias, softcap, scale):
    torch.manual_seed(0)
    x = 4 * torch.randn(N, V + 3, device=DEVICE).to(dtype)
    x = x[:, :V]  # rows that do not follow each other in memory
    labels = torch.randint(0, V, (N,), device=DEVICE)
    transform = Transform(torch.randn(V, device=DEVICE) if bias else None, softcap, scale)
    slow = head.losses(x.clone(), labels, transform, True)
    fast = TRITON_ROWS.losses(x, labels, transform, True)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    atol = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for soft in (None, _soft(N, V, 1), _soft(N, V, 5), _sparse(N, V, 1), _sparse(N, V, 5)):
        expected = head.gradient_(x.clone(), labels, slow.lse_N, transform, soft)
        own = x.clone()
        given = TRITON_ROWS.gradient_(own, labels, slow.lse_N, transform, soft)
        assert given.data_ptr() == own.data_ptr()
        torch.testing.assert_close(given, expected, rtol=0, atol=atol)


def _soft(N, V, count):
    ids = torch.randint(0, V, (N, count), device=DEVICE)
    ids[:, -1] = ids[:, 0]  # twice the same
    weights = torch.rand(N, count, device=DEVICE) / count
    return SoftRows(ids, weights)


def _sparse(N, V, count):
    ids, weights = _soft(N, V, count)
    return SparseRows(torch.randn(N, device=DEVICE).tanh() / 4, ids, weights / 4)


def test_a_nan_row_stays_nan():
    x = torch.randn(2, 10, device=DEVICE)
    x[0, 3] = torch.nan
    labels = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    nll = TRITON_ROWS.losses(x, labels, Transform(), False).nll_N
    assert torch.isnan(nll).tolist() == [True, False]


RULES = [
    {"method": "cpt"},
    {},
    {"compare": "stretch"},
    {"weighting": "reducible", "normalise": "selected"},
    {"weighting": "reducible", "compare": "stretch"},
    {"method": "alm"},
    {"method": "distill", "mix": 1.0},
    {"method": "distill", "keep": 0.4},
    {"method": "distill", "weighting": "reducible", "compare": "stretch", "mix_by": "reducible"},
    {"method": "on_policy", "divergence": "forward"},
    {"method": "on_policy", "divergence": "reverse"},
    {"method": "on_policy", "divergence": "sampled_token"},
]


@pytest.mark.parametrize("keys", RULES, ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": True, "softcap": 4.0, "scale": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_head_equals_chunked(keys, options, dtype, monkeypatch):
    monkeypatch.setattr(head, "_chunk_bytes", lambda device, exact: 1)
    results = []
    for impl in ("chunked", "fused"):
        p = problem(dtype=dtype, device=DEVICE, **options).fresh()
        config = ObjectiveConfig(**keys)
        targets = some_stretches(p) if config.by_stretch else p.targets
        if config.towards is not None and config.towards.bucket:
            targets = listed(p)
        elif config.rule.alternatives:
            targets = soft_targets(p, targets=targets)
        loss = objective_loss(p.hidden, p.head, targets, config, impl=impl).loss
        loss.backward()
        results.append([loss.detach(), *(g for g in p.gradients() if g is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-4)
