"""`vocagnolm study`: the paper's analyses."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vocagnolm.cli.choices import CORPUS_HELP, SPLIT_HELP, TEXT_FIELD_HELP, Split
from vocagnolm.cli.study_selection import selection

if TYPE_CHECKING:
    from vocagnolm.pair.granularity import GranularityStudy

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "The paper's analyses: figure 1 is `vocagnolm compare --plot`, figure 3 is `granularity`, "
        "the tables and the other figures are grids of training runs (`list`, `run`); `selection` "
        "says before any run how far their settings differ."
    ),
)


@app.command("list")
def list_studies() -> None:
    """Name the studies that come with the package."""
    from vocagnolm.study.load import shipped_studies

    titles = shipped_studies()
    width = max(map(len, titles))
    for name, title in titles.items():
        typer.echo(f"{name:{width}}  {title}")


@app.command()
def granularity(
    student: str = typer.Option(
        ..., help="The student's tokenizer: folder, tokenizer.json, tokenizer.model or hub id."
    ),
    teacher: str = typer.Option(..., help="The teacher's tokenizer, likewise."),
    corpus: list[str] = typer.Option(
        [], help=f"Measure on this corpus instead of the built-in sample: {CORPUS_HELP}"
    ),
    text_field: str = typer.Option("text", help=TEXT_FIELD_HELP),
    split: Split = typer.Option(Split.none, help=SPLIT_HELP),
    limit_documents: int = typer.Option(1000, min=1, help="Read at most so many documents."),
    chunks: str = typer.Option(
        "1,2,4,8,16,32,64,128,256", help="Numbers of chunks, separated by commas."
    ),
    sequence_tokens: int = typer.Option(
        2048, min=1, help="Cut documents into sequences of so many student tokens."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    plot: Path | None = typer.Option(None, help="Draw the curve into this PNG or SVG file."),
) -> None:
    """Figure 3: IoU and IoS of chunk alignment against the number of chunks.

    Token-level alignment is the reference line: every student token is fully covered (IoS 100 %).
    """
    from vocagnolm.alignment import load_tokenizer
    from vocagnolm.data.left_out import LeftOut, read_texts
    from vocagnolm.pair import SAMPLE
    from vocagnolm.pair.granularity import granularity_study

    documents, left_out = list(SAMPLE), LeftOut()
    if corpus:
        documents, left_out = read_texts(
            corpus,
            text_field=text_field,
            format="text",
            split=split.value,
            limit=limit_documents,
        )
    study = granularity_study(
        load_tokenizer(student, check=False),
        load_tokenizer(teacher, check=False),
        documents,
        n_chunks=_numbers(chunks),
        sequence_tokens=sequence_tokens,
    )
    if plot is not None:
        from vocagnolm.pair.figures import granularity_curve

        granularity_curve(study, plot)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        values = {**study.as_json(), "left_out": left_out.as_json()}
        typer.echo(json.dumps(values, ensure_ascii=False, indent=2))
    else:
        _print(study)
        for line in left_out.lines():
            typer.echo(line)


@app.command()
def run(
    study: str = typer.Argument(..., help="A name of `vocagnolm study list`, or a YAML file."),
    folder: Path = typer.Option(
        ..., help="Where stores, blocks and runs go; studies of one setting share it."
    ),
    materials: Path | None = typer.Option(
        None, help="Folder that stands for MATERIALS/ in the study."
    ),
    overrides: list[str] = typer.Option(
        [], "--set", help="Change a key, for example rows.cpt.seeds=[1,2]."
    ),
    only_table: bool = typer.Option(
        False, "--table", help="Make the table of what is there; run nothing."
    ),
    minutes: float | None = typer.Option(
        None, help="Start nothing that would take longer than this."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Run a study: a grid of recipes, to one table and one figure.

    Resumable: a finished run is not run again. Start the command several times on one folder to
    run several runs side by side.
    """
    import time

    from vocagnolm.study.run import run_study

    table, text = run_study(
        study,
        folder,
        materials=materials,
        overrides=overrides,
        only_table=only_table,
        deadline=None if minutes is None else time.time() + 60 * minutes,
        say=lambda line: typer.echo(line, err=True),
    )
    typer.echo(json.dumps(table, ensure_ascii=False, indent=2) if as_json else text)


app.command("selection")(selection)


def _numbers(text: str) -> list[int]:
    from vocagnolm.errors import UsageError

    try:
        numbers = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UsageError(
            f"--chunks is {text!r}; expected positive whole numbers separated by commas, "
            "for example 8,16,32,64"
        )
    return numbers


def _print(study: "GranularityStudy") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("chunks", "IoU", "IoS"):
        table.add_column(name, justify="right")
    for point in study.points:
        name = "token level" if point.n_chunks is None else str(point.n_chunks)
        table.add_row(name, f"{point.iou:.1%}", f"{point.ios:.1%}")
    console = Console()
    console.print(table)
    console.print(
        f"{study.sequences} sequences of up to {study.sequence_tokens} student tokens, "
        f"{study.student} x {study.teacher}",
        style="dim",
        markup=False,
        highlight=False,
    )
