"""Answers laid over their conversations: in every template, token by token as they were drawn."""

import json
from functools import cache
from itertools import pairwise

import chat_kit
import numpy as np
import pytest
from faults_kit import examples, some
from hypothesis import given, settings
from hypothesis import strategies as st
from wild_kit import NEEDS_TOOLS, WILD, wild

from vocagnolm.chat import ChatTokenizer, Message, Refused, conversation_of, shared_text
from vocagnolm.chat.answers import lay_answer, lay_continuation, tiling_pieces
from vocagnolm.chat.messages import readable
from vocagnolm.score.written import plain_record

TEMPLATES = [(chat_kit.chat, name) for name in chat_kit.SHAPES]
TEMPLATES += [(wild, name) for name in some([name for name in WILD if name not in NEEDS_TOOLS], 14)]
ASKED = Message("user", "What is 2+2?")
TEXTS = st.lists(
    st.sampled_from(
        ["so", " it", " is", " 4", ".", "\n", "\n\n", " 東京", "½", " naïve", "a", "$x$"]
    ),
    min_size=1,
    max_size=8,
).map(lambda words: "".join(words).strip())


@cache
def written_in(chat_of, name: str, content: str, reasoning: str):
    """The tokens that a model writes of an answer, up to the first that ends it: their texts, and
    their spans."""
    chat: ChatTokenizer = chat_of(name)
    messages = [ASKED, Message("assistant", content, reasoning=reasoning)]
    text = shared_text(messages)
    (tokens,) = chat.outcomes([text], by_rule=True)
    if isinstance(tokens, str) or chat.rendering(text).changes:
        return chat, text, [], np.zeros((0, 2), np.int64)
    (own,) = np.nonzero(tokens.turns == len(text.encode()) - 1)
    ids = tokens.ids[own].tolist()
    own = own[: ids.index(chat.end_of_turn) + 1] if chat.end_of_turn in ids else own
    pieces = [chat.private_bytes_of(n) or b"" for n in tokens.ids[own].tolist()]
    return chat, text, pieces, tokens.spans[own]


def ends_in_a_control_token(chat: ChatTokenizer, pieces: list[bytes]) -> bool:
    last = pieces[-1].decode(errors="replace") if pieces else ""
    return chat.with_control_tokens(last) != last


def covered(spans: np.ndarray) -> list[tuple[int, int]]:
    """Spans that are not empty, which must come in order."""
    held = [(a, b) for a, b in spans.tolist() if a < b]
    assert all(b <= c for (_, b), (c, _) in pairwise(held))
    return held


def test_nearly_every_template_is_tried():
    """Two print neither an end of the turn nor the answer as it is."""
    untried = [
        name
        for chat_of, name in TEMPLATES
        if not ends_in_a_control_token(*written_in(chat_of, name, "so it", "")[::2])
    ]
    assert {*untried} <= {"glm4moe", "vllm__tool_chat_template_apertus"}


@pytest.mark.parametrize(("chat_of", "name"), TEMPLATES)
@settings(max_examples=examples(24), deadline=None)
@given(content=TEXTS.filter(bool), reasoning=st.sampled_from(["", "hm, 2\n3"]), data=st.data())
def test_an_answer_is_laid_as_its_conversation_is_read(chat_of, name, content, reasoning, data):
    chat, text, pieces, spans = written_in(chat_of, name, content, reasoning)
    if not ends_in_a_control_token(chat, pieces):
        return  # the template refuses or changes it, or ends a turn without a token of its own
    prompt = shared_text([ASKED])
    laid = lay_answer(prompt, pieces, finished=True, ended=True, chat=chat)
    assert (laid.text, laid.content, laid.reasoning) == (text, content, reasoning)
    assert covered(laid.spans) == covered(spans), "other spans than those of the whole conversation"
    record = json.loads(json.dumps(plain_record(laid.text)))
    assert shared_text(conversation_of(record, "messages")) == text, readable(text)

    # the same bytes in other tokens: each keeps its place
    cuts, drawn = data.draw(st.sets(st.integers(1, 40))), list[bytes]()
    for piece in pieces[:-1]:
        control = chat.with_control_tokens(piece.decode(errors="replace")) != piece.decode(
            errors="replace"
        )
        edges = [0, *([] if control else sorted(n for n in cuts if n < len(piece))), len(piece)]
        drawn += [piece[a:b] for a, b in pairwise(edges)]
    again = lay_answer(prompt, [*drawn, pieces[-1]], finished=True, ended=True, chat=chat)
    assert (again.text, len(again.spans)) == (text, len(drawn) + 1)
    whole = text.encode()
    mark = (len(whole) - 1, len(whole))
    held = covered(again.spans)
    assert held[-1] == mark == covered(laid.spans)[-1]
    assert _union(held) == _union(covered(laid.spans))
    for piece, (start, end) in zip(drawn, again.spans.tolist(), strict=False):
        assert whole[start:end] in piece


