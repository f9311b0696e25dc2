"""Chat templates: a model's own, one that is given, or plain `role: content`; and where each
message's content lies in a rendering, found without knowing the template.

The conversation is rendered with unique marks in place of its contents; what stands between the
marks is the template's own. With the contents put back it must be the real rendering, character for
character: then every place is known. Where it is not, the template changes contents; they are then
rendered inside a pair of marks, and what survives between, behind or before them is found.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

RENDER_SECONDS = 20.0
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

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        # transformers' own sandbox: a template may come from anywhere. Not through its
        # `render_jinja_template`, in which the day cannot be fixed.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            with time_limit(RENDER_SECONDS):
                text = _compile_jinja_template(self.source).render(
                    messages=[{"role": m.role, "content": m.content} for m in messages],
                    add_generation_prompt=add_generation_prompt,
                    **{"tools": None, "documents": None, "strftime_now": _fixed_date},
                    **dict(self.special_tokens),
                    **dict(self.options),
                )
        except TookTooLong:
            raise TokenizerError(
                f"A chat template ({self.origin}) did not end within {RENDER_SECONDS:g} s for one "
                "conversation. Give another one with chat_template."
            ) from None
        except Exception as error:  # a template may raise anything; it is told in its words
            reason = str(error).strip().splitlines()
            raise TemplateRaised(reason[0] if reason else type(error).__name__) from None
        return str(text)


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
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
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
class Rendering:
    segments: tuple[Segment, ...]
    changes: tuple[str, ...] = ()
    """What the template does to contents, by kind: `strips the assistant's content`."""

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
    real = _render(template, messages, prompt)
    contents = [message.content for message in messages]
    roles = tuple((message.role, message.given) for message in messages)
    frame = _frame(template, roles, prompt)
    found = _put_back(frame, contents, real)
    if found is None and not all(contents):
        empty = tuple(not content for content in contents)
        found = _put_back(_frame(template, roles, prompt, empty), contents, real)
    if found is None:
        found = _inside_marks(template, messages, prompt, frame, real)
    return _in_order(_described(found, messages), messages)


def _render(template: ChatTemplate, messages: Sequence[Message], prompt: bool) -> str:
    try:
        return template.render(messages, add_generation_prompt=prompt)
    except TemplateRaised as error:
        raise Refused(f"template: {error}") from None


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
    lost = "template: it changes contents in a way that cannot be followed"
    try:
        marked = template.render(wrapped, add_generation_prompt=prompt)
    except TemplateRaised:
        raise Refused(lost) from None
    found = _survivors(marked, contents, _neighbours(frame or ()))
    if found is None:
        raise Refused(lost)
    return _stripped(found, real) or _carried_over(found, real)


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
) -> list[Segment] | None:
    """What the template left of each content, by the marks at its two ends. Where only one is left,
    the template's own text around it says where the other end is. None where a content stands in
    its place and is not to be known again."""
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
            if 2 * sum(b - a for a, b, *_ in inside) < len(text[start:stop].strip()):
                return None
            pieces += inside
        elif stop is not None:
            kept = _common_prefix(text[:stop][::-1], content[::-1])
            fits = (k for k in range(kept, -1, -1) if text.endswith(before, 0, stop - k))
            kept = next(fits, kept)
            pieces.append((stop - kept, stop, number, len(content) - kept))
        elif start is not None:
            kept = _common_prefix(text[start:], content)
            fits = (k for k in range(kept, -1, -1) if text.startswith(behind, start + k))
            kept = next(fits, kept)
            pieces.append((start, start + kept, number, 0))
    return _cut(text, pieces)


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
    for low, there, size in _equal_words(text, real):
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
