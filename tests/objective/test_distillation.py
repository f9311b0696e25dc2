"""kld and uld: chunks against full logits and autograd, vocabularies of different size."""

from dataclasses import replace

import pytest
import torch
from objective.problems import Problem, problem

from vocagnolm.errors import VocagnolmError
from vocagnolm.objective import (
    Head,
    ObjectiveConfig,
    ObjectiveError,
    Teacher,
    objective_loss,
)
from vocagnolm.objective import head as head_module
from vocagnolm.objective.distill import by_sorting, kl_rows, wasserstein_rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(head_module, "_chunk_bytes", lambda device, exact: 1)


def run(p: Problem, config: ObjectiveConfig, impl: str):
    p = p.fresh()
    output = objective_loss(p.hidden, p.head, p.targets, config, impl=impl, teacher=p.teacher)
    (2 * output.loss).backward()
    return output, p


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("transform", [{}, {"bias": True, "softcap": 6.0, "scale": 0.7}])
@pytest.mark.parametrize(
    ("method", "teacher_rows"), [("kld", 101), ("uld", 101), ("uld", 60), ("uld", 150)]
)
def test_chunked_equals_reference(dtype, transform, method, teacher_rows):
    p = problem(dtype=dtype, teacher_rows=teacher_rows, **transform)
    position = torch.arange(17).flip(0).repeat(3, 1)  # any place, not just the same one
    position[torch.rand(3, 17, generator=torch.Generator().manual_seed(1)) < 0.3] = -1
    p = replace(p, teacher=replace(p.teacher, position_BT=position))
    config = ObjectiveConfig(method=method, distill_weight=0.7)
    (slow, slow_leaves), (fast, fast_leaves) = (run(p, config, i) for i in ("reference", "chunked"))
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {}
    torch.testing.assert_close(fast.loss, slow.loss, **tolerance)
    torch.testing.assert_close(fast.nll_BT, slow.nll_BT, **tolerance)
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    for mine, theirs in zip(fast_leaves.gradients(), slow_leaves.gradients(), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, **tolerance)
    for name, value in slow.stats.items():
        torch.testing.assert_close(fast.stats[name], value, check_dtype=False, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("transform", [{}, {"bias": True, "softcap": 6.0, "scale": 0.7}])
@pytest.mark.parametrize("extra", [0, 3])
def test_reverse_kl_equals_the_printed_equation(dtype, transform, extra):
    """Equation 5: cross entropy + KL(student || teacher), 1 : 1, in plain PyTorch."""
    p = problem(dtype=dtype, teacher_rows=101 + extra, **transform)
    faint = p.teacher.head.weight.clone()
    faint[101:] *= 0.0  # rows that only the teacher has
    bias = torch.zeros(101 + extra, dtype=dtype)
    bias[101:] = -30.0
    p = replace(p, teacher=replace(p.teacher, head=Head(weight=faint, bias=bias)))
    config = ObjectiveConfig(method="kld", kl_direction="reverse", distill_weight=1.0)
    plain = p.fresh()
    student = torch.log_softmax(plain.head.logits(plain.hidden), -1)
    teacher = torch.log_softmax(p.teacher.head.logits(p.teacher.hidden)[..., :101], -1)
    valid = p.labels != -100
    divergence = (student.exp() * (student - teacher)).sum(-1)[valid].sum()
    own = -student.gather(-1, p.labels.clamp(min=0)[..., None])[..., 0][valid].sum()
    expected = (own + divergence) / valid.sum()
    (2 * expected).backward()
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {}
    for impl in ("reference", "chunked"):
        output, leaves = run(p, config, impl)
        torch.testing.assert_close(output.loss, expected, **tolerance)
        tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
        for mine, theirs in zip(leaves.gradients(), plain.gradients(), strict=True):
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, **tolerance)
    forward, _ = run(p, replace(config, kl_direction="forward"), "chunked")
    assert abs(float((forward.loss - output.loss).detach())) > 1e-3


@pytest.mark.parametrize("method", ["kld", "uld"])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_teacher_of_which_only_the_logits_are_known(method, impl):
    p = problem(bias=True)
    logits = p.teacher.head.logits(p.teacher.hidden)
    config = ObjectiveConfig(method=method)
    usual, _ = run(p, config, impl)
    bare, _ = run(replace(p, teacher=Teacher(hidden=logits, head=None)), config, impl)
    torch.testing.assert_close(bare.loss, usual.loss)


def test_the_same_distribution_is_at_distance_zero():
    p = problem(dtype=torch.float64)
    p = replace(
        p, teacher=Teacher(hidden=p.hidden.clone(), head=Head(weight=p.head.weight.clone()))
    )
    cpt, _ = run(p, ObjectiveConfig(method="cpt"), "chunked")
    for method in ("kld", "uld"):
        output, _ = run(p, ObjectiveConfig(method=method), "chunked")
        torch.testing.assert_close(output.loss, cpt.loss)
        assert abs(float(output.stats["distill_loss"])) < 1e-12


