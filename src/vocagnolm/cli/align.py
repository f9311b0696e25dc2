"""`vocagnolm align`: which teacher tokens cover which student tokens, as a picture or as JSON."""

import json
from pathlib import Path

import typer


def align(
    student: str = typer.Option(
        ..., help="The student's tokenizer: folder, tokenizer.json, tokenizer.model or hub id."
    ),
    teacher: str = typer.Option(..., help="The teacher's tokenizer, likewise."),
    text: str | None = typer.Option(None, help="The text to align."),
    file: Path | None = typer.Option(
        None, help="A UTF-8 file to align, read as it is: no newline is translated."
    ),
    special_tokens: str = typer.Option(
        "text",
        help="Special tokens written in the text: 'text' reads their characters, "
        "'control' gives their ids.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object; spans in bytes."),
    plot: Path | None = typer.Option(
        None, help="Draw the two rows (the paper's Figure 2) into this PNG or SVG file."
    ),
) -> None:
    """Show two rows of tokens over one text, and which covers which.

    Green: one student token, one teacher token. Yellow: several teacher tokens for one student
    token. Blue: several student tokens in one teacher token. Red: unmapped.
    """
    from vocagnolm.alignment import load_tokenizer
    from vocagnolm.alignment.picture import align_text, draw
    from vocagnolm.errors import UsageError

    if (text is None) == (file is None):
        raise UsageError("give the text to align with either --text or --file")
    if special_tokens not in ("text", "control"):
        raise UsageError(f"--special-tokens is {special_tokens!r}; expected 'text' or 'control'")
    content = read_utf8(file) if file is not None else text or ""
    pair = align_text(
        load_tokenizer(student, special_tokens=special_tokens, check=False),
        load_tokenizer(teacher, special_tokens=special_tokens, check=False),
        content,
    )
    if plot is not None:
        from vocagnolm.pair.figures import tokenisation_rows

        tokenisation_rows([pair.student, pair.teacher], content, plot)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        typer.echo(json.dumps(pair.as_json(), ensure_ascii=False, indent=2))
        return
    draw(pair)


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
