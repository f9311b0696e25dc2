"""`vocagnolm score`: a teacher reads a corpus once and leaves a loss store."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer.core import TyperCommand

from vocagnolm.cli.common import (
    CORPUS_HELP,
    FORMAT_HELP,
    SPLIT_HELP,
    TEMPLATE_HELP,
    TEMPLATE_OPTION_HELP,
    TEXT_FIELD_HELP,
    Device,
    Format,
    ScoreDtype,
    Split,
    progress,
    quiet_libraries,
    template_options,
)
from vocagnolm.errors import UsageError

if TYPE_CHECKING:
    from vocagnolm.score import ScoreSummary
    from vocagnolm.score.work import Progress


DEFAULT_ALTERNATIVES = 4


class ScoreCommand(TyperCommand):
    """`--ray` alone means: without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place, word in enumerate(args):
            if word == "--ray" and (place + 1 == len(args) or args[place + 1].startswith("-")):
                args = [*args[:place], "--ray", "", *args[place + 1 :]]
                break
        return super().parse_args(ctx, args)


def score(
    recipe: str | None = typer.Option(
        None, help="Take teacher, corpus and --out from this recipe where they are not given."
    ),
    teacher: str | None = typer.Option(
        None, help="Model folder, hub id (owner/name) or GGUF file."
    ),
    corpus: list[str] = typer.Option([], help=CORPUS_HELP),
    out: str | None = typer.Option(
        None, help="The loss store: a folder, or an address (s3://, gs://, az://)."
    ),
    text_field: str | None = typer.Option(None, help=f"{TEXT_FIELD_HELP} [default: text]"),
    format_: Format | None = typer.Option(None, "--format", help=f"{FORMAT_HELP} [default: auto]"),
    split: Split | None = typer.Option(None, help=f"{SPLIT_HELP} [default: none]"),
    limit_documents: int | None = typer.Option(None, min=1, help="Read at most so many."),
    device: Device = typer.Option(Device.auto, help="Where the teacher runs."),
    dtype: ScoreDtype = typer.Option(
        ScoreDtype.auto,
        help="auto: float32 on a CPU, the model's half precision on a GPU. fp8: all matrix "
        "products in e4m3, on Hopper and newer: faster, less memory, losses less exact.",
    ),
    context: int | None = typer.Option(
        None, min=2, help="Longest window in tokens. [default: 2048, or the model's limit]"
    ),
    stride: int | None = typer.Option(
        None,
        min=1,
        help="Tokens of context every token of a long document has at least. "
        "[default: context / 8]",
    ),
    batch_tokens: int | None = typer.Option(
        None, min=1, help="Tokens in a batch or request. [default: 16384, on a CPU 4096]"
    ),
    shard_documents: int = typer.Option(1024, min=1, help="Documents in a shard."),
    bos: str = typer.Option(
        "auto", help="Before every window: auto (as the tokenizer does), none, or a token."
    ),
    alternatives: str | None = typer.Option(
        None,
        metavar="K",
        help="Of every token also keep the teacher's K likeliest tokens at its place, 1 to 64, so "
        "that students of any vocabulary can be distilled from the store; sampled:K: K tokens "
        "drawn from its distribution. Four bytes each. [default: 0; 4 for a recipe that distils]",
    ),
    chat_template: str | None = typer.Option(None, help=TEMPLATE_HELP),
    template_option: list[str] = typer.Option([], help=TEMPLATE_OPTION_HELP),
    compiled: bool | None = typer.Option(
        None, "--compile/--no-compile", help="Compile the layers. [default: on a GPU]"
    ),
    threads: int | None = typer.Option(
        None, min=1, help="Threads on a CPU. [default: all, at most 16]"
    ),
    shard_teacher: str = typer.Option(
        "1",
        metavar="N",
        help="GPUs of one machine that hold one teacher together, under torchrun; auto: as few as "
        "hold its weights.",
    ),
    strict: bool = typer.Option(False, help="Stop at the first document that cannot be scored."),
    share: str | None = typer.Option(
        None,
        help="I/N: do a share of the shards only, for machines that are not started together "
        "(an array job); the one that ends last completes the store.",
    ),
    ray: str | None = typer.Option(
        None,
        metavar="[ADDRESS]",
        help="Let a Ray cluster score: auto, HOST:PORT; without an address one on this machine. "
        "One worker a GPU, or for every --threads CPUs; those that die are replaced.",
    ),
    ray_workers: int | None = typer.Option(
        None, min=1, help="Workers of the Ray cluster. [default: as many as have room]"
    ),
    ray_patience: float = typer.Option(
        600.0, min=1.0, help="End when no worker has been alive for so many seconds."
    ),
    server: str | None = typer.Option(
        None,
        metavar="URL",
        help="A server of vLLM or SGLang that has the teacher's weights; --teacher gives the "
        "tokenizer. Its key: the environment variable VOCAGNOLM_SERVER_KEY.",
    ),
    server_model: str | None = typer.Option(
        None, help="As the server calls it. [default: the only one it has]"
    ),
    server_requests: int = typer.Option(4, min=1, help="Requests under way at a time."),
    server_patience: float = typer.Option(
        600.0, min=1.0, help="End when the server has been of no use for so many seconds."
    ),
    revision: str | None = typer.Option(None, help="Branch, tag or commit of a hub model."),
    trust_remote_code: bool = typer.Option(False, help="Run Python code that a model brings."),
    student_bits: float | None = typer.Option(
        None,
        help="The student's bits per byte on this text (`vocagnolm evaluate --text`): warns of a "
        "teacher that is not clearly better.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as one JSON object."),
) -> None:
    """Score a corpus with a teacher, once, for every student there will be.

    Run the same command again to resume, or to hear that all is done. To use several GPUs:
    torchrun --nproc_per_node N -m vocagnolm score ...; several machines: --share 1/N ... N/N, or
    --ray.
    """
    from vocagnolm.errors import UsageError

    began = time.perf_counter()
    options = template_options(template_option)
    if recipe is not None:
        from vocagnolm.recipe import load_recipe

        given = load_recipe(recipe)
        if teacher is None:
            teacher, revision = given.teacher.model, revision or given.teacher.revision
            chat_template = chat_template or given.teacher.chat_template
            options = {**given.teacher.template_options, **options}
        if not corpus:
            corpus, limit_documents = (
                given.corpus.files,
                limit_documents or given.corpus.limit_documents,
            )
            text_field = text_field or given.corpus.text_field
            format_ = format_ or Format(given.corpus.format)
            split = split or Split(given.corpus.split)
        if out is None and len(given.stores) > 1:
            raise UsageError(f"{recipe} names several stores: say with --out which one to make.")
        if out is None and given.stores:
            out = given.stores[0]
        if alternatives is None and given.method.alternatives:
            alternatives = str(given.objective.alternatives or DEFAULT_ALTERNATIVES)
    missing = {"--teacher": teacher, "--corpus": corpus, "--out": out}
    if lacking := [name for name, value in missing.items() if not value]:
        where = f"; the recipe {recipe} does not say either" if recipe else ", or --recipe"
        raise UsageError(f"score needs {', '.join(lacking)}{where}.")
    assert teacher is not None and out is not None
    from vocagnolm.alternatives import AlternativesSpec

    try:
        AlternativesSpec.parse(alternatives or "0")
    except ValueError as error:
        raise UsageError(f"--{error}.") from None

    from vocagnolm.score import RayCluster, ScoreSettings, Server, Share, score_corpus
    from vocagnolm.store.analysis import teacher_warning

    settings = ScoreSettings(
        device=device.value,
        dtype=dtype.value,
        context=context,
        stride=stride,
        batch_tokens=batch_tokens,
        shard_documents=shard_documents,
        bos=bos,
        alternatives=alternatives or "0",
        chat_template=chat_template,
        template_options=options,
        compiled=compiled,
        threads=threads,
        shard_teacher=_shards(shard_teacher),
        strict=strict,
    )
    cluster = None
    if ray is not None:
        cluster = RayCluster(
            address=ray or None, workers=ray_workers, patience_seconds=ray_patience
        )
    weights_at = None
    if server is None and server_model is not None:
        raise UsageError("--server-model names a model of a server: give --server as well.")
    if server is not None:
        weights_at = Server(
            url=server,
            model=server_model,
            requests=server_requests,
            patience_seconds=server_patience,
        )
    with quiet_libraries(), _progress_bar() as on_progress:
        imported = time.perf_counter() - began
        summary = score_corpus(
            teacher,
            corpus,
            out,
            settings=settings,
            text_field=text_field or "text",
            format=(format_ or Format.auto).value,
            split=(split or Split.none).value,
            limit_documents=limit_documents,
            revision=revision,
            trust_remote_code=trust_remote_code,
            share=None if share is None else Share.parse(share),
            cluster=cluster,
            server=weights_at,
            on_progress=on_progress,
        )
    if os.environ.get("RANK", "0") != "0":
        return
    summary = dataclasses.replace(summary, times=summary.times.with_earlier(imported))
    if as_json:
        values = dataclasses.asdict(summary) | {"tokens_per_second": summary.tokens_per_second}
        typer.echo(json.dumps(values, ensure_ascii=False, indent=2))
    else:
        _print(summary)
    warning = teacher_warning(summary.store["bits_per_byte"], student_bits)
    if warning is not None:
        typer.echo(f"warning: {warning}", err=True)


