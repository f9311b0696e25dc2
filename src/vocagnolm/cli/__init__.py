"""The command line: parse, call one function, print.

Every command lives in the file of its name or subject, or in another package that is installed
beside this one (`study` is such a command). Those files import nothing heavy at the top, so that
`vocagnolm --help` starts at once; the work is imported when a command runs. Results go to stdout,
progress and messages to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 70 a fault of the
program, 130 interrupted, 143 stopped by SIGTERM.
"""

import os
from typing import Any

import typer

from vocagnolm import __version__
from vocagnolm.cli import store
from vocagnolm.cli.align import align
from vocagnolm.cli.common import (
    DEBUG_VARIABLE,
    App,
    Commands,
    RayCommand,
    end,
    in_utf8,
    showing_copies,
    showing_warnings,
)
from vocagnolm.cli.compare import compare
from vocagnolm.cli.evaluate import evaluate
from vocagnolm.cli.options import with_options
from vocagnolm.cli.prepare import prepare
from vocagnolm.cli.report import report
from vocagnolm.cli.score import score
from vocagnolm.cli.train import check, push, recipes, train
from vocagnolm.cli.try_ import demo, try_
from vocagnolm.cli.view import view
from vocagnolm.cli.write import write

app = App(
    cls=Commands,
    name="vocagnolm",
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


START, STAGES, LOOK, MORE = "Start here", "The stages", "Look at a pair or a text", "More"


def _add(panel: str, command: Any, example: str, **settings: Any) -> None:
    app.command(rich_help_panel=panel, example=example, **settings)(command)


_add(START, demo, "vocagnolm demo --out out/demo")
_add(START, try_, "vocagnolm try --student S --teacher T --corpus corpus.jsonl", name="try")
_add(
    STAGES,
    write,
    "vocagnolm write --teacher T --prompts prompts.jsonl --out written",
    cls=RayCommand,
)
_add(STAGES, score, "vocagnolm score --teacher T --corpus corpus.jsonl --out store", cls=RayCommand)
_add(STAGES, check, "vocagnolm check recipe.yaml --set objective.keep=0.6")
_add(STAGES, prepare, "vocagnolm prepare recipe.yaml --workers 8")
_add(STAGES, train, "vocagnolm train recipe.yaml --set run.folder=runs/guided")
_add(
    STAGES, evaluate, "vocagnolm evaluate runs/guided/model --text held-out.jsonl --out runs/guided"
)
_add(STAGES, report, "vocagnolm report runs/cpt runs/guided --html report.html")
_add(LOOK, compare, "vocagnolm compare --student S --teacher T --corpus corpus.jsonl")
_add(LOOK, align, 'vocagnolm align --student S --teacher T --text "Probability, Uncertainty."')
_add(LOOK, view, "vocagnolm view --student S --teacher T --file page.txt --html view.html")
app.add_typer(recipes, name="recipe", rich_help_panel=MORE)
app.add_typer(store.app, name="store", rich_help_panel=MORE)
_add(
    MORE,
    with_options(store.export_columns),
    "vocagnolm export-columns store --student S --out columns",
    name="export-columns",
)
_add(MORE, push, "vocagnolm push runs/guided owner/name --dry-run")


def main() -> None:
    """Entry point: whatever goes wrong becomes one message on stderr and an exit code."""
    in_utf8()
    try:
        app()
    except SystemExit:
        raise
    except BaseException as error:
        end(error)
