"""Is the teacher better than the student? Bits per byte of both on documents of the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vocagnolm.alignment import TextTokenizer
from vocagnolm.base.statistics import bits_per_byte
from vocagnolm.chat import ChatTokenizer
from vocagnolm.data.corpus import Corpus, document_hash
from vocagnolm.data.guidance import TeacherLosses, nats_and_bytes
from vocagnolm.store import LossStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLEARLY_BETTER = 0.97
"""A teacher is clearly better when its bits per byte are below this share of the student's."""

# Arithmetic operations that may be spent, and the least and the most tokens that are read.
_CPU_OPERATIONS = 1e12
_GPU_OPERATIONS = 1e14
_TOKENS = (256, 20_000)
_CANDIDATES = 64


@dataclass(frozen=True)
class Strength:
    """Bits per byte of a teacher and a student on the same documents."""

    teacher: float
    student: float
    documents: int

    def __str__(self) -> str:
        return (
            f"on {self.documents} documents: teacher {self.teacher:.3f}, student "
            f"{self.student:.3f} bits per byte"
        )


def teacher_warning(teacher_bits: float | None, student_bits: float | None) -> str | None:
    """What to tell the user about a teacher whose bits per byte on the corpus are not clearly
    below the student's; None where they are, or where one of the two is not known."""
    if teacher_bits is None or student_bits is None:
        return None
    if teacher_bits <= CLEARLY_BETTER * student_bits:
        return None
    return (
        f"the teacher has {teacher_bits:.3f} bits per byte on its corpus, the student "
        f"{student_bits:.3f}: a teacher that is not clearly better than the student did harm in "
        "our experiments. Compare them on clean text too: on a corpus that is partly wrong, a good "
        "teacher may look weak."
    )


def best_store(stores: Sequence[LossStore]) -> LossStore:
    """The store whose teacher has the fewest bits per byte."""
    known = [store for store in stores if store.bits_per_byte is not None]
    return min(known or stores, key=lambda store: store.bits_per_byte or 0.0)


def measure_strength(
    model: "PreTrainedModel", tokenizer: TextTokenizer, store: LossStore, corpus: Corpus
) -> Strength | None:
    """Compare a student with the teacher of a store; None where no document of the store is in the
    corpus."""
    import torch

    from vocagnolm.model import NllModel

    operations = _GPU_OPERATIONS if model.device.type == "cuda" else _CPU_OPERATIONS
    budget = int(np.clip(operations / (2 * model.num_parameters()), *_TOKENS))
    rows, texts = _sample(tokenizer, store, corpus, budget)
    if not texts:
        return None
    spans = tokenizer.spans_batch(texts)
    config: Any = model.config.get_text_config()
    context = min(1024, getattr(config, "max_position_embeddings", None) or 1024)
    training = model.training
    scorer = NllModel(
        model.eval(),
        context=context,
        stride=max(1, context // 8),
        batch_tokens=context,
        prefix_ids=tokenizer.prefix_ids,
    )
    with torch.inference_mode():
        student = scorer.document_nll([document.ids for document in spans])
    if isinstance(tokenizer, ChatTokenizer):  # a template's own tokens hold no text
        for document, nll in zip(spans, student, strict=True):
            nll[document.token_bytes == 0] = np.nan
    model.train(training)
    return Strength(
        teacher=_bits([store[row] for row in rows]),
        student=_bits([(s.token_bytes, nll) for s, nll in zip(spans, student, strict=True)]),
        documents=len(texts),
    )


def _sample(
    tokenizer: TextTokenizer, store: LossStore, corpus: Corpus, budget: int
) -> tuple[list[int], list[str]]:
    """(rows of the store, texts) of documents evenly spread over it, up to so many student tokens
    and at least one document."""
    rows: list[int] = []
    texts: list[str] = []
    step = max(1, len(store) // _CANDIDATES)
    for row in range(step // 2, len(store), step):
        index = store.document_index(row)
        for document in corpus.read(index, index + 1):
            text = document.text
            if text is None or document_hash(text) != store.document_hash(row):
                continue
            if isinstance(tokenizer, ChatTokenizer) and isinstance(
                tokenizer.outcomes([text])[0], str
            ):
                continue
            tokens = len(tokenizer.spans(text))
            if tokens <= budget or not rows:
                rows.append(row)
                texts.append(text)
                budget -= tokens
        if budget <= 0:
            break
    return rows, texts


def _bits(documents: Sequence[TeacherLosses]) -> float:
    """Bits per byte of documents, given the bytes and the nll of each one's tokens, over the tokens
    that have a loss; 0 where none has."""
    nats, covered = np.sum([nats_and_bytes(*document) for document in documents], axis=0)
    return float(bits_per_byte(nats, covered)) if covered else 0.0
