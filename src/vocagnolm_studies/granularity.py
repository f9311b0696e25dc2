"""The paper's Figure 3: how well chunks of equal length cover each other's text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import (
    Alignment,
    Granularity,
    TextTokenizer,
    TokenSpans,
    align,
    granularity,
    load_tokenizer,
)
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.chat.survey import readable_by
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.materials import student_chat
from vocagnolm.errors import CorpusError, StudyError

if TYPE_CHECKING:
    from vocagnolm.recipe import Recipe
    from vocagnolm_studies.design import GranularityPlan

DEFAULT_CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class GranularityStudy:
    """IoU and IoS by number of chunks; the last point is token-level alignment."""

    student: str
    teacher: str
    sequences: int
    sequence_tokens: int
    points: list[Granularity]

    def as_json(self) -> dict[str, Any]:
        return {
            "student": self.student,
            "teacher": self.teacher,
            "sequences": self.sequences,
            "sequence_tokens": self.sequence_tokens,
            "chunks": [
                {"n": point.n_chunks, "iou": point.iou, "ios": point.ios}
                for point in self.points[:-1]
            ],
            "token_level": {"iou": self.points[-1].iou, "ios": self.points[-1].ios},
        }


def granularity_study(
    student: TextTokenizer,
    teacher: TextTokenizer,
    documents: Sequence[str],
    *,
    n_chunks: Sequence[int] = DEFAULT_CHUNKS,
    sequence_tokens: int = 2048,
    packed: bool = False,
) -> GranularityStudy:
    """Cut the corpus into training sequences and measure chunk pairs in each.

    A sequence is up to `sequence_tokens` student tokens of one document and the teacher tokens
    over the same text. `packed`: sequences run on over the ends of documents, as training blocks
    do, so that short documents do not make short chunks.
    """
    ours, theirs = student.spans_batch(documents), teacher.spans_batch(documents)
    texts = [(o.spans, t.spans) for o, t in zip(ours, theirs, strict=True)]
    if packed:
        texts = [_one_after_another(ours, theirs)]
    sequences = []
    for student_spans, teacher_spans in texts:
        if isinstance(teacher, ChatTokenizer):  # a store holds no tokens of the template
            teacher_spans = teacher_spans[teacher_spans[:, 0] < teacher_spans[:, 1]]
        sequences += _sequences(student_spans, teacher_spans, sequence_tokens)
    if not sequences:
        raise CorpusError(
            "there is no text to study: every document is empty, or refused by a chat template"
        )
    return GranularityStudy(
        student=student.name,
        teacher=teacher.name,
        sequences=len(sequences),
        sequence_tokens=sequence_tokens,
        points=granularity(sequences, n_chunks),
    )


def corpus_granularity(recipe: "Recipe", teacher: str, plan: "GranularityPlan") -> GranularityStudy:
    """The granularity study of a recipe's student, corpus and blocks with a teacher's tokenizer."""
    if recipe.student_tokenizer is None:
        raise StudyError("IoU and IoS need base.student.tokenizer or base.student.model.")
    corpus = open_corpus(
        list(recipe.corpus.files),
        text_field=recipe.corpus.text_field,
        format=recipe.corpus.format,
        split=recipe.corpus.split,
        limit=plan.documents,
    )
    texts = [document.text for document in corpus if document.text is not None]
    ours, theirs = (load_tokenizer(_tokenizer_file(s)) for s in (recipe.student_tokenizer, teacher))
    if corpus.conversations:
        us, them = student_chat(recipe, ours), ChatTokenizer(theirs, template_of(theirs))
        texts, ours, theirs = readable_by([us, them], texts), us, them
    return granularity_study(
        *(ours, theirs, texts),
        n_chunks=plan.chunks,
        sequence_tokens=recipe.data.block_size,
        packed=True,
    )


def _one_after_another(
    ours: Sequence[TokenSpans], theirs: Sequence[TokenSpans]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The spans of all documents over the bytes of all their texts in a row."""
    none = np.zeros((0, 2), np.int64)
    starts = np.cumsum([0, *(document.n_bytes for document in ours)])[:-1]
    student, teacher = (
        np.concatenate([none, *(d.spans + at for d, at in zip(side, starts, strict=True))])
        for side in (ours, theirs)
    )
    return student, teacher


def _sequences(
    ours: NDArray[np.int64], theirs: NDArray[np.int64], sequence_tokens: int
) -> list[tuple[np.ndarray, np.ndarray, Alignment]]:
    result = []
    whole = align(ours, theirs)
    for start in range(0, len(ours), sequence_tokens):
        part = slice(start, start + sequence_tokens)
        first, last = whole.first[part], whole.last[part]
        mapped = first >= 0
        if not mapped.any():
            continue
        origin, end = int(first[mapped][0]), int(last[mapped][-1]) + 1
        alignment = Alignment(
            np.where(mapped, first - origin, -1), np.where(mapped, last - origin, -1)
        )
        result.append((ours[part], theirs[origin:end], alignment))
    return result


def _tokenizer_file(source: str) -> str:
    """A folder's tokenizer.json. A folder is checked against transformers, which brings torch in;
    what trains and scores with it makes that check."""
    file = Path(source) / "tokenizer.json"
    return str(file) if file.is_file() else source
