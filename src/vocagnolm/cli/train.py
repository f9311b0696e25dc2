"""`vocagnolm recipe`, `check`, `train`, `push`: one recipe, one run, and its model on the hub."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vocagnolm.cli.common import App, Interrupted, leading, print_json, quiet_libraries
from vocagnolm.cli.options import JSON, QUIET, RECIPE, SET

if TYPE_CHECKING:
    from vocagnolm.recipe import Recipe

recipes = App(help="List and show the recipes in the package, and write new ones.")


@recipes.command("list", example="vocagnolm recipe list")
def list_recipes(as_json: bool = JSON) -> None:
    """List the recipes in the package, including every run of the paper's tables and figures."""
    from vocagnolm.recipe.load import shipped_recipes

    found = shipped_recipes().values()
    if as_json:
        rows = {r.name: {"shows": r.shows, "about": r.about, "after": r.after} for r in found}
        print_json(rows)
        return
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        shows = f"{recipe.shows}: " if recipe.shows else ""
        after = f" (first: {recipe.after})" if recipe.after else ""
        typer.echo(f"{recipe.name:{width}}  {shows}{recipe.about}{after}")


@recipes.command(example="vocagnolm recipe show laptop > recipe.yaml")
def show(name: str = typer.Argument(help="A name from `vocagnolm recipe list`.")) -> None:
    """Print a recipe with every key explained, as a file to start from."""
    from vocagnolm.recipe.load import shipped_recipe

    typer.echo(shipped_recipe(name).text, nl=False)


@recipes.command(example="vocagnolm recipe new --from written --student S --out recipe.yaml")
def new(
    folder: str = typer.Option(
        ..., "--from", help="A folder (or address) that `vocagnolm write` has written."
    ),
    student: str | None = typer.Option(
        None, help="The student: model folder, hub id or GGUF file. Its size sets the numbers."
    ),
    out: Path | None = typer.Option(None, help="The recipe to write.", show_default="stdout"),
) -> None:
    """Write a recipe that trains a student on what a teacher wrote, with its reasons."""
    from vocagnolm.base.files import write_text
    from vocagnolm.errors import UsageError
    from vocagnolm.train.new_recipe import recipe_for

    if out is not None and out.exists():
        raise UsageError(f"{out} exists already: remove it, or choose another --out.")
    with quiet_libraries():
        text = recipe_for(folder, student)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_text(out, text)
    fill = "" if student else f"fill in student.model in {out}, then: "
    typer.echo(
        f"wrote {out}; next: {fill}vocagnolm prepare {out} && vocagnolm train {out}", err=True
    )


def check(
    recipe: str = RECIPE,
    set_: list[str] = SET,
    processes: int = typer.Option(1, min=1, help="Number of training processes (torchrun)."),
    measure: bool = typer.Option(
        True, help="Load the student's weights and compare it with the teacher on a few documents."
    ),
    as_json: bool = JSON,
) -> None:
    """Validate everything before anything is trained, and print the plan.

    Checks paths, tokenizers, the store and its teacher, vocabularies, sizes, the schedule and disk
    space. If there is no problem, it loads the student's weights last and compares the student with
    the teacher on a few documents; --no-measure skips that. Exit code 1 if there is a problem.
    """
    from vocagnolm.recipe import load_recipe

    loaded = load_recipe(recipe, set_)  # first: a typo is answered before torch is imported
    from vocagnolm.train.check import check as run

    with ExitStack() as stack:

        def say() -> None:
            typer.echo("loading the student's weights (--no-measure leaves them alone)", err=True)
            stack.enter_context(quiet_libraries())

        report = run(loaded, processes=processes, measure=measure, on_weights=say)
    if as_json:
        print_json(report.to_dict())
    else:
        for name, found in report.plan.items():
            for facts in found if isinstance(found, list) else [found]:  # of several stores
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
    if isinstance(value, dict):
        return f"({_line(value)})"
    if isinstance(value, list):
        return ", ".join(_show(name, item) for item in value)
    return str(value)


def train(
    recipe: str = RECIPE,
    set_: list[str] = SET,
    restart: bool = typer.Option(
        False, help="Start over: remove the run's checkpoints, and make a finished run again."
    ),
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Train a student on prepared blocks, or in rounds on what it writes. Run it again to resume.

    For several processes use torchrun --nproc-per-node N -m vocagnolm train RECIPE; their number
    may change when a run is resumed. The run folder contains recipe.yaml, metrics.jsonl,
    checkpoints/ and model/, an ordinary Hugging Face folder.

    Ctrl-C and SIGTERM write a checkpoint and end, with exit codes 130 and 143; a second Ctrl-C
    leaves at once. SIGUSR1 writes a checkpoint and continues.
    """
    began = time.perf_counter()
    from vocagnolm.recipe import load_recipe

    loaded = load_recipe(recipe, set_)  # first: a typo is answered before torch is imported
    if loaded.in_rounds:
        from vocagnolm.rounds import train_rounds as run
    else:
        from vocagnolm.train.run import train as run

    imported = time.perf_counter() - began
    try:
        summary = run(loaded, quiet=quiet, restart=restart, earlier=imported)
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted: {_where_it_resumes(loaded)}") from None
    if not leading():
        return
    if as_json:
        print_json(summary)
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


def _where_it_resumes(recipe: "Recipe") -> str:
    """What is left of a run that was left at once."""
    from vocagnolm.train.folder import newest_checkpoint, run_folder

    folder = run_folder(recipe)
    if (step := newest_checkpoint(folder)) == 0:
        return f"{folder} has no checkpoint; the same command begins at the first step."
    return f"the same command resumes from the checkpoint of step {step:,}, with the same result."


def push(
    run: Path = typer.Argument(help="The folder of a finished run."),
    repository: str = typer.Argument(metavar="HF_ID", help="Repository on the hub: owner/name."),
    private: bool = typer.Option(False, "--private", help="Make a new repository private."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="List what would be uploaded, without connecting."
    ),
    as_json: bool = JSON,
) -> None:
    """Upload a trained model and its card. Metrics, checkpoints and data are not uploaded.

    Requires write access to the hub: `hf auth login`, or HF_TOKEN.
    """
    from vocagnolm.report.push import push as run_push

    done = run_push(run, repository, private=private, dry_run=dry_run)
    if as_json:
        print_json(done.to_dict())
        return
    width = max(map(len, done.files))
    for name, size in done.files.items():
        typer.echo(f"{name:{width}}  {size:>15,} bytes")
    kind = "private, if new" if private else "public, if new"
    verb = "would go to" if dry_run else "are at"
    typer.echo(
        f"{len(done.files)} files, {done.total_bytes:,} bytes, {verb} "
        f"{done.url or done.repository} ({kind})"
    )
    if done.local_paths:
        typer.echo(
            f"warning: the card names paths of this machine: {', '.join(done.local_paths[:5])}",
            err=True,
        )
