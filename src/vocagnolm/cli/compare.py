"""`vocagnolm compare`: the preflight of a student and its possible teachers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vocagnolm.cli.options import (
    JSON,
    STUDENT_TEMPLATE,
    TEACHER_TEMPLATE,
    Given,
    option,
    options,
    with_options,
)
from vocagnolm.recipe.sections import CorpusSection

if TYPE_CHECKING:
    from vocagnolm.chat import Survey
    from vocagnolm.pair import Pair


@with_options
def compare(
    student: str = typer.Option(
        ...,
        help="The student's tokenizer: folder, tokenizer.json, tokenizer.model, GGUF or hub id.",
    ),
    teacher: list[str] = typer.Option(..., help="A teacher's tokenizer; give it several times."),
    corpus: list[str] = option(
        CorpusSection, "files", before="Measure on this corpus instead of the built-in sample. "
    ),
    reading: Given = options(CorpusSection, "text_field", "format", "split", recipe_key="corpus"),
    student_template: str | None = STUDENT_TEMPLATE,
    teacher_template: str | None = TEACHER_TEMPLATE,
    limit_documents: int = option(CorpusSection, "limit_documents", default=1000),
    as_json: bool = JSON,
    plot: Path | None = typer.Option(
        None, help="Draw the overlap bars (the paper's Figure 1) into this PNG or SVG file."
    ),
) -> None:
    """What to expect of a pair before anything is computed.

    Vocabulary sizes and overlap (raw strings as in the paper, with space marks made equal, by
    true bytes), tokens per byte, how the student's tokens map, what the teacher's tokens become in
    distillation, and whether both tokenizers tile the text exactly. No model is loaded.
    Conversations are read by each side in its own template, and compared over the contents of
    their messages.
    """
    from vocagnolm.alignment import TextTokenizer, load_tokenizer
    from vocagnolm.chat import ChatTokenizer, survey, template_of
    from vocagnolm.chat.survey import readable_by
    from vocagnolm.data.corpus import open_corpus
    from vocagnolm.data.skipped import LeftOut, read_texts
    from vocagnolm.pair import SAMPLE
    from vocagnolm.pair import compare as run

    documents, left_out = list(SAMPLE), LeftOut()
    ours: TextTokenizer = load_tokenizer(student, check=False)
    theirs: list[TextTokenizer] = [load_tokenizer(source, check=False) for source in teacher]
    surveys: list[Survey] = []
    if corpus:
        opened = open_corpus(corpus, limit=limit_documents, **reading)
        documents, left_out = read_texts(opened)
        if opened.conversations:
            us = ChatTokenizer(ours, template_of(ours, student_template))
            them = [ChatTokenizer(one, template_of(one, teacher_template)) for one in theirs]
            surveys = [survey(side, documents) for side in (us, *them)]
            documents = readable_by([us, *them], documents)
            ours, theirs = us, [*them]
    pairs = run(ours, theirs, documents)
    if plot is not None:
        from vocagnolm.pair import overlap_bars

        overlap_bars(ours, [pair.teacher for pair in pairs], plot)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        report = {
            "student": {
                "name": ours.name,
                "vocabulary": ours.vocabulary_size,
                "kind": ours.kind,
                "tokens_per_byte": pairs[0].student_tokens_per_byte,
            },
            "corpus": {"documents": len(documents), "left_out": left_out.as_json()},
            "pairs": [pair.as_json() for pair in pairs],
        }
        if surveys:
            report["templates"] = [seen.to_dict() for seen in surveys]
        typer.echo(json.dumps(report, ensure_ascii=False, indent=2))
        return
    _print(pairs, f"{', '.join(corpus) or 'the built-in sample'}, {len(documents):,} documents")
    for seen in surveys:
        typer.echo(f"{seen.name}: {seen.template}")
    for line in [line for seen in surveys for line in seen.warnings()] + left_out.lines():
        typer.echo(line)


def _print(pairs: "list[Pair]", where: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vocagnolm.alignment.picture import visible

    console = Console()
    student = pairs[0].student
    console.print(
        Text.assemble(
            ("student ", "dim"),
            (student.name, "bold"),
            f"  {student.kind}, {student.vocabulary_size:,} tokens, "
            f"{pairs[0].student_tokens_per_byte:.3f} tokens per byte",
        )
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for pair in pairs:
        table.add_column(Text(pair.teacher.name, style="bold"), justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(Text(name, style="dim"), *(Text(cell) for cell in cells))

    row("kind", *(p.teacher.kind for p in pairs))
    row("vocabulary", *(f"{p.teacher.vocabulary_size:,}" for p in pairs))
    row("overlap, raw strings (paper)", *(f"{p.overlap.raw:.2%}" for p in pairs))
    row("overlap, space marks made equal", *(f"{p.overlap.marks:.2%}" for p in pairs))
    row("overlap, true bytes", *(f"{p.overlap.bytes:.2%}" for p in pairs))
    row("tokens per byte", *(f"{p.teacher_tokens_per_byte:.3f}" for p in pairs))
    row("one student token : one teacher token", *(f"{p.one_to_one_share:.1%}" for p in pairs))
    row("one : many", *(f"{p.one_to_many_share:.1%}" for p in pairs))
    row("many : one", *(f"{p.many_to_one_share:.1%}" for p in pairs))
    row("unmapped", *(f"{p.unmapped_share:.1%}" for p in pairs))
    row("student text covered (IoS)", *(f"{p.ios:.1%}" for p in pairs))
    row("begins with a teacher token", *(f"{p.shared_start_share:.1%}" for p in pairs))
    row("teacher tokens: one of the student's", *(f"{p.spelled.exact:.1%}" for p in pairs))
    row("several, the first is a target", *(f"{p.spelled.several:.1%}" for p in pairs))
    row("cannot be spelled", *(f"{p.spelled.unspelled:.1%}" for p in pairs))
    row("tiling", *("exact" if p.exact else "lossy" for p in pairs))
    console.print(table)
    console.print(Text(f"shares measured on {where}", style="dim"))
    for pair in pairs:
        console.print(Text.assemble((pair.teacher.name, "bold"), f"  {pair.verdict}"))
        for wide in pair.widest:
            tokens = " ".join(visible(token.encode()) for token in wide.teacher_tokens)
            console.print(Text.assemble(("  widest  ", "dim"), repr(wide.text), " = ", tokens))
