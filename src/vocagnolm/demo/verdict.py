"""What the runs say, in words: paired over seeds, and honest when they say nothing."""

from collections.abc import Mapping, Sequence

from vocagnolm import statistics
from vocagnolm.report.page_data import Measure, ResultGroup, Results

MEASURES = {
    "exact": Measure(name="Exact answers", unit="%", better="higher", digits=1),
    "bits_per_byte": Measure(name="Bits per byte", unit="clean text", better="lower", digits=3),
}
WITH_TEACHER = {"guided": "guidance", "distill": "distillation"}
"""Methods that are held against the others, and what they are called."""
Measured = Mapping[str, Sequence[Mapping[str, float]]]
"""Method -> one record of measures for every seed, in the same order."""


def results_of(measured: Measured, note: str | None = None) -> Results:
    groups = [
        ResultGroup(
            name=method,
            values=[[_shown(name, record[name]) for record in records] for name in MEASURES],
        )
        for method, records in measured.items()
    ]
    return Results(
        measures=list(MEASURES.values()), groups=groups, verdict=verdict(measured), note=note
    )


def _shown(measure: str, value: float) -> float:
    return 100 * value if measure == "exact" else value


def verdict(measured: Measured) -> str:
    """What has a teacher against each control, first by answers and then by bits per byte."""
    asked = [method for method in WITH_TEACHER if method in measured]
    measures = (("exact", "exact answers"), ("bits_per_byte", "bits per byte"))
    return " ".join(
        _sentence(measure, name, measured, method) for measure, name in measures for method in asked
    )


def _sentence(measure: str, name: str, measured: Measured, method: str) -> str:
    controls = [control for control in measured if control not in WITH_TEACHER]
    clauses = [_outcome(measure, measured, method, control) for control in controls]
    value = _value(measure, measured[method])
    return f"By {name}, {WITH_TEACHER[method]} ({value}) was {'; '.join(clauses)}."


def _outcome(measure: str, measured: Measured, method: str, control: str) -> str:
    sign = 1 if MEASURES[measure].better == "higher" else -1
    gains = [
        sign * (ours[measure] - theirs[measure])
        for ours, theirs in zip(measured[method], measured[control], strict=True)
    ]
    won, n = sum(gain > 0 for gain in gains), len(gains)
    than = f"than {_full_name(control)} ({_value(measure, measured[control])})"
    seeds = "the one seed" if n == 1 else f"all {n} seeds"
    if won == n:
        return f"better {than} on {seeds}"
    if won == 0:
        return f"not better {than} on any seed" if n > 1 else f"not better {than}"
    return f"better {than} on only {won} of {n} seeds, so not clearly better"


def _value(measure: str, records: Sequence[Mapping[str, float]]) -> str:
    mean = _mean([record[measure] for record in records])
    return f"{100 * mean:.1f} %" if measure == "exact" else f"{mean:.3f}"


def _full_name(method: str) -> str:
    return {"cpt": "plain pretraining", "random": "a random choice of as many tokens"}.get(
        method, method
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mean_and_spread(values: Sequence[float | None], digits: int) -> str:
    """Mean ± standard deviation over seeds."""
    known = [value for value in values if value is not None]
    mean, spread = statistics.mean_and_spread(known)
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
