"""`vocagnolm prepare`: corpus + loss store + student tokenizer -> packed blocks.

The corpus is cut into parts of `part_documents` documents, so any number of workers gives the
same files. A part appears by rename when it is complete and the manifest
comes last: kill it at any moment and run it again.
"""

import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.alignment import TextTokenizer
from vocagnolm.data.block_copies import SETTINGS, making_folder, upload, uploaded
from vocagnolm.data.blocks import (
    FORMAT_VERSION,
    MANIFEST,
    damaged_parts,
    read_manifest,
)
from vocagnolm.data.corpus import Corpus
from vocagnolm.data.guidance import GuidancePlan
from vocagnolm.data.identity import (
    block_settings,
    blocks_place,
    described_inputs,
    recipe_corpus,
    separator_ids,
    student_chat,
    student_tokenizer,
    unmet_needs,
)
from vocagnolm.data.packing import PackingSummary
from vocagnolm.data.part import (
    NumberedText,
    PartMaker,
    PartPlan,
    finished_part,
    part_name,
    summarise,
)
from vocagnolm.data.targets import targets_plan
from vocagnolm.data.teachers import chosen_documents
from vocagnolm.errors import BlocksError, RecipeError
from vocagnolm.files import (
    LOCK_FILE,
    folder_lock,
    is_leftover,
    json_digest,
    read_json,
    remove,
    remove_leftovers,
    write_json,
)
from vocagnolm.recipe import Recipe
from vocagnolm.storage import Folder, Place
from vocagnolm.store import LossStore
from vocagnolm.workers import WorkerPool

Progress = Callable[[PackingSummary, float], None]
"""Called with the summary of each finished part and the share of the parts that are done."""


def prepare(
    recipe: Recipe, *, workers: int = 1, progress: Progress | None = None
) -> dict[str, Any]:
    """Make the blocks of a recipe, or what is missing or damaged of them. Returns the manifest.

    With `workers` > 1 documents are tokenised in as many processes; with 1 the tokenizer's own
    threads are used.
    """
    place = blocks_place(recipe)
    if problems := recipe.store_problems():
        raise RecipeError("\n".join(problems))
    corpus = recipe_corpus(recipe)
    tokenizer = student_tokenizer(recipe)
    if corpus.conversations:
        tokenizer = student_chat(recipe, tokenizer)
    settings = block_settings(recipe, tokenizer, corpus)
    folder = making_folder(recipe, place)
    if isinstance(place, Folder):
        return _prepare(recipe, folder, settings, tokenizer, corpus, workers, progress)
    manifest, whole = uploaded(place, settings)
    if manifest is not None:
        _refuse(place, unmet_needs(manifest, recipe, settings, corpus))
        if whole:
            return manifest
        _refuse_others_damage(place, manifest, settings, "parts are missing")
    manifest = _prepare(recipe, folder, settings, tokenizer, corpus, workers, progress)
    upload(recipe, folder, place, manifest)
    return manifest


def _prepare(
    recipe: Recipe,
    folder: Path,
    settings: dict[str, Any],
    tokenizer: TextTokenizer,
    corpus: Corpus,
    workers: int,
    progress: Progress | None,
) -> dict[str, Any]:
    _refuse_strangers(folder)
    with folder_lock(folder, "Wait for it to end, or choose another data.blocks."):
        manifest = _finished(folder, recipe, settings, corpus)
        if manifest is not None:
            return manifest
        _claim(folder, settings)
        plan = _plan(recipe, tokenizer, settings)
        entries = _make_parts(corpus, recipe.data.part_documents, folder, plan, workers, progress)
        corpus.require_unchanged()
        summary = summarise(entries)
        if summary.tokens == 0 or summary.trained == 0:
            raise BlocksError(_nothing(recipe, summary))
        parts = [
            {name: entry[name] for name in ("name", "tokens", "bytes", "sha256")}
            for entry in entries
        ]
        manifest = {
            "format_version": FORMAT_VERSION,
            "settings": settings,
            "inputs": described_inputs(recipe, tokenizer, corpus),
            "fingerprint": json_digest([settings, [part["sha256"] for part in parts]]),
            "tokens": summary.tokens,
            "columns": _columns(settings),
            "teacher": _teacher_name(recipe),
            "summary": summary.to_dict(),
            "parts": parts,
        }
        write_json(folder / MANIFEST, manifest)
        remove_leftovers(folder)
        return manifest


def _nothing(recipe: Recipe, summary: PackingSummary) -> str:
    files = ", ".join(recipe.corpus.files)
    if summary.refused:
        reason, count = max(summary.refused.items(), key=lambda entry: entry[1])
        return f"The student's template refuses the conversations of {files}: {count:,} x {reason}."
    if summary.tokens:
        return (
            f"{files} holds nothing to train on: no conversation has a message of data.train_on = "
            f"{recipe.data.train_on}."
        )
    return f"The corpus gave no tokens: {files}."


