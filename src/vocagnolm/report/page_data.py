"""What a page shows, as plain data, and the one self-contained HTML file that it becomes.

Tokens are kept in columns (one list per field) because a page may hold 50,000 of them. Token
texts are slices of the document's bytes; bytes that are no UTF-8 on their own (a character split
over two tokens) are kept as lone surrogates U+DC80..U+DCFF, Python's `surrogateescape`, which
survive JSON and which the page shows as hexadecimal bytes.
"""

import base64
import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from vocagnolm.base.files import local_path, write_text

FORMAT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """The tokens of one tokenizer over one text."""

    name: str
    text: list[str]
    """Text of each token, cut to `passage.TOKEN_TEXT_LIMIT` characters."""
    length: list[int]
    """Bytes that each token covers."""
    gap: list[int] | None = None
    """Bytes between a token's start and the end of the one before; None when the row tiles."""
    ids: list[int] | None = None
    nll: list[float | None] | None = None
    """-log p of each token in nats; None where the model gave no score."""
    trained: list[str | None] | None = None
    """Why a token is trained on, in the student's row of a conversation; None where it is not."""


@dataclass(frozen=True, kw_only=True)
class TeacherRow(TokenRow):
    """A teacher's tokens over the same text, and which of them cover each student token."""

    first: list[int]
    """Per student token the first teacher token that covers it; -1: unmapped."""
    last: list[int]
    alternatives: list[list[tuple[str, float, bool]]] | None = None
    """Per teacher token what the teacher expected there: text, probability, and whether it
    is what follows."""
    targets: list[list[tuple[str | None, float] | None]] | None = None
    """Per student token what became of the alternatives there, in their order: the student's
    token (None: the label) and its probability, or None where the bytes already read rule it out;
    none at all where the token has its label alone."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """One text, tokenised by the student and by the teachers, of whom there may be none."""

    title: str
    student: TokenRow
    teachers: list[TeacherRow] = field(default_factory=list)
    guidance: list[float | None] | None = None
    """What the teachers' losses come to on each student token, under the rule."""
    excess: list[float | None] | None = None
    weights: list[float] | None = None
    """What each token counts in the loss: 1 where it is kept and 0 where not, or a grade."""
    breaks: list[int] | None = None
    """Where another document begins: indices of student tokens."""
    sources: list[str] | None = None
    """Each document's source, or what kind of text it is, where the corpus knows."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The rule by which tokens count, as far as the method reads it."""

    method: str = "guided"
    label: str | None = None
    """The method in words."""
    keep: float | None = None
    compare: str | None = None
    weighting: str | None = None
    floor: float | None = None
    chunks: int | None = None
    chunk_choice: str | None = None
    mix: float | None = None
    mix_end: float | None = None
    mix_hold: float | None = None
    mix_by: str | None = None
    alternatives: str | None = None
    """How many of the teacher's a token has, as `AlternativesSpec` writes it."""
    aggregation: str | None = None
    combine: str | None = None
    unmapped: str | None = None
    scope: str | None = None
    guided: bool = True
    """The teacher's losses decide."""
    graded: bool = False
    """Weights are grades, not a choice."""
    threshold: float | None = None
    """Smallest excess among the kept mapped tokens."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """How well two tokenizers fit; shares are fractions."""

    student: str
    teacher: str
    student_vocabulary: int | None = None
    teacher_vocabulary: int | None = None
    overlap_raw: float | None = None
    overlap_marks: float | None = None
    overlap_bytes: float | None = None
    ios: float | None = None
    iou: float | None = None
    one_to_one: float | None = None
    one_to_many: float | None = None
    many_to_one: float | None = None
    unmapped: float | None = None
    student_tokens: int | None = None
    teacher_tokens: int | None = None
    text_bytes: int | None = None
    exact: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Share:
    """How much of one kind of token, of one token or of one kind of text is kept."""

    name: str
    tokens: int
    kept: float
    """The sum of the weights: a number of tokens, unless weights are graded."""
    interval: tuple[float, float] | None = None
    """95 %, of the share that is kept: bootstrap over documents."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of mapped tokens per bin of excess; the outer bins hold everything beyond. A token
    that counts in part is kept in part."""

    edges: list[float]
    kept: list[float]
    dropped: list[float]
    certain: int | None = None
    """Tokens of the bin at zero that both models predict with more than 90 %."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What the selection did, over all passages of the page."""

    tokens: int
    kept: float
    unmapped: int
    kinds: list[Share]
    sources: list[Share]
    most_kept: list[Share]
    most_dropped: list[Share]
    excess: Histogram | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: its loss, recipe and environment."""

    name: str
    method: str | None = None
    setting: str | None = None
    """Equal for the runs that differ in their seed alone."""
    seed: int | None = None
    loss: list[tuple[float, float]] = field(default_factory=list)
    """(step, mean loss over all tokens in nats); of a long run, means of equal bins of steps."""
    steps_per_point: int = 1
    recipe: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A column of the results: a name, its unit and which way is better."""

    name: str
    unit: str = ""
    better: str = "higher"
    digits: int = 2


