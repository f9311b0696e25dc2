"""Conversations out of records: what is read, and what is refused, counted and named."""

import json
import pickle

import chat_kit
import pytest

from vocagnolm.chat import Message, Refused, conversation_of, messages_of, shared_text, template_of
from vocagnolm.chat.messages import format_of, record_of


def test_there_and_back():
    messages = [
        *(Message("system", "Be kind."), Message("user", ""), Message("assistant", "naïve\n")),
        *(Message("assistant", "given", given=True), Message("user", "東京")),
    ]
    text = shared_text(messages)
    assert messages_of(text) == messages
    assert len(text.encode()) == sum(len(m.content.encode()) + 1 for m in messages)
    with pytest.raises(ValueError, match="not the shared text of a conversation"):
        messages_of("plain text")


def test_records():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pair = [Message("user", "a"), Message("assistant", "b")]
    assert conversation_of({"messages": talk}, "messages") == pair
    assert conversation_of({"prompt": "a", "completion": "b"}, "prompt_completion") == pair
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, talk[1]]
    assert conversation_of({"messages": parts, "id": 3}, "messages") == pair
    longer = {"prompt": [*talk, talk[0]], "completion": talk[1:]}
    assert conversation_of(longer, "prompt_completion") == [
        *(Message("user", "a"), Message("assistant", "b", given=True), *pair),
    ]
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert format_of(shared, "text") == "messages"
    assert conversation_of(shared, "messages") == pair
    system = Message("system", "s")
    assert conversation_of({**shared, "system": "s"}, "messages") == [system, *pair]
    alpaca = {"instruction": "a", "input": "", "output": "b"}
    assert format_of(alpaca, "text") == "prompt_completion"
    assert conversation_of(alpaca, "prompt_completion") == pair
    more = {**alpaca, "input": "c", "system": "s"}
    assert conversation_of(more, "prompt_completion") == [
        system,
        Message("user", "a\n\nc"),
        pair[1],
    ]
    with pytest.raises(Refused, match="unknown role: 'critic' in message 0"):
        conversation_of({"conversations": [{"from": "critic", "value": "x"}]}, "messages")
    # a system text beside the messages
    for record in ({"messages": talk}, {"prompt": "a", "completion": "b"}):
        format_ = format_of(record, "text")
        assert conversation_of({**record, "system": "s"}, format_) == [system, *pair]
    own = {"messages": [{"role": "system", "content": "s"}, *talk], "system": "s"}
    assert conversation_of(own, "messages") == [system, *pair]
    with pytest.raises(Refused, match="system: the record holds one beside its messages"):
        conversation_of({**own, "system": "t"}, "messages")
    assert format_of({"text": "x", "messages": talk}, "text") == "text"
    assert format_of({"prompt": "x", "messages": talk}, "text") == "messages"
    assert format_of({"prompt": "x", "completion": "y"}, "text") == "prompt_completion"
    assert format_of({"prompt": "x"}, "text") is None


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": "x"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_tools_and_reasoning():
    record = {
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "hm"},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
            {"role": "assistant", "content": "b", "reasoning_content": "so"},
        ],
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    found = conversation_of(record, "messages")
    assert [m.role for m in found] == ["developer", "user", "assistant", "tool", "assistant"]
    assert [m.reasoning for m in found] == ["", "", "hm", "", "so"]
    assert found[2].fields == {"tool_calls": [CALL], "content": None}
    assert found[3].fields == {"name": "f", "tool_call_id": "c1"}
    assert found[0].fields == {k: record[k] for k in ("tools", "chat_template_kwargs")}
    text = shared_text(found)
    assert messages_of(text) == found
    assert conversation_of(record_of(text), "messages") == found
    # the same in the forms of others
    string = {**CALL, "function": {"name": "f", "arguments": '{"a": 1, "b": "x"}'}}
    older = {"role": "assistant", "content": None, "function_call": string["function"]}
    for entry in (
        {"role": "assistant", "content": None, "tool_calls": [string], "reasoning": "hm"},
        {"role": "assistant", "tool_calls": [string], "thinking": "hm", "reasoning_content": "hm"},
    ):
        other = {**record, "messages": [*record["messages"][:2], entry, *record["messages"][3:]]}
        assert conversation_of({**other, "tools": json.dumps([TOOL])}, "messages") == found
        assert conversation_of({**other, "tools": [TOOL["function"]]}, "messages") == found
    (call,) = conversation_of({"messages": [older]}, "messages")[0].fields["tool_calls"]
    assert call == {k: CALL[k] for k in ("type", "function")}
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]
    (message,) = conversation_of(
        {"messages": [{"role": "assistant", "content": parts}]}, "messages"
    )
    assert (message.reasoning, message.content) == ("hm", "b")
    share = [
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "3"},
    ]
    called, result = conversation_of({"conversations": share}, "messages")
    assert called.fields["tool_calls"] == [call] and (result.role, result.content) == ("tool", "3")
    # what a row of a table lacks is null
    filled = {**CALL, "function": {"name": "f", "arguments": {"a": 1, "b": "x", "c": None}}}
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [filled]}]}
    (message,) = conversation_of(row, "messages", of_a_table=True)
    assert message.fields["tool_calls"] == [CALL]
    assert conversation_of(row, "messages")[0].fields["tool_calls"] == [filled]


