"""`vocagnolm prepare`: corpus + store + student tokenizer -> packed blocks."""

import os
from typing import TYPE_CHECKING, Any

import typer

from vocagnolm.cli.common import SPLIT_TEXTS, print_histogram, print_json, progress
from vocagnolm.cli.options import JSON, QUIET, RECIPE, SET
from vocagnolm.errors import RecipeError

if TYPE_CHECKING:
    from vocagnolm.data.bins import Bins
    from vocagnolm.data.materials import Materials
    from vocagnolm.data.packing import PackingSummary


def prepare(
    recipe: str = RECIPE,
    set_: list[str] = SET,
    workers: int | None = typer.Option(
        None, min=1, help="Number of workers.", show_default="one per core"
    ),
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Tokenize and pack the corpus for a student, with the teacher's guidance for each token.

    Run it again to resume, or to confirm completion. The result does not depend on the number
    of workers. It serves every block size, and every method whose columns it contains.
    """
    from vocagnolm.recipe import load_recipe

    loaded = load_recipe(recipe, set_)  # first: a typo is answered before all else is imported
    if problems := loaded.store_problems():
        raise RecipeError("\n".join(problems))
    from vocagnolm.data.materials import Materials

    parts = Materials(loaded).by_corpus()
    made = {name: _prepared(part, workers, name, quiet) for name, part in parts.items()}
    if as_json:
        summaries = {name: summary for name, (summary, _) in made.items()}
        print_json({"corpora": summaries} if loaded.corpora else summaries[""])
        return
    size = loaded.data.block_size
    for summary, bins in made.values():
        _print(summary, size)
        if summary["guided"] or not loaded.corpora:
            typer.echo(_served(summary["lacking"]))
        if bins is not None:
            typer.echo(bins.words(size + 1))


def _prepared(
    materials: "Materials", workers: int | None, name: str, quiet: bool
) -> tuple[dict[str, Any], "Bins | None"]:
    """Make the blocks of one corpus, whose name is shown if there are several. Returns their
    summary, and how conversations fill them."""
    from vocagnolm.data.fingerprints import lacking_columns
    from vocagnolm.data.materials import opened_count
    from vocagnolm.data.prepare import prepare_blocks

    recipe = materials.recipe
    documents = tokens = 0
    with progress(f"preparing {name}".rstrip(), started=True, quiet=quiet) as meter:

        def note(part: "PackingSummary", share: float) -> None:
            nonlocal documents, tokens
            documents, tokens = documents + part.documents, tokens + part.tokens
            meter.note(share, 1.0, f"{documents:,} documents, {tokens:,} tokens", tokens)

        manifest = prepare_blocks(materials, workers or os.cpu_count() or 1, note)
    size = recipe.data.block_size
    blocks, bins = opened_count(recipe, manifest)
    summary = {
        "blocks": blocks,
        "folder": recipe.data.blocks,
        "fingerprint": manifest["fingerprint"],
        "guided": "guidance" in manifest["columns"],
        "lacking": lacking_columns(manifest),
        **manifest["summary"],
    }
    if split := manifest["inputs"]["corpus"].get("split_texts"):
        summary["split_texts"] = split
    if bins is not None:
        summary |= {
            "template": manifest["inputs"]["template"]["origin"],
            "cut_documents": bins.cut,
            "documents_without_training": bins.without,
            "filled_share": bins.tokens / max(len(bins) * (size + 1), 1),
        }
    return summary, bins


def _served(lacking: dict[str, str | None]) -> str:
    """Which methods are a change of one word from here on, and what the others would need."""
    served = ", ".join(method for method, column in lacking.items() if column is None)
    columns: dict[str, list[str]] = {}
    for method, column in lacking.items():
        if column is not None:
            columns.setdefault(column, []).append(method)
    others = "; ".join(f"{', '.join(methods)}: {column}" for column, methods in columns.items())
    line = f"objective.method may be {served}."
    return f"{line} To be kept for the others (data.extra_columns): {others}." if others else line


def _print(summary: dict[str, Any], block_size: int) -> None:
    typer.echo(
        f"{summary['folder']}: {summary['blocks']:,} blocks of {block_size:,}, "
        f"{summary['tokens']:,} tokens of {summary['documents']:,} documents"
    )
    if "split_texts" in summary:
        typer.echo(f"{summary['split_texts']:,} {SPLIT_TEXTS}")
    if summary["missing_documents"] or summary["unusable_documents"]:
        typer.echo(
            f"not in the store: {summary['missing_documents']:,} documents; "
            f"without usable text: {summary['unusable_documents']:,}"
        )
    if "wrong_documents" in summary:
        typer.echo(f"not marked as right: {summary['wrong_documents']:,} answers, left out")
    if "trained" in summary:
        from vocagnolm.chat.survey import template_words

        share = summary["trained"] / max(summary["tokens"], 1)
        typer.echo(
            f"conversations, in {template_words(summary['template'])}; "
            f"trained on: {summary['trained']:,} tokens ({share:.1%})"
        )
        for reason, count in summary["refused"].items():
            typer.echo(f"the template refuses {count:,} conversations: {reason}")
    if not summary["guided"]:
        typer.echo("no store: the blocks hold no guidance")
        return
    if summary["mean_guidance"] is None:
        typer.echo("no token is mapped: the store holds none of these documents")
        return
    typer.echo(
        f"mapped {summary['mapped_share']:.2%}, 1:1 {summary['one_to_one_share']:.2%}, "
        f"mean guidance {summary['mean_guidance']:.3f} nats"
    )
    if "target_shares" in summary:
        from vocagnolm.data.packing import target_words

        for line in target_words(summary["target_shares"]):
            typer.echo(line)
    counts, step = summary["guidance_histogram"], summary["histogram_step_nats"]
    grouped = [sum(counts[at : at + 4]) for at in range(0, len(counts), 4)]
    print_histogram(grouped, 4 * step, len(grouped))
