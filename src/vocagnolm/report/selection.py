"""What the tokens of a page count: the run's own rule, decided by the code that trains, and what it
kept by kind of token, by token, and over the excess.

Every text of a page stands for one sequence of training, all of them together for one step.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import Aggregation, Alignment
from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.base.statistics import middle_95, resampled_ratios, wilson_lower
from vocagnolm.data.guidance import (
    CarryRule,
    Combine,
    Laid,
    LaidTeacher,
    carry_losses,
    student_guidance,
)
from vocagnolm.report.page_data import Histogram, Passage, Selection, Share, Statistics, TeacherRow
from vocagnolm.report.passage import FloatArray, numbers, rounded, row_spans

if TYPE_CHECKING:
    from vocagnolm.objective import ObjectiveConfig
    from vocagnolm.objective.selection import ScoredBatch


def add_guidance(passage: Passage, *, aggregation: Aggregation = "max") -> Passage:
    """The passage with its teachers' losses carried to the student's tokens, and the excess where
    the student's losses are known."""
    if not _scored_teachers(passage):
        return passage
    rule = CarryRule(aggregation=aggregation)
    guidance, _ = student_guidance(*_lay(passage), _alignments(passage), rule, "min")
    return _with_guidance(passage, guidance, _losses(passage))


def weigh_passages(
    passages: Sequence[Passage],
    config: "ObjectiveConfig",
    *,
    aggregation: Aggregation = "max",
    how: Combine = "min",
    alternatives: AlternativesSpec | None = None,
) -> tuple[list[Passage], Selection]:
    """What each token counts under `config`, with the guidance and the excess that decided it. A
    token without a student loss (the first one) is no target and counts nothing. `alternatives`:
    those that the run distilled from, which its description names."""
    import torch

    from vocagnolm.base.ranks import Ranks
    from vocagnolm.objective import weigh_step
    from vocagnolm.objective.selection import compared, filled_guidance

    # a micro-batch of the page is one text; the run's hold more, which compete with each other
    scope = config.scope if config.scope == "sequence" else "global"
    config = dataclasses.replace(config, scope=scope)
    batches = [_scored(passage, config, aggregation, how) for passage in passages]
    weights = weigh_step(batches, config).weights
    filled = filled_guidance([batch.targets for batch in batches], config, Ranks.of())
    weighed = []
    for passage, batch, teacher, weight in zip(passages, batches, filled, weights, strict=True):
        before = (len(passage.student.text) - batch.nll_BT.shape[1], 0)  # not in the batch
        if teacher is not None and batch.targets.guidance_BT is not None:
            given = np.pad(batch.targets.guidance_BT[0].numpy(), before, constant_values=np.nan)
            own = compared(batch.nll_BT, batch.targets, teacher).own_BT
            own = own.double().masked_fill(~batch.mapped_BT, torch.nan)
            losses = np.pad(own[0].numpy(), before, constant_values=np.nan)
            passage = _with_guidance(passage, given, losses)
        column = np.pad(np.round(weight[0].double().numpy(), 4), before)
        weighed.append(dataclasses.replace(passage, weights=column.tolist()))
    return weighed, _describe(config, weighed, aggregation, how, alternatives)


def _describe(
    config: "ObjectiveConfig",
    passages: Sequence[Passage],
    aggregation: Aggregation,
    how: Combine,
    alternatives: AlternativesSpec | None,
) -> Selection:
    """The rule in words, as far as the method reads it."""
    rule = config.rule
    chooses = rule.selects and not config.graded
    guided = rule.guidance and not config.by_chance
    chunks = rule.unit == "chunk"
    distils = rule.alternatives
    moves = distils and config.mix_end is not None
    by_threshold = chooses and rule.by_excess and config.keep < 1.0
    scope = "each text" if config.scope == "sequence" else "all texts of the page"
    return Selection(
        method=config.method,
        label=rule.label + (_mixture(config, alternatives) if distils else ""),
        keep=config.keep if chooses else None,
        compare="stretch" if config.by_stretch else "token" if guided else None,
        weighting=config.weighting if guided and rule.selects else None,
        floor=config.floor if rule.selects and config.graded else None,
        chunks=config.n_chunks if chunks else None,
        chunk_choice=config.chunk_choice if chunks else None,
        mix=config.mix if distils else None,
        mix_end=config.mix_end if moves else None,
        mix_hold=config.mix_hold if moves and config.mix_hold else None,
        mix_by=config.mix_by if distils else None,
        alternatives=str(alternatives) if distils and alternatives else None,
        aggregation=None if config.by_stretch or config.by_chance else aggregation,
        guided=guided,
        combine=how if any(len(passage.teachers) > 1 for passage in passages) else None,
        unmapped=config.unmapped if rule.selects or config.graded else None,
        scope=scope if chooses else None,
        graded=config.graded,
        threshold=_threshold(passages) if by_threshold else None,
    )


