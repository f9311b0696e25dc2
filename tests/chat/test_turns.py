"""What the model must write is trained on, and nothing else: in templates that the project has not
been written for, against `apply_chat_template`, and by students that generate the answers."""

import json
import re
from dataclasses import replace
from datetime import datetime

import chat_kit
import numpy as np
import pytest
import torch
from chat_kit import Message
from faults_kit import LONG
from tokenizers import Tokenizer, models, pre_tokenizers
from training_kit import save_tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner
from wild_kit import NEEDS_TOOLS, SPECIAL, WILD, tokenizer_of, wild

from vocagnolm.alignment import TextTokenizer, align
from vocagnolm.alignment.tokenizer import Frame
from vocagnolm.chat import (
    ChatTokenizer,
    Refused,
    conversation_of,
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
from vocagnolm.generate.reading import common_prefix_length

TALK = [
    *(Message("system", "Be kind."), Message("user", "What is 2+2?")),
    *(Message("assistant", "It is 4."), Message("user", "why? naïve")),
    Message("assistant", "so it is 東京"),
]


def theirs_of(chat: ChatTokenizer) -> PreTrainedTokenizerFast:
    inner = Tokenizer.from_str(chat.base._spanner.as_json())
    source = chat.template.source
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=source, **SPECIAL)


class Fixed(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def applied(chat: ChatTokenizer, messages: list[Message], **options):
    options = {"date_string": DATE, "return_dict": True, **options}
    own, error = chat.template._form, None
    for form in (own, own._replace(null=""), own._replace(null="", arguments_as_text=True)):
        written = [form.given(message) for message in messages]
        try:
            return theirs_of(chat).apply_chat_template(written, **options)
        except TypeError as raised:  # some templates want texts
            error = raised
    raise error


def trained_of(chat: ChatTokenizer, messages: list[Message], train_on="assistant", **options):
    text = shared_text(messages)
    (tokens,) = chat.outcomes([text], **options)
    assert not isinstance(tokens, str), tokens
    return tokens, trained_tokens(tokens, trained_ranges(text, train_on))


def reads(chat: ChatTokenizer, messages: list[Message], tools=None, train_on="assistant") -> bool:
    """What is read is what `apply_chat_template` reads, and what is trained on what is marked."""
    text = shared_text(messages)
    if isinstance(chat.outcomes([text])[0], str):
        return False
    tokens, mask = trained_of(chat, messages)
    marks = chat.template.marks_generation
    expected = applied(chat, messages, return_assistant_tokens_mask=marks, tools=tools)
    assert tokens.ids.tolist() == list(expected["input_ids"])
    if marks:
        # where a mark ends with a character of several tokens, transformers takes its first one
        apart = np.flatnonzero(mask != np.array(expected["assistant_masks"], bool))
        assert mask[apart].all()
        assert all((chat.bytes_of(int(tokens.ids[n])) or b"a")[0] & 0xC0 == 0x80 for n in apart)
    # by the rule: from where the prompt ends, if the template agrees with its own prompt
    _, by_rule = trained_of(chat, messages, "last", by_rule=True)
    prompt = applied(chat, messages[:-1], add_generation_prompt=True, tools=tools)["input_ids"]
    assert by_rule.any()
    if list(prompt) == tokens.ids[: len(prompt)].tolist():
        assert np.flatnonzero(by_rule)[0] == len(prompt)
    # all that the model writes is one piece, and only white space is left behind it
    (where,) = np.nonzero(by_rule)
    assert (np.diff(where) == 1).all()
    behind = chat.base._tokenizer.decode(tokens.ids[where[-1] + 1 :].tolist())
    assert not behind.replace("Ċ", "").replace("Ġ", "").strip()
    return True


@pytest.mark.parametrize("name", WILD)
def test_templates_of_the_wild(name, monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)
    chat = wild(name)
    for messages in (TALK, TALK[1:], TALK[1:3]):
        if not reads(chat, messages):
            assert (messages is TALK and name.startswith("gemma")) or "function" in name


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Which city."}},
                "required": ["city"],
            },
        },
    }
]


