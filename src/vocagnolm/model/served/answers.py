"""What servers answer, parsed once into records of known types: whatever stands in an answer, it is
one of these records or a `MalformedError` that says in a line where something else stands.

Log probabilities become losses in nats (NaN where the server knows none), and a probability above 1
is no loss. JSON has no infinity: vLLM writes -9999 for a probability of zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alternatives import MOST_IDS

_NO_PROBABILITY = -9999.0
_ROUNDING = 0.01  # by which half precision may put a log probability above 0
_MOST_ID = 2**31 - 1
_MOST_NAME = 1000  # characters of a model's name, which may be a path
_TOKEN_ID = "token_id:"


class MalformedError(ValueError):
    """An answer that is not what such servers give. Its message is short, whatever it quotes."""


class ImpossibleError(MalformedError):
    """A log probability that no model gives."""


# ---- values ----


def _wrong(where: str, value: Any, expected: str) -> MalformedError:
    return MalformedError(f"{where} is {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    if isinstance(value, str | int | float | bool | None):
        text = f"{value:.40}" if isinstance(value, str) else str(value)[:40]
        return ascii(text) if isinstance(value, str) else text
    return f"a {type(value).__name__}"


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    return value


def _whole(value: Any, where: str, most: int = _MOST_ID) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _wrong(where, value, f"a whole number from 0 to {most}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")
    return value


def _name(value: Any, where: str) -> str:
    text = _text(value, where)
    if not text or len(text) > _MOST_NAME or not text.isprintable():
        raise _wrong(where, text, f"a name of at most {_MOST_NAME} characters")
    return text


def _ids(value: Any, where: str) -> NDArray[np.int64]:
    ids = _list(value, where)
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= _MOST_ID:
            raise _wrong(f"{where}[{place}]", token, "a token id")
    return np.array(ids, np.int64)


def _loss(value: Any, where: str) -> float:
    """-log p in nats; NaN for a probability of zero, or none."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(where, value, "a log probability")
    if value in (_NO_PROBABILITY, -math.inf):
        return math.nan
    if not _NO_PROBABILITY < value <= _ROUNDING:
        shown = f"{value:g}" if isinstance(value, float) else _shown(value)
        raise ImpossibleError(f"{where} is the impossible log-probability {shown}")
    return -float(value)


# ---- models ----


@dataclass(frozen=True)
class ModelEntry:
    """A model that a server lists."""

    name: str
    owner: str
    source: str
    """Where the server has the model from."""
    context: int | None


def parse_models(answer: Any) -> list[ModelEntry]:
    """What stands under /v1/models."""
    if not isinstance(answer, dict) or not answer.get("data"):
        return []
    entries = []
    for number, value in enumerate(_list(answer["data"], "data")):
        where = f"data[{number}]"
        entry = _mapping(value, where)
        name = _name(entry.get("id"), f"{where}.id")
        root, most = entry.get("root"), entry.get("max_model_len")
        entries.append(
            ModelEntry(
                name,
                owner=_name(entry.get("owned_by") or "unknown", f"{where}.owned_by"),
                source=name if not root else _name(root, f"{where}.root"),
                context=None if most is None else _whole(most, f"{where}.max_model_len"),
            )
        )
    return entries


def parse_version(answer: Any) -> str:
    about = _mapping(answer, "the version")
    return _name(about.get("version") or "unknown", "version")


def parse_length(about: Mapping[str, Any], name: str) -> int | None:
    value = about.get(name)
    return None if value is None else _whole(value, name)


def parse_tokens(answer: Any) -> list[int] | None:
    """What stands under /tokenize; None where it says nothing."""
    if not isinstance(answer, dict) or answer.get("tokens") is None:
        return None
    tokens: list[int] = _ids(answer["tokens"], "tokens").tolist()
    return tokens


# ---- token ids with their losses ----


