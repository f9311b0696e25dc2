"""A progress bar with a rate and an ETA, for commands whose work is counted in tokens."""

import contextlib
from collections.abc import Callable, Iterator

Note = Callable[[float, float, str, float], None]
"""done, total, what to show of them, tokens so far"""


@contextlib.contextmanager
def token_bar(label: str) -> Iterator[Note]:
    """On stderr. Its clock starts with the first note: loading a model is no part of the rate."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn(label),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TextColumn("{task.fields[rate]} tokens/s"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task("", total=None, shown="", rate="-", start=False)

    def note(done: float, total: float, shown: str, tokens: float) -> None:
        if not bar.tasks[0].started:
            bar.start()
            bar.start_task(task)
        elapsed = bar.tasks[0].elapsed or 0.0
        rate = f"{tokens / elapsed:,.0f}" if elapsed > 0.5 else "-"
        bar.update(task, completed=done, total=total, shown=shown, rate=rate)

    if bar.console.is_interactive:  # a sign of life while the model is loaded
        bar.start()
    try:
        yield note
    finally:
        if not bar.tasks[0].started:  # an error before the work: leave its message alone
            bar.remove_task(task)
        if bar.live.is_started:
            bar.stop()
