"""What the model must write is trained on, and nothing else: in templates that the project has not
been written for, against `apply_chat_template`, and by students that generate the answers."""

import json
import re
from datetime import datetime
from functools import cache

import chat_kit
import made
import numpy as np
import pytest
import torch
from chat_kit import Message
from faults_kit import LONG
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from training_kit import save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alignment.tokenizer import Frame
from vocagnolm.chat import (
    ChatTokenizer,
    Refused,
    render,
    shared_text,
    survey,
    template_of,
    trained_ranges,
    trained_tokens,
)
from vocagnolm.chat.survey import why_trained
from vocagnolm.chat.template import DATE, ChatTemplate
from vocagnolm.cli import app

WILD = sorted((chat_kit.TEMPLATES / "trl").glob("*.jinja"))
CONTROL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\[/?INST\]"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    *(Message("system", "Be kind."), Message("user", "What is 2+2?")),
    *(Message("assistant", "It is 4."), Message("user", "why? naïve")),
    Message("assistant", "so it is 東京"),
]


def tokenizer_of(source: str, kind: str = "byte-level", **added) -> ChatTokenizer:
    inner = Tokenizer.from_str(made.tokenizer(kind).to_str())
    control = sorted({*CONTROL.findall(source), *SPECIAL.values()})
    inner.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, **added) for token in control]
    )
    frame = Frame(template=source, special_tokens=tuple(SPECIAL.items()))
    base = TextTokenizer(inner, name="toy", frame=frame)
    return ChatTokenizer(base, template_of(base))


@cache
def wild(name: str) -> ChatTokenizer:
    return tokenizer_of((chat_kit.TEMPLATES / "trl" / f"{name}.jinja").read_text("utf-8"))


def theirs_of(chat: ChatTokenizer) -> PreTrainedTokenizerFast:
    inner = Tokenizer.from_str(chat.base._spanner.as_json())
    source = chat.template.source
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=source, **SPECIAL)


