"""`vocagnolm score`: a teacher reads a corpus once and leaves a loss store."""

import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from vocagnolm.cli.common import (
    Meter,
    leading,
    print_json,
    progress,
    quiet_libraries,
    what_is_missing,
)
from vocagnolm.cli.options import JSON, QUIET, Given, option, options, require_asked, with_options
from vocagnolm.cli.store import print_store
from vocagnolm.errors import UsageError
from vocagnolm.recipe.sections import (
    CorpusSection,
    EngineSection,
    RaySection,
    ScoreSection,
    ServerSection,
    TeacherSection,
)

if TYPE_CHECKING:
    from vocagnolm.jobs.job import Progress
    from vocagnolm.score import ScoreSummary


DEFAULT_ALTERNATIVES = 4
"""The number that is kept for a recipe that distils."""


@with_options
def score(
    recipe: str | None = typer.Option(
        None, help="Take teacher, corpus and --out from this recipe unless they are given."
    ),
    teacher: str | None = option(TeacherSection, "model", "--teacher"),
    corpus: list[str] = option(CorpusSection, "files"),
    out: str | None = typer.Option(
        None, help="The loss store: a folder, or an address (s3://, gs://, az://)."
    ),
    reading: Given = options(
        *(CorpusSection, "text_field", "format", "split", "limit_documents"), recipe_key="corpus"
    ),
    settings: Given = options(ScoreSection),
    share: str | None = typer.Option(
        None,
        help="I/N: score one share of the shards, for independent machines (an array job), then "
        "help shares that have begun; the last one completes the store.",
    ),
    ray: str | None = typer.Option(
        None,
        metavar="[ADDRESS]",
        help="Score on a Ray cluster: auto or HOST:PORT; without an address, on this machine. One "
        "worker per GPU, or per --threads CPUs; dead workers are replaced.",
    ),
    ray_settings: Given = options(RaySection),
    server: list[str] = typer.Option(
        [],
        metavar="URL",
        help="A vLLM or SGLang server that runs the teacher; --teacher provides the tokenizer. "
        "Its API key is read from VOCAGNOLM_SERVER_KEY, or OPENAI_API_KEY. Can be repeated: "
        "requests go to the server that is free.",
    ),
    server_settings: Given = options(ServerSection),
    loading: Given = options(EngineSection, "revision", "trust_remote_code"),
    student_bits: float | None = typer.Option(
        None,
        help="The student's bits per byte on this text (`vocagnolm evaluate --text`); used to warn "
        "about a teacher that is not clearly better.",
    ),
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Score a corpus with a teacher once, for any number of students.

    Run the same command again to resume, or to confirm completion. To use several GPUs:
    torchrun --nproc_per_node N -m vocagnolm score ...; several machines: --share 1/N ... N/N, or
    --ray.
    """
    began = time.perf_counter()
    if recipe is not None:
        from vocagnolm.recipe import load_recipe

        given = load_recipe(recipe)
        if teacher is None:
            teacher = given.teacher.model
            loading = {"revision": given.teacher.revision, **loading}
            settings = {"chat_template": given.teacher.chat_template, **settings}
            variables = {**given.teacher.template_options, **settings.get("template_options", {})}
            settings["template_options"] = variables
        if given.corpora and not (corpus and out):
            raise UsageError(
                f"{recipe} names several corpora: score them one by one, with --corpus and --out."
            )
        if not corpus:
            corpus = given.corpus.files
            fields = ("text_field", "format", "split", "limit_documents")
            reading = {name: getattr(given.corpus, name) for name in fields} | reading
        if out is None and len(given.stores) > 1:
            raise UsageError(f"{recipe} names several stores: choose one with --out.")
        if out is None and given.stores:
            out = given.stores[0]
        if given.method.alternatives:
            kept = given.objective.alternatives or DEFAULT_ALTERNATIVES
            settings = {"alternatives": kept, **settings}
    require_asked("server", server, server_settings, "with --teacher")
    missing = {"--teacher": teacher, "--corpus": corpus, "--out": out}
    if lacking := [name for name, value in missing.items() if not value]:
        where = f"; the recipe {recipe} does not say either" if recipe else ", or --recipe"
        raise UsageError(f"score needs {', '.join(lacking)}{where}.")
    assert teacher is not None and out is not None
    require_asked("ray", ray, ray_settings)

    from vocagnolm.score import RayCluster, ScoreSettings, Server, Share, score_corpus
    from vocagnolm.train.strength import teacher_warning

    with quiet_libraries(), progress("scoring", quiet=quiet) as meter:
        imported = time.perf_counter() - began
        summary = score_corpus(
            teacher,
            corpus,
            out,
            settings=ScoreSettings(**settings),
            **reading,
            **loading,
            share=None if share is None else Share.parse(share),
            cluster=None if ray is None else RayCluster(address=ray or None, **ray_settings),
            server=Server(url=server, **server_settings) if server else None,
            on_progress=partial(_note, meter),
        )
    if not leading():
        return
    summary = replace(summary, times=summary.times.with_earlier(imported))
    if as_json:
        print_json(asdict(summary) | {"tokens_per_second": summary.tokens_per_second})
    else:
        _print(summary)
    warning = teacher_warning(summary.store["bits_per_byte"], student_bits)
    if warning is not None:
        typer.echo(f"warning: {warning}", err=True)


def _note(meter: Meter, now: "Progress") -> None:
    done, total = now.documents, now.total_documents
    shown = f"{int(done):,}/{total:,} documents"
    if now.workers is not None:
        shown = f"{now.shards:,}/{now.total_shards:,} shards, {now.workers} workers"
    meter.note(done, total, shown, now.tokens)


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
        typer.echo(what_is_missing("score", summary, store["shards_expected"]))
        return
    print_store(store)
    if store["skipped"]:
        from vocagnolm.data.corpus import LeftOut

        documents = store["skipped_documents"]
        for line in LeftOut(store["skipped"], store["skipped_reasons"], documents).lines():
            typer.echo(line)
        typer.echo(f"  all of them: vocagnolm store inspect {store['path']} --json")
