"""`vocagnolm demo`: the whole pipeline on an embedded example. `vocagnolm try`: a student, its
teacher and a corpus or prompts; a verdict in minutes."""

from functools import partial
from pathlib import Path
from typing import Any

import typer

from vocagnolm.cli.common import print_json, progress, quiet_libraries
from vocagnolm.cli.options import JSON, QUIET, Given, option, options, with_options
from vocagnolm.errors import UsageError
from vocagnolm.recipe.sections import (
    CorpusSection,
    EngineSection,
    PromptsSection,
    RunSection,
    WriteSection,
)


def demo(
    out: Path = typer.Option(Path("out/demo"), help="Output folder."),
    materials: Path | None = typer.Option(
        None, help="Only write the materials of `vocagnolm study run toy` to this folder."
    ),
) -> None:
    """Run the whole pipeline on an embedded example: no download, no GPU, a few minutes.

    Four methods train the same small student on the same noisy corpus, three seeds each; two more
    train it on what the teacher wrote. All are evaluated on held-out problems. Run it again to
    resume after an interruption.
    """
    if materials is not None:
        from vocagnolm.demo.pipeline import write_materials

        write_materials(materials)
        typer.echo(str(materials))
    else:
        from vocagnolm.demo.pipeline import run_demo

        run_demo(out)


_WRITING = ("max_new_tokens", "system", "examples", "stop", "grade", "chat_template")


