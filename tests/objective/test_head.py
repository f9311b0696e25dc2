"""The two-phase head against masked full logits."""

import math
from dataclasses import replace

import pytest
import torch
from objective.problems import NAN, Problem, problem
from torch.utils._python_dispatch import TorchDispatchMode

from vocagnolm.objective import (
    Decided,
    Head,
    ObjectiveConfig,
    ObjectiveOutput,
    Targets,
    objective_loss,
    student_nll,
    token_losses,
)
from vocagnolm.objective import head as head_module

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

# (loss, gradient) relative to the reference in the same dtype. The reference rounds its logits to
# the dtype, the head does not where it can help it.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (5e-3, 2e-2),
    torch.float16: (1e-3, 5e-3),
}
METHODS = ["cpt", "guided", "random", "chunk", "rho1", "no_teacher"]
TRANSFORMS = [{}, {"bias": True}, {"softcap": 5.0}, {"bias": True, "softcap": 4.0, "scale": 0.5}]


@pytest.fixture
def small_chunks(monkeypatch):
    """A budget of a few tokens, so that every loop runs more than once."""
    monkeypatch.setattr(head_module, "_chunk_bytes", lambda device, exact: 1)


def run(
    given: Problem, config: ObjectiveConfig, impl: str, **options
) -> tuple[ObjectiveOutput, Problem]:
    fresh = given.fresh()
    output = objective_loss(
        fresh.hidden,
        fresh.head,
        fresh.targets,
        config,
        impl=impl,
        teacher=fresh.teacher,
        **options,
    )
    return output, fresh


def assert_same(given: Problem, config: ObjectiveConfig, impl: str = "chunked") -> None:
    loss_tolerance, gradient_tolerance = TOLERANCE[given.hidden.dtype]
    slow, slow_leaves = run(given, config, "reference")
    fast, fast_leaves = run(given, config, impl)
    if not torch.equal(slow.selected_BT, fast.selected_BT):  # rounding moved a near tie
        assert given.hidden.dtype.itemsize == 2
        slow, slow_leaves = run(
            given, config, "reference", decided=Decided(weights_BT=fast.selected_BT)
        )
    torch.testing.assert_close(
        fast.loss, slow.loss, rtol=loss_tolerance, atol=loss_tolerance, check_dtype=False
    )
    torch.testing.assert_close(
        fast.nll_BT, slow.nll_BT, rtol=0, atol=10 * loss_tolerance, check_dtype=False
    )
    # an upstream factor, as gradient accumulation and loss scaling apply
    (slow.loss * 3).backward()
    (fast.loss * 3).backward()
    for mine, theirs in zip(fast_leaves.gradients(), slow_leaves.gradients(), strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert mine is not None and mine.dtype == theirs.dtype
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-9)
        assert error < gradient_tolerance


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("method", METHODS)
def test_equals_masked_full_logits(dtype, method, small_chunks):
    assert_same(problem(dtype=dtype), ObjectiveConfig(method=method))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("method", ["cpt", "guided"])
def test_heads_with_bias_softcap_and_scale(transform, method, small_chunks):
    assert_same(problem(**transform), ObjectiveConfig(method=method))
    assert_same(problem(**transform, dtype=torch.float64), ObjectiveConfig(method=method))


