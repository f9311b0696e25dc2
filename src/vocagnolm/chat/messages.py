"""Conversations as they stand in files, and as the one shared text that both models are laid over.

```
shared text:  content MARK content MARK ...        one MARK a message: the end of its turn
```

The mark is one byte, and which one says whose turn it was. So a conversation is a text like any
other: it has a hash, it may be sent to a worker, and it can be taken apart again.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vocagnolm.recipe.sections import Format as Format

CONVERSATION_FIELDS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
RENAMED_FIELDS = ("conversations", "system", "instruction", "input", "output", "tools")
"""ShareGPT's and Alpaca's, which are read where there is neither `messages` nor `prompt`."""
ROLES = ("system", "user", "assistant")
_MARKS = {"system": "\x01", "user": "\x02", "assistant": "\x03"}
_GIVEN_MARK = "\x04"
_ROLE_OF = {mark: (role, False) for role, mark in _MARKS.items()} | {
    _GIVEN_MARK: ("assistant", True)
}
_MESSAGE = re.compile("([^\x01-\x04]*)([\x01-\x04])")
_ANY_MARK = re.compile("[\x01-\x04]")
# what a template may print and we would lose
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Refused(ValueError):
    """A conversation that cannot be used. Its text is `kind: more`; kinds are counted."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    given: bool = False
    """An assistant's message that belongs to the prompt, or has weight 0: never trained on."""

    @property
    def mark(self) -> str:
        return _GIVEN_MARK if self.given else _MARKS[self.role]


def shared_text(messages: Sequence[Message]) -> str:
    return "".join(message.content + message.mark for message in messages)


def messages_of(text: str) -> list[Message]:
    """The conversation behind a shared text."""
    found, end = [], 0
    for match in _MESSAGE.finditer(text):
        role, given = _ROLE_OF[match[2]]
        found.append(Message(role, match[1], given))
        end = match.end()
    if not found or end != len(text):
        raise ValueError(f"not the shared text of a conversation: {text[-60:]!r}")
    return found


def is_mark(byte: int) -> bool:
    """Whether a byte of a shared text is the end of a turn."""
    return chr(byte) in _ROLE_OF


def is_conversation(text: str) -> bool:
    return text[-1:] in _ROLE_OF


def split_answer(text: str) -> tuple[str, str]:
    """A shared text up to its last mark, and what stands behind it."""
    end = max(text.rfind(mark) for mark in _ROLE_OF) + 1
    return text[:end], text[end:]


def readable(text: str) -> str:
    """A shared text for the eye: `role: content` a line."""
    return "\n".join(f"{message.role}: {message.content}" for message in messages_of(text))


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
_FROM = {"human": "user", "gpt": "assistant"}


def _renamed(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record in the words of the two formats, where it is ShareGPT's or Alpaca's. What a row of a
    table lacks is None."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if _format_of(fields) is not None:
        return fields
    names: dict[str, Any] = {}
    if isinstance(listed := fields.get("conversations"), list | tuple):
        names["messages"] = [_renamed_message(entry) for entry in listed]
        if fields.get("system"):
            names["messages"].insert(0, {"role": "system", "content": fields["system"]})
    elif "instruction" in fields and "output" in fields:
        asked = [fields["instruction"], *([fields["input"]] if fields.get("input") else [])]
        texts = all(isinstance(one, str) for one in asked)
        prompt = "\n\n".join(asked) if texts else asked
        if fields.get("system"):
            start = {"role": "system", "content": fields["system"]}
            prompt = [start, {"role": "user", "content": prompt}]
        names |= {"prompt": prompt, "completion": fields["output"]}
    return {**fields, **names}


def _renamed_message(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or "from" not in entry:
        return entry
    return {**entry, "role": _FROM.get(entry["from"], entry["from"]), "content": entry.get("value")}


def conversation_of(fields: Mapping[str, Any], format_: Format) -> list[Message]:
    """The messages of a record, or a `Refused` that says why not. Rows of both formats may stand in
    one file."""
    fields = _renamed(fields)
    format_ = format_ if _FIELD_OF[format_] in fields else _format_of(fields) or format_
    if fields.get("tools"):
        raise Refused("tool calls: the record lists tools")
    if options := _kept(fields.get("chat_template_kwargs")):
        raise Refused(
            f"chat_template_kwargs: the record sets {', '.join(map(str, options))!r:.60}; set it "
            "for all records with template_options"
        )
    if format_ == "messages":
        messages = _listed(_field(fields, "messages"), "messages")
    else:
        prompt, completion = _field(fields, "prompt"), _field(fields, "completion")
        messages = [
            replace(m, given=m.role == "assistant") for m in _either(prompt, "prompt", "user")
        ] + _either(completion, "completion", "assistant")
    if not any(message.content for message in messages):
        raise Refused("empty: no message has content")
    return messages


def _kept(value: Any) -> Any:
    """What tables hold for a row that lacks a field is nothing: None, or a mapping of Nones."""
    if isinstance(value, Mapping):
        return {name: one for name, one in value.items() if one is not None}
    return value


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        held = ", ".join(sorted(map(str, fields)))
        raise Refused(f"no field {name!r}: the record holds {held:.80}")
    return fields[name]


def _either(value: Any, name: str, role: str) -> list[Message]:
    """A plain text is one message; a list is a conversation."""
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
    role = entry.get("role")
    if entry.get("tool_calls") or entry.get("function_call") or role in ("tool", "function"):
        raise Refused(f"tool calls: message {number} ({role})")
    if role not in ROLES:
        raise Refused(f"unknown role: {role!r:.40} in message {number}")
    for name in _REASONING:
        if entry.get(name):
            raise Refused(
                f"reasoning apart: message {number} holds {name!r} beside its content; write it "
                "into the content"
            )
    weight = entry.get("weight")
    if weight not in (None, 0, 1) or (weight == 0 and role != "assistant"):
        raise Refused(
            f"weight: {weight!r:.20} of message {number} ({role}); an assistant's is 0 or 1"
        )
    found = _checked(number, role, _content(number, entry.get("content")))
    return replace(found, given=True) if weight == 0 else found


def _content(number: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise Refused(f"no content: message {number}")
    if isinstance(content, Sequence):
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                name = "images" if kind in ("image", "image_url") else "not text"
                raise Refused(f"{name}: message {number} holds a part of type {kind!r:.40}")
            parts.append(part["text"])
        return "".join(parts)
    raise Refused(f"not text: the content of message {number} is {type(content).__name__}")


def _checked(number: int, role: str, content: str) -> Message:
    if found := _ANY_MARK.search(content):
        raise Refused(
            f"control character: message {number} holds U+{ord(found[0]):04X}, which stands for "
            "the end of a turn in the shared text"
        )
    return Message(role, content)
