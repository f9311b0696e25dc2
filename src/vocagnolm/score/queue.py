"""The shards that are still to be scored, and what becomes of those whose worker died."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

MOST_DEATHS = 3
"""So many workers may die on a shard before it is set aside."""


class ShardQueue:
    """Every shard is waiting, in somebody's hands, done, or set aside."""

    def __init__(self, numbers: Sequence[int]):
        self._waiting = deque(numbers)
        self._deaths: Counter[int] = Counter()
        self._open = set(numbers)
        self.done: list[int] = []
        self.set_aside: dict[int, str] = {}
        """With the last thing that was heard of their workers."""

    @property
    def open(self) -> int:
        """Shards that are neither done nor set aside."""
        return len(self._open)

    def take(self) -> int | None:
        return self._waiting.popleft() if self._waiting else None

    def take_beside(self, number: int) -> int | None:
        """One to be made ready while `number` is scored. A shard that was with a worker when it
        died is handed out alone: should it be the cause, no other must be blamed."""
        if number in self._deaths or not self._waiting or self._waiting[0] in self._deaths:
            return None
        return self._waiting.popleft()

    def finished(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)
            self.done.append(number)

    def died(self, numbers: Iterable[int], reason: str) -> None:
        """Their worker died: they go to the end of the queue, and those on which too many have died
        are set aside."""
        for number in numbers:
            self._deaths[number] += 1
            if self._deaths[number] < MOST_DEATHS:
                self._waiting.append(number)
            else:
                self._open.discard(number)
                self.set_aside[number] = reason
