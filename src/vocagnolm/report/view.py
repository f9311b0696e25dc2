"""The page for any student, any teachers and any text, without a training run."""

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import (
    Aggregation,
    TargetTable,
    TextTokenizer,
    TokenSpans,
    load_tokenizer,
    token_texts,
)
from vocagnolm.alternatives import Alternatives, AlternativesSpec
from vocagnolm.chat import ChatTokenizer, TrainOn
from vocagnolm.chat.survey import why_trained
from vocagnolm.errors import UsageError
from vocagnolm.report.comparison import plain_tokenizer
from vocagnolm.report.page_data import Page
from vocagnolm.report.passage import SHOWN, Reading, make_passage, preflight
from vocagnolm.report.selection import add_guidance, statistics, weigh_passages

if TYPE_CHECKING:
    from vocagnolm.model.nll import TokenScores

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
    _require_text(texts)
    contents = [text for _, text in texts]
    spans = [side.tokenizer.spans_batch(contents) for side in (student, *teachers)]
    ours, *theirs = (
        _read(side, contents, tokens, student.tokenizer)
        for side, tokens in zip((student, *teachers), spans, strict=True)
    )
    passages = []
    for (title, text), own, *read in zip(texts, ours, *theirs, strict=True):
        passages.append(make_passage(title, text.encode(), own, read))
    rule = None
    if student.score is not None and any(teacher.score is not None for teacher in teachers):
        from vocagnolm.objective import ObjectiveConfig

        config = ObjectiveConfig(method="guided", keep=keep, unmapped=unmapped)  # type: ignore[arg-type]
        passages, rule = weigh_passages(passages, config, aggregation=aggregation)
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
                (student.label, teacher.label),
                student.tokenizer,
                teacher.tokenizer,
                spans[0],
                [reading.spans for reading in tokens],
                exact=all(reading.exact for reading in (*spans[0], *tokens)),
            )
            for teacher, tokens in zip(teachers, spans[1:], strict=True)
        ],
        environment=environment(),
    )


def _require_text(texts: Sequence[tuple[str, str]]) -> None:
    if not any(text for _, text in texts):
        raise UsageError("there is no text to show: give some with --text or --file")


def _read(
    side: Side, texts: Sequence[str], spans: Sequence[TokenSpans], student: TextTokenizer
) -> list[Reading]:
    """The texts as one side reads them, with what its model expected where it was asked."""
    scores = (
        [None] * len(spans) if side.score is None else side.score([tokens.ids for tokens in spans])
    )
    table: TargetTable | None = None
    readings = []
    for text, tokens, score in zip(texts, spans, scores, strict=True):
        nll = score if score is None or isinstance(score, np.ndarray) else score.nll
        reading = read_text(side.label, side.tokenizer, text, tokens, nll)
        if (packed := getattr(score, "alternatives", None)) is not None:
            table = table or _target_table(student, side.tokenizer)
            reading = replace(reading, alternatives=Alternatives(packed), table=table)
        readings.append(reading)
    return readings


def read_text(
    name: str,
    tokenizer: TextTokenizer,
    text: str,
    tokens: TokenSpans,
    nll: NDArray[np.float32] | None,
    train_on: TrainOn = "assistant",
) -> Reading:
    """A text as a model reads it. Of a conversation only what is trained on has losses: only these
    tokens are kept or dropped."""
    why = None
    if isinstance(tokenizer, ChatTokenizer):
        why = why_trained(text, tokens, train_on)
        if nll is not None:
            nll = np.where([reason is not None for reason in why], nll, np.float32(np.nan))
    shown = tokenizer.shown(text, tokens)
    return Reading(name=name, spans=tokens.spans, ids=tokens.ids, nll=nll, shown=shown, trained=why)


def _target_table(student: TextTokenizer, teacher: TextTokenizer) -> TargetTable:
    from vocagnolm.data.guidance import target_table

    base = plain_tokenizer(teacher)
    turn = teacher.end_of_turn if isinstance(teacher, ChatTokenizer) else None
    ends = [token for token in (base.eos_id, turn) if token is not None]
    return target_table(student, token_texts(base, ends), plain_tokenizer(student).eos_id)