def _mixture(config: "ObjectiveConfig", alternatives: AlternativesSpec | None) -> str:
    """The distillation settings that follow the method's label: `, with a mix of 0.5 and 4
    alternatives a token`."""
    mix = f"of {config.mix:g}"
    if config.mix_end is not None:
        mix = f"from {config.mix:g} to {config.mix_end:g}"
    if config.mix_by == "reducible":
        mix += " times what is reducible"
    if alternatives is None:
        return f", with a mix {mix}"
    kind = "sampled alternative" if alternatives.sampled else "alternative"
    plural = "" if alternatives.count == 1 else "s"
    return f", with a mix {mix} and {alternatives.count} {kind}{plural} a token"


def _threshold(passages: Sequence[Passage]) -> float | None:
    kept = [
        excess
        for passage in passages
        for excess, weight in zip(passage.excess or [], passage.weights or [], strict=False)
        if excess is not None and weight > 0
    ]
    return min(kept, default=None)


def _scored(
    passage: Passage, config: "ObjectiveConfig", aggregation: Aggregation, how: Combine
) -> "ScoredBatch":
    """The passage as a micro-batch of one sequence. For chunks, without a first token that nothing
    predicts: they are cut among the predicted tokens, as in training."""
    import torch

    from vocagnolm.objective import IGNORE_INDEX, Targets
    from vocagnolm.objective.selection import ScoredBatch

    nll = _losses(passage)
    target = ~np.isnan(nll)
    by_chunk = config.rule.unit == "chunk"
    first = int(by_chunk and len(target) > 0 and not target[0])
    guidance = stretch = sums = None
    if _scored_teachers(passage):
        ours, theirs = _lay(passage)
        rule = CarryRule.of(config, aggregation)
        if rule.unit == "chunk" and config.by_chance:
            rule = CarryRule("token", aggregation)
        rows = _alignments(passage)
        if rule.unit == "chunk":  # against one teacher
            ranges = Alignment(rows[0].first[first:], rows[0].last[first:])
            guidance = np.full(len(target), np.nan)
            guidance[first:] = carry_losses(ranges, theirs[0].nll, rule)
        else:
            guidance, goes_on = student_guidance(ours, theirs, rows, rule, how)
            stretch = np.cumsum(~goes_on) - 1 if rule.unit == "stretch" else None
        known = theirs[0].nll[np.isfinite(theirs[0].nll)]
        sums = np.array([[known.sum(), len(known)]])

    def row(values: NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values[first:], dtype=dtype)[None]

    targets = Targets(
        labels_BT=row(np.where(target, 0, IGNORE_INDEX), torch.int64),
        guidance_BT=None if guidance is None else row(guidance, torch.float32),
        stretch_BT=None if stretch is None else row(stretch, torch.int64),
        teacher_sums_B2=None if sums is None else torch.as_tensor(sums),
    )
    return ScoredBatch(targets, row(np.where(target, nll, 0.0), torch.float32))


def _alignments(passage: Passage) -> list[Alignment]:
    teachers = _scored_teachers(passage)
    return [Alignment(np.array(row.first), np.array(row.last)) for row in teachers]


def _lay(passage: Passage) -> tuple[Laid, list[LaidTeacher]]:
    """The passage's rows on one axis of bytes, with a byte between two documents."""
    spans = row_spans(passage.student)
    breaks = np.array(passage.breaks or [], np.int64)
    document = np.zeros(len(spans), np.int64)
    document[breaks] = 1
    document = np.cumsum(document)
    begins = np.concatenate([[0], spans[breaks, 0]])
    ours = Laid(spans + document[:, None], document, begins + np.arange(len(begins)))
    return ours, [_lay_teacher(teacher, begins) for teacher in _scored_teachers(passage)]


