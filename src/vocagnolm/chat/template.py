"""Chat templates: a model's own, one that is given, or plain `role: content`; and where each
message's content lies in a rendering, found without knowing the template.

The conversation is rendered with unique marks in place of its contents, its reasoning and the words
of its tool calls; what stands between the marks is the template's own. With the contents put back
it must be the real rendering, character for character: then every position is known. Where it is
not, the template changes contents; they are then rendered inside a pair of marks, and what survives
between, behind or before them is found. A template that replaces a content is refused.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from itertools import accumulate, count, groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alignment.tokenizer import read_template
from vocagnolm.base.children import TookTooLong, time_limit
from vocagnolm.chat.messages import REASONING_FIELDS, Message, Refused, as_json
from vocagnolm.errors import TokenizerError

PLAIN = (
    "{{ bos_token if bos_token is defined else '' }}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' and eos_token is defined else '' }}{{ '\\n' }}"
    "{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
)
CONCATENATE = (
    "{% if messages | map(attribute='role') | list not in (['user'], ['user', 'assistant']) %}"
    "{{ raise_exception('concatenate is for a prompt and a completion that are two texts') }}"
    "{% endif %}{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)
# Templates may print the day; scores and blocks must not depend on it. The option `date_string`,
# where a template has one, or `date`, says another.
DATE = "26 Jul 2024"

Origin = Literal["own", "given", "plain"]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")

RENDER_SECONDS = 20.0
"""A template takes milliseconds; one of somebody else may never end."""
_MOST_REPEATED, _LARGEST_POWER = 10**6, 10**4


@lru_cache
def _compiled(source: str) -> Any:
    """The template, compiled in transformers' sandbox, which limits `range` alone. `time_limit`
    limits the time of loops but cannot end a single step (`9 ** 9 ** 9`, `'x' * 10 ** 11`), so
    these are limited in size here."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # of a comment: compiling works out what is constant
    own = hashlib.sha256(source.encode()).hexdigest()
    environment = _compile_jinja_template(f"{{# {own} #}}").environment
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table = {**environment.binop_table, "*": _product, "**": _power}
    return environment.from_string(source)


def _product(left: Any, right: Any) -> Any:
    sizes = [len(factor) for factor in (left, right) if hasattr(factor, "__len__")]
    numbers = [abs(factor) for factor in (left, right) if isinstance(factor, int)]
    if sizes and numbers and sizes[0] * numbers[0] > _MOST_REPEATED:
        raise OverflowError(f"it repeats something {numbers[0]:,} times")
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    if abs(base) > _LARGEST_POWER or abs(exponent) > _LARGEST_POWER:
        raise OverflowError("it computes a power that is too large")
    return base**exponent


class TemplateRaised(ValueError):
    """A template refused a conversation; the text is what the template says."""


class _Form(NamedTuple):
    """The form of messages that a template reads, in what differs between templates."""

    in_parts: bool = False
    """Contents as lists of parts of type `text`."""
    reasoning: str = REASONING_FIELDS[0]
    """The field of a message; `parts`: a part of type `thinking`."""
    developer: str = "developer"
    """The role of a developer's message."""
    arguments_as_text: bool = False
    """Those of a tool call as JSON, not as a mapping."""
    null: str | None = None
    """The content of a message that has none."""

    def given(self, message: Message) -> dict[str, Any]:
        more = message.fields
        role = self.developer if message.role == "developer" else message.role
        fields: dict[str, Any] = {"role": role, "content": message.content}
        fields |= {name: more[name] for name in _MESSAGE_FIELDS if name in more}
        parts = [{"type": "text", "text": message.content}]
        if "content" in more:
            fields["content"], parts = self.null, []
        elif self.in_parts:
            fields["content"] = parts
        if message.reasoning and self.reasoning == "parts":
            fields["content"] = [{"type": "thinking", "thinking": message.reasoning}, *parts]
        elif message.reasoning:
            fields[self.reasoning] = message.reasoning
        if self.arguments_as_text and "tool_calls" in fields:
            fields["tool_calls"] = [
                {**call, "function": {**function, "arguments": as_json(function["arguments"])}}
                for call in fields["tool_calls"]
                for function in [call["function"]]
            ]
        return fields


