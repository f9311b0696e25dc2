"""`vocagnolm evaluate`: the paper's math suite and bits per byte for a model."""

import contextlib
import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vocagnolm.cli.common import (
    CORPUS_HELP,
    SPLIT_HELP,
    TEMPLATE_HELP,
    TEXT_FIELD_HELP,
    Device,
    Dtype,
    Split,
    progress,
    quiet_libraries,
)

if TYPE_CHECKING:
    from vocagnolm.evaluate.run import Progress


class Choices(StrEnum):
    generate = "generate"
    likelihood = "likelihood"


class Protocols(StrEnum):
    strict = "strict"
    paper = "paper"


def evaluate(
    model: str = typer.Argument(help="Model folder, hub id (owner/name) or GGUF file."),
    suite: str | None = typer.Option(
        None, help="A named set of tasks: math, the paper's ten. [default: math]"
    ),
    tasks: str | None = typer.Option(
        None, help="Some tasks only, for example gsm8k,math500,mmlu_stem; math is all of MATH."
    ),
    benchmarks: Path | None = typer.Option(
        None, help="Folder with the benchmarks' files. [default: download them]"
    ),
    limit: int | None = typer.Option(
        None, min=1, help="Questions of each task, spread evenly: a quick look."
    ),
    text: list[str] = typer.Option([], help=f"Held-out text for bits per byte: {CORPUS_HELP}"),
    choices: Choices = typer.Option(
        Choices.generate,
        help="Multiple choice by a generated answer, or by the likelihood of the options "
        "(for small models).",
    ),
    protocol: Protocols = typer.Option(
        Protocols.strict,
        help="paper: the prompts, the 1,024 tokens and the grading of the paper's harness, as far "
        "as they can be had.",
    ),
    chat: bool = typer.Option(
        False,
        "--chat",
        help="The benchmarks as conversations in the model's own template, worked examples as "
        "turns.",
    ),
    shots: int | None = typer.Option(
        None, min=0, help="With --chat: worked examples; 0: none. [default: the task's own]"
    ),
    chat_template: str | None = typer.Option(None, help=TEMPLATE_HELP),
    max_new_tokens: int | None = typer.Option(
        None,
        min=1,
        help="Shorter answers. [default: the task's own, 256 or 512 tokens; paper: 1,024]",
    ),
    out: Path | None = typer.Option(
        None, help="Run folder: keeps every answer, and an interrupted run goes on."
    ),
    batch_size: int | None = typer.Option(
        None, min=1, help="Prompts at a time. [default: 32 on a CPU, by memory on a GPU]"
    ),
    device: Device = typer.Option(Device.auto, help="Where the model runs."),
    dtype: Dtype = typer.Option(
        Dtype.auto, help="auto: float32 on a CPU, the model's half precision on a GPU."
    ),
    text_field: str = typer.Option("text", help=TEXT_FIELD_HELP),
    split: Split = typer.Option(Split.none, help=SPLIT_HELP),
    revision: str | None = typer.Option(None, help="Branch, tag or commit of a hub model."),
    trust_remote_code: bool = typer.Option(False, help="Run Python code that a model brings."),
    as_json: bool = typer.Option(False, "--json", help="Print the scores as one JSON object."),
) -> None:
    """Score a model: few-shot chain of thought on the math suite, bits per byte on text."""
    from vocagnolm.data.skipped import LeftOut
    from vocagnolm.evaluate.results import format_table, scores_table
    from vocagnolm.evaluate.run import evaluate as evaluate_model
    from vocagnolm.evaluate.settings import Engine, Questions

    left_out: list[LeftOut] = []
    notes: list[str] = []
    with quiet_libraries(), _progress_bar() as on_progress:
        evaluation = evaluate_model(
            model,
            Questions(
                suite=suite,
                tasks=tasks,
                benchmarks=benchmarks,
                limit=limit,
                choices=choices.value,
                max_new_tokens=max_new_tokens,
                protocol=protocol.value,
                chat=chat,
                shots=shots,
            ),
            Engine(
                device=device.value,
                dtype=dtype.value,
                batch_size=batch_size,
                revision=revision,
                trust_remote_code=trust_remote_code,
                chat_template=chat_template,
            ),
            text=text,
            text_field=text_field,
            split=split.value,
            on_left_out=left_out.append,
            out=out,
            on_progress=on_progress,
            on_note=notes.append,
        )
    if as_json:
        values = evaluation.to_json()
        if notes:
            values["notes"] = notes
        if text:
            values["left_out"] = left_out[0].as_json()
        typer.echo(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        typer.echo(format_table(scores_table(evaluation)))
        if out is not None:
            typer.echo(f"answers: {out / 'evaluation' / 'outputs'}", err=True)
        for line in (*notes, *(line for one in left_out for line in one.lines())):
            typer.echo(line, err=True)


@contextlib.contextmanager
def _progress_bar() -> Iterator["Callable[[Progress], None]"]:
    with progress("answering", "questions") as meter:

        def on_progress(now: "Progress") -> None:
            label = "reading text" if now.task == "text" else "answering"
            meter.unit = "documents" if now.task == "text" else "questions"
            before = now.all_done - now.fresh  # answered by an earlier run
            shown = f"{now.all_done:,}/{now.all_total:,} {meter.unit}"
            if now.task != "text":
                shown += f" ({now.task} {now.done:,}/{now.total:,})"
            meter.note(now.fresh, now.all_total - before, shown, now.fresh, label)

        yield on_progress