class Fixed(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def applied(chat: ChatTokenizer, messages: list[Message], **options):
    written = [{"role": m.role, "content": m.content} for m in messages]
    options = {"date_string": DATE, "return_dict": True, **options}
    return theirs_of(chat).apply_chat_template(written, **options)


def trained_of(chat: ChatTokenizer, messages: list[Message], train_on="assistant", **options):
    text = shared_text(messages)
    (tokens,) = chat.outcomes([text], **options)
    assert not isinstance(tokens, str), tokens
    return tokens, trained_tokens(tokens, trained_ranges(text, train_on))


@pytest.mark.parametrize("name", [path.stem for path in WILD])
def test_templates_of_the_wild(name, monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)
    chat = wild(name)
    for messages in (TALK, TALK[1:], TALK[1:3]):
        if isinstance(chat.outcomes([shared_text(messages)])[0], str):
            assert messages is TALK and name.startswith("gemma"), "no system messages"
            continue
        tokens, mask = trained_of(chat, messages)
        marks = chat.template.marks_generation
        expected = applied(chat, messages, return_assistant_tokens_mask=marks)
        assert tokens.ids.tolist() == list(expected["input_ids"])
        if marks:
            assert mask.tolist() == [bool(one) for one in expected["assistant_masks"]]
        # by the rule: from where the prompt ends, if the template agrees with its own prompt
        _, by_rule = trained_of(chat, messages, "last", by_rule=True)
        prompt = applied(chat, messages[:-1], add_generation_prompt=True)["input_ids"]
        assert by_rule.any()
        if list(prompt) == tokens.ids[: len(prompt)].tolist():
            assert np.flatnonzero(by_rule)[0] == len(prompt)
        # all that the model writes is one piece, and only white space is left behind it
        (where,) = np.nonzero(by_rule)
        assert (np.diff(where) == 1).all()
        behind = chat.base._tokenizer.decode(tokens.ids[where[-1] + 1 :].tolist())
        assert not behind.replace("Ċ", "").strip()


def test_disputed_tokens_are_named():
    chat = wild("gptoss_training")
    lines = survey(chat, [shared_text(TALK)]).warnings()
    assert any("marks generation, and adds '<|start|>' in 1 of 1" in line for line in lines)
    assert not survey(wild("llama3_training"), [shared_text(TALK)]).warnings()


ANSWERS = [
    [Message("user", f"what of {word}?"), Message("assistant", f"{word} is{' so' * n} {n}.")]
    for n, word in enumerate(["the sum", "naïve", "東京", "42"])
]


@pytest.mark.parametrize(
    "name",
    ["llama2", "qwen3", "glm4moe_training", *(["mistral", "phi3", "gptoss"] if LONG else [])],
)
def test_a_student_generates_what_it_was_trained_on(name):
    """A loss near zero proves nothing: tokens that have no loss are never written."""
    chat = chat_kit.chat(name) if name in ("llama2", "mistral") else wild(name)
    read = [trained_of(chat, messages) for messages in ANSWERS]
    room = max(len(tokens) for tokens, _ in read)
    ids = torch.zeros(len(read), room, dtype=torch.long)
    labels = torch.full((len(read), room), -100)
    for row, (tokens, mask) in enumerate(read):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.ids.astype(np.int64))
        labels[row, : len(tokens)] = torch.from_numpy(np.where(mask, tokens.ids, -100))
    torch.manual_seed(0)
    size = int(max(chat.vocabulary.values())) + 1
    model = LlamaForCausalLM(
        LlamaConfig(
            **{"vocab_size": size, "hidden_size": 48, "intermediate_size": 96},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True},
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 1e-2:
            break
    for (tokens, mask), messages in zip(read, ANSWERS, strict=True):
        prompt = chat.prompt_ids(messages[:-1])
        wanted = tokens.ids[len(prompt) : np.flatnonzero(mask)[-1] + 1].tolist()
        assert tokens.ids[: len(prompt)].tolist() == prompt
        found = list(prompt)
        with torch.no_grad():
            for _ in wanted:
                found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
        assert found[len(prompt) :] == wanted


def test_control_tokens_take_no_content():
    """Phi-3's role markers take the white space behind them."""
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{# <|user|> <|assistant|> #}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    messages = [Message("user", " hi"), Message("assistant", " yes")]
    for strip in ("rstrip", "lstrip"):
        chat = tokenizer_of(source, **{strip: True})
        tokens, mask = trained_of(chat, [messages[0], Message("assistant", " yes ")])
        control = chat._is_control[tokens.ids]
        encoded = shared_text([messages[0], Message("assistant", " yes ")]).encode()
        for start, end in tokens.spans[control].tolist():
            assert start == end or (end - start == 1 and encoded[start] < 5)
        assert [chat.token(n) for n in tokens.ids[mask & control]] == ["<|end|>"]
        assert tokens.lost_bytes > 0
        assert tokens.ids.tolist() == list(
            applied(chat, [messages[0], Message("assistant", " yes ")])["input_ids"]
        )


REWRITES = [
    *("m.content | upper", "m.content | capitalize", "m.content | title", "m.content | reverse"),
    *("m.content | replace('e', 'a')", "m.content | replace('. ', '! ')", "m.content | escape"),
    *("m.content | replace(' ', '  ')", "m.content | replace('\n', ' ')", "m.content | tojson"),
    *("m.content | replace('\n', '\n\n')", "m.content | wordwrap(8)", "m.content | indent(2)"),
    "m.content | replace('yes', 'no') if 'why' in m.content else m.content | lower",
]
CONTENTS = ['Hello there. "One" & two:\nthe why yes, 3!', "a.\n. e", "Yes. the\n(42)? why yes"]


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_template_that_rewrites_contents_is_refused(rewrite, content):
    template = ChatTemplate(f"{{% for m in messages %}}<{{{{ {rewrite} }}}}>{{% endfor %}}")
    messages = [Message("user", "42"), Message("assistant", content)]
    whole = "".join(f"<{m.content}>" for m in messages)
    try:
        found = render(template, messages)
    except Refused as error:
        assert "it changes contents in a way that cannot be followed" in str(error)
    else:
        assert found.text == whole and not found.changes


def test_private_characters_are_contents():
    chat = chat_kit.chat("llama3")
    answer = "\U00100000\U00100001 \U000f0000\ue000 \U0010fffd"
    text = shared_text([Message("user", "hi"), Message("assistant", answer)])
    tokens = chat.spans(text)
    plain = chat.spans(shared_text([Message("user", "hi"), Message("assistant", "a")]))
    assert tokens.lost_bytes == 0
    assert chat._is_control[tokens.ids].sum() == chat._is_control[plain.ids].sum()
    assert applied(chat, [Message("user", "hi")])  # the tokenizer is whole


def test_tokens_without_text_are_trained_with_those_around_them():
    """T5 reads the letter behind the white space that it adds as a token without any text."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("b", -2.0), ("h", -2.0), ("i", -2.0)]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bare = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    bare += "{{ '<|im_start|>' if add_generation_prompt }}"
    base = TextTokenizer(inner, name="t5", frame=Frame(template=bare))
    chat = ChatTokenizer(base, template_of(base))
    tokens, mask = trained_of(chat, [Message("user", "hi"), Message("assistant", "a")])
    assert [chat.token(n) for n in tokens.ids[mask]] == ["▁", "a", "<|im_end|>"]


def test_why_tokens_are_trained_on():
    chat = wild("gptoss")
    text = shared_text(TALK[1:3])
    reasons = why_trained(text, chat.spans(text))
    assert [one for one in dict.fromkeys(reasons) if one] == [
        *("written by the template behind the prompt", "content", "end of turn"),
    ]


def test_align_says_what_is_trained_on(tmp_path):
    save_tokenizer(tmp_path / "bytes", kind="bytes")
    source = wild("gptoss").template.source
    ours = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"]
    chat_kit.save_chat_tokenizer(tmp_path / "student", tmp_path / "bytes", source, ours)
    theirs = ["<|im_start|>", "<|im_end|>"]
    chat_kit.save_chat_tokenizer(tmp_path / "teacher", tmp_path / "bytes", chat_kit.CHATML, theirs)
    chat_kit.write_conversations(tmp_path / "talks.jsonl", [TALK[1:3]])
    call = ["align", "--student", tmp_path / "student", "--teacher", tmp_path / "teacher"]
    call = [str(one) for one in (*call, "--messages", tmp_path / "talks.jsonl")]
    drawn = CliRunner().invoke(app, call)
    assert "trained (end of turn): <|return|>" in drawn.stdout, drawn.output
    assert "trained (written by the template behind the prompt): <|channel|>" in drawn.stdout
    tokens = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)["student"]
    assert [one["token"] for one in tokens if one["trained"] == "end of turn"] == ["<|return|>"]
    assert tokens[0]["trained"] is None