@dataclass(frozen=True)
class TokenNumbers:
    """Tokens by their ids, as far as the server speaks of them."""

    ids: NDArray[np.int64] | None
    nll: NDArray[np.float32] | None
    likeliest: "Likeliest | None" = None


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens at every place, as the server lists them: those of place n are entries
    `starts[n]` to `starts[n + 1]`."""

    starts: NDArray[np.int64]
    ids: NDArray[np.int64]
    nll: NDArray[np.float64]

    def ranked(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        """[T, count] ids, -1 where there are none, and their losses, the likeliest first; and the
        fewest that any place has, of those that have some."""
        sizes = np.diff(self.starts)
        rows = np.repeat(np.arange(len(sizes)), sizes)
        order = np.lexsort((np.nan_to_num(self.nll, nan=np.inf), rows))
        rank = np.arange(len(rows)) - self.starts[rows]
        kept = rank < count
        ids = np.full((len(sizes), count), -1, np.int64)
        nll = np.full((len(sizes), count), np.nan)
        ids[rows[kept], rank[kept]] = self.ids[order][kept]
        nll[rows[kept], rank[kept]] = self.nll[order][kept]
        return ids, nll, int(sizes[sizes > 0].min(initial=_MOST_ID))


def _likeliest(places: Sequence[Sequence[tuple[Any, Any]]], where: str) -> Likeliest:
    """From (id, log probability) of every place."""
    ids, nll = [], []
    for number, pairs in enumerate(places):
        for token, value in pairs:
            ids.append(_whole(token, f"an id at {where}[{number}]", MOST_IDS - 1))
            nll.append(_loss(value, f"{where}[{number}]"))
    starts = np.cumsum([0, *map(len, places)])
    return Likeliest(starts, np.array(ids, np.int64), np.array(nll, np.float64))


@dataclass(frozen=True)
class DrawnTokens:
    """What a model wrote after a prompt."""

    tokens: TokenNumbers
    stopped: bool
    """It came to an end by itself, not at the limit."""
    reason: str
    """In the server's word."""


@dataclass(frozen=True)
class IdAnswer:
    """An answer to one prompt of token ids."""

    prompt: TokenNumbers
    drawn: DrawnTokens | None


def parse_completions(answer: Any) -> list[IdAnswer]:
    """vLLM's /v1/completions, with `return_token_ids` and, where log probabilities are asked for,
    `return_tokens_as_token_ids`."""
    choices = _list(_mapping(answer, "the response").get("choices"), "choices")
    by_index: dict[int, IdAnswer] = {}
    for number, value in enumerate(choices):
        choice = _mapping(value, f"choices[{number}]")
        index = _whole(choice.get("index"), f"choices[{number}].index")
        if index in by_index or index >= len(choices):
            raise _wrong(f"choices[{number}].index", index, "each number once")
        by_index[index] = IdAnswer(
            _vllm_prompt(choice, f"choices[{number}]"), _vllm_drawn(choice, f"choices[{number}]")
        )
    return [by_index[index] for index in sorted(by_index)]


def _vllm_prompt(choice: Mapping[str, Any], where: str) -> TokenNumbers:
    given, rows = choice.get("prompt_token_ids"), choice.get("prompt_logprobs")
    ids = None if given is None else _ids(given, f"{where}.prompt_token_ids")
    if rows is None or ids is None:
        missing = None if rows is None else np.full(0, np.nan, np.float32)
        return TokenNumbers(ids, missing)
    where = f"{where}.prompt_logprobs"
    if len(_list(rows, where)) != len(ids):
        raise MalformedError(f"{where} has {len(rows)} places for {len(ids)} tokens")
    places: list[list[tuple[int, Any]]] = []
    nll = np.full(len(ids), np.nan, np.float32)
    for number, (token, row) in enumerate(zip(ids.tolist(), rows, strict=True)):
        if row is None:
            places.append([])
            continue
        by_id = _mapping(row, f"{where}[{number}]")
        # the token itself stands there too, however unlikely it is
        if (own := by_id.get(str(token))) is None:
            raise MalformedError(f"{where}[{number}] does not name token {token}")
        nll[number] = _loss(_logprob(own, where, number), f"{where}[{number}]")
        pairs = [(_id_of(n, where), _logprob(v, where, number)) for n, v in by_id.items()]
        places.append(pairs)
    return TokenNumbers(ids, nll, _likeliest(places, where))


