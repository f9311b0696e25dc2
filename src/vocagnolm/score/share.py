"""A share of a store's shards: for machines that know nothing of each other."""

import re
from dataclasses import dataclass

from vocagnolm.errors import UsageError


@dataclass(frozen=True)
class Share:
    """Share `number` of `count`, from 1. Of all shards, not of those that are missing: what is
    missing changes while others work, and a shard could be left to nobody."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise UsageError(
                f"--share {self}: the shares of {self.count} are 1/{self.count} to "
                f"{self.count}/{self.count}."
            )

    @classmethod
    def parse(cls, text: str) -> "Share":
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None:
            raise UsageError(f"--share {text}: expected I/N, for example 3/8, the third of eight.")
        return cls(int(found[1]), int(found[2]))

    def shards(self, shard_count: int) -> range:
        return range(self.number - 1, shard_count, self.count)

    def of_shards(self, numbers: list[int]) -> list[str]:
        """The shares that these shards belong to."""
        return [f"{n + 1}/{self.count}" for n in sorted({m % self.count for m in numbers})]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"