_MESSAGE_FIELDS = ("name", "tool_call_id", "tool_calls")
_PARTS = re.compile("[\"']type[\"']")
_PROBE = "probe-content"
_PROBE_CALL = {"id": "abcdefghi", "function": {"name": "f", "arguments": {}}, "type": "function"}
_PROBE_NULL = {"tool_calls": [_PROBE_CALL], "content": None}


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template with everything it is rendered with, except the messages."""

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    """`bos_token`, `eos_token`, ... by name."""
    options: tuple[tuple[str, Any], ...] = ()
    """More variables of the template, for example `enable_thinking`."""
    origin: Origin = "own"

    @cached_property
    def fingerprint(self) -> str:
        decides = [self.source, dict(self.special_tokens), dict(self.options)]
        return hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)  # options may be lists and mappings

    def describe(self) -> dict[str, Any]:
        """The template's identity for manifests and cards."""
        return {
            "origin": self.origin,
            "options": dict(self.options),
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template itself marks what the assistant writes with `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self.render_marked(messages, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendering, and the characters of it that the template marks with `{% generation
        %}`."""
        try:
            return self._rendered(messages, add_generation_prompt, self._form)
        except TemplateRaised:
            # DeepSeek's want arguments that are texts, others contents that are texts
            calls = any("tool_calls" in message.fields for message in messages)
            for as_text, null in ((True, None), (False, ""), (True, "")) if calls else ():
                form = self._form._replace(arguments_as_text=as_text, null=null)
                with suppress(TemplateRaised):
                    return self._rendered(messages, add_generation_prompt, form)
            raise

    @cached_property
    def _form(self) -> _Form:
        def prints(form: _Form, *messages: Message) -> bool:
            try:
                text, _ = self._rendered(messages, False, form)
            except TemplateRaised:
                return False
            return _PROBE in text and not _PARTS.search(text)  # nor a list as it stands

        asked, answer = Message("user", _PROBE), Message("assistant", "b", reasoning=_PROBE)
        parts = _Form(in_parts=True)
        form = parts if not prints(_Form(), asked) and prints(parts, asked) else _Form()
        asked = Message("user", "a")
        call = replace(answer, more=as_json({"tool_calls": [_PROBE_CALL]}))  # Gemma 4: there alone
        forms = [form._replace(reasoning=name) for name in (*REASONING_FIELDS, "parts")]
        tried = [(candidate, said) for said in (answer, call) for candidate in forms]
        form = next(
            (candidate for candidate, said in tried if prints(candidate, asked, said)), form
        )
        answer = replace(answer, reasoning="")
        if not prints(form, Message("developer", _PROBE), asked, answer):
            form = form._replace(developer="system")
        with suppress(TemplateRaised):
            call = replace(call, content="", reasoning="", more=as_json(_PROBE_NULL))
            if "None" in self._rendered([asked, call], False, form)[0]:
                form = form._replace(null="")
        return form

    def _rendered(
        self, messages: Sequence[Message], add_generation_prompt: bool, form: _Form
    ) -> tuple[str, list[tuple[int, int]]]:
        # transformers' own sandbox: a template may come from anywhere. Not through its
        # `render_jinja_template`, in which the day cannot be fixed.
        from transformers.utils.chat_template_utils import _render_with_assistant_indices

        of_record = messages[0].fields if messages else {}
        variables = {
            "messages": [form.given(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "documents": None,
            "strftime_now": datetime.strptime(DATE, "%d %b %Y").strftime,
            "tools": of_record.get("tools"),
            **dict(self.special_tokens),
            **dict(self.options),
            **of_record.get("chat_template_kwargs", {}),
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
        except Exception as error:  # a template may raise anything
            reason = str(error).strip().splitlines()
            raise TemplateRaised(reason[0] if reason else type(error).__name__) from None
        ranges: list[tuple[int, int]] = []
        for start, stop in marked:
            if ranges and start <= ranges[-1][1]:  # one turn may be marked in several pieces
                start = ranges.pop()[0]
            ranges.append((start, stop))
        return str(text), ranges


def template_of(
    tokenizer: TextTokenizer, given: str | None = None, options: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template of a model: `given` (a Jinja file, a folder with one, `plain`, or `concatenate`
    to join prompts and completions), its own, or plain if it has none."""
    more = tuple(sorted((options or {}).items()))
    if given == "concatenate":
        ends = dict(tokenizer.frame.special_tokens)
        ends["bos_token"] = "".join(map(tokenizer.token, tokenizer.prefix_ids))
        return ChatTemplate(CONCATENATE, tuple(ends.items()), more, "given")
    origin: Origin = "own" if given is None else "given"
    source = tokenizer.frame.template
    if given is not None:
        source = None if given == "plain" else _read_given(given)
    if source is None:
        source, origin = PLAIN, "plain"
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
            "that has one, plain or concatenate"
        ) from None


# ---- renderings ----

# noncharacters: Unicode keeps them out of texts
_OPEN, _SHUT = ("\ufdd0{}\ufdd1", "\ufdd2{}\ufdd3")
_MARKED = re.compile("\ufdd0(\\d+)\ufdd1|\ufdd2(\\d+)\ufdd3")
# a number is marked by a number, which a template may not put in quotes
_NUMBER = 7_319_060_000_000_000
_BLANK = re.compile("\ufdd0(\\d+)\ufdd1|(73190[67]\\d{10})(?!\\d)")
_UNITS = re.compile(r"<[^<>\s]*>|\w+|\s|.")
_WORDS = re.compile(r"\s|\w+|[^\w\s]")
_LOST = "template: it changes contents in a way that cannot be followed"
_NONCHARACTER = re.compile("[\ufdd0-\ufdd3]")


@dataclass(frozen=True)
class Segment:
    """A piece of a rendering. `message` is None for what is not laid over the shared text: the
    template's own text, or a content that cannot be aligned there (`template` is False)."""

    text: str
    message: int | None = None
    start: int = 0
    """Where the piece begins in the message's text."""
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
    calls: bool = False
    """It ends with tool calls, which the template closes."""
    marked: tuple[int, int] | None = None
    """What a template that marks generation marks of an assistant's turn, which may be nothing."""
    unwritten: str = ""
    """The end of the generation prompt, where the template does not write it before the answer."""


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
    """The conversation in a template, and the positions of its contents; `Refused` if the template
    raises, or changes contents so that they cannot be found. `add_generation_prompt`: only up to
    where the assistant's answer begins."""
    prompt = add_generation_prompt
    try:
        real, marked = template.render_marked(messages, add_generation_prompt=prompt)
    except TemplateRaised as error:
        raise Refused(f"template: {error}") from None
    calls = any("tool_calls" in message.fields for message in messages)
    for leaves in ("all", "values", "names") if calls else ("names",):
        slots, blank = _slots(messages, leaves)
        frame = _frame(template, blank, prompt)
        pieces = _put_back(frame, slots, real)
        if pieces is None and not all(slot.text for slot in slots):
            kept = _kept_empty(slots, blank)
            pieces = _put_back(_frame(template, kept, prompt), slots, real)
            if pieces is not None:
                pieces = _with_empty_answers(template, pieces, slots, blank, kept)
        if pieces is not None:
            break
    else:
        pieces = _inside_marks(template, messages, slots, prompt, frame, real)
    changes = _changes(pieces, slots, messages)
    pieces, moved = _in_order(pieces, slots, messages)
    changes += moved
    first = messages[0]
    if "tools" in first.fields:
        others = as_json({name: value for name, value in first.fields.items() if name != "tools"})
        without = [replace(first, more=others), *messages[1:]]
        if _attempt(template, without, prompt) == real:
            changes.append("leaves out the list of tools")
    segments = tuple(_located(pieces, slots))
    turns = _turns(template, segments, blank, marked)
    return Rendering(segments, tuple(dict.fromkeys(changes)), turns)


def _attempt(template: ChatTemplate, messages: Sequence[Message], prompt: bool) -> str | None:
    """The rendering, or None where the template raises."""
    with suppress(TemplateRaised):
        return template.render(messages, add_generation_prompt=prompt)
    return None


# ---- what is looked for ----


class _Slot(NamedTuple):
    """A text of a conversation that templates print."""

    message: int
    start: int
    """Where it begins in the message's text."""
    text: str
    what: str
    """`content`, `reasoning`, a tool's `result`; of a tool call `name`, and `argument`: a key or a
    value."""

    @property
    def in_json(self) -> str:
        return _escaped(self.text)

    @property
    def stored(self) -> str:
        """The value as it is written in the message's text."""
        return self.in_json if self.what in ("name", "argument") else self.text

    def forms(self, text: str) -> tuple[str, ...]:
        """The forms in which a template may print the value, or a piece of it."""
        stripped = text.rstrip(), text.lstrip(), text.strip()
        if self.what in ("content", "reasoning"):
            return text, *stripped
        return (text, self.in_json, *(stripped if self.what == "result" else ()))


def _escaped(text: str) -> str:
    return as_json(text)[1:-1]


Leaves = Literal["all", "values", "names"]
"""What is looked for of a tool call: also the keys of its arguments, also their values, or the name
of the function alone."""


def _slots(messages: Sequence[Message], leaves: Leaves) -> tuple[list[_Slot], tuple[Message, ...]]:
    """Every slot in the order of the shared text, and the conversation with marks in them."""
    slots: list[_Slot] = []
    blank = []
    for number, message in enumerate(messages):
        entries: list[tuple[str, str]] = []

        def mark(value: Any, what: str, entries: list[tuple[str, str]] = entries) -> Any:
            slot = len(slots) + len(entries)
            entries.append((value if isinstance(value, str) else as_json(value), what))
            return _OPEN.format(slot) if isinstance(value, str) else _NUMBER + slot

        blank.append(_filled(message, leaves, mark))
        text, start, end = blank[-1].text, 0, 0
        spans = {int(m[1] or int(m[2]) - _NUMBER): m.span() for m in _BLANK.finditer(text)}
        for entry in entries:
            opens, shuts = spans[len(slots)]
            start += opens - end
            slots.append(_Slot(number, start, *entry))
            start, end = start + len(slots[-1].stored), shuts
    return slots, tuple(blank)


def _filled(message: Message, leaves: Leaves, fill: Callable[[Any, str], Any]) -> Message:
    """The message with something else in its slots; `fill` is shown them in their order."""
    reasoning = fill(message.reasoning, "reasoning") if message.reasoning else ""
    is_null = "content" in message.fields
    what = "result" if message.role == "tool" else "content"
    content, more = "" if is_null else fill(message.content, what), message.more

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            every = leaves == "all"
            return {fill(k, "argument") if every else k: walk(item) for k, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        kept = leaves == "names" or value is None or isinstance(value, bool)
        return value if kept else fill(value, "argument")

    if "tool_calls" in message.fields:
        calls = [
            {
                **call,
                "function": {
                    name: fill(item, "name") if name == "name" else walk(item)
                    for name, item in call["function"].items()
                },
            }
            for call in message.fields["tool_calls"]
        ]
        more = as_json({**message.fields, "tool_calls": calls})
    return replace(message, reasoning=reasoning, content=content, more=more)


@lru_cache(maxsize=512)
def _frame(
    template: ChatTemplate, blank: tuple[Message, ...], prompt: bool
) -> tuple[Segment, ...] | None:
    """The template's own text around the slots of a conversation, which are left blank; segments
    have the numbers of slots. None where the template raises because of the marks."""
    marked = _attempt(template, blank, prompt)
    if marked is None:
        return None
    segments: list[Segment] = []
    seen: set[int] = set()
    end = 0
    for match in _BLANK.finditer(marked):
        segments.append(Segment(marked[end : match.start()], template=True))
        number = int(match[1] or int(match[2]) - _NUMBER)
        # a copy of a content is text that is not aligned: it is put back all the same
        segments.append(Segment("", number, start=-1 if number in seen else 0))
        seen.add(number)
        end = match.end()
    return (*segments, Segment(marked[end:], template=True))


def _kept_empty(slots: Sequence[_Slot], blank: Sequence[Message]) -> tuple[Message, ...]:
    """Messages with marks only in contents that are not empty."""
    empty = {s.message for s in slots if s.what in ("content", "result") and not s.text}
    return tuple(replace(m, content="") if n in empty else m for n, m in enumerate(blank))


def _with_empty_answers(
    template: ChatTemplate,
    segments: tuple[Segment, ...],
    slots: Sequence[_Slot],
    blank: tuple[Message, ...],
    kept: tuple[Message, ...],
) -> tuple[Segment, ...]:
    """Segments with an additional one for each empty answer of which the template prints nothing:
    the model still writes what the template closes it with. `kept`: the conversation without marks
    in what is empty."""
    for number, slot in enumerate(slots):
        answer = blank[slot.message].role == "assistant" and slot.what == "content"
        if slot.text or not answer or any(s.message == number for s in segments):
            continue
        frame = _frame(template, kept[: slot.message + 1], False)
        closing = _tail(template, blank[: slot.message + 1], False)
        before = [n for n, s in enumerate(segments) if s.message is not None and s.message < number]
        at = before[-1] + 1 if before else 0
        if frame is None or closing is None or at == len(segments):
            continue
        begin, around = frame[-1].text.removesuffix(closing), segments[at].text
        if around.startswith(begin):
            pieces = Segment(begin, template=True), Segment("", number)
            rest = Segment(around[len(begin) :], template=True)
            segments = (*segments[:at], *pieces, rest, *segments[at + 1 :])
    return segments


def _put_back(
    frame: tuple[Segment, ...] | None, slots: Sequence[_Slot], real: str
) -> tuple[Segment, ...] | None:
    """The rendering with the contents in their slots, whole or without the white space around them;
    None where that is not the real rendering."""
    if frame is None or any(s.message is not None and s.message >= len(slots) for s in frame):
        return None
    whole = [s if s.message is None else replace(s, text=slots[s.message].text) for s in frame]
    return _stripped(whole, slots, real)


def _located(segments: Sequence[Segment], slots: Sequence[_Slot]) -> Iterator[Segment]:
    """Segments with their messages and positions in the messages' texts, for their slots.
    Characters that JSON writes differently have none."""
    for segment in segments:
        if segment.message is None:
            yield segment
            continue
        slot = slots[segment.message]
        if segment.text == slot.stored or segment.text not in (slot.text, slot.in_json):
            yield replace(segment, message=slot.message, start=slot.start + segment.start)
            continue
        # printed as JSON and stored as text, or the other way round
        shown, stored = (_escaped, str) if segment.text == slot.in_json else (str, _escaped)
        start = slot.start
        for same, run in groupby(slot.text, lambda character: _escaped(character) == character):
            text = "".join(run)
            located = Segment(text, slot.message, start)
            yield located if same else Segment(shown(text), template=True)
            start += len(stored(text))


# ---- templates that change contents ----


def _inside_marks(
    template: ChatTemplate,
    messages: Sequence[Message],
    slots: Sequence[_Slot],
    prompt: bool,
    frame: tuple[Segment, ...] | None,
    real: str,
) -> tuple[Segment, ...]:
    contents = [slot.text for slot in slots]
    for slot in slots:
        if _NONCHARACTER.search(slot.text):
            raise Refused(f"noncharacter: message {slot.message} holds one of U+FDD0 to U+FDD3")

    def filled(fill: Callable[[int, str], str]) -> list[Message]:
        numbers = count()
        return [_filled(m, "names", lambda text, _: fill(next(numbers), text)) for m in messages]

    wrapped = filled(lambda n, text: _OPEN.format(n) + text + _SHUT.format(n))
    marked = _attempt(template, wrapped, prompt)
    if marked is None:
        raise Refused(_LOST)
    left = {int(match[1] or match[2]) for match in _MARKED.finditer(marked)}
    gone = {n for n, text in enumerate(contents) if text.strip() and n not in left}
    if gone:  # a content that is dropped decides nothing
        others = filled(lambda n, text: "another text" if n in gone else text)
        if _attempt(template, others, prompt) != real:
            raise Refused(_LOST)
    around = zip(frame or (), (frame or ())[1:], (frame or ())[2:], strict=False)
    neighbours = {
        segment.message: (before.text, behind.text)
        for before, segment, behind in around
        if segment.message is not None and segment.start == 0
    }
    segments = _survivors(marked, contents, neighbours)
    return _stripped(segments, slots, real) or _carried_over(segments, real)


def _survivors(
    marked: str, contents: Sequence[str], neighbours: dict[int, tuple[str, str]]
) -> list[Segment]:
    """What the template left of each content, by the marks at its two ends. Where only one is left,
    the template's own text around it (`neighbours`) says where the other end is. Refused where a
    content was replaced."""
    marks: dict[tuple[int, bool], int] = {}
    plain: list[str] = []
    length = end = 0
    for match in _MARKED.finditer(marked):
        plain.append(marked[end : match.start()])
        length += len(plain[-1])
        marks.setdefault((int(match[1] or match[2]), match[1] is not None), length)
        end = match.end()
    text = "".join([*plain, marked[end:]])
    pieces: list[tuple[int, int, int, int]] = []  # from, to, message, position in the content
    for number, content in enumerate(contents):
        start, stop = marks.get((number, True)), marks.get((number, False))
        before, behind = neighbours.get(number, ("", ""))
        if start is not None and stop is not None and start <= stop:
            equal = _equal_words(text[start:stop], content)
            _require_only(text[start:stop], [(at, at + size) for at, _, size in equal])
            pieces += [(start + at, start + at + n, number, there) for at, there, n in equal]
        elif stop is not None:
            kept = _common_prefix(text[:stop][::-1], content[::-1])
            fits = (k for k in range(kept, -1, -1) if text.endswith(before, 0, stop - k))
            if (fit := next(fits, None)) is None:
                others = (at for (n, _), at in marks.items() if n != number and at <= stop)
                _require_known(text[max(others, default=0) : stop - kept], before, content)
            kept = kept if fit is None else fit
            pieces.append((stop - kept, stop, number, len(content) - kept))
        elif start is not None:
            kept = _common_prefix(text[start:], content)
            fits = (k for k in range(kept, -1, -1) if text.startswith(behind, start + k))
            if (fit := next(fits, None)) is None:
                others = (at for (n, _), at in marks.items() if n != number and at >= start)
                rest = text[start + kept : min(others, default=len(text))]
                _require_known(rest, behind, content)
            kept = kept if fit is None else fit
            pieces.append((start, start + kept, number, 0))
    return _cut(text, pieces)


def _require_known(text: str, around: str, content: str) -> None:
    """Refuse a text that holds words of neither the template nor the content."""
    known = {*_UNITS.findall(around), *_UNITS.findall(content), *_WORDS.findall(content)}
    if any(unit not in known for unit in _UNITS.findall(text) if unit.strip()):
        raise Refused(_LOST)


def _require_only(text: str, pieces: Sequence[tuple[int, int]]) -> None:
    """Refuse a text that holds more than these pieces of it. A template may set the tags that it
    knows, for example of reasoning, on lines of their own."""
    for (_, start), (stop, _) in pairwise([(0, 0), *pieces, (len(text), len(text))]):
        before, behind = text[:start].rstrip("\n"), text[stop:].lstrip("\n")
        beside_tag = before.endswith(">") or behind.startswith("<")
        if text[start:stop].strip("\n") or (start < stop and not beside_tag):
            raise Refused(_LOST)


def _equal_words(a: str, b: str) -> list[tuple[int, int, int]]:
    """Pieces that two texts have in common, in order: position in each, and size."""
    if a == b:
        return [(0, 0, len(a))]
    ours, theirs = _WORDS.findall(a), _WORDS.findall(b)
    our_starts = list(accumulate(map(len, ours), initial=0))
    their_starts = list(accumulate(map(len, theirs), initial=0))
    return [
        (our_starts[i], their_starts[j], our_starts[i + size] - our_starts[i])
        for i, j, size in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        if size
    ]


def _cut(text: str, pieces: list[tuple[int, int, int, int]]) -> list[Segment]:
    segments: list[Segment] = []
    end = 0
    for start, stop, number, there in sorted(pieces):
        if start < end:  # two contents would overlap
            continue
        segments.append(Segment(text[end:start], template=True))
        segments.append(Segment(text[start:stop], number, there))
        end = stop
    return [*segments, Segment(text[end:], template=True)]


def _stripped(
    segments: Sequence[Segment], slots: Sequence[_Slot], real: str
) -> tuple[Segment, ...] | None:
    """The segments without the white space that the template strips from real contents, which marks
    protect; None where they do not give the real rendering. What a template prints of a tool call
    may be JSON."""
    result: list[Segment] = []
    at = 0
    for segment, behind in zip(segments, [*segments[1:], Segment("")], strict=True):
        text = segment.text
        if segment.message is None:
            if not real.startswith(text, at):
                return None
            result.append(segment)
            at += len(text)
            continue
        for kept in slots[segment.message].forms(text):
            if real.startswith(kept + behind.text, at):
                break
        else:
            return None
        start = segment.start + max(text.find(kept), 0)
        is_copy = segment.start < 0
        result.append(Segment(kept) if is_copy else Segment(kept, segment.message, start))
        at += len(kept)
    return tuple(result) if at == len(real) else None


def _carried_over(segments: list[Segment], real: str) -> tuple[Segment, ...]:
    """Align the rendering with marks and the real one word by word, as a last resort; what is equal
    in both is known."""
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
                inside, shift = segment.start + start - at, there - low
                pieces.append((start + shift, stop + shift, segment.message, inside))
    return tuple(_cut(real, pieces))


def _common_prefix(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((size for size, (x, y) in pairs if x != y), min(len(a), len(b)))


# ---- what became of the contents ----


def _changes(
    segments: Sequence[Segment], slots: Sequence[_Slot], messages: Sequence[Message]
) -> list[str]:
    changes = []
    for number, slot in enumerate(slots):
        pieces = [s for s in segments if s.message == number]
        kept = "".join(piece.text for piece in pieces)
        whole = slot.text, slot.in_json if slot.what == "result" else slot.stored
        if kept in whole and pieces:
            continue
        its = f"the {messages[slot.message].role}'s {slot.what}"
        if not pieces or (slot.text.strip() and not kept):
            changes.append(f"drops {its}")
            if slot.what == "name":
                raise Refused("tool calls: the template leaves some out")
        elif kept == slot.text.strip():
            changes.append(f"strips {its}")
        else:
            changes.append(f"leaves out a part of {its}")
    return changes


def _in_order(
    segments: tuple[Segment, ...], slots: Sequence[_Slot], messages: Sequence[Message]
) -> tuple[tuple[Segment, ...], list[str]]:
    """Segments whose spans run forward, and what was moved. Contents that the template moves out of
    their order are not aligned: as few as possible, and the assistant's last of all."""
    held = [(n, s.message) for n, s in enumerate(segments) if s.message is not None]
    order = [number for _, number in held]
    if all(a <= b for a, b in pairwise(order)):
        return segments, []
    roles = [messages[slot.message].role for slot in slots]
    kept = _heaviest_chain(order, [1000 if roles[n] == "assistant" else 1 for n in order])
    moved = dict(piece for at, piece in enumerate(held) if at not in kept)
    left = tuple(Segment(s.text) if n in moved else s for n, s in enumerate(segments))
    return left, [f"moves the {roles[n]}'s {slots[n].what}" for n in moved.values()]


def _heaviest_chain(order: Sequence[int], weights: Sequence[int]) -> set[int]:
    """Indices of the heaviest subsequence that never goes back."""
    best: list[tuple[int, int]] = []  # weight of the chain that ends here, the index before
    for at, number in enumerate(order):
        before = max(((best[p][0], p) for p in range(at) if order[p] <= number), default=(0, -1))
        best.append((before[0] + weights[at], before[1]))
    at = max(range(len(best)), key=lambda p: best[p][0])
    chain = set()
    while at >= 0:
        chain.add(at)
        at = best[at][1]
    return chain


# ---- what the model writes of a turn ----


def _turns(
    template: ChatTemplate,
    segments: Sequence[Segment],
    blank: tuple[Message, ...],
    marked: Sequence[tuple[int, int]],
) -> tuple[Turn, ...]:
    """The turn of every aligned message, from the end of the generation prompt through the end of
    the turn. How a prompt and a turn end is seen where the conversation is rendered up to there."""
    text = "".join(segment.text for segment in segments)
    edges = accumulate((len(segment.text) for segment in segments), initial=0)
    # contents from, to, and their messages; -1 for those that are not aligned
    contents: list[tuple[int, int, int]] = []
    for segment, (start, end) in zip(segments, pairwise(edges), strict=True):
        if segment.template:
            continue
        number = -1 if segment.message is None else segment.message
        if contents and contents[-1][2] == number >= 0:
            start = contents.pop()[0]
        elif number >= 0 and "tool_calls" in blank[number].fields:
            # a copy of a name or an argument may stand between
            while any(content[2] == number for content in contents):
                start = contents.pop()[0]
        contents.append((start, end, number))
    turns = []
    around = zip([(0, 0, -1), *contents], contents, [*contents[1:], None], strict=False)
    for (_, before, previous), (start, end, number), following in around:
        behind = len(text) if following is None else following[0]
        if number < 0:
            continue
        begin, stop, unwritten = start, behind, ""
        if blank[number].role == "assistant":
            size, unwritten = _prompt_end(
                template, blank[:number], text[before:start], previous == number - 1
            )
            begin = before + size
        # later messages may have left no content
        if following is not None or number < len(blank) - 1:
            closing = _tail(template, blank[: number + 1], False)
            stop = end + _common_units(text[end:behind], closing or "")
        mine = None
        if template.marks_generation and blank[number].role == "assistant":
            inside = [(a, b) for a, b in marked if a <= end and b >= start]
            mine = (inside[0][0], inside[-1][1]) if inside else (start, start)
        calls = "tool_calls" in blank[number].fields
        turns.append(Turn(number, begin, end, stop, behind, calls, mine, unwritten))
    return tuple(turns)


def _prompt_end(
    template: ChatTemplate, blank: tuple[Message, ...], gap: str, adjoining: bool
) -> tuple[int, str]:
    """Where the generation prompt ends in the template's text before an assistant's content, and
    what of the prompt is not there."""
    prompt = _tail(template, blank, True)
    if prompt is None:
        return len(gap), ""
    if gap.startswith(prompt) and adjoining:
        return len(prompt), ""
    own = prompt.removeprefix(_tail(template, blank, False) or "")
    if own and own in gap:
        return gap.rindex(own) + len(own), ""
    if not adjoining:  # the gap also holds the empty messages before it
        written = prompt.strip() and prompt in gap
        return gap.rindex(prompt) + len(prompt) if written else len(gap), ""
    # of some the prompt has other white space than the turn: vLLM's template of DeepSeek V3.1
    size = max(_common_units(gap, prompt, spaced) for spaced in (True, False))
    return size or len(gap), prompt[_common_units(prompt, gap) :]


@lru_cache(maxsize=8192)
def _tail(template: ChatTemplate, blank: tuple[Message, ...], prompt: bool) -> str | None:
    """The template's text behind the last content of a conversation; None where no such text is to
    be seen."""
    frame = _frame.__wrapped__(template, blank, prompt)
    if frame is None:
        return None
    last = frame[-2].message if len(frame) > 1 else None
    own = not blank
    if last is not None:
        own = any(mark in blank[-1].text for mark in (_OPEN.format(last), str(_NUMBER + last)))
    return frame[-1].text if own else None


def _common_units(a: str, b: str, spaced: bool = True) -> int:
    """The characters that two texts begin with, in whole tags and words; not `spaced`: up to the
    last one of these, whatever the white space between them."""
    theirs = (unit for unit in _UNITS.findall(b) if spaced or unit.strip())
    size = 0
    for match in _UNITS.finditer(a):
        if not spaced and match[0].isspace():
            continue
        if match[0] != next(theirs, None):
            break
        size = match.end()
    return size