def tool_talk(n: int = 0, *, content=None, reasoning="", calls=1) -> dict:
    """A record in which a tool is called."""
    cities = ["東京", 'a "b"\nc', "Rome", "naïve"]
    thought = {"reasoning_content": reasoning} if reasoning else {}
    listed = [
        {
            "id": f"abcdefgh{k}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": cities[n + k], "days": n}},
        }
        for k in range(calls)
    ]
    results = [
        {"role": "tool", "name": "get_weather", "tool_call_id": one["id"], "content": '{"rain": 1}'}
        for one in listed
    ]
    messages = [
        {"role": "user", "content": f"Is it raining? {n}"},
        {"role": "assistant", "content": content, "tool_calls": listed, **thought},
        *results,
        {"role": "assistant", "content": f"Yes, in {cities[n]}.", **thought},
    ]
    return {"messages": messages, "tools": TOOLS}


TOOL_TALKS = {
    "null": tool_talk(),
    "escaped": tool_talk(1, content=""),
    "thought": tool_talk(content=None, reasoning="Let me think."),
    "two": tool_talk(calls=2),
    "said": tool_talk(content="Let me see."),
}
SHORT = ("qwen3", "qwen3_training", "gptoss", "llama3_1", "deepseekv3", "glm4moe_training")
SHORT += ("nemotron_3_nano_training", "axolotl__exaone4", "vllm__tool_chat_template_gemma4")
NO_CALLS = re.compile("cohere|idefics3|lfm2|llama3(_training)?$|phi3|^gemma|llava|2_5_vl|jamba$")


@pytest.mark.parametrize("name", WILD if LONG else SHORT)
def test_tool_calls_and_reasoning(name, monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)
    chat = wild(name)
    thought = [*TALK[1:4], Message("assistant", "so it is", reasoning="hm, 2\n3")]
    assert reads(chat, thought) or "function" in name
    for kind, record in TOOL_TALKS.items():
        messages = conversation_of(record, "messages")
        text = shared_text(messages)
        (outcome,) = chat.outcomes([text])
        if isinstance(outcome, str):
            assert kind == "two" or NO_CALLS.search(name), outcome
            continue
        rendering = chat.rendering(text)
        if rendering.changes and any("moves" in change for change in rendering.changes):
            assert "gemma" in name and kind in ("said", "escaped")
            continue
        assert reads(chat, messages, tools=TOOLS)
        tokens, mask = trained_of(chat, messages, by_rule=True)
        # a call is trained on, from its first word through its last; its result is not
        shown = b"".join(chat.bytes_of(index) or b"" for index in tokens.ids[mask].tolist())
        assert shown.count(b"get_weather") >= len(messages) - 3 and b"rain" not in shown
        reasons = [why for why in why_trained(text, tokens) if why]
        ends = 3 if name == "vllm__tool_chat_template_deepseekv31" else 2  # it ends the calls twice
        assert reasons.count("end of turn") <= ends and "tool call" in reasons
        if kind == "thought" and not any("reasoning" in change for change in rendering.changes):
            assert "reasoning" in reasons


def test_two_templates_share_the_words_of_a_tool_call():
    """Each model writes the call in its own form; names, keys and values are guided."""
    text = shared_text(conversation_of(tool_talk(1, reasoning="Let me think."), "messages"))
    ours, theirs = wild("qwen3").spans(text), wild("nemotron_3_nano").spans(text)
    found, encoded = align(ours, theirs), text.encode()
    trained = trained_tokens(ours, trained_ranges(text, "assistant"))
    guided = [encoded[a:b] for a, b in ours.spans[trained & (found.first >= 0)].tolist()]
    said = b"".join(guided).decode()
    for word in ("get_weather", "city", 'a \\"b'[:2], "days", "1", "Let me think."):
        assert word in said
    for token in np.flatnonzero(trained & (found.first >= 0)):
        (a, b), first, last = ours.spans[token], found.first[token], found.last[token]
        assert theirs.spans[first, 1] > a and theirs.spans[last, 0] < b


def test_a_template_that_cannot_call_tools_refuses():
    text = shared_text(conversation_of(tool_talk(content="x"), "messages"))
    assert chat_kit.chat("zephyr").outcomes([text]) == ["tool calls: the template leaves some out"]
    developer = [Message("developer", "Be kind."), *TALK[1:3]]
    assert "Be kind." in wild("qwen3").rendering(shared_text(developer)).text  # as a system message
    listed = conversation_of(
        {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}, "messages"
    )
    assert wild("phi3").rendering(shared_text(listed)).changes == ("leaves out the list of tools",)


