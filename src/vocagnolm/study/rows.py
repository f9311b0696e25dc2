"""Comparisons of two rows: paired over questions, seeds and both; unpaired over all seeds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vocagnolm.statistics import (
    AllSeeds,
    bootstrap_interval,
    compare_means,
    paired_interval,
    paired_t_p,
    sign_flip_p,
)

Marks = Mapping[str, Mapping[int, float]]
"""Task -> question -> mark: right or wrong, or the gap between two rows."""
Bits = Mapping[str, float]
"""Text -> bits per byte."""


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


def average_accuracy(grades: Marks) -> float:
    """Mean over tasks of the share of right answers, in percent."""
    return 100 * float(np.mean([np.mean(list(marks.values())) for marks in grades.values()]))


def mark_gaps(a: Mapping[int, Marks], b: Mapping[int, Marks]) -> dict[int, Marks]:
    """a - b question by question, on the seeds that both rows have. Two of these, compared, are a
    difference of differences."""
    return {
        seed: {
            task: {q: marks[q] - b[seed][task][q] for q in marks} for task, marks in a[seed].items()
        }
        for seed in sorted(a.keys() & b.keys())
    }


def bit_gaps(a: Mapping[int, Bits], b: Mapping[int, Bits]) -> dict[int, Bits]:
    """a - b text by text, likewise."""
    shared = sorted(a.keys() & b.keys())
    return {seed: {text: a[seed][text] - b[seed][text] for text in a[seed]} for seed in shared}


def compare_rows(
    a: Mapping[int, Marks], b: Mapping[int, Marks], *, one_b: bool = False
) -> Comparison:
    """Rows as seed -> marks. Questions are weighted so that every task counts the same. `one_b`:
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


def compare_bits(a: Mapping[int, Bits], b: Mapping[int, Bits]) -> dict[str, dict[str, Any]]:
    """Differences a - b in bits per byte of every held-out text, on the seeds that both rows have,
    with Student's 95 % over them. Rows as seed -> text -> bits per byte."""
    gaps = bit_gaps(a, b)
    found = {}
    for text in next(iter(gaps.values()), ()):
        differences = np.array([bits[text] for bits in gaps.values()])
        found[text] = {
            "difference": float(differences.mean()),
            "seed_differences": [float(value) for value in differences],
            "interval": paired_interval(differences),
        }
    return found