def test_uld_does_not_see_the_order_of_the_vocabulary():
    p = problem(dtype=torch.float64, teacher_rows=140)
    shuffled = p.teacher.head.weight[torch.randperm(140)]
    q = replace(p, teacher=replace(p.teacher, head=Head(weight=shuffled)))
    config = ObjectiveConfig(method="uld")
    torch.testing.assert_close(run(p, config, "chunked")[0].loss, run(q, config, "chunked")[0].loss)


def test_uld_pads_with_zeros():
    certain = torch.tensor([[100.0, 0.0, 0.0]], dtype=torch.float64)
    uniform = torch.zeros(1, 4, dtype=torch.float64)
    distance, _ = wasserstein_rows(certain, uniform)  # |1 - 1/4| + 3 * 1/4
    assert float(distance) == pytest.approx(1.5)
    assert float(wasserstein_rows(uniform, certain)[0]) == pytest.approx(1.5)


def test_large_vocabularies_are_sorted():
    """By integers, as torch sorts them: equal probabilities and zeros too."""
    torch.manual_seed(0)
    z, teacher = 3 * torch.randn(6, 20_000), 3 * torch.randn(6, 30_000)
    z[:, 100:200], z[:, 200:300], teacher[0, 9:] = 1.0, -torch.inf, -torch.inf
    p, q = torch.softmax(z, -1), torch.softmax(teacher, -1)
    distance, by_p = by_sorting(p, q)
    exact, exact_by_p = by_sorting(p.double(), q.double())
    torch.testing.assert_close(distance.double(), exact, rtol=1e-5, atol=0)
    assert torch.equal(by_p.double(), exact_by_p)


@pytest.mark.parametrize("method", ["kld", "uld"])
def test_row_gradients(method):
    torch.manual_seed(0)
    z = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 12, dtype=torch.float64)
    rows = (
        (lambda x: kl_rows(x, teacher, 7))
        if method == "kld"
        else (lambda x: wasserstein_rows(x, teacher))
    )
    numeric = torch.autograd.functional.jacobian(
        lambda x: rows(x)[0].sum() if method == "uld" else kl_by_hand(x, teacher, 7), z
    )
    torch.testing.assert_close(rows(z.detach())[1], numeric)


def kl_by_hand(z, teacher, rows):
    q = torch.softmax(teacher[:, :rows], -1)
    return (q * (q.log() - torch.log_softmax(z, -1)[:, :rows])).sum()


def test_extra_teacher_rows_are_dropped_when_they_hold_nothing():
    p = problem(dtype=torch.float64)
    low = torch.cat([p.teacher.head.weight, torch.zeros(16, 16, dtype=torch.float64)])
    bias = torch.cat([torch.zeros(101), torch.full((16,), -40.0)]).double()
    q = replace(p, teacher=replace(p.teacher, head=Head(weight=low, bias=bias)))
    config = ObjectiveConfig(method="kld")
    plain, extra = (run(x, config, "chunked")[0] for x in (p, q))
    torch.testing.assert_close(extra.loss, plain.loss)
    assert 0 <= float(extra.stats["teacher_dropped_mass"]) < 1e-12


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_extra_teacher_rows_with_real_mass_are_refused(impl):
    with pytest.raises(ObjectiveError, match="of its probability on tokens the student"):
        run(problem(teacher_rows=140), ObjectiveConfig(method="kld"), impl)
    with pytest.raises(VocagnolmError, match="kld needs one vocabulary"):
        run(problem(teacher_rows=60), ObjectiveConfig(method="kld"), impl)


def test_a_teacher_is_needed_and_must_fit():
    p = problem()
    config = ObjectiveConfig(method="uld")
    with pytest.raises(ValueError, match="online teacher"):
        objective_loss(p.hidden, p.head, p.targets, config)
    shorter = replace(p.teacher, hidden=p.teacher.hidden[:, :-1])
    with pytest.raises(ValueError, match="position_BT"):
        objective_loss(p.hidden, p.head, p.targets, config, teacher=shorter)


def test_nothing_aligned_is_cpt():
    p = problem()
    nowhere = replace(p.teacher, position_BT=torch.full((3, 17), -1))
    for method in ("kld", "uld"):
        output, _ = run(replace(p, teacher=nowhere), ObjectiveConfig(method=method), "chunked")
        cpt, _ = run(p, ObjectiveConfig(method="cpt"), "chunked")
        torch.testing.assert_close(output.loss, cpt.loss)
        assert float(output.stats["aligned_share"]) == 0
