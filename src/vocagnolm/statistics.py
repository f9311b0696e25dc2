"""Tests and intervals of evaluations: McNemar, sign flips, Wilson.

What has a distribution of its own is scipy's, which comes with the extras that compare runs (`eval`
and `study`).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.errors import optional

RESAMPLES = 10_000
_AT_ONCE = 500
Z_95 = 1.96


def scipy_stats() -> Any:
    return optional("scipy.stats", "study", "A significance test")


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation over seeds (None with one seed)."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return float(np.mean(values)), spread


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value: of the questions that one model alone got right, is the split
    between the two like that of a fair coin?"""
    if only_first + only_second == 0:
        return 1.0
    return float(scipy_stats().binomtest(only_first, only_first + only_second).pvalue)


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


def mean_error(values: Sequence[float]) -> float | None:
    """Standard error of a mean; None for a single value."""
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def wilson_lower(hits: NDArray[np.float64], n: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lower end of Wilson's 95 % interval of a share."""
    n = np.maximum(n, 1.0)
    share = hits / n
    centre = share + Z_95**2 / (2 * n)
    spread = Z_95 * np.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n))
    return (centre - spread) / (1 + Z_95**2 / n)
