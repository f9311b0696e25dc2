"""Do the losses tell documents of one label from those of the other: right solutions from wrong?

The labels are fields of the corpus and no method sees them. For every document the mean of what the
objective looks at (the teacher's loss, the excess, the reducible share) is taken over a part of its
text, and the area under the ROC curve says how often a document with the label false has the higher
mean than one with true: 0.5 is a coin.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import TokenSpans
from vocagnolm.data.corpus import open_corpus
from vocagnolm.errors import StudyError
from vocagnolm_studies.sample import SampleBlocks, SpreadSample

RESAMPLES = 500
_FEWEST = 20
"""Documents of each label that an area is taken over."""

# Parts of a text, as ranges of its bytes: numbers that a calculation came to, and what is said last
_RESULT = re.compile(rb"=\s*[^\w\s=-]{0,2}(-?\d+(?:,\d{3})*(?:\.\d+)?)")
_ANSWER = re.compile(rb"answer is[:\s$(\\]*([^\n]{1,40}?)[.)\s$]*(?:\n|$)", re.IGNORECASE)

_LABELS = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LabelFields:
    """Where a corpus says what its documents are."""

    label: str
    """true or false (or 1 and 0)."""
    group: str | None = None
    """Documents that belong together (solutions of one question): drawn together by the bootstrap,
    and compared with each other alone for `within`."""
    by: Sequence[str] = ()
    """Fields to tell apart by."""
    after: str | None = None
    """Only the text after this mark is looked at (the solution without its question)."""


@dataclass(frozen=True, kw_only=True)
class Area:
    """Area under the ROC curve: how often false lies above true."""

    value: float
    low: float
    high: float
    false: int
    true: int
    within: float | None = None
    """Over pairs of one group only: free of what the groups differ in."""
    within_low: float | None = None
    within_high: float | None = None


@dataclass(frozen=True, kw_only=True)
class LabelStudy:
    label: str
    documents: int
    false_documents: int
    areas: dict[str, dict[str, Area]]
    """Part of the text -> measure -> area."""
    by: dict[str, dict[str, dict[str, Area]]]
    """Field -> its value -> measure -> area, over the whole text."""
    false_tokens: dict[str, float]
    """Rule -> share of its kept tokens (or weight) in documents with the label false; `all`: of all
    tokens."""


def text_parts(text: bytes, after: bytes | None) -> dict[str, list[Range]]:
    """The parts of a text that are looked at; without the mark all of it."""
    start = text.find(after) + len(after) if after is not None and after in text else 0
    answers = [match.span(1) for match in _ANSWER.finditer(text, start)]
    return {
        "text": [(start, len(text))],
        "results": [match.span(1) for match in _RESULT.finditer(text, start)],
        "answer": answers[-1:],
    }


def read_labels(
    paths: str | Sequence[str], field: str, records: Sequence[int]
) -> NDArray[np.bool_]:
    """The labels of some records of a corpus."""
    values = read_field(paths, field, records)
    for index, value in zip(records, values, strict=True):
        if value not in _LABELS:
            raise StudyError(
                f"The field {field!r} of document {index:,} holds {value!r}. A label is true or "
                "false for every document: give a field that says what each one is."
            )
    labels = np.array([_LABELS[value] for value in values])
    if labels.all() or not labels.any():
        raise StudyError(f"All {len(labels):,} documents have the same label {field!r}.")
    return labels


def read_field(paths: str | Sequence[str], field: str, records: Sequence[int]) -> list[str]:
    """What a field of the corpus holds in some records, as text."""
    corpus = open_corpus(paths, text_field=field, format="text")
    return [str(corpus.field(record)) for record in records]


def label_study(
    fields: LabelFields,
    corpus: str | Sequence[str],
    sample: SpreadSample,
    tokens: Sequence[TokenSpans],
    read: SampleBlocks,
    measures: dict[str, NDArray[np.float32]],
    weights: Mapping[str, NDArray[np.float32] | NDArray[np.bool_]],
    prefix: int,
) -> LabelStudy:
    """`tokens`: those of each document. `measures` and `weights` [N, L]: what is
    averaged, and what each rule lets a token count. `prefix` separators begin a document."""
    label = read_labels(corpus, fields.label, sample.records)
    groups = None
    if fields.group is not None:
        named = read_field(corpus, fields.group, sample.records)
        groups = np.unique(named, return_inverse=True)[1]
    after = None if fields.after is None else fields.after.encode()
    parts = [text_parts(text.encode(), after) for text in sample.texts]
    place, document = read.place - prefix, read.document
    sizes = np.array([len(spans) for spans in tokens])
    of_text = read.predicted & (place >= 0) & (place < sizes[document])
    starts = np.cumsum(sizes) - sizes

    def means(part: str, shown: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float64]]:
        inside = np.concatenate(
            [spans.inside(where[part]) for spans, where in zip(tokens, parts, strict=True)]
        )
        where = of_text.copy()
        where[of_text] = inside[(starts[document] + place)[of_text]]
        return {name: _means(values, document, where, len(label)) for name, values in shown.items()}

    over_text = means("text", measures)
    by = {}
    for field in fields.by:
        values = np.array(read_field(corpus, field, sample.records))
        by[field] = {
            str(value): areas(
                {name: mean[values == value] for name, mean in over_text.items()},
                label[values == value],
                None if groups is None else groups[values == value],
            )
            for value in np.unique(values)
        }
    false = ~label[document]
    return LabelStudy(
        label=fields.label,
        documents=len(label),
        false_documents=int((~label).sum()),
        areas={
            part: areas(over_text if part == "text" else means(part, measures), label, groups)
            for part in ("text", "results", "answer")
        },
        by={
            field: {value: measured for value, measured in values.items() if measured}
            for field, values in by.items()
        },
        false_tokens={
            name: float(count[false].sum(dtype=np.float64) / count.sum(dtype=np.float64))
            for name, count in {"all": read.predicted, **weights}.items()
        },
    )


def _means(
    values: NDArray[np.float32],
    document: NDArray[np.int64],
    where: NDArray[np.bool_],
    documents: int,
) -> NDArray[np.float64]:
    """The mean of each document over the tokens whose value is known; NaN where there is none."""
    where = where & ~np.isnan(values)
    total = np.bincount(document[where], values[where], minlength=documents)
    count = np.bincount(document[where], minlength=documents)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def areas(
    measures: dict[str, NDArray[np.float64]],
    label: NDArray[np.bool_],
    groups: NDArray[np.int64] | None,
) -> dict[str, Area]:
    """An area for every measure with enough documents of both labels; NaN: not measured there."""
    by_measure = {}
    for name, values in measures.items():
        known = ~np.isnan(values)
        true = int(label[known].sum())
        false = int(known.sum()) - true
        if min(true, false) >= _FEWEST:
            members = None if groups is None else groups[known]
            by_measure[name] = area(values[known], label[known], members)
    return by_measure


def area(
    values: NDArray[np.float64], label: NDArray[np.bool_], groups: NDArray[np.int64] | None
) -> Area:
    """The area with 95 % intervals, for which groups (or documents) are drawn with replacement."""
    members = (
        np.arange(len(values)) if groups is None else np.unique(groups, return_inverse=True)[1]
    )
    count = int(members.max()) + 1
    generator = np.random.default_rng(0)
    draws = [
        np.bincount(generator.integers(0, count, count), minlength=count) for _ in range(RESAMPLES)
    ]
    ordered = _Ordered(values, label)
    drawn = [ordered.area(draw[members].astype(np.float64)) for draw in draws]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    result = Area(
        value=ordered.area(np.ones(len(values))),
        low=float(low),
        high=float(high),
        false=int((~label).sum()),
        true=int(label.sum()),
    )
    if groups is None:
        return result
    won, pairs = _pairs_within(values, label, members, count)
    if not pairs.sum():
        return result
    inside = [float(draw @ won) / max(float(draw @ pairs), 1.0) for draw in draws]
    low, high = np.quantile(inside, [0.025, 0.975])
    return replace(
        result,
        within=float(won.sum() / pairs.sum()),
        within_low=float(low),
        within_high=float(high),
    )


class _Ordered:
    """Values in order, for the area under many weightings of the same documents."""

    def __init__(self, values: NDArray[np.float64], label: NDArray[np.bool_]):
        self._order = np.argsort(values, kind="stable")
        ordered = values[self._order]
        self._label = label[self._order]
        self._ties = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])

    def area(self, weights: NDArray[np.float64]) -> float:
        weights = weights[self._order]
        true = np.add.reduceat(weights * self._label, self._ties)
        false = np.add.reduceat(weights * ~self._label, self._ties)
        below = np.cumsum(true) - true
        total = true.sum() * false.sum()
        return float((false * (below + true / 2)).sum() / total) if total else float("nan")


def _pairs_within(
    values: NDArray[np.float64],
    label: NDArray[np.bool_],
    members: NDArray[np.int64],
    count: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per group: pairs (false, true) that false wins, ties half; and all pairs."""
    won, pairs = np.zeros(count), np.zeros(count)
    order = np.argsort(members, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(members[order])) + 1):
        false, true = values[group][~label[group]], values[group][label[group]]
        difference = np.sign(false[:, None] - true[None, :])
        won[members[group[0]]] = (difference.sum() + difference.size) / 2
        pairs[members[group[0]]] = difference.size
    return won, pairs
