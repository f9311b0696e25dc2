"""A student and its teachers over some text, before anything is trained: how their tokens lie over
each other, in numbers (`compare`) and in figures, which need the extra `plots`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import (
    Alignment,
    Speller,
    TextTokenizer,
    TokenSpans,
    VocabularyOverlap,
    align_batch,
    shares,
    token_overlap,
    token_texts,
    vocabulary_overlap,
)
from vocagnolm.alignment.picture import visible
from vocagnolm.base.plots import COLOURS, INK, LINE, SOFT, new_figure, save_figure
from vocagnolm.chat import ChatTokenizer
from vocagnolm.errors import CorpusError

__all__ = [
    "SAMPLE",
    "STRESS",
    "Pair",
    "WideToken",
    "compare",
    "measure_fit",
    "overlap_bars",
    "tokenisation_rows",
]


_SAMPLE = files("vocagnolm").joinpath("sample.txt").read_bytes().decode()
SAMPLE: tuple[str, ...] = tuple(_SAMPLE.split("---- 8< ----\n"))
"""Text of the kinds that a mathematical web corpus is made of."""

# Texts on which tokenizers part ways with their own input. They decide `exact` or `lossy`; they
# are no part of the measured shares.
STRESS: tuple[str, ...] = (
    " leading and trailing ",
    "runs   of    spaces\t\ttabs\r\nand lines\n\n\n",
    # decomposed, Hangul jamo, excluded, Ångström sign
    "e\u0301 A\u030a \u1112\u1161\u11ab \u0958 \u212b",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1f0 "
    "\u2581literal \u2581\u2581 <0x0A> </s> <|endoftext|>",
    "\ufeffbyte order mark, NUL \x00, bell \x07",
)


_KINDS = ("unmapped", "one_to_one", "one_to_many", "many_to_one")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well two tokenizations fit. Shares are of the student's tokens; the overlaps are means
    over its mapped ones, None where there is none."""

    student_tokens: int
    teacher_tokens: int
    one_to_one: float
    one_to_many: float
    many_to_one: float
    unmapped: float
    ios: float | None
    iou: float | None


def measure_fit(
    ours: Sequence[NDArray[np.int64]],
    theirs: Sequence[NDArray[np.int64]],
    alignments: Sequence[Alignment],
) -> Fit:
    """How well two tokenizations of the same texts fit, from their spans and alignments."""
    counts = [shares(alignment) for alignment in alignments]
    covers = [token_overlap(*pair) for pair in zip(ours, theirs, alignments, strict=True)]
    tokens = max(sum(count.tokens for count in counts), 1)
    return Fit(
        student_tokens=sum(map(len, ours)),
        teacher_tokens=sum(map(len, theirs)),
        **{kind: sum(getattr(count, kind) for count in counts) / tokens for kind in _KINDS},
        ios=_mean([cover.ios for cover in covers]),
        iou=_mean([cover.iou for cover in covers]),
    )


def _mean(parts: Sequence[NDArray[np.float64]]) -> float | None:
    values = np.concatenate([*parts, np.zeros(0)])
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


@dataclass(frozen=True)
class WideToken:
    """A student token that needs many teacher tokens."""

    token: str
    text: str
    teacher_tokens: list[str]


@dataclass(frozen=True)
class SpelledShares:
    """What a teacher's tokens are for the student, each as often as the teacher reads it in these
    texts: what distillation may expect of its alternatives."""

    exact: float
    """One token of the student's."""
    several: float
    """Several, of which the first would be the target."""
    unspelled: float
    """None: the first token depends on what follows, or the student cannot represent the text."""


