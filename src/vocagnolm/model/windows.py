"""How documents become batches: windows over long documents, and a fixed plan of batches.

No torch. The plan is a function of the token counts and the settings alone, because in bfloat16
the same document scores up to 0.05 nats differently in another batch: the same shard must always be
cut the same way, on any number of machines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Row lengths are rounded up to this, which wastes 1-2 % and keeps attention kernels on their fast
# path.
LENGTH_STEP = 64


@dataclass(frozen=True)
class Window:
    """Tokens `start..stop` of a document pass through the model together; of those, the tokens
    from `first_scored` on are scored here. The rest are context."""

    document: int
    start: int
    stop: int
    first_scored: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """Rows of one length; shorter windows are padded on the right, where a causal model cannot
    see it: no mask is needed and the scores are those of the document alone."""

    windows: tuple[Window, ...]
    row_tokens: int
    """Including the beginning-of-text tokens that stand before every window."""


def cut_windows(document: int, tokens: int, *, room: int, stride: int) -> list[Window]:
    """Windows of at most `room` tokens that score every token once, each with at least `stride`
    tokens before it (or all there are). The first window is full; each next one reaches back
    `stride` tokens."""
    if not 0 <= stride < room:
        raise ValueError(f"stride must be from 0 to {room - 1}, not {stride}")
    windows = []
    scored = 0
    while scored < tokens:
        start = max(0, scored - stride)
        stop = min(tokens, start + room)
        windows.append(Window(document, start, stop, scored))
        scored = stop
    return windows


def plan_batches(
    token_counts: Sequence[int],
    *,
    context: int,
    stride: int,
    prefix_tokens: int,
    batch_tokens: int,
) -> list[Batch]:
    """Batches of about `batch_tokens` tokens in rows of similar length, longest first (so that a
    lack of memory shows at once). `prefix_tokens` beginning-of-text tokens stand before every
    window."""
    windows = [
        window
        for document, tokens in enumerate(token_counts)
        for window in cut_windows(document, tokens, room=context - prefix_tokens, stride=stride)
    ]
    windows.sort(key=lambda w: (-len(w), w.document, w.start))
    batches = []
    first = 0
    while first < len(windows):
        longest = len(windows[first]) + prefix_tokens
        row_tokens = min(context, -(-longest // LENGTH_STEP) * LENGTH_STEP)
        rows = max(1, batch_tokens // row_tokens)
        batches.append(Batch(tuple(windows[first : first + rows]), row_tokens))
        first += rows
    return batches
