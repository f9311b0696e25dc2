"""`vocagnolm prepare`: corpus + loss store + student tokenizer -> packed blocks.

The corpus is cut into parts of `part_documents` documents, so any number of workers gives the
same files. A part appears by rename when it is complete and the manifest comes last: kill it at any
moment and run it again. Blocks at an address are made in a folder of this machine and uploaded.
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vocagnolm import files
from vocagnolm.alignment import TextTokenizer, TokenSpans
from vocagnolm.chat import ChatTokenizer, trained_ranges
from vocagnolm.data.blocks import (
    FORMAT_VERSION,
    MANIFEST,
    block_count,
    cut_parts,
    damaged_parts,
    read_manifest,
    too_few_tokens,
)
from vocagnolm.data.corpus import Corpus, document_hash
from vocagnolm.data.guidance import GuidancePlan, TargetsPlan, common_alternatives, target_table
from vocagnolm.data.identity import (
    block_settings,
    blocks_cache,
    blocks_storage,
    described_inputs,
    differing_inputs,
    recipe_corpus,
    separator_ids,
    student_chat,
    student_tokenizer,
)
from vocagnolm.data.packing import PackingSummary, Part, pack_documents
from vocagnolm.data.teachers import Chosen, Lookup, chosen_documents
from vocagnolm.errors import BlocksError, RecipeError, VocagnolmWarning
from vocagnolm.recipe import Recipe
from vocagnolm.storage import Folder, Storage
from vocagnolm.storage.copies import tell
from vocagnolm.store import LossStore
from vocagnolm.workers import WorkerPool

Progress = Callable[[PackingSummary, float], None]
"""Called with the summary of each finished part and the share of the parts that are done."""
NumberedText = tuple[int, str | None]
"""A document's index in the corpus and its text; None where it cannot be used."""
Read = TypeVar("Read")

SETTINGS = "settings.json"
METADATA_KEY = "vocagnolm"
# Texts given to the tokenizer at once: enough to keep its threads busy, little enough that the
# encodings of a whole part never lie in memory together.
TOKENISE_BYTES = 1_000_000
# Guided training below this share of mapped tokens is hardly guided.
LEAST_MAPPED_SHARE = 0.5
_UPLOADS = 8


def prepare(
    recipe: Recipe, *, workers: int = 1, progress: Progress | None = None
) -> dict[str, Any]:
    """Make the blocks of a recipe, or what is missing or damaged of them. Returns the manifest.

    With `workers` > 1 documents are tokenised in as many processes; with 1 the tokenizer's own
    threads are used.
    """
    storage = blocks_storage(recipe)
    if problems := recipe.store_problems():
        raise RecipeError("\n".join(problems))
    corpus = recipe_corpus(recipe)
    tokenizer = student_tokenizer(recipe)
    if corpus.conversations:
        tokenizer = student_chat(recipe, tokenizer)
    settings = block_settings(recipe, tokenizer, corpus)
    _refuse_strangers(storage)

    def made_in(folder: Path) -> dict[str, Any]:
        with files.folder_lock(folder, "Wait for it to end, or choose another data.blocks."):
            manifest = _finished(Folder(folder), recipe, settings, corpus)
            if manifest is None:
                _claim(Folder(folder), settings)
                plan = _plan(recipe, tokenizer, settings)
                entries = _make_parts(corpus, folder, plan, workers, progress)
                corpus.require_unchanged()
                manifest = _manifest(recipe, settings, tokenizer, corpus, entries)
                files.write_json(folder / MANIFEST, manifest, sealed=True)
                files.remove_leftovers(folder)
            return manifest

    if isinstance(storage, Folder):
        manifest = made_in(storage.path)
    else:
        found = _finished(storage, recipe, settings, corpus)
        if found is None:
            if storage.has(SETTINGS):
                _claim(storage, settings)
            folder = blocks_cache(recipe) / f"making-{files.json_digest(str(storage))[:32]}"
            found = made_in(folder)
            _upload(folder, storage, found)
            files.move_folder(folder, blocks_cache(recipe) / found["fingerprint"][:32])
        manifest = found
    if not corpus.conversations and not block_count(manifest["tokens"], recipe.data.block_size):
        raise too_few_tokens(str(storage), manifest["tokens"], recipe.data.block_size)
    return manifest


