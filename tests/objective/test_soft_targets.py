"""Distillation from alternatives: the loss, its gradients, and what it composes with."""

import dataclasses
import math

import pytest
import torch
from objective.problems import Problem, problem, soft_targets, some_stretches

from vocagnolm.objective import (
    Decided,
    ObjectiveConfig,
    ScoredBatch,
    Targets,
    objective_loss,
    student_nll,
    weigh_step,
)
from vocagnolm.objective import head as head_module
from vocagnolm.objective.distill import kl_rows

DISTILL = ObjectiveConfig(method="distill", mix=0.7)


def naive_loss(given: Problem, targets: Targets, mix, weights=None):
    """By the text: cross entropy against the mixed target, token by token, with plain autograd."""
    total = given.hidden.new_zeros((), dtype=torch.float64)
    B, T = targets.labels_BT.shape
    for b in range(B):
        for t in range(T):
            label = int(targets.labels_BT[b, t])
            if label < 0:
                continue
            x = given.hidden[b, t].double() @ given.head.weight.double().T
            if given.head.bias is not None:
                x = x + given.head.bias.double()
            x = x * given.head.scale
            if given.head.softcap is not None:
                x = given.head.softcap * torch.tanh(x / given.head.softcap)
            log_p = x - torch.logsumexp(x, -1)
            m = mix(b, t) if callable(mix) else mix
            target = torch.zeros_like(log_p)
            target[label] += 1 - m
            soft = targets.soft_p_BTK[b, t].double()
            for k, index in enumerate(targets.soft_ids_BTK[b, t].tolist()):
                target[index] += m * soft[k]
            target[label] += m * (1 - soft.sum())
            assert float(target.detach().sum()) == pytest.approx(1.0)
            weight = 1.0 if weights is None else float(weights[b, t])
            total = total - weight * (target * log_p).sum()
    return total / int((targets.labels_BT >= 0).sum())


def assert_same(given, targets, config, mix, weights=None, atol=1e-6, **options):
    naive, ours = given.fresh(), given.fresh()
    expected = naive_loss(naive, targets, mix, weights)
    expected.backward()
    output = objective_loss(ours.hidden, ours.head, targets, config, **options)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=atol)
    for a, b in zip(ours.gradients(), naive.gradients(), strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, atol=atol, rtol=0, check_dtype=False)
    return output


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(
    "head", [{}, {"bias": True}, {"softcap": 5.0}, {"bias": True, "softcap": 4.0, "scale": 0.5}]
)
@pytest.mark.parametrize("mix", [0.25, 1.0])
def test_it_is_the_cross_entropy_against_the_mixed_target(impl, head, mix):
    for seed in range(3):
        given = problem(seed=seed, **head)
        config = dataclasses.replace(DISTILL, mix=mix)
        output = assert_same(given, soft_targets(given, seed=seed), config, mix, impl=impl)
        assert output.selected_BT.equal(output.targets.valid_BT)


@pytest.mark.parametrize("count", [1, 3, 64])
def test_any_number_of_alternatives(count):
    given = problem(V=70)
    targets = given.targets
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 70, (*given.labels.shape, count), generator=g)
    p = torch.rand(ids.shape, generator=g)
    p = 0.9 * p / p.sum(-1, keepdim=True)
    targets = dataclasses.replace(targets, soft_ids_BTK=ids, soft_p_BTK=p)
    assert_same(given, targets, DISTILL, 0.7, impl="chunked")


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_mix_of_nothing_is_plain_training_bit_for_bit(impl):
    given = problem(bias=True)
    targets = soft_targets(given)
    plain, ours = given.fresh(), given.fresh()
    expected = objective_loss(
        plain.hidden, plain.head, given.targets, ObjectiveConfig(method="cpt"), impl=impl
    )
    found = objective_loss(
        ours.hidden, ours.head, targets, dataclasses.replace(DISTILL, mix=0.0), impl=impl
    )
    expected.loss.backward()
    found.loss.backward()
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(a, b) for a, b in zip(ours.gradients(), plain.gradients(), strict=True))


