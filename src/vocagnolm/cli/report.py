"""`vocagnolm report`: finished evaluations side by side."""

import json
from pathlib import Path

import typer


def report(
    runs: list[Path] = typer.Argument(
        help="Run folders of finished evaluations; the others are compared with the first."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the comparison as JSON."),
) -> None:
    """Compare evaluations: scores, differences, standard errors, paired significance tests."""
    from vocagnolm.evaluate.compare import compare_runs, comparison_table, format_table

    comparison = compare_runs(list(runs))
    if as_json:
        typer.echo(json.dumps(comparison.to_json(), indent=2, ensure_ascii=False))
    else:
        typer.echo(format_table(comparison_table(comparison)))
