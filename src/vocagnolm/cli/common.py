"""What commands share: quiet libraries, endings, progress."""

import codecs
import contextlib
import errno
import json
import locale
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from vocagnolm import __version__
from vocagnolm.base.progress import Speed, Throttle, clock_time
from vocagnolm.errors import VocagnolmError, VocagnolmWarning

SPLIT_TEXTS = "texts of more than 1 MB were split at line ends into several documents"


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """The first column is a name, the others are numbers."""
    from vocagnolm.evaluate.results import format_table

    def written(cell: Any) -> str:
        number = f"{cell:.3f}" if isinstance(cell, float) else str(cell)
        return "-" if cell is None else f"{cell:,}" if isinstance(cell, int) else number

    table = format_table([columns, *([*map(written, row)] for row in rows)], rule=False)
    typer.echo(f"{title}\n{table}")


def print_histogram(counts: Sequence[int], step: float, lines: int) -> None:
    """Print a histogram of values in nats; everything beyond the last line is part of it."""
    shown = [*counts[: lines - 1], sum(counts[lines - 1 :])]
    for at, count in enumerate(shown if sum(shown) else []):
        high = f"- {(at + 1) * step:g}" if at < lines - 1 else "and more"
        bar = "█" * round(40 * count / max(shown))
        typer.echo(f"{at * step:4g} {high:9} nats {count / sum(shown):6.1%} {bar:40} {count:,}")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Our progress bar is the one that counts; those of transformers would break it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


@contextlib.contextmanager
def showing_warnings() -> Iterator[None]:
    """Our own warnings as plain lines; those of libraries as ever."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, VocagnolmWarning):
            typer.echo(f"warning: {message}", err=True)
        else:
            usual(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


# ---- the locale ----


def in_utf8() -> None:
    """Start the program again in Python's UTF-8 mode where the locale has another encoding, as
    Python 3.15 does without being asked: paths, files and the terminal take all of Unicode then, in
    libraries and in processes that are started from here too."""
    utf8 = codecs.lookup(locale.getpreferredencoding(False)).name == "utf-8"
    if not utf8 and os.environ.get("PYTHONUTF8") != "1":  # else Python was told not to look
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


# ---- endings ----


DEBUG_VARIABLE = "VOCAGNOLM_DEBUG"
INTERRUPTED = 130  # 128 + SIGINT
FAULT = 70  # EX_SOFTWARE of sysexits.h

KEPT = {
    "score": "every finished shard is kept; run the same command again to score the rest.",
    "write": "every finished shard is kept; run the same command again to write the rest.",
    "prepare": "every finished part is kept; run the same command again to make the rest.",
    "train": "no step was made; run the same command again.",
    "evaluate": "with --out every answer is kept, and the same command resumes; without --out "
    "nothing is kept.",
    "try": "finished steps are kept; run the same command again to resume.",
    "demo": "finished steps and students are kept; run the same command again to resume.",
    "study": "finished runs and checkpoints are kept; run the same command again to resume.",
    "push": "files that were uploaded are not uploaded again; run the same command again.",
}
NOTHING_KEPT = "nothing was written; run the same command again."


class Interrupted(VocagnolmError):
    """Ctrl-C: one sentence on what is kept."""

    exit_code = INTERRUPTED


# ---- commands ----


_VALUES = {int: "N", float: "X", Path: "PATH"}


def _value_name(parameter: Any) -> str:
    """What stands behind an option in the help: its choices, or the kind of its value."""
    about = parameter.type_descriptor
    if getattr(parameter, "is_flag", False) or parameter.param_type_name == "argument":
        return ""
    if about.is_choice:
        return "|".join(about.choices)
    kind = get_args(about.annotation)[0] if about.is_list else about.annotation
    return _VALUES.get(kind, "TEXT")


class _NamedValues:
    """Help that calls values by what they are, where Typer writes Python's types."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if not hasattr(parameter, "type_descriptor"):  # of older Typer, which has other names
                return parameters
            parameter.display_type = lambda ctx, parameter=parameter: _value_name(parameter)
        return parameters