# ---- whose the folder is ----


def _refuse_strangers(storage: Storage) -> None:
    found = storage.files()
    if SETTINGS in found or MANIFEST in found:
        return
    if any(name != files.LOCK_FILE and not files.is_leftover(name) for name in found):
        raise BlocksError(
            f"{storage} is not empty and holds no blocks. Choose another data.blocks."
        )


def _claim(storage: Storage, settings: dict[str, Any]) -> None:
    """The settings are written before the first part: a place belongs to one recipe."""
    if storage.create(SETTINGS, files.json_bytes(settings, sealed=True)):
        return
    advice = "Choose another place for data.blocks."
    path = storage.shown(SETTINGS)
    found = files.read_json(path, BlocksError, advice, read=lambda: storage.read(SETTINGS))
    different = files.differences(found, settings)
    _refuse(storage, [f"{name}: {old!r:.50} -> {new!r:.50}" for name, old, new in different])


def _refuse(storage: Storage, difference: list[str]) -> None:
    if difference:
        raise BlocksError(
            f"{storage} holds blocks that were made with other settings:\n  "
            + "\n  ".join(difference)
            + "\nChoose another data.blocks, or restore the settings."
        )


def _finished(
    storage: Storage, recipe: Recipe, settings: dict[str, Any], corpus: Corpus
) -> dict[str, Any] | None:
    """The manifest of blocks that serve this recipe and are whole; of those in a bucket the sizes
    alone are looked at. Parts that are damaged or lost are made again, which takes the very
    settings they were made with."""
    found = storage.files()
    if MANIFEST not in found:
        return None
    try:
        manifest = read_manifest(storage)
    except BlocksError:
        if SETTINGS in found:
            return None  # ours, and the manifest can be made again from the parts
        raise
    _refuse(storage, differing_inputs(manifest, recipe, settings, corpus))
    if isinstance(storage, Folder):
        damaged = damaged_parts(storage.path, manifest)
    else:
        damaged = cut_parts(manifest, found)
    if not damaged:
        return manifest
    if manifest["settings"] != settings:
        raise BlocksError(
            f"{storage} is damaged ({damaged[0]}), and this recipe did not make it. Run "
            "`vocagnolm prepare` with the recipe that did."
        )
    storage.remove(*(line.partition(":")[0] for line in damaged))
    return None


def _upload(folder: Path, storage: Storage, manifest: dict[str, Any]) -> None:
    """Settings first, which make the place ours; then the parts, the manifest last."""
    _claim(storage, manifest["settings"])
    found = storage.files()
    parts = [part for part in manifest["parts"] if found.get(part["name"]) != part["bytes"]]
    total, done = sum(part["bytes"] for part in parts), 0

    def send(part: dict[str, Any]) -> int:
        storage.put(part["name"], (folder / part["name"]).read_bytes())
        return int(part["bytes"])

    with ThreadPoolExecutor(_UPLOADS) as pool:
        for size in pool.map(send, parts):
            done += size
            tell(f"{folder} to {storage}", folder, done, total)
    content = files.json_bytes(manifest, sealed=True)
    if not storage.create(MANIFEST, content):
        storage.put(MANIFEST, content)


# ---- the manifest ----


