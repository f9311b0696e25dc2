"""What the launcher has told this process about the others, through the environment. No torch."""

import os

from vocagnolm.errors import UsageError


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def refuse_lone_process() -> None:
    """Without a GPU `accelerate launch --num_processes 2` starts one process and says nothing: it
    leaves the others to MPI. What it sets for several gives it away."""
    launched = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ
    if launched and "RANK" not in os.environ:
        raise UsageError(
            "accelerate launch was asked for several processes and has started one: without GPUs "
            "it starts no others. Use torchrun: torchrun --nproc-per-node N -m vocagnolm train "
            "RECIPE"
        )
