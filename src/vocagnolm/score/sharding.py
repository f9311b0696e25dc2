"""How many processes hold one teacher together."""

import torch

from vocagnolm.errors import UsageError
from vocagnolm.score.plan import TeacherSource
from vocagnolm.score.settings import ScoreSettings


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
