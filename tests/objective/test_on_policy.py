"""On-policy divergences: over alternatives and a bucket, and by the tokens that were drawn."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from objective.problems import Problem, listed, problem, some_stretches

from vocagnolm.objective import (
    Decided,
    Head,
    ObjectiveConfig,
    Targets,
    guided_loss,
    head,
    objective_loss,
)
from vocagnolm.objective.on_policy import SMALLEST_TEACHER
from vocagnolm.objective.selection import CLIP

HEADS = [{}, {"bias": True}, {"bias": True, "softcap": 4.0, "scale": 0.5}]


def naive_divergence(x: torch.Tensor, ids: list[int], r: list[float], name: str) -> torch.Tensor:
    """By the text, for one token, in float64: K + 1 outcomes on each side."""
    log_p = x - torch.logsumexp(x, -1)
    pairs = [(index, value) for index, value in zip(ids, r, strict=True) if value > 0]
    student = [log_p[index].exp() for index, _ in pairs]
    teacher = [value for _, value in pairs]
    others = [n for n in range(len(x)) if n not in {index for index, _ in pairs}]
    student.append(log_p[others].exp().sum() if others else torch.zeros((), dtype=x.dtype))
    teacher.append(max(1.0 - sum(teacher), 0.0))
    total = torch.zeros((), dtype=x.dtype)
    for p, q in zip(student, teacher, strict=True):
        if name == "forward" and q > 0:
            total = total + q * (math.log(q) - torch.log(p))
        if name == "reverse" and float(p.detach()) > 0:
            total = total + p * (torch.log(p) - math.log(max(q, SMALLEST_TEACHER)))
    return total


def naive_loss(given: Problem, targets: Targets, name: str) -> torch.Tensor:
    total = given.hidden.new_zeros((), dtype=torch.float64)
    for b, t in itertools.product(*map(range, targets.labels_BT.shape)):
        if targets.labels_BT[b, t] < 0:
            continue
        x = given.hidden[b, t].double() @ given.head.weight.double().T
        x = x if given.head.bias is None else x + given.head.bias.double()
        x = x * given.head.scale
        if given.head.softcap is not None:
            x = given.head.softcap * torch.tanh(x / given.head.softcap)
        r = targets.soft_p_BTK[b, t].double().tolist()
        total = total + naive_divergence(x, targets.soft_ids_BTK[b, t].tolist(), r, name)
    return total / int((targets.labels_BT >= 0).sum())


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("name", ["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_the_divergence_over_the_listed_tokens_and_a_bucket(
    name, options, impl, dtype, monkeypatch
):
    monkeypatch.setattr(head, "_chunk_bytes", lambda device, exact: 1)  # several chunks
    for seed in range(2):
        given = problem(seed=seed, dtype=dtype, **options)
        targets = listed(given, seed=seed)
        naive, ours = given.fresh(), given.fresh()
        expected = naive_loss(naive, targets, name)
        expected.backward()
        config = ObjectiveConfig(method="on_policy", divergence=name)
        output = objective_loss(ours.hidden, ours.head, targets, config, impl=impl)
        output.loss.backward()
        wide = dtype == torch.float64
        assert float(output.loss.detach()) == pytest.approx(
            float(expected.detach()), rel=1e-9 if wide else 1e-5
        )
        for a, b in zip(ours.gradients(), naive.gradients(), strict=True):
            if b is not None:
                atol = 1e-9 if wide else 2e-5
                torch.testing.assert_close(a, b, atol=atol, rtol=0, check_dtype=False)


@pytest.mark.parametrize("name", ["forward", "reverse"])
def test_with_every_token_listed_it_is_the_divergence_of_the_whole_distributions(name):
    given = problem(dtype=torch.float64, V=29)
    B, T, V = *given.labels.shape, 29
    q = torch.softmax(given.teacher.hidden @ given.teacher.head.weight.T, -1)
    targets = replace(
        given.targets, soft_ids_BTK=torch.arange(V).expand(B, T, V), soft_p_BTK=q.detach()
    )
    exact, ours = given.fresh(), given.fresh()
    log_p = torch.log_softmax(exact.head.logits(exact.hidden), -1)
    terms = q * (q.log() - log_p) if name == "forward" else log_p.exp() * (log_p - q.log())
    valid = targets.valid_BT
    expected = terms.sum(-1)[valid].mean()
    expected.backward()
    config = ObjectiveConfig(method="on_policy", divergence=name)
    output = objective_loss(ours.hidden, ours.head, targets, config)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
    for a, b in zip(ours.gradients()[:2], exact.gradients()[:2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)
    entropy = -(log_p.exp() * log_p).sum(-1)[valid].mean()
    assert float(output.distill_stats["entropy"]) == pytest.approx(float(entropy.detach()))


@pytest.mark.parametrize("name", ["forward", "reverse"])
def test_coarser_knowledge_gives_no_larger_divergence(name):
    """What is joined in a bucket is not compared: a lower bound of the whole divergence."""
    given = problem(dtype=torch.float64, V=29)
    V = 29
    q = torch.softmax(given.teacher.hidden @ given.teacher.head.weight.T, -1)
    config, losses = ObjectiveConfig(method="on_policy", divergence=name), []
    for count in (1, 4, 16, V):
        p, ids = q.topk(count, dim=-1)
        targets = replace(given.targets, soft_ids_BTK=ids, soft_p_BTK=p)
        losses.append(float(objective_loss(given.hidden, given.head, targets, config).loss))
    assert losses == sorted(losses) and losses[0] >= 0 and losses[0] < losses[-1]


def test_a_token_of_which_nothing_is_known_teaches_nothing():
    given = problem().fresh()
    B, T = given.labels.shape
    ids, p = torch.zeros(B, T, 3, dtype=torch.int64), torch.zeros(B, T, 3)
    for name in ("forward", "reverse"):
        config = ObjectiveConfig(method="on_policy", divergence=name)
        targets = replace(given.targets, soft_ids_BTK=ids, soft_p_BTK=p)
        output = objective_loss(given.hidden, given.head, targets, config)
        output.loss.backward()
        assert float(output.loss.detach()) == pytest.approx(0.0, abs=1e-6)
        assert given.hidden.grad.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["forward", "reverse"])
def test_a_student_that_is_sure_of_the_listed_tokens_has_a_finite_gradient(name):
    """Its bucket is empty in fp32, where the teacher's is not."""
    weight = torch.zeros(50, 4)
    weight[0, 0] = 60.0
    hidden = torch.tensor([[[1.0, 0, 0, 0]]]).requires_grad_()
    targets = Targets(
        labels_BT=torch.zeros(1, 1, dtype=torch.int64),
        soft_ids_BTK=torch.tensor([[[0, 1]]]),
        soft_p_BTK=torch.tensor([[[0.5, 0.1]]]),
    )
    config = ObjectiveConfig(method="on_policy", divergence=name)
    output = objective_loss(hidden, Head(weight=weight.requires_grad_()), targets, config)
    output.loss.backward()
    assert math.isfinite(float(output.loss.detach())) and torch.isfinite(hidden.grad).all()
    # nothing pushes the sure token further up
    assert weight.grad[0, 0] > -1e-6