def _shards(text: str) -> "int | Literal['auto']":
    if text == "auto":
        return "auto"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--shard-teacher {text}: expected a number of GPUs, or auto.")


@contextlib.contextmanager
def _progress_bar() -> Iterator["Callable[[Progress], None] | None"]:
    if os.environ.get("RANK", "0") != "0":
        yield None
        return
    with progress("scoring") as meter:

        def on_progress(now: "Progress") -> None:
            done, total = now.documents, now.total_documents
            shown = f"{int(done):,}/{total:,} documents"
            if now.workers is not None:
                shown = f"{now.shards:,}/{now.total_shards:,} shards, {now.workers} workers"
            meter.note(done, total, shown, now.tokens)

        yield on_progress


def _print(summary: "ScoreSummary") -> None:
    store = summary.store
    for damage in summary.mended:
        typer.echo(f"scored again: {damage}")
    for note in summary.notes:
        typer.echo(note)
    whole = store["complete"] and not summary.missing_shards
    if summary.scored_shards == 0 and whole:
        typer.echo(f"{store['path']} is complete already; nothing to do.")
    else:
        rate = summary.tokens_per_second or 0.0
        resumed = f", {summary.found_shards} were there" if summary.found_shards else ""
        typer.echo(
            f"{store['path']}: {summary.scored_shards} shards scored{resumed}; "
            f"{summary.tokens:,} tokens in {summary.seconds:,.1f} s, {rate:,.0f} tokens/s"
        )
        typer.echo(str(summary.times))
    if not whole:
        typer.echo(_what_is_missing(summary))
        return
    bits = store["bits_per_byte"]
    typer.echo(
        f"{store['documents']:,} documents, {store['tokens']:,} teacher tokens, "
        f"{store['bytes']:,} bytes of text; "
        + (f"{bits:.4f} bits per byte; " if bits is not None else "")
        + f"{store['bytes_per_token']:.2f} bytes a token on disk"
    )
    if "alternatives" in store:
        typer.echo(alternatives_line(store["alternatives"]))
    if store["nonfinite"]:
        typer.echo(f"NaN or infinity from the teacher: {store['nonfinite']:,} tokens, masked")
    if store["skipped"]:
        from vocagnolm.data.corpus import LeftOut

        places = store["skipped_documents"]
        for line in LeftOut(store["skipped"], store["skipped_reasons"], places).lines():
            typer.echo(line)
        typer.echo(f"  all of them: vocagnolm store inspect {store['path']} --json")


def alternatives_line(about: dict[str, Any]) -> str:
    """What a store with alternatives holds of the teacher's distribution."""
    if about["sampled"]:
        return f"{about['count']} alternatives a token, drawn from the teacher's distribution"
    mass, hits = about["mass"], about["hits"]
    return (
        f"{about['count']} alternatives a token: they cover {sum(mass):.1%} of the teacher's "
        f"probability (the first {mass[0]:.1%}), and the token that follows is among them in "
        f"{sum(hits):.1%} of the places (first in {hits[0]:.1%})"
    )


def _what_is_missing(summary: "ScoreSummary") -> str:
    missing, store = summary.missing_shards, summary.store
    if not missing:
        return (
            "Every shard is scored; the manifest is left to a process that is still at work on the "
            "store. Should it die, run any share again, or `score` without --share."
        )
    return (
        f"NOT COMPLETE: {len(missing):,} of {store['shards_expected']:,} shards are missing (the "
        f"first is {missing[0]}), of the shares {', '.join(summary.missing_shares)}. Run those "
        "that are not running, or `score` without --share, which scores what is missing."
    )
