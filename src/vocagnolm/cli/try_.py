"""`vocagnolm demo`: the whole pipeline on an embedded example. `vocagnolm try`: a student, its
possible teachers and a corpus; a verdict in minutes."""

from pathlib import Path
from typing import Any

import typer

from vocagnolm.cli.common import print_json, progress, quiet_libraries
from vocagnolm.cli.options import JSON, Given, option, options, with_options
from vocagnolm.recipe.sections import CorpusSection, EngineSection, RunSection


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


@with_options
def try_(
    student: str = typer.Option(
        ..., help="The student: model folder, hub id (owner/name) or GGUF file."
    ),
    teacher: list[str] = typer.Option(
        ..., help="A teacher, in the same form. Can be repeated; teachers are ranked."
    ),
    corpus: list[str] = option(CorpusSection, "files", default=...),
    reading: Given = options(CorpusSection, "text_field", "split", recipe_key="corpus"),
    minutes: float = typer.Option(
        10.0, min=0.1, help="Approximate duration; determines the size of the sample."
    ),
    learning_rate: float | None = typer.Option(
        None, help="Peak learning rate of the short runs.", show_default="by the student's size"
    ),
    seed: int = option(RunSection, "seed", help="Seed for the sample and the order of the blocks."),
    engine: Given = options(EngineSection, "device"),
    out: Path = typer.Option(Path("out/try"), help="Output folder."),
    as_json: bool = JSON,
) -> None:
    """Find out in minutes, on a sample, whether a teacher helps a student on your text.

    Ranks student and teachers by bits per byte on held-out documents. Trains the student briefly
    on every token, guided and distilled, and compares the three. Estimates the cost of the whole
    corpus, and writes a recipe and a page. Run it again to resume after an interruption.
    """
    from vocagnolm.trial import try_pair

    if learning_rate is not None and learning_rate <= 0:
        raise typer.BadParameter("must be above 0", param_hint="--learning-rate")
    with quiet_libraries():
        result = try_pair(
            student,
            teacher,
            corpus,
            out,
            minutes=minutes,
            learning_rate=learning_rate,
            seed=seed,
            say=lambda line: typer.echo(f"✓ {line}", err=True),
            progress=progress,
            **engine,
            **reading,
        )
    if as_json:
        print_json(result)
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    from rich.filesize import decimal

    from vocagnolm.evaluate.results import TextScore, format_table, ranking_table
    from vocagnolm.trial import CAVEAT

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


def _time(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"