def _manifest(
    recipe: Recipe,
    settings: dict[str, Any],
    tokenizer: TextTokenizer,
    corpus: Corpus,
    entries: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Refused where there is nothing to train on, or no guidance that was asked for."""
    summary = PackingSummary()
    for entry in entries:
        summary.add(PackingSummary(**entry["summary"]))
    about, guidance = summary.to_dict(), settings["guidance"] or {}
    if problem := _nothing(recipe, summary, corpus):
        raise BlocksError(problem)
    if guidance and about["mapped_share"] < LEAST_MAPPED_SHARE:
        warnings.warn(
            f"only {about['mapped_share']:.1%} of the tokens have guidance: the store lacks many "
            "of these documents, or much of their text.",
            VocagnolmWarning,
            stacklevel=3,
        )
    names = ("name", "tokens", "bytes", "sha256")
    parts = [{name: entry[name] for name in names} for entry in entries]
    columns = ["ids", "document_tokens", "document_index"]
    columns += ["guidance"] if guidance else []
    columns += ["stretch"] if guidance.get("stretch") else []
    columns += ["target_ids", "target_p"] if guidance.get("targets") else []
    columns += ["teacher_nll", "teacher_range"] if guidance.get("teacher_losses") else []
    columns += ["text", "spans"] if settings["text"] else []
    columns += ["trained", "first_trained"] if settings.get("conversations") else []
    teachers = [LossStore.open(path).teacher_name for path in recipe.stores]
    return {
        "format_version": FORMAT_VERSION,
        "settings": settings,
        "inputs": described_inputs(recipe, tokenizer, corpus),
        "fingerprint": files.json_digest([settings, [part["sha256"] for part in parts]]),
        "tokens": summary.tokens,
        "columns": columns,
        "teacher": ", ".join(teachers) or None,
        "summary": about,
        "parts": parts,
    }


def _nothing(recipe: Recipe, summary: PackingSummary, read: Corpus) -> str | None:
    """Why there is nothing to train on, or nothing to guide it."""
    corpus = ", ".join(recipe.corpus.files)
    if summary.tokens and summary.trained != 0:
        if not recipe.stores or summary.mapped:
            return None
        return (
            f"No token of {corpus} has guidance: {' and '.join(recipe.stores)} holds no loss for "
            "any of these documents. Score this corpus, or remove store.path."
        )
    if summary.refused:
        reason, count = max(summary.refused.items(), key=lambda entry: entry[1])
        return (
            f"The student's template refuses the conversations of {corpus}: {count:,} x {reason}."
        )
    if summary.tokens:
        return (
            f"{corpus} holds nothing to train on: no conversation has a message of data.train_on = "
            f"{recipe.data.train_on}."
        )
    unusable = (f" ({d.place}: {d.problem})" for d in read.read(0, 100) if d.text is None)
    return f"The corpus gave no tokens: {corpus}{next(unusable, '')}."


# ---- one part: a pure function of its documents and the plan ----


@dataclass(frozen=True, kw_only=True)
class PartPlan:
    """Everything a worker needs to make a part, small enough to send to it."""

    recipe: Recipe
    settings: dict[str, Any]
    tokenizer: TextTokenizer
    skipped: frozenset[int]
    """Documents that no teacher could score: always left out."""
    chosen: Chosen | None
    """Documents worth reading; None: all of them."""
    targets: TargetsPlan | None


def _plan(recipe: Recipe, tokenizer: TextTokenizer, settings: dict[str, Any]) -> PartPlan:
    stores = [LossStore.open(path) for path in recipe.stores]
    for store in stores:
        store.fetch()  # here, once: every worker reads all of it
    targets = None
    if (settings["guidance"] or {}).get("targets"):
        spec = common_alternatives(stores, recipe.objective.alternatives)
        eos = settings["eos"]
        targets = TargetsPlan(
            tables=tuple(target_table(tokenizer, store.vocabulary, eos) for store in stores),
            spec=spec,
            inside=recipe.objective.inside,
            weights=tuple(recipe.store.weights or [1.0] * len(stores)),
        )
    # documents of this very corpus that are known to be missing in all of the stores
    skipped = [
        frozenset(int(entry["document"]) for entry in store.skipped())
        if store.made_from(settings["corpus"])
        else frozenset[int]()
        for store in stores
    ]
    return PartPlan(
        recipe=recipe,
        settings=settings,
        tokenizer=tokenizer,
        skipped=frozenset.intersection(*skipped) if skipped else frozenset(),
        chosen=chosen_documents(recipe),
        targets=targets,
    )


class PartMaker:
    """Holds the tokenizer and the stores of a worker."""

    def __init__(self, plan: PartPlan, folder: Path):
        self.plan = plan
        self.folder = folder
        self.identity = files.json_digest(plan.settings)
        self.stores = [LossStore.open(path) for path in plan.recipe.stores]
        self._lookups = [Lookup(store, plan.settings["corpus"]) for store in self.stores]
        data, tokenizer = plan.recipe.data, plan.tokenizer
        self._prefix, _ = separator_ids(tokenizer, data.bos, data.eos)
        wide = max(tokenizer.vocabulary.values()) > np.iinfo(np.uint16).max
        self._id_dtype = np.uint32 if wide else np.uint16

    def make(self, number: int, documents: Sequence[NumberedText]) -> dict[str, Any]:
        """Write part `number`. Returns its manifest entry."""
        path = self.folder / part_name(number)
        part = self._pack(documents)
        about = {"identity": self.identity, "summary": part.summary.as_json()}
        content = save(part.columns, metadata={METADATA_KEY: json.dumps(about, sort_keys=True)})
        files.write_bytes(path, content)
        return _entry(path, about)

    def _pack(self, documents: Sequence[NumberedText]) -> Part:
        plan, recipe, settings = self.plan, self.plan.recipe, self.plan.settings
        kept, rows, missing, left_out = self._select(documents)
        refused: dict[str, int] = {}
        trained = None
        if isinstance(plan.tokenizer, ChatTokenizer):
            outcomes = in_batches(plan.tokenizer.outcomes, [text for _, text in kept])
            refused = dict(Counter(one for one in outcomes if isinstance(one, str)))
            readable = [n for n, one in enumerate(outcomes) if not isinstance(one, str)]
            students: list[TokenSpans] = [one for one in outcomes if not isinstance(one, str)]
            kept = [kept[n] for n in readable]
            rows = [[entries[n] for n in readable] for entries in rows]
            trained = [trained_ranges(text, recipe.data.train_on) for _, text in kept]
        else:
            students = tokenise(plan.tokenizer, [text for _, text in kept])
        held = self._held(rows, lambda store, at: store[at]) if self.stores else None
        alternatives = None
        if plan.targets is not None:
            alternatives = self._held(rows, lambda store, at: store.alternatives(at).packed)
        guidance = settings["guidance"] or {}
        with_texts = settings["text"] or plan.targets is not None
        part = pack_documents(
            students,
            held,
            document_indices=[index for index, _ in kept],
            id_dtype=self._id_dtype,
            prefix=self._prefix,
            eos=settings["eos"],
            guidance=GuidancePlan(
                aggregation=recipe.objective.aggregation,
                combine=recipe.store.combine or "min",
                stretch=bool(guidance.get("stretch")),
                teacher_losses=bool(guidance.get("teacher_losses")),
            ),
            texts=[text.encode() for _, text in kept] if with_texts else None,
            keep_text=settings["text"],
            trained=trained,
            alternatives=alternatives,
            targets=plan.targets,
        )
        part.summary.refused = refused
        part.summary.missing_documents = missing
        part.summary.left_out_documents = left_out
        part.summary.unusable_documents = sum(text is None for _, text in documents)
        return part

    def _select(
        self, documents: Sequence[NumberedText]
    ) -> tuple[list[tuple[int, str]], list[list[int | None]], int, int]:
        """The documents to pack, their places in every store; the number that no store has, and the
        number that is not worth reading."""
        kept: list[tuple[int, str]] = []
        rows: list[list[int | None]] = [[] for _ in self.stores]
        missing = left_out = 0
        for index, text in documents:
            if text is None:
                continue
            digest = document_hash(text)
            if self.plan.chosen is not None and digest not in self.plan.chosen:
                left_out += 1
                continue
            found = [lookup.row(index, digest) for lookup in self._lookups]
            if found and all(row is None for row in found):
                missing += 1
                if index in self.plan.skipped or self.plan.recipe.data.missing == "drop":
                    continue
                if self.plan.recipe.data.missing == "error":
                    raise _not_in_store(index, text, self.plan.recipe.stores)
            kept.append((index, text))
            for entries, row in zip(rows, found, strict=True):
                entries.append(row)
        return kept, rows, missing, left_out

    def _held(
        self, rows: Sequence[Sequence[int | None]], read: Callable[[LossStore, int], Read]
    ) -> list[list[Read | None]]:
        """What every store holds of the documents; None where it lacks one."""
        return [
            [None if at is None else read(store, at) for at in entries]
            for store, entries in zip(self.stores, rows, strict=True)
        ]


def tokenise(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[TokenSpans]:
    """All texts, in batches of bounded size."""
    return in_batches(tokenizer.spans_batch, texts)


def in_batches(read: Callable[[list[str]], list[Read]], texts: Sequence[str]) -> list[Read]:
    result: list[Read] = []
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= TOKENISE_BYTES:
            result += read(batch)
            batch, size = [], 0
    return result + read(batch) if batch else result


def part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _finished_part(path: Path, identity: str) -> dict[str, Any] | None:
    """The manifest entry of a part that an earlier run made, or None where there is none."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="np") as file:
            about = files.parse_json(file.metadata()[METADATA_KEY])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None  # damaged: it is made again
    if about["identity"] != identity:
        raise BlocksError(
            f"{path} was made with other settings. Choose another folder for data.blocks."
        )
    return _entry(path, about)


def _entry(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    summary = about["summary"]
    return {
        "name": path.name,
        "tokens": summary["tokens"],
        "summary": summary,
        "bytes": path.stat().st_size,
        "sha256": files.file_digest(path),
    }


def _not_in_store(index: int, text: str, stores: Sequence[str]) -> BlocksError:
    start = " ".join(text[:60].split())
    return BlocksError(
        f"Document {index} of the corpus ('{start}...') is not in the loss store "
        f"{' or '.join(stores)}: the store was made from another corpus. Score this corpus, or set "
        "data.missing to drop (leave such documents out) or keep (train on them unguided)."
    )


# ---- all parts ----


def _make_parts(
    corpus: Corpus, folder: Path, plan: PartPlan, workers: int, progress: Progress | None
) -> list[dict[str, Any]]:
    """Entries of all parts, in the order of the corpus. Finished parts are not read again."""
    size = plan.recipe.data.part_documents
    starts = range(0, len(corpus), size)
    entries: dict[int, dict[str, Any]] = {}

    def note(number: int, entry: dict[str, Any]) -> None:
        entries[number] = entry
        if progress is not None:
            progress(PackingSummary(**entry["summary"]), len(entries) / len(starts))

    identity = files.json_digest(plan.settings)
    for number in range(len(starts)):
        if (entry := _finished_part(folder / part_name(number), identity)) is not None:
            note(number, entry)
    wanted = [number for number in range(len(starts)) if number not in entries]

    def documents(number: int) -> list[NumberedText]:
        start = starts[number]
        return [(document.index, document.text) for document in corpus.read(start, start + size)]

    if workers <= 1:
        maker = PartMaker(plan, folder)
        for number in wanted:
            note(number, maker.make(number, documents(number)))
    elif wanted:
        with WorkerPool(min(workers, len(wanted)), _start_worker, plan, folder) as pool:
            waiting: dict[Future[dict[str, Any]], int] = {}
            for position, number in enumerate(wanted, 1):
                waiting[pool.submit(_make_in_worker, number, documents(number))] = number
                # the reader must not run away with the memory
                while len(waiting) >= 2 * workers or (waiting and position == len(wanted)):
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        note(waiting.pop(future), future.result())
    return [entries[number] for number in sorted(entries)]


_maker: PartMaker | None = None


def _start_worker(plan: PartPlan, folder: Path) -> None:
    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    _maker = PartMaker(plan, folder)


def _make_in_worker(number: int, documents: list[NumberedText]) -> dict[str, Any]:
    assert _maker is not None
    return _maker.make(number, documents)