@pytest.mark.parametrize("name", WILD if LONG else ("qwen3", "glm4moe", "axolotl__exaone4"))
def test_an_empty_answer_ends_its_turn_too(name, monkeypatch):
    """GLM-4 and EXAONE print nothing of an empty content: the model writes what closes it."""
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)
    chat = wild(name)
    asked, again = Message("user", "What is 2+2?"), Message("user", "why? naïve")
    ended = []
    for first in ("four", ""):
        talk = [asked, Message("assistant", first), again, Message("assistant", "so it is")]
        text = shared_text(talk)
        if isinstance(chat.outcomes([text])[0], str):
            assert "functiongemma" in name
            return
        tokens, mask = trained_of(chat, talk)
        turns = sorted({*tokens.turns[mask].tolist()})
        assert len(turns) == 2
        (own,) = np.nonzero(mask & (tokens.turns == turns[0]))
        ended.append(int(tokens.ids[own[-1]]))
        assert tokens.spans[own, 1].max() == turns[0] + 1  # the mark is the teacher's end too
        assert reads(chat, talk)
    assert ended[0] == ended[1]


def test_what_a_record_says_of_its_messages_is_followed():
    user = {"role": "user", "content": "a"}
    answers = [{"role": "assistant", "content": text} for text in ("no", "yes")]
    record = {"messages": [user, {**answers[0], "weight": 0}, user, answers[1]]}
    chat = wild("nemotron_3_nano")
    tokens, mask = trained_of(chat, conversation_of(record, "messages"))
    said = b"".join(chat.bytes_of(n) or b"" for n in tokens.ids[mask].tolist())
    assert b"yes" in said and b"no" not in said
    ends = {}
    for thinking in (True, False):
        asked = {"messages": [user], "chat_template_kwargs": {"enable_thinking": thinking}}
        ids = chat.prompt_ids(conversation_of(asked, "messages"))
        ends[thinking] = b"".join(chat.bytes_of(n) or b"" for n in ids)[-16:]
    assert ends[True].endswith(b"<think>\n") and ends[False].endswith(b"<think></think>")


def test_prompt_and_completion_end_to_end():
    """As TRL tokenizes two texts."""
    base = wild("qwen3").base
    chat = ChatTokenizer(base, template_of(base, "concatenate"))
    pair = conversation_of({"prompt": "2+2 =", "completion": " 4."}, "prompt_completion")
    tokens, mask = trained_of(chat, pair)
    inner = base._tokenizer
    inner.encode_special_tokens = False
    ids = [inner.encode(one, add_special_tokens=False).ids for one in ("2+2 =", " 4.", "</s>")]
    assert tokens.ids.tolist() == [*ids[0], *ids[1], *ids[2]]
    assert mask.tolist() == [False] * len(ids[0]) + [True] * len(ids[1] + ids[2])
    (reason,) = chat.outcomes([shared_text(TALK)])
    assert "concatenate is for a prompt and a completion" in reason


def test_disputed_tokens_are_named():
    chat = wild("gptoss_training")
    lines = survey(chat, [shared_text(TALK)]).warnings()
    assert any("marks generation, and adds '<|start|>' in 1 of 1" in line for line in lines)
    assert not survey(wild("llama3_training"), [shared_text(TALK)]).warnings()


def test_a_prompt_that_is_not_written_before_answers_is_named():
    chat, text = wild("nemotron_3_nano"), shared_text(TALK[1:3])
    (line,) = survey(chat, [text]).warnings()
    assert "ends a generation prompt with '\\n', which it does not write before answers" in line
    reasoned = [TALK[1], Message("assistant", "It is 4.", reasoning="2 and 2")]
    assert not survey(chat, [shared_text(reasoned)]).unwritten
    # the prompt of this one differs in its white space alone: the header is not trained on
    chat = wild("vllm__tool_chat_template_deepseekv31")
    tokens, mask = trained_of(chat, TALK[1:3])
    assert "<｜Assistant｜>" not in {chat.token(n) for n in tokens.ids[mask].tolist()}


ANSWERS = [
    [Message("user", f"what of {word}?"), Message("assistant", f"{word} is{' so' * n} {n}.")]
    for n, word in enumerate(["the sum", "naïve", "東京", "42"])
]

