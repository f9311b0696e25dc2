"""Two rows of tokens over one text: as data for a program, as a picture for a terminal."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from vocagnolm.alignment.alignment import Alignment, TokenSpans, align
from vocagnolm.alignment.measures import Shares, shares, token_overlap
from vocagnolm.alignment.tokenizer import TextTokenizer


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
        """How the tokens that stand for text map, without those that a chat template prints."""
        shown = self.student.shown(self.text, self.student_tokens)
        text = np.array([name is None for name in shown], bool) | self.alignment.mapped
        return shares(Alignment(self.alignment.first[text], self.alignment.last[text]))

    def as_json(self) -> dict[str, Any]:
        overlap = token_overlap(
            self.student_tokens.spans, self.teacher_tokens.spans, self.alignment
        )
        counts = self.shares
        kinds = ("mapped", "unmapped", "one_to_one", "one_to_many", "many_to_one")
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
                **{kind: getattr(counts, kind) for kind in kinds},
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
    """The value for JSON, which has no NaN: null where nothing could be measured."""
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


def draw(pair: AlignedText, console: Console | None = None) -> None:
    """Print the two rows, cell under cell, wrapped to the terminal, and a line of counts."""
    console = console or Console()
    sides = ((pair.student, pair.student_tokens), (pair.teacher, pair.teacher_tokens))
    shown = [tokenizer.shown(pair.text, tokens) for tokenizer, tokens in sides]
    label = len("student") + 2
    rows, width = [_new_row("student", label), _new_row("teacher", label)], label
    for cell in _cells(pair):
        ours, theirs = (part.stop - part.start for part in cell)
        below = "green" if ours == theirs == 1 else "blue" if theirs == 1 < ours else "yellow"
        styles = [_styles(pair, cell[0]), [below] * theirs]
        texts = [
            _row_text(tokens.spans[part], pair.text.encode(), style, names[part])
            for (_, tokens), part, style, names in zip(sides, cell, styles, shown, strict=True)
        ]
        widest = max(cell_len(text.plain) for text in texts)
        if width + widest + 1 > console.width and width > label:
            _flush(console, rows)
            rows, width = [_new_row("", label), _new_row("", label)], label
        for row, text in zip(rows, texts, strict=True):
            row.append("│", "dim").append(text).append(" " * (widest - cell_len(text.plain)))
        width += widest + 1
    _flush(console, rows)
    counts = pair.shares
    console.print(
        Text(
            f"{counts.tokens} student tokens over {len(pair.teacher_tokens)} teacher tokens: "
            f"{counts.one_to_one} one-to-one, {counts.one_to_many} one-to-many, "
            f"{counts.many_to_one} many-to-one, {counts.unmapped} unmapped",
            style="dim",
        )
    )
    for tokenizer, tokens in sides:
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
) -> Text:
    parts = []
    for (start, end), style, name in zip(spans.tolist(), styles, shown, strict=True):
        if name is not None:  # a chat template's own; the end of a turn keeps its colour
            parts.append(Text(visible(name.encode()), style if start < end else "dim"))
        else:
            parts.append(Text(visible(encoded[start:end]) or "∅", style))
    return Text("╎", "dim").join(parts)


def _new_row(name: str, width: int) -> Text:
    return Text(name.ljust(width), style="dim", no_wrap=True, overflow="ignore")


def _flush(console: Console, rows: Sequence[Text]) -> None:
    for row in rows:
        console.print(row.append("│", "dim"), crop=False, soft_wrap=True)
    console.print()
