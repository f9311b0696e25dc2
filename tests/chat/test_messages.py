"""Conversations out of records: what is read, and what is refused, counted and named."""

import pickle

import chat_kit
import pytest

from vocagnolm.chat import Message, Refused, conversation_of, messages_of, shared_text, template_of
from vocagnolm.chat.messages import format_of


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
    with pytest.raises(Refused, match="unknown role: 'observation' in message 0"):
        conversation_of({"conversations": [{"from": "observation", "value": "x"}]}, "messages")
    assert format_of({"text": "x", "messages": talk}, "text") == "text"
    assert format_of({"prompt": "x", "messages": talk}, "text") == "messages"
    assert format_of({"prompt": "x", "completion": "y"}, "text") == "prompt_completion"
    assert format_of({"prompt": "x"}, "text") is None


REFUSED = {
    "tool calls: message 1 (assistant)": [
        {"role": "assistant", "content": None, "tool_calls": [1]}
    ],
    "tool calls: message 1 (tool)": [{"role": "tool", "content": "3"}],
    "unknown role: 'critic' in message 1": [{"role": "critic", "content": "no"}],
    "images: message 1 holds a part of type 'image'": [
        {"role": "user", "content": [{"type": "image", "url": "x"}]}
    ],
    "no content: message 1": [{"role": "assistant", "content": None}],
    "not text: the content of message 1 is int": [{"role": "assistant", "content": 3}],
    "not a message: entry 1 is str, not a mapping": ["hello"],
    "control character: message 1 holds U+0003": [{"role": "user", "content": "a\x03"}],
    "reasoning apart: message 1 holds 'thinking'": [
        {"role": "assistant", "content": "a", "thinking": "b"}
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
        ({"messages": [], "tools": [{}]}, "tool calls: the record lists tools"),
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
