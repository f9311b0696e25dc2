"""Tests of rows against what is known by other means."""

import math
import sys

import numpy as np
import pytest

from vocagnolm.base import statistics
from vocagnolm.base.statistics import (
    compare_means,
    mean_error,
    paired_interval,
    paired_t_p,
    sign_flip_p,
    wilson_lower,
)
from vocagnolm.errors import MissingExtraError
from vocagnolm_studies.controls import exchanged_targets, matched_guidance
from vocagnolm_studies.evaluation import average_accuracy
from vocagnolm_studies.table import (
    bit_gaps,
    compare_bits,
    compare_rows,
    mark_gaps,
)


@pytest.mark.parametrize(
    ("t", "n", "p"), [(2.776445, 5, 0.05), (4.302653, 3, 0.05), (12.7062, 2, 0.05)]
)
def test_paired_t_matches_the_printed_tables(t: float, n: int, p: float) -> None:
    values = np.linspace(-1, 1, n)
    shift = t * np.std(values, ddof=1) / math.sqrt(n)
    assert paired_t_p(values + shift) == pytest.approx(p, rel=1e-4)


def test_paired_interval_reaches_as_far_as_the_printed_t() -> None:
    low, high = paired_interval(np.array([1.0, 2.0, 3.0])) or (0, 0)
    reach = 4.302653 / math.sqrt(3)
    assert (low, high) == pytest.approx((2 - reach, 2 + reach), rel=1e-6)
    assert paired_interval(np.array([1.0])) is None
    assert paired_interval(np.array([1.0, 1.0])) == (1.0, 1.0)


def test_errors_and_intervals_of_shares() -> None:
    assert mean_error([3.0]) is None
    assert mean_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    # Wilson, 8 of 10: 0.490 to 0.943
    assert wilson_lower(np.array([8.0]), np.array([10.0]))[0] == pytest.approx(0.4902, abs=1e-4)


def test_without_scipy_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingExtraError, match=r"vocagnolm\[study\]"):
        statistics.mcnemar_exact(1, 4)
    assert sign_flip_p(np.zeros(3)) == 1.0


def test_paired_t_of_equal_differences() -> None:
    assert paired_t_p(np.array([0.0, 0.0])) == 1.0
    assert paired_t_p(np.array([1.0, 1.0])) == 0.0


def test_welch_of_equal_variances() -> None:
    """Variances 2 and 2 over n = 2 each: error sqrt(1 + 1), degrees (1 + 1)^2 / (1 + 1) = 2, where
    the two-sided p of t = 3 / sqrt(2) is 1 - t / sqrt(2 + t^2), and the 2.5 % point is 4.302653."""
    found = compare_means([4, 6], [1, 3])
    assert (found.n_a, found.n_b, found.difference) == (2, 2, 3)
    t = 3 / math.sqrt(2)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6)  # 0.16795
    reach = 4.302653 * math.sqrt(2)
    assert found.interval == pytest.approx((3 - reach, 3 + reach), rel=1e-6)


def test_welch_of_unequal_variances_has_a_fraction_of_degrees() -> None:
    """Variances 9 over n = 3 and 2 over n = 2: error sqrt(3 + 1) = 2, t = -8 / 2, degrees
    (3 + 1)^2 / (3^2 / 2 + 1^2 / 1) = 32 / 11; p = I(d / (d + t^2); d / 2, 1 / 2), the regularised
    incomplete beta function, and the point where it is 0.05, both to 20 digits elsewhere."""
    found = compare_means([0, 3, 6], [10, 12])
    assert found.difference == -8
    assert found.p == pytest.approx(0.02965213990, rel=1e-6)
    reach = 3.23945458650 * 2
    assert found.interval == pytest.approx((-8 - reach, -8 + reach), rel=1e-6)


def test_welch_without_spread() -> None:
    assert compare_means([1, 2], [5]).p is None and compare_means([1, 2], [5]).interval is None
    assert compare_means([1, 1], [1, 1]).p == 1.0
    assert compare_means([2, 2], [1, 1]).p == 0.0


def test_sign_flip_matches_the_binomial() -> None:
    """n equal differences: p is the chance of all heads or all tails."""
    assert sign_flip_p(np.ones(6), resamples=40_000) == pytest.approx(2 / 2**6, rel=0.1)
    assert sign_flip_p(np.array([1.0, -1.0, 1.0, -1.0])) == 1.0


def test_average_weighs_tasks_equally() -> None:
    assert average_accuracy({"a": {0: True}, "b": {0: False, 1: False, 2: False}}) == 50.0


