"""Tokens of a chat answer, laid over its text: a server says what each of them spells, and that
must be the text, whatever it does with parts of characters, white space at the edges and the token
that ends a turn."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alternatives import pack
from vocagnolm.model.served.answers import ChatToken

ENDS = frozenset(
    name.encode()
    for name in (
        "</s>", "<|endoftext|>", "<|im_end|>", "<eos>", "<end_of_turn>", "<turn|>", "<|eot_id|>",
        "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>", "<|END_OF_TURN_TOKEN|>",
        "<|endofturn|>", "<｜end▁of▁sentence｜>", "[EOS]",
    )
)  # fmt: skip
"""Names of tokens that end a turn, as servers write them among the likeliest tokens."""
_NAME = re.compile(rb"[<\[].*[>\]]", re.DOTALL)
"""A token that ends an answer, if it is spelled at all."""
_CONTROL = re.compile(rb"<\|[^|<>\s]+\|>")
_SEVERAL_BYTES = re.compile(rb"[\xc0-\xff][\x80-\xbf]*")
_SPACES = b" \t\r\n"
_END = b""
"""The entry that stands for an end."""
Likeliest = Sequence[tuple[bytes | None, float]]


class LaidToken(NamedTuple):
    """A piece of the text, and what is known of it."""

    data: bytes
    nll: float
    likeliest: Likeliest = ()


@dataclass(frozen=True)
class LaidTokens:
    """Pieces that are the text together; where it has `ended`, the end stands behind them."""

    tokens: Sequence[LaidToken]
    ended: bool = False

    @property
    def nll(self) -> NDArray[np.float32]:
        return np.array([token.nll for token in self.tokens], np.float32)

    def alternatives(self, count: int) -> tuple[NDArray[np.uint32], list[bytes]]:
        """[T, count] The likeliest tokens as a store packs them, and what their ids spell."""
        number: dict[bytes, int] = {}
        ids = np.full((len(self.tokens), count), -1, np.int64)
        nll = np.full((len(self.tokens), count), np.nan)
        drawn = np.full(len(self.tokens), -2, np.int64)
        for place, token in enumerate(self.tokens):
            is_end = self.ended and place == len(self.tokens) - 1
            ranked = _ranked(token.likeliest, token.data if is_end else None)[:count]
            for rank, (entry, loss) in enumerate(ranked):
                ids[place, rank] = number.setdefault(entry, len(number))
                nll[place, rank] = loss
            drawn[place] = number.get(_END if is_end else token.data, -2)
        return pack(ids, nll, ids == drawn[:, None]), list(number)


def _ranked(likeliest: Likeliest, end: bytes | None) -> list[tuple[bytes, float]]:
    """Texts with their losses, the likeliest first. Tokens that spell the same count as one; parts
    of characters and control tokens that are no end are left out. `end`: another name of an end."""
    losses: dict[bytes, float] = {}
    for data, loss in likeliest:
        if not data or math.isnan(loss):
            continue
        if data in ENDS or data == end:
            data = _END
        elif is_control(data):
            continue
        if data in losses:
            loss = -math.log(math.exp(-loss) + math.exp(-losses[data]))
        losses[data] = loss
    return sorted(losses.items(), key=lambda entry: entry[1])


def lay_tokens(
    tokens: Sequence[ChatToken], text: str, *, finished: bool, stop: Sequence[str] = ()
) -> LaidTokens | None:
    """Tokens laid over a text without white space at its edges; None where they do not spell it.

    A character of several tokens is one piece, with the loss of them all and the alternatives of
    the first. A piece behind a control token that the server does not show has neither. Behind the
    text there may stand white space, what stopped the answer (`stop`), and the token that ended
    it."""
    laying = _Laying(text.encode(), list(tokens))
    if not laying.to_the_end():
        return None
    pieces, rest = laying.pieces, laying.rest
    behind = laying.remainder + b"".join(token.data or b"" for token in rest)
    stops = [text.encode() for text in stop]
    if behind and any(behind.startswith(text) or text.startswith(behind) for text in stops):
        return LaidTokens(pieces)
    if laying.remainder.strip(_SPACES):
        return None
    rest = [token for token in rest if not token.data or token.data.strip(_SPACES)]
    shown = [token for token in rest if token.data]
    if any(not _NAME.fullmatch(token.data or b"") for token in shown) or shown[1:]:
        return None
    if not finished or not rest:
        return LaidTokens(pieces) if not shown else None
    end = LaidToken(rest[0].data or b"", rest[0].nll, rest[0].likeliest)
    return LaidTokens([*pieces, end], ended=True)


def tokens_behind(tokens: Sequence[ChatToken], text: str) -> list[ChatToken]:
    """The last tokens, which spell this text: what stands before them is not shown (thoughts). All
    tokens where the text is not there."""
    spelled = b"".join(token.data or b"" for token in tokens)
    begin = spelled.rfind(text.encode())
    reached = 0
    for number, token in enumerate(tokens):
        before, data = begin - reached, token.data or b""
        if begin >= 0 and before < len(data) and not data[: max(before, 0)].strip(_SPACES):
            return list(tokens[number:])
        reached += len(data)
    return list(tokens)


def is_control(data: bytes) -> bool:
    """Whether a text is the name of a control token."""
    return data in ENDS or _CONTROL.fullmatch(data) is not None


class _Laying:
    """How far the tokens are laid over the text."""

    def __init__(self, text: bytes, tokens: list[ChatToken]):
        self._text, self._tokens = text, tokens
        self._at = 0
        self._waiting: list[ChatToken] = []
        """Tokens of which no text is known: parts of a character, as a rule."""
        self.pieces: list[LaidToken] = []
        self.rest: list[ChatToken] = []
        """The tokens behind the text."""
        self.remainder = b""
        """What is left of the token in which the text ends."""

    def to_the_end(self) -> bool:
        shown = [n for n, t in enumerate(self._tokens) if t.data and not is_control(t.data)]
        last_shown = max(shown, default=-1)
        for number, token in enumerate(self._tokens):
            if self._at == len(self._text):
                self.rest += [*self._waiting, *self._tokens[number:]]
                return True
            if not token.data:
                self._waiting.append(token)
            elif number < last_shown and self._is_hidden(token.data):
                self._waiting.append(ChatToken(b"", math.nan))
            elif not self._take(token, token.data):
                return False
        if self._at < len(self._text) and self._unknown:
            self._put(len(self._text), [])
        return self._at == len(self._text)

    @property
    def _unknown(self) -> bool:
        return any(token.data is None for token in self._waiting)

    def _is_hidden(self, data: bytes) -> bool:
        """Whether a token is a control token that the server does not show in the text."""
        return is_control(data) and not self._text.startswith(data, self._at)

    def _take(self, token: ChatToken, data: bytes) -> bool:
        """The next token that spells something; False where it does not spell what follows."""
        if self._unknown:
            self._put(self._place_of(data), [])
        likeliest = token.likeliest
        if not self._text.startswith(data, self._at) and not self.pieces:
            stripped = data.lstrip(_SPACES)
            lead, data = data[: len(data) - len(stripped)], stripped
            if not data:
                return True  # white space before the text
            likeliest = [(given and _without(given, lead), loss) for given, loss in likeliest]
        left = self._text[self._at :]
        if not left:
            self.rest.append(token)
        elif left.startswith(data):
            self._put(self._at + len(data), [ChatToken(data, token.nll, likeliest)])
        elif data.startswith(left):
            self.remainder = data[len(left) :]
            loss = math.nan if self.remainder.strip(_SPACES) else token.nll
            self._put(len(self._text), [ChatToken(left, loss, likeliest)])
        else:
            return False
        return True

    def _place_of(self, data: bytes) -> int:
        """Where this token begins behind tokens that are unknown, which are some of a character of
        several bytes; it may reach beyond the end of the text."""
        first = _SEVERAL_BYTES.search(self._text, self._at)
        start = first.end() if first else self._at
        if (place := self._text.find(data, start)) >= 0:
            return place
        lengths = range(min(len(data), len(self._text) - start), 0, -1)
        shown = next((n for n in lengths if self._text.endswith(data[:n])), 0)
        return len(self._text) - shown

    def _put(self, end: int, more: list[ChatToken]) -> None:
        """A piece of the text up to `end`, of the tokens that wait and of `more`."""
        tokens = [*self._waiting, *more]
        self._waiting = []
        loss = sum(token.nll for token in tokens)
        likeliest = () if math.isnan(loss) else tokens[0].likeliest
        self.pieces.append(LaidToken(self._text[self._at : end], loss, likeliest))
        self._at = end


def _without(data: bytes, lead: bytes) -> bytes:
    """A likely token without the white space that was taken off the text."""
    return data.removeprefix(lead) or data
