"""`vocagnolm report`: finished evaluations side by side, or a page of whole runs."""

from contextlib import nullcontext
from pathlib import Path

import typer

from vocagnolm.cli.common import print_json, quiet_libraries
from vocagnolm.cli.options import JSON
from vocagnolm.errors import UsageError


def report(
    runs: list[Path] = typer.Argument(help="Run folders; the others are compared with the first."),
    as_json: bool = JSON,
    html: Path | None = typer.Option(
        None,
        help="Write one self-contained page instead: what the teacher changed token by token, "
        "training curves, evaluations, recipes.",
    ),
    sample: int = typer.Option(
        16,
        min=0,
        help="With --html: documents for the token view if no run has a tokens.json yet; 0: none.",
    ),
    source_field: str | None = typer.Option(
        None,
        help="--html: the field that names a document's source, or what kind of text it is; the "
        "page shows how much is kept of each.",
    ),
) -> None:
    """Compare evaluations: scores, differences, standard errors, paired significance tests.

    Only evaluations under the same conditions are compared: protocol, few-shot examples,
    questions and limit of new tokens. Runs whose recipes differ only in the seed are grouped.

    With --html: writes a page about the runs, evaluated or not.
    """
    from vocagnolm.base.files import model_damage

    for run in runs:
        if run.is_file():
            raise UsageError(f"{run} is a file; expected the folder of a run or an evaluation.")
        if wrong := model_damage(run / "model"):
            typer.echo(f"warning: {wrong}", err=True)
    if html is not None:
        from vocagnolm.report.runs import write_report

        with quiet_libraries() if sample else nullcontext():
            page = write_report(
                list(runs), html, sample_documents=sample, source_field=source_field
            )
        typer.echo(str(page))
        return
    from vocagnolm.evaluate.results import compare_runs, comparison_table, format_table

    comparison = compare_runs(list(runs))
    for note in comparison.notes():
        typer.echo(note, err=True)
    if as_json:
        print_json(comparison.to_json())
    else:
        typer.echo(format_table(comparison_table(comparison)))
