"""Comparisons of two rows: paired over questions, seeds and both; unpaired over all seeds."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vocagnolm.study.evaluation import Grades

_RESAMPLES = 10_000
_AT_ONCE = 500


@dataclass(frozen=True)
class AllSeeds:
    """Every seed of both rows, as independent runs (Welch: unequal variances). Runs of one seed
    share their start and data order, which paired differences are free of; these are not: where
    the rows come from different sessions, so does a part of the difference."""

    n_a: int
    n_b: int
    difference: float
    """Of the means, a - b."""
    p: float | None
    """Two-sided, Welch's t test. None where a row has one seed: its spread is not known."""
    interval: tuple[float, float] | None
    """95 %, from the same distribution."""


@dataclass(frozen=True)
class Comparison:
    """Difference a - b of the average accuracy over tasks, in percentage points, on the seeds
    that both rows have. Without such seeds, only `all_seeds` says something."""

    difference: float | None
    seeds: list[int]
    seed_differences: list[float]
    p_questions: float | None
    """Two-sided sign-flip test over questions, seeds averaged: these runs, other questions."""
    p_seeds: float | None
    """Two-sided paired t test over seeds: these questions, other runs. None with one seed."""
    interval: tuple[float, float] | None
    """95 % bootstrap over questions and seeds together."""
    all_seeds: AllSeeds

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def average_accuracy(grades: Grades) -> float:
    """Mean over tasks of the share of right answers, in percent."""
    return 100 * float(np.mean([np.mean(list(marks.values())) for marks in grades.values()]))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation over seeds (None with one seed)."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return float(np.mean(values)), spread


def compare_rows(a: dict[int, Grades], b: dict[int, Grades], *, one_b: bool = False) -> Comparison:
    """Rows as seed -> grades. Questions are weighted so that every task counts the same. `one_b`:
    b is a single model, the start say, that every seed of a is compared with."""
    all_seeds = compare_means(*([average_accuracy(g) for g in row.values()] for row in (a, b)))
    if one_b:
        (only,) = b.values()
        b = dict.fromkeys(a, only)
    seeds = sorted(set(a) & set(b))
    if not seeds:
        return Comparison(None, [], [], None, None, None, all_seeds)
    tasks = sorted(a[seeds[0]])
    differences, weights, strata = [], [], []
    for number, task in enumerate(tasks):
        questions = sorted(a[seeds[0]][task])
        marks = np.array(
            [[float(a[s][task][q]) - float(b[s][task][q]) for q in questions] for s in seeds]
        )
        differences.append(marks)
        weights.append(np.full(len(questions), 100 / (len(tasks) * len(questions))))
        strata.append(np.full(len(questions), number))
    difference_SQ = np.concatenate(differences, axis=1)
    weight_Q, stratum_Q = np.concatenate(weights), np.concatenate(strata)
    by_seed = difference_SQ @ weight_Q
    return Comparison(
        difference=float(by_seed.mean()),
        seeds=seeds,
        seed_differences=[float(value) for value in by_seed],
        p_questions=sign_flip_p(difference_SQ.mean(0) * weight_Q),
        p_seeds=paired_t_p(by_seed) if len(seeds) > 1 else None,
        interval=bootstrap_interval(difference_SQ * weight_Q, stratum_Q),
        all_seeds=all_seeds,
    )


def compare_means(a: Sequence[float], b: Sequence[float]) -> AllSeeds:
    """Difference of two means of independent values: Welch's t test and its interval."""
    n_a, n_b = len(a), len(b)
    difference = float(np.mean(a)) - float(np.mean(b))
    if min(n_a, n_b) < 2:
        return AllSeeds(n_a, n_b, difference, None, None)
    square_a, square_b = float(np.var(a, ddof=1)) / n_a, float(np.var(b, ddof=1)) / n_b
    error = math.sqrt(square_a + square_b)
    if error == 0:
        certain = (difference, difference)
        return AllSeeds(n_a, n_b, difference, float(difference == 0), certain)
    # Welch and Satterthwaite: how many degrees of freedom the sum of two variances has
    degrees = error**4 / (square_a**2 / (n_a - 1) + square_b**2 / (n_b - 1))
    reach = t_quantile(0.025, degrees) * error
    return AllSeeds(
        n_a,
        n_b,
        difference,
        p=2 * t_tail(abs(difference) / error, degrees),
        interval=(difference - reach, difference + reach),
    )


def sign_flip_p(contributions_Q: np.ndarray, resamples: int = _RESAMPLES) -> float:
    """Two-sided p of the sum, against random signs of the paired differences."""
    observed = abs(contributions_Q.sum())
    moving = contributions_Q[contributions_Q != 0]
    generator = np.random.default_rng(0)
    larger, done = 0, 0
    while done < resamples:
        count = min(_AT_ONCE, resamples - done)
        signs = generator.integers(0, 2, (count, len(moving))) * 2 - 1
        larger += int((np.abs(signs @ moving) >= observed - 1e-12).sum())
        done += count
    return (larger + 1) / (resamples + 1)


def bootstrap_interval(
    contributions_SQ: np.ndarray, stratum_Q: np.ndarray, resamples: int = 2000
) -> tuple[float, float]:
    """Seeds and, within each task, questions are drawn again with replacement."""
    generator = np.random.default_rng(0)
    n_seeds = len(contributions_SQ)
    places = [np.flatnonzero(stratum_Q == stratum) for stratum in np.unique(stratum_Q)]
    means = np.empty(resamples)
    for at in range(resamples):
        drawn = contributions_SQ[generator.integers(0, n_seeds, n_seeds)].mean(0)
        means[at] = sum(drawn[generator.choice(place, len(place))].sum() for place in places)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def paired_t_p(differences: np.ndarray) -> float:
    """Two-sided p of Student's t for the mean of paired differences."""
    n = len(differences)
    spread = float(np.std(differences, ddof=1))
    mean = abs(float(np.mean(differences)))
    if spread == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * t_tail(mean / (spread / math.sqrt(n)), n - 1)


def t_tail(t: float, degrees: float) -> float:
    """P(T > t), t >= 0. With x = sqrt(degrees) tan(theta) the density is a power of cos(theta):
    a smooth integral over a finite range."""
    theta = np.linspace(math.atan(t / math.sqrt(degrees)), math.pi / 2, 20_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    density = np.cos(theta) ** (degrees - 1) * scale / math.sqrt(math.pi)
    return float(np.trapezoid(density, theta))


def t_quantile(tail: float, degrees: float) -> float:
    """The t >= 0 with P(T > t) = tail, tail < 0.5, by halving."""
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > tail:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return (low + high) / 2
