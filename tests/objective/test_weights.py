"""Whole stretches and graded weights against their definitions, in plain PyTorch."""

import math
from dataclasses import replace

import pytest
import torch
from faults_kit import LONG
from hypothesis import given, settings
from hypothesis import strategies as st
from objective.problems import NAN, Problem, obvious_k, problem, some_stretches
from torch import Tensor

from vocagnolm.objective import (
    ObjectiveConfig,
    ScoredBatch,
    Targets,
    objective_loss,
    select,
    weigh_step,
)
from vocagnolm.objective import head as head_module

nats = st.integers(-40, 40).map(lambda n: n / 8)  # exact in fp32, and they tie often


@st.composite
def stretched(draw: st.DrawFn) -> tuple[list, list, list, list]:
    """Losses, the teacher's of whole stretches, validity, and the stretches' numbers."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 10))
    nll, guidance, valid, number = [], [], [], []
    for _ in range(B):
        own = draw(st.lists(st.booleans(), min_size=T, max_size=T))
        numbers = [sum(own[1 : t + 1]) for t in range(T)]
        losses = {n: draw(st.one_of(nats, nats, st.just(NAN))) for n in set(numbers)}
        nll.append(draw(st.lists(nats, min_size=T, max_size=T)))
        guidance.append([losses[n] for n in numbers])
        valid.append(draw(st.lists(st.sampled_from([True] * 5 + [False]), min_size=T, max_size=T)))
        number.append(numbers)
    return nll, guidance, valid, number


def scored(nll: list, guidance: list, valid: list, number: list) -> ScoredBatch:
    targets = Targets(
        labels_BT=torch.where(torch.tensor(valid), 1, -100),
        guidance_BT=torch.tensor(guidance),
        stretch_BT=torch.tensor(number),
    )
    return ScoredBatch(targets, torch.tensor(nll))


def whole_stretches(nll, guidance, valid, number) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(row, stretch) -> its tokens, where the stretch can be compared as a whole."""
    tokens: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for b, row in enumerate(number):
        for t, n in enumerate(row):
            tokens.setdefault((b, n), []).append((b, t))
    return {
        key: places
        for key, places in tokens.items()
        if all(valid[b][t] and not math.isnan(guidance[b][t]) for b, t in places)
    }


def obvious_choice(nll, guidance, valid, number, config) -> list[list[bool]]:
    """Stretches by S - T, whole, until the share of tokens is reached."""
    stretches = whole_stretches(nll, guidance, valid, number)
    mapped = {place for places in stretches.values() for place in places}
    chosen = [
        [
            config.unmapped == "include" and valid[b][t] and (b, t) not in mapped
            for t in range(len(row))
        ]
        for b, row in enumerate(nll)
    ]
    rows = range(len(nll))
    for group in [[b] for b in rows] if config.scope == "sequence" else [list(rows)]:
        here = {key: places for key, places in stretches.items() if key[0] in group}

        def excess(key, here=here):
            (b, t), *_ = here[key]
            return sum(nll[b][t] for b, t in here[key]) - guidance[b][t]

        ranked = sorted(here, key=lambda key: (-excess(key), here[key][0]))
        left = obvious_k(sum(len(places) for places in here.values()), config.keep)
        for key in ranked:
            if left <= 0:
                break
            for b, t in here[key]:
                chosen[b][t] = True
            left -= len(here[key])
    return chosen


@settings(max_examples=300 if LONG else 50, deadline=None)
@given(
    stretched(),
    st.sampled_from([0.0, 0.25, 0.4, 0.7, 1.0]),
    st.sampled_from(["include", "exclude"]),
    st.sampled_from(["sequence", "batch"]),
)
def test_stretches_are_chosen_whole_by_their_excess(batch, keep, unmapped, scope):
    config = ObjectiveConfig(compare="stretch", keep=keep, unmapped=unmapped, scope=scope)
    expected = obvious_choice(*batch, config)
    assert select(scored(*batch), config).tolist() == expected
    if scope == "batch":
        whole = weigh_step([scored(*batch)], replace(config, scope="global"))
        assert whole.weights[0].bool().tolist() == expected