def test_comparison_of_rows() -> None:
    rng = np.random.default_rng(0)
    base = {s: {"t": {q: bool(rng.random() < 0.2) for q in range(400)}} for s in (1, 2, 3)}
    better = {
        s: {"t": {q: right or bool(rng.random() < 0.1) for q, right in grades["t"].items()}}
        for s, grades in base.items()
    }
    found = compare_rows({**better, 9: base[1]}, base)
    assert found.seeds == [1, 2, 3]
    assert found.difference == pytest.approx(8, abs=2.5)
    assert found.p_questions < 0.001 and found.p_seeds is not None and found.p_seeds < 0.05
    assert found.interval[0] < found.difference < found.interval[1]
    same = compare_rows(base, base)
    assert same.difference == 0 and same.p_questions == 1.0 and math.isclose(same.p_seeds or 0, 1)


def test_difference_of_differences_is_paired_over_questions_and_seeds() -> None:
    def row(*right: int) -> dict[int, dict[str, dict[int, bool]]]:
        return {s: {"t": {q: q < n for q in range(100)}} for s, n in enumerate(right)}

    # gains of 5, 7, 6 points with few tokens, of 1, 2, 3 with many; a fourth seed on one side only
    few = mark_gaps(row(25, 30, 35), row(20, 23, 29))
    many = mark_gaps(row(41, 44, 47, 90), row(40, 42, 44))
    found = compare_rows(many, few)
    assert found.seeds == [0, 1, 2]
    assert found.seed_differences == pytest.approx([-4, -5, -3])
    assert found.interval[0] < -4 < found.interval[1]
    bits = compare_bits(bit_gaps({0: {"x": 0.9}}, {0: {"x": 1.0}}), {0: {"x": -0.3}, 1: {"x": 5.0}})
    assert bits["x"]["seed_differences"] == pytest.approx([0.2])


def test_rows_without_a_common_seed_are_compared_over_all() -> None:
    def grades(right: int) -> dict[str, dict[int, bool]]:
        return {"t": {q: q < right for q in range(100)}}

    a, b = {1: grades(10), 2: grades(13), 3: grades(16)}, {6: grades(20), 7: grades(22)}
    apart = compare_rows(a, b)
    assert apart.seeds == [] == apart.seed_differences
    assert apart.difference is apart.p_questions is apart.p_seeds is apart.interval is None
    assert apart.all_seeds.difference == pytest.approx(-8)
    assert apart.all_seeds.p == pytest.approx(0.0296521, rel=1e-5)  # as above, plus ten
    # one seed in common: paired on it, unpaired on all
    some = compare_rows({**a, 6: grades(19)}, b)
    assert some.seeds == [6] and some.difference == pytest.approx(-1)
    assert (some.all_seeds.n_a, some.all_seeds.n_b) == (4, 2)
    # one model against every seed is still one model
    start = compare_rows(a, {0: grades(10)}, single_b=True)
    assert start.seeds == [1, 2, 3] and start.difference == pytest.approx(3)
    assert (start.all_seeds.n_b, start.all_seeds.p) == (1, None)
    assert start.all_seeds.difference == pytest.approx(3)


def test_matched_guidance_keeps_the_shares_asked_for() -> None:
    n = 40_000
    sources = np.array(["a"] * (n // 2) + ["b"] * (n // 2), dtype=object)
    teacher = np.zeros(n, np.float16)
    teacher[::100] = np.nan
    made = matched_guidance(teacher, sources, {"a": 0.6, "b": 0.2}, [1])
    assert np.array_equal(np.isnan(made), np.isnan(teacher))
    student = np.random.default_rng(0).random(n) * 15
    excess = np.where(np.isnan(made), -np.inf, student - made.astype(np.float32))
    kept = np.zeros(n, bool)
    kept[np.argsort(-excess)[: int(0.4 * n)]] = True
    assert kept[: n // 2].mean() == pytest.approx(0.6, abs=0.02)
    assert kept[n // 2 :].mean() == pytest.approx(0.2, abs=0.02)


def test_exchanged_targets_are_those_of_another_place_or_of_nobody() -> None:
    chance = np.random.default_rng(3)
    ids = chance.integers(0, 5, 200)
    ids[7] = 99  # the only one of its kind keeps what it has
    places = np.arange(200, dtype=np.int32)[:, None]
    p = chance.random((200, 1)).astype(np.float16)
    givers, given = exchanged_targets(ids, places, p, "shuffled", 100, [1])
    assert np.array_equal(np.sort(givers[:, 0]), np.arange(200))
    assert np.array_equal(ids[givers[:, 0]], ids)
    assert np.flatnonzero(givers[:, 0] == places[:, 0]).tolist() == [7]
    assert np.array_equal(given, p[givers[:, 0]])
    drawn, same = exchanged_targets(ids, np.repeat(places, 4, 1), p, "uniform", 100, [1])
    assert drawn.dtype == np.int32 and same is p
    assert drawn.min() >= 0 and drawn.max() < 100 and len(np.unique(drawn)) > 90