def _union(held: list[tuple[int, int]]) -> set[int]:
    return {byte for start, end in held for byte in range(start, end)}


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "llama3", "gemma", "mistral"])
@settings(max_examples=examples(40), deadline=None)
@given(content=TEXTS.filter(bool), count=st.integers(1, 30))
def test_an_answer_that_was_broken_off_has_no_end(name, content, count):
    chat, _, pieces, _ = written_in(chat_kit.chat, name, content, "")
    pieces = pieces[: min(count, len(pieces) - 1)]
    try:
        laid = lay_answer(shared_text([ASKED]), pieces, finished=False, ended=False, chat=chat)
    except Refused:
        assert "\ufffd" in b"".join(pieces).decode(errors="replace")
        return
    assert content.startswith(laid.content) and len(laid.spans) == len(pieces)
    assert laid.text[len(shared_text([ASKED])) :].startswith(laid.content)
    assert not (laid.spans == len(laid.text.encode())).any()
    assert plain_record(laid.text).get("finished") is None  # the row says so itself
    (message,) = conversation_of({**plain_record(laid.text), "finished": False}, "messages")[1:]
    assert message.cut and message.content == laid.content


@settings(max_examples=examples(200), deadline=None)
@given(text=TEXTS, content=TEXTS.filter(bool), data=st.data())
def test_a_text_that_is_continued(text, content, data):
    whole = content.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)))))
    edges = [0, *cuts, len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(edges)]
    laid = lay_continuation(text, [*pieces, b"<end>"], finished=True, ended=True)
    assert laid.text == text + content and laid.begin == len(text.encode())
    tiles = [tuple(edge + laid.begin for edge in pair) for pair in pairwise(edges)]
    assert covered(laid.spans) == [(a, b) for a, b in tiles if a < b]
    kept = data.draw(st.integers(0, len(pieces)))
    cut = lay_continuation(text, pieces[:kept], finished=False, ended=False)
    assert content.startswith(cut.content) and len(cut.spans) == kept
    ends = [end for _, end in covered(cut.spans)]
    assert ends in ([], [b for _, b in tiles[: len(ends)]])  # whole tokens alone
    assert len(cut.text.encode()) == (ends or [laid.begin])[-1]


def test_what_is_no_answer_is_refused():
    chat = chat_kit.chat("smollm2")
    prompt = shared_text([ASKED])

    def refused(*pieces, **ending):
        with pytest.raises(Refused) as raised:
            lay_answer(prompt, pieces, **({"finished": True, "ended": False} | ending), chat=chat)
        return str(raised.value)

    control = chat.private_bytes_of(chat.id_of("<|im_start|>"))
    assert refused(b"a", control, b"b") == "control token: one stands within the answer"
    assert refused(b"a\xff", b"b") == "not UTF-8: at byte 1 of the answer"
    assert refused(b"a\xff", b"b", finished=False) == "not UTF-8: at byte 1 of the answer"
    assert "stands for the end of a turn" in refused(b"a\x02")
    with pytest.raises(Refused, match="not UTF-8"):
        lay_continuation("a", [b"b\xff", b"c"], finished=False, ended=False)


def test_a_short_content_is_found_where_it_stands():
    """Not in what the template writes before it."""
    chat, text, pieces, spans = written_in(wild, "gptoss", "a", "")
    before = b"".join(pieces).decode().partition("final")[0]
    assert "a" in chat.with_control_tokens(b"".join(pieces[:-1]).decode())[:-1] or before
    laid = lay_answer(shared_text([ASKED]), pieces, finished=True, ended=True, chat=chat)
    assert laid.text == text and covered(laid.spans) == covered(spans)


def test_bytes_that_no_token_covers_are_tiled():
    assert tiling_pieces(0).tolist() == [] and tiling_pieces(255).tolist() == [255]
    assert tiling_pieces(600).tolist() == [255, 255, 90]
