"""Two rows of tokens over one text: as data for a program, as a picture for a terminal or a
notebook."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from vocagnolm.alignment.alignment import Alignment, TokenSpans, align
from vocagnolm.alignment.measures import Shares, shares, token_overlap
from vocagnolm.alignment.tokenizer import TextTokenizer, load_tokenizer
from vocagnolm.errors import optional

__all__ = ["AlignedText", "align_text", "draw"]


@dataclass(frozen=True)
class AlignedText:
    """One text under two tokenizers. A notebook shows it as a picture."""

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

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per student token: its id and text, its bytes `start`
        to `end`, and the teacher tokens `first` to `last` that cover it (-1 if none do), with their
        text."""
        rows = self.as_json()["student"]
        teacher, encoded = self.teacher_tokens.spans, self.text.encode()
        for row in rows:
            row["text"] = encoded[row["start"] : row["end"]].decode(errors="replace")
            start, end = (
                (teacher[row["first"], 0], teacher[row["last"], 1]) if row["first"] >= 0 else (0, 0)
            )
            row["teacher_text"] = encoded[start:end].decode(errors="replace")
        names = ["id", "token", "text", "start", "end", "first", "last", "teacher_text"]
        return optional("pandas", "data", "a data frame").DataFrame(rows, columns=names)

    def _repr_html_(self) -> str:
        return html(self)


def _rows(tokenizer: TextTokenizer, tokens: TokenSpans) -> list[dict[str, Any]]:
    return [
        {"id": index, "token": tokenizer.token(index), "start": start, "end": end}
        for index, (start, end) in zip(tokens.ids.tolist(), tokens.spans.tolist(), strict=True)
    ]


def _number(value: float) -> float | None:
    """The value for JSON, which has no NaN: null where nothing could be measured."""
    return None if np.isnan(value) else value


def align_text(student: Any, teacher: Any, text: str) -> AlignedText:
    """Align one text under two tokenizers, to look at: a notebook shows the result as a picture,
    and `to_pandas` gives it as a table.

        align_text("student/", "teacher/", "Probability, Uncertainty.")

    The tokenizers are what `load_tokenizer` accepts.
    """
    student, teacher = (
        given if isinstance(given, TextTokenizer) else load_tokenizer(given)
        for given in (student, teacher)
    )
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
    encoded = pair.text.encode()
    for cell in _cells(pair):
        styles = [_styles(pair, cell[0]), _below(cell)]
        texts = [
            Text("╎", "dim").join(_texts(tokens.spans[part], encoded, style, names[part]))
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
    console.print(Text(_counts(pair), style="dim"))
    for tokenizer, tokens in sides:
        if tokens.lost_bytes:
            console.print(
                f"{tokenizer.name} covers {tokens.n_bytes - tokens.lost_bytes} of "
                f"{tokens.n_bytes} bytes: a tokenizer that loses text",
                style="yellow",
                markup=False,
            )


def _counts(pair: AlignedText) -> str:
    counts = pair.shares
    return (
        f"{counts.tokens} student tokens over {len(pair.teacher_tokens)} teacher tokens: "
        f"{counts.one_to_one} one-to-one, {counts.one_to_many} one-to-many, "
        f"{counts.many_to_one} many-to-one, {counts.unmapped} unmapped"
    )


_HTML_CELLS = 400
_HTML_COLOURS = {
    "green": "#2ea04355",
    "blue": "#388bfd55",
    "yellow": "#d2992255",
    "red": "#f8514955",
}


def html(pair: AlignedText) -> str:
    """The two rows as HTML that needs no style sheet, in colours that fit light and dark pages: the
    beginning of a long text, and a line of counts."""
    encoded, cells = pair.text.encode(), _cells(pair)
    sides = [
        (tokens.spans, tokenizer.shown(pair.text, tokens))
        for tokenizer, tokens in (
            (pair.student, pair.student_tokens),
            (pair.teacher, pair.teacher_tokens),
        )
    ]
    columns = []
    for cell in cells[:_HTML_CELLS]:
        rows = []
        for (spans, names), part, style in zip(
            sides, cell, (_styles(pair, cell[0]), _below(cell)), strict=True
        ):
            texts = [text.plain for text in _texts(spans[part], encoded, style, names[part])]
            tokens = "".join(
                f'<span style="background:{_HTML_COLOURS[colour]};padding:0 2px;margin:1px">'
                f"{escape(text)}</span>"
                for text, colour in zip(texts, style, strict=True)
            )
            rows.append(f'<div style="white-space:nowrap">{tokens or "&nbsp;"}</div>')
        columns.append(
            f'<div style="display:inline-block;margin:2px 1px;vertical-align:top">{"".join(rows)}'
            "</div>"
        )
    left_out = len(cells) - len(columns)
    more = f"; the picture ends before the last {left_out:,} pieces" if left_out else ""
    return (
        f'<div style="font-family:monospace">{"".join(columns)}</div>'
        f"<small>above {escape(pair.student.name)}, below {escape(pair.teacher.name)}: "
        f"{_counts(pair)}{more}</small>"
    )


def _below(cell: tuple[slice, slice]) -> list[str]:
    """The colours of a cell's teacher tokens."""
    ours, theirs = (part.stop - part.start for part in cell)
    return ["green" if ours == theirs == 1 else "blue" if theirs == 1 < ours else "yellow"] * theirs


def _styles(pair: AlignedText, tokens: slice) -> list[str]:
    first, last = pair.alignment.first[tokens], pair.alignment.last[tokens]
    alone = len(first) == 1
    return [
        "red" if start < 0 else "yellow" if start < end else "green" if alone else "blue"
        for start, end in zip(first.tolist(), last.tolist(), strict=True)
    ]


def _texts(
    spans: np.ndarray, encoded: bytes, styles: list[str], shown: Sequence[str | None]
) -> list[Text]:
    parts = []
    for (start, end), style, name in zip(spans.tolist(), styles, shown, strict=True):
        if name is not None:  # a chat template's own; the end of a turn keeps its colour
            parts.append(Text(visible(name.encode()), style if start < end else "dim"))
        else:
            parts.append(Text(visible(encoded[start:end]) or "∅", style))
    return parts


def _new_row(name: str, width: int) -> Text:
    return Text(name.ljust(width), style="dim", no_wrap=True, overflow="ignore")


def _flush(console: Console, rows: Sequence[Text]) -> None:
    for row in rows:
        console.print(row.append("│", "dim"), crop=False, soft_wrap=True)
    console.print()
