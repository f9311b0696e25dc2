"""`vocagnolm store`: what a loss store is, whether it is whole, and Parquet out of it."""

import contextlib
import json
from pathlib import Path
from typing import Any

import typer

app = typer.Typer(no_args_is_help=True, help="Look at, check and export loss stores.")

_STORE = typer.Argument(..., help="The folder of the loss store.")
_JSON = typer.Option(False, "--json", help="Print one JSON object.")
_HISTOGRAM_LINES = 12
_BAR_WIDTH = 40


@app.command("inspect")
def inspect_command(store: Path = _STORE, as_json: bool = _JSON) -> None:
    """What the store is: teacher, settings, size, mean nll, bits per byte, histogram."""
    from vocagnolm.store import inspect_store

    about = inspect_store(store)
    if as_json:
        typer.echo(json.dumps(about, ensure_ascii=False, indent=2))
    else:
        _print(about)


@app.command("verify")
def verify_command(store: Path = _STORE, as_json: bool = _JSON) -> None:
    """Read every byte: checksums, gaps, duplicates. Exit code 1 when something is wrong."""
    from vocagnolm.store import verify_store

    problems = verify_store(store)
    if as_json:
        typer.echo(json.dumps({"ok": not problems, "problems": problems}, indent=2))
    else:
        for problem in problems:
            typer.echo(problem)
        typer.echo(
            f"{store}: {len(problems)} problems. The command that scored it, run again, scores "
            "damaged shards again."
            if problems
            else f"{store}: every checksum matches, no gap, no duplicate."
        )
    if problems:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    store: Path = _STORE,
    out: Path | None = typer.Option(None, help="The Parquet file. [default: STORE.parquet]"),
    as_json: bool = _JSON,
) -> None:
    """Write the store as Parquet, one row a document."""
    from vocagnolm.store import export_parquet

    target = out or store.with_name(store.name + ".parquet")
    rows = export_parquet(store, target)
    if as_json:
        typer.echo(json.dumps({"file": str(target), "rows": rows}))
    else:
        typer.echo(f"{target}: {rows:,} rows")


# A teacher of one's own (`vocagnolm.score.Teacher`) may say less about itself.
_STATED = {
    "teacher": "{teacher[name]}",
    "architecture": "{teacher[architecture]}",
    "tokenizer": "{tokenizer[kind]}, {tokenizer[vocabulary_size]:,}",
    "scoring": "{scoring[dtype]} on {scoring[device]}, context {scoring[context]}, stride "
    "{scoring[stride]}, {scoring[batch_plan][batch_tokens]:,} tokens a batch",
    "corpus": "{corpus[documents]:,} documents",
}


def _print(about: dict[str, Any]) -> None:
    state = "complete" if about["complete"] else "NOT COMPLETE"
    rows = [("store", f"{about['path']} ({state}, format {about['format_version']})")]
    for name, template in _STATED.items():
        with contextlib.suppress(KeyError):
            rows.append((name, template.format(**about)))
    rows += [
        ("shards", f"{about['shards']:,} of {about['shards_expected']:,}"),
        ("documents", f"{about['documents']:,} scored, {about['skipped']:,} skipped"),
        ("text", f"{about['bytes']:,} bytes"),
        ("tokens", f"{about['tokens']:,}, {about['nonfinite']:,} masked as NaN or infinite"),
    ]
    if about["bytes_per_token"] is not None:
        rows.append(
            ("on disk", f"{about['file_bytes']:,} bytes, {about['bytes_per_token']:.2f} a token")
        )
    if about["mean_nll"] is not None:
        rows.append(("mean nll", f"{about['mean_nll']:.4f} nats a token"))
        rows.append(("bits per byte", f"{about['bits_per_byte']:.4f}"))
    for name, value in rows:
        typer.echo(f"{name:<14}{value}")
    for reason, count in about["skipped_reasons"].items():
        typer.echo(f"{'':<14}{count:,} skipped: {reason}")
    _print_histogram(about["histogram"])


def _print_histogram(histogram: dict[str, Any]) -> None:
    step, counts = histogram["step_nats"], histogram["counts"]
    shown = [*counts[:_HISTOGRAM_LINES], sum(counts[_HISTOGRAM_LINES:])]
    total = sum(shown)
    if total == 0:
        return
    typer.echo("nll in nats")
    for number, count in enumerate(shown):
        low, high = number * step, (number + 1) * step
        label = f"{low:g} - {high:g}" if number < _HISTOGRAM_LINES else f"from {low:g}"
        bar = "#" * round(_BAR_WIDTH * count / max(shown))
        typer.echo(f"  {label:<12}{count / total:6.1%} {bar}")