@dataclass(frozen=True)
class Pair:
    """A student and one teacher, measured on the same documents."""

    student: TextTokenizer
    teacher: TextTokenizer
    overlap: VocabularyOverlap
    exact: bool
    """Whether both tokenizers tile every document and every stress text."""
    student_lost_bytes: int
    teacher_lost_bytes: int
    unmapped_share: float
    one_to_one_share: float
    one_to_many_share: float
    many_to_one_share: float
    ios: float
    student_tokens_per_byte: float
    teacher_tokens_per_byte: float
    shared_start_share: float
    """Share of student tokens that begin where a teacher token begins, so that its alternatives
    apply."""
    spelled: SpelledShares
    widest: list[WideToken]

    def as_json(self) -> dict[str, Any]:
        return {
            "teacher": self.teacher.name,
            "vocabulary": self.teacher.vocabulary_size,
            "kind": self.teacher.kind,
            "overlap": {name: getattr(self.overlap, name) for name in ("raw", "marks", "bytes")},
            "tiling": "exact" if self.exact else "lossy",
            "lost_bytes": {"student": self.student_lost_bytes, "teacher": self.teacher_lost_bytes},
            **{f"{kind}_share": getattr(self, f"{kind}_share") for kind in _KINDS},
            "ios": self.ios,
            "tokens_per_byte": self.teacher_tokens_per_byte,
            "shared_start_share": self.shared_start_share,
            "spelled": asdict(self.spelled),
            "widest": [asdict(wide) for wide in self.widest],
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
    """Compare the student's tokenizer with each teacher's on the documents: texts, or, with
    `ChatTokenizer`s, shared texts of conversations."""
    documents = [text for text in documents if text]
    if not documents:
        raise CorpusError("there is no text to compare on: every document is empty")
    ours = _read(student, documents)
    ours_stress = plain_tokenizer(student).spans_batch(STRESS)
    n_bytes = sum(d.n_bytes for d in ours)
    student_lost = sum(d.lost_bytes for d in [*ours, *ours_stress])
    pairs = []
    for teacher in teachers:
        theirs = _read(teacher, documents)
        theirs_stress = plain_tokenizer(teacher).spans_batch(STRESS)
        spans = [d.spans for d in ours], [d.spans for d in theirs]
        alignments = align_batch(*spans)
        fit = measure_fit(*spans, alignments)
        teacher_lost = sum(d.lost_bytes for d in [*theirs, *theirs_stress])
        pairs.append(
            Pair(
                student=student,
                teacher=teacher,
                overlap=vocabulary_overlap(plain_tokenizer(student), plain_tokenizer(teacher)),
                exact=student_lost == teacher_lost == 0,
                student_lost_bytes=student_lost,
                teacher_lost_bytes=teacher_lost,
                **{f"{kind}_share": getattr(fit, kind) for kind in _KINDS},
                ios=float("nan") if fit.ios is None else fit.ios,
                student_tokens_per_byte=max(fit.student_tokens, 1) / n_bytes,
                teacher_tokens_per_byte=fit.teacher_tokens / n_bytes,
                shared_start_share=_shared_starts(ours, theirs, alignments),
                spelled=_spelled(plain_tokenizer(student), plain_tokenizer(teacher), theirs),
                widest=_widest(student, teacher, documents, ours, theirs, alignments, n_widest),
            )
        )
    return pairs


def plain_tokenizer(tokenizer: TextTokenizer) -> TextTokenizer:
    """The tokenizer behind a chat template, or itself."""
    return tokenizer.base if isinstance(tokenizer, ChatTokenizer) else tokenizer


def _read(tokenizer: TextTokenizer, documents: Sequence[str]) -> list[TokenSpans]:
    """Tokens of every document. Conversations keep the tokens of contents and ends of turns, and no
    bytes count as lost: what the template leaves out is no fault of the tokenizer."""
    readings = tokenizer.spans_batch(documents)
    if not isinstance(tokenizer, ChatTokenizer):
        return readings
    held = [reading.token_bytes > 0 for reading in readings]
    return [
        TokenSpans(reading.ids[here], reading.spans[here], reading.n_bytes, lost_bytes=0)
        for reading, here in zip(readings, held, strict=True)
    ]


def _shared_starts(
    ours: list[TokenSpans], theirs: list[TokenSpans], alignments: list[Alignment]
) -> float:
    shared = tokens = 0
    for own, other, alignment in zip(ours, theirs, alignments, strict=True):
        mapped = alignment.mapped
        starts = other.spans[alignment.first[mapped], 0]
        shared += int((starts == own.spans[mapped, 0]).sum())
        tokens += len(own)
    return shared / max(tokens, 1)


def _spelled(
    student: TextTokenizer, teacher: TextTokenizer, theirs: list[TokenSpans]
) -> SpelledShares:
    ids, counts = np.unique(np.concatenate([tokens.ids for tokens in theirs]), return_counts=True)
    control = teacher.control_ids
    texts = [b"" if n in control else teacher.bytes_of(n) or b"" for n in ids.tolist()]
    held = np.array([bool(text) for text in texts])
    first, exact = Speller(student, token_texts(teacher, ())).first([t for t in texts if t])
    shares = counts[held] / max(int(counts[held].sum()), 1)
    return SpelledShares(
        exact=float(shares[exact].sum()),
        several=float(shares[(first >= 0) & ~exact].sum()),
        unspelled=float(shares[first < 0].sum()),
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
    widest: dict[int, tuple[int, WideToken]] = {}  # by student id
    for text, own, other, alignment in zip(documents, ours, theirs, alignments, strict=True):
        widths = np.where(alignment.mapped, alignment.last - alignment.first + 1, 0)
        encoded = text.encode()
        for i in np.argsort(-widths, kind="stable")[: 4 * n_widest].tolist():
            index, width = int(own.ids[i]), int(widths[i])
            if width < 2 or widest.get(index, (0,))[0] >= width:
                continue
            start, end = own.spans[i]
            covering = other.ids[alignment.first[i] : alignment.last[i] + 1].tolist()
            widest[index] = (
                width,
                WideToken(
                    token=student.token(index),
                    text=encoded[start:end].decode(errors="backslashreplace"),
                    teacher_tokens=[teacher.token(t) for t in covering],
                ),
            )
    return [wide for _, wide in sorted(widest.values(), key=lambda entry: -entry[0])[:n_widest]]


# ---- figures ----


def overlap_bars(
    student: TextTokenizer, teachers: Sequence[TextTokenizer], path: str | Path
) -> Path:
    """Figure 1: the share of each teacher's vocabulary that the student has too, by raw strings
    (the paper's definition) and by bytes."""
    title = f"Vocabulary shared with {student.name} ({student.vocabulary_size:,} tokens)"
    room_for_title = 1.0 + 0.085 * len(title)
    matplotlib, figure, axes = new_figure(max(1.6 + 1.15 * len(teachers), room_for_title), 3.4)
    overlaps = [vocabulary_overlap(student, teacher) for teacher in teachers]
    raw, by_bytes = zip(*((overlap.raw, overlap.bytes) for overlap in overlaps), strict=True)
    for at, (label, values) in enumerate((("equal strings", raw), ("equal bytes", by_bytes))):
        centres = [group + (at - 0.5) * 0.38 for group in range(len(teachers))]
        bars = axes.bar(centres, [100 * v for v in values], 0.34, color=COLOURS[at], label=label)
        axes.bar_label(bars, [_percent(v) for v in values], padding=2, fontsize=8, color=INK)
    axes.set_xticks(
        range(len(teachers)), [f"{t.name}\n{t.vocabulary_size:,}" for t in teachers], color=INK
    )
    axes.set_ylim(0, 112)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_ylabel("shared with the student, %", color=SOFT)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return save_figure(matplotlib, figure, path)


def _percent(share: float) -> str:
    # 99.95 % must not read as 100
    return f"{share:.2%}" if 0.99 < share < 1 else f"{share:.1%}"


def tokenisation_rows(tokenizers: Sequence[TextTokenizer], text: str, path: str | Path) -> Path:
    """Figure 2: the tokens of several tokenizers for one text, in rows over the same bytes."""
    encoded = text.encode()
    width = min(max(3.0 + 0.14 * len(encoded), 5.0), 24.0)
    matplotlib, figure, axes = new_figure(width, 0.8 + 0.55 * len(tokenizers))
    for row, tokenizer in enumerate(tokenizers):
        tokens = tokenizer.spans(text)
        for at, (start, end) in enumerate(tokens.spans.tolist()):
            if start == end:
                continue
            axes.add_patch(
                matplotlib.patches.FancyBboxPatch(
                    (start + 0.06, -row - 0.32),
                    max(end - start - 0.12, 0.1),
                    0.64,
                    boxstyle="round,pad=0,rounding_size=0.12",
                    facecolor=("#e3eff8", "#fdeeda")[at % 2],
                    edgecolor=LINE,
                    linewidth=0.7,
                )
            )
            axes.text(
                (start + end) / 2,
                -row,
                visible(encoded[start:end]),
                ha="center",
                va="center",
                family="monospace",
                fontsize=9,
                color=INK,
                parse_math=False,
            )
        name = f"{tokenizer.name}  ({len(tokens)})"
        axes.text(-0.6, -row, name, ha="right", va="center", fontsize=9, color=SOFT)
    axes.set_xlim(0, max(len(encoded), 1))
    axes.set_ylim(-len(tokenizers) + 0.4, 0.6)
    axes.set_axis_off()
    return save_figure(matplotlib, figure, path)
