"""`vocagnolm prepare`: corpus + loss store + student tokenizer -> packed blocks.

The corpus is cut into parts of `part_documents` documents, so any number of workers gives the
same files. A part appears by rename when it is complete and the manifest
comes last: kill it at any moment and run it again.
"""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.align import TextTokenizer
from vocagnolm.data.blocks import FORMAT_VERSION, MANIFEST, read_manifest
from vocagnolm.data.corpus import Corpus, open_corpus
from vocagnolm.data.packing import PackingSummary
from vocagnolm.data.part import (
    NumberedText,
    PartMaker,
    PartPlan,
    finished_part,
    part_name,
    summarise,
)
from vocagnolm.data.separators import open_tokenizer, separator_ids
from vocagnolm.errors import BlocksError
from vocagnolm.recipe import Recipe, StoreSection
from vocagnolm.store import LossStore
from vocagnolm.store.format import identity_digest, open_shard

SETTINGS = "settings.json"
Progress = Callable[[PackingSummary, float], None]
"""Called with the summary of each finished part and the share of the parts that are done."""


def prepare(
    recipe: Recipe, *, workers: int = 1, progress: Progress | None = None
) -> dict[str, Any]:
    """Make the blocks of a recipe, or what is missing of them. Returns the manifest.

    With `workers` > 1 documents are tokenised in as many processes; with 1 the tokenizer's own
    threads are used.
    """
    folder = blocks_folder(recipe)
    corpus = recipe_corpus(recipe)
    tokenizer = student_tokenizer(recipe)
    settings = block_settings(recipe, tokenizer, corpus)
    manifest_path = folder / MANIFEST
    if manifest_path.is_file():
        manifest = read_manifest(folder)
        _refuse(folder, unmet_needs(manifest["settings"], recipe, settings))
        return manifest
    _claim(folder, settings)
    plan = _plan(recipe, tokenizer, settings)
    entries = _make_parts(corpus, recipe.data.part_documents, folder, plan, workers, progress)
    corpus.require_unchanged()
    summary = summarise(entries)
    if summary.tokens == 0:
        raise BlocksError(f"The corpus gave no tokens: {', '.join(recipe.corpus.files)}.")
    manifest = {
        "format_version": FORMAT_VERSION,
        "settings": settings,
        "fingerprint": _digest(settings),
        "tokens": summary.tokens,
        "columns": _columns(settings),
        "teacher": _teacher_name(recipe),
        "summary": summary.to_dict(),
        "parts": [{"name": entry["name"], "tokens": entry["tokens"]} for entry in entries],
    }
    _write_json(manifest_path, manifest)
    return manifest


def blocks_folder(recipe: Recipe) -> Path:
    if not recipe.data.blocks:
        raise BlocksError("The recipe does not say where the blocks go: set data.blocks.")
    return Path(recipe.data.blocks)


def student_tokenizer(recipe: Recipe) -> TextTokenizer:
    if not recipe.student_tokenizer:
        raise BlocksError(
            "The recipe names no student tokenizer: set student.tokenizer (or student.model)."
        )
    return open_tokenizer(recipe.student_tokenizer)


def recipe_corpus(recipe: Recipe) -> Corpus:
    if not recipe.corpus.files:
        raise BlocksError("The recipe names no corpus: set corpus.files.")
    return open_corpus(
        recipe.corpus.files,
        text_field=recipe.corpus.text_field,
        limit=recipe.corpus.limit_documents,
    )