SHORT_ANSWERS = ("qwen3", "glm4moe_training", "axolotl__mistral_v3_tekken")
THINKING = [{}, *({"enable_thinking": one, "thinking": one} for one in (False, True))]
CANNOT_CALL = {
    "template: 'None' has no attribute 'strip'": "llama2 cohere cohere_training",
    "template: After the optional system message": "mistral",
    "template: Conversation roles must alternate": "cohere2 cohere2_training gemma gemma_training",
    "template: Invalid content type": "gemma3 gemma3_training",
    "template: None has no element 0": "idefics3 idefics3_training llava_next llava_next_training",
    "tool calls: the template leaves some out": (
        "lfm2 lfm2_training llama3 llama3_training phi3 phi3_training phi3_5 phi3_5_training "
        "qwen2_5_vl qwen2_5_vl_training"
    ),
}
# Of these the generation prompt ends with what the template does not write before such an answer.
PROMPTS_OTHERWISE = {
    "deepseekv3": "<think>\n",
    "deepseekv3_training": "<think>\n",
    "vllm__tool_chat_template_apertus": "<|assistant_start|>",
    "vllm__tool_chat_template_deepseekv31": "<｜Assistant｜>    </think>",
}
# Of these `{% generation %}` leaves out what must be written behind the generation prompt.
MARKS_TOO_LITTLE = {"diffusion_gemma_training": "leaves out '<|turn>'"}


def before_answers(chat: ChatTokenizer, messages: list[Message]) -> list[list[Message]]:
    """Per answer what stands before it. What the model has written of that is as it was trained to
    write it: without the reasoning that the template drops from it."""
    kept = {one.message for one in chat.rendering(shared_text(messages)).segments if one.start == 0}
    written = [
        replace(one, reasoning=one.reasoning if n in kept else "") for n, one in enumerate(messages)
    ]
    return [written[:n] for n, one in enumerate(messages) if one.role == "assistant"]


def assert_prompts_otherwise(chat, messages: list[Message], before: list[Message], end: str):
    """The generation prompt has an end that the rendering lacks, also in transformers."""
    prompt = applied(chat, before, add_generation_prompt=True, tokenize=False, return_dict=False)
    whole = applied(chat, messages, tokenize=False, return_dict=False)
    assert prompt.endswith(end) and not whole.startswith(prompt)
    assert whole.startswith(prompt.removesuffix(end))
    assert any(end.endswith(one) for one in survey(chat, [shared_text(messages)]).unwritten)


def asked_as_trained(chat: ChatTokenizer, messages: list[Message]) -> list[Message] | str:
    """The conversation with the variables, of those that turn thinking on and off, with which the
    template prompts for each answer as it writes it, where there are any; a refusal otherwise."""
    for variables in THINKING:
        more = {**messages[0].fields, **({"chat_template_kwargs": variables} if variables else {})}
        set_so = [replace(messages[0], more=json.dumps(more) if more else ""), *messages[1:]]
        (tokens,) = chat.outcomes([shared_text(set_so)])
        if isinstance(tokens, str):
            return tokens
        prompts = map(chat.prompt_ids, before_answers(chat, set_so))
        if all(tokens.ids[: len(one)].tolist() == one for one in prompts):
            return set_so
    return messages


