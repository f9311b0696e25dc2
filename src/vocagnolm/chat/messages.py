"""Conversations as they stand in files, and as the one shared text that both models are laid over.

```
shared text:  message MARK message MARK ...        one MARK a message: the end of its turn
message:      [reasoning U+FDD4] content [U+FDD5 JSON]
```

The mark is one byte, and which one says whose turn it was. The JSON holds what else a template is
given: tool calls, the tools of the record. So a conversation is a text like any other: it has a
hash, it may be sent to a worker, and it can be taken apart again.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vocagnolm.recipe.sections import Format as Format

_SHARED_FIELDS = ("system", "tools", "chat_template_kwargs", "finished", "right")
CONVERSATION_FIELDS = ("messages", "prompt", "completion", *_SHARED_FIELDS)
RENAMED_FIELDS = ("conversations", "instruction", "input", "output", *_SHARED_FIELDS)
"""ShareGPT's and Alpaca's, which are read where there is neither `messages` nor `prompt`."""
_MARKS = {"system": "\x01", "developer": "\x01", "user": "\x02", "tool": "\x02"}
_MARKS["assistant"] = "\x03"
ROLES = tuple(_MARKS)
_GIVEN_MARK = "\x04"
_ROLE_OF = {
    "\x01": ("system", False),
    "\x02": ("user", False),
    "\x03": ("assistant", False),
    _GIVEN_MARK: ("assistant", True),
}
_BYTE_MARK = re.compile(b"[\x01-\x04]")
_MESSAGE = re.compile("([^\x01-\x04]*)([\x01-\x04])")
# noncharacters: Unicode keeps them out of texts
_REASONED, _MORE = "\ufdd4", "\ufdd5"
_ANY_MARK = re.compile(f"[\x01-\x04{_REASONED}{_MORE}]")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class Refused(ValueError):
    """A conversation that cannot be used. Its message is `kind: more`; kinds are counted."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    given: bool = False
    """An assistant message that belongs to the prompt or has weight 0, and is never trained on."""
    reasoning: str = ""
    more: str = ""
    """Other inputs of a template, as JSON: `tool_calls` of an assistant, `name` and `tool_call_id`
    of a tool's result, `content` if it is null. The first message also holds the record's `tools`
    and `chat_template_kwargs`. `cut`: an answer that was broken off, whose end is nobody's."""

    @property
    def mark(self) -> str:
        return _GIVEN_MARK if self.given else _MARKS[self.role]

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The message's other fields, parsed from `more`."""
        parsed: dict[str, Any] = json.loads(self.more) if self.more else {}
        return parsed

    @property
    def cut(self) -> bool:
        """Whether the answer was broken off: nobody is trained on the end of its turn."""
        return bool(self.more) and bool(self.fields.get("cut"))

    @property
    def text(self) -> str:
        """The message in the shared text, without its mark."""
        more = self.more
        if self.role not in (role for role, _ in _ROLE_OF.values()):
            more = as_json({"role": self.role, **self.fields})
        start = self.reasoning + _REASONED if self.reasoning else ""
        return start + self.content + (_MORE + more if more else "")


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def shared_text(messages: Sequence[Message]) -> str:
    return "".join(message.text + message.mark for message in messages)


def messages_of(text: str) -> list[Message]:
    """The messages of a shared text."""
    messages, end = [], 0
    for match in _MESSAGE.finditer(text):
        messages.append(_message_of(match[1], *_ROLE_OF[match[2]]))
        end = match.end()
    if not messages or end != len(text):
        raise ValueError(f"not the shared text of a conversation: {text[-60:]!r}")
    return messages


def _message_of(text: str, role: str, given: bool) -> Message:
    text, _, more = text.partition(_MORE)
    reasoning, reasoned, content = text.rpartition(_REASONED)
    if more.startswith('{"role":'):
        fields = json.loads(more)
        role = fields.pop("role")
        more = as_json(fields) if fields else ""
    return Message(role, content, given, reasoning if reasoned else "", more)


def record_of(text: str) -> dict[str, Any]:
    """A record that is read as the conversation behind a shared text."""
    messages = messages_of(text)
    of_record = {name: messages[0].fields.get(name) for name in ("tools", "chat_template_kwargs")}
    entries = [
        {
            "role": message.role,
            "content": message.content,
            **{n: v for n, v in message.fields.items() if n not in (*of_record, "cut")},
            "reasoning_content": message.reasoning,
            "weight": 0 if message.given else None,
        }
        for message in messages
    ]
    finished = {"finished": False} if messages[-1].cut else {}
    return {"messages": entries, **of_record, **finished}


def is_mark(byte: int) -> bool:
    """Whether a byte of a shared text is the end of a turn."""
    return chr(byte) in _ROLE_OF


def is_end(message_text: str, position: int) -> bool:
    """Whether nothing but white space of reasoning and content follows."""
    text = message_text.partition(_MORE)[0]
    return not text[position:].replace(_REASONED, "").strip()


def is_conversation(text: str) -> bool:
    return text[-1:] in _ROLE_OF


