"""The numbers of research/results can be made again, from the runs that are kept beside them, and
by other means than ours."""

import json
from typing import Any

import numpy as np
import pytest
import result_tables
import scipy.stats
from faults_kit import some
from result_tables import LINES, TEXTS, archive_of, difference, study_names, table
from study_kit import kept_runs

KEPT = [name for name in study_names() if archive_of(name)]
COMPARED = [c for line in LINES for c in (line.distilled, line.guided) if c and c[0] in KEPT]


def numbers(value: Any, where: str = "") -> dict[str, Any]:
    """Path -> leaf of a JSON tree."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    leaves: dict[str, Any] = {}
    for key, part in inner:
        nested = isinstance(part, dict | list)
        leaves |= numbers(part, f"{where}/{key}") if nested else {f"{where}/{key}": part}
    return leaves


@pytest.mark.parametrize("name", some(KEPT, 2))
def test_the_table_follows_from_the_runs(name: str) -> None:
    again = json.loads(json.dumps(result_tables.remade(name)))
    assert numbers(again) == pytest.approx(numbers(table(name)))
    assert result_tables.differing(again, table(name)) == []


def test_what_differs_is_named() -> None:
    kept = {"rows": [{"accuracy": 10.0, "seeds": [1, 2]}], "title": "t"}
    made = {"rows": [{"accuracy": 10.0 + 1e-12, "seeds": [1, 3]}], "title": "t"}
    assert result_tables.differing(made, kept) == ["/rows/0/seeds/1"]
    assert result_tables.differing({**kept, "title": "u"}, kept) == ["/title"]
    assert result_tables.differing({"rows": []}, kept) == [""]


def test_the_tables_in_the_pages_are_those_of_the_results() -> None:
    assert list(result_tables.stale_pages()) == [], "run `make tables`"


@pytest.mark.parametrize("compared", COMPARED, ids=lambda c: f"{c[0]}: {c[1]}")
def test_differences_and_intervals_agree_with_scipy(compared: tuple[str, str, str]) -> None:
    study, a, b = compared
    ours, theirs = kept_runs(study, a), kept_runs(study, b)
    seeds = sorted(ours.keys() & theirs.keys())
    marks = [[run[s]["grades.json"] for s in seeds] for run in (ours, theirs)]
    tasks = list(marks[0][0])
    pairs = list(zip(*marks, strict=True))
    gaps = [  # per task a matrix of seeds and questions, in points of the average over tasks
        np.array([[x[t][q] - y[t][q] for q in x[t]] for x, y in pairs]) * 100 / len(tasks)
        for t in tasks
    ]
    found = difference(study, a, b)
    by_seed = np.sum([gap.mean(1) for gap in gaps], axis=0)
    assert (found.seeds, found.value) == (len(seeds), pytest.approx(by_seed.mean()))
    for level, side in ((found.a, marks[0]), (found.b, marks[1])):
        accuracy = [100 * np.mean([np.mean(list(run[t].values())) for t in tasks]) for run in side]
        assert level[0] == pytest.approx(np.mean(accuracy))
    if len(seeds) > 1:
        mean, error = by_seed.mean(), scipy.stats.sem(by_seed)
        student = scipy.stats.t.interval(0.95, len(seeds) - 1, mean, error)
        assert found.t_interval == pytest.approx(student)
    else:
        assert found.t_interval is None
    generator = np.random.default_rng(7)

    def drawn(chosen: np.ndarray) -> float:
        """The mean over some seeds and over questions that are drawn within every task."""
        parts = [gap[chosen].mean(0) for gap in gaps]
        return float(sum(generator.choice(part, len(part)).mean() for part in parts))

    places = np.arange(len(seeds))
    if len(seeds) > 1:
        again = scipy.stats.bootstrap(
            (places,), drawn, vectorized=False, method="percentile", n_resamples=2000, rng=generator
        )
        interval = again.confidence_interval
    else:  # scipy's needs two values
        interval = np.quantile([drawn(places) for _ in range(2000)], (0.025, 0.975))
    assert found.interval == pytest.approx(
        tuple(interval), abs=0.2
    )  # of 2,000 draws of three seeds
    for text in TEXTS:
        bits = [[r[s]["evaluation.json"]["held_out"][text] for s in seeds] for r in (ours, theirs)]
        relative = 100 * (np.mean(bits[0]) / np.mean(bits[1]) - 1)
        assert found.bits[text] == pytest.approx(relative, abs=0.05)