def _lay_teacher(teacher: TeacherRow, begins: NDArray[np.int64]) -> LaidTeacher:
    spans, nll = row_spans(teacher), numbers(teacher.nll or [])
    document = np.searchsorted(begins, spans[:, 0], side="right") - 1
    known = np.isfinite(nll)
    lengths = (spans[:, 1] - spans[:, 0])[known]
    covered = np.bincount(document[known], lengths, minlength=len(begins))
    nats = np.bincount(document[known], nll[known], minlength=len(begins))
    bits = np.where(covered > 0, nats / np.maximum(covered, 1.0), np.inf)
    return LaidTeacher(spans + document[:, None], nll, bits)


def _scored_teachers(passage: Passage) -> list[TeacherRow]:
    return [teacher for teacher in passage.teachers if teacher.nll is not None]


def _losses(passage: Passage) -> FloatArray:
    return numbers(passage.student.nll or [None] * len(passage.student.text))


def _with_guidance(passage: Passage, guidance: FloatArray, own: FloatArray) -> Passage:
    """The passage with guidance and excess. `own`: the student's loss that the guidance is
    subtracted from, of a token or of its stretch."""
    excess = None if passage.student.nll is None else rounded(own - guidance)
    return dataclasses.replace(passage, guidance=rounded(guidance), excess=excess)


# ---- what was kept ----


# First match wins, so a LaTeX command is not a word and a tag is no operator.
_PIECES = {
    "LaTeX commands": r"\\(?:[A-Za-z]+\*?|[^A-Za-z\s])",
    "markup": r"""</?[A-Za-z!][^<>\n]{0,200}> | &[A-Za-z]+; | &\#\d+; | https?://\S+
          | \*\*+ | ``+ | ^\#{1,6}(?=\s) | ^[-*](?=\s) | [{}$_`|&\#~@]""",
    "numbers": r"\d+(?:[.,]\d+)*",
    "words": r"[^\W\d_]+(?:['’][^\W\d_]+)*",
    "white space": r"\s+",
    "operators": r"[-+*/=<>^%×÷·±∓≤≥≠≈≡∼→←↔⇒⇔∈∉⊂⊆∪∩∧∨¬∀∃∑∏∫√∞∂∇−∘⊕⊗]",
    "punctuation": r"""[][().,;:?!'"‘’“”«»…–—]""",
}
KINDS = (*_PIECES, "other")
_SPACE, _OTHER = KINDS.index("white space"), KINDS.index("other")
_PIECE = re.compile(
    "|".join(f"({pattern})" for pattern in _PIECES.values()), re.VERBOSE | re.MULTILINE
)


def _byte_kinds(text: str) -> NDArray[np.uint8]:
    """The kind (an index into `KINDS`) of every UTF-8 byte of a text."""
    widths = [len(char.encode("utf-8", "surrogateescape")) for char in text]
    offsets = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
    kinds = np.full(offsets[-1], _OTHER, np.uint8)
    for match in _PIECE.finditer(text):
        kinds[offsets[match.start()] : offsets[match.end()]] = (match.lastindex or 0) - 1
    return kinds


def token_kinds(tokens: Sequence[str]) -> NDArray[np.intp]:
    """The kind of every token of a row: that of most of its bytes, white space aside.

    The row is read as one text, so the `frac` after a `\\` counts as a LaTeX command.
    """
    lengths = np.array([len(token.encode("utf-8", "surrogateescape")) for token in tokens], int)
    owner = np.repeat(np.arange(len(tokens)), lengths)
    votes = np.zeros((len(tokens), len(KINDS)))
    np.add.at(votes, (owner, _byte_kinds("".join(tokens))), 1.0)
    votes[:, _SPACE] *= 1e-6  # white space decides only where there is nothing else
    votes[lengths == 0, _OTHER] = 1.0
    return np.asarray(np.argmax(votes, axis=1))


NEARLY_CERTAIN = -math.log(0.9)
"""Nats: below it a model predicts a token with more than 90 %."""