def split_answer(text: str) -> tuple[str, str]:
    """A shared text up to its last mark, and what stands behind it."""
    end = max(text.rfind(mark) for mark in _ROLE_OF) + 1
    return text[:end], text[end:]


def part_of(encoded: bytes, index: int) -> str:
    """Which part of its message a byte of a shared text belongs to."""
    if _MORE.encode() in _BYTE_MARK.split(encoded[:index])[-1]:
        return "tool call"
    reasoned = _REASONED.encode() in _BYTE_MARK.split(encoded[index:], 1)[0]
    return "reasoning" if reasoned else "content"


def readable(text: str) -> str:
    """A shared text for the eye: `role: content` a line."""
    lines = []
    for message in messages_of(text):
        parts = (message.reasoning, message.content, message.more)
        lines.append(f"{message.role}: {' '.join(part for part in parts if part)}")
    return "\n".join(lines)


# ---- records ----


def format_of(fields: Mapping[str, Any], text_field: str) -> Format | None:
    """What a record holds, by its fields. None: nothing that is known."""
    if text_field in fields:
        return "text"
    return _format_of(_renamed(fields))


def _format_of(fields: Mapping[str, Any]) -> Format | None:
    if "messages" in fields:
        return "messages"
    return "prompt_completion" if "prompt" in fields and "completion" in fields else None


_FIELD_OF: dict[Format, str] = {"messages": "messages", "prompt_completion": "prompt"}
_FROM = {"human": "user", "gpt": "assistant", "observation": "tool"}