def block_settings(
    recipe: Recipe, tokenizer: TextTokenizer, corpus: Corpus | None
) -> dict[str, Any]:
    """Everything that decides the parts, by name; compared on resume and by `train`. The block
    size is not among them: blocks are cut when they are read. Without a corpus (`train` does not
    need one) its fingerprint is None."""
    assert recipe.student_tokenizer is not None
    bos, eos = separator_ids(tokenizer, recipe.student_tokenizer, recipe.data.bos, recipe.data.eos)
    extra = recipe.data.extra_columns
    settings: dict[str, Any] = {
        "tokenizer": tokenizer.fingerprint,
        "bos": bos,
        "eos": eos,
        "corpus": None if corpus is None else corpus.fingerprint,
        "part_documents": recipe.data.part_documents,
        "text": recipe.needs_block_text or "text" in extra,
        "guidance": None,
    }
    if recipe.store.path is not None:
        settings["guidance"] = {
            "store": store_identity(recipe.store.path),
            **_guidance_settings(recipe),
        }
    return settings


def unmet_needs(found: dict[str, Any], recipe: Recipe, wanted: dict[str, Any]) -> list[str]:
    """What blocks made with the settings `found` lack for this recipe. They may hold more than it
    needs, so that one preparation serves runs of several methods."""
    names = ["tokenizer", "bos", "eos", *(["corpus"] if wanted["corpus"] else [])]
    lines = [
        f"{name}: {found.get(name)!r} -> {wanted[name]!r}"
        for name in names
        if found.get(name) != wanted[name]
    ]
    if recipe.needs_block_text and not found.get("text"):
        lines.append("text: the online teacher reads the blocks' text, which was not kept")
    if recipe.needs_guidance and not recipe.teacher.online:
        has, wants = found.get("guidance") or {}, wanted["guidance"] or {}
        if not wants:
            lines.append("store: this recipe needs guidance, but store.path is not set")
        elif not has:
            lines.append("guidance: the blocks were made without a store")
        else:
            names = ["missing", *(["store"] if wants["store"] else [])]
            if recipe.needs_teacher_losses:
                if not has["teacher_losses"]:
                    lines.append("teacher_losses: method chunk needs them, they were not kept")
            else:
                names.append("aggregation")
            lines += [
                f"{name}: {has[name]!r} -> {wants[name]!r}"
                for name in names
                if has[name] != wants[name]
            ]
    return lines


def store_identity(path: str) -> str:
    """What the blocks remember of the store they were made with."""
    return identity_digest(LossStore.open(path).manifest["identity"])


def skipped_by_teacher(store: LossStore, corpus_fingerprint: str) -> frozenset[int]:
    """Documents of this very corpus that the teacher could not score. They are known to be
    missing, so they are left out without further ado."""
    corpus = store.manifest["identity"].get("corpus")
    if not isinstance(corpus, dict) or corpus.get("fingerprint") != corpus_fingerprint:
        return frozenset()
    return frozenset(
        int(entry["document"])
        for shard in store.manifest["shards"]
        if shard["skipped"]
        for entry in open_shard(store.path / shard["file"]).about["skipped"]
    )


def train_settings(recipe: Recipe, tokenizer: TextTokenizer) -> dict[str, Any]:
    """What `train` compares: blocks stand for themselves, so neither the corpus nor the store
    has to be on the machine that trains. A store that is there must be the right one."""
    gone = recipe.store.path is not None and not Path(recipe.store.path).exists()
    if not gone:
        return block_settings(recipe, tokenizer, None)
    settings = block_settings(replace(recipe, store=StoreSection()), tokenizer, None)
    settings["guidance"] = {**_guidance_settings(recipe), "store": None}
    return settings


def _guidance_settings(recipe: Recipe) -> dict[str, Any]:
    return {
        "aggregation": recipe.objective.aggregation,
        "missing": recipe.data.missing,
        "teacher_losses": recipe.needs_teacher_losses
        or "teacher_losses" in recipe.data.extra_columns,
    }


