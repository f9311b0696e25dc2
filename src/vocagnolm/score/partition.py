"""Who scores what: a share of the shards, or a part of a teacher that several processes hold
together."""

import re
from dataclasses import dataclass

import torch

from vocagnolm.errors import UsageError
from vocagnolm.score.plan import TeacherSource
from vocagnolm.score.settings import ScoreSettings


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
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
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


# ---- teachers over several processes ----


def team_size(source: TeacherSource, settings: ScoreSettings, processes: int) -> int:
    """As `settings` say, or as few as hold the teacher's weights; checked against the number of
    processes that run on this machine."""
    wanted = settings.shard_teacher
    size = source.find(settings).fewest_shards() if wanted == "auto" else wanted
    if size == 1:
        return 1
    asked = f"--shard-teacher {wanted}: {size}"
    if processes == 1:
        raise UsageError(
            f"{asked} processes hold one teacher together, and this one runs alone. Start: "
            + _command(size, size)
        )
    if processes % size:
        raise UsageError(
            f"{asked} processes hold one teacher together, and the {processes} of this machine "
            f"cannot be split so. Start a multiple of {size}: "
            + _command(max(1, processes // size) * size, size)
        )
    _require_gpus(settings, processes, size)
    return size


def _require_gpus(settings: ScoreSettings, processes: int, size: int) -> None:
    gpus = torch.cuda.device_count()
    if gpus and settings.device == "cpu":
        raise UsageError(
            "--shard-teacher on CPUs: transformers would take the GPUs of this machine. Hide them "
            "with CUDA_VISIBLE_DEVICES=''."
        )
    if gpus and processes > gpus:
        raise UsageError(
            f"--shard-teacher: {processes} processes, and this machine has {gpus} GPUs; each needs "
            f"one of its own. Start: {_command(max(size, gpus // size * size), size)}"
        )


def _command(processes: int, size: int) -> str:
    return (
        f"torchrun --nproc_per_node {processes} -m vocagnolm score --shard-teacher {size} ... "
        "(the other options as before)"
    )
