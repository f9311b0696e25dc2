"""Work that runs in processes of its own. They are forked from a server that has opened no bucket:
a fork of a process that has cannot use it."""

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["bucket_children", "score.teacher_kit"])


def start(target: Any, *arguments: Any) -> Any:
    process = CONTEXT.Process(target=target, args=arguments, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the server's preloading
        process.start()
    return process


def end(process: Any, seconds: float = 60.0) -> int:
    """Its exit code: 0, or minus the signal that killed it."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        raise TimeoutError("the child did not end")
    return int(process.exitcode)


def score(
    env: dict[str, str],
    corpus: str,
    out: str,
    share: str | None = None,
    die: str | None = None,
    pause: str | None = None,
    seconds: float = 0.0,
) -> None:
    """Score into `out`; killed at the step `die` (`created 000001.safetensors`), slow before the
    step `pause`."""
    os.environ.update(env)
    from score.teacher_kit import TEACHERS

    from vocagnolm.base import files
    from vocagnolm.score import Share, score_corpus

    def reached(point: str, path: Any) -> None:
        step = f"{point} {path.name}"
        if step == die:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == pause:
            time.sleep(seconds)

    files.reached = reached
    part = None if share is None else Share.parse(share)
    teacher, settings = TEACHERS["alternatives"]
    score_corpus(teacher(), corpus, out, settings=settings, share=part)


def copy_blocks(env: dict[str, str], tree: dict[str, Any], ready: Any) -> None:
    """As a rank of a machine does."""
    os.environ.update(env)
    from vocagnolm.data.materials import local_blocks
    from vocagnolm.recipe import recipe_from_dict

    recipe = recipe_from_dict(tree)
    ready.wait()
    local_blocks(recipe)