def test_targets_without_probability_are_plain_training_bit_for_bit():
    given = problem()
    targets = soft_targets(given)
    targets = dataclasses.replace(targets, soft_p_BTK=torch.zeros_like(targets.soft_p_BTK))
    plain, ours = given.fresh(), given.fresh()
    config = ObjectiveConfig(method="cpt")
    expected = objective_loss(plain.hidden, plain.head, given.targets, config, impl="chunked")
    found = objective_loss(ours.hidden, ours.head, targets, DISTILL, impl="chunked")
    expected.loss.backward()
    found.loss.backward()
    assert torch.equal(found.loss, expected.loss)
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.gradients(), plain.gradients(), strict=True)
        if b is not None
    )


def test_with_the_whole_vocabulary_it_is_the_forward_divergence_and_the_teachers_entropy():
    given = problem(V=40, dtype=torch.float64)
    teacher_z = given.teacher.head.logits(given.teacher.hidden)
    q = teacher_z.softmax(-1)
    everything = torch.arange(40).expand(q.shape)
    targets = Targets(labels_BT=given.labels, soft_ids_BTK=everything, soft_p_BTK=q)
    ours = given.fresh()
    config = dataclasses.replace(DISTILL, mix=1.0)
    output = objective_loss(ours.hidden, ours.head, targets, config, impl="chunked")
    output.loss.backward()
    plain = given.fresh()
    valid = given.labels >= 0
    z = plain.head.logits(plain.hidden)[valid]
    kl, _, _ = kl_rows(z, teacher_z[valid], 40)
    entropy = torch.special.entr(q[valid]).sum(-1)
    expected = (kl + entropy).mean()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    torch.nn.functional.kl_div(z.log_softmax(-1), q[valid], reduction="batchmean").backward()
    for a, b in zip(ours.gradients(), plain.gradients(), strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_only_the_kept_tokens_are_distilled(impl):
    given = problem()
    targets = soft_targets(given)
    config = dataclasses.replace(DISTILL, keep=0.3)
    guided = objective_loss(
        given.hidden, given.head, given.targets, ObjectiveConfig(keep=0.3), impl=impl
    )
    output = assert_same(given, targets, config, 0.7, guided.weights_BT, impl=impl)
    assert torch.equal(output.weights_BT, guided.weights_BT)
    assert 0 < output.selected_BT.sum() < given.labels.numel() / 2


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("compare", ["token", "stretch"])
def test_graded_weights(impl, compare):
    given = problem(B=4, T=60)
    plain = some_stretches(given) if compare == "stretch" else given.targets
    config = dataclasses.replace(DISTILL, weighting="reducible", compare=compare)
    graded = dataclasses.replace(config, method="guided")
    weights = objective_loss(given.hidden, given.head, plain, graded, impl=impl).weights_BT
    assert len(weights.unique()) > 5
    assert_same(given, soft_targets(given, targets=plain), config, 0.7, weights, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_mix_by_what_is_left_to_learn(impl):
    given = problem()
    targets = soft_targets(given)
    nll = student_nll(given.hidden, given.head, given.labels)
    share = (1 - given.guidance / nll).clamp(min=0).nan_to_num(0.0)
    config = dataclasses.replace(DISTILL, mix_by="reducible")
    assert_same(given, targets, config, lambda b, t: 0.7 * float(share[b, t]), impl=impl)


def test_chunks_of_the_head_do_not_matter(monkeypatch):
    given = problem(B=4, T=90)
    stretches = soft_targets(given, targets=some_stretches(given))
    for config in (
        DISTILL,
        dataclasses.replace(DISTILL, keep=0.4),
        dataclasses.replace(DISTILL, weighting="reducible", compare="stretch", mix_by="reducible"),
    ):
        results = []
        for size in (64 << 20, 8 << 10):
            monkeypatch.setattr(head_module, "_chunk_bytes", lambda *_, size=size: size)
            ours = given.fresh()
            output = objective_loss(ours.hidden, ours.head, stretches, config, impl="chunked")
            output.loss.backward()
            results.append([output.loss.detach(), *ours.gradients()[:2]])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_without_gradients_the_value_is_the_same():
    given = problem()
    targets = soft_targets(given)
    ours = given.fresh()
    wanted = objective_loss(ours.hidden, ours.head, targets, DISTILL, impl="chunked").loss
    with torch.no_grad():
        found = objective_loss(given.hidden, given.head, targets, DISTILL, impl="chunked").loss
    assert not found.requires_grad
    assert float(found) == pytest.approx(float(wanted.detach()), rel=1e-6)


def test_one_step_of_eight_is_eight_of_one():
    given = problem(B=8)
    targets = soft_targets(given)
    config = dataclasses.replace(DISTILL, keep=0.4, scope="global")
    whole = given.fresh()
    objective_loss(whole.hidden, whole.head, targets, config).loss.backward()
    parts = given.fresh()
    rows = [
        Targets(
            labels_BT=targets.labels_BT[b : b + 1],
            guidance_BT=targets.guidance_BT[b : b + 1],
            soft_ids_BTK=targets.soft_ids_BTK[b : b + 1],
            soft_p_BTK=targets.soft_p_BTK[b : b + 1],
        )
        for b in range(8)
    ]
    nll = [student_nll(parts.hidden[b : b + 1], parts.head, rows[b].labels_BT) for b in range(8)]
    weighed = weigh_step([ScoredBatch(t, n) for t, n in zip(rows, nll, strict=True)], config)
    for b in range(8):
        decided = Decided(
            denominator=weighed.denominator, weights_BT=weighed.weights[b], nll_BT=nll[b]
        )
        objective_loss(
            parts.hidden[b : b + 1], parts.head, rows[b], config, decided=decided
        ).loss.backward()
    for a, b in zip(parts.gradients()[:2], whole.gradients()[:2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_the_log_tells_the_loss_and_what_the_teacher_takes():
    given = problem()
    targets = soft_targets(given)
    output = objective_loss(given.hidden, given.head, targets, DISTILL)
    assert output.stats["distill_loss"] == pytest.approx(float(output.loss), rel=1e-6)
    mass = targets.soft_p_BTK.sum(-1)[given.labels >= 0].mean()
    assert output.stats["target_mass"] == pytest.approx(float(mass), abs=1e-6)


def test_half_precision_targets_and_heads():
    given = problem(dtype=torch.bfloat16)
    targets = soft_targets(given)
    targets = dataclasses.replace(targets, soft_ids_BTK=targets.soft_ids_BTK.int())
    ours, exact = given.fresh(), problem(dtype=torch.bfloat16).fresh()
    output = objective_loss(ours.hidden, ours.head, targets, DISTILL)
    output.loss.backward()
    expected = naive_loss(exact, targets, 0.7)
    expected.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=2e-2)
    torch.testing.assert_close(
        ours.hidden.grad.float(), exact.hidden.grad.float(), atol=2e-2, rtol=5e-2
    )


def test_the_mix_changes_over_a_run():
    config = ObjectiveConfig(method="distill", mix=1.0, mix_end=0.0)
    assert [config.at(x).mix for x in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
    held = dataclasses.replace(config, mix_hold=2 / 3)
    assert [held.at(x).mix for x in (0.0, 2 / 3)] == [1.0, 1.0]
    assert held.at(5 / 6).mix == pytest.approx(0.5) and held.at(1.0).mix == 0.0
    same = ObjectiveConfig(method="distill")
    assert same.at(0.5) is same


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mix": 1.5}, "mix is 1.5, expected a number of at least 0 and up to 1"),
        ({"mix_end": -0.1}, "mix_end is -0.1, expected"),
        ({"mix_hold": 1.0}, "mix_hold"),
        ({"mix_by": "magic"}, "mix_by is .*, expected one of constant, reducible"),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(method="distill", **changes)


def test_targets_that_are_missing_or_of_another_shape():
    given = problem()
    with pytest.raises(ValueError, match="soft_ids_BTK"):
        objective_loss(given.hidden, given.head, given.targets, DISTILL)
    targets = soft_targets(given)
    targets = dataclasses.replace(targets, soft_p_BTK=targets.soft_p_BTK[:, 1:])
    with pytest.raises(ValueError, match="soft_p_BTK must be"):
        objective_loss(given.hidden, given.head, targets, DISTILL)


def test_a_loss_that_is_not_a_number_is_seen():
    given = problem()
    given.hidden[0, 3] = math.nan
    output = objective_loss(given.hidden, given.head, soft_targets(given), DISTILL)
    assert math.isnan(float(output.loss))