def statistics(passages: Sequence[Passage], *, listed: int = 16) -> Statistics | None:
    """Counts over all passages that carry weights; None when none does.

    A token without a student loss is no target of training and is not counted.
    """
    passages = [passage for passage in passages if passage.weights is not None]
    if not passages:
        return None
    texts, kinds, weights, excess, certain = [], [], [], [], []
    documents: dict[str, list[tuple[float, int]]] = {}
    for passage in passages:
        n = len(passage.student.text)
        target = np.ones(n, bool) if passage.student.nll is None else ~np.isnan(_losses(passage))
        texts.append(np.array(passage.student.text, object)[target])
        kinds.append(token_kinds(passage.student.text)[target])
        weight_N = np.array(passage.weights, float)
        weights.append(weight_N[target])
        excess.append(numbers(passage.excess or [None] * n)[target])
        losses = np.fmax(_losses(passage), numbers(passage.guidance or [None] * n))
        certain.append(losses[target] < NEARLY_CERTAIN)
        bounds = [0, *(passage.breaks or []), n]
        for source, start, stop in zip(passage.sources or [], bounds, bounds[1:], strict=False):
            part = np.flatnonzero(target[start:stop]) + start
            documents.setdefault(source, []).append((float(weight_N[part].sum()), len(part)))
    kind, weight, given = np.concatenate(kinds), np.concatenate(weights), np.concatenate(excess)
    kept = np.clip(weight, 0.0, 1.0)
    mapped = ~np.isnan(given)
    most_kept, most_dropped = _extremes(np.concatenate(texts), kept, listed)
    return Statistics(
        tokens=len(weight),
        kept=_count(weight),
        unmapped=int((~mapped).sum()) if mapped.any() else 0,
        kinds=[
            Share(name=name, tokens=int((kind == at).sum()), kept=_count(weight[kind == at]))
            for at, name in enumerate(KINDS)
            if (kind == at).any()
        ],
        sources=[_source_share(*named) for named in documents.items()],
        most_kept=most_kept,
        most_dropped=most_dropped,
        excess=_histogram(given[mapped], kept[mapped], np.concatenate(certain)[mapped])
        if mapped.any()
        else None,
    )


def _source_share(name: str, documents: Sequence[tuple[float, int]]) -> Share:
    kept_D, tokens_D = np.array(documents).T
    drawn = resampled_ratios(kept_D[None], tokens_D[None]) if len(documents) > 1 else None
    low_high = None if drawn is None else middle_95(np.nan_to_num(drawn[:, 0]))
    return Share(name=name, tokens=int(tokens_D.sum()), kept=_count(kept_D), interval=low_high)


def _count(weights: NDArray[np.float64]) -> float:
    return round(float(weights.sum()), 2)


def _extremes(
    texts: NDArray[np.object_], kept: NDArray[np.float64], listed: int
) -> tuple[list[Share], list[Share]]:
    """The tokens kept and dropped most reliably, by the lower end of Wilson's 95 % interval, so
    that one lucky token of two does not outrank ninety of a hundred."""
    names, index = np.unique(texts, return_inverse=True)
    counts = np.bincount(index).astype(np.float64)
    keeps = np.bincount(index, kept).astype(np.float64)

    def best(hits: NDArray[np.float64]) -> list[Share]:
        score = np.where(counts >= 3, wilson_lower(hits, counts), -1.0)
        order = np.lexsort((-counts, -score))[:listed]
        return [
            Share(name=str(names[at]), tokens=int(counts[at]), kept=round(float(keeps[at]), 2))
            for at in order
            if score[at] > 0 and hits[at] * 2 >= counts[at]
        ]

    return best(keeps), best(counts - keeps)


def _histogram(
    excess: NDArray[np.float64],
    kept: NDArray[np.float64],
    certain: NDArray[np.bool_],
    bins: int = 60,
) -> Histogram:
    low, high = np.percentile(excess, [0.5, 99.5])
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    # zero lies in the middle of a bin, so that what is about zero is not cut in two
    width = (high - low) / bins
    low = (math.floor(low / width - 0.5) + 0.5) * width
    edges = low + width * np.arange(math.ceil((high - low) / width - 1e-9) + 1)
    high = edges[-1]
    inside = np.clip(excess, low, high)

    def counts(weights: NDArray[np.float64]) -> list[float]:
        heights, _ = np.histogram(inside, edges, weights=weights)
        return [round(float(height), 2) for height in heights]

    return Histogram(
        edges=[round(float(edge), 4) for edge in edges],
        kept=counts(kept),
        dropped=counts(1.0 - kept),
        certain=int((certain & (np.abs(excess) <= width / 2)).sum()),
    )