class Command(_NamedValues, TyperCommand):
    """A command of this program. Its help text fills the terminal's width: a line break in a
    docstring is only a space."""

    def __init__(self, *given: Any, **settings: Any):
        super().__init__(*given, **settings)
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", self.help or "")


class RayCommand(Command):
    """A command with `--ray [ADDRESS]`: without an address it means a cluster on this machine."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at, word in enumerate(args):
            if word == "--ray" and (at + 1 == len(args) or args[at + 1].startswith("-")):
                args = [*args[:at], "--ray", "", *args[at + 1 :]]
                break
        return super().parse_args(ctx, args)


class Group(_NamedValues, TyperGroup):
    """Several of them under one name."""


class App(typer.Typer):
    """Commands that each show an example below their options."""

    def __init__(self, cls: type[TyperGroup] = Group, **settings: Any):
        super().__init__(cls=cls, no_args_is_help=True, **settings)

    def command(
        self, name: str | None = None, *, example: str | None = None, **settings: Any
    ) -> Callable[[Any], Any]:
        epilog = None if example is None else f"Example: {example}"
        return super().command(name, **{"cls": Command, "epilog": epilog} | settings)


GROUP = "vocagnolm.commands"


class Commands(Group):
    """The root command: our own commands, and after them those that installed packages bring, as
    Typer applications behind entry points of the group `vocagnolm.commands` (`study` is one). The
    packages are looked through only when all commands are shown, or when the one that is asked for
    is not among our own: the other commands do not wait for that."""

    _looked = False

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = KEPT.get(ctx.invoked_subcommand or "", NOTHING_KEPT)
            raise Interrupted(f"Interrupted: {kept}") from None
        except EOFError as error:  # not of a user at a prompt: of a file that ends too early
            raise RuntimeError(f"a file ended too early: {error}") from error

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_installed()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_installed()
        return super().get_command(ctx, cmd_name)

    def _add_installed(self) -> None:
        if self._looked:
            return
        self._looked = True
        from importlib.metadata import entry_points

        found = typer.Typer(add_completion=False)
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            found.add_typer(entry.load(), name=entry.name, rich_help_panel="More")
        if found.registered_groups:
            for name, command in getattr(get_command(found), "commands", {}).items():
                self.commands.setdefault(name, command)


def end(error: BaseException) -> NoReturn:
    """Print an error in one message and leave with its exit code."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        _leave(str(error) or f"Interrupted: {NOTHING_KEPT}", INTERRUPTED)
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
    panic = type(error).__name__ == "PanicException"  # of a library in Rust, no Exception
    if os.environ.get(DEBUG_VARIABLE) or not (isinstance(error, Exception) or panic):
        raise error
    said = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, ImportError):
        _leave(
            f"error: the installed packages do not fit together: {said:.300}. Upgrade those that "
            f"the trace names, with pip install --upgrade ({_trace_written(error)}).",
            1,
        )
    _leave(
        f"error: this should not have happened: {type(error).__name__}{': ' if said else ''}"
        f"{said:.300} ({_trace_written(error)}; `vocagnolm --debug ...` shows it here)",
        FAULT,
    )


_MOST_CHARACTERS = 2000


def _leave(message: str, code: int) -> NoReturn:
    """Under torchrun only the leading process prints: torchrun itself shows, behind its own trace,
    what the process that failed first has left in a file."""
    if len(message) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2 - 10
        message = f"{message[:half]} [...] {message[-half:]}"
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        about = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(report).write_text(json.dumps({"message": about}), "utf-8")
    if not report or leading():
        typer.echo(message, err=True)
    from vocagnolm.base.children import leave

    leave(code)


def _trace_written(error: BaseException) -> str:
    import platform
    import tempfile
    import traceback

    from vocagnolm.base.files import write_text

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


# ---- shares ----


class _Share(Protocol):
    """How a run of `score` or `write` ended that had only a share."""

    @property
    def missing_shards(self) -> list[int]: ...
    @property
    def missing_shares(self) -> list[str]: ...


