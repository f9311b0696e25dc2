"""Contents are found in any template, tokens are laid over the shared text, and two models' tokens
meet over it alone."""

import chat_kit
import numpy as np
import pytest
from faults_kit import examples
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from vocagnolm.alignment import align
from vocagnolm.chat import Message, Refused, messages_of, render, shared_text, trained_ranges
from vocagnolm.chat.template import DATE, ChatTemplate
from vocagnolm.chat.tokens import trained_tokens
from vocagnolm.errors import TemplateError

NAMES = tuple(chat_kit.SHAPES)
WORDS = [
    *(
        "the sum",
        "naïve",
        "東京",
        "👩\u200d👩",
        "42",
        "\\frac{a}{b}",
        "{{ x }}",
        "assistant",
        "user",
    ),
    *(" ", "\n", "\t", "\n\n", "e\u0301", "</think>", "<think>", "<tool_response>"),
    *("<|im_end|>", "<|im_start|>assistant", "</s>", "[INST]", "<|eot_id|>", "<end_of_turn>"),
    *("<｜Assistant｜>", "<|end|>"),
]
contents = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)


@st.composite
def talks(draw: st.DrawFn) -> list[Message]:
    start = [Message("system", draw(contents))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        start += [Message("user", draw(contents)), Message("assistant", draw(contents))]
    return start


def rendered(name: str, messages: list[Message]):
    """The rendering, or nothing where the template refuses this order of roles."""
    try:
        return render(chat_kit.chat(name).template, messages)
    except Refused as error:
        assert str(error).startswith(("template: Conversation roles", "template: System role"))
        return None


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(60), deadline=None)
@given(messages=talks())
@example(messages=[Message("system", " s "), Message("user", "u"), Message("assistant", "<")])
@example(messages=[Message("user", "a"), Message("assistant", "b</think>\n\nc")])
@example(messages=[Message("user", "a"), Message("assistant", "<think>\nhm\n</think>\n\nyes")])
@example(messages=[Message("user", ""), Message("assistant", "<think>the sum</think>")])
def test_contents_are_found_exactly(name, messages):
    found = rendered(name, messages)
    assume(found is not None)
    assert found.text == chat_kit.chat(name).template.render(messages)
    for segment in found.segments:
        if segment.message is not None:
            content = messages[segment.message].content
            assert content[segment.start :].startswith(segment.text)
    for number, message in enumerate(messages):
        kept = "".join(s.text for s in found.segments if s.message == number)
        # whatever is not whole is said
        said = any(message.role in change for change in found.changes)
        assert kept.strip() == message.content.strip() or said


def brute_force(name: str, text: str) -> tuple[list[set[int]], list[bool]]:
    """Per token the bytes of the shared text that it spells, byte by byte, and whether it stands
    in the template's text alone."""
    chat = chat_kit.chat(name)
    messages = messages_of(text)
    found = render(chat.template, messages)
    origins = np.cumsum([0, *(len(m.content.encode()) + 1 for m in messages)]).tolist()
    laid = chat._lay(found, messages)
    place: list[int | None] = []
    for segment in found.segments:
        shown = segment.text
        if segment.template:
            shown = chat._control.sub(lambda match: chat._alias[match[0]], shown)
        if segment.message is None:
            place += [None] * len(shown.encode())
        else:
            before = len(messages[segment.message].content[: segment.start].encode())
            first = origins[segment.message] + before
            place += range(first, first + len(shown.encode()))
    assert len(place) == len(laid.text.encode())
    read = super(type(chat), chat).spans_batch([laid.text])[0]
    spelled = [{b for b in place[start:end] if b is not None} for start, end in read.spans.tolist()]
    return spelled, [not one for one in spelled]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(40), deadline=None)
@given(messages=talks())
def test_tokens_spell_what_their_spans_say(name, messages):
    assume(rendered(name, messages) is not None)
    text = shared_text(messages)
    tokens = chat_kit.chat(name).spans(text)
    spelled, template = brute_force(name, text)
    marks = {n for n, byte in enumerate(text.encode()) if byte < 5}
    ended = []
    for (start, end), bytes_, own in zip(tokens.spans.tolist(), spelled, template, strict=True):
        covered = set(range(start, end))
        if own:  # nothing, or the end of a turn
            assert covered <= marks and len(covered) <= 1
        else:
            assert bytes_ <= covered
            # all else that it covers is the end of a turn, or what the template left out between
            assert {min(bytes_), max(bytes_ | (covered & marks))} == {start, end - 1}
        ended += sorted(covered & marks)
    assert ended == sorted(set(ended)), "a turn ends once"
    assert (tokens.spans[1:, 0] >= tokens.spans[:-1, 1]).all()


