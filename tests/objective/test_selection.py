"""Selection against its definition, its ties and its edges."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from faults_kit import LONG
from hypothesis import given, settings
from hypothesis import strategies as st
from objective.problems import NAN, obvious_k, obvious_selection

from vocagnolm.alignment.alignment import chunk_bounds
from vocagnolm.base.ranks import Ranks
from vocagnolm.objective import ObjectiveConfig, ScoredBatch, Targets, select, weigh_step
from vocagnolm.objective.selection import float_key, kept, kth_largest, random_key

# multiples of 1/8: exact in fp32, and they tie often
nats = st.integers(-40, 40).map(lambda n: n / 8)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list, list, list]:
    B, T = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    table = lambda cell: draw(  # noqa: E731
        st.lists(st.lists(cell, min_size=T, max_size=T), min_size=B, max_size=B)
    )
    return (
        table(nats),
        table(st.one_of(nats, st.just(NAN))),
        table(st.sampled_from([True] * 4 + [False])),
    )


def scored(nll: list, guidance: list | None, valid: list) -> ScoredBatch:
    targets = Targets(
        labels_BT=torch.where(torch.tensor(valid), 1, -100),
        guidance_BT=None if guidance is None else torch.tensor(guidance),
    )
    return ScoredBatch(targets, torch.tensor(nll))


@settings(max_examples=300 if LONG else 50, deadline=None)
@given(
    batches(),
    st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.5, 0.7, 1.0]),
    st.sampled_from(["include", "exclude"]),
    st.sampled_from(["sequence", "batch"]),
)
def test_matches_the_definition(batch, keep, unmapped, scope):
    config = ObjectiveConfig(keep=keep, unmapped=unmapped, scope=scope)
    expected = obvious_selection(*batch, config)
    assert select(scored(*batch), config).tolist() == expected
    if scope == "batch":
        whole = weigh_step([scored(*batch)], replace(config, scope="global"))
        assert whole.weights[0].bool().tolist() == expected


@settings(max_examples=60 if LONG else 25, deadline=None)
@given(batches(), st.sampled_from(["sequence", "batch"]))
def test_mean_lets_the_unmapped_compete(batch, scope):
    # one mapped value: every mean is exact in fp32, so that the definition's ties are ours
    nll, guidance, valid = batch
    guidance = [[NAN if math.isnan(g) else 1.5 for g in row] for row in guidance]
    config = ObjectiveConfig(unmapped="mean", scope=scope)
    assert select(scored(nll, guidance, valid), config).tolist() == obvious_selection(
        nll, guidance, valid, config
    )


@given(st.integers(0, 5000), st.floats(0, 1).map(lambda x: round(x, 3)))
def test_k_is_rounded_half_up_and_at_least_one(n, keep):
    assert int(kept(torch.tensor(n), keep)) == obvious_k(n, keep)


def test_k_of_known_cases():
    assert [int(kept(torch.tensor(n), 0.4)) for n in (0, 1, 2, 3, 4, 5)] == [0, 1, 1, 1, 2, 2]
    assert int(kept(torch.tensor(5), 0.3)) == 2  # 1.5 up
    assert int(kept(torch.tensor(10), 0.7)) == 7  # not 8 by a float error
    assert int(kept(torch.tensor(7), 0.0)) == 0


def test_ties_go_to_the_lower_position():
    batch = scored([[1.0] * 5, [1.0] * 5], [[0.0] * 5, [0.0] * 5], [[True] * 5, [True] * 5])
    assert select(batch, ObjectiveConfig()).tolist() == [[True] * 4 + [False], [False] * 5]
    by_sequence = select(batch, ObjectiveConfig(scope="sequence")).tolist()
    assert by_sequence == [[True, True, False, False, False]] * 2


def test_a_nan_loss_is_selected_and_an_infinite_guidance_is_not():
    batch = scored([[1.0, NAN, 9.0]], [[0.0, 0.0, math.inf]], [[True] * 3])
    config = ObjectiveConfig(keep=0.4)
    assert select(batch, config).tolist() == [[False, True, False]]
    # -inf still is a candidate: keep 1 takes it
    assert select(batch, ObjectiveConfig(keep=1.0)).all()


def test_nothing_mapped():
    batch = scored([[1.0, 2.0, 3.0]], [[NAN] * 3], [[True, True, False]])
    pick = lambda how: select(batch, ObjectiveConfig(unmapped=how)).tolist()  # noqa: E731
    assert pick("include") == [[True, True, False]]
    assert pick("exclude") == [[False, False, False]]
    assert pick("mean") == [[False, True, False]]  # the student's loss alone ranks


def test_the_mean_is_the_scope_s():
    # batch mean 2: the unmapped token's excess 1.5 loses to 2; row 0's own mean 0: 3.5 wins
    nll = [[3.5, 2.0], [4.0, 4.0]]
    guidance = [[NAN, 0.0], [2.0, 4.0]]
    batch = scored(nll, guidance, [[True] * 2] * 2)
    config = ObjectiveConfig(unmapped="mean", keep=0.25)
    assert select(batch, config).tolist() == [[False, True], [False, False]]
    rows = select(batch, replace(config, scope="sequence", keep=0.5)).tolist()
    assert rows == [[True, False], [True, False]]


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_random_takes_the_share_and_depends_on_the_step(scope):
    batch = scored([[0.0] * 500] * 4, None, [[True] * 500] * 4)
    config = ObjectiveConfig(method="random", scope=scope)
    first, again, other = (select(batch, config, step=s) for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert int(first.sum()) == 800
    if scope == "sequence":
        assert first.sum(1).tolist() == [200] * 4
        assert not torch.equal(first[0], first[1])
    reseeded = select(batch, replace(config, seed=1), step=0)
    assert 250 < int((reseeded & first).sum()) < 390  # independent: 320 expected


def test_random_keys_are_uniform():
    keys = random_key(torch.arange(64), 512, seed=3, step=5).flatten()
    assert keys.unique().numel() > 32700
    quarters = torch.histc(keys.float(), 4, -(2.0**31), 2.0**31)
    assert (quarters / keys.numel() - 0.25).abs().max() < 0.01


def test_chunk_takes_whole_chunks_by_mean_excess():
    nll = [[1.0, 1.0, 9.0, 0.0, 5.0, 5.0, 0.0, 0.0]]
    batch = scored(nll, [[0.0] * 8], [[True] * 8])
    config = ObjectiveConfig(method="chunk", n_chunks=4, keep=0.5)
    assert select(batch, config).tolist() == [[False, False, True, True, True, True, False, False]]
    # the mean is over mapped tokens, the unmapped follow their strategy
    batch = scored(nll, [[0.0, 0.0, NAN, 0.0, 0.0, 0.0, 0.0, 0.0]], [[True] * 7 + [False]])
    exclude = select(batch, replace(config, unmapped="exclude", keep=0.25))
    assert exclude.tolist() == [[False, False, False, False, True, True, False, False]]
    include = select(batch, replace(config, keep=0.25))
    assert include.tolist() == [[False, False, True, False, True, True, False, False]]


@pytest.mark.parametrize(("T", "n"), [(17, 4), (5, 8), (1, 1), (64, 64)])
def test_chunks_are_equal_up_to_one_token(T, n):
    batch = scored([[0.0] * T], None, [[True] * T])
    config = ObjectiveConfig(method="chunk", chunk_choice="random", n_chunks=n, keep=0.01)
    assert int(select(batch, config).sum()) in (T // n, -(-T // n), 1)
    assert select(batch, replace(config, keep=1.0)).all()


@pytest.mark.parametrize(("T", "n"), [(17, 4), (31, 16), (5, 8), (12, 5)])
def test_chunks_are_those_of_the_teachers_losses(T, n):
    """Every chunk that the alignment cuts is kept whole, and alone, where it exceeds most."""
    for first, last in pairwise(chunk_bounds(T, n).tolist()):
        nll = [[float(first <= t < last) for t in range(T)]]
        batch = scored(nll, [[0.0] * T], [[True] * T])
        config = ObjectiveConfig(method="chunk", n_chunks=n, keep=0.01)
        if first < last:
            assert select(batch, config).float().tolist() == nll


@pytest.mark.parametrize("scope", ["sequence", "batch", "global"])
def test_the_unmapped_compete_with_the_mean_of_the_teachers_own_tokens(scope):
    """Ten teacher tokens of 0.1 nats behind one student token of 1 nat: the mean over teacher
    tokens is 0.1, over guidance 1. As printed, the unmapped compete with the first."""
    nll, guidance = [[2.0, 1.9]], [[1.0, NAN]]
    batch = scored(nll, guidance, [[True, True]])
    sums = torch.tensor([[1.0, 10.0]], dtype=torch.float64)
    with_sums = replace(batch, targets=replace(batch.targets, teacher_sums_B2=sums))
    config = ObjectiveConfig(unmapped="mean", keep=0.5, scope=scope)
    chosen = [weigh_step([b], config).weights[0].bool().tolist() for b in (batch, with_sums)]
    assert chosen == [[[True, False]], [[False, True]]]


def test_entropy_removes_the_uncertain_before_the_excess_decides():
    batch = scored([[9.0, 8.0, 7.0, 1.0, 0.0]], [[0.0] * 5], [[True] * 5])
    certain = torch.tensor([[3.0, 0.1, 0.2, 2.0, 0.0]])
    blank, batch = batch, replace(batch, targets=replace(batch.targets, entropy_BT=certain))
    config = ObjectiveConfig(method="rho1", entropy_keep=0.6)
    assert select(batch, config).tolist() == [[False, True, True, False, False]]
    same = select(batch, replace(config, entropy_keep=1.0))
    assert torch.equal(same, select(batch, replace(config, entropy_keep=None)))
    with pytest.raises(ValueError, match="entropy_BT"):
        select(blank, config)


def test_no_teacher_ranks_by_the_student_s_loss():
    batch = scored([[1.0, 3.0, 2.0]], None, [[True] * 3])
    config = ObjectiveConfig(method="no_teacher", keep=0.3)
    assert select(batch, config).tolist() == [[False, True, False]]


@settings(max_examples=80 if LONG else 40, deadline=None)
@given(st.lists(st.integers(-(2**63) + 1, 2**63 - 1), min_size=1, max_size=40), st.data())
def test_radix_select_is_the_kth_largest(values, data):
    k = data.draw(st.integers(1, len(values)))
    assert kth_largest(torch.tensor(values), k, Ranks()) == sorted(values, reverse=True)[k - 1]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=8))
def test_float_keys_keep_the_order(values):
    keys = float_key(torch.tensor(values)).tolist()
    for a, key_a in zip(values, keys, strict=True):
        for b, key_b in zip(values, keys, strict=True):
            assert (a < b) == (key_a < key_b)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "guide"}, "method is .*, expected one of"),
        ({"keep": 1.5}, "keep is 1.5, expected a number of at least 0 and up to 1"),
        ({"scope": "world"}, "scope is .*, expected one of"),
        ({"method": "guided", "entropy_keep": 0.9}, "belongs to method rho1"),
        ({"method": "rho1", "entropy_keep": 0.1}, "between keep"),
        ({"n_chunks": 0}, "n_chunks"),
        ({"distill_weight": -1.0}, "distill_weight"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**fields)


def test_guided_without_guidance_is_refused():
    with pytest.raises(ValueError, match="needs guidance_BT"):
        select(scored([[0.0]], None, [[True]]), ObjectiveConfig())
