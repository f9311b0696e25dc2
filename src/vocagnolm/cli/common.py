"""What commands share: quiet libraries, endings, progress."""

import contextlib
import errno
import os
import platform
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from vocagnolm import __version__
from vocagnolm.errors import VocagnolmError
from vocagnolm.progress import Pace, Speed, clock_time


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
    from vocagnolm.errors import PlaceWarning

    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, PlaceWarning):
            typer.echo(f"warning: {message}", err=True)
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


# ---- endings ----


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


GROUP = "vocagnolm.commands"


class AllCommands(Commands):
    """The root command: our own commands, and after them those that installed packages bring, as
    Typer applications behind entry points of the group `vocagnolm.commands` (`study` is one). The
    packages are looked through only when all commands are shown, or when the one that is asked for
    is not among our own: the other commands do not wait for that."""

    _looked = False

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
            found.add_typer(entry.load(), name=entry.name)
        if found.registered_groups:
            for name, command in getattr(get_command(found), "commands", {}).items():
                self.commands.setdefault(name, command)


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


# ---- progress ----


class Meter:
    """Told how far the work is; shows it. The clock starts with the first note: loading a model
    is no part of the rate. A new label starts it anew."""

    def __init__(self, label: str, unit: str):
        self.label = label
        self.unit = unit
        self._speed: Speed | None = None

    def start(self) -> None:
        """Start the clock now, not with the first note."""
        self._speed = Speed()

    def note(
        self, done: float, total: float, shown: str, amount: float, label: str | None = None
    ) -> None:
        """`done` of `total` give the time left, `amount` the rate, `shown` stands beside them."""
        if label is not None and label != self.label:
            self.label, self._speed = label, None
        if self._speed is None:
            self.start()
        assert self._speed is not None
        self._speed.note(done, total, amount)
        rate = self._speed.rate
        told = "-" if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        self._show(
            done, total, shown, f"{told} {self.unit}/s", clock_time(self._speed.seconds_left)
        )

    def _show(self, done: float, total: float, shown: str, rate: str, left: str) -> None:
        raise NotImplementedError


class _Lines(Meter):
    def __init__(self, label: str, unit: str):
        super().__init__(label, unit)
        self._pace: Pace | None = None

    def start(self) -> None:
        super().start()
        self._pace = self._pace or Pace()

    def _show(self, done: float, total: float, shown: str, rate: str, left: str) -> None:
        assert self._pace is not None
        if self._pace.due():
            share = f"{done / total:.0%}" if total else "-"
            typer.echo(f"{self.label}: {shown}, {share}, {rate}, ETA {left}", err=True)


class _Bar(Meter):
    def __init__(self, label: str, unit: str, bar: Any):
        super().__init__(label, unit)
        self._bar = bar
        self._task = bar.add_task("", total=None, label=label, shown="", rate="", left="-")

    def _show(self, done: float, total: float, shown: str, rate: str, left: str) -> None:
        values = {"label": self.label, "shown": shown, "rate": rate, "left": left}
        self._bar.update(self._task, completed=done, total=total, **values)


@contextlib.contextmanager
def progress(label: str, unit: str = "tokens", *, started: bool = False) -> Iterator[Meter]:
    """`started`: the clock runs from here on, for work that begins at once."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        meter: Meter = _Lines(label, unit)
        if started:
            meter.start()
        yield meter
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = ("{task.fields[shown]}", "{task.fields[rate]}", "ETA {task.fields[left]}")
    bar = Progress(
        TextColumn("{task.fields[label]}"),
        BarColumn(),
        *(TextColumn(column) for column in columns),
        console=console,
    )
    with bar:
        meter = _Bar(label, unit, bar)
        if started:
            meter.start()
        try:
            yield meter
        finally:
            if meter._speed is None:  # an error before the work: leave its message alone
                bar.remove_task(bar.task_ids[0])


@contextlib.contextmanager
def showing_copies() -> Iterator[None]:
    """Files that come from an address, or go there, while another bar may be running."""
    from vocagnolm.storage.copies import told

    with contextlib.ExitStack() as shown:
        meters: dict[str, Meter] = {}

        def listen(what: str, folder: Path, done: int, total: int) -> None:
            if what not in meters:
                typer.echo(f"copying {what} ({total / 1e6:,.1f} MB), kept in {folder}", err=True)
                meters[what] = _Lines("copying", "MB") if meters else shown.enter_context(_any())
                meters[what].start()
            sizes = f"{done / 1e6:,.1f}/{total / 1e6:,.1f} MB"
            meters[what].note(done, total, sizes, done / 1e6)

        with told(listen):
            yield


@contextlib.contextmanager
def _any() -> Iterator[Meter]:
    """A bar, or lines where another bar is on the screen."""
    from rich.errors import LiveError

    with contextlib.ExitStack() as held:
        try:
            meter = held.enter_context(progress("copying", "MB"))
        except LiveError:
            meter = _Lines("copying", "MB")
        yield meter
