"""Rates, the time left, and lines that come now and then."""

import sys

import pytest

from vocagnolm.base.progress import VARIABLE, Speed, Throttle, clock_time
from vocagnolm.cli.common import progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_line_after_ten_seconds_then_every_thirty(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    clock = Clock()
    throttle = Throttle(clock)
    told = []
    for second in range(100):
        clock.now = float(second)
        if throttle.due():
            told.append(second)
    assert told == [10, 40, 70]


@pytest.mark.parametrize(("value", "told"), [("0", 5), ("2", 2), ("lots", 0)])
def test_the_pace_can_be_set(value, told, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    clock = Clock()
    throttle = Throttle(clock)
    times = 0
    for second in range(5):
        clock.now = float(second)
        times += throttle.due()
    assert times == told


def test_what_was_there_before_makes_no_run_faster():
    clock = Clock()
    speed = Speed(clock)
    speed.note(50, 100, 5_000)  # found
    assert speed.rate is None and speed.seconds_left is None
    clock.now = 10.0
    speed.note(60, 100, 6_000)
    assert speed.rate == 100 and speed.seconds_left == 40


def test_times():
    assert [clock_time(s) for s in (None, 5, 65.4, 3661)] == ["-", "0:05", "1:05", "1:01:01"]


def test_plain_lines_where_stderr_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "0")
    with progress("reading", "pages") as meter:
        meter.note(1, 4, "1/4 pages", 1)
        meter.note(0, 2, "0/2 books", 0, label="closing")
    assert capsys.readouterr().err.splitlines() == [
        "reading: 1/4 pages, 25%, - pages/s, ETA -",
        "closing: 0/2 books, 0%, - pages/s, ETA -",
    ]


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress("reading", "pages") as meter:
        meter.note(4, 4, "4/4 pages", 4)
    shown = capsys.readouterr().err
    assert "4/4 pages" in shown and "ETA" in shown and "\x1b[" in shown


@pytest.mark.parametrize(("seconds", "lines"), [("0", 6), ("1000", 2)])
def test_slow_steps_of_a_run_are_told_between_the_lines(seconds, lines, monkeypatch, capsys):
    from vocagnolm.train.metrics import Console
    from vocagnolm.train.settings import Schedule

    monkeypatch.setenv(VARIABLE, seconds)
    values = dict.fromkeys(Schedule.__dataclass_fields__, 1) | {"steps": 6}
    console = Console(quiet=False, log_every=4)
    console.start(Schedule(**values), 0)
    names = ("loss", "nll_kept", "nll_all", "kept_share", "learning_rate", "tokens_per_second")
    for step in range(1, 7):
        console.step({"step": step} | dict.fromkeys(names, 1.0))
    first, *told = capsys.readouterr().err.splitlines()
    assert first.startswith("training: 6 steps of")
    assert len(told) == lines and all("tokens/s  ETA 0:0" in line for line in told)
