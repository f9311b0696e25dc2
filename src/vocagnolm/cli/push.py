"""`vocagnolm push`: a run's model and card to the Hugging Face hub."""

import json
from pathlib import Path

import typer


def push(
    run: Path = typer.Argument(help="The folder of a finished run."),
    repository: str = typer.Argument(metavar="HF_ID", help="The model's name there: owner/name."),
    private: bool = typer.Option(False, "--private", help="Make a new repository private."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="List what would go, and reach nothing outside."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Upload a trained model and its card. Metrics, checkpoints and data stay here.

    Needs a login that may write: `hf auth login`, or HF_TOKEN.
    """
    from vocagnolm.push import push as run_push

    done = run_push(run, repository, private=private, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(done.to_dict(), ensure_ascii=False, indent=2))
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
