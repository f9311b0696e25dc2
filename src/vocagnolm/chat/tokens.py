"""A model's tokens of a conversation in its own template, laid over the shared text.

Control tokens are read as such in the template's own text alone: `<|im_end|>` that is written in a
content is text, as it is everywhere else here. For this the tokenizer is given private characters
for its control tokens, and so is the template's text before it is read.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vocagnolm.alignment import TextTokenizer, TokenSpans
from vocagnolm.alignment.spans import BYTE_FALLBACK
from vocagnolm.chat.messages import (
    Message,
    Refused,
    is_end,
    is_mark,
    messages_of,
    shared_text,
    split_answer,
)
from vocagnolm.chat.template import ChatTemplate, Rendering, render
from vocagnolm.errors import TemplateError

# A control token is one character of the Supplementary Private Use Area-B and the last of them: a
# content may hold either.
_FIRST_PRIVATE, _LAST_PRIVATE = 0x100000, 0x10FFFD
_PRIVATE = re.compile(f"[{chr(_FIRST_PRIVATE)}-{chr(_LAST_PRIVATE - 1)}]{chr(_LAST_PRIVATE)}")
_CLOSING = re.compile(r"<[^<>\s]*>\s*\Z")


@dataclass(frozen=True)
class ChatTokens(TokenSpans):
    """The tokens of a conversation over its shared text."""

    turns: NDArray[np.int64]
    """Per token the byte of the mark that closes the turn in which the model writes it; -1 for what
    it only reads, as the header of a turn."""


class ChatTokenizer(TextTokenizer):
    """Reads shared texts. Tokens of contents have spans in the shared text, the token that ends a
    turn covers the byte of the mark, and the other tokens of the template have zero width. A
    control token never covers content."""

    def __init__(self, base: TextTokenizer, template: ChatTemplate):
        description, self._alias = _with_private_tokens(json.loads(base._tokenizer.to_str()))
        # not through TextTokenizer's own: what it would find out anew is known
        self.name, self.frame, self.special_tokens = base.name, base.frame, "control"
        self._tokenizer = Tokenizer.from_str(json.dumps(description))
        self._tokenizer.encode_special_tokens = False
        ids = {base.id_of(token): private for token, private in self._alias.items()}
        names = {index: private.encode() for index, private in ids.items() if index is not None}
        assert all(self._tokenizer.token_to_id(p) == index for index, p in ids.items())
        self._spanner = base._spanner.renamed(self._tokenizer, names)
        self.base = base
        self.template = template
        longest_first = sorted(self._alias, key=lambda token: (-len(token), token))
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._is_control = np.zeros(max(self.vocabulary.values(), default=0) + 1, bool)
        self._is_control[sorted(names)] = True

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer; the template has a fingerprint of its own."""
        return self.base.fingerprint

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return self.base.vocabulary

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Empty: the template adds what precedes a conversation."""
        return ()

    @property
    def missing_beginning(self) -> str | None:
        return None

    @property
    def eos_id(self) -> int | None:
        return None

    def __reduce__(self) -> Any:
        return ChatTokenizer, (self.base, self.template)

    def token(self, index: int) -> str:
        return self.base.token(index)

    def id_of(self, token: str) -> int | None:
        return self.base.id_of(token)

    def bytes_of(self, index: int) -> bytes | None:
        return self.base.bytes_of(index)

    def rendering(self, text: str) -> Rendering:
        """The conversation of a shared text in this model's template."""
        return render(self.template, messages_of(text))

    def spans(self, text: str, *, add_special_tokens: bool = False) -> ChatTokens:
        return self.chat_tokens([text])[0]

    def spans_batch(self, texts: Sequence[str]) -> list[TokenSpans]:
        return [*self.chat_tokens(texts)]

    def chat_tokens(self, texts: Sequence[str]) -> list[ChatTokens]:
        result = []
        for outcome in self.outcomes(texts):
            if isinstance(outcome, str):
                raise TemplateError(f"{self.name} cannot read a conversation: {outcome}")
            result.append(outcome)
        return result

    def outcomes(self, texts: Sequence[str], *, by_rule: bool = False) -> list[ChatTokens | str]:
        """The tokens of each conversation, or the reason why it cannot be read: `kind: more`.
        `by_rule`: find turns by the rule even if the template marks generation."""
        laid: list[_Laid | str] = []
        for text in texts:
            try:
                messages = messages_of(text)
                laid.append(self._lay(render(self.template, messages), messages, by_rule))
            except Refused as error:
                laid.append(str(error))
        readable = [entry for entry in laid if isinstance(entry, _Laid)]
        shared = iter(
            self._shared(readable, super().spans_batch([entry.text for entry in readable]))
        )
        return [entry if isinstance(entry, str) else next(shared) for entry in laid]

    def shown(self, text: str, tokens: TokenSpans) -> list[str | None]:
        """Display names of the template's tokens; None for tokens of contents, which the text
        shows."""
        encoded = text.encode()
        result: list[str | None] = []
        for index, (start, end) in zip(tokens.ids.tolist(), tokens.spans.tolist(), strict=True):
            own = start == end or (end - start == 1 and is_mark(encoded[start]))
            spelled = self.bytes_of(index) if own else None
            name = self.token(index) if spelled is None else spelled.decode(errors="replace")
            result.append(name if own else None)
        return result

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens after which the assistant's answer begins."""
        try:
            rendering = render(self.template, messages, add_generation_prompt=True)
        except Refused as error:
            raise TemplateError(f"{self.name} cannot read a conversation: {error}") from None
        return list(super().spans_batch([self._lay(rendering, messages).text])[0].ids.tolist())

    def answering_ids(self, text: str) -> list[int]:
        """The tokens of a shared text up to the assistant's answer, and those of what follows its
        last mark, i.e. the answer so far."""
        head, answer = split_answer(text)
        messages = messages_of(head)
        if not answer:
            return self.prompt_ids(messages)
        whole = shared_text([*messages, Message("assistant", answer)])
        tokens = self.spans(whole)
        last = int(np.searchsorted(tokens.spans[:, 0], len(whole.encode()) - 1, side="left"))
        return list(tokens.ids[:last].tolist())

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that ends the assistant's turn."""
        text = shared_text([Message("user", "a"), Message("assistant", "b")])
        tokens = self.spans(text)
        (last,) = np.nonzero(tokens.spans[:, 1] == len(text))
        ends = [n for n in last.tolist() if tokens.token_bytes[n] == 1]
        return int(tokens.ids[ends[0]]) if ends else None

    def private_bytes_of(self, index: int) -> bytes | None:
        """What a token spells, with private characters for control tokens."""
        if self._is_control[index]:
            return self._spanner.token_bytes[index]
        return self.base.bytes_of(index)

    def answer_of(self, text: str) -> tuple[str, str]:
        """The reasoning and the content of what the model wrote behind the generation prompt, as
        the template would be given them; `text` has private characters for control tokens.
        Reasoning that was never closed leaves no content."""
        reasoning, content = (text[start:end] for start, end in self.answer_places(text))
        return _PRIVATE.sub("", reasoning).strip(), _PRIVATE.sub("", content)

    def answer_places(self, text: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """The characters of `answer_of`'s text that are its reasoning, with white space around it,
        and those that are its content."""
        around, end = self._around, len(text)
        thought, begin = (0, 0), end - len(_behind(text, around.before))
        lead, closed, rest = text.partition(around.shuts.strip() or "\0")
        if closed:
            thought = len(lead) - len(_behind(lead, around.opens)), len(lead)
            begin = end - len(_behind(closed + rest, around.shuts))
        elif around.opens.strip() and _behind(text, around.opens) != text:
            thought, begin = (end - len(_behind(text, around.opens)), end), end
        elif around.unwritten:
            # opened by the prompt: the template says what it keeps of such an answer
            with suppress(Refused):
                asked, again = Message("user", "a"), Message("user", "c")
                talk = [asked, Message("assistant", text[begin:]), again]
                segments = render(self.template, talk).segments
                kept = "".join(segment.text for segment in segments if segment.message == 1)
                place = text.rfind(kept, begin)
                if kept and not text[place + len(kept) :].strip():
                    thought = begin, begin + len(_CLOSING.sub("", text[begin:place]))
                    begin, end = place, place + len(kept)
        if around.behind and text[begin:end].endswith(around.behind):
            end -= len(around.behind)
        return thought, (begin, end)

    def with_control_tokens(self, text: str) -> str:
        """A text that has private characters for control tokens, with their names instead."""
        names = {private: token for token, private in self._alias.items()}
        return _PRIVATE.sub(lambda match: names.get(match[0], match[0]), text)

    @property
    def writes_around(self) -> bool:
        """Whether what the model writes of an answer is more than the content."""
        return any(part.strip() for part in self._around)

    @cached_property
    def _around(self) -> "_Around":
        """What the template writes around an answer, with private characters for control tokens;
        nothing where it refuses one."""
        talk = [Message("user", "a"), Message("assistant", "probe-content")]
        reasoned = [talk[0], replace(talk[1], reasoning="probe-reasoning")]
        plain, thought = map(self._written_in, (talk, reasoned))
        before, separator, behind = plain.partition("probe-content")
        if not separator:
            return _Around()
        (*_, turn) = self.rendering(shared_text(talk)).turns
        opens, _, rest = thought.partition("probe-reasoning")
        shuts, separator, _ = rest.partition("probe-content")
        marks = (opens, shuts) if separator else ("", "")
        return _Around(before, _PRIVATE.split(behind)[0], *marks, turn.unwritten.strip())

    def _written_in(self, messages: Sequence[Message]) -> str:
        """What the model writes of the last message, with private characters for control tokens;
        nothing where the template refuses the conversation."""
        text = shared_text(messages)
        (tokens,) = self.outcomes([text], by_rule=True)
        if isinstance(tokens, str):
            return ""
        own = tokens.ids[tokens.turns == len(text.encode()) - 1].tolist()
        return b"".join(self.private_bytes_of(n) or b"" for n in own).decode(errors="replace")

    def _lay(
        self, rendering: Rendering, messages: Sequence[Message], by_rule: bool = False
    ) -> "_Laid":
        """Pieces of contents: where they stand in the text that is read, and in the shared one."""
        contents = [message.text for message in messages]
        sizes = [len(content.encode()) for content in contents]
        origins = list(accumulate((size + 1 for size in sizes), initial=0))
        texts: list[str] = []
        pieces: list[tuple[int, int, int]] = []
        ends: dict[int, tuple[int, int]] = {}
        at, ended = 0, -1
        edges: list[int] = []  # where the segments begin in `text`
        for segment in rendering.segments:
            text = self._aliased(segment.text) if segment.template else segment.text
            edges.append(at)
            if not segment.template and _PRIVATE.search(text):
                raise Refused("private characters: a content holds what stands for a control token")
            width = len(text.encode())
            number = segment.message
            if number is not None:
                start = len(contents[number][: segment.start].encode())
                pieces.append((at, at + width, origins[number] + start))
                ends.pop(number, None)
                if is_end(contents[number], segment.start + len(text)):
                    ends[number] = (at + width, at + width)
                ended = number
            elif segment.template and ended >= 0 and ended in ends:
                ends[ended] = (ends[ended][0], at + width)
                ended = -1
            texts.append(text)
            at += width
        at_byte = partial(self._at_byte, rendering, edges)
        if any("tool_calls" in message.fields for message in messages):
            for number, (start, stop) in self._written(rendering, messages, True):
                closing = [m.start() for m in self._control.finditer(rendering.text, start, stop)]
                if "tool_calls" in messages[number].fields:  # the turn's last one, not a call's
                    ends[number] = (at_byte(max(closing, default=stop - 1)), at_byte(stop))
        return _Laid(
            text="".join(texts),
            pieces=pieces,
            ends=[(*ends[n], origins[n] + sizes[n]) for n in sorted(ends) if not messages[n].cut],
            turns=[
                (at_byte(start), at_byte(stop), origins[n] + sizes[n])
                for n, (start, stop) in self._written(rendering, messages, by_rule)
            ],
            n_bytes=origins[-1],
            n_hidden=sum(sizes) - sum(len((m.reasoning + m.content).encode()) for m in messages),
        )

    def _aliased(self, text: str) -> str:
        return self._control.sub(lambda match: self._alias[match[0]], text)

    def _written(
        self, rendering: Rendering, messages: Sequence[Message], by_rule: bool
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Messages, and the characters of the rendering that the model writes: from the end of the
        generation prompt through the last control token of the turn. Without one the turn ends with
        the token that reaches over the content's end; an answer that was broken off, with its
        content."""
        text = rendering.text
        for turn in rendering.turns:
            if messages[turn.message].cut:
                yield turn.message, (turn.start, turn.end)
                continue
            if turn.marked is not None and not by_rule:
                if turn.marked[0] < turn.marked[1]:
                    yield turn.message, turn.marked
                continue
            closing = [match.end() for match in self._control.finditer(text[turn.end : turn.stop])]
            if closing:
                size = closing[-1]
            elif turn.calls and turn.stop > turn.end:
                size = turn.stop - turn.end
            elif (first := self._control.search(text[turn.end : turn.next])) is not None:
                size = first.end()
            else:
                size = int(turn.end < turn.next or turn.next == len(text))
            yield turn.message, (turn.start, turn.end + size)

    def _at_byte(self, rendering: Rendering, edges: Sequence[int], position: int) -> int:
        """A position in the characters of a rendering in bytes of the text that is read."""
        number, inside = 0, position
        while inside > len(rendering.segments[number].text) and number + 1 < len(edges):
            inside -= len(rendering.segments[number].text)
            number += 1
        segment = rendering.segments[number]
        text = segment.text[:inside]
        read = self._aliased(text) if segment.template else text
        # one behind the end is the byte between two conversations
        return edges[number] + len(read.encode()) + inside - len(text)

    def _shared(self, laid: Sequence["_Laid"], read: Sequence[TokenSpans]) -> list[ChatTokens]:
        """Tokens of the texts that were read as tokens of the shared texts: all conversations at
        once, laid end to end with a byte between two of them."""
        if not laid:
            return []
        counts = [len(reading) for reading in read]
        there = _origins([reading.n_bytes for reading in read])
        here = _origins([conversation.n_bytes for conversation in laid])
        tokens = np.concatenate([reading.spans for reading in read])
        tokens = tokens + np.repeat(there, counts)[:, None]
        control = self._is_control[np.concatenate([reading.ids for reading in read])]
        spans = _over_pieces(tokens, _moved(laid, "pieces", there, here))
        spans[control] = 0  # one that takes the white space beside it stands for none of it
        _add_ends(spans, tokens, control, _moved(laid, "ends", there, here))
        turns = _in_turns(tokens, control, _moved(laid, "turns", there, here))
        # what stands for no text lies between its neighbours
        origins = np.repeat(here, counts)
        empty = spans[:, 0] == spans[:, 1]
        spans[empty] = origins[empty, None]
        ends = np.maximum.accumulate(spans[:, 1])
        spans[empty] = ends[empty, None]
        covered = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
        spans -= origins[:, None]
        turns = np.where(turns < 0, turns, turns - origins)
        cuts = np.cumsum([0, *counts]).tolist()
        return [
            ChatTokens(
                *(reading.ids, spans[a:b], own.n_bytes),
                max(own.n_bytes - own.n_hidden - int(covered[b] - covered[a]), 0),
                turns=turns[a:b],
            )
            for reading, own, (a, b) in zip(read, laid, pairwise(cuts), strict=True)
        ]


class _Around(NamedTuple):
    """What a template writes around the parts of an answer."""

    before: str = ""
    """From the end of the generation prompt to the content of an answer without reasoning."""
    behind: str = ""
    """From the content to the control token that ends the turn."""
    opens: str = ""
    """From the end of the generation prompt to the reasoning."""
    shuts: str = ""
    """From the reasoning to the content."""
    unwritten: str = ""
    """What a generation prompt ends with and is not written before answers."""


def _behind(text: str, start: str) -> str:
    """The text behind something that it begins with, whatever the white space before that."""
    if not start.strip():
        return text.removeprefix(start)
    core, stripped = start.strip(), text.lstrip()
    if not stripped.startswith(core):
        return text
    return stripped[len(core) :].removeprefix(start[len(start.rstrip()) :])


@dataclass(frozen=True)
class _Laid:
    text: str
    pieces: list[tuple[int, int, int]]
    """From, to in the bytes of `text`, and the position of `from` in the shared text."""
    ends: list[tuple[int, int, int]]
    """Per message whose end is there: the end of its content, the end of the template's text behind
    it, and the position of its mark in the shared text."""
    turns: list[tuple[int, int, int]]
    """Per aligned message: what the model writes, from, to in the bytes of `text`, and the position
    of its mark in the shared text."""
    n_bytes: int
    n_hidden: int
    """Bytes of the shared text that templates print in a form of their own: JSON around the words
    of tool calls, and lists of tools."""


def _add_ends(
    spans: NDArray[np.int64],
    tokens: NDArray[np.int64],
    is_control: NDArray[np.bool_],
    ends: NDArray[np.int64],
) -> None:
    """Give the bytes of marks to the tokens that end turns, in place: the first control token
    between the end of a content and the next text that is not the template's; without one the
    token that reaches over the content's end."""
    shut, behind, mark = ends.T
    control = np.flatnonzero(is_control & (tokens[:, 0] < tokens[:, 1]))
    sentinel = np.iinfo(np.int64).max
    starts, stops = (np.append(tokens[control, side], sentinel) for side in (0, 1))
    near = np.searchsorted(stops, shut, side="right")
    has_end = starts[near] < behind
    over = np.minimum(np.searchsorted(tokens[:, 1], shut, side="right"), len(tokens) - 1)
    reaches = (tokens[over, 1] > shut) & (tokens[over, 0] < behind) & (shut < behind)
    chosen = np.where(has_end, np.append(control, 0)[near], over)
    known = has_end | reaches
    at, mark = chosen[known], mark[known]
    alone = spans[at, 0] == spans[at, 1]
    spans[at, 0] = np.where(alone, mark, spans[at, 0])
    spans[at, 1] = np.maximum(spans[at, 1], mark + 1)


def _in_turns(
    tokens: NDArray[np.int64], is_control: NDArray[np.bool_], turns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Per token the mark of the turn that it is written in, or -1; tokens without text belong to
    those around them."""
    start, stop, mark = turns.T
    starts, ends = (np.maximum.accumulate(tokens[:, side]) for side in (0, 1))
    first = np.minimum(
        np.searchsorted(ends, start, side="right"), np.searchsorted(starts, start, side="left")
    )
    # a control token of the prompt may take white space behind it
    near = np.minimum(first, len(tokens) - 1)
    first = first + (is_control[near] & (starts[near] < start))
    counts = np.maximum(np.searchsorted(starts, stop, side="left") - first, 0)
    numbers = np.full(len(tokens), -1, np.int64)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers[np.repeat(first, counts) + offsets] = np.repeat(mark, counts)
    return numbers


def _origins(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *(size + 1 for size in sizes[:-1])], dtype=np.int64)


def _moved(
    laid: Sequence[_Laid], name: str, there: NDArray[np.int64], here: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Pieces or ends of all conversations [N, 3], moved to their places on the common axes."""
    rows = [getattr(conversation, name) for conversation in laid]
    counts = [len(part) for part in rows]
    table = np.array([row for part in rows for row in part], np.int64).reshape(-1, 3)
    table[:, :2] += np.repeat(there, counts)[:, None]
    table[:, 2] += np.repeat(here, counts)
    return table


def _over_pieces(tokens: NDArray[np.int64], pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Spans of tokens in the shared text; empty where a token touches no piece of a content."""
    spans = np.zeros((len(tokens), 2), np.int64)
    pieces = pieces[pieces[:, 0] < pieces[:, 1]]
    if not len(pieces):
        return spans
    starts, stops = tokens.T
    opens, shuts, origin = pieces.T
    # the first piece that ends behind a token's start, the last that begins before its end
    first = np.searchsorted(shuts, starts, side="right")
    last = np.searchsorted(opens, stops, side="left") - 1
    inside = np.flatnonzero((first <= last) & (starts < stops))
    a, b = first[inside], last[inside]
    spans[inside, 0] = np.maximum(starts[inside], opens[a]) - opens[a] + origin[a]
    spans[inside, 1] = np.minimum(stops[inside], shuts[b]) - opens[b] + origin[b]
    return spans


def _with_private_tokens(description: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A tokenizer's description with private characters in place of each control token, and which
    stand for which. Ids stay."""
    alias: dict[str, str] = {}
    added = description.get("added_tokens") or []
    if description["model"].get("byte_fallback"):
        # bytes belong to the model, which needs their names; no template prints them
        added = [entry for entry in added if entry["content"] not in BYTE_FALLBACK]
        description["added_tokens"] = added
    for entry in added:
        if entry.get("special"):
            private = chr(_FIRST_PRIVATE + len(alias)) + chr(_LAST_PRIVATE)
            assert ord(private[0]) < _LAST_PRIVATE
            alias[entry["content"]] = private
            entry["content"] = private
    model = description["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {alias.get(token, token): index for token, index in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram
        model["vocab"] = [[alias.get(entry[0], entry[0]), *entry[1:]] for entry in vocabulary]
    if model.get("unk_token") in alias:
        model["unk_token"] = alias[model["unk_token"]]
    description["post_processor"] = None
    return description, alias


# ---- which tokens are trained on ----


TrainOn = Literal["assistant", "last", "all"]
TRAINED_RULE = 2
"""The version of the rule, in the settings of blocks. Without one: contents and ends of turns."""


def trained_ranges(text: str, train_on: TrainOn) -> NDArray[np.int64]:
    """Byte ranges of a shared text that are trained on, [N, 2]: contents with their ends of
    turn."""
    messages = messages_of(text)
    ends = accumulate((len(message.text.encode()) + 1 for message in messages), initial=0)
    wanted = [
        span
        for message, span in zip(messages, pairwise(ends), strict=True)
        if train_on == "all" or (message.role == "assistant" and not message.given)
    ]
    return np.array(wanted[-1:] if train_on == "last" else wanted, np.int64).reshape(-1, 2)


def trained_tokens(tokens: TokenSpans, ranges: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The tokens that the model writes in trained turns: contents, ends of turns, and what the
    template prints after the generation prompt."""
    assert isinstance(tokens, ChatTokens)
    return trained_spans(tokens.spans, tokens.turns, ranges)


def trained_spans(
    spans: NDArray[np.int64], turns: NDArray[np.int64], ranges: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The spans that are trained on; several texts are laid end to end. A token that stands for a
    part of a message that is not trained on is not trained on either; the one that ends the turn
    before may also begin this one."""
    if not len(ranges):
        return np.zeros(len(spans), bool)
    starts, ends = spans[:, 0], spans[:, 1]
    # neighbouring ranges are one
    joined = np.concatenate([[True], ranges[1:, 0] != ranges[:-1, 1]])
    opens = ranges[joined, 0]
    shuts = ranges[np.append(np.flatnonzero(joined)[1:] - 1, len(ranges) - 1), 1]
    index = np.searchsorted(opens, starts, side="right") - 1
    inside = (index >= 0) & (ends <= shuts[np.maximum(index, 0)])
    begins = (ends - starts == 1) & np.isin(ends, ranges[:, 0])
    own = inside | begins | (starts == ends)
    trained: NDArray[np.bool_] = np.isin(turns, ranges[:, 1] - 1) & own
    return trained