REFUSED = {
    "tool calls: one of message 1 names no function": [
        {"role": "assistant", "content": None, "tool_calls": [1]}
    ],
    "tool calls: message 1 (user), not an assistant's": [
        {"role": "user", "content": "3", "tool_calls": [{"name": "f"}]}
    ],
    "unknown role: 'critic' in message 1": [{"role": "critic", "content": "no"}],
    "images: message 1 holds a part of type 'image'": [
        {"role": "user", "content": [{"type": "image", "url": "x"}]}
    ],
    "no content: message 1": [{"role": "assistant", "content": None}],
    "not text: the content of message 1 is int": [{"role": "assistant", "content": 3}],
    "not a message: entry 1 is str, not a mapping": ["hello"],
    "control character: message 1 holds U+0003": [{"role": "user", "content": "a\x03"}],
    "control character: message 1 holds U+FDD5": [{"role": "user", "content": "a\ufdd5"}],
    "reasoning: message 1 (user)": [{"role": "user", "content": "a", "thinking": "b"}],
    "reasoning: message 1 (assistant); an assistant has one text": [
        {"role": "assistant", "content": "a", "thinking": "b", "reasoning": "c"}
    ],
    "reasoning: that of message 1 is list": [
        {"role": "assistant", "content": "a", "thinking": ["b"]}
    ],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_is_named(reason):
    with pytest.raises(Refused) as refused:
        conversation_of(
            {"messages": [{"role": "user", "content": "a"}, *REFUSED[reason]]}, "messages"
        )
    assert str(refused.value).startswith(reason)


def test_records_without_a_conversation():
    for fields, reason in (
        ({"messages": []}, "empty: 'messages' lists no message"),
        ({"messages": "hi"}, "field 'messages' holds str, not a list of messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty: no message has content"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "x"}, "tools: str, not a list"),
        ({"text": "x"}, "no field 'messages'"),
    ):
        with pytest.raises(Refused, match=reason):
            conversation_of(fields, "messages")


def test_a_chat_tokenizer_travels():
    chat = chat_kit.chat("llama3")
    text = shared_text([Message("user", "hi"), Message("assistant", "<|eot_id|> yes")])
    again = pickle.loads(pickle.dumps(chat))
    assert again.spans(text).ids.tolist() == chat.spans(text).ids.tolist()
    assert again.template.fingerprint == chat.template.fingerprint
    assert again.fingerprint == chat.base.fingerprint


def test_where_a_template_comes_from(tmp_path):
    import made

    from vocagnolm.alignment import load_tokenizer
    from vocagnolm.errors import TokenizerError

    folder = made.save("byte-level", tmp_path / "model")
    plain = template_of(load_tokenizer(folder, check=False))
    assert plain.origin == "plain"
    talk = [Message("user", "hi"), Message("assistant", "yes")]
    assert plain.render(talk) == "user: hi\nassistant: yes\n"
    (folder / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": '
        '"{{ eos_token }}D"}], "eos_token": {"content": "<|endoftext|>"}}'
    )
    own = template_of(load_tokenizer(folder, check=False), options={"a": 1})
    assert (own.origin, own.source, own.options) == ("own", "{{ eos_token }}D", (("a", 1),))
    assert own.render(talk) == "<|endoftext|>D"
    (folder / "chat_template.jinja").write_text("J")
    assert template_of(load_tokenizer(folder, check=False)).source == "J"
    assert template_of(load_tokenizer(folder, check=False), "plain").origin == "plain"
    given = template_of(load_tokenizer(folder, check=False), str(folder / "chat_template.jinja"))
    assert (given.origin, given.source) == ("given", "J")
    assert given.fingerprint != own.fingerprint
    listed = template_of(load_tokenizer(folder, check=False), options={"tools": [{"a": 1}]})
    assert len({listed, listed, own}) == 2
    with pytest.raises(TokenizerError, match="the chat template nowhere cannot be read"):
        template_of(load_tokenizer(folder, check=False), "nowhere")
