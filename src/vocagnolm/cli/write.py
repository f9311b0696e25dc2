"""`vocagnolm write`: a teacher answers prompts and leaves a corpus with its loss store."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

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
from vocagnolm.cli.store import template_of_store
from vocagnolm.errors import UsageError
from vocagnolm.recipe.schema import hints
from vocagnolm.recipe.sections import (
    EngineSection,
    PromptsSection,
    QuestionsSection,
    RaySection,
    ServerSection,
    SpendingSection,
    TeacherSection,
    WriteSection,
)

if TYPE_CHECKING:
    from vocagnolm.jobs.job import Progress
    from vocagnolm.score import WritePreview, WriteSummary

_READING = [name for name in hints(PromptsSection) if name != "files"]


@with_options
def write(
    teacher: str | None = option(TeacherSection, "model", "--teacher"),
    prompts: list[str] = option(PromptsSection, "files", default=...),
    out: str = typer.Option(..., help="The folder to write, or an address (s3://, gs://, az://)."),
    reading: Given = options(PromptsSection, *_READING),
    benchmarks: Given = options(QuestionsSection, "benchmarks"),
    settings: Given = options(WriteSection),
    share: str | None = typer.Option(
        None,
        help="I/N: write one share of the shards, for independent machines (an array job), then "
        "help shares that have begun; the last one completes the folder.",
    ),
    ray: str | None = typer.Option(
        None,
        metavar="[ADDRESS]",
        help="Write on a Ray cluster: auto or HOST:PORT; without an address, on this machine. One "
        "worker per GPU, or per --threads CPUs; dead workers are replaced.",
    ),
    ray_settings: Given = options(RaySection),
    server: list[str] = typer.Option(
        [],
        metavar="URL",
        help="A server that runs the teacher. With --teacher, which provides the tokenizer, a vLLM "
        "or SGLang server; alone any chat endpoint such as OpenAI's. Its API key is read from "
        "VOCAGNOLM_SERVER_KEY, or OPENAI_API_KEY. Can be repeated: requests go to the server that "
        "is free.",
    ),
    server_settings: Given = options(ServerSection),
    spending: Given = options(SpendingSection),
    loading: Given = options(EngineSection, "revision", "trust_remote_code"),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Write nothing: show three prompts as the teacher reads them, and count prompts, "
        "answers, tokens, disk space and, where a server has a price, money.",
    ),
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Let a teacher answer prompts, and keep what it found likely at every token.

    The folder is a corpus of conversations and the loss store over them: a recipe takes it as
    corpus.files and as store.path. Run the same command again to resume, or to confirm completion.
    To use several GPUs: torchrun --nproc_per_node N -m vocagnolm write ...; several machines:
    --share 1/N ... N/N, or --ray.
    """
    require_asked("ray", ray, ray_settings)
    require_asked("server", server, server_settings, "with --teacher")
    if spending and not server:
        name = next(iter(spending)).replace("_", "-")
        raise UsageError(f"--{name} can only be used with --server.")
    if benchmarks and not reading.get("without"):
        raise UsageError("--benchmarks can only be used with --without.")

    from vocagnolm.score import (
        RayCluster,
        Server,
        Share,
        Spending,
        WriteSettings,
        preview_answers,
        write_answers,
    )

    asked: dict[str, Any] = {**reading, **benchmarks, **loading}
    asked["settings"] = WriteSettings(**settings)
    asked["server"] = Server(url=server, **server_settings) if server else None
    asked["spending"] = Spending(**spending)
    if dry_run:
        with quiet_libraries():
            preview = preview_answers(teacher, prompts, **asked)
        if as_json:
            print_json(asdict(preview))
        else:
            _print_preview(preview)
        return
    with quiet_libraries(), progress("writing", quiet=quiet) as meter:
        summary = write_answers(
            teacher,
            prompts,
            out,
            **asked,
            share=None if share is None else Share.parse(share),
            cluster=None if ray is None else RayCluster(address=ray or None, **ray_settings),
            on_progress=partial(_note, meter),
        )
    if not leading():
        return
    if as_json:
        print_json(asdict(summary) | {"tokens_per_second": summary.tokens_per_second})
    else:
        _print(summary)


def _note(meter: Meter, now: "Progress") -> None:
    shown = [f"{int(now.documents):,}/{now.total_documents:,} answers"]
    rate = None if meter.speed is None else meter.speed.done_rate
    if rate is not None:
        shown.append(f"{rate:,.3g}/s")
    if now.workers is not None:
        shown.append(f"{now.shards:,}/{now.total_shards:,} shards, {now.workers} workers")
    for of, name in (("answers", "finished"), ("marked", "right")):
        if now.counts.get(of):
            shown.append(f"{now.counts.get(name, 0) / now.counts[of]:.0%} {name}")
    meter.note(now.documents, now.total_documents, ", ".join(shown), now.tokens)