def settings_difference(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """`name: found -> wanted` for every setting that differs."""
    return [
        f"{name}: {found.get(name)!r} -> {wanted.get(name)!r}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]


def _teacher_name(recipe: Recipe) -> str | None:
    if recipe.store.path is None:
        return None
    teacher = LossStore.open(recipe.store.path).manifest["identity"].get("teacher", {})
    return str(teacher.get("name", "unknown")) if isinstance(teacher, dict) else str(teacher)


def _columns(settings: dict[str, Any]) -> list[str]:
    guidance = settings["guidance"]
    return [
        *("ids", "document_tokens", "document_index"),
        *(["guidance"] if guidance else []),
        *(["teacher_nll", "teacher_range"] if guidance and guidance["teacher_losses"] else []),
        *(["text", "spans"] if settings["text"] else []),
    ]


def _plan(recipe: Recipe, tokenizer: TextTokenizer, settings: dict[str, Any]) -> PartPlan:
    guidance = settings["guidance"]
    skipped: frozenset[int] = frozenset()
    if recipe.store.path is not None:
        skipped = skipped_by_teacher(LossStore.open(recipe.store.path), settings["corpus"])
    return PartPlan(
        tokenizer=tokenizer,
        store=recipe.store.path,
        bos=settings["bos"],
        eos=settings["eos"],
        wide_ids=max(tokenizer.vocabulary.values()) > np.iinfo(np.uint16).max,
        aggregation=recipe.objective.aggregation,
        missing=recipe.data.missing,
        skipped=skipped,
        keep_teacher=bool(guidance and guidance["teacher_losses"]),
        keep_text=settings["text"],
        identity=_digest(settings),
    )


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """The settings are written before the first part: a folder belongs to one recipe."""
    path = folder / SETTINGS
    if path.is_file():
        _refuse(folder, settings_difference(json.loads(path.read_text("utf-8")), settings))
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise BlocksError(
            f"{folder} is not empty and holds no blocks. Choose another folder for data.blocks."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(path, settings)


def _refuse(folder: Path, difference: list[str]) -> None:
    if difference:
        raise BlocksError(
            f"{folder} holds blocks that were made with other settings:\n  "
            + "\n  ".join(difference)
            + "\nChoose another folder for data.blocks, or give the settings back."
        )


def _make_parts(
    corpus: Corpus,
    part_documents: int,
    folder: Path,
    plan: PartPlan,
    workers: int,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """Entries of all parts, in the order of the corpus. Finished parts are not read again."""
    entries: dict[int, dict[str, Any]] = {}

    starts = range(0, len(corpus), part_documents)

    def note(number: int, entry: dict[str, Any]) -> None:
        entries[number] = entry
        if progress is not None:
            progress(PackingSummary(**entry["summary"]), len(entries) / len(starts))

    wanted = []
    for number, start in enumerate(starts):
        entry = finished_part(folder / part_name(number), plan.identity)
        if entry is None:
            wanted.append((number, start))
        else:
            note(number, entry)

    def documents(start: int) -> list[NumberedText]:
        return [(d.index, d.text) for d in corpus.read(start, start + part_documents)]

    if workers <= 1:
        maker = PartMaker(plan, folder)
        for number, start in wanted:
            note(number, maker.make(number, documents(start)))
    elif wanted:
        # spawn: forking after the tokenizer's threads have started can deadlock
        with ProcessPoolExecutor(
            min(workers, len(wanted)),
            get_context("spawn"),
            initializer=_start_worker,
            initargs=(plan, folder),
        ) as pool:
            waiting: dict[Future[dict[str, Any]], int] = {}
            for number, start in wanted:
                waiting[pool.submit(_make_in_worker, number, documents(start))] = number
                if len(waiting) >= 2 * workers:  # the reader must not run away with the memory
                    _collect(waiting, note)
            while waiting:
                _collect(waiting, note)
    return [entries[number] for number in sorted(entries)]


def _collect(
    waiting: dict[Future[dict[str, Any]], int], note: Callable[[int, dict[str, Any]], None]
) -> None:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        note(waiting.pop(future), future.result())


_maker: PartMaker | None = None


def _start_worker(plan: PartPlan, folder: Path) -> None:
    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    _maker = PartMaker(plan, folder)


def _make_in_worker(number: int, documents: list[NumberedText]) -> dict[str, Any]:
    assert _maker is not None
    return _maker.make(number, documents)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
