"""An answer as it was written, token by token, laid over the shared text of its conversation.

The tokens are those that were drawn. Tokenizing the answer anew could give others, and their losses
would not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocagnolm.chat.messages import Message, Refused, broken_off, require_no_marks
from vocagnolm.chat.tokens import ChatTokenizer

_LONGEST_PIECE = 255
"""Bytes of text that nobody's tokens cover, in one piece of a tiling."""


@dataclass(frozen=True)
class LaidAnswer:
    """A conversation with its answer, and where the answer's tokens lie in it."""

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
    data = b"".join(written)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8: at byte {error.start} of the answer") from None
    thought, content = ("", text) if chat is None else chat.answer_of(text)
    if chat is None and reasoning:
        thought = reasoning
    content = content.strip() if chat is None else content
    require_no_marks(content + thought)
    message = Message("assistant", content, reasoning=thought)
    message = message if finished else broken_off(message)
    begin = len(prompt.encode())
    at = begin + (len(message.text.encode()) - len(_behind_reasoning(message)) if thought else 0)
    parts = []
    if thought and reasoning is None:
        place = _found(data, thought.encode(), 0)
        parts.append((place, place + len(thought.encode()), begin))
    if content:
        place = _found(data, content.encode(), parts[0][1] if parts else 0)
        parts.append((place, place + len(content.encode()), at))
    sizes = np.array([len(piece) for piece in written], np.int64)
    ends = np.cumsum(sizes)
    spans = _clipped(np.stack([ends - sizes, ends], 1), parts, begin)
    whole = prompt + message.text + message.mark
    if ended:
        mark = len(whole.encode()) - 1
        spans = np.concatenate([spans, [[mark, mark + 1]]])
    return LaidAnswer(whole, content, thought, begin, spans)


def _behind_reasoning(message: Message) -> bytes:
    """The part of a message's text behind its reasoning and the sign that parts the two."""
    alone = Message(message.role, message.content, more=message.more)
    return alone.text.encode()


def _found(data: bytes, part: bytes, start: int) -> int:
    place = data.find(part, start)
    if place < 0:
        raise Refused("not in order: the answer's parts are not where its template puts them")
    return place


def _clipped(
    tokens: NDArray[np.int64], parts: Sequence[tuple[int, int, int]], begin: int
) -> NDArray[np.int64]:
    """Spans of tokens in the shared text; empty, and in order, where one touches no part. A token
    that reaches over several parts stands for the last of them."""
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
    whole, rest = divmod(n_bytes, _LONGEST_PIECE)
    return np.array([_LONGEST_PIECE] * whole + ([rest] if rest else []), np.int64)
