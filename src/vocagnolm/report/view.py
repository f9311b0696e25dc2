"""The page for any student, any teachers and any text, without a training run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    token_texts,
)
from vocagnolm.alternatives import Alternatives, AlternativesSpec
from vocagnolm.chat import ChatTokenizer, TrainOn, trained_ranges, trained_tokens
from vocagnolm.errors import UsageError
from vocagnolm.report.kept import statistics
from vocagnolm.report.page_data import Page, Passage, Selection, TeacherRow
from vocagnolm.report.passage import preflight, teacher_row, token_row
from vocagnolm.report.settings import environment, model_name
from vocagnolm.report.weights import add_guidance, weigh_passages

if TYPE_CHECKING:
    from vocagnolm.model.nll import TokenScores

UNMAPPED = ("include", "exclude", "mean")
MODEL_CONTEXT = 2048
"""Tokens a model sees at a time when it reads a text for the page; longer texts are windowed."""

Template = Callable[[TextTokenizer], ChatTokenizer]
"""A tokenizer as it reads conversations."""
Scorer = Callable[[Sequence[NDArray[np.integer]]], "Sequence[NDArray[np.float32] | TokenScores]"]
"""Token ids of some texts to the -log p of every token, NaN where there is no score; or with what
else the model expected."""


@dataclass(frozen=True)
class Side:
    """A student or a teacher: its tokenizer and, where a model reads the text too, its losses."""

    tokenizer: TextTokenizer
    score: Scorer | None = None
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.tokenizer.name


@dataclass(frozen=True)
class _Reading:
    """All texts as one side reads them."""

    side: Side
    spans: list[TokenSpans]
    nll: Sequence[NDArray[np.float32] | None]
    alternatives: Sequence[NDArray[np.uint32] | None]


def view_page(
    student: Side,
    teachers: Sequence[Side],
    texts: Sequence[tuple[str, str]],
    *,
    keep: float = 0.4,
    aggregation: Aggregation = "max",
    unmapped: str = "include",
) -> Page:
    """One passage per `(title, text)`. Tokenizers alone give the alignment; models add their
    losses; the student's and a teacher's together add excess and the selection over all texts."""
    if not any(text for _, text in texts):
        raise UsageError("there is no text to show: give some with --text or --file")
    contents = [text for _, text in texts]
    ours, *theirs = (_read(side, contents) for side in (student, *teachers))
    alignments = [
        [align(o.spans, t.spans) for o, t in zip(ours.spans, reading.spans, strict=True)]
        for reading in theirs
    ]
    passages = [_passage(at, *texts[at], ours, theirs, alignments) for at in range(len(texts))]
    rule = None
    if student.score is not None and any(teacher.score is not None for teacher in teachers):
        passages, rule = _select(passages, keep, aggregation, unmapped)
    else:
        passages = [add_guidance(passage, aggregation=aggregation) for passage in passages]
    return Page(
        title=f"{student.label} guided by {' and '.join(teacher.label for teacher in teachers)}",
        subtitle=_subtitle(student, teachers),
        passages=passages,
        selection=rule,
        statistics=statistics(passages),
        preflight=[
            preflight(
                (student.label, reading.side.label),
                student.tokenizer,
                reading.side.tokenizer,
                ours.spans,
                [one.spans for one in reading.spans],
                aligned,
                exact=all(one.lost_bytes == 0 for one in (*ours.spans, *reading.spans)),
            )
            for reading, aligned in zip(theirs, alignments, strict=True)
        ],
        environment=environment(),
    )


def _read(side: Side, texts: Sequence[str]) -> _Reading:
    spans = side.tokenizer.spans_batch(texts)
    nll: list[NDArray[np.float32] | None] = [None] * len(spans)
    others: list[NDArray[np.uint32] | None] = [None] * len(spans)
    if side.score is not None:
        found = side.score([one.ids for one in spans])
        nll = [one if isinstance(one, np.ndarray) else one.nll for one in found]
        others = [None if isinstance(one, np.ndarray) else one.alternatives for one in found]
    if isinstance(side.tokenizer, ChatTokenizer):
        nll = [
            None if losses is None else only_answers(text, one, losses)
            for text, one, losses in zip(texts, spans, nll, strict=True)
        ]
    return _Reading(side, spans, nll, others)


def only_answers(
    text: str, tokens: TokenSpans, nll: NDArray[np.float32], train_on: TrainOn = "assistant"
) -> NDArray[np.float32]:
    """Losses of what is trained on: only these tokens are kept or dropped."""
    trained = trained_tokens(tokens, trained_ranges(text, train_on))
    return np.where(trained, nll, np.float32(np.nan))


def _passage(
    at: int,
    title: str,
    text: str,
    ours: _Reading,
    theirs: Sequence[_Reading],
    alignments: Sequence[Sequence[Alignment]],
) -> Passage:
    encoded = text.encode()
    student, *teachers = (
        token_row(
            r.side.label,
            encoded,
            r.spans[at].spans,
            r.spans[at].ids.tolist(),
            r.nll[at],
            r.side.tokenizer.shown(text, r.spans[at]),
        )
        for r in (ours, *theirs)
    )
    rows = [
        _with_expected(teacher_row(row, aligned[at]), at, encoded, ours, reading)
        for row, aligned, reading in zip(teachers, alignments, theirs, strict=True)
    ]
    return Passage(title=title, student=student, teachers=rows)


def _with_expected(
    row: TeacherRow, at: int, text: bytes, ours: _Reading, theirs: _Reading
) -> TeacherRow:
    """What the teacher expected, where its model was asked."""
    packed = theirs.alternatives[at]
    if packed is None:
        return row
    from vocagnolm.data.guidance import target_table
    from vocagnolm.report.passage import Expected, with_alternatives

    student, teacher = ours.side.tokenizer, theirs.side.tokenizer
    ends = [one for one in (_base(teacher).eos_id, _turn(teacher)) if one is not None]
    table = target_table(student, token_texts(_base(teacher), ends), _base(student).eos_id)
    begins = np.zeros(0 if isinstance(teacher, ChatTokenizer) else 1, np.int64)
    return with_alternatives(
        row,
        Expected(table, Alternatives(packed), begins),
        ours.spans[at].ids,
        ours.spans[at].spans,
        theirs.spans[at].spans,
        text,
    )


def _base(tokenizer: TextTokenizer) -> TextTokenizer:
    return tokenizer.base if isinstance(tokenizer, ChatTokenizer) else tokenizer


def _turn(tokenizer: TextTokenizer) -> int | None:
    return tokenizer.end_of_turn if isinstance(tokenizer, ChatTokenizer) else None


def _select(
    passages: Sequence[Passage], keep: float, aggregation: Aggregation, unmapped: str
) -> tuple[list[Passage], Selection]:
    from vocagnolm.objective import ObjectiveConfig

    config = ObjectiveConfig(method="guided", keep=keep, unmapped=unmapped)  # type: ignore[arg-type]
    return weigh_passages(passages, config, aggregation=aggregation)


def _subtitle(student: Side, teachers: Sequence[Side]) -> str:
    sides = " ".join(
        f"{side.label}: {side.tokenizer.kind}, {side.tokenizer.vocabulary_size:,} tokens."
        for side in (student, *teachers)
    )
    scored = [side.label for side in teachers if side.score is not None]
    if student.score is None and not scored:
        return f"{sides} No model was run: this page shows the alignment alone."
    if student.score is None:
        return (
            f"{sides} The losses are those of {' and '.join(scored)}; the student's model was not "
            "run, so that there is no excess and nothing is selected."
        )
    if not scored:
        return (
            f"{sides} The losses are those of {student.label}; no teacher's model was run, so that "
            "there is no excess and nothing is selected."
        )
    return sides


def model_scorer(
    source: str,
    tokenizer: TextTokenizer | None = None,
    template: Template | None = None,
    *,
    alternatives: int = 0,
) -> tuple[TextTokenizer, Scorer]:
    """A model's tokenizer and its losses, with so many alternatives at every place. A `tokenizer`
    that is not the model's own is refused: its ids would mean other tokens to the model.
    `template`: for conversations."""
    from vocagnolm.model import NllModel, open_model

    files = open_model(source)
    if tokenizer is not None and tokenizer.fingerprint != files.tokenizer.fingerprint:
        raise UsageError(
            f"{tokenizer.name} is not the tokenizer of the model {source}: their fingerprints "
            "differ. Leave the tokenizer out, or give the one that belongs to the model"
        )
    reads = tokenizer or files.tokenizer
    if template is not None:
        reads = template(reads)
    context = min(files.max_context or MODEL_CONTEXT, MODEL_CONTEXT)
    model = NllModel(
        files.load(),
        context=context,
        stride=context // 2 - len(reads.prefix_ids),
        batch_tokens=context,
        prefix_ids=reads.prefix_ids,
        alternatives=AlternativesSpec.parse(min(alternatives, files.config.vocab_size)),
    )
    if not alternatives:
        return reads, model.document_nll
    return reads, lambda documents: model.start(documents)()


def view_from_sources(
    *,
    student: str | None,
    teachers: Sequence[str],
    student_model: str | None,
    teacher_models: Sequence[str],
    texts: Sequence[tuple[str, str]],
    keep: float = 0.4,
    aggregation: str = "max",
    unmapped: str = "include",
    student_template: Template | None = None,
    teacher_template: Template | None = None,
) -> Page:
    """`view_page` from names: tokenizers and models as folders, files or hub ids. One tokenizer
    and one model of a teacher are the same teacher; of several, each is a teacher of its own. With
    templates the texts are shared texts of conversations."""
    how = next((known for known in AGGREGATIONS if known == aggregation), None)
    if how is None:
        raise UsageError(f"aggregation is {aggregation!r}; expected {', '.join(AGGREGATIONS)}")
    if unmapped not in UNMAPPED:
        raise UsageError(f"unmapped is {unmapped!r}; expected {', '.join(UNMAPPED)}")
    if not any(text for _, text in texts):
        raise UsageError("there is no text to show: give some with --text or --file")
    ours = _side("student", student, student_model, student_template)
    sources: list[tuple[str | None, str | None]] = [(None, model) for model in teacher_models]
    sources += [(tokenizer, None) for tokenizer in teachers]
    if len(teachers) == len(teacher_models) == 1:
        sources = [(teachers[0], teacher_models[0])]
    theirs = [_side("teacher", *source, teacher_template) for source in sources or [(None, None)]]
    return view_page(ours, theirs, texts, keep=keep, aggregation=how, unmapped=unmapped)


def _side(side: str, tokenizer: str | None, model: str | None, template: Template | None) -> Side:
    if tokenizer is None and model is None:
        raise UsageError(
            f"no {side} was given: expected a tokenizer with --{side} or a model with "
            f"--{side}-model"
        )
    loaded = None if tokenizer is None else load_tokenizer(tokenizer, check=model is not None)
    if model is not None:
        from vocagnolm.report.passage import SHOWN

        shown = SHOWN if side == "teacher" else 0
        return Side(*model_scorer(model, loaded, template, alternatives=shown), model_name(model))
    assert loaded is not None and tokenizer is not None
    if template is not None:
        loaded = template(loaded)
    generic = loaded.name in ("model", "tokenizer")
    return Side(loaded, name=model_name(tokenizer) if generic else loaded.name)
