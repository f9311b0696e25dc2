"""What a selection did: by kind of token, by token, and over the excess."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vocagnolm.report.page_data import Histogram, KindShare, Passage, Statistics, TokenShare
from vocagnolm.statistics import wilson_lower

KINDS = (
    "words",
    "numbers",
    "operators",
    "LaTeX commands",
    "punctuation",
    "white space",
    "markup",
    "other",
)

# First match wins, so a LaTeX command is not a word and a tag is no operator.
_PIECES = re.compile(
    r"""(?P<latex>\\(?:[A-Za-z]+\*?|[^A-Za-z\s]))
      | (?P<markup></?[A-Za-z!][^<>\n]{0,200}> | &[A-Za-z]+; | &\#\d+; | https?://\S+
          | \*\*+ | ``+ | ^\#{1,6}(?=\s) | ^[-*](?=\s) | [{}$_`|&\#~@])
      | (?P<number>\d+(?:[.,]\d+)*)
      | (?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*)
      | (?P<space>\s+)
      | (?P<operator>[-+*/=<>^%×÷·±∓≤≥≠≈≡∼→←↔⇒⇔∈∉⊂⊆∪∩∧∨¬∀∃∑∏∫√∞∂∇−∘⊕⊗])
      | (?P<punctuation>[][().,;:?!'"‘’“”«»…–—])""",
    re.VERBOSE | re.MULTILINE,
)
_KIND_OF_GROUP = {
    "word": 0,
    "number": 1,
    "operator": 2,
    "latex": 3,
    "punctuation": 4,
    "space": 5,
    "markup": 6,
}
_SPACE, _OTHER = 5, 7


def byte_kinds(text: str) -> NDArray[np.uint8]:
    """The kind (an index into `KINDS`) of every UTF-8 byte of a text."""
    encoded = text.encode("utf-8", "surrogateescape")
    kinds = np.full(len(encoded), _OTHER, np.uint8)
    ascii_only = len(encoded) == len(text)
    if not ascii_only:
        widths = [len(char.encode("utf-8", "surrogateescape")) for char in text]
        offsets = np.concatenate([[0], np.cumsum(widths)])
    for match in _PIECES.finditer(text):
        start, end = match.span()
        if not ascii_only:
            start, end = offsets[start], offsets[end]
        kinds[start:end] = _KIND_OF_GROUP[match.lastgroup or ""]
    return kinds


def token_kinds(tokens: Sequence[str]) -> NDArray[np.intp]:
    """The kind of every token of a row: that of most of its bytes, white space aside.

    The row is read as one text, so the `frac` after a `\\` counts as a LaTeX command.
    """
    lengths = np.array([len(token.encode("utf-8", "surrogateescape")) for token in tokens], int)
    kinds = byte_kinds("".join(tokens))
    owner = np.repeat(np.arange(len(tokens)), lengths)
    votes = np.zeros((len(tokens), len(KINDS)))
    np.add.at(votes, (owner, kinds), 1.0)
    votes[:, _SPACE] *= 1e-6  # white space decides only where there is nothing else
    votes[lengths == 0, _OTHER] = 1.0
    return np.asarray(np.argmax(votes, axis=1))


def statistics(passages: Sequence[Passage], *, listed: int = 16) -> Statistics | None:
    """Counts over all passages that carry weights; None when none does.

    A token without a student loss is no target of training and is not counted.
    """
    passages = [passage for passage in passages if passage.weights is not None]
    if not passages:
        return None
    texts = [token for passage in passages for token in passage.student.text]
    kinds = np.concatenate([token_kinds(passage.student.text) for passage in passages])
    weights = np.concatenate([np.array(passage.weights, float) for passage in passages])
    kept = np.clip(weights, 0.0, 1.0)
    excess = np.concatenate([_column(passage, passage.excess) for passage in passages])
    is_target = np.concatenate(
        [
            ~np.isnan(_column(passage, passage.student.nll))
            if passage.student.nll is not None
            else np.ones(len(passage.student.text), bool)
            for passage in passages
        ]
    )
    shares = []
    for at, kind in enumerate(KINDS):
        here = (kinds == at) & is_target
        if here.any():
            known = excess[here & ~np.isnan(excess)]
            shares.append(
                KindShare(
                    kind=kind,
                    tokens=int(here.sum()),
                    kept=_count(weights[here]),
                    mean_excess=round(float(known.mean()), 4) if len(known) else None,
                )
            )
    most_kept, most_dropped = _extremes(texts, kept, is_target, listed)
    mapped = ~np.isnan(excess)
    return Statistics(
        tokens=int(is_target.sum()),
        kept=_count(weights[is_target]),
        unmapped=int((is_target & ~mapped).sum()) if mapped.any() else 0,
        kinds=shares,
        most_kept=most_kept,
        most_dropped=most_dropped,
        excess=_histogram(excess[mapped], kept[mapped]) if mapped.any() else None,
    )


def _count(weights: NDArray[np.float64]) -> float:
    return round(float(weights.sum()), 2)


def _column(passage: Passage, values: Sequence[float | None] | None) -> NDArray[np.float64]:
    if values is None:
        return np.full(len(passage.student.text), np.nan)
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _extremes(
    texts: Sequence[str], kept: NDArray[np.float64], counted: NDArray[np.bool_], listed: int
) -> tuple[list[TokenShare], list[TokenShare]]:
    """The tokens kept and dropped most reliably, by the lower end of Wilson's 95 % interval, so
    that one lucky token of two does not outrank ninety of a hundred."""
    names, index = np.unique(np.array(texts, dtype=object), return_inverse=True)
    counts = np.bincount(index[counted], minlength=len(names)).astype(float)
    keeps: NDArray[np.float64]
    keeps = np.bincount(index[counted], kept[counted], minlength=len(names)).astype(np.float64)

    def best(hits: NDArray[np.float64]) -> list[TokenShare]:
        score = np.where(counts >= 3, wilson_lower(hits, counts), -1.0)
        order = np.lexsort((-counts, -score))[:listed]
        return [
            TokenShare(text=str(names[at]), tokens=int(counts[at]), kept=round(float(keeps[at]), 2))
            for at in order
            if score[at] > 0 and hits[at] * 2 >= counts[at]
        ]

    return best(keeps), best(counts - keeps)


def _histogram(excess: NDArray[np.float64], kept: NDArray[np.float64], bins: int = 60) -> Histogram:
    low, high = np.percentile(excess, [0.5, 99.5])
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, bins + 1)
    inside = np.clip(excess, low, high)

    def counts(weights: NDArray[np.float64]) -> list[float]:
        found, _ = np.histogram(inside, edges, weights=weights)
        return [round(float(count), 2) for count in found]

    return Histogram(
        edges=[round(float(edge), 4) for edge in edges],
        kept=counts(kept),
        dropped=counts(1.0 - kept),
    )
