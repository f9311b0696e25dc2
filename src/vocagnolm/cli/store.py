"""`vocagnolm store`: what a loss store is, whether it is whole, and Parquet out of it."""

import contextlib
import itertools
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vocagnolm.cli.common import SPLIT_TEXTS, App, print_histogram, print_json, print_table
from vocagnolm.cli.options import JSON, STUDENT, Given, option, options, with_options
from vocagnolm.recipe.sections import CorpusSection, DataSection, ObjectiveSection, StudentSection

if TYPE_CHECKING:
    from vocagnolm.data.corpus import Corpus

app = App(help="Inspect, verify, compare and export loss stores.")

_STORE = typer.Argument(
    ..., help="The loss store: a folder, or an address (s3://, gs://, az://, hf://datasets/...)."
)
_READING = ("text_field", "format", "split")
_MOST_RANGES = 12
_EXCERPT = 60


class ExportFormat(StrEnum):
    parquet = "parquet"


@app.command("inspect", example="vocagnolm store inspect store")
def inspect_command(store: str = _STORE, as_json: bool = JSON) -> None:
    """Show the teacher, settings, size, mean nll, bits per byte and histogram of a store."""
    from vocagnolm.store import inspect_store

    about = inspect_store(store)
    if as_json:
        print_json(about)
    else:
        print_store(about)
        for problem in about["problems"]:
            typer.echo(f"problem: {problem}")
    if about["problems"]:
        raise typer.Exit(1)


@app.command("verify", example="vocagnolm store verify store")
def verify_command(store: str = _STORE, as_json: bool = JSON) -> None:
    """Read every byte and check checksums, gaps and duplicates. Exit code 1 on an error."""
    from vocagnolm.store import verify_store

    problems = verify_store(store)
    if as_json:
        print_json({"ok": not problems, "problems": problems})
    else:
        for problem in problems:
            typer.echo(problem)
        typer.echo(
            f"{store}: {len(problems)} problems. The command that made it, run again, makes "
            "damaged shards again."
            if problems
            else f"{store}: every checksum matches, no gap, no duplicate."
        )
    if problems:
        raise typer.Exit(1)


@app.command("export", example="vocagnolm store export store --corpus corpus.jsonl")
@with_options
def export_command(
    store: str = _STORE,
    corpus: list[str] = option(
        *(CorpusSection, "files"),
        before="The corpus that was scored: also write every text and the bytes of its tokens. ",
    ),
    reading: Given = options(CorpusSection, *_READING, recipe_key="corpus"),
    out: Path | None = typer.Option(None, help="The Parquet file.", show_default="STORE.parquet"),
    format_: ExportFormat = typer.Option(
        ExportFormat.parquet, "--format", help="The file format; `datasets` can load it."
    ),
    as_json: bool = JSON,
) -> None:
    """Write the store as Parquet, one row per document, with its text if the corpus is given."""
    from vocagnolm.base.files import address_of
    from vocagnolm.data.corpus import open_corpus
    from vocagnolm.store import export_parquet

    address = store.rstrip("/")
    near = Path(address.rpartition("/")[2]) if address_of(address) else Path(address)
    target = out or near.with_name(near.name + ".parquet")
    texts = None
    if corpus:
        documents = open_corpus(corpus, **reading).read()
        texts = (document.text for document in documents if document.text is not None)
    rows = export_parquet(store, target, texts)
    if as_json:
        print_json({"file": str(target), "rows": rows})
    else:
        typer.echo(f"{target}: {rows:,} rows")


