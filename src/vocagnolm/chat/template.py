"""Chat templates: a model's own, one that is given, or plain `role: content`; and where each
message's content lies in a rendering, found without knowing the template.

The conversation is rendered with unique marks in place of its contents; what stands between the
marks is the template's own. With the contents put back it must be the real rendering, character for
character: then every place is known. Where it is not, the template changes contents; they are then
rendered inside a pair of marks, and what survives between, behind or before them is found. A
template that writes something else in place of a content is refused.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alignment.tokenizer import read_template
from vocagnolm.chat.messages import Message, Refused
from vocagnolm.errors import TokenizerError
from vocagnolm.workers import TookTooLong, time_limit

PLAIN = (
    "{{ bos_token if bos_token is defined else '' }}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' and eos_token is defined else '' }}{{ '\\n' }}"
    "{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
)
# Templates may print the day; scores and blocks must not depend on it. The option `date_string`,
# where a template has one, or `date`, says another.
DATE = "26 Jul 2024"

Origin = Literal["own", "given", "plain"]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")

RENDER_SECONDS = 20.0
_MOST_REPEATED, _LARGEST_POWER = 10**6, 10**4


@lru_cache
def _compiled(source: str) -> Any:
    """In transformers' sandbox, which limits `range` alone. The time of a loop is limited by
    `time_limit`, which cannot end a single step: `9 ** 9 ** 9`, `'x' * 10 ** 11`. So these are
    limited in their size."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # of a comment: compiling works out what is constant
    own = hashlib.sha256(source.encode()).hexdigest()
    environment = _compile_jinja_template(f"{{# {own} #}}").environment
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table = {**environment.binop_table, "*": _product, "**": _power}
    return environment.from_string(source)


def _product(left: Any, right: Any) -> Any:
    sizes = [len(one) for one in (left, right) if hasattr(one, "__len__")]
    numbers = [abs(one) for one in (left, right) if isinstance(one, int)]
    if sizes and numbers and sizes[0] * numbers[0] > _MOST_REPEATED:
        raise OverflowError(f"it repeats something {numbers[0]:,} times")
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    if abs(base) > _LARGEST_POWER or abs(exponent) > _LARGEST_POWER:
        raise OverflowError("it computes a power that is too large")
    return base**exponent


"""A template takes milliseconds; one of somebody else may never end."""


