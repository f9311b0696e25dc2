"""The page for any pair and any text, without a training run."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import (
    AGGREGATIONS,
    Aggregation,
    Alignment,
    TextTokenizer,
    TokenSpans,
    align,
    load_tokenizer,
    shares,
    token_overlap,
    vocabulary_overlap,
)
from vocagnolm.errors import UsageError
from vocagnolm.report.environment import environment
from vocagnolm.report.page_data import Page, Preflight
from vocagnolm.report.passage import build_passage, select_passages, token_row
from vocagnolm.report.statistics import statistics

UNMAPPED = ("include", "exclude", "mean")
MODEL_CONTEXT = 2048
"""Tokens a model sees at a time when it reads a text for the page; longer texts are windowed."""

Scorer = Callable[[Sequence[NDArray[np.integer]]], list[NDArray[np.float32]]]
"""Token ids of some texts to the -log p of every token, NaN where there is no score."""


def view_page(
    student: TextTokenizer,
    teacher: TextTokenizer,
    texts: Sequence[tuple[str, str]],
    *,
    score_student: Scorer | None = None,
    score_teacher: Scorer | None = None,
    keep: float = 0.4,
    aggregation: Aggregation = "max",
    unmapped: str = "include",
) -> Page:
    """One passage per `(title, text)`. Tokenizers alone give the alignment; a scorer for each
    side adds its losses; both together add excess and the selection over all texts."""
    if not any(text for _, text in texts):
        raise UsageError("there is no text to show: give some with --text or --file")
    contents = [text for _, text in texts]
    ours, theirs = student.spans_batch(contents), teacher.spans_batch(contents)
    alignments = [align(o.spans, t.spans) for o, t in zip(ours, theirs, strict=True)]
    student_nll = _scores(score_student, ours)
    teacher_nll = _scores(score_teacher, theirs)
    passages = [
        build_passage(
            title,
            token_row(student.name, text.encode(), o.spans, o.ids.tolist(), s_nll),
            token_row(teacher.name, text.encode(), t.spans, t.ids.tolist(), t_nll),
            alignment,
            aggregation=aggregation,
        )
        for (title, text), o, t, alignment, s_nll, t_nll in zip(
            texts, ours, theirs, alignments, student_nll, teacher_nll, strict=True
        )
    ]
    rule = None
    if score_student is not None and score_teacher is not None:
        passages, rule = select_passages(passages, keep=keep, unmapped=unmapped)
        rule = dataclasses.replace(rule, aggregation=aggregation, scope="page")
    return Page(
        title=f"{student.name} guided by {teacher.name}",
        subtitle=_subtitle(student, teacher, scored=rule is not None),
        passages=passages,
        selection=rule,
        statistics=statistics(passages),
        preflight=[preflight(student, teacher, ours, theirs, alignments)],
        environment=environment(),
    )


def _subtitle(student: TextTokenizer, teacher: TextTokenizer, *, scored: bool) -> str:
    sizes = (
        f"{student.name}: {student.kind}, {student.vocabulary_size:,} tokens. "
        f"{teacher.name}: {teacher.kind}, {teacher.vocabulary_size:,} tokens."
    )
    return sizes if scored else f"{sizes} No model was run: this page shows the alignment alone."


def _scores(
    scorer: Scorer | None, spans: Sequence[TokenSpans]
) -> list[NDArray[np.float32]] | list[None]:
    return [None] * len(spans) if scorer is None else scorer([one.ids for one in spans])


def model_scorer(
    source: str, tokenizer: TextTokenizer | None = None
) -> tuple[TextTokenizer, Scorer]:
    """A model's tokenizer and its losses. A `tokenizer` that is not the model's own is refused:
    its ids would mean other tokens to the model."""
    from vocagnolm.model import NllModel, open_model

    files = open_model(source)
    if tokenizer is not None and tokenizer.fingerprint != files.tokenizer.fingerprint:
        raise UsageError(
            f"{tokenizer.name} is not the tokenizer of the model {source}: their fingerprints "
            "differ. Leave the tokenizer out, or give the one that belongs to the model"
        )
    context = min(files.max_context or MODEL_CONTEXT, MODEL_CONTEXT)
    model = NllModel(
        files.load(),
        context=context,
        stride=context // 2 - len(files.prefix_ids),
        batch_tokens=context,
        prefix_ids=files.prefix_ids,
    )
    return tokenizer or files.tokenizer, model.document_nll


def preflight(
    student: TextTokenizer,
    teacher: TextTokenizer,
    ours: Sequence[TokenSpans],
    theirs: Sequence[TokenSpans],
    alignments: Sequence[Alignment],
) -> Preflight:
    """How the pair fits on these texts."""
    overlap = vocabulary_overlap(student, teacher)
    covers = [
        token_overlap(o.spans, t.spans, alignment)
        for o, t, alignment in zip(ours, theirs, alignments, strict=True)
    ]
    counts = [shares(alignment) for alignment in alignments]
    tokens = max(sum(count.tokens for count in counts), 1)
    return Preflight(
        student=student.name,
        teacher=teacher.name,
        student_vocabulary=student.vocabulary_size,
        teacher_vocabulary=teacher.vocabulary_size,
        overlap_raw=overlap.raw,
        overlap_marks=overlap.marks,
        overlap_bytes=overlap.bytes,
        ios=_mean([cover.ios for cover in covers]),
        iou=_mean([cover.iou for cover in covers]),
        one_to_one=sum(count.one_to_one for count in counts) / tokens,
        one_to_many=sum(count.one_to_many for count in counts) / tokens,
        many_to_one=sum(count.many_to_one for count in counts) / tokens,
        unmapped=sum(count.unmapped for count in counts) / tokens,
        student_tokens=sum(len(o) for o in ours),
        teacher_tokens=sum(len(t) for t in theirs),
        text_bytes=sum(o.n_bytes for o in ours),
        exact=all(spans.lost_bytes == 0 for spans in (*ours, *theirs)),
    )


def _mean(parts: Sequence[NDArray[np.float64]]) -> float | None:
    values = np.concatenate([*parts, np.zeros(0)])
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def view_from_sources(
    *,
    student: str | None,
    teacher: str | None,
    student_model: str | None,
    teacher_model: str | None,
    texts: Sequence[tuple[str, str]],
    keep: float = 0.4,
    aggregation: str = "max",
    unmapped: str = "include",
) -> Page:
    """`view_page` from names: tokenizers and models as folders, files or hub ids."""
    how = next((known for known in AGGREGATIONS if known == aggregation), None)
    if how is None:
        raise UsageError(f"aggregation is {aggregation!r}; expected {', '.join(AGGREGATIONS)}")
    if unmapped not in UNMAPPED:
        raise UsageError(f"unmapped is {unmapped!r}; expected {', '.join(UNMAPPED)}")
    if not any(text for _, text in texts):
        raise UsageError("there is no text to show: give some with --text or --file")
    our_tokenizer, our_scorer = _side("student", student, student_model)
    their_tokenizer, their_scorer = _side("teacher", teacher, teacher_model)
    return view_page(
        our_tokenizer,
        their_tokenizer,
        texts,
        score_student=our_scorer,
        score_teacher=their_scorer,
        keep=keep,
        aggregation=how,
        unmapped=unmapped,
    )


def _side(
    side: str, tokenizer: str | None, model: str | None
) -> tuple[TextTokenizer, Scorer | None]:
    if tokenizer is None and model is None:
        raise UsageError(
            f"no {side} was given: expected a tokenizer with --{side} or a model with "
            f"--{side}-model"
        )
    loaded = None if tokenizer is None else load_tokenizer(tokenizer, check=model is not None)
    if model is not None:
        return model_scorer(model, loaded)
    assert loaded is not None
    return loaded, None
