"""`vocagnolm train`: one recipe, one run."""

import json
import os
from pathlib import Path

import typer


def train(
    recipe: Path = typer.Argument(..., help="The recipe, a YAML file."),
    set_: list[str] = typer.Option([], "--set", help="Override: section.key=value."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress on stderr."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as one JSON object."),
) -> None:
    """Train a student on prepared blocks; run it again to go on where it stopped.

    Several processes: torchrun --nproc_per_node N -m vocagnolm train RECIPE. The run folder gets
    recipe.yaml, metrics.jsonl, checkpoints/ and model/, an ordinary Hugging Face folder.
    """
    from vocagnolm.recipe import load_recipe
    from vocagnolm.train.run import train as run

    summary = run(load_recipe(recipe, set_), quiet=quiet)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False, indent=2))
        return
    last = summary["last"]
    typer.echo(f"{summary['model']}: {summary['steps']:,} steps, {summary['tokens']:,} tokens")
    if last is not None:
        typer.echo(
            f"last step: loss {last['loss']:.4f}, all tokens {last['loss_all']:.4f}, "
            f"kept {last['selected_share']:.1%}"
        )
