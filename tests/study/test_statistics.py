"""Paired tests against what is known by other means."""

import math

import numpy as np
import pytest

from vocagnolm.study.selection import matched_guidance
from vocagnolm.study.statistics import (
    average_accuracy,
    compare_rows,
    paired_t_p,
    sign_flip_p,
    t_tail,
)


@pytest.mark.parametrize(
    ("t", "degrees", "tail"),
    [(2.776445, 4, 0.025), (4.302653, 2, 0.025), (12.7062, 1, 0.025), (2.085963, 20, 0.025)],
)
def test_t_tail_matches_the_printed_tables(t: float, degrees: int, tail: float) -> None:
    assert t_tail(t, degrees) == pytest.approx(tail, rel=1e-4)


def test_paired_t_of_equal_differences() -> None:
    assert paired_t_p(np.array([0.0, 0.0])) == 1.0
    assert paired_t_p(np.array([1.0, 1.0])) == 0.0


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
