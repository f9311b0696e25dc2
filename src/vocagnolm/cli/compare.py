"""`vocagnolm compare`: the preflight of a student and its possible teachers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vocagnolm.cli.common import print_json, print_table
from vocagnolm.cli.options import (
    JSON,
    STUDENT,
    STUDENT_TEMPLATE,
    TEACHER_TEMPLATE,
    Given,
    option,
    options,
    with_options,
)
from vocagnolm.recipe.sections import CorpusSection

if TYPE_CHECKING:
    from vocagnolm.alignment import TextTokenizer
    from vocagnolm.chat import Survey
    from vocagnolm.data.corpus import LeftOut
    from vocagnolm.report.comparison import Pair


@with_options
def compare(
    student: str = STUDENT,
    teacher: list[str] = typer.Option(..., help="A teacher's tokenizer. Can be repeated."),
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
    """Compare the tokenizers of a student and its possible teachers.

    Shows vocabulary sizes and overlap (raw strings as in the paper, with space marks treated as
    equal, and by bytes), tokens per byte, how the student's tokens map, what the teacher's tokens
    become in distillation, and whether both tokenizers reproduce the text exactly. No model is
    loaded. Each model reads conversations in its own template; their contents are compared.
    """
    from vocagnolm.report.comparison import compare as run

    templates = [student_template, *[teacher_template] * len(teacher)]
    (ours, *theirs), documents, left_out, surveys = readers(
        [student, *teacher], templates, corpus, limit=limit_documents, **reading
    )
    pairs = run(ours, theirs, documents)
    if plot is not None:
        from vocagnolm.report.comparison import overlap_bars

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
        print_json(report)
        return
    _print(pairs, f"{', '.join(corpus) or 'the built-in sample'}, {len(documents):,} documents")
    for seen in surveys:
        typer.echo(f"{seen.name}: {seen.template}")
    for line in [line for seen in surveys for line in seen.warnings()] + left_out.lines():
        typer.echo(line)


def readers(
    tokenizers: Sequence[str], templates: Sequence[str | None], corpus: list[str], **reading: Any
) -> "tuple[list[TextTokenizer], list[str], LeftOut, list[Survey]]":
    """Tokenizers, the documents of a corpus (the built-in sample without one) and what was left out
    of it. Conversations are those that all can read, each in its template, which is surveyed."""
    from vocagnolm.alignment import load_tokenizer
    from vocagnolm.alignment.tokenizer import warn_of_missing_beginning
    from vocagnolm.chat import ChatTokenizer, survey, template_of
    from vocagnolm.chat.survey import readable_by
    from vocagnolm.data.corpus import LeftOut, open_corpus, read_texts
    from vocagnolm.report.comparison import SAMPLE

    loaded = [load_tokenizer(source, check=False) for source in tokenizers]
    opened = open_corpus(corpus, **reading) if corpus else None
    if opened is None or not opened.conversations:
        for tokenizer in loaded:
            warn_of_missing_beginning(tokenizer)
    if opened is None:
        return loaded, list(SAMPLE), LeftOut(), []
    documents, left_out = read_texts(opened)
    if not opened.conversations:
        return loaded, documents, left_out, []
    named = zip(loaded, templates, strict=True)
    talking = [ChatTokenizer(one, template_of(one, template)) for one, template in named]
    surveys = [survey(side, documents) for side in talking]
    return [*talking], readable_by(talking, documents), left_out, surveys


def _print(pairs: "list[Pair]", where: str) -> None:
    from vocagnolm.alignment.picture import visible

    student = pairs[0].student
    columns = [
        {
            "kind": pair.teacher.kind,
            "vocabulary": pair.teacher.vocabulary_size,
            "overlap, raw strings (paper)": f"{pair.overlap.raw:.2%}",
            "overlap, space marks made equal": f"{pair.overlap.marks:.2%}",
            "overlap, true bytes": f"{pair.overlap.bytes:.2%}",
            "tokens per byte": pair.teacher_tokens_per_byte,
            "one student token : one teacher token": f"{pair.one_to_one_share:.1%}",
            "one : many": f"{pair.one_to_many_share:.1%}",
            "many : one": f"{pair.many_to_one_share:.1%}",
            "unmapped": f"{pair.unmapped_share:.1%}",
            "student text covered (IoS)": f"{pair.ios:.1%}",
            "begins with a teacher token": f"{pair.shared_start_share:.1%}",
            "teacher tokens: one of the student's": f"{pair.spelled.exact:.1%}",
            "several, the first is a target": f"{pair.spelled.several:.1%}",
            "none that is certain": f"{pair.spelled.unspelled:.1%}",
            "tiling": "exact" if pair.exact else "lossy",
        }
        for pair in pairs
    ]
    print_table(
        f"student {student.name}: {student.kind}, {student.vocabulary_size:,} tokens, "
        f"{pairs[0].student_tokens_per_byte:.3f} tokens per byte",
        ["", *(pair.teacher.name for pair in pairs)],
        ([name, *(column[name] for column in columns)] for name in columns[0]),
    )
    typer.echo(f"shares measured on {where}")
    for pair in pairs:
        typer.echo(f"{pair.teacher.name}  {pair.verdict}")
        for wide in pair.widest:
            tokens = " ".join(visible(token.encode()) for token in wide.teacher_tokens)
            typer.echo(f"  widest  {wide.text!r} = {tokens}")