def _logprob(entry: Any, where: str, number: int) -> Any:
    return _mapping(entry, f"an entry of {where}[{number}]").get("logprob")


def _id_of(name: str, where: str) -> int:
    digits = name.removeprefix(_TOKEN_ID)
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 11):
        raise _wrong(f"a token at {where}", name, "a token id")
    return int(digits)


def _vllm_drawn(choice: Mapping[str, Any], where: str) -> DrawnTokens | None:
    if (given := choice.get("token_ids")) is None:
        return None
    ids, nll, likeliest = _ids(given, f"{where}.token_ids"), None, None
    if (about := choice.get("logprobs")) is not None:
        about, where = _mapping(about, f"{where}.logprobs"), f"{where}.logprobs"
        values = _list(about.get("token_logprobs"), f"{where}.token_logprobs")
        rows = _list(about.get("top_logprobs") or [None] * len(ids), f"{where}.top_logprobs")
        if not len(values) == len(rows) == len(ids):
            raise MalformedError(f"{where} has {len(values)} places for {len(ids)} tokens")
        nll = np.array(
            [_loss(value, f"{where}.token_logprobs[{n}]") for n, value in enumerate(values)],
            np.float32,
        )
        places = [
            [] if row is None else [(_id_of(n, where), v) for n, v in _mapping(row, where).items()]
            for row in rows
        ]
        likeliest = _likeliest(places, f"{where}.top_logprobs")
    reason = _text(choice.get("finish_reason") or "", f"{where}.finish_reason")[:40]
    return DrawnTokens(TokenNumbers(ids, nll, likeliest), reason == "stop", reason)


def parse_generated(answer: Any) -> list[IdAnswer]:
    """SGLang's /generate."""
    answers = []
    for number, value in enumerate(answer if isinstance(answer, list) else [answer]):
        where = f"answer {number}"
        entry = _mapping(value, where)
        about = _mapping(entry.get("meta_info"), f"{where}.meta_info")
        drawn = None
        if (made := entry.get("output_ids")) is not None:
            ids = _ids(made, f"{where}.output_ids")
            numbers = _sglang_numbers(about, "output", where)
            if numbers.ids is not None and not np.array_equal(numbers.ids, ids):
                raise MalformedError(f"{where}: its log probabilities are those of other tokens")
            finish = _mapping(about.get("finish_reason") or {}, f"{where}.finish_reason")
            reason = _text(finish.get("type") or "", f"{where}.finish_reason")[:40]
            numbers = TokenNumbers(ids, numbers.nll, numbers.likeliest)
            drawn = DrawnTokens(numbers, reason == "stop", reason)
        answers.append(IdAnswer(_sglang_numbers(about, "input", where), drawn))
    return answers


def _sglang_numbers(about: Mapping[str, Any], side: str, where: str) -> TokenNumbers:
    """Rows of [log probability, id, text]."""

    def pair(value: Any, where: str) -> tuple[Any, Any]:
        row = _list(value, where)
        if len(row) < 2:
            raise MalformedError(f"{where} has {len(row)} values, expected a number and an id")
        return row[1], row[0]

    name = f"{side}_token_logprobs"
    rows = about.get(name) or None
    if rows is None:
        return TokenNumbers(None, None)
    pairs = [pair(row, f"{where}.{name}[{n}]") for n, row in enumerate(_list(rows, name))]
    ids = _ids([token for token, _ in pairs], f"{where}.{name}")
    nll = np.array([_loss(value, f"{where}.{name}") for _, value in pairs], np.float32)
    likeliest = None
    if top := about.get(f"{side}_top_logprobs"):
        name = f"{side}_top_logprobs"
        places = [
            [
                pair(row, f"{where}.{name}[{n}]")
                for row in _list(place or [], f"{where}.{name}[{n}]")
            ]
            for n, place in enumerate(_list(top, f"{where}.{name}"))
        ]
        places = [[(token, v) for token, v in place if v is not None] for place in places]
        if len(places) == len(ids):
            likeliest = _likeliest(places, f"{where}.{name}")
    return TokenNumbers(ids, nll, likeliest)


