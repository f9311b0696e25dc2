"""Which tokens of a conversation are trained on."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import TokenSpans
from vocagnolm.chat.messages import messages_of

TrainOn = Literal["assistant", "last", "all"]


def trained_ranges(text: str, train_on: TrainOn) -> NDArray[np.int64]:
    """Bytes of a shared text that are trained on, [N, 2]: contents with their ends of turn."""
    messages = messages_of(text)
    wanted = [
        train_on == "all" or (message.role == "assistant" and not message.given)
        for message in messages
    ]
    if train_on == "last" and any(wanted):
        last = max(n for n, one in enumerate(wanted) if one)
        wanted = [n == last for n in range(len(messages))]
    ends = np.cumsum([len(message.content.encode()) + 1 for message in messages])
    starts = np.concatenate([[0], ends[:-1]])
    ranges: NDArray[np.int64] = np.stack([starts, ends], axis=1).astype(np.int64)
    chosen: NDArray[np.int64] = ranges[np.array(wanted, bool)]
    return chosen


def trained_tokens(tokens: TokenSpans, ranges: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tokens whose bytes are all trained on; the template's own are not."""
    return trained_spans(tokens.spans, ranges)


def trained_spans(spans: NDArray[np.int64], ranges: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The same for spans; of several texts where they are laid end to end."""
    if not len(ranges):
        return np.zeros(len(spans), bool)
    starts, ends = spans[:, 0], spans[:, 1]
    # neighbouring ranges are one
    joined = np.concatenate([[True], ranges[1:, 0] != ranges[:-1, 1]])
    opens = ranges[joined, 0]
    shuts = ranges[np.append(np.flatnonzero(joined)[1:] - 1, len(ranges) - 1), 1]
    place = np.searchsorted(opens, starts, side="right") - 1
    inside: NDArray[np.bool_] = (
        (place >= 0) & (ends <= shuts[np.maximum(place, 0)]) & (starts < ends)
    )
    return inside
