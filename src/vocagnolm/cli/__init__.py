"""The command line: parse, call one function, print.

Every command lives in the file of its name, or in another package that is installed beside this one
(`study` is such a command). Those files import nothing heavy at the top, so that `vocagnolm --help`
starts at once; the work is imported when a command runs. Results go to stdout, progress and
messages to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 70 a fault of
the program, 130 interrupted, 143 stopped by SIGTERM.
"""

import os

import typer

from vocagnolm import __version__
from vocagnolm.cli import recipe, store
from vocagnolm.cli.align import align
from vocagnolm.cli.common import DEBUG_VARIABLE, Commands, end, showing_copies, showing_warnings
from vocagnolm.cli.compare import compare
from vocagnolm.cli.demo import demo
from vocagnolm.cli.evaluate import evaluate
from vocagnolm.cli.options import with_options
from vocagnolm.cli.prepare import prepare
from vocagnolm.cli.report import report
from vocagnolm.cli.score import ScoreCommand, score
from vocagnolm.cli.train import check, push, train
from vocagnolm.cli.try_ import try_
from vocagnolm.cli.view import view

app = typer.Typer(
    cls=Commands,
    name="vocagnolm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=("Train a language model with any teacher, even if their tokenizers differ."),
    epilog="Start with: vocagnolm demo, or vocagnolm try --student S --teacher T --corpus C",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vocagnolm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
    debug: bool = typer.Option(
        False,
        "--debug",
        help=f"Show the full traceback of an unexpected error; also {DEBUG_VARIABLE}=1.",
    ),
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
    context.with_resource(showing_copies())
    context.with_resource(showing_warnings())


app.command()(align)
app.command()(check)
app.command()(compare)
app.command()(demo)
app.command()(evaluate)
app.command("export-columns")(with_options(store.export_columns))
app.command()(prepare)
app.command()(push)
app.add_typer(recipe.app, name="recipe")
app.command()(report)
app.command(cls=ScoreCommand)(score)
app.add_typer(store.app, name="store")
app.command()(train)
app.command("try")(try_)
app.command()(view)


def main() -> None:
    """Entry point: whatever goes wrong becomes one message on stderr and an exit code."""
    try:
        app()
    except SystemExit:
        raise
    except BaseException as error:
        end(error)