@with_options
def try_(
    student: str = typer.Option(
        ..., help="The student: model folder, hub id (owner/name) or GGUF file."
    ),
    teacher: list[str] = typer.Option(
        ..., help="A teacher, in the same form. Can be repeated with --corpus; teachers are ranked."
    ),
    corpus: list[str] = option(CorpusSection, "files"),
    prompts: list[str] = option(
        PromptsSection,
        "files",
        help="Instead of --corpus: prompts that the teacher answers, in any form that `write` "
        "reads. If records also hold an answer (a completion, an Alpaca output, the assistant's "
        "last message), the teacher's answers are compared with these. Can be repeated.",
    ),
    reading: Given = options(CorpusSection, "text_field", "split"),
    expected: Given = options(PromptsSection, "answer_field"),
    writing: Given = options(WriteSection, *_WRITING),
    minutes: float = typer.Option(
        10.0, min=0.1, help="Approximate duration; determines the size of the sample."
    ),
    learning_rate: float | None = typer.Option(
        None, help="Peak learning rate of the short runs.", show_default="by the student's size"
    ),
    seed: int = option(RunSection, "seed", help="Seed for the sample and the order of the blocks."),
    engine: Given = options(EngineSection, "device"),
    out: Path = typer.Option(Path("out/try"), help="Output folder."),
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Find out in minutes, on a sample, whether a teacher helps a student.

    With --corpus (texts or conversations): ranks student and teachers by bits per byte on held-out
    documents, trains the student briefly on every token, guided and distilled, and compares the
    three. With --prompts: lets the teacher answer some, trains the student briefly on the given
    answers (if there are any), on the teacher's, and distilled from them, and compares their right
    answers to held-out prompts (--answer-field), or else bits per byte. Both say what is worth
    doing and what the whole would cost, and write a page. Run it again to resume after an
    interruption.
    """
    from vocagnolm.tryout.folder import TrySettings
    from vocagnolm.tryout.prompts import try_prompts
    from vocagnolm.tryout.text import try_text

    if learning_rate is not None and learning_rate <= 0:
        raise typer.BadParameter("must be above 0", param_hint="--learning-rate")
    if bool(corpus) == bool(prompts):
        raise UsageError("try needs either --corpus or --prompts.")
    settings = TrySettings(minutes, learning_rate, seed, **engine)
    asked: dict[str, Any] = {"settings": settings, "progress": partial(progress, quiet=quiet)}
    asked["reading"] = {**reading, **expected}
    asked["say"] = lambda line: typer.echo(f"✓ {line}", err=True)
    with quiet_libraries():
        if prompts:
            if len(teacher) > 1:
                raise UsageError("--prompts takes a single --teacher: try them one after another.")
            result = try_prompts(student, teacher[0], prompts, out, writing=writing, **asked)
        else:
            if only := [*writing, *expected]:
                raise UsageError(f"--{only[0].replace('_', '-')} can only be used with --prompts.")
            result = try_text(student, teacher, corpus, out, **asked)
    if as_json:
        print_json(result)
    elif prompts:
        _print_prompts(result)
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    from rich.filesize import decimal

    from vocagnolm.evaluate.results import TextScore, format_table, ranking_table
    from vocagnolm.tryout.text import CAVEAT

    def table(rows: list[dict[str, Any]], baseline: str) -> str:
        return format_table(ranking_table([TextScore(**row) for row in rows], baseline))

    run, blocks, whole = result["runs"]["cpt"], result["blocks"], result["whole_corpus"]
    costs = [["the whole corpus", "time", "disk"]] + [
        [step, _time(whole[step][0]), decimal(round(whole[step][1]))]
        for step in ("scoring", "preparing", "training")
    ]
    teacher, recipe = result["recommended"] != "cpt", result["recipe"]
    typer.echo(f"""
{CAVEAT}

Who predicts this text better? ({result["held_out"]["documents"]:,} held-out documents)

{table(result["strength"], "the student")}

Do the vocabularies fit? The teacher's tokens cover {blocks["mapped_share"]:.1%} of the student's, \
{blocks["one_to_one_share"]:.1%} one to one; {blocks["target_share"]:.1%} have distillation targets.

Does the teacher help? (held-out bits per byte after {run["tokens"]:,} tokens in {run["steps"]:,} \
steps, learning rate {run["learning_rate"]:g})

{table(result["rules"], "every token")}

VERDICT
{chr(10).join(result["verdict"])}

{format_table(costs)}
{whole["documents"]:,} documents, about {decimal(whole["bytes"])} of text, on this machine \
({result["device"]}) at the throughput just measured.

Next:
{f"  vocagnolm score --recipe {recipe}{chr(10)}" if teacher else ""}  vocagnolm prepare {recipe}
  vocagnolm train {recipe}
Report: {result["page"]}""")


def _print_prompts(result: dict[str, Any]) -> None:
    from rich.filesize import decimal

    from vocagnolm.evaluate.results import OUTCOMES, TextScore, format_table, ranking_table
    from vocagnolm.tryout.prompts import BITS_CAVEAT, RIGHT_CAVEAT, WRITTEN

    split, written, whole = result["split"], result["written"], result["whole"]
    run = result["runs"][WRITTEN]
    by_answers = result["measure"] == "right answers"
    if by_answers:
        rows = [["trained on", "right", "95 % interval", f"against {WRITTEN}", ""]]
        for row in result["rows"]:
            interval, change = (
                "{:+.1f} to {:+.1f}".format(*(100 * end for end in row[name]))
                for name in ("interval", "difference_interval")
            )
            shown = [f"{100 * row['difference']:+.1f} ({change})", OUTCOMES[row["outcome"]]]
            base = row["name"] == WRITTEN
            rows.append(
                [
                    row["name"],
                    f"{row['right']:.1%}",
                    interval.replace("+", ""),
                    *([] if base else shown),
                ]
            )
    else:
        rows = ranking_table([TextScore(**row) for row in result["rows"]], WRITTEN)
    costs = [["all prompts", "time", "disk"]] + [
        [step, _time(whole[step][0]), decimal(round(whole[step][1]))]
        for step in ("writing", "training")
    ]
    lines = "\n".join(f"  {command}" for command in result["next"])
    following = f"Next:\n{lines}\n" if lines else ""
    held = f"{split['held_out']:,} held-out prompts"
    typer.echo(f"""
{RIGHT_CAVEAT if by_answers else BITS_CAVEAT}

The teacher wrote {written["kept"]:,} answers to {split["prompts"]:,} prompts; \
{split["given"]:,} of these have given answers.

What is worth training on? ({held}, after {run["tokens"]:,} tokens in {run["steps"]:,} steps, \
learning rate {run["learning_rate"]:g})

{format_table(rows)}

VERDICT
{chr(10).join(result["verdict"])}

{format_table(costs)}
{whole["prompts"]:,} prompts with {whole["answers"]:,} answers, on this machine \
({result["device"]}) at the throughput just measured.

{following}Report: {result["page"]}""")


def _time(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"