@pytest.mark.parametrize("pair", [(a, b) for n, a in enumerate(NAMES) for b in NAMES[n + 1 :][:3]])
@settings(max_examples=examples(12), deadline=None)
@given(messages=talks())
def test_alignment_over_contents_alone(pair, messages):
    student, teacher = pair
    assume(rendered(student, messages) is not None and rendered(teacher, messages) is not None)
    text = shared_text(messages)
    ours, theirs = (chat_kit.chat(name).spans(text) for name in pair)
    found = align(ours, theirs)
    cover = [set(range(a, b)) for a, b in theirs.spans.tolist()]
    for token, (start, end) in enumerate(ours.spans.tolist()):
        touched = [n for n, bytes_ in enumerate(cover) if bytes_ & set(range(start, end))]
        expected = (touched[0], touched[-1]) if touched else (-1, -1)
        assert (found.first[token], found.last[token]) == expected
    _, template = brute_force(student, text)
    marks = [n for n, byte in enumerate(text.encode()) if byte < 5]
    for token in np.flatnonzero(template):
        start, end = ours.spans[token].tolist()
        ends_a_turn = end - start == 1 and start in marks
        assert ends_a_turn or found.first[token] == -1, "a marker token is guided"


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_apply_chat_template(name):
    base = chat_kit.base(name)
    special = dict(base.frame.special_tokens)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=base._tokenizer.from_str(base._spanner.as_json()),
        chat_template=base.frame.template,
        **special,
    )
    messages = [
        *(Message("user", "Hello  there,\nnaïve 東京?"), Message("assistant", "It is 42.")),
        *(Message("user", "{{ x }} [a]"), Message("assistant", "bye\n\nbye")),
    ]
    written = [{"role": m.role, "content": m.content} for m in messages]
    options = {"date_string": DATE} if name == "llama3" else {}
    expected = theirs.apply_chat_template(written, return_dict=False, **options)
    assert chat_kit.chat(name).spans(shared_text(messages)).ids.tolist() == list(expected)
    prompt = theirs.apply_chat_template(
        written[:-1], add_generation_prompt=True, return_dict=False, **options
    )
    assert chat_kit.chat(name).prompt_ids(messages[:-1]) == list(prompt)


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_written_in_a_content_are_text(name):
    control = chat_kit.SHAPES[name][3] or ("</s>",)
    chat = chat_kit.chat(name)
    plain = [Message("user", "ab"), Message("assistant", "cd")]
    written = [Message("user", f"a{control[-1]}b"), Message("assistant", f"c{control[0]}d")]
    ids, more = (chat.spans(shared_text(one)).ids for one in (plain, written))
    is_control = chat._is_control
    assert is_control[ids].sum() == is_control[more].sum()
    assert chat.base.id_of(control[0]) is not None


def test_the_end_of_a_turn_is_the_control_token_behind_it():
    text = shared_text([Message("user", "hi"), Message("assistant", "It is 4.")])
    expected = {
        **{"smollm2": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "llama2": "</s>"},
        **{"gemma": "<end_of_turn>", "deepseek": "<｜end▁of▁sentence｜>", "phi3": "<|end|>"},
    }
    for name, token in expected.items():
        chat = chat_kit.chat(name)
        tokens = chat.spans(text)
        (last,) = np.flatnonzero(tokens.spans[:, 1] - tokens.spans[:, 0] == 1)[-1:]
        assert tokens.spans[last].tolist() == [len(text) - 1, len(text)]
        assert chat.token(tokens.ids[last]) == token