@dataclass(frozen=True, kw_only=True)
class ResultGroup:
    """One setting: per measure one value for every seed."""

    name: str
    values: list[list[float | None]]
    errors: list[list[float | None]] | None = None
    """Standard errors of the same values over questions, where they are known."""
    intervals: list[tuple[float, float] | None] | None = None
    """95 % intervals of the means; without them the page makes its own from values or errors."""
    about: str | None = None
    """The setting in a few words."""


@dataclass(frozen=True, kw_only=True)
class Results:
    measures: list[Measure]
    groups: list[ResultGroup]
    verdict: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    subtitle: str | None = None
    passages: list[Passage] = field(default_factory=list)
    selection: Selection | None = None
    statistics: Statistics | None = None
    preflight: list[Preflight] = field(default_factory=list)
    results: Results | None = None
    runs: list[Run] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries without their None fields; NaN and infinity as None, because
    JSON has neither."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: plain(item) for name, item in pairs if item is not None}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(page: Page) -> str:
    """The page's data as compact ASCII JSON (so lone surrogates travel as escapes)."""
    content = {"format": FORMAT_VERSION, **plain(page)}
    return json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


# ---- the file ----

# The page may hold any text, so it is built to be inert: the data sit in a JSON block that cannot
# end early, the script only ever sets text content, and a content security policy with hashes lets
# nothing else run and nothing be fetched.

# Order matters: later files use what earlier ones define. They become one script.
SCRIPTS = ("core.js", "tokens.js", "inspector.js", "rows.js", "charts.js", "sections.js", "main.js")


def _resource(name: str) -> str:
    return files("vocagnolm.report").joinpath("page", name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def inert_json(data: str) -> str:
    """JSON that can stand inside a script element: no `<`, `>` or `&` is left to the parser, and
    no line separator that older parsers trip over. All of them can only occur inside strings."""
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def render_page(page: Page) -> str:
    """The page as one HTML document."""
    style = "\n" + _resource("page.css")
    scripts = "\n".join(_resource(name) for name in SCRIPTS)
    script = f'\n"use strict";\n(() => {{\n{scripts}\n}})();\n'
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {_csp_hash(script)}; style-src {_csp_hash(style)}"
    )
    parts = {
        "policy": escape(policy, quote=True),
        "title": escape(page.title),
        "style": style,
        "script": script,
        "data": inert_json(to_json(page)),
    }
    pieces = _resource("page.html").split("@@")
    # template text and slot names alternate; the slots' content is never scanned again
    return "".join(parts[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def write_page(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write the page; the file appears by rename, so a reader never sees half of it."""
    target = local_path(path)
    write_text(target, render_page(page))
    return target
