"""`vocagnolm view`: the interactive page for any pair of tokenizers and any text."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from vocagnolm.cli.common import quiet_libraries
from vocagnolm.cli.options import STUDENT_TEMPLATE, TEACHER_TEMPLATE, Given, options, with_options
from vocagnolm.recipe.sections import ObjectiveSection


@with_options
def view(
    student: str | None = typer.Option(
        None,
        help="The student's tokenizer: folder, tokenizer.json, tokenizer.model or hub id. "
        "Default: that of --student-model.",
    ),
    teacher: list[str] = typer.Option(
        [], help="The teacher's tokenizer, in the same form. Can be repeated; each has a row."
    ),
    text: list[str] = typer.Option([], help="A text to show. Can be repeated."),
    file: list[Path] = typer.Option([], help="A UTF-8 file to show. Can be repeated."),
    messages: Path | None = typer.Option(
        None, help="A file of conversations; each model reads them in its own template."
    ),
    limit: int = typer.Option(4, min=1, help="With --messages: number of conversations."),
    student_template: str | None = STUDENT_TEMPLATE,
    teacher_template: str | None = TEACHER_TEMPLATE,
    student_model: str | None = typer.Option(
        None, help="A model whose losses to show: folder, hub id or GGUF file."
    ),
    teacher_model: list[str] = typer.Option(
        [],
        help="The teacher's model. Can be repeated. With a student model, tokens are coloured by "
        "excess and selected.",
    ),
    selection: Given = options(
        *(ObjectiveSection, "keep", "aggregation", "unmapped"), recipe_key="objective"
    ),
    html: Path = typer.Option(..., help="The page to write, for example view.html."),
) -> None:
    """Write a self-contained HTML page that shows how tokenizers split a text.

    With tokenizers only, the page shows the alignment. Models add their losses, and the teacher's
    model also its predictions; with both models every token shows its excess and whether it would
    be kept. The page works offline.
    """
    from vocagnolm.cli.align import read_conversations, read_utf8
    from vocagnolm.report import write_page
    from vocagnolm.report.view import view_from_sources

    templates: dict[str, Any] = {}
    if messages is not None:
        from vocagnolm.chat import ChatTokenizer, template_of
        from vocagnolm.errors import UsageError

        if text or file:
            raise UsageError("a page shows either texts or conversations: give --messages alone")
        for side, given in (("student", student_template), ("teacher", teacher_template)):
            templates[f"{side}_template"] = lambda tokenizer, given=given: ChatTokenizer(
                tokenizer, template_of(tokenizer, given)
            )
    texts = [(f"text {at}" if len(text) > 1 else "text", one) for at, one in enumerate(text, 1)]
    texts += [(path.name, read_utf8(path)) for path in file]
    if messages is not None:
        texts = read_conversations(messages, limit)
    # transformers is loaded only where there are models
    with quiet_libraries() if student_model or teacher_model else nullcontext():
        page = view_from_sources(
            student=student,
            teachers=teacher,
            student_model=student_model,
            teacher_models=teacher_model,
            texts=texts,
            **selection,
            **templates,
        )
    typer.echo(str(write_page(page, html)))
