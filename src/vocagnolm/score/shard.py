"""Shard i of a store is a pure function of the corpus, the teacher, the settings and i.

Nothing here knows of files, ranks or machines: who computes which shard, and when, is decided
elsewhere and cannot change a byte.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vocagnolm.alternatives import NOTHING
from vocagnolm.data.corpus import Corpus, Document, document_hash
from vocagnolm.errors import ScoreError
from vocagnolm.model.nll import TokenScores
from vocagnolm.score.settings import ScoreSettings
from vocagnolm.score.teacher import Teacher, TokenizedDocument
from vocagnolm.store.format import HASH_BYTES, Shard, narrowest_unsigned, to_float16


@dataclass(frozen=True)
class PreparedShard:
    """A shard's documents, tokenised: the part of the work that needs no model."""

    number: int
    first_document: int
    document_span: int
    documents: list[Document]
    tokenized: list[TokenizedDocument]
    skipped: list[dict[str, Any]]

    @property
    def tokens(self) -> int:
        return sum(len(t.ids) for t in self.tokenized)


def score_shard(corpus: Corpus, teacher: Teacher, settings: ScoreSettings, number: int) -> Shard:
    prepared = prepare_shard(corpus, teacher, settings, number)
    return finished_shard(prepared, started(teacher, prepared)(), settings)


def started(
    teacher: Teacher, prepared: PreparedShard, on_tokens: Callable[[int], None] | None = None
) -> Callable[[], Sequence[TokenScores | np.ndarray]]:
    """What waits for the numbers of a shard, which are on their way where the teacher can do
    that."""
    start = getattr(teacher, "start", None)
    if start is None:
        scores = teacher.nll(prepared.tokenized, on_tokens)
        return lambda: scores
    waiting: Callable[[], Sequence[TokenScores | np.ndarray]]
    waiting = start(prepared.tokenized, on_tokens)
    return waiting


def prepare_shard(
    corpus: Corpus, teacher: Teacher, settings: ScoreSettings, number: int
) -> PreparedShard:
    first = number * settings.shard_documents
    found = list(corpus.read(first, first + settings.shard_documents))
    texts = [document.text for document in found if document.text is not None]
    outcomes = iter(teacher.tokenize(texts))
    documents, tokenized, skipped = [], [], []
    for document in found:
        outcome = document.problem if document.text is None else next(outcomes)
        if isinstance(outcome, TokenizedDocument):
            documents.append(document)
            tokenized.append(outcome)
            continue
        if settings.strict:
            raise ScoreError(
                f"{document.place} (document {document.index}) cannot be scored: {outcome}. "
                "Mend it, or run without --strict to skip and count such documents."
            )
        skipped.append(
            {"document": document.index, "place": document.place, "reason": outcome or "unknown"}
        )
    return PreparedShard(number, first, len(found), documents, tokenized, skipped)


def finished_shard(
    prepared: PreparedShard,
    given: Sequence[TokenScores | np.ndarray],
    settings: ScoreSettings,
) -> Shard:
    """`given`: per document its scores, or its losses alone."""
    scores = [TokenScores(one) if isinstance(one, np.ndarray) else one for one in given]
    assert [len(one.nll) for one in scores] == [len(t.ids) for t in prepared.tokenized]
    nonfinite = _mask_nonfinite(scores, prepared, settings.max_nonfinite_share)
    hashes = b"".join(document_hash(d.text) for d in prepared.documents if d.text is not None)
    empty = np.zeros(0)
    stored = [t.stored(one) for t, one in zip(prepared.tokenized, scores, strict=True)]
    token_bytes = np.concatenate([empty, *(lengths for lengths, _ in stored)])
    kept, alternatives = settings.kept_alternatives, None
    if kept is not None:
        none = np.zeros((0, kept.count), "<u4")
        alternatives = np.concatenate([none, *(_alternatives(one) for _, one in stored)])
    return Shard(
        number=prepared.number,
        first_document=prepared.first_document,
        document_span=prepared.document_span,
        document_hash=np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES),
        document_index=np.array([d.index for d in prepared.documents], "<u8"),
        token_count=np.array([len(lengths) for lengths, _ in stored], "<u4"),
        token_bytes=narrowest_unsigned(token_bytes),
        nll=to_float16(np.concatenate([empty, *(one.nll for _, one in stored)])),
        skipped=prepared.skipped,
        nonfinite=nonfinite,
        alternatives=alternatives,
    )


def _alternatives(scores: TokenScores) -> np.ndarray:
    if scores.alternatives is None:
        raise ScoreError("--alternatives: this teacher gives losses alone. Leave it out.")
    return scores.alternatives


def _mask_nonfinite(scores: list[TokenScores], prepared: PreparedShard, most: float) -> int:
    """Make infinities NaN, in place, and count what the teacher should have known. A first token
    without context is NaN by right."""
    bad_places = []
    total = 0
    for one, document in zip(scores, prepared.documents, strict=True):
        values = one.nll
        bad = ~np.isfinite(values)
        values[bad] = np.nan
        if one.alternatives is not None:
            one.alternatives[bad] = NOTHING
        total += int(bad[1:].sum())
        if bad[1:].any():
            bad_places.append(document.place)
    tokens = prepared.tokens
    if total > most * tokens:
        raise ScoreError(
            f"the teacher gave NaN or infinity for {total:,} of {tokens:,} tokens of shard "
            f"{prepared.number} (first in {bad_places[0]}), more than the allowed "
            f"{most:.2%}. Use --dtype bfloat16 or float32 where it was float16, or check the "
            "teacher's weights."
        )
    return total