def export_columns(
    store: str = _STORE,
    student: str = STUDENT,
    out: Path = typer.Option(..., help="Output folder, for `datasets.load_from_disk`."),
    corpus: list[str] = option(
        CorpusSection,
        "files",
        before="The corpus that was scored; default: the files named in the store. ",
    ),
    reading: Given = options(CorpusSection, "text_field", recipe_key="corpus"),
    template: Given = options(StudentSection, "chat_template"),
    training: Given = options(DataSection, "train_on"),
    carrying: Given = options(ObjectiveSection, "aggregation"),
    workers: int | None = typer.Option(None, min=1, help="Number of processes."),
    as_json: bool = JSON,
) -> None:
    """Write a store's guidance as columns of a dataset, to train without this package.

    One row per document: input_ids, labels, guidance; with alternatives target_ids and target_p.
    """
    from vocagnolm.integrations.columns import export_columns as run

    found = run(
        store,
        student,
        out,
        corpus,
        reading=reading,
        num_proc=workers,
        **{**template, **training, **carrying},
    )
    columns = list(found.column_names)
    if as_json:
        print_json({"folder": str(out), "rows": len(found), "columns": columns})
    else:
        typer.echo(f"{out}: {len(found):,} rows of {', '.join(columns)}")


@app.command("card", example="vocagnolm store card store --out store")
def card_command(
    store: str = _STORE,
    licence: str | None = typer.Option(
        None, "--license", help="License identifier of the hub, for example cc-by-4.0 or odc-by."
    ),
    out: Path | None = typer.Option(
        None, help="Output file.", show_default="README.md in the store"
    ),
) -> None:
    """Write the store's dataset card, to publish it on the hub with `hf upload`."""
    from vocagnolm.base.files import write_text
    from vocagnolm.errors import UsageError
    from vocagnolm.storage import scheme_of, storage_of
    from vocagnolm.store.card import CARD, PARQUET_FOLDER, store_card
    from vocagnolm.store.reader import require_complete

    if out is None and scheme_of(store) == "hf":
        raise UsageError(f"{store} cannot be written: choose a file for the card with --out.")
    storage = storage_of(store)
    require_complete(storage)
    text = store_card(storage, licence)
    if out is None:
        storage.put(CARD, text.encode())
    else:
        write_text(out, text)
    typer.echo(f"wrote {out or storage.shown(CARD)}", err=True)
    if "viewer: false" in text:
        typer.echo(
            "for `datasets` and the hub's viewer, and then this command again: vocagnolm store "
            f"export {store} --out {store}/{PARQUET_FOLDER}/losses.parquet"
        )
    typer.echo(f"to publish it: hf upload OWNER/NAME {store} . --repo-type dataset")


@app.command("compare", example="vocagnolm store compare store-a store-b")
@with_options
def compare_command(
    stores: list[str] = typer.Argument(..., help="Two or more loss stores."),
    corpus: list[str] = option(
        CorpusSection,
        "files",
        before="The corpus they were made from: sources and texts are then named. ",
    ),
    reading: Given = options(CorpusSection, "text_field", recipe_key="corpus"),
    source_field: str | None = typer.Option(
        None, help="The field that names a document's source.", show_default="its file"
    ),
    limit_documents: int | None = typer.Option(
        None, min=1, help="Compare about this many documents, spread evenly."
    ),
    examples: int = typer.Option(12, min=0, help="Number of stretches of text to show."),
    plot: Path | None = typer.Option(
        None, help="Draw the documents' bits per byte into this PNG or SVG file."
    ),
    as_json: bool = JSON,
) -> None:
    """Compare several teachers: bits per byte, and the text on which they differ."""
    from vocagnolm.data.corpus import open_corpus
    from vocagnolm.data.teachers import compare_stores

    read = open_corpus(corpus, **reading) if corpus else None
    named = None
    if corpus and source_field:
        named = open_corpus(corpus, text_field=source_field, format="text")
    found = compare_stores(stores, read, sources=named, limit=limit_documents, examples=examples)
    if plot is not None:
        from vocagnolm.base.plots import document_scatter

        document_scatter(found, plot)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        print_json(found)
    else:
        _print_comparison(found)