@settings(max_examples=40 if LONG else 20, deadline=None)
@given(stretched())
def test_a_step_is_the_same_step_however_it_is_split(batch):
    config = ObjectiveConfig(compare="stretch", scope="global")
    whole = weigh_step([scored(*batch)], config)
    parts = weigh_step(
        [scored(*([column[b]] for column in batch)) for b in range(len(batch[0]))], config
    )
    assert torch.equal(torch.cat(parts.weights), whole.weights[0])
    assert parts.denominator == whole.denominator


def test_a_stretch_of_one_token_is_the_token():
    given_ = problem()
    tokens = torch.arange(17).expand(3, 17)
    by_token, by_stretch = (
        objective_loss(
            given_.hidden,
            given_.head,
            Targets(labels_BT=given_.labels, guidance_BT=given_.guidance, stretch_BT=stretch),
            ObjectiveConfig(compare=compare),
        )
        for compare, stretch in (("token", None), ("stretch", tokens))
    )
    assert torch.equal(by_token.weights_BT, by_stretch.weights_BT)
    assert by_token.loss == by_stretch.loss


# ---- graded weights ----

GRADED = [
    {"weighting": "reducible"},
    {"weighting": "reducible", "floor": 0.0, "normalise": "selected"},
    {"weighting": "reducible", "compare": "stretch", "scope": "sequence"},
    {"weighting": "reducible", "compare": "stretch", "unmapped": "exclude", "scope": "global"},
    {"weighting": "reducible", "compare": "stretch", "normalise": "selected", "scope": "global"},
    {"method": "rho1", "weighting": "reducible", "floor": 0.5},
    {"method": "alm"},
    {"method": "alm", "cross_entropy": 0.0, "distill_weight": 1.0, "temperature": 10.0},
    {"method": "alm", "positive": True, "unmapped": "exclude"},
    {"method": "alm", "temperature": 1.0},
]


def plain_losses(given_: Problem) -> Tensor:
    logits = given_.head.scale * given_.hidden @ given_.head.weight.T
    return torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), given_.labels.clamp(min=0), reduction="none"
    )


