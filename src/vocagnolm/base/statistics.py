"""Bits per byte; tests and intervals of all tables: t, Welch, McNemar, sign flips, bootstrap.

What has a distribution of its own is scipy's, which comes with the extras that compare runs (`eval`
and `study`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.errors import optional

RESAMPLES = 10_000
_AT_ONCE = 500
Z_95 = 1.96


def _scipy_stats() -> Any:
    return optional("scipy.stats", "study", "A significance test")


def bits(nats: float) -> float:
    return nats / math.log(2)


def bits_per_byte(nats: Any, scored_bytes: Any) -> NDArray[np.float64]:
    """Bits per byte of texts that cost a model so many nats, as an array of the arguments' shape;
    NaN where no byte was scored."""
    in_bits = np.asarray(nats, np.float64) / math.log(2)
    covered = np.asarray(scored_bytes, np.float64)
    ratio: NDArray[np.float64] = np.full(in_bits.shape, np.nan)
    np.divide(in_bits, covered, out=ratio, where=covered > 0)
    return ratio


@dataclass(frozen=True)
class AllSeeds:
    """A comparison of all seeds of two rows as independent runs (Welch: unequal variances), not
    paired by their start and data order."""

    n_a: int
    n_b: int
    difference: float
    """Difference of the means, a - b."""
    p: float | None
    """Two-sided, Welch's t test. None where a row has one seed: its spread is not known."""
    interval: tuple[float, float] | None
    """95 %, from the same distribution."""


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation over seeds (None with one seed)."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return float(np.mean(values)), spread


def compare_means(a: Sequence[float], b: Sequence[float]) -> AllSeeds:
    """Difference of two means of independent values: Welch's t test and its interval."""
    n_a, n_b = len(a), len(b)
    difference = float(np.mean(a)) - float(np.mean(b))
    if min(n_a, n_b) < 2:
        return AllSeeds(n_a, n_b, difference, None, None)
    if np.var(a) == 0 == np.var(b):
        certain = (difference, difference)
        return AllSeeds(n_a, n_b, difference, float(difference == 0), certain)
    test = _scipy_stats().ttest_ind(a, b, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return AllSeeds(n_a, n_b, difference, float(test.pvalue), (float(low), float(high)))


def paired_t_p(differences: NDArray[np.float64]) -> float:
    """Two-sided p of Student's t for the mean of paired differences."""
    if np.std(differences) == 0:
        return 1.0 if np.mean(differences) == 0 else 0.0
    return float(_scipy_stats().ttest_1samp(differences, 0.0).pvalue)


def paired_interval(differences: NDArray[np.float64]) -> tuple[float, float] | None:
    """95 % interval of Student's t for the mean of paired differences; None for a single
    difference."""
    if len(differences) < 2:
        return None
    if np.std(differences) == 0:
        return float(differences[0]), float(differences[0])
    interval = _scipy_stats().ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return float(interval.low), float(interval.high)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value: of the questions that one model alone got right, is the split
    between the two like that of a fair coin?"""
    if only_first + only_second == 0:
        return 1.0
    return float(_scipy_stats().binomtest(only_first, only_first + only_second).pvalue)


def sign_flip_p(contributions_Q: NDArray[np.float64], resamples: int = RESAMPLES) -> float:
    """Two-sided p of the sum, against random signs of the paired differences. The draws are fixed,
    so that a table is the same every time."""
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
    contributions_SQ: NDArray[np.float64], stratum_Q: NDArray[np.int64], resamples: int = 2000
) -> tuple[float, float]:
    """95 % interval of a mean over seeds and tasks. Seeds and, within each task, questions are
    drawn again with replacement (two levels, which `scipy.stats.bootstrap` does not draw)."""
    generator = np.random.default_rng(0)
    n_seeds = len(contributions_SQ)
    members = [np.flatnonzero(stratum_Q == stratum) for stratum in np.unique(stratum_Q)]
    means = np.empty(resamples)
    for at in range(resamples):
        drawn = contributions_SQ[generator.integers(0, n_seeds, n_seeds)].mean(0)
        means[at] = sum(
            drawn[generator.choice(questions, len(questions))].sum() for questions in members
        )
    return middle_95(means)


def middle_95(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def resampled_ratios(
    above_MD: NDArray[np.float64], below_MD: NDArray[np.float64], resamples: int = 2000
) -> NDArray[np.float64]:
    """[R, M]: the sum of `above` over the sum of `below` for M models over D documents that are
    drawn again with replacement, the same ones for all models: the difference of two columns is
    paired. The draws are fixed, so that a table is the same every time."""
    generator = np.random.default_rng(0)
    ratios = np.empty((resamples, len(above_MD)))
    for at in range(resamples):
        drawn = generator.integers(0, above_MD.shape[1], above_MD.shape[1])
        ratios[at] = above_MD[:, drawn].sum(1) / below_MD[:, drawn].sum(1)
    return ratios


def mean_error(values: Sequence[float]) -> float | None:
    """Standard error of a mean; None for a single value."""
    _, spread = mean_and_spread(values)
    return None if spread is None else spread / math.sqrt(len(values))


def wilson_lower(hits: NDArray[np.float64], n: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lower end of Wilson's 95 % interval of a share."""
    n = np.maximum(n, 1.0)
    share = hits / n
    centre = share + Z_95**2 / (2 * n)
    spread = Z_95 * np.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n))
    return (centre - spread) / (1 + Z_95**2 / n)
