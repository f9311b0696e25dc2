"""`vocagnolm study`: the paper's analyses."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from vocagnolm.study.granularity import GranularityStudy

app = typer.Typer(no_args_is_help=True, help="The paper's analyses.")


@app.callback()
def _study() -> None:
    pass


@app.command()
def granularity(
    student: str = typer.Option(
        ..., help="The student's tokenizer: folder, tokenizer.json, tokenizer.model or hub id."
    ),
    teacher: str = typer.Option(..., help="The teacher's tokenizer, likewise."),
    corpus: Path | None = typer.Option(
        None, help="Documents to measure on (jsonl, text, folder, ...); default: the sample."
    ),
    text_field: str = typer.Option("text", help="The field of a record that holds the text."),
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
    from vocagnolm.align import load_tokenizer
    from vocagnolm.compare import texts_of
    from vocagnolm.study.granularity import granularity_study

    documents = texts_of(corpus, text_field=text_field, limit=limit_documents)
    study = granularity_study(
        load_tokenizer(student),
        load_tokenizer(teacher),
        documents,
        n_chunks=_numbers(chunks),
        sequence_tokens=sequence_tokens,
    )
    if plot is not None:
        from vocagnolm.report.figures import granularity_curve

        granularity_curve(study, plot)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        typer.echo(json.dumps(study.as_json(), ensure_ascii=False, indent=2))
    else:
        _print(study)


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