# ---- conversations ----


@dataclass(frozen=True)
class ChatToken:
    """A token of an answer whose vocabulary nobody knows."""

    data: bytes | None
    """The token's bytes; None where the server cannot say them: it is a part of a character."""
    nll: float
    likeliest: Sequence[tuple[bytes | None, float]] = ()
    """Text and loss of the likeliest tokens at this place, in the server's order."""


@dataclass(frozen=True)
class ChatChoice:
    """One of the answers to a conversation."""

    text: str
    tokens: Sequence[ChatToken] | None
    """None: the server gives no log probabilities."""
    reason: str
    """Why it ended, in the server's word."""
    reasoning: str = ""
    """What the model thought before, where the server shows it apart from the answer."""
    refusal: str = ""
    calls: bool = False
    """It calls tools."""


@dataclass(frozen=True)
class ChatAnswer:
    choices: Sequence[ChatChoice]
    prompt_tokens: int = 0
    new_tokens: int = 0
    """The server's count for all choices together; thoughts are included."""
    thought_tokens: int = 0


_REASONING_FIELDS = ("reasoning_content", "reasoning")


def parse_chat(answer: Any) -> ChatAnswer:
    """/v1/chat/completions of anybody."""
    content = _mapping(answer, "the response")
    choices = []
    for number, value in enumerate(_list(content.get("choices"), "choices")):
        choices.append(_chat_choice(_mapping(value, f"choices[{number}]"), f"choices[{number}]"))
    usage = content.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("completion_tokens_details")
    details = details if isinstance(details, dict) else {}
    return ChatAnswer(
        choices,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        new_tokens=_count(usage.get("completion_tokens")),
        thought_tokens=_count(details.get("reasoning_tokens")),
    )


def _count(value: Any) -> int:
    """A number that nothing but progress and limits depend on."""
    return value if type(value) is int and 0 <= value < 2**40 else 0


def _chat_choice(choice: Mapping[str, Any], where: str) -> ChatChoice:
    message = _mapping(choice.get("message"), f"{where}.message")
    thoughts = [message.get(name) for name in _REASONING_FIELDS]
    reasoning = next((t for t in thoughts if isinstance(t, str) and t), "")
    return ChatChoice(
        _text(message.get("content") or "", f"{where}.message.content"),
        _chat_tokens(choice.get("logprobs"), f"{where}.logprobs"),
        _text(choice.get("finish_reason") or "", f"{where}.finish_reason")[:40],
        reasoning,
        _text(message.get("refusal") or "", f"{where}.message.refusal"),
        bool(message.get("tool_calls") or message.get("function_call")),
    )


def _chat_tokens(value: Any, where: str) -> list[ChatToken] | None:
    if value is None or (listed := _mapping(value, where).get("content")) is None:
        return None
    where, tokens = f"{where}.content", []
    for number, entry in enumerate(_list(listed, where)):
        place = f"{where}[{number}]"
        data, nll = _chat_entry(entry, place)
        top = _list(entry.get("top_logprobs") or [], f"{place}.top_logprobs")
        likeliest = [_chat_entry(choice, f"{place}.top_logprobs") for choice in top]
        tokens.append(ChatToken(data, nll, likeliest))
    return tokens


def _chat_entry(value: Any, where: str) -> tuple[bytes | None, float]:
    entry = _mapping(value, where)
    if "logprob" not in entry:
        raise MalformedError(f"{where} has no logprob")
    return _spelled(entry, where), _loss(entry["logprob"], f"{where}.logprob")


def _spelled(entry: Mapping[str, Any], where: str) -> bytes | None:
    """The bytes of a token: as the server lists them, otherwise those of its text. A part of a
    character that was decoded by itself is nothing but a replacement character."""
    listed = entry.get("bytes")
    if listed is None:
        text = _text(entry.get("token"), f"{where}.token")
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return None
    else:
        try:
            data = bytes(_list(listed, f"{where}.bytes"))
        except (TypeError, ValueError):
            raise MalformedError(f"{where}.bytes holds something else than bytes") from None
    return None if "\ufffd".encode() in data else data
