"""`vocagnolm prepare`: corpus + loss store + student tokenizer -> packed blocks.

The corpus is cut into parts of `part_documents` documents, so any number of workers gives the
same files. A part appears by rename when it is complete and the manifest comes last: kill it at any
moment and run it again. Blocks at an address are made in a folder of this machine and uploaded.
"""

import contextlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vocagnolm.alignment import TextTokenizer, TokenSpans
from vocagnolm.alignment.spans import batches
from vocagnolm.base import files
from vocagnolm.base.children import WorkerPool
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
from vocagnolm.data.corpus import NOT_RIGHT, Corpus, Document, document_hash
from vocagnolm.data.differences import differing_inputs
from vocagnolm.data.fingerprints import block_settings, described_inputs
from vocagnolm.data.guidance import (
    GuidancePlan,
    TargetsPlan,
    TeacherLosses,
    common_alternatives,
    target_table,
)
from vocagnolm.data.materials import Materials, blocks_cache, blocks_storage, separator_ids
from vocagnolm.data.packing import Batch, PackingSummary, Part, pack_documents
from vocagnolm.data.teachers import Chosen, Lookup, chosen_documents
from vocagnolm.errors import BlocksError, RecipeError, VocagnolmWarning
from vocagnolm.recipe import Recipe
from vocagnolm.storage import Folder, Storage
from vocagnolm.storage.copies import tell
from vocagnolm.store import LossStore

Progress = Callable[[PackingSummary, float], None]
"""Called with the summary of each finished part and the share of the parts that are done."""
Read = TypeVar("Read")

SETTINGS = "settings.json"
_RECORDS = "part-*.json"
METADATA_KEY = "vocagnolm"
# Guided training below this share of mapped tokens is hardly guided.
LEAST_MAPPED_SHARE = 0.5
_UPLOADS = 8


def prepare(
    recipe: Recipe, *, workers: int = 1, progress: Progress | None = None
) -> dict[str, Any]:
    """Make the blocks of a recipe, or what is missing or damaged of them. Returns the manifest; of
    several corpora `{"corpora": {name: manifest}}`.

    With `workers` > 1 documents are tokenised in as many processes; with 1 the tokenizer's own
    threads are used.
    """
    blocks_storage(recipe)
    if problems := recipe.store_problems():
        raise RecipeError("\n".join(problems))
    parts = Materials(recipe).by_corpus().items()
    made = {name: prepare_blocks(part, workers, progress) for name, part in parts}
    return {"corpora": made} if recipe.corpora else made[""]


def prepare_blocks(
    materials: Materials, workers: int = 1, progress: Progress | None = None
) -> dict[str, Any]:
    """Make the blocks of one corpus, as `prepare` does. Returns the manifest."""
    recipe, storage, corpus = materials.recipe, materials.storage, materials.corpus
    tokenizer = materials.reader(corpus.conversations)
    settings = block_settings(materials, tokenizer, corpus)
    _refuse_strangers(storage)

    def made_in(folder: Path) -> dict[str, Any]:
        with files.folder_lock(folder, "Wait for it to end, or choose another data.blocks."):
            manifest = _finished(Folder(folder), materials, settings)
            if manifest is None:
                _claim(Folder(folder), settings)
                plan = _plan(materials, tokenizer, settings)
                entries = _make_parts(materials, folder, plan, workers, progress)
                corpus.require_unchanged()
                try:
                    manifest = _manifest(materials, settings, tokenizer, entries)
                    _require_a_block(str(storage), recipe, corpus, manifest)
                except BlocksError:
                    _free(folder, entries)
                    raise
                files.write_json(folder / MANIFEST, manifest, sealed=True)
                files.remove_leftovers(folder)
            _remove_records(folder)
            return manifest

    if isinstance(storage, Folder):
        manifest = made_in(storage.path)
    else:
        found = _finished(storage, materials, settings)
        if found is None:
            if storage.has(SETTINGS):
                _claim(storage, settings)
            folder = blocks_cache(recipe) / f"making-{files.json_digest(str(storage))[:32]}"
            found = made_in(folder)
            _upload(folder, storage, found)
            files.move_folder(folder, blocks_cache(recipe) / found["fingerprint"][:32])
        manifest = found
    _require_a_block(str(storage), recipe, corpus, manifest)
    return manifest


def _require_a_block(where: str, recipe: Recipe, corpus: Corpus, manifest: dict[str, Any]) -> None:
    tokens, size = manifest["tokens"], recipe.data.block_size
    if not corpus.conversations and not block_count(tokens, size):
        raise too_few_tokens(where, tokens, size)


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
    content = files.json_bytes(settings, sealed=True)
    if storage.create(SETTINGS, content):
        return
    if isinstance(storage, Folder) and not any(map(_is_part, storage.files())):
        # a run that failed before its first part must not hold the folder against the corrected one
        storage.put(SETTINGS, content)
        return
    advice = "Choose another place for data.blocks."
    path = storage.shown(SETTINGS)
    found = files.read_json(path, BlocksError, advice, read=lambda: storage.read(SETTINGS))
    different = files.differences(found, settings)
    _refuse(storage, [f"{name}: {old!r:.50} -> {new!r:.50}" for name, old, new in different])