@pytest.mark.parametrize(
    ("B", "T", "D", "V"), [(1, 1, 1, 4), (1, 2, 3, 5), (2, 33, 7, 129), (5, 31, 24, 1000)]
)
@pytest.mark.parametrize("config", [ObjectiveConfig(), ObjectiveConfig(normalise="selected")])
def test_odd_shapes(B, T, D, V, config):
    assert_same(problem(B, T, D, V), config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_student_nll_is_accurate_to_fp32(dtype):
    p = problem(4, 50, 64, 500, dtype=dtype)
    exact = torch.nn.functional.cross_entropy(
        (p.hidden.double() @ p.head.weight.double().t()).flatten(0, 1),
        p.labels.flatten(),
        reduction="none",
    )
    nll = student_nll(p.hidden, p.head, p.labels, impl="chunked").flatten()
    assert nll.dtype == torch.float32
    assert (nll - exact).abs().max() < 5e-5
    assert (nll[p.labels.flatten() == -100] == 0).all()


def test_entropy():
    p = problem(dtype=torch.float64, softcap=6.0)
    for impl in ("reference", "chunked"):
        _, entropy = token_losses(p.hidden, p.head, p.labels, impl=impl, with_entropy=True)
        logits = 6 * torch.tanh(p.hidden @ p.head.weight.t() / 6)
        expected = torch.distributions.Categorical(logits=logits).entropy()
        valid = p.labels != -100
        torch.testing.assert_close(entropy[valid], expected[valid])


def test_frozen_head_and_frozen_hidden_states():
    p = problem(bias=True)
    for hidden_grad, weight_grad in ((True, False), (False, True), (False, False)):
        both = p.fresh()
        both.hidden.requires_grad_(hidden_grad)
        both.head.weight.requires_grad_(weight_grad)
        both.head.bias.requires_grad_(False)
        loss = objective_loss(both.hidden, both.head, both.targets, impl="chunked").loss
        assert loss.requires_grad == (hidden_grad or weight_grad)
        if loss.requires_grad:
            loss.backward()
        assert (both.hidden.grad is not None) == hidden_grad
        assert (both.head.weight.grad is not None) == weight_grad


def test_no_gradient_is_made_without_grad_mode():
    p = problem().fresh()
    with torch.no_grad():
        for config in (ObjectiveConfig(), ObjectiveConfig(method="cpt")):
            loss = objective_loss(p.hidden, p.head, p.targets, config).loss
            assert not loss.requires_grad
            again = objective_loss(p.hidden, p.head, p.targets, config, impl="reference").loss
            torch.testing.assert_close(loss, again)


def test_tied_head():
    p = problem()
    grads = []
    for impl in ("reference", "chunked"):
        embedding = p.head.weight.clone().requires_grad_()
        hidden = torch.tanh(embedding[p.labels.clamp(min=0)])
        loss = objective_loss(hidden, Head(weight=embedding), p.targets, impl=impl).loss
        grads.append(torch.autograd.grad(loss, embedding)[0])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_autocast_is_honoured():
    p = problem()
    low = torch.bfloat16
    rounded = Problem(
        p.hidden.to(low), Head(weight=p.head.weight.to(low)), p.labels, p.guidance, p.teacher
    )
    plain, plain_leaves = run(rounded, ObjectiveConfig(), "chunked")
    with torch.autocast("cpu", dtype=low):
        auto, auto_leaves = run(p, ObjectiveConfig(), "chunked")
    auto.loss.backward()
    plain.loss.backward()
    # without fp32 output of bf16 products (CPU) the head stays in fp32: the rounding's difference
    torch.testing.assert_close(auto.loss, plain.loss, rtol=2e-3, atol=0)
    assert auto_leaves.hidden.grad.dtype == auto_leaves.head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(
        auto_leaves.head.weight.grad, plain_leaves.head.weight.grad.float(), rtol=5e-2, atol=1e-3
    )


@pytest.fixture
def wide_products(monkeypatch):
    """A device that multiplies bf16 into fp32, as CUDA does: logits of phase 2, and the gradient
    that overwrites them, then are bf16."""

    def product(a, b, *, out):
        return out.copy_(a.float() @ b.float())

    def accumulate(a, b, *, out):
        return out.add_(a.float() @ b.float())

    monkeypatch.setattr(head_module, "fp32_output", lambda device, dtype: True)
    monkeypatch.setattr(head_module, "product", product)
    monkeypatch.setattr(head_module, "accumulate", accumulate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
@pytest.mark.parametrize("transform", [{}, {"bias": True, "softcap": 4.0, "scale": 0.5}])
@pytest.mark.parametrize("method", ["cpt", "guided", "kld", "uld"])
def test_low_precision_with_wide_products(
    dtype, chunk_bytes, transform, method, wide_products, monkeypatch
):
    monkeypatch.setattr(head_module, "_chunk_bytes", lambda device, exact: chunk_bytes)
    p = problem(3, 40, 16, 101, dtype=dtype, **transform)
    fast, leaves = run(p, ObjectiveConfig(method=method), "chunked")
    exact = problem(3, 40, 16, 101, dtype=dtype, **transform)
    exact = replace(
        exact,
        hidden=exact.hidden.double(),
        head=replace(
            exact.head,
            weight=exact.head.weight.double(),
            bias=None if exact.head.bias is None else exact.head.bias.double(),
        ),
        teacher=replace(
            exact.teacher,
            hidden=exact.teacher.hidden.double(),
            head=Head(weight=exact.teacher.head.weight.double()),
        ),
    )
    slow, slow_leaves = run(
        exact,
        ObjectiveConfig(method=method),
        "reference",
        decided=Decided(weights_BT=fast.selected_BT),
    )
    if method == "guided":  # phase 1 is fp32 whatever the dtype
        assert (fast.nll_BT - slow.nll_BT).abs().max() < 2e-5
    assert float((fast.loss - slow.loss).detach().abs()) < 5e-3
    fast.loss.backward()
    slow.loss.backward()
    for mine, theirs in zip(leaves.gradients(), slow_leaves.gradients(), strict=True):
        if theirs is not None:
            assert mine.dtype == dtype
            assert (mine.double() - theirs).norm() / theirs.norm() < 3e-2


def test_autocast_keeps_the_weight_gradient_in_fp32(wide_products):
    p = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, leaves = run(p, ObjectiveConfig(), "chunked")
    output.loss.backward()
    gradient = leaves.head.weight.grad
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float())  # never rounded to bf16


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("labels", ["unmapped", "ignored"])
def test_nothing_selected_is_zero_with_finite_gradients(impl, labels):
    p = problem(bias=True).fresh()
    target = torch.full_like(p.labels, -100) if labels == "ignored" else p.labels
    config = ObjectiveConfig(unmapped="exclude", normalise="selected")
    guidance = torch.full_like(p.guidance, NAN)
    output = objective_loss(
        p.hidden, p.head, Targets(labels_BT=target, guidance_BT=guidance), config, impl=impl
    )
    assert float(output.loss.detach()) == 0.0
    output.loss.backward()
    assert all(g is not None and (g == 0).all() for g in p.gradients())
    assert all(math.isfinite(value) for value in output.stats.values())


def test_backward_twice_is_refused():
    p = problem().fresh()
    loss = objective_loss(p.hidden, p.head, p.targets, impl="chunked").loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already called on this loss"):
        loss.backward()


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("method", ["cpt", "guided", "kld", "uld"])
def test_logits_of_all_tokens_are_never_held(method, small_chunks):
    p = problem(4, 40, 8, 400).fresh()
    with LargestTensor() as largest:
        objective_loss(
            p.hidden,
            p.head,
            p.targets,
            ObjectiveConfig(method=method),
            impl="chunked",
            teacher=p.teacher,
        ).loss.backward()
    assert largest.elements <= 16 * 400  # the smallest chunk; all tokens would be ten times that


def test_wrong_shapes_are_refused():
    p = problem()
    with pytest.raises(ValueError, match="hidden_BTD must be"):
        objective_loss(p.hidden[0], p.head, p.targets)
    with pytest.raises(ValueError, match="guidance_BT must be"):
        objective_loss(p.hidden, p.head, replace(p.targets, guidance_BT=p.guidance[:, :-1]))
    with pytest.raises(ValueError, match=r"Head\.bias"):
        Head(weight=p.head.weight, bias=torch.zeros(3))
    with pytest.raises(ValueError, match="impl must be"):
        objective_loss(p.hidden, p.head, p.targets, impl="fast")


def test_rows_of_unequal_length_are_padded():
    p = problem(B=2, T=7)
    labels = [p.labels[0].tolist(), p.labels[1, :4].numpy()]
    guidance = [p.guidance[0].tolist(), p.guidance[1, :4]]
    targets = Targets.from_rows(labels, guidance)
    assert targets.labels_BT[1, 4:].tolist() == [-100] * 3
    assert targets.guidance_BT[1, 4:].isnan().all()
    config = ObjectiveConfig(scope="sequence")
    whole = objective_loss(p.hidden, p.head, targets, config)
    rows = [
        objective_loss(
            p.hidden[row : row + 1, : len(labels[row])],
            p.head,
            Targets.from_rows([labels[row]], [guidance[row]]),
            config,
        )
        for row in (0, 1)
    ]
    total = sum(output.loss * output.denominator for output in rows)
    assert float(whole.loss * whole.denominator) == pytest.approx(float(total), rel=1e-5)
    assert Targets.from_rows(labels).guidance_BT is None


def test_rows_that_are_no_tensor_or_do_not_fit_are_told_what_to_do():
    with pytest.raises(ValueError, match=r"labels_BT must be .* got list.*from_rows"):
        Targets(labels_BT=[[1, 2], [3]])
    with pytest.raises(ValueError, match="row 1 has 1 labels and 2 of guidance"):
        Targets.from_rows([[1, 2], [3]], [[0.1, 0.2], [0.3, 0.4]])
    with pytest.raises(ValueError, match="2 rows of labels, 1 of guidance"):
        Targets.from_rows([[1, 2], [3]], [[0.1, 0.2]])
