"""What servers answer, read by structure: whatever stands there, it is a record or a message of one
line. And the tokens of a chat answer laid over its text."""

import itertools
import json
import math
import socket
import threading

import numpy as np
import pytest
from changed_kit import changed
from faults_kit import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vocagnolm.data.prompts import Prompt
from vocagnolm.errors import UsageError, VocagnolmError
from vocagnolm.model.served import answers, engines
from vocagnolm.model.served.answers import ChatToken, MalformedError
from vocagnolm.model.served.chat import ChatEndpoint, ChatRequest
from vocagnolm.model.served.exchange import Exchange, PassingError, read_address
from vocagnolm.model.served.laying import ENDS, LaidTokens, lay_tokens, tokens_behind
from vocagnolm.score.served import chat_answer
from vocagnolm.score.written import ReadPrompt, ShardBuilder

SHORT = 2000
COMPLETIONS = {
    "choices": [
        {
            "index": 0,
            "prompt_token_ids": [5, 6],
            "prompt_logprobs": [None, {"6": {"logprob": -0.5}, "7": {"logprob": -1.5}}],
            "token_ids": [8, 9],
            "finish_reason": "stop",
            "logprobs": {
                "token_logprobs": [-0.1, -2.0],
                "top_logprobs": [{"token_id:8": -0.1}, {"token_id:9": -2.0, "token_id:3": -0.2}],
            },
        }
    ]
}
GENERATED = [
    {
        "text": "",
        "output_ids": [8, 9],
        "meta_info": {
            "input_token_logprobs": [[None, 5, None], [-0.5, 6, None]],
            "input_top_logprobs": [None, [[-0.5, 6, None], [-1.5, 7, None]]],
            "output_token_logprobs": [[-0.1, 8, None], [-2.0, 9, None]],
            "output_top_logprobs": [[[-0.1, 8, None]], [[-0.2, 3, None]]],
            "finish_reason": {"type": "stop"},
        },
    }
]
CHAT = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi é", "reasoning_content": None},
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    {
                        "token": "Hi",
                        "bytes": [72, 105],
                        "logprob": -0.1,
                        "top_logprobs": [{"token": "Ho", "bytes": None, "logprob": -2.5}],
                    },
                    {"token": " é", "bytes": [32, 195, 169], "logprob": -1.0, "top_logprobs": []},
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
MODELS = {"data": [{"id": "tiny", "owned_by": "vllm", "root": "/m", "max_model_len": 128}]}
KINDS = {
    "completions": (COMPLETIONS, answers.parse_completions),
    "generated": (GENERATED, answers.parse_generated),
    "chat": (CHAT, answers.parse_chat),
    "models": (MODELS, answers.parse_models),
    "version": ({"version": "0.32"}, answers.parse_version),
    "tokens": ({"tokens": [1, 2]}, answers.parse_tokens),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_a_record_or_a_short_message(kind):
    valid, parse = KINDS[kind]
    assert parse(valid)

    @settings(max_examples=examples(1000), deadline=None)
    @given(changed(valid))
    def read(answer):
        try:
            parse(answer)
        except MalformedError as error:
            assert 0 < len(str(error)) < SHORT and "\n" not in str(error)
            str(error).encode()

    read()


class Answering:
    """An exchange that answers as it is told, in JSON."""

    url = "http://server"

    def __init__(self, *given, models=MODELS):
        self.given, self.models = [*given], models

    def ask(self, path, content=None):
        if path == "/v1/models":
            return self.models
        return json.loads(json.dumps(self.given.pop(0) if len(self.given) > 1 else self.given[0]))


@pytest.mark.parametrize("kind", ["completions", "generated"])
def test_what_engines_make_of_any_answer(kind):
    """Losses and alternatives of the asked shape, or an error for the user."""
    valid, _ = KINDS[kind]
    entry = answers.ModelEntry("tiny", "vllm", "/m", 128)

    @settings(max_examples=examples(1000), deadline=None)
    @given(changed(valid), st.booleans())
    def use(answer, scoring):
        exchange = Answering(answer)
        make = engines.VLLM if kind == "completions" else engines.SGLang
        engine = make.__new__(make)
        engines.Engine.__init__(engine, exchange, entry)
        try:
            if scoring:
                (scores,) = engine.scores([[5, 6]], 1)
                assert scores.nll.shape == (2,) and scores.alternatives.shape == (2, 1)
                assert not (scores.nll < -0.02).any()
            else:
                asked = engines.WriteRequest(tokens=4, temperature=1, alternatives=1)
                (written,) = engine.write([[5, 6]], asked)
                assert len(written.ids) == len(written.nll) == len(written.alternatives)
        except VocagnolmError as error:
            assert len(str(error)) < SHORT and "this should not" not in str(error)

    use()


@settings(max_examples=examples(1000), deadline=None)
@given(changed(CHAT))
def test_what_becomes_of_any_chat_answer(answer):
    """A line in the folder or in what was left out, or an error for the user."""
    endpoint = ChatEndpoint.__new__(ChatEndpoint)
    endpoint.exchange, endpoint.url = Answering(answer), "http://server"
    endpoint.asked, endpoint.model = ChatRequest(tokens=4, alternatives=2), "tiny"
    endpoint._path = "/v1/chat/completions"
    try:
        found = endpoint._sent({}, 2)
    except VocagnolmError as error:
        assert len(str(error)) < SHORT
        return
    builder = ShardBuilder(0, 0, len(found.choices), 2, own_entries=True)
    read = ReadPrompt(Prompt(0, "a:1", "Hello?\x02"), [])
    builder.add(read, [chat_answer(choice, 2, "alternatives") for choice in found.choices])
    shard = builder.shard(1, builder.documents())
    assert len(shard.document_index) + len(shard.skipped) == len(found.choices)
    assert (shard.nll[np.isfinite(shard.nll)] >= 0).all()


def test_abilities_of_any_chat_endpoint():
    """The probe ends: with abilities, or with an error for the user."""
    asked = ChatRequest(tokens=16, temperature=0.7, alternatives=2)

    @settings(max_examples=examples(1000), deadline=None)
    @given(changed(CHAT), changed(CHAT))
    def probe(first, then):
        import warnings

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                endpoint = ChatEndpoint(Answering(first, first, then), None, asked)
            assert endpoint.abilities.given <= 2
        except VocagnolmError as error:
            assert len(str(error)) < SHORT

    probe()


# ---- raw responses ----

GARBAGE = {
    "nothing": b"",
    "no HTTP": b"hello\r\n\r\n",
    "a status of letters": b"HTTP/1.1 abc OK\r\n\r\n{}",
    "a length of letters": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n[",
    "a length below zero": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n[",
    "less than announced": b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}",
    "chunks of letters": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "half a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{}",
    "a long header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n{}",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n{}",
    "no JSON": b"HTTP/1.1 200 OK\r\n\r\n<html>",
    "nested": b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
    "a number without end": b"HTTP/1.1 200 OK\r\n\r\n" + b"9" * 100_000,
    "half a character": b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe",
    "a long error": b"HTTP/1.1 503 no\r\nRetry-After: 9e99\r\n\r\n" + b"x" * 1_000_000,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_response_that_is_none_may_pass(name):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            there, _ = server.accept()
            with there:
                there.settimeout(5)
                there.recv(65536)
                there.sendall(GARBAGE[name])

        threading.Thread(target=answer, daemon=True).start()
        exchange = Exchange(f"http://127.0.0.1:{server.getsockname()[1]}", 5)
        with pytest.raises(PassingError) as error:
            exchange.ask("/v1/models")
        assert len(str(error.value)) < 400


@settings(max_examples=examples(1000), deadline=None)
@given(
    st.text(max_size=30) | st.sampled_from(["http://[", "http://a:b", "//", "http://" + "a" * 99])
)
def test_an_address_is_read_or_refused(url):
    try:
        scheme, host, _, _ = read_address(url)
        assert scheme in ("http", "https") and host
    except UsageError as error:
        assert len(str(error)) < SHORT


# ---- tokens over a text ----


@st.composite
def tokenized(draw):
    """A text, and tokens that spell it as servers say it: characters that are cut in pieces are
    unknown or come with their last piece, and white space and an end may stand around."""
    text = draw(st.text("ab \n🙂é", max_size=12))
    data = text.encode()
    cuts = draw(st.sets(st.integers(1, max(1, len(data))), max_size=8)) | {len(data)} - {0}
    # a character is one token, or several with nothing beside it, wherever it stands
    inside = {n for n in range(len(data)) if _broken(data, n)}
    cuts -= inside
    if draw(st.booleans()):
        ends = {n for n in range(len(data) + 1) if not _broken(data, n)}
        around = {n for n in ends if n + 1 in inside or n - 1 in inside}
        cuts |= around | {n for n in inside if draw(st.booleans()) or n - 1 not in inside}
    cuts.discard(0)
    edges = [0, *sorted(cuts)] if data else [0]
    whole = draw(st.booleans())
    tokens, said = [], 0
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        piece = data[start:end]
        if _broken(data, start) or _broken(data, end):
            piece = (b"" if _broken(data, end) else data[said:end]) if whole else None
        said = said if _broken(data, end) else end
        tokens.append(ChatToken(piece, float(number + 1), [(b"x", 0.5), (piece, 1.0)]))
    if ended := draw(st.booleans()):
        names = [b"<|im_end|>", *([b"", None] if not tokens or tokens[-1].data else [])]
        tokens.append(ChatToken(draw(st.sampled_from(names)), 99.0))
    return text, tokens, ended


def _broken(data, place):
    return 0 < place < len(data) and data[place] & 0xC0 == 0x80


@settings(max_examples=examples(1000), deadline=None)
@given(tokenized())
def test_tokens_that_spell_a_text_tile_it(given_tokens):
    text, tokens, ended = given_tokens
    shown = text.strip(" \n")
    laid = lay_tokens(tokens, shown, finished=ended)
    assert isinstance(laid, LaidTokens)
    pieces = laid.tokens[:-1] if laid.ended else laid.tokens
    assert b"".join(piece.data for piece in pieces) == shown.encode()
    assert all(piece.data for piece in pieces)
    assert laid.ended == ended
    if ended:
        assert laid.tokens[-1].nll == 99.0
    if shown == text and all(token.data for token in tokens[: len(tokens) - ended]):
        assert [piece.nll for piece in pieces] == [n + 1.0 for n in range(len(pieces))]
    packed, entries = laid.alternatives(2)
    assert packed.shape == (len(laid.tokens), 2) and len(set(entries)) == len(entries)


@settings(max_examples=examples(1000), deadline=None)
@given(
    st.lists(
        st.sampled_from([b"a", b"ab", b" ", b"", None, b"<|im_end|>", "🙂".encode()]), max_size=6
    ),
    st.text("ab 🙂", max_size=6),
    st.booleans(),
    st.sampled_from([(), ("b",), (" ",)]),
)
def test_tokens_that_do_not_are_refused(data, text, finished, stop):
    tokens = [ChatToken(one, 1.0) for one in data]
    text = text.strip()
    laid = lay_tokens(tokens, text, finished=finished, stop=stop)
    if laid is not None:
        pieces = laid.tokens[:-1] if laid.ended else laid.tokens
        assert b"".join(piece.data for piece in pieces) == text.encode()
    tokens_behind(tokens, text)


def test_a_character_of_several_tokens_has_the_loss_of_them_all():
    parts = [ChatToken(b"a", 1.0), *(ChatToken(None, n, [(b"b", n)]) for n in (2.0, 3.0))]
    for behind in ([], [ChatToken(b" c", 4.0)]):
        text = "a🙂" + (" c" if behind else "")
        laid = lay_tokens([*parts, *behind], text, finished=False)
        assert [t.nll for t in laid.tokens][:2] == [1.0, 5.0]
        assert laid.tokens[1].likeliest == [(b"b", 2.0)]  # those where it begins


def test_a_piece_behind_a_hidden_control_token_has_no_loss():
    tokens = [ChatToken(b"a", 1.0), ChatToken(b"<|x|>", 2.0), ChatToken(b"b", 3.0, [(b"c", 1.0)])]
    laid = lay_tokens(tokens, "ab", finished=False)
    assert [token.data for token in laid.tokens] == [b"a", b"b"]
    assert laid.tokens[0].nll == 1.0 and math.isnan(laid.tokens[1].nll)
    assert not laid.tokens[1].likeliest
    assert [t.data for t in lay_tokens(tokens, "a<|x|>b", finished=False).tokens][1] == b"<|x|>"


def test_what_stops_an_answer_is_no_end():
    tokens = [ChatToken(b"42", 1.0), ChatToken(b".\n", 2.0), ChatToken(b"\nQ:", 3.0)]
    laid = lay_tokens(tokens, "42.", finished=True, stop=["\n\nQ"])
    assert not laid.ended and [t.nll for t in laid.tokens] == [1.0, 2.0]
    cut = lay_tokens([ChatToken(b"42.\n\n", 1.0)], "42", finished=True, stop=["."])
    assert [t.data for t in cut.tokens] == [b"42"] and math.isnan(cut.tokens[0].nll)
    assert lay_tokens([ChatToken(b"42.", 1.0)], "42", finished=True) is None


def test_alternatives_are_known_by_their_texts():
    likeliest = [
        (b"yes", 1.0), (b"yes", 2.0), (None, 0.1), (b"", 0.2), (b"<|tool|>", 0.3), (b"</s>", 3.0),
    ]  # fmt: skip
    laid = LaidTokens([answers_token(b"yes", likeliest), answers_token(b"", [(b"<e>", 0.5)])])
    packed, entries = laid.alternatives(3)
    spelled = [None if n == 0xFFFFF else entries[n] for n in (packed[0] >> 12).tolist()]
    assert spelled == [b"yes", b"", None]
    assert packed[0, 0] >> 11 & 1 and not packed[0, 1] >> 11 & 1
    nll = -math.log(math.exp(-1) + math.exp(-2))
    assert (packed[0, 0] & 2047) == round(128 * nll)
    named = LaidTokens([answers_token(b"<e>", [(b"<e>", 0.5)])], ended=True)
    assert named.alternatives(1)[1] == [b""]  # its own end has a name of its own
    assert b"<|im_end|>" in ENDS


def answers_token(data, likeliest):
    from vocagnolm.model.served.laying import LaidToken

    return LaidToken(data, 1.0, likeliest)