@pytest.mark.parametrize("name", ["llama2", *(["mistral", *WILD] if LONG else SHORT_ANSWERS)])
def test_a_student_generates_what_it_was_trained_on(name, monkeypatch):
    """A loss near zero proves nothing: tokens that have no loss are never written. Every answer and
    tool call is asked for with the template's generation prompt, and written to the end of its
    turn, token for token."""
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)
    chat = chat_kit.chat(name) if name in ("llama2", "mistral") else wild(name)
    records = [tool_talk(n, reasoning=f"thought {n}") for n in range(3 if LONG else 1)]
    for record in records:
        del record["tools"]
        record["messages"][-1]["reasoning_content"] += " again"
    talks = [*ANSWERS, *(conversation_of(record, "messages") for record in records)]
    if name in NEEDS_TOOLS:
        assert chat.outcomes([shared_text(talks[0])]) == [f"template: {NEEDS_TOOLS[name]}"]
        tools = json.dumps({"tools": TOOLS})
        talks = [[replace(one[0], more=tools), *one[1:]] for one in talks]
    asked = [asked_as_trained(chat, messages) for messages in talks]
    refused = [one for one in asked if isinstance(one, str)]
    (reason,) = [one for one, names in CANNOT_CALL.items() if name in names.split()] or [None]
    assert asked[len(asked) - (len(records) if reason else 0) :] == refused
    assert all(one.startswith(reason) for one in refused)
    marks_too_little = name in MARKS_TOO_LITTLE
    read = [
        (messages, *trained_of(chat, messages, by_rule=marks_too_little))
        for messages in asked
        if not isinstance(messages, str)
    ]
    if marks_too_little:
        texts = [shared_text(messages) for messages, _, _ in read]
        assert MARKS_TOO_LITTLE[name] in survey(chat, texts).disputed
    rows = [tokens.ids.tolist() for _, tokens, _ in read]
    skipped = common_prefix_length(rows)  # what all begin with tells none of them apart
    size = int(max(chat.vocabulary.values())) + 1
    model = chat_kit.learned_by_heart(
        size, [row[skipped:] for row in rows], [mask[skipped:] for _, _, mask in read]
    )
    differs = False
    for messages, tokens, mask in read:
        starts = np.flatnonzero(np.diff(mask, prepend=False) & mask).tolist()
        for start, before in zip(starts, before_answers(chat, messages), strict=True):
            prompt = chat.prompt_ids(before)
            if tokens.ids[: len(prompt)].tolist() == prompt:
                assert skipped < start <= len(prompt)
                start = len(prompt)
            else:
                differs = True
                assert_prompts_otherwise(chat, messages, before, PROMPTS_OTHERWISE[name])
            stop = start + int(np.argmin([*mask[start:], False]))
            with torch.no_grad():  # greedy: as long as each is the likeliest behind those before
                read_ids = torch.from_numpy(tokens.ids[skipped:stop].astype(np.int64))
                likeliest = model(read_ids[None]).logits[0].argmax(-1)[start - skipped - 1 : -1]
            assert likeliest.tolist() == tokens.ids[start:stop].tolist()
    assert differs == (name in PROMPTS_OTHERWISE)


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


def in_pieces(name: str) -> ChatTokenizer:
    """Behind a control token its texts begin with a space."""
    return tokenizer_of(WILD[name].read_text("utf-8"), kind="sentencepiece always")


READ = [(wild, name) for name in WILD if name not in NEEDS_TOOLS]
READ += [(chat_kit.chat, name) for name in chat_kit.SHAPES]
READ += [(in_pieces, name) for name in ("gptoss", "qwen3", "axolotl__command_a_tool_use")]


@pytest.mark.parametrize(("chat_of", "name"), READ)
def test_answers_are_read_as_the_template_holds_them(chat_of, name):
    """What the template writes before and behind a content is no part of it."""
    chat = chat_of(name)
    ends = chat.end_of_turn
    for reasoning in ("", "hm, 2\n3"):
        messages = [TALK[1], Message("assistant", "so it is.\n東京", reasoning=reasoning)]
        tokens, mask = trained_of(chat, messages, by_rule=True)
        written = tokens.ids[mask].tolist()
        written = written[: written.index(ends)] if ends in written else written
        text = b"".join(chat.private_bytes_of(n) or b"" for n in written).decode()
        drops = chat.rendering(shared_text(messages)).changes
        assert chat.answer_of(text) == ("" if drops else reasoning, messages[-1].content)


def test_answers_in_parts():
    def private(text: str) -> str:
        return chat._aliased(text)

    chat = wild("gptoss")
    thought = private("<|channel|>analysis<|message|>2 and 2")
    final = private("<|end|><|start|>assistant<|channel|>final<|message|>")
    remark = private("<|end|><|start|>assistant<|channel|>commentary<|message|> so")
    assert chat.answer_of(thought + final + "It is <|end|> 4.") == ("2 and 2", "It is <|end|> 4.")
    assert chat.answer_of(thought + remark + final + "4")[1] == "4"
    assert chat.answer_of(thought) == ("2 and 2", "")  # broken off
    assert chat.answer_of("4 without any") == ("", "4 without any")
    assert wild("qwen3").answer_of("<think>\n\n</think>\n\n4") == ("", "4")
    assert wild("qwen3").answer_of("<think>\nso") == ("so", "")
    assert wild("nemotron_3_nano").answer_of("so\n</think>\n4") == ("so", "4")
    # of this one the prompt opens the reasoning, and no rendering shows any
    assert wild("deepseekv3").answer_of("so it\n</think>\n\n4") == ("so it", "\n\n4")
    assert wild("deepseekv3").answer_of("4") == ("", "4")