def test_what_templates_do_to_contents_is_said():
    system, user = Message("system", "Be kind."), Message("user", "hi")
    long = [system, user, Message("assistant", "yes"), user, Message("assistant", "no ")]
    assert rendered("mistral", long).changes == (
        "strips the assistant's content",
        "moves the system's content",
    )
    thought = [user, Message("assistant", "<think>\nhm\n</think>\n\nyes"), user, long[-1]]
    assert rendered("qwen3", thought).changes == ("leaves out a part of the assistant's content",)
    kept = [s for s in rendered("qwen3", thought).segments if s.message == 1]
    assert [piece.text for piece in kept] == ["yes"]
    two = [system, system, user, Message("assistant", "yes")]
    assert rendered("llama3", two).changes == ()
    chosen = "messages if m.role != 'system'"
    ignoring = ChatTemplate(f"{{% for m in {chosen} %}}<{{{{ m.content }}}}>{{% endfor %}}")
    assert render(ignoring, long).changes == ("drops the system's content",)


def test_a_copy_of_a_content_is_not_aligned():
    body = "<{{ m.content | trim }}|{{ m.content | trim }}>"
    twice = ChatTemplate(f"{{% for m in messages %}}{body}{{% endfor %}}")
    found = render(twice, [Message("user", " hi"), Message("assistant", "yes")])
    assert found.text == "<hi|hi><yes|yes>"
    aligned = [(s.text, s.message, s.start) for s in found.segments if s.message is not None]
    assert aligned == [("hi", 0, 1), ("yes", 1, 0)]


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_ends_before_messages_that_leave_no_content(name):
    empty = [Message("user", ""), Message("assistant", "")]
    talk = [Message("system", ""), Message("user", ""), Message("assistant", "yes")]
    found = rendered(name, talk), rendered(name, [*talk, *empty])
    if None in found:  # it has no system messages
        talk = talk[1:]
        found = rendered(name, talk), rendered(name, [*talk, *empty])
    turns = [next(turn for turn in one.turns if turn.message == len(talk) - 1) for one in found]
    alone, followed = (
        one.text[turn.end : turn.stop] for one, turn in zip(found, turns, strict=True)
    )
    assert followed and alone.startswith(followed)


def test_a_template_that_cannot_be_followed_is_refused():
    messages = [Message("user", "Hi"), Message("assistant", "Yes")]
    shouting = ChatTemplate("{% for m in messages %}<{{ m.content | upper }}>{% endfor %}")
    with pytest.raises(Refused, match="template: it changes contents in a way"):
        render(shouting, messages)
    raising = ChatTemplate("{{ raise_exception('no more than one turn') }}")
    with pytest.raises(Refused, match="template: no more than one turn"):
        render(raising, messages)
    dividing = ChatTemplate("{{ 1 / 0 }}")
    with pytest.raises(Refused, match="template: division by zero"):
        render(dividing, messages)
    broken = ChatTemplate("{% for m in messages %}")
    with pytest.raises(Refused, match="template: Unexpected end of template"):
        render(broken, messages)
    with pytest.raises(TemplateError, match="gemma cannot read a conversation: template: System"):
        chat_kit.chat("gemma").spans(shared_text([Message("system", "s"), *messages]))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(25), deadline=None)
@given(messages=talks(), train_on=st.sampled_from(["assistant", "last", "all"]))
@example([Message("system", ""), Message("user", ""), Message("assistant", "東京")], "last")
@example([Message("system", "s"), Message("user", ""), Message("assistant", "東京")], "last")
def test_trained_tokens_are_those_that_the_model_writes(name, messages, train_on):
    assume(rendered(name, messages) is not None)
    chat, text = chat_kit.chat(name), shared_text(messages)
    tokens = chat.spans(text)
    trained = trained_tokens(tokens, trained_ranges(text, train_on))
    wanted: set[int] = set()
    at = 0
    for number, message in enumerate(messages):
        size = len(message.content.encode()) + 1
        last = number == len(messages) - 1
        if train_on == "all" or (message.role == "assistant" and (train_on != "last" or last)):
            wanted |= set(range(at, at + size))
        at += size
    for (start, end), found in zip(tokens.spans.tolist(), trained.tolist(), strict=True):
        if start < end:
            assert found == (set(range(start, end)) <= wanted)
    if train_on == "last" and trained.any():  # from the prompt's end on, in one piece
        (where,) = np.nonzero(trained)
        assert (np.diff(where) == 1).all()
        prompt = chat.prompt_ids(messages[:-1])
        if prompt == tokens.ids[: len(prompt)].tolist():
            assert where[0] == len(prompt)