def _free(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Remove parts that hold nothing to train on: they must not hold the folder against the
    corrected recipe. The settings go last, which make them ours."""
    for entry in entries:
        files.remove(folder / entry["name"])
    _remove_records(folder)
    files.remove(folder / SETTINGS)


def _remove_records(folder: Path) -> None:
    """The manifest holds what they say. What is finished may also stand on read-only media."""
    with contextlib.suppress(OSError):
        for path in folder.glob(_RECORDS):
            files.remove(path)


def _refuse(storage: Storage, difference: list[str]) -> None:
    if difference:
        raise BlocksError(
            f"{storage} holds blocks that were made with other settings:\n  "
            + "\n  ".join(difference)
            + "\nChoose another data.blocks, or restore the settings."
        )


def _finished(
    storage: Storage, materials: Materials, settings: dict[str, Any]
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
    _refuse(storage, differing_inputs(manifest, materials, settings, materials.corpus))
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
    materials: Materials,
    settings: dict[str, Any],
    tokenizer: TextTokenizer,
    entries: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The manifest; refused where there is nothing to train on, or no guidance that was asked
    for."""
    summary = PackingSummary()
    for entry in entries:
        summary.add(PackingSummary(**entry["summary"]))
    about, guidance = summary.to_dict(), settings["guidance"] or {}
    if problem := _nothing(materials.recipe, summary, materials.corpus):
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
    teachers = [store.teacher_name for store in materials.stores]
    return {
        "format_version": FORMAT_VERSION,
        "settings": settings,
        "inputs": described_inputs(materials, tokenizer),
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
    if summary.wrong_documents:
        return (
            f"corpus.answers is right, and {corpus} has no answer that is marked as right. Answers "
            "are marked by `vocagnolm write --grade`; corpus.answers: all trains on every answer."
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


def _plan(materials: Materials, tokenizer: TextTokenizer, settings: dict[str, Any]) -> PartPlan:
    recipe, stores = materials.recipe, materials.stores
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
        if store.made_from(settings["corpus"]) and store.written is None
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


@dataclass(frozen=True)
class _Kept:
    """A document that is packed."""

    index: int
    text: str
    rows: Sequence[int | None]
    """The document's index in every store; None where the store lacks it."""


class PartMaker:
    """Holds the tokenizer and the stores of a worker."""

    def __init__(self, plan: PartPlan, folder: Path, stores: Sequence[LossStore] | None = None):
        """`stores`: those of the recipe, if they are open in this process."""
        self.plan = plan
        self.folder = folder
        self.identity = files.json_digest(plan.settings)
        self.stores = Materials(plan.recipe).stores if stores is None else stores
        self._lookups = [Lookup(store, plan.settings["corpus"]) for store in self.stores]
        data, tokenizer = plan.recipe.data, plan.tokenizer
        self._prefix, _ = separator_ids(tokenizer, data.bos, data.eos)
        wide = max(tokenizer.vocabulary.values()) > np.iinfo(np.uint16).max
        self._id_dtype = np.uint32 if wide else np.uint16

    def make(self, number: int, documents: Sequence[Document]) -> dict[str, Any]:
        """Write part `number`. Returns its manifest entry."""
        path = self.folder / part_name(number)
        part = self._pack(documents)
        about = {"identity": self.identity, "summary": part.summary.as_json()}
        metadata = json.dumps(about, sort_keys=True)
        with files.whole_path(path) as temporary:
            save_file(part.columns, temporary, metadata={METADATA_KEY: metadata})
            # as it is read back after a kill, down to the order of its keys
            entry = _entry(temporary, json.loads(metadata))
            record = {"identity": self.identity, "sha256": entry["sha256"]}
            files.write_json(_record_of(path), record, sealed=True)
        return entry

    def _pack(self, documents: Sequence[Document]) -> Part:
        recipe, settings = self.plan.recipe, self.plan.settings
        kept, missing, left_out = self._select(documents)
        guidance = settings["guidance"] or {}
        pack = partial(
            pack_documents,
            id_dtype=self._id_dtype,
            prefix=self._prefix,
            eos=settings["eos"],
            guidance=GuidancePlan(
                aggregation=recipe.objective.aggregation,
                combine=recipe.store.combine or "min",
                stretch=bool(guidance.get("stretch")),
                teacher_losses=bool(guidance.get("teacher_losses")),
            ),
            keep_text=settings["text"],
            targets=self.plan.targets,
            folder=self.folder,
        )
        refused: Counter[str] = Counter()
        part = pack(self._batches(kept, refused))
        part.summary.refused = dict(refused)
        part.summary.missing_documents = missing
        part.summary.left_out_documents = left_out
        wrong = sum(document.problem == NOT_RIGHT for document in documents)
        unusable = sum(document.text is None for document in documents)
        part.summary.wrong_documents = wrong
        part.summary.unusable_documents = unusable - wrong
        return part

    def _select(self, documents: Sequence[Document]) -> tuple[list[_Kept], int, int]:
        """The documents to pack; the number that no store has, and the number that is not worth
        reading."""
        kept: list[_Kept] = []
        missing = left_out = 0
        for document in documents:
            index, text = document.index, document.text
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
            kept.append(_Kept(index, text, found))
        return kept, missing, left_out

    def _batches(self, kept: Sequence[_Kept], refused: Counter[str]) -> Iterator[Batch]:
        """Read the documents in batches, at least one. The conversations that the template refuses
        are counted by reason."""
        tokenizer, train_on = self.plan.tokenizer, self.plan.recipe.data.train_on
        for batch in batches(kept, lambda one: len(one.text)) or [[]]:
            texts = [one.text for one in batch]
            if isinstance(tokenizer, ChatTokenizer):
                outcomes = [*zip(batch, tokenizer.outcomes(texts), strict=True)]
                refused.update(found for _, found in outcomes if isinstance(found, str))
                read = [(one, found) for one, found in outcomes if not isinstance(found, str)]
                readable = [one for one, _ in read]
                trained = [trained_ranges(one.text, train_on) for one in readable]
                yield self._batch(readable, [found for _, found in read], trained=trained)
            else:
                yield self._batch(batch, tokenise(tokenizer, texts))

    def _batch(
        self,
        kept: Sequence[_Kept],
        students: Sequence[TokenSpans],
        *,
        trained: Sequence[NDArray[np.int64]] | None = None,
    ) -> Batch:
        def held(read: Callable[[dict[str, NDArray[Any]]], Read]) -> list[list[Read | None]]:
            """What every store holds of the documents; None where it lacks one."""
            return [
                [None if at is None else read(store.columns(at)) for at in rows]
                for store, rows in zip(self.stores, indices, strict=True)
            ]

        def losses(columns: dict[str, NDArray[Any]]) -> TeacherLosses:
            return columns["token_bytes"].astype(np.int64), columns["nll"].astype(np.float32)

        indices = [[one.rows[n] for one in kept] for n in range(len(self.stores))]
        with_texts = self.plan.settings["text"] or self.plan.targets is not None
        return Batch(
            indices=[one.index for one in kept],
            students=students,
            teachers=held(losses) if self.stores else None,
            texts=[one.text.encode() for one in kept] if with_texts else None,
            trained=trained,
            alternatives=held(itemgetter("alternatives")) if self.plan.targets else None,
        )


def tokenise(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[TokenSpans]:
    """Tokenize texts in batches of bounded size."""
    return in_batches(tokenizer.spans_batch, texts)


def in_batches(read: Callable[[list[str]], list[Read]], texts: Sequence[str]) -> list[Read]:
    return [one for batch in batches(texts, len) for one in read(batch)]


def part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _is_part(name: str) -> bool:
    return name.startswith("part-") and name.endswith(".safetensors")


def _record_of(part: Path) -> Path:
    """The record of a part until there is a manifest: it is there before the part."""
    return part.with_suffix(".json")


def _finished_part(path: Path, identity: str, *, recorded: bool) -> dict[str, Any] | None:
    """The manifest entry of a part that an earlier run made, or None where there is none, or one
    that has changed since. `recorded`: parts have records, which 0.1.0 did not write."""
    if not path.exists():
        return None
    record: dict[str, Any] = {}
    if recorded:
        try:
            record = files.read_json(_record_of(path), BlocksError, "", {"sha256": str})
        except (OSError, BlocksError):
            return None  # it is made again
    try:
        with safe_open(path, framework="np") as file:
            about = files.parse_json(file.metadata()[METADATA_KEY])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None  # damaged: it is made again
    if about["identity"] != identity:
        raise BlocksError(
            f"{path} was made with other settings. Choose another folder for data.blocks."
        )
    entry = _entry(path, about)
    return entry if record.get("sha256", entry["sha256"]) == entry["sha256"] else None


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
    materials: Materials, folder: Path, plan: PartPlan, workers: int, progress: Progress | None
) -> list[dict[str, Any]]:
    """Entries of all parts, in the order of the corpus. Finished parts are not read again."""
    corpus = materials.corpus
    size = plan.recipe.data.part_documents
    starts = range(0, len(corpus), size)
    entries: dict[int, dict[str, Any]] = {}

    def note(number: int, entry: dict[str, Any]) -> None:
        entries[number] = entry
        if progress is not None:
            progress(PackingSummary(**entry["summary"]), len(entries) / len(starts))

    identity = files.json_digest(plan.settings)
    recorded = any(folder.glob(_RECORDS))
    for number in range(len(starts)):
        path = folder / part_name(number)
        if (entry := _finished_part(path, identity, recorded=recorded)) is not None:
            note(number, entry)
    wanted = [number for number in range(len(starts)) if number not in entries]

    def documents(number: int) -> list[Document]:
        start = starts[number]
        return list(corpus.read(start, start + size))

    if workers <= 1:
        maker = PartMaker(plan, folder, materials.stores)
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


def _make_in_worker(number: int, documents: list[Document]) -> dict[str, Any]:
    assert _maker is not None
    return _maker.make(number, documents)