def _renamed(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record in the words of the two formats, where it is ShareGPT's or Alpaca's. What a row of a
    table lacks is None."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if _format_of(fields) is not None:
        return fields
    names: dict[str, Any] = {}
    if isinstance(listed := fields.get("conversations"), list | tuple):
        names["messages"] = [_renamed_message(entry) for entry in listed]
    elif "instruction" in fields and "output" in fields:
        asked = [fields["instruction"], *([fields["input"]] if fields.get("input") else [])]
        texts = all(isinstance(part, str) for part in asked)
        names["prompt"] = "\n\n".join(asked) if texts else asked
        names["completion"] = fields["output"]
    return {**fields, **names}


def _renamed_message(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or "from" not in entry:
        return entry
    role, value = entry["from"], entry.get("value")
    if role == "function_call":
        calls = _parsed(value)
        calls = calls if isinstance(calls, list) else [calls]
        return {**entry, "role": "assistant", "content": None, "tool_calls": calls}
    return {**entry, "role": _FROM.get(role, role), "content": value}


def conversation_of(
    fields: Mapping[str, Any], format_: Format, *, of_a_table: bool = False
) -> list[Message]:
    """The messages of a record, or a `Refused` with the reason. One file may hold rows of both
    formats. `of_a_table`: all rows have the same fields, and null means that a field is absent."""
    fields = _renamed(_without_nulls(fields) if of_a_table else fields)
    format_ = format_ if _FIELD_OF[format_] in fields else _format_of(fields) or format_
    if format_ == "messages":
        messages = _listed(_field(fields, "messages"), "messages")
    else:
        prompt, completion = _field(fields, "prompt"), _field(fields, "completion")
        messages = [
            replace(m, given=m.role == "assistant") for m in _either(prompt, "prompt", "user")
        ] + _either(completion, "completion", "assistant")
    if system := fields.get("system"):
        start = _checked(0, "system", _content(0, system)[0])
        if messages[0].role == "system" and messages[0].content != start.content:
            raise Refused("system: the record holds one beside its messages, which have their own")
        messages = [start, *messages[messages[0].role == "system" :]]
    if not any(m.content or m.reasoning or "tool_calls" in m.fields for m in messages):
        raise Refused("empty: no message has content")
    more = {"tools": _tools(fields.get("tools"))}
    more["chat_template_kwargs"] = _without_nulls(_parsed(fields.get("chat_template_kwargs")))
    if present := {name: value for name, value in more.items() if value}:
        messages[0] = replace(messages[0], more=_checked_json({**messages[0].fields, **present}))
    if fields.get("finished") is False and messages[-1].role == "assistant":
        messages[-1] = broken_off(messages[-1])
    return messages


def broken_off(message: Message) -> Message:
    """Mark an answer that did not come to its end."""
    return replace(message, more=as_json({**message.fields, "cut": True}))


def prompt_of(
    fields: Mapping[str, Any], text_field: str, *, drop_answer: bool = False
) -> list[Message]:
    """The messages of a record that ask for an answer, or a `Refused` with the reason: messages
    that end with the user, the prompt of a prompt and its completion, an instruction, or a text.
    `drop_answer`: what the assistant says last is left out."""
    fields = _without_nulls(fields)
    fields = _renamed({"output": "", **fields} if "instruction" in fields else fields)
    if "messages" not in fields and "prompt" not in fields:
        text = _field(fields, text_field)
        if not isinstance(text, str):
            raise Refused(f"field {text_field!r} holds {type(text).__name__}, not text")
        fields = {**fields, "prompt": text}
    if "messages" not in fields:
        fields = {**fields, "messages": _as_entries(fields["prompt"])}
    kept = {name: value for name, value in fields.items() if name != "finished"}
    messages = conversation_of(kept, "messages")
    while drop_answer and len(messages) > 1 and messages[-1].role == "assistant":
        messages.pop()
    if messages[-1].role == "assistant":
        raise Refused(
            "ends with the assistant: a prompt ends with the user. --drop-answers leaves out what "
            "the assistant says last"
        )
    return messages


def _as_entries(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _parsed(value: Any) -> Any:
    """The value of a text that holds JSON; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _checked_json(value: Any) -> str:
    try:
        return as_json(value)
    except TypeError as error:
        raise Refused(f"not JSON: {error}") from None


def _tools(value: Any) -> list[Any]:
    """Tools in OpenAI's form, which templates read."""
    tools = _parsed(value) or []
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Refused(f"tools: {type(value).__name__}, not a list of mappings")
    return [
        {"type": "function", "function": tool} if "name" in tool and "type" not in tool else tool
        for tool in tools
    ]


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        held = ", ".join(sorted(map(str, fields)))
        raise Refused(f"no field {name!r}: the record holds {held:.80}")
    return fields[name]


def _either(value: Any, name: str, role: str) -> list[Message]:
    """The messages of a field: a plain text is one message, a list is a conversation."""
    return [_checked(0, role, value)] if isinstance(value, str) else _listed(value, name)


def _listed(value: Any, name: str) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise Refused(f"field {name!r} holds {type(value).__name__}, not a list of messages")
    if not value:
        raise Refused(f"empty: {name!r} lists no message")
    return [_message(number, entry) for number, entry in enumerate(value)]


def _message(number: int, entry: Any) -> Message:
    if not isinstance(entry, Mapping):
        raise Refused(f"not a message: entry {number} is {type(entry).__name__}, not a mapping")
    role = "tool" if entry.get("role") == "function" else entry.get("role")
    if role not in ROLES:
        raise Refused(f"unknown role: {role!r:.40} in message {number}")
    weight = entry.get("weight")
    if weight not in (None, 0, 1) or (weight == 0 and role != "assistant"):
        raise Refused(
            f"weight: {weight!r:.20} of message {number} ({role}); an assistant's is 0 or 1"
        )
    more: dict[str, Any] = {}
    if calls := _calls(number, entry):
        more["tool_calls"] = calls
    if role == "tool":
        more |= {name: entry[name] for name in ("name", "tool_call_id") if entry.get(name)}
    content = entry.get("content")
    if content is None and calls:
        more["content"], content = None, ""
    content, reasoning = _content(number, content)
    texts = [text for text in (reasoning, *map(entry.get, REASONING_FIELDS)) if text]
    reasoning = texts[0] if texts else ""
    if reasoning and (role != "assistant" or any(text != reasoning for text in texts)):
        raise Refused(f"reasoning: message {number} ({role}); an assistant has one text of it")
    if not isinstance(reasoning, str):
        raise Refused(
            f"reasoning: that of message {number} is {type(reasoning).__name__}, not text"
        )
    message = _checked(number, role, content, reasoning)
    return replace(message, given=weight == 0, more=_checked_json(more) if more else "")


def _calls(number: int, entry: Mapping[str, Any]) -> list[Any]:
    """Tool calls in OpenAI's form, with arguments that are mappings, as templates read them."""
    calls = entry.get("tool_calls") or []
    if entry.get("function_call"):  # OpenAI's older form
        calls = [entry["function_call"]]
    checked = []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refused(f"tool calls: one of message {number} names no function")
        if entry.get("role") != "assistant":
            raise Refused(f"tool calls: message {number} ({entry.get('role')}), not an assistant's")
        arguments = function.get("arguments") or {}
        parsed = _parsed(arguments)
        named = {**function, "arguments": parsed if isinstance(parsed, Mapping) else arguments}
        start = call if "function" in call else {"type": "function"}
        checked.append({**start, "function": named})
    return checked


def _content(number: int, content: Any) -> tuple[str, str]:
    """A message's text, and the reasoning that stands in parts of its own."""
    if isinstance(content, str):
        return content, ""
    if content is None:
        raise Refused(f"no content: message {number}")
    if not isinstance(content, Sequence):
        raise Refused(f"not text: the content of message {number} is {type(content).__name__}")
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in texts or not isinstance(part.get(kind), str):
            name = "images" if kind in ("image", "image_url") else "not text"
            raise Refused(f"{name}: message {number} holds a part of type {kind!r:.40}")
        texts[kind].append(part[kind])
    return "".join(texts["text"]), "".join(texts["thinking"])


def _checked(number: int, role: str, content: str, reasoning: str = "") -> Message:
    require_no_marks(content + reasoning, f"message {number}")
    return Message(role, content, reasoning=reasoning)


def require_no_marks(text: str, where: str = "the answer") -> None:
    """Refuse a text that holds what the shared text keeps for itself."""
    if match := _ANY_MARK.search(text):
        raise Refused(
            f"control character: {where} holds U+{ord(match[0]):04X}, which stands for "
            "the end of a turn or a part of a message in the shared text"
        )