def _finished(
    folder: Path, recipe: Recipe, settings: dict[str, Any], corpus: Corpus
) -> dict[str, Any] | None:
    """The manifest of blocks that serve this recipe and are whole. Parts that are damaged or lost
    are made again, which takes the very settings they were made with."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(folder)
    except BlocksError:
        if (folder / SETTINGS).is_file():
            return None  # ours, and the manifest can be made again from the parts
        raise
    _refuse(folder, unmet_needs(manifest, recipe, settings, corpus))
    damaged = damaged_parts(folder, manifest)
    if not damaged:
        return manifest
    _refuse_others_damage(folder, manifest, settings, damaged[0])
    for line in damaged:
        remove(folder / line.partition(":")[0])
    return None


def _refuse_others_damage(
    place: Path | Place, manifest: dict[str, Any], settings: dict[str, Any], damage: str
) -> None:
    if manifest["settings"] != settings:
        raise BlocksError(
            f"{place} is damaged ({damage}), and this recipe did not make it. Run "
            "`vocagnolm prepare` with the recipe that did."
        )


def skipped_by_teacher(store: LossStore, corpus_fingerprint: str) -> frozenset[int]:
    """Documents of this very corpus that the teacher could not score. They are known to be
    missing, so they are left out without further ado."""
    if not store.made_from(corpus_fingerprint):
        return frozenset()
    return frozenset(int(entry["document"]) for entry in store.skipped())


def _teacher_name(recipe: Recipe) -> str | None:
    names = [LossStore.open(path).teacher_name for path in recipe.stores]
    return ", ".join(names) or None


def _columns(settings: dict[str, Any]) -> list[str]:
    guidance = settings["guidance"]
    return [
        *("ids", "document_tokens", "document_index"),
        *(["guidance"] if guidance else []),
        *(["stretch"] if guidance and guidance.get("stretch") else []),
        *(["target_ids", "target_p"] if guidance and guidance.get("targets") else []),
        *(["teacher_nll", "teacher_range"] if guidance and guidance["teacher_losses"] else []),
        *(["text", "spans"] if settings["text"] else []),
        *(["trained", "first_trained"] if settings.get("conversations") else []),
    ]


def _plan(recipe: Recipe, tokenizer: TextTokenizer, settings: dict[str, Any]) -> PartPlan:
    guidance = settings["guidance"]
    stores = [LossStore.open(path) for path in recipe.stores]
    for store in stores:
        store.fetch()  # here, once: every worker reads all of it
    # known to be missing in all of them
    lost = [skipped_by_teacher(store, settings["corpus"]) for store in stores]
    return PartPlan(
        tokenizer=tokenizer,
        stores=tuple(recipe.stores),
        corpus=settings["corpus"],
        prefix=separator_ids(tokenizer, recipe.data.bos, recipe.data.eos)[0],
        eos=settings["eos"],
        wide_ids=max(tokenizer.vocabulary.values()) > np.iinfo(np.uint16).max,
        guidance=GuidancePlan(
            aggregation=recipe.objective.aggregation,
            combine=recipe.store.combine or "min",
            stretch=bool(guidance and guidance.get("stretch")),
            teacher_losses=bool(guidance and guidance["teacher_losses"]),
        ),
        missing=recipe.data.missing,
        skipped=frozenset.intersection(*lost) if lost else frozenset(),
        chosen=chosen_documents(recipe),
        keep_text=settings["text"],
        train_on=recipe.data.train_on,
        targets=targets_plan(
            stores,
            tokenizer,
            settings["eos"],
            count=recipe.objective.alternatives,
            inside=recipe.objective.inside,
            weights=recipe.store.weights,
        )
        if guidance and guidance.get("targets")
        else None,
        identity=json_digest(settings),
    )


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """The settings are written before the first part: a folder belongs to one recipe."""
    path = folder / SETTINGS
    if path.is_file():
        found = read_json(path, BlocksError, "Choose another folder for data.blocks.")
        _refuse(
            folder,
            [
                f"{name}: {found.get(name)!r:.50} -> {settings.get(name)!r:.50}"
                for name in sorted({*found, *settings})
                if found.get(name) != settings.get(name)
            ],
        )
        return
    write_json(path, settings)


def _refuse_strangers(folder: Path) -> None:
    if not folder.is_dir() or (folder / SETTINGS).is_file() or (folder / MANIFEST).is_file():
        return
    if any(p.name != LOCK_FILE and not is_leftover(p.name) for p in folder.iterdir()):
        raise BlocksError(
            f"{folder} is not empty and holds no blocks. Choose another folder for data.blocks."
        )


def _refuse(folder: Path | Place, difference: list[str]) -> None:
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
        with WorkerPool(min(workers, len(wanted)), _start_worker, plan, folder) as pool:
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
