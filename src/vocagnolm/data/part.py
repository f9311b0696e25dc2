"""Making one part of the packed blocks: a pure function of its documents and the plan."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vocagnolm.align import TextTokenizer, TokenSpans
from vocagnolm.align.alignment import Aggregation
from vocagnolm.data.corpus import document_hash
from vocagnolm.data.packing import PackingSummary, Part, TeacherLosses, pack_documents
from vocagnolm.errors import BlocksError
from vocagnolm.store import LossStore

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
    store: str | None
    bos: int | None
    eos: int | None
    wide_ids: bool
    aggregation: Aggregation
    missing: str
    skipped: frozenset[int]
    """Documents that the teacher could not score: always left out."""
    keep_teacher: bool
    keep_text: bool
    identity: str
    """Digest of the settings; a part made with others is refused."""


class PartMaker:
    """Holds the tokenizer and the store of a worker."""

    def __init__(self, plan: PartPlan, folder: Path):
        self.plan = plan
        self.folder = folder
        self.tokenizer = plan.tokenizer
        self.store = LossStore.open(plan.store) if plan.store else None

    def make(self, number: int, documents: Sequence[NumberedText]) -> dict[str, Any]:
        """Write part `number`. Returns its manifest entry."""
        path = self.folder / part_name(number)
        part = self._pack(documents)
        about = {"identity": self.plan.identity, "summary": asdict(part.summary)}
        content = save(part.columns, metadata={METADATA_KEY: json.dumps(about, sort_keys=True)})
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return _entry(path, about)

    def _pack(self, documents: Sequence[NumberedText]) -> Part:
        kept, teachers, missing = self._select(documents)
        texts = [text for _, text in kept]
        part = pack_documents(
            tokenise(self.tokenizer, texts),
            teachers if self.store is not None else None,
            document_indices=[index for index, _ in kept],
            id_dtype=np.uint32 if self.plan.wide_ids else np.uint16,
            bos=self.plan.bos,
            eos=self.plan.eos,
            aggregation=self.plan.aggregation,
            keep_teacher=self.plan.keep_teacher,
            texts=[text.encode() for text in texts] if self.plan.keep_text else None,
        )
        part.summary.missing_documents = missing
        part.summary.unusable_documents = sum(text is None for _, text in documents)
        return part

    def _select(
        self, documents: Sequence[NumberedText]
    ) -> tuple[list[tuple[int, str]], list[TeacherLosses | None], int]:
        """The documents to pack with their teacher losses, found by content, and the number that
        the store lacks."""
        kept: list[tuple[int, str]] = []
        teachers: list[TeacherLosses | None] = []
        missing = 0
        for index, text in documents:
            if text is None:
                continue
            losses = None
            if self.store is not None:
                place = self.store.find(document_hash(text))
                if place is None:
                    missing += 1
                    if index in self.plan.skipped or self.plan.missing == "drop":
                        continue
                    if self.plan.missing == "error":
                        raise _not_in_store(index, text, self.plan.store)
                else:
                    losses = self.store[place]
            kept.append((index, text))
            teachers.append(losses)
        return kept, teachers, missing


def tokenise(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[TokenSpans]:
    """All texts, in batches of bounded size."""
    result: list[TokenSpans] = []
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= TOKENISE_BYTES:
            result += tokenizer.spans_batch(batch)
            batch, size = [], 0
    return result + tokenizer.spans_batch(batch) if batch else result


def part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def finished_part(path: Path, identity: str) -> dict[str, Any] | None:
    """The manifest entry of a part that an earlier run made, or None where there is none."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="np") as file:
            about = json.loads(file.metadata()[METADATA_KEY])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise BlocksError(
            f"{path} is damaged ({error}). Remove that file and run `vocagnolm prepare` again."
        ) from error
    if about["identity"] != identity:
        raise BlocksError(
            f"{path} was made with other settings. Choose another folder for data.blocks."
        )
    return _entry(path, about)


def _entry(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    summary = about["summary"]
    return {"name": path.name, "tokens": summary["tokens"], "summary": summary}


def _not_in_store(index: int, text: str, store: str | None) -> BlocksError:
    start = " ".join(text[:60].split())
    return BlocksError(
        f"Document {index} of the corpus ('{start}...') is not in the loss store {store}: the "
        "store was made from another corpus. Score this corpus, or set "
        "data.missing to drop (leave such documents out) or keep (train on them unguided)."
    )


def summarise(entries: Sequence[dict[str, Any]]) -> PackingSummary:
    total = PackingSummary()
    for entry in entries:
        total.add(PackingSummary(**entry["summary"]))
    return total
