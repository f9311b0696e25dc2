"""Progress of long commands on stderr: a bar on a terminal, elsewhere a plain line now and then.

scoring: 1,024/20,000 documents, 5%, 8,213 tokens/s, ETA 12:40
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from vocagnolm.pace import Pace, Speed, clock_time


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
    from vocagnolm.places.copies import told

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