def what_is_missing(command: str, summary: _Share, shards: int) -> str:
    """What is left to do for a folder of so many shards."""
    missing = summary.missing_shards
    if not missing:
        return (
            "Every shard is there; the manifest is left to a process that is still at work on the "
            f"folder. Should it die, run any share again, or `{command}` without --share."
        )
    return (
        f"NOT COMPLETE: {len(missing):,} of {shards:,} shards are missing (the first is "
        f"{missing[0]}), of the shares {', '.join(summary.missing_shares)}. Run those that are not "
        f"running, or `{command}` without --share, which does all that is missing."
    )


# ---- progress ----


def leading() -> bool:
    """Whether this is the process that prints, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


class Meter:
    """Is given how far the work is, and shows it. The clock starts with the first note, since
    loading a model is no part of the rate; a new label starts it anew."""

    def __init__(self, label: str, unit: str, show: Callable[..., None]):
        self.label, self.unit, self._show = label, unit, show
        self.speed: Speed | None = None

    def note(
        self, done: float, total: float, shown: str, amount: float, label: str | None = None
    ) -> None:
        """`done` of `total` give the time left, `amount` the rate, `shown` stands beside them."""
        if label is not None and label != self.label:
            self.label, self.speed = label, None
        self.speed = self.speed or Speed()
        self.speed.note(done, total, amount)
        rate, left = self.speed.rate, clock_time(self.speed.seconds_left)
        number = "-" if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        self._show(self.label, done, total, shown, f"{number} {self.unit}/s", left)


@contextlib.contextmanager
def progress(
    label: str, unit: str = "tokens", *, started: bool = False, quiet: bool = False
) -> Iterator[Meter]:
    """A bar on a terminal, else, or beside another bar, a line now and then; of several processes
    the leading one shows it. `started`: the clock runs from here on, for work that begins at
    once. `quiet`: nothing is shown."""
    if quiet:
        yield Meter(label, unit, lambda *shown: None)
        return
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = ("{task.fields[shown]}", "{task.fields[rate]}", "ETA {task.fields[left]}")
    bar = Progress(
        TextColumn("{task.fields[label]}"),
        BarColumn(),
        *(TextColumn(column) for column in columns),
        console=console,
    )
    throttle = Throttle() if started else None

    def show_line(label: str, done: float, total: float, shown: str, rate: str, left: str) -> None:
        nonlocal throttle
        throttle = throttle or Throttle()
        if leading() and throttle.due():
            share = f"{done / total:.0%}" if total else "-"
            typer.echo(f"{label}: {shown}, {share}, {rate}, ETA {left}", err=True)

    def show_bar(label: str, done: float, total: float, shown: str, rate: str, left: str) -> None:
        fields: Any = {"label": label, "shown": shown, "rate": rate, "left": left}
        bar.update(task, completed=done, total=total, **fields)

    meter = Meter(label, unit, show_line)
    with contextlib.ExitStack() as stack:
        if console.is_terminal and leading():
            with contextlib.suppress(LiveError):  # another bar is on the screen
                stack.enter_context(bar)
                task = bar.add_task("", total=None, label=label, shown="", rate="", left="-")
                meter = Meter(label, unit, show_bar)
        meter.speed = Speed() if started else None
        try:
            yield meter
        finally:
            if meter.speed is None:  # an error before the work: leave its message alone
                for unused in bar.task_ids:
                    bar.remove_task(unused)


@contextlib.contextmanager
def showing_copies() -> Iterator[None]:
    """Files that come from an address, or go there, while another bar may be running."""
    from vocagnolm.storage.copies import reporting_to

    with contextlib.ExitStack() as shown:
        meters: dict[str, Meter] = {}

        def listen(what: str, folder: Path, done: int, total: int) -> None:
            if what not in meters:
                typer.echo(f"copying {what} ({total / 1e6:,.1f} MB), kept in {folder}", err=True)
                meters[what] = shown.enter_context(progress("copying", "MB", started=True))
            sizes = f"{done / 1e6:,.1f}/{total / 1e6:,.1f} MB"
            meters[what].note(done, total, sizes, done / 1e6)

        with reporting_to(listen):
            yield
