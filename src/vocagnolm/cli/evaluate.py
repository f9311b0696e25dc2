"""`vocagnolm evaluate`: the paper's math suite and bits per byte for a model."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vocagnolm.cli.common import Meter, print_json, progress, quiet_libraries
from vocagnolm.cli.options import JSON, QUIET, Given, option, options, require_asked, with_options
from vocagnolm.errors import UsageError
from vocagnolm.recipe.sections import CorpusSection, EngineSection, QuestionsSection, ServerSection

if TYPE_CHECKING:
    from vocagnolm.evaluate.bits import BitsPerByte
    from vocagnolm.evaluate.run import EvaluationProgress


@with_options
def evaluate(
    model: list[str] | None = typer.Argument(
        None,
        help="Model folder, hub id (owner/name) or GGUF file; several are ranked on --text. With "
        "--server, provides only tokenizer and template; default: by the server's model name.",
        show_default=False,
    ),
    questions: Given = options(QuestionsSection),
    text: list[str] = option(
        CorpusSection, "files", "--text", before="Held-out text for bits per byte. "
    ),
    reading: Given = options(CorpusSection, "text_field", "split", recipe_key="corpus"),
    engine: Given = options(EngineSection),
    server: list[str] = typer.Option(
        [],
        metavar="URL",
        help="A vLLM or SGLang server that runs the model. Its API key is read from "
        "VOCAGNOLM_SERVER_KEY, or OPENAI_API_KEY. Can be repeated: requests go to the server that "
        "is free.",
    ),
    server_settings: Given = options(ServerSection),
    out: Path | None = typer.Option(
        None, help="Run folder; keeps every answer, so that evaluation can be resumed."
    ),
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Evaluate a model: few-shot chain of thought on the math suite, bits per byte on text.

    Several models are ranked by their bits per byte on --text, with 95 % intervals (bootstrap over
    documents) and paired differences from the best.
    """
    require_asked("server", server, server_settings, "without an option (vocagnolm evaluate MODEL)")
    if not (text or questions):
        raise UsageError(
            "evaluate needs something to measure: --text held-out.jsonl for bits per byte, --tasks "
            "gsm8k,math500 for some benchmarks, or --suite math for all of the paper's, which "
            "downloads ten."
        )
    from vocagnolm.evaluate.results import format_table, rank_texts, ranking_table, scores_table
    from vocagnolm.evaluate.run import evaluate as evaluate_model
    from vocagnolm.model.served import Server

    models = model or []
    sources: list[str | None] = [*models] or [None]  # None: by the server's name of its model
    several = len(models) > 1
    if several and (not text or questions or out or server or len(set(models)) < len(models)):
        raise UsageError(
            "several models can only be ranked on --text, without tasks, --out or --server. To "
            "compare tasks, evaluate each model with --out, then run `vocagnolm report`."
        )
    read: list[BitsPerByte] = []
    notes: list[str] = []
    for source in sources:
        with quiet_libraries(), progress("answering", "questions", quiet=quiet) as meter:
            evaluation = evaluate_model(
                source,
                server=Server(url=server, **server_settings) if server else None,
                text=text,
                out=out,
                on_text=read.append,
                on_progress=partial(_note, meter),
                on_note=notes.append,
                **questions,
                **engine,
                **reading,
            )
    left_out = [one.left_out for one in read]
    if several:
        from vocagnolm.report.view import model_names

        names = model_names(models).values()
        ranked = rank_texts({n: one.by_document for n, one in zip(names, read, strict=True)})
        if as_json:
            print_json([asdict(one) for one in ranked])
        else:
            typer.echo(f"{ranked[0].documents:,} documents; fewer bits per byte are better")
            typer.echo(format_table(ranking_table(ranked)))
    elif as_json:
        values = evaluation.to_json()
        if notes:
            values["notes"] = notes
        if text:
            values["left_out"] = left_out[0].as_json()
        print_json(values)
    else:
        typer.echo(format_table(scores_table(evaluation)))
        if out is not None and evaluation.tasks:
            typer.echo(f"answers: {out / 'evaluation' / 'outputs'}", err=True)
    if several or not as_json:
        for line in dict.fromkeys([*notes, *(line for one in left_out for line in one.lines())]):
            typer.echo(line, err=True)


def _note(meter: Meter, now: "EvaluationProgress") -> None:
    of_text = now.task == "text"
    meter.unit = "documents" if of_text else "questions"
    before = now.all_done - now.fresh  # answered by an earlier run
    shown = f"{now.all_done:,}/{now.all_total:,} {meter.unit}"
    if not of_text:
        shown += f" ({now.task} {now.done:,}/{now.total:,})"
    label = "reading text" if of_text else "answering"
    meter.note(now.fresh, now.all_total - before, shown, now.fresh, label)
