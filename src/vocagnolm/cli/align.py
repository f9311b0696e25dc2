"""`vocagnolm align`: which teacher tokens cover which student tokens, as a picture or as JSON."""

from enum import StrEnum
from itertools import groupby
from pathlib import Path

import typer

from vocagnolm.cli.common import print_json
from vocagnolm.cli.options import JSON, STUDENT, STUDENT_TEMPLATE, TEACHER, TEACHER_TEMPLATE


class SpecialTokens(StrEnum):
    text = "text"
    control = "control"


def align(
    student: str = STUDENT,
    teacher: str = TEACHER,
    text: str | None = typer.Option(None, help="The text to align."),
    file: Path | None = typer.Option(
        None, help="A UTF-8 file to align, read without newline translation."
    ),
    messages: Path | None = typer.Option(
        None,
        help="A file of conversations (jsonl, parquet): each model reads one in its own template, "
        "and the contents are aligned.",
    ),
    number: int = typer.Option(1, min=1, help="With --messages: number of the conversation."),
    student_template: str | None = STUDENT_TEMPLATE,
    teacher_template: str | None = TEACHER_TEMPLATE,
    special_tokens: SpecialTokens = typer.Option(
        SpecialTokens.text, help="Read special tokens in the text as plain text, or as control ids."
    ),
    as_json: bool = JSON,
    plot: Path | None = typer.Option(
        None, help="Draw the two rows (the paper's Figure 2) into this PNG or SVG file."
    ),
) -> None:
    """Show how the tokens of two tokenizers align over a text.

    Green: one student token, one teacher token. Yellow: several teacher tokens for one student
    token. Blue: several student tokens in one teacher token. Red: unmapped. Dim: printed by a chat
    template. For conversations, also shows which tokens are trained on and why.
    """
    from vocagnolm.alignment import TextTokenizer, load_tokenizer
    from vocagnolm.alignment.picture import align_text, draw, visible
    from vocagnolm.errors import UsageError

    if sum(given is not None for given in (text, file, messages)) != 1:
        raise UsageError("give the text to align with one of --text, --file or --messages")
    content = read_utf8(file) if file is not None else text or ""
    read_as = special_tokens.value
    ours: TextTokenizer = load_tokenizer(student, special_tokens=read_as, check=False)
    theirs: TextTokenizer = load_tokenizer(teacher, special_tokens=read_as, check=False)
    if messages is not None:
        from vocagnolm.chat import ChatTokenizer, survey, template_of

        read = read_conversations(messages, number)
        if len(read) < number:
            raise UsageError(f"{messages} holds {len(read):,} conversations, fewer than {number:,}")
        content = read[-1][1]
        ours = ChatTokenizer(ours, template_of(ours, student_template))
        theirs = ChatTokenizer(theirs, template_of(theirs, teacher_template))
        for line in (
            line for side in (ours, theirs) for line in survey(side, [content]).warnings()
        ):
            typer.echo(line, err=True)
    pair = align_text(ours, theirs, content)
    trained: list[str | None] = []
    if messages is not None:
        from vocagnolm.chat.survey import why_trained

        trained = why_trained(content, pair.student_tokens)
    if plot is not None:
        from vocagnolm.report.comparison import tokenisation_rows

        tokenisation_rows([pair.student, pair.teacher], content, plot)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        facts = pair.as_json()
        for token, reason in zip(facts["student"] if trained else [], trained, strict=True):
            token["trained"] = reason
        print_json(facts)
        return
    draw(pair)
    names = ours.shown(content, pair.student_tokens)
    encoded, spans = content.encode(), pair.student_tokens.spans.tolist()
    texts = [
        visible(encoded[a:b] if name is None else name.encode())
        for (a, b), name in zip(spans, names, strict=True)
    ]
    for why, run in groupby(zip(trained, texts, strict=False), key=lambda one: one[0]):
        if why is not None:
            typer.echo(f"trained ({why}): {'╎'.join(text for _, text in run)}")


def read_conversations(file: Path, limit: int) -> list[tuple[str, str]]:
    """Names and shared texts of the first conversations of a file."""
    from vocagnolm.data.corpus import open_corpus
    from vocagnolm.errors import CorpusError

    corpus = open_corpus(file, text_field="")
    if not corpus.conversations:
        raise CorpusError(f"{file} holds texts, not conversations: give them with --file.")
    found = []
    for document in corpus.read(0, limit):
        if document.text is None:
            raise CorpusError(f"{document.place} cannot be used: {document.problem}.")
        found.append((document.place, document.text))
    return found


def read_utf8(file: Path) -> str:
    """The file's text, byte for byte."""
    from vocagnolm.errors import VocagnolmError

    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise VocagnolmError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise VocagnolmError(
            f"{file} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start} does not belong there. Convert it, for example with "
            "iconv -f latin1 -t utf-8"
        ) from None
