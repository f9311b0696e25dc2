"""The command line: parse, call one function, print.

Every command lives in the file of its name. Those files import nothing heavy at the top, so
that `vocagnolm --help` starts at once; the work is imported when a command runs. Results go to
stdout, progress and messages to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

import errno
import sys

import typer

from vocagnolm import __version__
from vocagnolm.cli import recipe, store, study
from vocagnolm.cli.align import align
from vocagnolm.cli.check import check
from vocagnolm.cli.compare import compare
from vocagnolm.cli.demo import demo
from vocagnolm.cli.evaluate import evaluate
from vocagnolm.cli.prepare import prepare
from vocagnolm.cli.report import report
from vocagnolm.cli.score import score
from vocagnolm.cli.train import train
from vocagnolm.cli.view import view
from vocagnolm.errors import VocagnolmError

app = typer.Typer(
    name="vocagnolm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Train a language model under the guidance of any teacher, whatever the two "
        "vocabularies are."
    ),
    epilog="Start with: vocagnolm demo, or vocagnolm compare --student S --teacher T",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vocagnolm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    pass


app.command()(align)
app.command()(check)
app.command()(compare)
app.command()(demo)
app.command()(evaluate)
app.command()(prepare)
app.add_typer(recipe.app, name="recipe")
app.command()(report)
app.command()(score)
app.add_typer(store.app, name="store")
app.add_typer(study.app, name="study")
app.command()(train)
app.command()(view)


def main() -> None:
    """Entry point: library errors become one message on stderr and an exit code."""
    try:
        app()
    except VocagnolmError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away: `vocagnolm ... | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # a path that cannot be written, a full disk: no fault of the program
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        path = error.filename2 or error.filename
        named = f"{path}: " if path else ""
        typer.echo(
            f"error: {named}{error.strerror}. Check the path, its rights and the disk.", err=True
        )
        sys.exit(1)