class TemplateRaised(ValueError):
    """A template that refuses a conversation; its text is what the template says."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template with all that it is rendered with, but the messages."""

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    """`bos_token`, `eos_token`, ... by name."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further variables of the template, for example `enable_thinking`."""
    origin: Origin = "own"

    @cached_property
    def fingerprint(self) -> str:
        decides = [self.source, dict(self.special_tokens), dict(self.options)]
        return hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)  # options may be lists and mappings

    def describe(self) -> dict[str, Any]:
        """For manifests and cards."""
        return {
            "origin": self.origin,
            "options": dict(self.options),
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template says itself what the assistant writes: `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self.render_marked(messages, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendering, and the characters of it that the template marks by `{% generation %}`."""
        # transformers' own sandbox: a template may come from anywhere. Not through its
        # `render_jinja_template`, in which the day cannot be fixed.
        from transformers.utils.chat_template_utils import _render_with_assistant_indices

        variables = {
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "add_generation_prompt": add_generation_prompt,
            **{"tools": None, "documents": None, "strftime_now": _fixed_date},
            **dict(self.special_tokens),
            **dict(self.options),
        }
        try:
            with time_limit(RENDER_SECONDS):
                compiled = _compiled(self.source)
                if not self.marks_generation:
                    return str(compiled.render(**variables)), []
                text, marked = _render_with_assistant_indices(compiled, **variables)
        except TookTooLong:
            raise TokenizerError(
                f"A chat template ({self.origin}) did not end within {RENDER_SECONDS:g} s for one "
                "conversation. Give another one with chat_template."
            ) from None
        except Exception as error:  # a template may raise anything; it is told in its words
            reason = str(error).strip().splitlines()
            raise TemplateRaised(reason[0] if reason else type(error).__name__) from None
        ranges: list[tuple[int, int]] = []
        for start, stop in marked:
            if ranges and start <= ranges[-1][1]:  # one turn may be marked in several pieces
                start = ranges.pop()[0]
            ranges.append((start, stop))
        return str(text), ranges


def _fixed_date(form: str) -> str:
    return datetime.strptime(DATE, "%d %b %Y").strftime(form)


def template_of(
    tokenizer: TextTokenizer,
    given: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """The template of a model: `given` (a Jinja file, a folder with one, or `plain`), its own, or
    plain where there is none."""
    origin: Origin = "own" if given is None else "given"
    source = tokenizer.frame.template
    if given is not None:
        source = None if given == "plain" else _read_given(given)
    if source is None:
        source, origin = PLAIN, "plain"
    more = tuple(sorted((options or {}).items()))
    return ChatTemplate(source, tokenizer.frame.special_tokens, more, origin)


def _read_given(given: str) -> str:
    path = Path(given)
    if path.is_dir():
        if (source := read_template(path)) is not None:
            return source
        raise TokenizerError(
            f"{path} has no chat template (chat_template.jinja, or a key of tokenizer_config.json)"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"the chat template {given} cannot be read: {error}. Expected a Jinja file, a folder "
            "that has one, or plain"
        ) from None


# ---- renderings ----

# noncharacters: Unicode keeps them out of texts
_OPEN, _SHUT = ("\ufdd0{}\ufdd1", "\ufdd2{}\ufdd3")
_MARKED = re.compile("\ufdd0(\\d+)\ufdd1|\ufdd2(\\d+)\ufdd3")
_UNITS = re.compile(r"<[^<>\s]*>|\w+|\s|.")
_WORDS = re.compile(r"\s|\w+|[^\w\s]")
_LOST = "template: it changes contents in a way that cannot be followed"
_NONCHARACTER = re.compile("[\ufdd0-\ufdd3]")


@dataclass(frozen=True)
class Segment:
    """A piece of a rendering. `message` is None for what is not laid over the shared text: the
    template's own text, or a content in a place where it cannot be (`template` is False)."""

    text: str
    message: int | None = None
    start: int = 0
    """Where the piece begins in the message's content."""
    template: bool = False


@dataclass(frozen=True)
class Turn:
    """Where a message stands in the characters of a rendering."""

    message: int
    start: int
    """Behind the generation prompt: here the model begins to write."""
    end: int
    """The end of the content."""
    stop: int
    """The end of the text that closes the turn; the next message may begin here."""
    next: int
    """The beginning of the next content."""
    marked: tuple[int, int] | None = None
    """What a template that marks generation marks of an assistant's turn, which may be nothing."""


@dataclass(frozen=True)
class Rendering:
    segments: tuple[Segment, ...]
    changes: tuple[str, ...] = ()
    """What the template does to contents, by kind: `strips the assistant's content`."""
    turns: tuple[Turn, ...] = ()

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def render(
    template: ChatTemplate, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> Rendering:
    """The conversation in a template, and where its contents lie; `Refused` where the template
    raises, or changes contents so that they cannot be found. `add_generation_prompt`: up to where
    the assistant's answer begins."""
    prompt = add_generation_prompt
    try:
        real, marked = template.render_marked(messages, add_generation_prompt=prompt)
    except TemplateRaised as error:
        raise Refused(f"template: {error}") from None
    contents = [message.content for message in messages]
    roles = tuple((message.role, message.given) for message in messages)
    frame = _frame(template, roles, prompt)
    found = _put_back(frame, contents, real)
    if found is None and not all(contents):
        empty = tuple(not content for content in contents)
        found = _put_back(_frame(template, roles, prompt, empty), contents, real)
    if found is None:
        found = _inside_marks(template, messages, prompt, frame, real)
    rendering = _in_order(_described(found, messages), messages)
    return replace(rendering, turns=_turns(template, rendering.segments, roles, marked))


@lru_cache(maxsize=512)
def _frame(
    template: ChatTemplate,
    roles: tuple[tuple[str, bool], ...],
    prompt: bool,
    empty: tuple[bool, ...] = (),
) -> tuple[Segment, ...] | None:
    """The template's own text around the contents of messages of these roles, which are left
    blank. None where the template raises because of the marks."""
    blank = [
        Message(role, "" if empty and empty[n] else _OPEN.format(n), given)
        for n, (role, given) in enumerate(roles)
    ]
    try:
        return tuple(_segments(template.render(blank, add_generation_prompt=prompt)))
    except TemplateRaised:
        return None


def _segments(marked: str) -> list[Segment]:
    """The template's own text, and for each mark (the first of its number) an empty segment."""
    found: list[Segment] = []
    seen: set[int] = set()
    end = 0
    for match in _MARKED.finditer(marked):
        found.append(Segment(marked[end : match.start()], template=True))
        number = int(match[1])
        # a copy of a content is text that is not aligned: it is put back all the same
        found.append(Segment("", number, start=-1 if number in seen else 0))
        seen.add(number)
        end = match.end()
    found.append(Segment(marked[end:], template=True))
    return found


def _put_back(
    frame: tuple[Segment, ...] | None, contents: Sequence[str], real: str
) -> tuple[Segment, ...] | None:
    """The contents, whole or without the white space around them, give the real rendering."""
    if frame is None:
        return None
    for kept in (contents, [content.strip() for content in contents]):
        if "".join(s.text if s.message is None else kept[s.message] for s in frame) == real:
            return tuple(_filled(s, contents, kept) for s in frame)
    return None


def _filled(segment: Segment, contents: Sequence[str], kept: Sequence[str]) -> Segment:
    number = segment.message
    if number is None:
        return segment
    if segment.start < 0:
        return Segment(kept[number])
    return Segment(kept[number], number, contents[number].find(kept[number]))


# ---- templates that change contents ----


def _inside_marks(
    template: ChatTemplate,
    messages: Sequence[Message],
    prompt: bool,
    frame: tuple[Segment, ...] | None,
    real: str,
) -> tuple[Segment, ...]:
    contents = [message.content for message in messages]
    for number, content in enumerate(contents):
        if _NONCHARACTER.search(content):
            raise Refused(f"noncharacter: message {number} holds one of U+FDD0 to U+FDD3")
    wrapped = [
        Message(m.role, _OPEN.format(n) + m.content + _SHUT.format(n), m.given)
        for n, m in enumerate(messages)
    ]
    try:
        marked = template.render(wrapped, add_generation_prompt=prompt)
    except TemplateRaised:
        raise Refused(_LOST) from None
    gone = [n for n, text in enumerate(contents) if text.strip() and not _has_mark(marked, n)]
    if gone:  # a content that is dropped decides nothing
        others = [
            Message(m.role, "another text" if n in gone else m.content, m.given)
            for n, m in enumerate(messages)
        ]
        try:
            same = template.render(others, add_generation_prompt=prompt) == real
        except TemplateRaised:
            same = False
        if not same:
            raise Refused(_LOST)
    found = _survivors(marked, contents, _neighbours(frame or ()))
    return _stripped(found, real) or _carried_over(found, real)


def _has_mark(marked: str, number: int) -> bool:
    return _OPEN.format(number) in marked or _SHUT.format(number) in marked


def _neighbours(frame: Sequence[Segment]) -> dict[int, tuple[str, str]]:
    """The template's own text before and behind each content."""
    around = zip(frame, frame[1:], frame[2:], strict=False)
    return {
        segment.message: (before.text, behind.text)
        for before, segment, behind in around
        if segment.message is not None and segment.start == 0
    }


def _survivors(
    marked: str, contents: Sequence[str], neighbours: dict[int, tuple[str, str]]
) -> list[Segment]:
    """What the template left of each content, by the marks at its two ends. Where only one is left,
    the template's own text around it says where the other end is. Refused where something else
    stands in the place of a content."""
    places: dict[tuple[int, bool], int] = {}
    plain: list[str] = []
    length = end = 0
    for match in _MARKED.finditer(marked):
        plain.append(marked[end : match.start()])
        length += len(plain[-1])
        opens = match[1] is not None
        places.setdefault((int(match[1] if opens else match[2]), opens), length)
        end = match.end()
    text = "".join([*plain, marked[end:]])
    pieces: list[tuple[int, int, int, int]] = []  # from, to, message, place in the content
    for number, content in enumerate(contents):
        start, stop = places.get((number, True)), places.get((number, False))
        before, behind = neighbours.get(number, ("", ""))
        if start is not None and stop is not None and start <= stop:
            inside = [
                (start + at, start + at + size, number, place)
                for at, place, size in _equal_words(text[start:stop], content)
            ]
            _require_only(text[start:stop], [(a - start, b - start) for a, b, *_ in inside])
            pieces += inside
        elif stop is not None:
            kept = _common_prefix(text[:stop][::-1], content[::-1])
            fits = (k for k in range(kept, -1, -1) if text.endswith(before, 0, stop - k))
            if (fit := next(fits, None)) is None:
                others = (at for (n, _), at in places.items() if n != number and at <= stop)
                _require_known(text[max(others, default=0) : stop - kept], before, content)
            kept = kept if fit is None else fit
            pieces.append((stop - kept, stop, number, len(content) - kept))
        elif start is not None:
            kept = _common_prefix(text[start:], content)
            fits = (k for k in range(kept, -1, -1) if text.startswith(behind, start + k))
            if (fit := next(fits, None)) is None:
                others = (at for (n, _), at in places.items() if n != number and at >= start)
                rest = text[start + kept : min(others, default=len(text))]
                _require_known(rest, behind, content)
            kept = kept if fit is None else fit
            pieces.append((start, start + kept, number, 0))
    return _cut(text, pieces)


def _require_known(text: str, around: str, content: str) -> None:
    """Refused where a text holds words of neither the template nor the content."""
    known = {*_UNITS.findall(around), *_UNITS.findall(content), *_WORDS.findall(content)}
    if any(unit not in known for unit in _UNITS.findall(text) if unit.strip()):
        raise Refused(_LOST)


def _require_only(text: str, pieces: Sequence[tuple[int, int]]) -> None:
    """Refused where the text holds more than these pieces of it. A template may set the tags that
    it knows, as of reasoning, on lines of their own."""
    for (_, start), (stop, _) in pairwise([(0, 0), *pieces, (len(text), len(text))]):
        before, behind = text[:start].rstrip("\n"), text[stop:].lstrip("\n")
        beside_tag = before.endswith(">") or behind.startswith("<")
        if text[start:stop].strip("\n") or (start < stop and not beside_tag):
            raise Refused(_LOST)


def _equal_words(a: str, b: str) -> list[tuple[int, int, int]]:
    """Pieces that two texts have in common, in order: place in each, and size."""
    if a == b:
        return [(0, 0, len(a))]
    ours, theirs = _WORDS.findall(a), _WORDS.findall(b)
    our_places = list(accumulate(map(len, ours), initial=0))
    their_places = list(accumulate(map(len, theirs), initial=0))
    return [
        (our_places[i], their_places[j], our_places[i + size] - our_places[i])
        for i, j, size in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        if size
    ]


def _cut(text: str, pieces: list[tuple[int, int, int, int]]) -> list[Segment]:
    found: list[Segment] = []
    end = 0
    for start, stop, number, place in sorted(pieces):
        if start < end:  # two contents would share a place
            continue
        found.append(Segment(text[end:start], template=True))
        found.append(Segment(text[start:stop], number, place))
        end = stop
    return [*found, Segment(text[end:], template=True)]


def _stripped(segments: list[Segment], real: str) -> tuple[Segment, ...] | None:
    """The marks keep a template from stripping contents: with the white space that it takes away
    from the real ones, the segments must give the real rendering."""
    found: list[Segment] = []
    at = 0
    for segment, behind in zip(segments, [*segments[1:], Segment("")], strict=True):
        text = segment.text
        if segment.message is None:
            if not real.startswith(text, at):
                return None
            found.append(segment)
            at += len(text)
            continue
        for kept in (text, text.rstrip(), text.lstrip(), text.strip()):
            if real.startswith(kept + behind.text, at):
                break
        else:
            return None
        found.append(Segment(kept, segment.message, segment.start + text.find(kept)))
        at += len(kept)
    return tuple(found) if at == len(real) else None


def _carried_over(segments: list[Segment], real: str) -> tuple[Segment, ...]:
    """The last resort: the rendering with marks and the real one, compared word by word; what is
    equal in both is known."""
    text = "".join(segment.text for segment in segments)
    starts = list(accumulate((len(segment.text) for segment in segments), initial=0))
    pieces: list[tuple[int, int, int, int]] = []
    equal = _equal_words(text, real)
    known = [(there, there + size) for _, there, size in equal]
    if any(
        real[a:b].strip() for (_, a), (b, _) in pairwise([(0, 0), *known, (len(real), len(real))])
    ):
        raise Refused(_LOST)
    for low, there, size in equal:
        for segment, at in zip(segments, starts, strict=False):
            start, stop = max(low, at), min(low + size, at + len(segment.text))
            if segment.message is not None and start < stop:
                place, shift = segment.start + start - at, there - low
                pieces.append((start + shift, stop + shift, segment.message, place))
    return tuple(_cut(real, pieces))


def _common_prefix(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


# ---- what became of the contents ----


def _described(segments: tuple[Segment, ...], messages: Sequence[Message]) -> Rendering:
    changes = []
    for number, message in enumerate(messages):
        pieces = [s for s in segments if s.message == number]
        kept = "".join(piece.text for piece in pieces)
        if kept == message.content and pieces:
            continue
        if not pieces or (message.content.strip() and not kept):
            changes.append(f"drops the {message.role}'s content")
        elif kept == message.content.strip():
            changes.append(f"strips the {message.role}'s content")
        else:
            changes.append(f"leaves out a part of the {message.role}'s content")
    return Rendering(segments, tuple(dict.fromkeys(changes)))


def _in_order(found: Rendering, messages: Sequence[Message]) -> Rendering:
    """Spans run forward: contents that the template moves out of their order are not aligned, as
    few as can be, and the assistant's last of all."""
    places = [n for n, s in enumerate(found.segments) if s.message is not None]
    order = [found.segments[n].message or 0 for n in places]
    if all(a <= b for a, b in pairwise(order)):
        return found
    kept = _heaviest_chain(order, [1000 if messages[m].role == "assistant" else 1 for m in order])
    moved = {places[n] for n in range(len(places)) if n not in kept}
    segments = tuple(
        Segment(segment.text) if n in moved else segment for n, segment in enumerate(found.segments)
    )
    roles = dict.fromkeys(messages[found.segments[n].message or 0].role for n in sorted(moved))
    changes = tuple(f"moves the {role}'s content" for role in roles)
    return Rendering(segments, found.changes + changes)


def _heaviest_chain(order: Sequence[int], weights: Sequence[int]) -> set[int]:
    """Places of the heaviest subsequence that never goes back."""
    best: list[tuple[int, int]] = []  # weight of the chain that ends here, the place before
    for place, number in enumerate(order):
        before = max(((best[p][0], p) for p in range(place) if order[p] <= number), default=(0, -1))
        best.append((before[0] + weights[place], before[1]))
    place = max(range(len(best)), key=lambda p: best[p][0])
    chain = set()
    while place >= 0:
        chain.add(place)
        place = best[place][1]
    return chain


# ---- what the model writes of a turn ----


def _turns(
    template: ChatTemplate,
    segments: Sequence[Segment],
    roles: tuple[tuple[str, bool], ...],
    marked: Sequence[tuple[int, int]],
) -> tuple[Turn, ...]:
    """From the end of the generation prompt through the end of the turn, of every message that is
    in its place. How a prompt and a turn end is seen where the conversation is rendered up to
    there."""
    text = "".join(segment.text for segment in segments)
    places = list(accumulate((len(segment.text) for segment in segments), initial=0))
    # contents from, to, and their messages; -1 for those that are not in their places
    contents: list[tuple[int, int, int]] = []
    for segment, (start, end) in zip(segments, pairwise(places), strict=True):
        if segment.template:
            continue
        number = -1 if segment.message is None else segment.message
        if contents and contents[-1][2] == number >= 0:
            start = contents.pop()[0]
        contents.append((start, end, number))
    found = []
    around = zip([(0, 0, -1), *contents], contents, [*contents[1:], None], strict=False)
    for (_, before, previous), (start, end, number), following in around:
        behind = len(text) if following is None else following[0]
        if number < 0:
            continue
        begin, stop = start, behind
        if roles[number][0] == "assistant":
            begin = before + _prompt_end(
                template, roles[:number], text[before:start], previous == number - 1
            )
        if following is not None:
            closing = _tail(template, roles[: number + 1], False)
            stop = end + _common_units(text[end:behind], closing or "")
        mine = None
        if template.marks_generation and roles[number][0] == "assistant":
            inside = [(a, b) for a, b in marked if a <= end and b >= start]
            mine = (inside[0][0], inside[-1][1]) if inside else (start, start)
        found.append(Turn(number, begin, end, stop, behind, mine))
    return tuple(found)


def _prompt_end(
    template: ChatTemplate, roles: tuple[tuple[str, bool], ...], gap: str, adjoining: bool
) -> int:
    """Where the generation prompt ends in the template's text before an assistant's content."""
    prompt = _tail(template, roles, True)
    if prompt is None:
        return len(gap)
    if gap.startswith(prompt) and adjoining:
        return len(prompt)
    own = prompt.removeprefix(_tail(template, roles, False) or "")
    if own and own in gap:
        return gap.rindex(own) + len(own)
    return (adjoining and _common_units(gap, prompt)) or len(gap)


@lru_cache(maxsize=8192)
def _tail(template: ChatTemplate, roles: tuple[tuple[str, bool], ...], prompt: bool) -> str | None:
    """The template's text behind the last content of such a conversation; None where there is no
    such text to be seen."""
    frame = _frame.__wrapped__(template, roles, prompt)
    if frame is None:
        return None
    last = frame[-2].message if len(frame) > 1 else -1
    return frame[-1].text if last == len(roles) - 1 else None


def _common_units(a: str, b: str) -> int:
    """The characters that two texts begin with, in whole tags and words."""
    size = 0
    for x, y in zip(_UNITS.findall(a), _UNITS.findall(b), strict=False):
        if x != y:
            break
        size += len(x)
    return size
