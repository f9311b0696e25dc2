"""`vocagnolm train`: one recipe, one run."""

import json
import os
import time

import typer

from vocagnolm.cli.common import RECIPE_HELP


def train(
    recipe: str = typer.Argument(..., help=RECIPE_HELP),
    set_: list[str] = typer.Option([], "--set", help="Override: section.key=value."),
    restart: bool = typer.Option(
        False, help="Begin anew where all checkpoints of the run are damaged."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="No progress on stderr."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as one JSON object."),
) -> None:
    """Train a student on prepared blocks; run it again to go on where it stopped.

    Several processes: torchrun --nproc-per-node N -m vocagnolm train RECIPE; when it goes on there
    may be more or fewer. The run folder gets recipe.yaml, metrics.jsonl, checkpoints/ and model/,
    an ordinary Hugging Face folder.

    SIGTERM writes a checkpoint and ends with exit code 143; SIGUSR1 writes one and goes on.
    """
    began = time.perf_counter()
    from vocagnolm.recipe import load_recipe

    loaded = load_recipe(recipe, set_)  # first: a typo is answered before torch is imported
    from vocagnolm.train.run import train as run

    imported = time.perf_counter() - began
    summary = run(loaded, quiet=quiet, restart=restart, earlier=imported)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False, indent=2))
        return
    if summary["already_finished"]:
        typer.echo(f"{summary['run']} is finished already; nothing to do.")
    last = summary["last"]
    typer.echo(f"{summary['model']}: {summary['steps']:,} steps, {summary['tokens']:,} tokens")
    if last is not None:
        typer.echo(
            f"last step: loss {last['loss']:.4f}, nll of the kept tokens {last['nll_kept']:.4f}, "
            f"of all {last['nll_all']:.4f}, kept {last['kept_share']:.1%}"
        )
    if summary["times"] is not None:
        from vocagnolm.train.metrics import Times

        typer.echo(str(Times(**summary["times"])))