@app.command("rank", example="vocagnolm store rank store --against reference-store")
@with_options
def rank_command(
    store: str = _STORE,
    corpus: list[str] = option(
        *(CorpusSection, "files"),
        before="The corpus that was scored: show how each document begins. ",
    ),
    reading: Given = options(CorpusSection, *_READING, recipe_key="corpus"),
    against: str | None = typer.Option(
        None, help="The store of a small reference model, or of the student, for the same corpus."
    ),
    out: Path | None = typer.Option(None, help="Write one row per document to this Parquet file."),
    top: int = typer.Option(5, min=0, help="Number of documents to show at either end."),
    as_json: bool = JSON,
) -> None:
    """Rank documents by the teacher's bits per byte, or by its gain over a reference model."""
    from vocagnolm.store.analysis import rank_documents
    from vocagnolm.store.export import export_ranks

    ranks = rank_documents(store, against)
    if out is not None:
        export_ranks(ranks, out)
        typer.echo(f"wrote {out}", err=True)
    ends = [*ranks.rows(0, top), *ranks.rows(max(top, len(ranks) - top), len(ranks))]
    if corpus:
        from vocagnolm.data.corpus import open_corpus

        _add_excerpts(ends, open_corpus(corpus, **reading))
    if as_json:
        print_json({"documents": len(ranks), "by": ranks.by, "shown": ends})
    else:
        names = ["rank", "document", "bytes", "bits_per_byte"]
        names += ["difference"] if ranks.by == "difference" else []
        names += ["text"] if corpus else []
        columns = [name.replace("_", " ") for name in names]
        print_table(f"by {ranks.by}", columns, ([row[name] for name in names] for row in ends))


def _add_excerpts(rows: list[dict[str, Any]], corpus: "Corpus") -> None:
    """Give each row the beginning of its document. The length says whether it is that document."""
    from vocagnolm.errors import CorpusError

    for row in rows:
        texts = [document.text for document in corpus.read(row["document"], row["document"] + 1)]
        text = texts[0] if texts else None
        if text is None or len(text.encode()) != row["bytes"]:
            raise CorpusError(
                f"document {row['document']} of the corpus is not the one that was scored. Give "
                "the corpus that the store was made from."
            )
        row["text"] = " ".join(text[: 2 * _EXCERPT].split())[:_EXCERPT].rstrip()


# A teacher of one's own (`vocagnolm.score.Teacher`) may say less about itself.
_STATED = {
    "teacher": "{teacher[name]}",
    "architecture": "{teacher[architecture]}",
    "tokenizer": "{tokenizer[kind]}, {tokenizer[vocabulary_size]:,}",
    "scoring": "{scoring[dtype]} on {scoring[device]}, context {scoring[context]}, stride "
    "{scoring[stride]}, {scoring[batch_plan][batch_tokens]:,} tokens a batch",
    "server": "{server[engine]} {server[version]}, model {server[model]}, context "
    "{scoring[context]}, stride {scoring[stride]}",
    "corpus": "{corpus[documents]:,} documents",
}
_STATED_OF_WRITTEN = {
    **_STATED,
    "scoring": "",
    "writing": "{writing[dtype]} on {writing[device]}, temperature {writing[temperature]:g}, top-p "
    "{writing[top_p]:g}, at most {writing[max_new_tokens]:,} new tokens, seed {writing[seed]}",
    "corpus": "{writing[samples]:,} answers to each of {corpus[prompts]:,} prompts",
}


