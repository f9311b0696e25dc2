"""`vocagnolm study`: the paper's analyses."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vocagnolm.cli.common import App, progress, quiet_libraries
from vocagnolm.cli.options import (
    JSON,
    STUDENT,
    STUDENT_TEMPLATE,
    TEACHER,
    TEACHER_TEMPLATE,
    Given,
    option,
    options,
    with_options,
)
from vocagnolm.errors import UsageError
from vocagnolm.recipe.sections import CorpusSection, EngineSection

if TYPE_CHECKING:
    from vocagnolm_studies.granularity import GranularityStudy
    from vocagnolm_studies.labels import Area, LabelStudy
    from vocagnolm_studies.selection import SelectionStudy

app = App(
    help=(
        "The paper's analyses: figure 1 is `vocagnolm compare --plot`, figure 3 is `granularity`, "
        "the tables and the other figures are grids of training runs (`list`, `run`). `selection` "
        "shows before training how much their settings differ."
    ),
)


@app.command("list", example="vocagnolm study list")
def list_studies() -> None:
    """List the studies that come with the package."""
    from vocagnolm_studies.design import shipped_studies

    titles = shipped_studies()
    width = max(map(len, titles))
    for name, title in titles.items():
        typer.echo(f"{name:{width}}  {title}")


@app.command(example="vocagnolm study granularity --student S --teacher T --plot figure3.svg")
@with_options
def granularity(
    student: str = STUDENT,
    teacher: str = TEACHER,
    corpus: list[str] = option(
        CorpusSection, "files", before="Measure on this corpus instead of the built-in sample. "
    ),
    reading: Given = options(CorpusSection, "text_field", "format", "split", recipe_key="corpus"),
    student_template: str | None = STUDENT_TEMPLATE,
    teacher_template: str | None = TEACHER_TEMPLATE,
    limit_documents: int = option(CorpusSection, "limit_documents", default=1000),
    chunks: str = typer.Option(
        "1,2,4,8,16,32,64,128,256", help="Numbers of chunks, comma-separated."
    ),
    sequence_tokens: int = typer.Option(
        2048, min=1, help="Length of the sequences, in student tokens."
    ),
    as_json: bool = JSON,
    plot: Path | None = typer.Option(None, help="Draw the curve into this PNG or SVG file."),
) -> None:
    """Figure 3: IoU and IoS of chunk alignment against the number of chunks.

    Token-level alignment is the reference line: every student token is fully covered (IoS 100 %).
    Conversations are read by each side in its own template, and measured over the contents of their
    messages; as in training, the student's chunks hold the tokens of its template too.
    """
    from vocagnolm.cli.compare import readers
    from vocagnolm_studies.granularity import granularity_study

    templates = [student_template, teacher_template]
    (ours, theirs), documents, left_out, surveys = readers(
        [student, teacher], templates, corpus, limit=limit_documents, **reading
    )
    study = granularity_study(
        *(ours, theirs, documents), n_chunks=_numbers(chunks), sequence_tokens=sequence_tokens
    )
    if plot is not None:
        from vocagnolm_studies.figures import granularity_curve

        granularity_curve(study, plot)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        values = {**study.as_json(), "left_out": left_out.as_json()}
        if surveys:
            values["templates"] = [seen.to_dict() for seen in surveys]
        typer.echo(json.dumps(values, ensure_ascii=False, indent=2))
    else:
        _print_granularity(study)
        for line in [line for seen in surveys for line in seen.warnings()] + left_out.lines():
            typer.echo(line)


@app.command(example="vocagnolm study run toy --folder out/toy --materials materials")
def run(
    study: str = typer.Argument(..., help="A name from `vocagnolm study list`, or a YAML file."),
    folder: Path = typer.Option(
        ..., help="Folder for stores, blocks and runs; studies of one setting can share it."
    ),
    materials: Path | None = typer.Option(None, help="Folder to use for MATERIALS/ in the study."),
    overrides: list[str] = typer.Option(
        [], "--set", help="Change a key, for example rows.cpt.seeds=[1,2]."
    ),
    only_table: bool = typer.Option(
        False, "--table", help="Only make the table from finished runs."
    ),
    minutes: float | None = typer.Option(
        None, help="Do not start anything that would take longer than this."
    ),
    as_json: bool = JSON,
) -> None:
    """Run a study: a grid of recipes that ends in one table and one figure.

    Finished runs are not repeated. Start the command several times on one folder to work on
    several runs in parallel.
    """
    import time

    from vocagnolm_studies.run import run_study

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


@app.command(example="vocagnolm study selection --student S --store store --corpus corpus.jsonl")
@with_options
def selection(
    student: str = typer.Option(..., help="Model folder, hub id (owner/name) or GGUF file."),
    store: str = typer.Option(..., help="The teacher's loss store (`vocagnolm score`)."),
    corpus: list[str] = typer.Option(
        ..., help="The corpus that the teacher scored, or a part of it. Can be repeated."
    ),
    reading: Given = options(CorpusSection, "text_field", recipe_key="corpus"),
    source_field: str = typer.Option(
        "source", help="The field that names a document's source, if there is one."
    ),
    tokens: int = typer.Option(
        65536,
        min=2,
        help="Number of student tokens to examine, from documents spread evenly over the corpus.",
    ),
    block_size: int = typer.Option(1024, min=2, help="Tokens per block, as in data.block_size."),
    scope_blocks: int = typer.Option(
        16, min=1, help="Blocks that compete with each other, as in train.micro_batch."
    ),
    keep: float = typer.Option(0.4, min=0.0, max=1.0, help="The reference's kept share."),
    eos: str = typer.Option(
        "auto", help="After every document: auto (the tokenizer's own), none, or a token."
    ),
    engine: Given = options(EngineSection, "device", "dtype"),
    seed: int = typer.Option(0, help="Order of the blocks, and the random selection."),
    plot: Path | None = typer.Option(
        None, help="Draw the kept share by source into this PNG, SVG or PDF file."
    ),
    plot_kinds: Path | None = typer.Option(
        None, help="Draw what comparing whole stretches changes, by kind of mapping."
    ),
    label: str | None = typer.Option(
        None, help="A true-or-false field: measure how well the losses distinguish its values."
    ),
    label_group: str | None = typer.Option(
        None, help="With --label: the field that groups documents by question."
    ),
    label_by: list[str] = typer.Option(
        [], help="With --label: also group the result by this field. Can be repeated."
    ),
    label_after: str | None = typer.Option(
        None, help="With --label: only the text after this mark counts, for example 'Answer:'."
    ),
    plot_labels: Path | None = typer.Option(
        None, help="With --label: draw how well each measure separates the labels."
    ),
    as_json: bool = JSON,
) -> None:
    """Show which tokens are kept, and how much the settings change that, without training.

    Every variant is one setting away from the reference (guided, max, include, --keep) and selects
    from the same losses. Settings that keep nearly the same tokens need not be trained separately.
    """
    from vocagnolm_studies.labels import LabelFields
    from vocagnolm_studies.selection import selection_study

    labels = None
    if label is not None:
        labels = LabelFields(label=label, group=label_group, by=label_by, after=label_after)
    elif label_group or label_by or label_after or plot_labels:
        raise UsageError("--label-group, --label-by, --label-after and --plot-labels need --label.")
    with quiet_libraries(), progress("the student reads") as meter:
        study = selection_study(
            student,
            store,
            corpus,
            **reading,
            **engine,
            source_field=source_field,
            tokens=tokens,
            block_size=block_size,
            scope_blocks=scope_blocks,
            keep=keep,
            eos=None if eos == "none" else eos,
            seed=seed,
            labels=labels,
            on_tokens=lambda done, total: meter.note(
                done, total, f"{done:,}/{total:,} tokens", done
            ),
        )
    if study.missing_documents or study.unusable_documents:
        typer.echo(
            f"left out: {study.missing_documents:,} documents that are not in {store}, "
            f"{study.unusable_documents:,} that hold no text; {study.documents:,} were read",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps(study.as_json(), ensure_ascii=False, indent=2))
    else:
        _print_selection(study)
    if plot is not None:  # last: a figure that cannot be drawn must not cost the numbers
        from vocagnolm_studies.figures import source_bars

        source_bars(study, plot)
        typer.echo(f"wrote {plot}", err=True)
    if plot_kinds is not None:
        from vocagnolm_studies.figures import kind_bars

        kind_bars(study, plot_kinds)
        typer.echo(f"wrote {plot_kinds}", err=True)
    if plot_labels is not None and study.labels is not None:
        from vocagnolm_studies.figures import label_areas

        label_areas(study.labels, plot_labels)
        typer.echo(f"wrote {plot_labels}", err=True)


def _numbers(text: str) -> list[int]:
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


def _print_granularity(study: "GranularityStudy") -> None:
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


def _print_selection(study: "SelectionStudy") -> None:
    from rich.console import Console

    from vocagnolm.data.packing import target_words

    console = Console()

    def line(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False)

    table = _table("variant", "kept", "overlap", "student loss", "excess")
    for row in study.rows:
        numbers = f"{row.kept:.2%}", f"{row.overlap:.2%}", f"{row.student_nll:.3f}"
        table.add_row(row.label, *numbers, f"{row.excess:+.3f}")
    console.print(table)
    line(
        "overlap: share of the first row's kept tokens that are kept here too. Chance gives the "
        "kept share, so a larger share overlaps more by its size alone. Losses: means over the "
        "kept tokens, in nats; excess: over the teacher's loss (max) for all rows."
    )
    if study.by_source is not None:
        names = list(study.by_source)
        labels = {row.name: row.label for row in study.rows}
        columns = "tokens", "student loss", "teacher loss", *(labels[name] for name in names)
        sources = _table("kept by source", *columns)
        assert study.lead_by_source is not None
        for source, lead in study.lead_by_source.items():
            tokens = f"{study.by_source[names[0]][source]['tokens']:,.0f}"
            shares = [f"{study.by_source[name][source]['kept']:.1%}" for name in names]
            sources.add_row(source, tokens, f"{lead.student:.3f}", f"{lead.teacher:.3f}", *shares)
        console.print()
        console.print(sources)
    line(
        f"on the same text the student's loss is {study.lead.student:.3f} nats per student token, "
        f"the teacher's {study.lead.teacher:.3f}: a lead of {study.lead.share:.1%}."
    )
    kinds = _table("stretches", "tokens", "kept by token", "by stretch", "joined", "left")
    for kind, share in study.by_kind.items():
        kept = f"{share.by_token:.1%}", f"{share.by_stretch:.1%}"
        kinds.add_row(
            kind, f"{share.tokens:.1%}", *kept, f"{share.joined:.1%}", f"{share.left:.1%}"
        )
    console.print()
    console.print(kinds)
    line(
        "stretches: student tokens : teacher tokens of the smallest piece of text at whose ends "
        "both have a boundary. joined: kept by whole stretches and not by token; left: the reverse."
    )
    if study.labels is not None:
        _print_labels(console, study.labels)
    pair = study.pair
    console.print()
    line(
        f"{study.student} x {study.teacher}: {pair.mapped:.2%} of the tokens have guidance, "
        f"{pair.one:.2%} from one teacher token, {pair.two:.2%} from two, {pair.more:.2%} from "
        f"three or more. Without: {pair.separators:.2%} between documents, {pair.unscored:.2%} "
        f"where the teacher has no loss. Several student tokens share {pair.shared_teacher:.2%} "
        "of the teacher's tokens."
    )
    for words in target_words(study.target_shares) if study.target_shares else ():
        line(words)
    line(
        f"{study.tokens:,} predicted tokens in {study.blocks} blocks of {study.block_size:,}, "
        f"{study.scope_blocks} blocks compete; {study.documents:,} documents, evenly spread over "
        "the corpus"
    )


def _print_labels(console: Any, labels: "LabelStudy") -> None:
    def row(table: Any, where: str, areas: dict[str, "Area"]) -> None:
        for measure, area in areas.items():
            cells = [f"{area.value:.3f} ({area.low:.3f} to {area.high:.3f})", "-"]
            if area.within is not None:
                cells[1] = f"{area.within:.3f} ({area.within_low:.3f} to {area.within_high:.3f})"
            table.add_row(where, measure, *cells, f"{area.false:,}", f"{area.true:,}")

    heads = "measure", "area (95 %)", "within a group", "false", "true"
    table = _table("part", *heads)
    for part, areas in labels.areas.items():
        row(table, part, areas)
    console.print()
    console.print(table)
    for field, values in labels.by.items():
        table = _table(field, *heads)
        for value, areas in values.items():
            row(table, value, areas)
        console.print()
        console.print(table)
    table = _table("rule", f"of its tokens in documents with {labels.label}: false")
    for rule, share in labels.false_tokens.items():
        table.add_row(rule, f"{share:.1%}")
    console.print()
    console.print(table)
    console.print(
        f"area: how often a document with {labels.label}: false has the higher mean than one with "
        "true; 0.5 is a coin. results: numbers after an equals sign; answer: what follows the last "
        "'answer is'.",
        style="dim",
        markup=False,
        highlight=False,
    )


def _table(first: str, *others: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
