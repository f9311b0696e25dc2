"""An answer as it was written, token by token, laid over the shared text of its conversation.

The tokens are those that were drawn. Tokenizing the answer anew could give others, and their losses
would not fit.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from vocagnolm.chat.messages import Message, Refused, broken_off, require_no_marks
from vocagnolm.chat.tokens import ChatTokenizer

PIECE_BYTES = 255
"""The longest piece of a text of which no tokens are known."""


@dataclass(frozen=True)
class LaidAnswer:
    """A conversation with its answer, or a text and how it went on, and where the tokens lie."""

    text: str
    """The shared text."""
    content: str
    reasoning: str
    begin: int
    """The byte at which the answer begins."""
    spans: NDArray[np.int64]
    """[T, 2] in bytes of the shared text; empty for a token that stands for none of it."""


def lay_answer(
    prompt: str,
    pieces: Sequence[bytes],
    *,
    finished: bool,
    ended: bool,
    chat: ChatTokenizer | None = None,
    reasoning: str | None = None,
) -> LaidAnswer:
    """Lay the tokens of an answer, each spelled by a piece, over the conversation that begins with
    the shared text `prompt`. Control tokens are spelled by the private characters of `chat`.

    finished: it came to its end by itself. ended: the last token is the one that ended it, and
    stands for the end of the turn. reasoning: what the model thought, if it was written elsewhere.
    """
    written = pieces[:-1] if ended else pieces
    text = _decoded(written, whole=finished)
    thinking, answering = (0, 0), _stripped(text, 0, len(text))
    if chat is not None:
        thinking, answering = chat.answer_places(text)
    thinking = _stripped(text, *thinking)
    thought, content = text[slice(*thinking)], text[slice(*answering)]
    if chat is not None and chat.with_control_tokens(thought + content) != thought + content:
        raise Refused("control token: one stands within the answer")
    if reasoning:
        thought = reasoning
    require_no_marks(content + thought)
    message = Message("assistant", content, reasoning=thought)
    message = message if finished else broken_off(message)
    begin = len(prompt.encode())
    parts = []
    if thought and not reasoning:
        parts.append((*_in_bytes(text, *thinking), begin))
    if content:
        behind = Message("assistant", content, more=message.more).text
        place = begin + len(message.text.encode()) - len(behind.encode())
        parts.append((*_in_bytes(text, *answering), place))
    spans = _clipped(_tiling(written), parts, begin)
    whole = prompt + message.text + message.mark
    if ended:
        mark = len(whole.encode()) - 1
        spans = np.concatenate([spans, [[mark, mark + 1]]])
    return LaidAnswer(whole, content, thought, begin, spans)


def lay_continuation(
    text: str, pieces: Sequence[bytes], *, finished: bool, ended: bool
) -> LaidAnswer:
    """Lay the tokens with which a model went on with a text behind it. The token that ended it
    stands for none of it."""
    written = pieces[:-1] if ended else pieces
    content = _decoded(written, whole=finished)
    begin, size = len(text.encode()), len(content.encode())
    spans = _clipped(_tiling(written), [(0, size, begin)], begin)
    if ended:
        spans = np.concatenate([spans, [[begin + size, begin + size]]])
    return LaidAnswer(text + content, content, "", begin, spans)


def _decoded(pieces: Sequence[bytes], *, whole: bool) -> str:
    """The text of some tokens. Where an answer was broken off (not `whole`), its end may lie within
    a character: the tokens that reach into it are left out."""
    data = b"".join(pieces)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data, final=whole)
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8: at byte {error.start} of the answer") from None
    size = len(text.encode())
    if size == len(data):
        return text
    whole_ones = sum(end <= size for end in accumulate(map(len, pieces)))
    return _decoded(pieces[:whole_ones], whole=False)


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """A range of characters without the white space at its ends."""
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())
    return start, start + len(inside.strip())


def _in_bytes(text: str, start: int, end: int) -> tuple[int, int]:
    first = len(text[:start].encode())
    return first, first + len(text[start:end].encode())


def _tiling(pieces: Sequence[bytes]) -> NDArray[np.int64]:
    """[T, 2] Where each piece stands in all of them together."""
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    ends = np.cumsum(sizes)
    return np.stack([ends - sizes, ends], 1)


def _clipped(
    tokens: NDArray[np.int64], parts: Sequence[tuple[int, int, int]], begin: int
) -> NDArray[np.int64]:
    """Spans of tokens in the shared text; empty, and in order, where one touches no part. A token
    that reaches over several parts stands for the last of them. `parts`: from, to in the bytes that
    were written, and the place in the shared text."""
    spans = np.full((len(tokens), 2), -1, np.int64)
    for first, last, place in parts:
        inside = (tokens[:, 1] > first) & (tokens[:, 0] < last)
        spans[inside] = np.clip(tokens[inside], first, last) - first + place
    reached = begin
    for span in spans:
        if span[0] < 0:
            span[:] = reached
        reached = int(span[1])
    return spans


def tiling_pieces(n_bytes: int) -> NDArray[np.int64]:
    """Byte lengths that tile a text of which no tokens are known."""
    whole, rest = divmod(n_bytes, PIECE_BYTES)
    return np.array([PIECE_BYTES] * whole + ([rest] if rest else []), np.int64)