def print_store(about: dict[str, Any]) -> None:
    """Print a store, for `inspect` and at the end of `score`."""
    state = "complete" if about["complete"] else "NOT COMPLETE"
    written = "writing" in about
    rows = [("store", f"{about['path']} ({state}, format {about['format_version']})")]
    for name, template in (_STATED_OF_WRITTEN if written else _STATED).items():
        with contextlib.suppress(KeyError):
            rows += [(name, template.format(**about))] if template else []
    if (read_in := template_of_store(about)) is not None:
        rows.append(("template", read_in))
    rows += [
        ("shards", _shards(about)),
        ("documents", f"{about['documents']:,} scored, {about['skipped']:,} skipped"),
        ("text", f"{about['bytes']:,} bytes"),
    ]
    if isinstance(corpus := about.get("corpus"), dict) and "split_texts" in corpus:
        rows.append(("", f"{corpus['split_texts']:,} {SPLIT_TEXTS}"))
    if written:
        rows.append(("tokens", f"{about['scored_tokens']:,} written, with losses"))
    else:
        masked = f"{about['tokens']:,}, {about['nonfinite']:,} masked as NaN or infinite"
        rows.append(("tokens", masked))
    if about["devices"]:
        named = (f"{name} ({count:,} shards)" for name, count in about["devices"].items())
        rows.append(("written on" if written else "scored on", ", ".join(named)))
    if about["bytes_per_token"] is not None:
        on_disk = f"{about['file_bytes']:,} bytes, {about['bytes_per_token']:.2f} per token"
        rows.append(("on disk", on_disk))
    if about["mean_nll"] is not None:
        rows.append(("mean nll", f"{about['mean_nll']:.4f} nats per token"))
        rows.append(("bits per byte", f"{about['bits_per_byte']:.4f}"))
    rows.append(("verified", about["verified"]))
    rows += [("", f"{count:,} skipped: {why}") for why, count in about["skipped_reasons"].items()]
    kept = about.get("alternatives")
    if kept is not None:
        kind = "sampled from the distribution" if kept["sampled"] else "most likely first"
        rows.append(("alternatives", f"{kept['count']} per token, {kind}"))
    for name, value in rows:
        typer.echo(f"{name:<14}{value}")
    if kept is not None and not kept["sampled"]:
        ranks = zip(kept["mass"], itertools.accumulate(kept["mass"]), kept["hits"], strict=True)
        cells = ([n, *(f"{share:.2%}" for share in row)] for n, row in enumerate(ranks, 1))
        columns = ("rank", "probability", "so far", "is the token that follows")
        print_table("alternatives", columns, cells)
    print_histogram(about["histogram"]["counts"], about["histogram"]["step_nats"], 13)


def template_of_store(about: dict[str, Any]) -> str | None:
    """The template in which the teacher read conversations, in words; None for texts."""
    from vocagnolm.chat.survey import template_words

    if "writing" in about:
        writing = about["writing"]
        if "template" not in writing:
            return "that of the server"
        if (read_in := writing["template"]) is None:
            return "none: the teacher went on with the prompts as they stand"
    elif (read_in := about.get("template")) is None:
        return None
    shown = ", ".join(f"{name}={value}" for name, value in read_in["options"].items())
    return template_words(read_in["origin"]) + (f" ({shown})" if shown else "")


def _shards(about: dict[str, Any]) -> str:
    """How far a store is that grows."""
    done, expected, missing = about["shards"], about["shards_expected"], about["missing_shards"]
    if not missing:
        return f"{done:,} of {expected:,}"
    ranges = [f"{first}" if first == last else f"{first}-{last}" for first, last in missing]
    listed = ", ".join([*ranges[:_MOST_RANGES], *(["..."] if len(ranges) > _MOST_RANGES else [])])
    return f"{done:,} of {expected:,}, {done / expected:.1%}; missing: {listed}"


def _print_comparison(found: dict[str, Any]) -> None:
    teachers = []
    for store in found["stores"]:
        apart = "" if store["apart_share"] is None else f"{store['apart_share']:.1%}"
        best = f"{store['best_share']:.1%}"
        teachers.append([store["teacher"], store["bits_per_byte"], best, apart])
    columns = ("teacher", "bits per byte", "best on", "tokens more than a nat from the first")
    print_table(f"{found['documents']:,} documents in all of them", columns, teachers)
    names = [store["teacher"] for store in found["stores"]]
    if len(found["sources"]) > 1:
        sources = ([s["name"], s["documents"], *s["bits_per_byte"]] for s in found["sources"])
        print_table("bits per byte", ("source", "documents", *names), sources)
    stretches = []
    for row in found["stretches"]:
        text = f"bytes {row['bytes'][0]}-{row['bytes'][1]}"
        if row["text"] is not None:
            text = json.dumps(row["text"], ensure_ascii=False)
        stretches.append([text[:60], row["document"], *row["nats"]])
    if stretches:
        print_table("furthest apart, nats", ("text", "document", *names), stretches)
