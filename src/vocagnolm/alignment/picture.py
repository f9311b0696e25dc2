"""Two rows of tokens over one text: as data for a program, as a picture for a terminal."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from vocagnolm.alignment.alignment import Alignment, TokenSpans, align
from vocagnolm.alignment.measures import Shares, shares, token_overlap
from vocagnolm.alignment.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@dataclass(frozen=True)
class AlignedText:
    """One text under two tokenizers."""

    text: str
    student: TextTokenizer
    teacher: TextTokenizer
    student_tokens: TokenSpans
    teacher_tokens: TokenSpans
    alignment: Alignment

    @property
    def shares(self) -> Shares:
        """Of the tokens that stand for text; those that a chat template prints do not."""
        shown = self.student.shown(self.text, self.student_tokens)
        text = np.array([one is None for one in shown], bool) | self.alignment.mapped
        return shares(Alignment(self.alignment.first[text], self.alignment.last[text]))

    def as_json(self) -> dict[str, Any]:
        overlap = token_overlap(
            self.student_tokens.spans, self.teacher_tokens.spans, self.alignment
        )
        counts = self.shares
        return {
            "text": self.text,
            "student": [
                {**token, "first": int(first), "last": int(last)}
                for token, first, last in zip(
                    _rows(self.student, self.student_tokens),
                    self.alignment.first,
                    self.alignment.last,
                    strict=True,
                )
            ],
            "teacher": _rows(self.teacher, self.teacher_tokens),
            "summary": {
                "mapped": counts.mapped,
                "unmapped": counts.unmapped,
                "one_to_one": counts.one_to_one,
                "one_to_many": counts.one_to_many,
                "many_to_one": counts.many_to_one,
                "ios": _number(overlap.mean_ios),
                "iou": _number(overlap.mean_iou),
                "student_lost_bytes": self.student_tokens.lost_bytes,
                "teacher_lost_bytes": self.teacher_tokens.lost_bytes,
            },
        }


def _rows(tokenizer: TextTokenizer, tokens: TokenSpans) -> list[dict[str, Any]]:
    return [
        {"id": index, "token": tokenizer.token(index), "start": start, "end": end}
        for index, (start, end) in zip(tokens.ids.tolist(), tokens.spans.tolist(), strict=True)
    ]


def _number(value: float) -> float | None:
    """JSON has no NaN: null where nothing could be measured."""
    return None if np.isnan(value) else value


def align_text(student: TextTokenizer, teacher: TextTokenizer, text: str) -> AlignedText:
    ours, theirs = student.spans(text), teacher.spans(text)
    return AlignedText(text, student, teacher, ours, theirs, align(ours.spans, theirs.spans))


_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible(piece: bytes) -> str:
    """A token's bytes for the eye: spaces as dots, pieces of a character as hexadecimal digits."""
    shown = piece.decode(errors="backslashreplace").translate(_VISIBLE)
    return "".join(c if unicodedata.category(c)[0] != "C" else f"\\u{ord(c):04x}" for c in shown)


def _cells(pair: AlignedText) -> list[tuple[slice, slice]]:
    """The text cut wherever both tokenizers cut it: (student tokens, teacher tokens) per cell."""
    ours, theirs = pair.student_tokens.spans, pair.teacher_tokens.spans
    cuts = np.intersect1d(ours[:, 1], theirs[:, 1])
    end = max(ours[-1, 1] if len(ours) else 0, theirs[-1, 1] if len(theirs) else 0)
    cuts = np.unique(np.concatenate([[0], cuts, [end]]))
    # a zero-width token stands in the cell that it opens; at the end, in the last one
    our_edges = np.searchsorted(ours[:, 0], cuts, side="left")
    their_edges = np.searchsorted(theirs[:, 0], cuts, side="left")
    our_edges[-1], their_edges[-1] = len(ours), len(theirs)
    return [
        (slice(a, b), slice(c, d))
        for (a, b), (c, d) in zip(pairwise(our_edges), pairwise(their_edges), strict=True)
    ]


def draw(pair: AlignedText, console: "Console | None" = None) -> None:
    """Print the two rows, cell under cell, wrapped to the terminal, and a line of counts."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    encoded = pair.text.encode()
    ours_shown = pair.student.shown(pair.text, pair.student_tokens)
    theirs_shown = pair.teacher.shown(pair.text, pair.teacher_tokens)
    label = max(len("student"), len("teacher")) + 2
    top, bottom, width = _new_row("student", label), _new_row("teacher", label), label
    for ours, theirs in _cells(pair):
        styles = _styles(pair, ours)
        upper = _row_text(pair.student_tokens.spans[ours], encoded, styles, ours_shown[ours])
        count = theirs.stop - theirs.start
        style = "green" if count == ours.stop - ours.start == 1 else "yellow"
        style = "blue" if count == 1 and ours.stop - ours.start > 1 else style
        spans = pair.teacher_tokens.spans[theirs]
        lower = _row_text(spans, encoded, [style] * count, theirs_shown[theirs])
        cell = max(cell_len(upper.plain), cell_len(lower.plain))
        upper.append(" " * (cell - cell_len(upper.plain)))
        lower.append(" " * (cell - cell_len(lower.plain)))
        if width + cell + 1 > console.width and width > label:
            _flush(console, top, bottom)
            top, bottom, width = _new_row("", label), _new_row("", label), label
        top.append("│", "dim").append(upper)
        bottom.append("│", "dim").append(lower)
        width += cell + 1
    _flush(console, top, bottom)
    counts = pair.shares
    console.print(
        Text(
            f"{counts.tokens} student tokens over {len(pair.teacher_tokens)} teacher tokens: "
            f"{counts.one_to_one} one-to-one, {counts.one_to_many} one-to-many, "
            f"{counts.many_to_one} many-to-one, {counts.unmapped} unmapped",
            style="dim",
        )
    )
    for tokenizer, tokens in (
        (pair.student, pair.student_tokens),
        (pair.teacher, pair.teacher_tokens),
    ):
        if tokens.lost_bytes:
            console.print(
                f"{tokenizer.name} covers {tokens.n_bytes - tokens.lost_bytes} of "
                f"{tokens.n_bytes} bytes: a tokenizer that loses text",
                style="yellow",
                markup=False,
            )


def _styles(pair: AlignedText, tokens: slice) -> list[str]:
    first, last = pair.alignment.first[tokens], pair.alignment.last[tokens]
    alone = len(first) == 1
    return [
        "red" if start < 0 else "yellow" if start < end else "green" if alone else "blue"
        for start, end in zip(first.tolist(), last.tolist(), strict=True)
    ]


def _row_text(
    spans: np.ndarray, encoded: bytes, styles: list[str], shown: Sequence[str | None]
) -> "Text":
    from rich.text import Text

    row = Text()
    for i, ((start, end), style, name) in enumerate(
        zip(spans.tolist(), styles, shown, strict=True)
    ):
        if i:
            row.append("╎", "dim")
        if name is not None:  # a chat template's own; the end of a turn keeps its colour
            row.append(visible(name.encode()), style if start < end else "dim")
            continue
        row.append(visible(encoded[start:end]) or "∅", style)
    return row


def _new_row(name: str, width: int) -> "Text":
    from rich.text import Text

    return Text(name.ljust(width), style="dim", no_wrap=True, overflow="ignore")


def _flush(console: "Console", top: "Text", bottom: "Text") -> None:
    for row in (top, bottom):
        row.append("│", "dim")
        console.print(row, crop=False, soft_wrap=True)
    console.print()
