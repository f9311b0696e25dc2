"""Is the teacher better than the student on this text? Both are measured on a few documents of the
store: seconds, and the one thing that decides whether guidance can help."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from vocagnolm.alignment import TextTokenizer
from vocagnolm.chat import ChatTokenizer
from vocagnolm.data.corpus import Corpus, document_hash
from vocagnolm.model import NllModel
from vocagnolm.store import LossStore

# Arithmetic that may be spent on it, and the tokens that are read at least and at most.
_CPU_OPERATIONS = 1e12
_GPU_OPERATIONS = 1e14
_TOKENS = (256, 20_000)
_CANDIDATES = 64


@dataclass(frozen=True)
class Strength:
    """Bits per byte of the same documents."""

    teacher: float
    student: float
    documents: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "teacher_bits_per_byte": self.teacher,
            "student_bits_per_byte": self.student,
            "documents": self.documents,
        }


def measure_strength(
    model: PreTrainedModel, tokenizer: TextTokenizer, store: LossStore, corpus: Corpus
) -> Strength | None:
    """None where no document of the store is in the corpus."""
    operations = _GPU_OPERATIONS if model.device.type == "cuda" else _CPU_OPERATIONS
    budget = int(np.clip(operations / (2 * model.num_parameters()), *_TOKENS))
    places, texts = _sample(tokenizer, store, corpus, budget)
    if not texts:
        return None
    spans = tokenizer.spans_batch(texts)
    config: Any = model.config.get_text_config()
    context = min(1024, getattr(config, "max_position_embeddings", None) or 1024)
    prefix = tokenizer.prefix_ids
    training = model.training
    scorer = NllModel(
        model.eval(),
        context=context,
        stride=max(1, context // 8),
        batch_tokens=context,
        prefix_ids=prefix,
    )
    with torch.inference_mode():
        student = scorer.document_nll([one.ids for one in spans])
    if isinstance(tokenizer, ChatTokenizer):  # a template's own tokens hold no text
        for one, nll in zip(spans, student, strict=True):
            nll[one.token_bytes == 0] = np.nan
    model.train(training)
    return Strength(
        teacher=_bits([store[place] for place in places]),
        student=_bits([(s.token_bytes, nll) for s, nll in zip(spans, student, strict=True)]),
        documents=len(texts),
    )


def _sample(
    tokenizer: TextTokenizer, store: LossStore, corpus: Corpus, budget: int
) -> tuple[list[int], list[str]]:
    """Documents evenly spread over the store, up to so many student tokens (at least one)."""
    places: list[int] = []
    texts: list[str] = []
    step = max(1, len(store) // _CANDIDATES)
    for place in range(step // 2, len(store), step):
        index = store.document_index(place)
        for document in corpus.read(index, index + 1):
            text = document.text
            if text is None or document_hash(text) != store.document_hash(place):
                continue
            if isinstance(tokenizer, ChatTokenizer) and isinstance(
                tokenizer.outcomes([text])[0], str
            ):
                continue
            tokens = len(tokenizer.spans(text))
            if tokens <= budget or not places:
                places.append(place)
                texts.append(text)
                budget -= tokens
        if budget <= 0:
            break
    return places, texts


def _bits(documents: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Bits over bytes of the tokens that have a loss."""
    nats = covered = 0.0
    for token_bytes, nll in documents:
        known = np.isfinite(nll)
        nats += float(nll[known].sum(dtype=np.float64))
        covered += float(np.asarray(token_bytes)[known].sum())
    return nats / math.log(2) / max(covered, 1.0)
