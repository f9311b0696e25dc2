"""What reaches the terminal: our progress and our warnings, not those of the libraries."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import typer


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