def _subtitle(student: Side, teachers: Sequence[Side]) -> str:
    sides = " ".join(
        f"{side.label}: {side.tokenizer.kind}, {side.tokenizer.vocabulary_size:,} tokens."
        for side in (student, *teachers)
    )
    scored = [side.label for side in teachers if side.score is not None]
    if student.score is None and not scored:
        return f"{sides} No model was run: this page shows the alignment alone."
    if student.score is not None and scored:
        return sides
    run, missing = (scored, "the student's") if scored else ([student.label], "no teacher's")
    was = "was not run" if scored else "was run"
    return (
        f"{sides} The losses are those of {' and '.join(run)}; {missing} model {was}, so that "
        "there is no excess and nothing is selected."
    )


# ---- from names ----


def environment() -> dict[str, str]:
    """The versions that a page was made with."""
    facts = {"python": platform.python_version(), "system": platform.system()}
    if machine := platform.machine():
        facts["machine"] = f"{machine}, {os.cpu_count()} cores"
    for package in ("vocagnolm", "torch", "transformers", "tokenizers", "accelerate", "numpy"):
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


# `train` leaves its models under these names, which say nothing outside the run folder
_OF_A_RUN = ("model", "start")


def model_name(source: str | Path) -> str:
    """A hub id as it is; a folder or file by its own name, and a run's model by its run."""
    path = Path(source)
    if not path.exists() and not path.is_absolute():
        return str(source)
    path = Path(os.path.abspath(path))
    in_a_run = path.name in _OF_A_RUN or path.name.startswith("checkpoint-")
    for folder in path.parents[:2]:
        if in_a_run and (folder / "recipe.yaml").is_file():
            return folder.name
    return path.name


def model_names(sources: Sequence[str]) -> dict[str, str]:
    """Models by their short names, or as they were given where two would be called the same."""
    names = {source: model_name(source) for source in sources}
    return names if len(set(names.values())) == len(names) else {name: name for name in names}


def model_scorer(
    source: str,
    tokenizer: TextTokenizer | None = None,
    template: Template | None = None,
    *,
    alternatives: int = 0,
) -> tuple[TextTokenizer, Scorer]:
    """A model's tokenizer and its losses, with so many alternatives of every token. A `tokenizer`
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
    student_template: Template | None = None,
    teacher_template: Template | None = None,
    **selection: Any,
) -> Page:
    """`view_page` from names: tokenizers and models as folders, files or hub ids. One tokenizer
    and one model of a teacher are the same teacher; of several, each is a teacher of its own. With
    templates the texts are shared texts of conversations. `selection`: what `view_page` takes."""
    _require_text(texts)  # before a model is loaded
    ours = _side("student", student, student_model, student_template)
    sources: list[tuple[str | None, str | None]] = [(None, model) for model in teacher_models]
    sources += [(tokenizer, None) for tokenizer in teachers]
    if len(teachers) == len(teacher_models) == 1:
        sources = [(teachers[0], teacher_models[0])]
    theirs = [_side("teacher", *source, teacher_template) for source in sources or [(None, None)]]
    return view_page(ours, theirs, texts, **selection)


def _side(side: str, tokenizer: str | None, model: str | None, template: Template | None) -> Side:
    if tokenizer is None and model is None:
        raise UsageError(
            f"no {side} was given: expected a tokenizer with --{side} or a model with "
            f"--{side}-model"
        )
    loaded = None if tokenizer is None else load_tokenizer(tokenizer, check=model is not None)
    if model is not None:
        shown = SHOWN if side == "teacher" else 0
        return Side(*model_scorer(model, loaded, template, alternatives=shown), model_name(model))
    assert loaded is not None and tokenizer is not None
    name = model_name(tokenizer) if loaded.name in ("model", "tokenizer") else loaded.name
    return Side(loaded if template is None else template(loaded), name=name)