def obvious_weights(nll: Tensor, targets: Targets, config: ObjectiveConfig) -> Tensor:
    """One stretch (or token) at a time."""
    guidance, valid = targets.guidance_BT, targets.valid_BT
    B, T = nll.shape
    number = targets.stretch_BT if config.by_stretch else torch.arange(T).expand(B, T)
    weights = torch.zeros_like(nll)
    for b in range(B):
        for n in number[b].unique():
            here = number[b] == n
            own, teacher = nll[b][here].sum(), guidance[b][here][0]
            if torch.isnan(teacher) or not valid[b][here].all():
                counts = valid[b][here] & (config.unmapped == "include")
                weights[b][here] = counts.to(weights.dtype)
            elif config.method == "alm":
                a, b_ = (torch.exp(-x / config.temperature) for x in (teacher.double(), own))
                pull = (a - b_) / (1 - b_)
                if config.positive:
                    pull = pull.clamp(min=0)
                weights[b][here] = config.cross_entropy + config.distill_weight * pull
            else:
                share = (1 - teacher / own).clamp(min=0)
                weights[b][here] = config.floor + (1 - config.floor) * share
    return weights


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("keys", GRADED, ids=lambda k: "-".join(map(str, k.values())))
def test_graded_weights_and_gradients_in_float64(keys, impl, monkeypatch):
    monkeypatch.setattr(head_module, "_chunk_bytes", lambda device, exact: 1)
    config = ObjectiveConfig(**keys)
    given_ = problem(dtype=torch.float64)
    targets = some_stretches(given_)
    if not config.by_stretch:
        targets = replace(targets, stretch_BT=None)
    ours, theirs = given_.fresh(), given_.fresh()
    output = objective_loss(ours.hidden, ours.head, targets, config, impl=impl)
    nll = plain_losses(theirs)
    weights = obvious_weights(nll.detach(), targets, config)
    torch.testing.assert_close(output.weights_BT.double(), weights, rtol=1e-6, atol=1e-6)
    total = weights.sum() if config.normalise == "selected" else targets.valid_BT.sum()
    loss = (weights * nll).sum() / total
    loss.backward()
    output.loss.backward()
    for mine, plain in zip(ours.gradients(), theirs.gradients(), strict=True):
        if plain is not None:
            torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-8)
    if config.method == "alm":  # the weights are the gradient; the value is the distance itself
        assert output.loss > 0 and output.distill_stats["distill_loss"] > 0
    else:
        torch.testing.assert_close(output.loss.double(), loss, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("tau", [1.0, 10.0, 100.0])
def test_alm_is_the_gradient_of_the_binarised_divergence(tau):
    """tau * KL(Bernoulli(p_T^(1/tau)) || Bernoulli(p_S^(1/tau))) of every stretch, by autograd."""
    given_ = problem(dtype=torch.float64)
    targets = some_stretches(given_)
    config = ObjectiveConfig(
        method="alm", cross_entropy=0.0, distill_weight=1.0, temperature=tau, unmapped="exclude"
    )
    ours, theirs = given_.fresh(), given_.fresh()
    output = objective_loss(ours.hidden, ours.head, targets, config)
    output.loss.backward()
    nll = plain_losses(theirs)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(nll.shape[0]):
        for n in targets.stretch_BT[b].unique():
            here = targets.stretch_BT[b] == n
            teacher = targets.guidance_BT[b][here][0].double()
            if torch.isnan(teacher) or not targets.valid_BT[b][here].all():
                continue
            p, q = torch.exp(-teacher / tau), torch.exp(-nll[b][here].sum() / tau)
            total = total + tau * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
    loss = total / targets.valid_BT.sum()
    loss.backward()
    torch.testing.assert_close(output.loss.double(), loss, rtol=1e-6, atol=1e-9)
    for mine, plain in zip(ours.gradients(), theirs.gradients(), strict=True):
        if plain is not None:
            torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("keys", GRADED[-4:], ids=str)
@pytest.mark.parametrize("own", [0.0, 1e-8, 1e-3, 1e4])
@pytest.mark.parametrize("teacher", [0.0, 1e-8, 50.0])
def test_alm_stays_finite_where_a_model_is_sure(keys, own, teacher):
    batch = scored([[own, 1.0]], [[teacher, 1.0]], [[True, True]], [[0, 1]])
    weights = weigh_step([batch], ObjectiveConfig(**keys)).weights[0]
    assert torch.isfinite(weights).all()


def test_a_student_that_has_nothing_to_learn_counts_the_floor():
    batch = scored([[2.0, 2.0, 4.0]], [[2.0, 9.0, 1.0]], [[True] * 3], [[0, 1, 2]])
    config = ObjectiveConfig(weighting="reducible", compare="stretch", floor=0.2)
    torch.testing.assert_close(
        weigh_step([batch], config).weights[0], torch.tensor([[0.2, 0.2, 0.8]])
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "random", "weighting": "reducible"}, "belongs to guided"),
        ({"method": "cpt", "compare": "stretch"}, "needs a method with guidance"),
        ({"method": "alm", "normalise": "selected"}, "both signs"),
        ({"weighting": "reducible", "floor": 1.5}, "floor"),
        ({"method": "alm", "temperature": 0.0}, "temperature"),
    ],
)
def test_settings_that_contradict_themselves(keys, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**keys)


def test_stretches_must_be_given():
    given_ = problem()
    for keys in (
        {"method": "alm"},
        {"weighting": "reducible", "compare": "stretch"},
        {"compare": "stretch"},
        {"compare": "stretch", "method": "chunk"},
    ):
        with pytest.raises(ValueError, match="stretch_BT"):
            objective_loss(given_.hidden, given_.head, given_.targets, ObjectiveConfig(**keys))
