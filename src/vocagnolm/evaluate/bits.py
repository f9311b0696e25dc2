"""Bits per byte: how well a model predicts a text, whatever its vocabulary is."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from vocagnolm.alignment import TokenSpans
from vocagnolm.alignment.tokenizer import warn_of_missing_beginning
from vocagnolm.base.statistics import bits
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.chat.tokens import TrainOn, trained_ranges, trained_tokens
from vocagnolm.data.corpus import Corpus, Document, LeftOut, left_out_of, open_corpus
from vocagnolm.data.sources import LONGEST_TEXT, Split
from vocagnolm.errors import CorpusError, EvaluationError, TemplateError, TilingError
from vocagnolm.model import ModelFiles, NllModel
from vocagnolm.model.served import SERVER_REQUEST_TOKENS, ServedModel

DEFAULT_CONTEXT = 2048
_TOKENS_AT_A_TIME = 2**20


@dataclass(frozen=True)
class BitsPerByte:
    bits: float
    scored_bytes: int
    documents: int
    left_out: LeftOut
    by_document: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Index in the corpus -> bits, and the bytes that were scored."""
    seconds: float = field(default=0.0, compare=False)
    """Time to read the text, without loading the model."""

    @property
    def skipped_documents(self) -> int:
        return self.left_out.documents

    @property
    def value(self) -> float:
        return self.bits / self.scored_bytes


def bits_per_byte(
    model: PreTrainedModel | ServedModel,
    files: ModelFiles,
    paths: Sequence[str | Path],
    *,
    context: int | None = None,
    batch_tokens: int | None = None,
    text_field: str = "text",
    split: Split = "none",
    parts_field: str | None = None,
    train_on: TrainOn = "all",
    chat_template: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    on_documents: Callable[[int, int], None] | None = None,
) -> BitsPerByte:
    """Bits the model needs for a byte of the documents; of conversations, which it reads in its
    template, for a byte of their contents.

    Long documents go through windows of `context` tokens; every token has at least a quarter of
    a window before it, or all there is. A first token without anything before it (models without
    a beginning-of-text token) counts neither in bits nor in bytes.

    parts_field: a field that says which parts of a document count, as `[[start, stop], ...]` in
        characters; the rest is read and not counted. A token that lies in a part by one byte counts
        whole. Without the field all of a document counts.
    train_on: which messages of conversations count, as in `data.train_on`.
    """
    corpus = open_corpus(list(paths), text_field=text_field, split=split)
    parts = _parts(paths, parts_field)
    tokenizer = files.tokenizer
    if corpus.conversations:
        template = template_of(tokenizer, chat_template, template_options)
        tokenizer = ChatTokenizer(tokenizer, template)
    warn_of_missing_beginning(tokenizer)
    prefix = tokenizer.prefix_ids
    window = min(context or DEFAULT_CONTEXT, files.max_context or DEFAULT_CONTEXT)
    scorer: NllModel | ServedModel
    reading: dict[str, Any] = {"prefix_ids": prefix}
    if isinstance(model, ServedModel):
        window = min(window, model.engine.longest or window)
        reading["batch_tokens"] = batch_tokens or SERVER_REQUEST_TOKENS
    else:
        reading["batch_tokens"] = batch_tokens or (4096 if model.device.type == "cpu" else 32768)
    reading |= {"context": window, "stride": max(1, (window - len(prefix)) // 4)}
    if isinstance(model, ServedModel):
        scorer = model
    else:
        scorer, reading = NllModel(model, **reading), {}
    nats = 0.0
    scored_bytes = documents = 0
    by_document: dict[int, tuple[float, int]] = {}
    lost: list[dict[str, str]] = []
    waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]] = []
    began = time.perf_counter()

    def score() -> None:
        nonlocal nats, scored_bytes
        for nll, (_, sizes, counts, index) in zip(
            scorer.document_nll([ids for ids, *_ in waiting], **reading), waiting, strict=True
        ):
            known = ~np.isnan(nll) & counts
            if corpus.conversations:  # a template's own tokens hold no text
                known &= sizes > 0
            lost_nats, read = float(nll[known].sum(dtype=np.float64)), int(sizes[known].sum())
            by_document[index] = bits(lost_nats), read
            nats += lost_nats
            scored_bytes += read
        waiting.clear()

    for document in corpus:
        spans, problem = None, document.problem
        try:
            if document.text is not None:
                spans = tokenizer.spans(document.text)
        except TilingError as error:
            problem = f"does not tile: {error}"
        except TemplateError as error:
            problem = f"template: {error}"
        if spans is None or len(spans.ids) == 0:
            lost.append({"place": document.place, "reason": problem or "no tokens"})
        else:
            documents += 1
            counts = _counting(spans, document, parts)
            if corpus.conversations and train_on != "all":
                counts &= trained_tokens(spans, trained_ranges(document.text or "", train_on))
            waiting.append((spans.ids, spans.token_bytes, counts, document.index))
        if sum(len(ids) for ids, *_ in waiting) >= _TOKENS_AT_A_TIME:
            score()
        if on_documents is not None:
            on_documents(documents + len(lost) - len(waiting), len(corpus))
    score()
    if on_documents is not None:
        on_documents(len(corpus), len(corpus))
    if scored_bytes == 0:
        raise EvaluationError(
            f"{', '.join(map(str, paths))}: no text that the model could be scored on "
            f"({len(lost)} documents could not be read or tokenised)."
        )
    return BitsPerByte(
        bits(nats),
        scored_bytes,
        documents,
        left_out_of(lost),
        by_document,
        time.perf_counter() - began,
    )


def _parts(paths: Sequence[str | Path], field: str | None) -> Corpus | None:
    """A corpus of the field that says which parts of a document count; None where there is no such
    field."""
    if field is None:
        return None
    try:
        return open_corpus(list(paths), text_field=field, format="text")
    except CorpusError:  # no such field; an unreadable corpus shows when its texts are read
        return None


def _counting(spans: TokenSpans, document: Document, parts: Corpus | None) -> np.ndarray:
    """Mask [N] of the tokens in the parts of the document that count."""
    if parts is None:
        return np.ones(len(spans), bool)
    if document.parts > 1:
        raise EvaluationError(
            f"{document.place}: parts that count cannot be named in a text of more than "
            f"{LONGEST_TEXT:,} bytes, which is split into documents."
        )
    text, wanted = document.text or "", parts.field(document.record)
    try:
        ranges = [(int(start), int(stop)) for start, stop in wanted]
    except (TypeError, ValueError):
        raise EvaluationError(
            f"{document.place}: the field {parts.text_field!r} holds {wanted!r}. It must hold the "
            "parts that count, in characters: [[start, stop], ...]."
        ) from None
    return spans.inside((len(text[:a].encode()), len(text[:b].encode())) for a, b in ranges)
