"""`vocagnolm check`: is a recipe ready to run, and what will it cost?"""

import json
from typing import Any

import typer

from vocagnolm.cli.common import RECIPE_HELP


def check(
    recipe: str = typer.Argument(..., help=RECIPE_HELP),
    set_: list[str] = typer.Option([], "--set", help="Override: section.key=value."),
    processes: int = typer.Option(1, min=1, help="Processes that will train (torchrun)."),
    measure: bool = typer.Option(
        True, help="Load the student and compare it with the teacher on a few documents."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Validate everything before anything is trained, and print the plan.

    Paths, tokenizers, the store and its teacher, vocabularies, sizes, the schedule, disk. Exit
    code 1 when something must be mended first.
    """
    from vocagnolm.recipe import load_recipe

    loaded = load_recipe(recipe, set_)  # first: a typo is answered before torch is imported
    from vocagnolm.train.check import check as run

    report = run(loaded, processes=processes, measure=measure)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False, indent=2))
    else:
        for name, facts in report.plan.items():
            typer.echo(f"{name.replace('_', ' ')}: {_line(facts)}")
        for warning in report.warnings:
            typer.echo(f"warning: {warning}")
        for problem in report.problems:
            typer.echo(f"problem: {problem}")
        typer.echo("ready" if report.ready else "not ready")
    if not report.ready:
        raise typer.Exit(1)


def _line(facts: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {_show(name, value)}"
        for name, value in facts.items()
        if value is not None
    )


def _show(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("bytes"):
        return f"{value / 1e9:.2f} GB"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.1%}" if name.endswith("share") else f"{value:.3g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
