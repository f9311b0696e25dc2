"""What the tokens of a page count: the run's own rule, decided by the code that trains.

Every text of a page stands for one sequence of training, all of them together for one step.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import Aggregation, Alignment, carry
from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.data.guidance import Combine, Laid, LaidTeacher, combine, stretch_guidance
from vocagnolm.data.packing import chunk_guidance
from vocagnolm.report.page_data import Passage, Selection, TeacherRow
from vocagnolm.report.passage import FloatArray, numbers, rounded, row_spans

if TYPE_CHECKING:
    from vocagnolm.objective import ObjectiveConfig
    from vocagnolm.objective.selection import ScoredBatch


def add_guidance(
    passage: Passage, *, aggregation: Aggregation = "max", how: Combine = "min"
) -> Passage:
    """The passage with its teachers' losses carried to the student's tokens, and the excess where
    the student's losses are known."""
    if not has_guidance(passage):
        return passage
    guidance = carried(passage, *lay_passage(passage), aggregation, how)
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

    from vocagnolm.objective import weigh_step
    from vocagnolm.objective.selection import compared, filled_guidance
    from vocagnolm.processes import Ranks

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
    return weighed, describe(config, weighed, aggregation, how, alternatives)


def describe(
    config: "ObjectiveConfig",
    passages: Sequence[Passage],
    aggregation: Aggregation,
    how: Combine,
    alternatives: AlternativesSpec | None = None,
) -> Selection:
    """The rule in words, as far as the method reads it."""
    selects, chooses = config.rule.selects, config.rule.selects and not config.graded
    guided = config.rule.guidance and not config.by_chance
    chunks = config.rule.unit == "chunk"
    distils = config.rule.alternatives
    moves = distils and config.mix_end is not None
    return Selection(
        method=config.method,
        label=config.rule.label + (_mixture(config, alternatives) if distils else ""),
        keep=config.keep if chooses else None,
        compare="stretch" if config.by_stretch else "token" if guided else None,
        weighting=config.weighting if guided and selects else None,
        floor=config.floor if selects and config.graded else None,
        chunks=config.n_chunks if chunks else None,
        chunk_choice=config.chunk_choice if chunks else None,
        mix=config.mix if distils else None,
        mix_end=config.mix_end if moves else None,
        mix_hold=config.mix_hold if moves and config.mix_hold else None,
        mix_by=config.mix_by if distils else None,
        alternatives=str(alternatives) if distils and alternatives else None,
        aggregation=None if config.by_stretch or chunks else aggregation,
        guided=guided,
        combine=how if any(len(passage.teachers) > 1 for passage in passages) else None,
        unmapped=config.unmapped if selects or config.graded else None,
        scope=None
        if not chooses
        else "each text"
        if config.scope == "sequence"
        else "all texts of the page",
        graded=config.graded,
        threshold=_threshold(passages)
        if chooses and config.rule.by_excess and config.keep < 1.0
        else None,
    )


def _mixture(config: "ObjectiveConfig", alternatives: AlternativesSpec | None) -> str:
    """Behind the method's label: `, with a mix of 0.5 and 4 alternatives a token`."""
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
    guidance = stretch = sums = None
    if has_guidance(passage):
        ours, theirs = lay_passage(passage)
        if config.by_stretch:
            guidance, goes_on = stretch_guidance(ours, theirs, how)
            stretch = np.cumsum(~goes_on) - 1
        elif config.rule.unit == "chunk" and not config.by_chance:
            guidance = _chunked(passage, target, config.n_chunks)
        else:
            guidance = carried(passage, ours, theirs, aggregation, how)
        known = theirs[0].nll[np.isfinite(theirs[0].nll)]
        sums = np.array([[known.sum(), len(known)]])

    first = int(config.rule.unit == "chunk" and len(target) > 0 and not target[0])

    def row(values: NDArray[np.generic] | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if values is None else torch.as_tensor(values[first:], dtype=dtype)[None]

    labels = row(np.where(target, 0, IGNORE_INDEX), torch.int64)
    losses = row(np.where(target, nll, 0.0), torch.float32)
    assert labels is not None and losses is not None
    targets = Targets(
        labels_BT=labels,
        guidance_BT=row(guidance, torch.float32),
        stretch_BT=row(stretch, torch.int64),
        teacher_sums_B2=None if sums is None else torch.as_tensor(sums),
    )
    return ScoredBatch(targets, losses)


def _chunked(passage: Passage, target: NDArray[np.bool_], n_chunks: int) -> FloatArray:
    """As blocks are read: among the predicted tokens, which are all but the first."""
    lead = _scored_teachers(passage)[0]
    ranges = np.stack([np.array(lead.first), np.array(lead.last)], axis=1)
    begin = int(len(target) > 0 and not target[0])
    guidance = np.full(len(target), np.nan)
    guidance[begin:] = chunk_guidance(ranges[begin:], numbers(lead.nll or []), n_chunks)
    return guidance


def carried(
    passage: Passage,
    ours: Laid,
    theirs: Sequence[LaidTeacher],
    aggregation: Aggregation,
    how: Combine,
) -> FloatArray:
    """The teachers' losses on the student's tokens, token by token."""
    alignments = [Alignment(np.array(t.first), np.array(t.last)) for t in _scored_teachers(passage)]
    losses = [
        carry(alignment, teacher.nll, aggregation)
        for alignment, teacher in zip(alignments, theirs, strict=True)
    ]
    return np.asarray(combine(losses, theirs, ours, how), np.float64)


def lay_passage(passage: Passage) -> tuple[Laid, list[LaidTeacher]]:
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


def has_guidance(passage: Passage) -> bool:
    return bool(_scored_teachers(passage))


def _scored_teachers(passage: Passage) -> list[TeacherRow]:
    return [teacher for teacher in passage.teachers if teacher.nll is not None]


def _losses(passage: Passage) -> FloatArray:
    return numbers(passage.student.nll or [None] * len(passage.student.text))


def _with_guidance(passage: Passage, guidance: FloatArray, own: FloatArray) -> Passage:
    """`own`: the student's loss that is held against it, of a token or of its stretch."""
    excess = None if passage.student.nll is None else rounded(own - guidance)
    return dataclasses.replace(passage, guidance=rounded(guidance), excess=excess)
