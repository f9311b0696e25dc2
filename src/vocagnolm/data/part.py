"""Making one part of the packed blocks: a pure function of its documents and the plan."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vocagnolm.alignment import TextTokenizer, TokenSpans
from vocagnolm.chat import ChatTokenizer, TrainOn, trained_ranges
from vocagnolm.data.corpus import document_hash
from vocagnolm.data.guidance import GuidancePlan
from vocagnolm.data.packing import PackingSummary, Part, pack_documents
from vocagnolm.data.targets import TargetsPlan
from vocagnolm.data.teachers import Chosen, Lookup
from vocagnolm.errors import BlocksError
from vocagnolm.files import file_digest, parse_json, write_bytes
from vocagnolm.store import LossStore

Tokens = TypeVar("Tokens")
Held = TypeVar("Held")
NumberedText = tuple[int, str | None]
"""A document's index in the corpus and its text; None where it cannot be used."""

METADATA_KEY = "vocagnolm"

# Texts given to the tokenizer at once: enough to keep its threads busy, little enough that the
# encodings of a whole part never lie in memory together.
TOKENISE_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PartPlan:
    """Everything a worker needs to make a part, small enough to send to it."""

    tokenizer: TextTokenizer
    stores: tuple[str, ...]
    corpus: str
    """Its fingerprint: a store of the same corpus has its documents under their numbers."""
    prefix: tuple[int, ...]
    eos: int | None
    wide_ids: bool
    guidance: GuidancePlan
    missing: str
    skipped: frozenset[int]
    """Documents that the teacher could not score: always left out."""
    chosen: Chosen | None
    """Documents worth reading; None: all of them."""
    keep_text: bool
    train_on: TrainOn
    targets: TargetsPlan | None
    identity: str
    """Digest of the settings; a part made with others is refused."""


class PartMaker:
    """Holds the tokenizer and the store of a worker."""

    def __init__(self, plan: PartPlan, folder: Path):
        self.plan = plan
        self.folder = folder
        self.tokenizer = plan.tokenizer
        self.stores = [LossStore.open(path) for path in plan.stores]
        self._lookups = [Lookup(store, plan.corpus) for store in self.stores]

    def make(self, number: int, documents: Sequence[NumberedText]) -> dict[str, Any]:
        """Write part `number`. Returns its manifest entry."""
        path = self.folder / part_name(number)
        part = self._pack(documents)
        about = {"identity": self.plan.identity, "summary": part.summary.as_json()}
        content = save(part.columns, metadata={METADATA_KEY: json.dumps(about, sort_keys=True)})
        write_bytes(path, content)
        return _entry(path, about)

    def _pack(self, documents: Sequence[NumberedText]) -> Part:
        kept, places, missing, left_out = self._select(documents)
        students, refused = self._read(kept)
        if refused:
            readable = [n for n, student in enumerate(students) if student is not None]
            kept = [kept[n] for n in readable]
            places = [[entries[n] for n in readable] for entries in places]
        targets = self.plan.targets
        texts = [text for _, text in kept]
        talks = isinstance(self.tokenizer, ChatTokenizer)
        part = pack_documents(
            [student for student in students if student is not None],
            self._held(places, lambda store, at: store[at]) if self.stores else None,
            document_indices=[index for index, _ in kept],
            id_dtype=np.uint32 if self.plan.wide_ids else np.uint16,
            prefix=self.plan.prefix,
            eos=self.plan.eos,
            guidance=self.plan.guidance,
            texts=[text.encode() for text in texts] if self.plan.keep_text or targets else None,
            keep_text=self.plan.keep_text,
            trained=[trained_ranges(text, self.plan.train_on) for text in texts] if talks else None,
            alternatives=None
            if targets is None
            else self._held(places, lambda store, at: store.alternatives(at).packed),
            targets=targets,
        )
        part.summary.refused = refused
        part.summary.missing_documents = missing
        part.summary.left_out_documents = left_out
        part.summary.unusable_documents = sum(text is None for _, text in documents)
        return part

    def _read(
        self, kept: Sequence[tuple[int, str]]
    ) -> tuple[Sequence[TokenSpans | None], dict[str, int]]:
        """The student's tokens, and why its template refuses some conversations (None)."""
        texts = [text for _, text in kept]
        if not isinstance(self.tokenizer, ChatTokenizer):
            return tokenise(self.tokenizer, texts), {}
        outcomes = in_batches(self.tokenizer.outcomes, texts)
        refused = Counter(one for one in outcomes if isinstance(one, str))
        return [None if isinstance(one, str) else one for one in outcomes], dict(refused)

    def _select(
        self, documents: Sequence[NumberedText]
    ) -> tuple[list[tuple[int, str]], list[list[int | None]], int, int]:
        """The documents to pack, their places in every store; the number that no store has, and the
        number that is not worth reading."""
        kept: list[tuple[int, str]] = []
        places: list[list[int | None]] = [[] for _ in self.stores]
        missing = left_out = 0
        for index, text in documents:
            if text is None:
                continue
            if self.plan.chosen is not None and document_hash(text) not in self.plan.chosen:
                left_out += 1
                continue
            found = self._places(index, text)
            if self.stores and all(place is None for place in found):
                missing += 1
                if index in self.plan.skipped or self.plan.missing == "drop":
                    continue
                if self.plan.missing == "error":
                    raise _not_in_store(index, text, self.plan.stores)
            kept.append((index, text))
            for entries, place in zip(places, found, strict=True):
                entries.append(place)
        return kept, places, missing, left_out

    def _places(self, index: int, text: str) -> list[int | None]:
        if not self.stores:
            return []
        digest = document_hash(text)
        return [lookup.place(index, digest) for lookup in self._lookups]

    def _held(
        self, places: Sequence[Sequence[int | None]], read: Callable[[LossStore, int], Held]
    ) -> list[list[Held | None]]:
        """What every store holds of the documents; None where it lacks one."""
        return [
            [None if at is None else read(store, at) for at in entries]
            for store, entries in zip(self.stores, places, strict=True)
        ]


def tokenise(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[TokenSpans]:
    """All texts, in batches of bounded size."""
    return in_batches(tokenizer.spans_batch, texts)


def in_batches(read: Callable[[list[str]], list[Tokens]], texts: Sequence[str]) -> list[Tokens]:
    result: list[Tokens] = []
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


def finished_part(path: Path, identity: str) -> dict[str, Any] | None:
    """The manifest entry of a part that an earlier run made, or None where there is none."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="np") as file:
            about = parse_json(file.metadata()[METADATA_KEY])
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
        "sha256": file_digest(path),
    }


def _not_in_store(index: int, text: str, stores: Sequence[str]) -> BlocksError:
    start = " ".join(text[:60].split())
    return BlocksError(
        f"Document {index} of the corpus ('{start}...') is not in the loss store "
        f"{' or '.join(stores)}: the store was made from another corpus. Score this corpus, or set "
        "data.missing to drop (leave such documents out) or keep (train on them unguided)."
    )


def summarise(entries: Sequence[dict[str, Any]]) -> PackingSummary:
    total = PackingSummary()
    for entry in entries:
        total.add(PackingSummary(**entry["summary"]))
    return total