def test_accumulated_micro_batches_are_one_step():
    given = problem(B=4)
    targets = listed(given)
    config = ObjectiveConfig(method="on_policy")
    whole = given.fresh()
    one = objective_loss(whole.hidden, whole.head, targets, config)
    one.loss.backward()
    parts = given.fresh()
    count = targets.valid_BT.sum()
    loss, entropy = 0.0, 0.0
    for rows in torch.arange(4).split([1, 3]):
        some = Targets(
            labels_BT=targets.labels_BT[rows],
            soft_ids_BTK=targets.soft_ids_BTK[rows],
            soft_p_BTK=targets.soft_p_BTK[rows],
        )
        decided = Decided(denominator=count, micro_batches=2)
        part = objective_loss(parts.hidden[rows], parts.head, some, config, decided=decided)
        part.loss.backward()
        loss += float(part.loss.detach())
        entropy += float(part.distill_stats["entropy"]) / 2  # as a step's mean is taken
    assert loss == pytest.approx(float(one.loss.detach()), rel=1e-6)
    assert entropy == pytest.approx(float(one.distill_stats["entropy"]), rel=1e-5)
    torch.testing.assert_close(parts.hidden.grad, whole.hidden.grad)


# ---- by the tokens that were drawn ----


SAMPLED = ObjectiveConfig(method="on_policy", divergence="sampled_token")


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_every_token_of_a_stretch_has_the_advantage_of_the_whole(impl, monkeypatch):
    monkeypatch.setattr(head, "_chunk_bytes", lambda device, exact: 1)
    for seed in range(3):
        given = problem(seed=seed, dtype=torch.float64)
        targets = some_stretches(given, seed)
        naive, ours = given.fresh(), given.fresh()
        log_p = torch.log_softmax(naive.head.logits(naive.hidden), -1)
        own = -log_p.gather(2, targets.labels_BT.clamp(min=0)[..., None])[..., 0]
        total, value = own.new_zeros(()), 0.0
        for b in range(len(own)):
            for number in targets.stretch_BT[b].unique().tolist():
                here = targets.stretch_BT[b] == number
                known = here & targets.mapped_BT[b]
                if not known.any():
                    continue
                teacher = targets.guidance_BT[b][known][0]
                advantage = teacher - own[b][known].sum().detach()  # log p - log q
                total = total - (advantage * own[b][known]).sum()
                value += float(advantage)
        count = int(targets.valid_BT.sum())
        (total / count).backward()
        output = objective_loss(ours.hidden, ours.head, targets, SAMPLED, impl=impl)
        output.loss.backward()
        assert float(output.loss.detach()) == pytest.approx(value / count, rel=1e-5)
        for a, b in zip(ours.gradients()[:2], naive.gradients()[:2], strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


TOKENS = ["a", "b", "ab", "ba"]


def test_its_expectation_is_the_gradient_of_the_reverse_divergence():
    """A toy in which every answer can be summed: a student with four tokens writes one or two of
    them from a fixed history, and its teacher reads the letters. Weighted by the probability with
    which each is drawn, the gradients add up to that of sum p (log p - log q)."""
    g = torch.Generator().manual_seed(0)
    first = torch.randn(4, generator=g, dtype=torch.float64)
    later = torch.randn(4, 4, generator=g, dtype=torch.float64)
    letters = {"a": -0.9, "b": -1.7}

    def rows(logits: torch.Tensor, more: torch.Tensor, one: int, two: int | None):
        path = [torch.log_softmax(logits, -1)[one]]
        if two is not None:
            path.append(torch.log_softmax(more[one], -1)[two])
        return path

    # an answer is whole after "ab" or "ba" alone, else after two tokens
    answers = [(2, None), (3, None), *((one, two) for one in (0, 1) for two in range(4))]
    a, b = first.clone().requires_grad_(), later.clone().requires_grad_()
    exact = first.new_zeros(())
    for one, two in answers:
        log_p = sum(rows(a, b, one, two))
        text = TOKENS[one] + (TOKENS[two] if two is not None else "")
        exact = exact + log_p.exp() * (log_p - sum(letters[letter] for letter in text))
    exact.backward()
    expected, mass, value = [torch.zeros_like(first), torch.zeros_like(later)], 0.0, 0.0
    for one, two in answers:
        probability = float(sum(rows(first, later, one, two)).exp())
        text = TOKENS[one] + (TOKENS[two] if two is not None else "")
        labels = [one] if two is None else [one, two]
        x, y = first.clone().requires_grad_(), later.clone().requires_grad_()
        logits = torch.stack([x] if two is None else [x, y[one]])[None]
        size = len(labels)
        targets = Targets(
            labels_BT=torch.tensor([labels]),
            guidance_BT=torch.full((1, size), -sum(letters[letter] for letter in text)).double(),
            stretch_BT=torch.zeros(1, size, dtype=torch.int64),
        )
        decided = Decided(denominator=1.0)
        weight = torch.eye(4, dtype=torch.float64)
        output = objective_loss(logits, Head(weight=weight), targets, SAMPLED, decided=decided)
        output.loss.backward()
        expected[0] += probability * x.grad
        expected[1] += probability * (0 if y.grad is None else y.grad)
        mass += probability
        value += probability * float(output.loss.detach())
    assert mass == pytest.approx(1.0)
    assert value == pytest.approx(float(exact.detach()), rel=1e-6)
    torch.testing.assert_close(expected[0], a.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(expected[1], b.grad, atol=1e-6, rtol=1e-5)


def test_a_later_update_counts_by_the_clipped_ratio():
    given = problem(B=2, T=40, dtype=torch.float64)
    given = replace(given, hidden=0.3 * given.hidden)
    targets = some_stretches(given)
    targets = replace(targets, guidance_BT=3 * targets.guidance_BT)
    log_p = torch.log_softmax(given.head.logits(given.hidden), -1)
    now = -log_p.gather(2, targets.labels_BT.clamp(min=0)[..., None])[..., 0]
    shift = 0.4 * torch.randn(now.shape, generator=torch.Generator().manual_seed(5)).double()
    drawn = replace(targets, drawn_nll_BT=now + shift)
    ours = given.fresh()
    output = objective_loss(ours.hidden, ours.head, drawn, SAMPLED)
    seen = set()
    for b, number in itertools.product(range(2), range(int(targets.stretch_BT.max()) + 1)):
        known = (targets.stretch_BT[b] == number) & targets.mapped_BT[b]
        if not known.any():
            continue
        old, new = float((now + shift)[b][known].sum()), float(now[b][known].sum())
        weight = old - float(targets.guidance_BT[b][known][0])
        ratio = math.exp(old - new)
        stopped = ratio > 1 + CLIP if weight > 0 else ratio < 1 - CLIP
        seen.add((weight > 0, stopped))
        expected = 0.0 if stopped else weight * ratio
        for value in output.weights_BT[b][known].tolist():
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len(seen) == 4  # up and down, clipped and not
    same = replace(targets, drawn_nll_BT=now)  # drawn just now: as without it
    plain = objective_loss(ours.hidden, ours.head, targets, SAMPLED).weights_BT
    again = objective_loss(ours.hidden, ours.head, same, SAMPLED).weights_BT
    torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-5)


def test_what_is_missing_is_named():
    given = problem()
    with pytest.raises(ValueError, match="needs guidance_BT"):
        objective_loss(given.hidden, given.head, Targets(labels_BT=given.labels), SAMPLED)
    with pytest.raises(ValueError, match="needs soft_ids_BTK"):
        config = ObjectiveConfig(method="on_policy")
        objective_loss(given.hidden, given.head, given.targets, config)
    logits = given.head.logits(given.hidden).requires_grad_()
    with pytest.raises(Exception, match="target_ids, target_p"):
        guided_loss(logits, given.labels, {}, config)
    with pytest.raises(Exception, match="guidance, stretch"):
        guided_loss(logits, given.labels, {}, SAMPLED)
