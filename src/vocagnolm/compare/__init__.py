"""The preflight: what to expect of a student and a teacher before anything is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vocagnolm.alignment import (
    Alignment,
    TextTokenizer,
    TokenSpans,
    VocabularyOverlap,
    align_batch,
    shares,
    token_overlap,
    vocabulary_overlap,
)
from vocagnolm.compare.sample import SAMPLE, STRESS
from vocagnolm.errors import CorpusError

__all__ = ["SAMPLE", "STRESS", "Pair", "WideToken", "compare"]


@dataclass(frozen=True)
class WideToken:
    """A student token that needs many teacher tokens."""

    token: str
    text: str
    teacher_tokens: list[str]


@dataclass(frozen=True)
class Pair:
    """A student and one teacher, measured on the same documents."""

    student: TextTokenizer
    teacher: TextTokenizer
    overlap: VocabularyOverlap
    exact: bool
    """Both tokenizers tile every document and every stress text."""
    student_lost_bytes: int
    teacher_lost_bytes: int
    unmapped_share: float
    one_to_one_share: float
    one_to_many_share: float
    many_to_one_share: float
    ios: float
    student_tokens_per_byte: float
    teacher_tokens_per_byte: float
    widest: list[WideToken]

    def as_json(self) -> dict[str, Any]:
        return {
            "teacher": self.teacher.name,
            "vocabulary": self.teacher.vocabulary_size,
            "kind": self.teacher.kind,
            "overlap": {
                "raw": self.overlap.raw,
                "marks": self.overlap.marks,
                "bytes": self.overlap.bytes,
            },
            "tiling": "exact" if self.exact else "lossy",
            "lost_bytes": {"student": self.student_lost_bytes, "teacher": self.teacher_lost_bytes},
            "unmapped_share": self.unmapped_share,
            "one_to_one_share": self.one_to_one_share,
            "one_to_many_share": self.one_to_many_share,
            "many_to_one_share": self.many_to_one_share,
            "ios": self.ios,
            "tokens_per_byte": self.teacher_tokens_per_byte,
            "widest": [
                {"token": w.token, "text": w.text, "teacher_tokens": w.teacher_tokens}
                for w in self.widest
            ],
            "verdict": self.verdict,
        }

    @property
    def verdict(self) -> str:
        if not self.exact:
            side = self.student if self.student_lost_bytes else self.teacher
            return (
                f"lossy: {side.name} ({side.kind}) drops text, so some tokens have no counterpart; "
                "documents that do not tile are skipped when scoring"
            )
        if self.student.fingerprint == self.teacher.fingerprint:
            return "ready: the same tokenizer, every token maps to itself"
        return "ready: every student token with text is fully covered"


def compare(
    student: TextTokenizer,
    teachers: Sequence[TextTokenizer],
    documents: Sequence[str] = SAMPLE,
    *,
    n_widest: int = 3,
) -> list[Pair]:
    """Measure the student against each teacher on the documents."""
    documents = [text for text in documents if text]
    if not documents:
        raise CorpusError("there is no text to compare on: every document is empty")
    ours = student.spans_batch(documents)
    ours_stress = student.spans_batch(STRESS)
    return [_pair(student, teacher, documents, ours, ours_stress, n_widest) for teacher in teachers]


def _pair(
    student: TextTokenizer,
    teacher: TextTokenizer,
    documents: Sequence[str],
    ours: list[TokenSpans],
    ours_stress: list[TokenSpans],
    n_widest: int,
) -> Pair:
    theirs = teacher.spans_batch(documents)
    theirs_stress = teacher.spans_batch(STRESS)
    alignments = align_batch([d.spans for d in ours], [d.spans for d in theirs])
    counts = [shares(alignment) for alignment in alignments]
    n_tokens = max(sum(count.tokens for count in counts), 1)
    n_bytes = sum(d.n_bytes for d in ours)
    ios = np.concatenate(
        [
            token_overlap(o.spans, t.spans, alignment).ios
            for o, t, alignment in zip(ours, theirs, alignments, strict=True)
        ]
    )
    student_lost = sum(d.lost_bytes for d in [*ours, *ours_stress])
    teacher_lost = sum(d.lost_bytes for d in [*theirs, *theirs_stress])
    return Pair(
        student=student,
        teacher=teacher,
        overlap=vocabulary_overlap(student, teacher),
        exact=student_lost == teacher_lost == 0,
        student_lost_bytes=student_lost,
        teacher_lost_bytes=teacher_lost,
        unmapped_share=sum(count.unmapped for count in counts) / n_tokens,
        one_to_one_share=sum(count.one_to_one for count in counts) / n_tokens,
        one_to_many_share=sum(count.one_to_many for count in counts) / n_tokens,
        many_to_one_share=sum(count.many_to_one for count in counts) / n_tokens,
        ios=float(np.nanmean(ios)) if len(ios) else float("nan"),
        student_tokens_per_byte=n_tokens / n_bytes,
        teacher_tokens_per_byte=sum(len(d) for d in theirs) / n_bytes,
        widest=_widest(student, teacher, documents, ours, theirs, alignments, n_widest),
    )


def _widest(
    student: TextTokenizer,
    teacher: TextTokenizer,
    documents: Sequence[str],
    ours: list[TokenSpans],
    theirs: list[TokenSpans],
    alignments: list[Alignment],
    n_widest: int,
) -> list[WideToken]:
    found: dict[int, tuple[int, WideToken]] = {}  # student id -> its widest place
    for text, own, other, alignment in zip(documents, ours, theirs, alignments, strict=True):
        widths = np.where(alignment.mapped, alignment.last - alignment.first + 1, 0)
        encoded = text.encode()
        for i in np.argsort(-widths, kind="stable")[: 4 * n_widest].tolist():
            index, width = int(own.ids[i]), int(widths[i])
            if width < 2 or found.get(index, (0,))[0] >= width:
                continue
            start, end = own.spans[i]
            covering = other.ids[alignment.first[i] : alignment.last[i] + 1].tolist()
            found[index] = (
                width,
                WideToken(
                    token=student.token(index),
                    text=encoded[start:end].decode(errors="backslashreplace"),
                    teacher_tokens=[teacher.token(t) for t in covering],
                ),
            )
    return [wide for _, wide in sorted(found.values(), key=lambda entry: -entry[0])[:n_widest]]
