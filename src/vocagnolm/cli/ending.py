"""How a command ends before its time: Ctrl-C, an error a user can mend, a fault of the program."""

import errno
import os
import platform
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from vocagnolm import __version__
from vocagnolm.errors import VocagnolmError

DEBUG_VARIABLE = "VOCAGNOLM_DEBUG"
INTERRUPTED = 130  # 128 + SIGINT
FAULT = 70  # EX_SOFTWARE of sysexits.h

KEPT = {
    "score": "every finished shard is kept; run the same command again to score the rest.",
    "prepare": "every finished part is kept; run the same command again to make the rest.",
    "train": "the newest checkpoint is kept; run the same command again to go on from it, to the "
    "same model. (SIGTERM instead of Ctrl-C writes a checkpoint first.)",
    "evaluate": "with --out every answer is kept, and the same command goes on; without --out "
    "nothing is.",
    "demo": "finished steps and students are kept; run the same command again to go on.",
    "study": "finished runs and checkpoints are kept; run the same command again to go on.",
    "push": "files that were uploaded are not uploaded again; run the same command again.",
}
NOTHING_KEPT = "nothing was written; run the same command again."


class Interrupted(VocagnolmError):
    """Ctrl-C: one sentence on what is kept."""

    exit_code = INTERRUPTED


class Commands(TyperGroup):
    """The root command, which knows what each of its commands leaves behind."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = KEPT.get(ctx.invoked_subcommand or "", NOTHING_KEPT)
            raise Interrupted(f"Interrupted: {kept}") from None
        except EOFError as error:  # not of a user at a prompt: of a file that ends too early
            raise RuntimeError(f"a file ended too early: {error}") from error


def end(error: BaseException) -> NoReturn:
    """Tell an error in one message and leave with its exit code."""
    if isinstance(error, Interrupted):
        _leave(str(error), INTERRUPTED)
    if isinstance(error, KeyboardInterrupt):
        _leave(f"Interrupted: {NOTHING_KEPT}", INTERRUPTED)
    if isinstance(error, VocagnolmError):
        _leave(f"error: {error}", error.exit_code)
    if isinstance(error, BrokenPipeError):  # our reader went away: `vocagnolm ... | head`
        sys.stderr.close()
        sys.exit(0)
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        # a path that cannot be written, a full disk: no fault of the program
        path = error.filename2 or error.filename
        named = f"{path}: " if path else ""
        _leave(f"error: {named}{error.strerror}. Check the path, its rights and the disk.", 1)
    if os.environ.get(DEBUG_VARIABLE) or not isinstance(error, Exception):
        raise error
    _leave(_fault_message(error), FAULT)


def _leave(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    sys.exit(code)


def _fault_message(error: Exception) -> str:
    said = (str(error).strip().splitlines() or [""])[0]
    name = type(error).__name__
    return (
        f"error: this should not have happened: {name}{': ' if said else ''}{said:.300} "
        f"({_where_written(error)}; `vocagnolm --debug ...` shows it here)"
    )


def _where_written(error: Exception) -> str:
    from vocagnolm.files import write_text

    lines = [
        f"vocagnolm {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"command: {' '.join(sys.argv)}",
        "",
        "".join(traceback.format_exception(error)),
    ]
    try:
        path = Path(tempfile.mkdtemp(prefix="vocagnolm-")) / "traceback.txt"
        write_text(path, "\n".join(lines).encode(errors="backslashreplace").decode())
    except (OSError, VocagnolmError) as unwritten:
        return f"the full trace could not be written: {unwritten}"
    return f"the full trace is in {path}"