def _print(summary: "WriteSummary") -> None:
    folder = summary.folder
    for damage in summary.mended:
        typer.echo(f"written again: {damage}")
    for note in summary.notes:
        typer.echo(note)
    whole = folder["complete"] and not summary.missing_shards
    if summary.written_shards == 0 and whole:
        typer.echo(f"{folder['path']} is complete already; nothing to do.")
    else:
        rate = summary.tokens_per_second or 0.0
        resumed = f", {summary.found_shards} were there" if summary.found_shards else ""
        typer.echo(
            f"{folder['path']}: {summary.written_shards} shards written{resumed}; "
            f"{summary.answers:,} answers, {summary.tokens:,} tokens in {summary.seconds:,.1f} s, "
            f"{rate:,.0f} tokens/s"
        )
    if not whole:
        typer.echo(what_is_missing("write", summary, folder["shards_expected"]))
        return
    for name, value in _rows(folder):
        typer.echo(f"{name:<14}{value}")


def _rows(folder: dict[str, Any]) -> list[tuple[str, str]]:
    """What a complete folder holds, by name."""
    from rich.filesize import decimal

    written, kept, left_out = folder["written"], folder["documents"], folder["skipped"]
    rows = [
        ("teacher", folder["teacher"]["name"]),
        ("template", template_of_store(folder) or ""),
        ("prompts", f"{written['prompts']:,}"),
        ("kept", f"{kept:,} of {kept + left_out:,} answers"),
    ]
    if left_out:
        reasons = sorted(folder["skipped_reasons"].items(), key=lambda entry: -entry[1])
        listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
        rows.append(("left out", f"{listed} (dropped/ holds their texts)"))
    if "right_answers" in written:
        marked, right = written["marked_answers"], written["right_answers"]
        asked, solved = written["marked_prompts"], written["solved_prompts"]
        rows.append(
            (
                "right",
                f"{right / max(marked, 1):.1%} of {marked:,} answers, at least one to "
                f"{solved / max(asked, 1):.1%} of {asked:,} prompts",
            )
        )
    if folder["mean_nll"] is not None:
        losses = (
            f"{folder['mean_nll']:.3f} nats per token, {folder['bits_per_byte']:.3f} bits per byte"
        )
        rows.append(("its losses", f"{losses} over {folder['scored_tokens']:,} tokens"))
    if "alternatives" in folder:
        alternatives = folder["alternatives"]
        covered = f"{sum(alternatives['mass']):.1%} of the probability"
        rows.append(("alternatives", f"{alternatives['count']} per token, {covered}"))
    path = folder["path"]
    rows.append(("folder", f"{path}, {decimal(folder['file_bytes'])}"))
    rows.append(("next", f"vocagnolm recipe new --from {path} --student S --out recipe.yaml"))
    return rows


def _print_preview(preview: "WritePreview") -> None:
    from rich.filesize import decimal

    for number, text in enumerate(preview.shown, start=1):
        typer.echo(f"---- prompt {number}, as {preview.teacher} reads it ----\n{text}")
    typer.echo("----")
    rows = [("prompts", f"{preview.prompts:,}, of which {preview.asked:,} can be asked")]
    rows += [("", f"{count:,} left out: {reason}") for reason, count in preview.left_out.items()]
    counted = (
        "" if preview.counted == preview.asked else f" (of {preview.counted:,} that were read)"
    )
    rows += [
        ("", f"{count:,} that the teacher cannot read{counted}: {reason}")
        for reason, count in preview.unreadable.items()
    ]
    rows += [
        ("answers", f"{preview.answers:,} in {preview.shards:,} shards"),
        ("prompt tokens", f"{preview.prompt_tokens:,}{counted and ', estimated' + counted}"),
        ("new tokens", f"at most {preview.most_new_tokens:,}"),
        ("disk", f"at most about {decimal(preview.most_bytes)}"),
    ]
    if preview.requests is not None:
        rows.append(("requests", f"{preview.requests:,}"))
    if preview.most_money is not None:
        rows.append(("price", f"at most {preview.most_money:,.2f}"))
    for name, value in rows:
        typer.echo(f"{name:<14}{value}")
    typer.echo("Nothing was written. The progress line shows tokens/s and the time left.")
