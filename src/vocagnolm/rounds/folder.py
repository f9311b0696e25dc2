"""What a round leaves: the answers that the student wrote, as a corpus of conversations, and what
the teacher made of them, as the store over exactly these. A finished folder is read, never written
again: training takes a round from its folder alone, also where it was written a moment ago.

Beside the fields of any written folder, a document has the tokens that the student drew
(`student_ids`) and its losses on them (`student_nll`), exactly.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.chat.answers import LaidAnswer
from vocagnolm.data.corpus import described_documents, document_hash
from vocagnolm.data.prompts import Prompt
from vocagnolm.errors import TrainingError
from vocagnolm.rounds.targets import Rollout
from vocagnolm.rounds.teacher import Reading
from vocagnolm.score.written import plain_record
from vocagnolm.store import LossStore, StoreWriter
from vocagnolm.store.format import (
    DATA_FOLDER,
    DROPPED_FOLDER,
    HASH_BYTES,
    MANIFEST_FILE,
    Record,
    Shard,
    document_file,
    document_files,
    narrowest_unsigned,
    to_float16,
)


@dataclass(frozen=True)
class RoundAnswer:
    """One answer of a round: kept with its reading, or left out for a reason."""

    slot: int
    """The answer's place in the round."""
    prompt: Prompt
    text: str = ""
    """What was written, for people."""
    reason: str | None = None
    rollout: Rollout | None = None
    laid: LaidAnswer | None = None
    reading: Reading | None = None
    other_ids: bool = False
    """Whether its text tokenizes to other ids than were drawn."""
    right: bool | None = None
    """Whether the expected answer says so; None without one."""


def found_round(folder: Path) -> bool:
    """Whether a round is there, without what a kill has left in its finished folder."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    StoreWriter(folder, {}, 1).tidy()
    return True


def write_round(
    folder: Path,
    identity: dict[str, Any],
    vocabulary: bytes,
    answers: Sequence[RoundAnswer],
    measures: dict[str, Any],
) -> None:
    """Write the folder of a round. `measures` go into its manifest."""
    writer = StoreWriter(folder, identity, 1, vocabulary=vocabulary)
    writer.begin()
    if not writer.has_shard(0)[0]:
        documents = _documents(answers)
        writer.write_shard(_shard(answers, documents), documents)
    writer.finish(lambda records: {**_written(records, answers), "round": measures})
    writer.tidy()


def _documents(answers: Sequence[RoundAnswer]) -> dict[str, bytes]:
    """The contents of the files of documents by name; none without a line."""
    lines: dict[str, list[str]] = {DATA_FOLDER: [], DROPPED_FOLDER: []}
    for answer in answers:
        row: dict[str, Any] = {"prompt_index": answer.prompt.index, "answer_index": answer.slot}
        if answer.laid is None or answer.rollout is None or answer.reason is not None:
            row |= {"reason": answer.reason, "text": answer.text}
            lines[DROPPED_FOLDER].append(json.dumps(row, ensure_ascii=False) + "\n")
            continue
        row = plain_record(answer.laid.text) | row | {"finished": answer.rollout.finished}
        if answer.right is not None:
            row["right"] = answer.right
        row["student_ids"] = [int(token) for token in answer.rollout.ids]
        if answer.rollout.nll is not None:
            row["student_nll"] = [float(value) for value in answer.rollout.nll]
        lines[DATA_FOLDER].append(json.dumps(row, ensure_ascii=False) + "\n")
    contents = {name: "".join(rows).encode() for name, rows in lines.items() if rows}
    return {document_file(name, 0, content): content for name, content in contents.items()}


def _shard(answers: Sequence[RoundAnswer], documents: dict[str, bytes]) -> Shard:
    kept = [answer for answer in answers if answer.reason is None]
    laid = [answer.laid for answer in kept if answer.laid is not None]
    readings = [answer.reading for answer in kept if answer.reading is not None]
    hashes = b"".join(document_hash(answer.text) for answer in laid)
    return Shard(
        number=0,
        first_document=0,
        document_span=len(answers),
        document_hash=np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES),
        document_index=np.array([answer.slot for answer in kept], "<u8"),
        token_count=np.array([len(reading.nll) for reading in readings], "<u4"),
        token_bytes=narrowest_unsigned(np.concatenate([r.token_bytes for r in readings])),
        nll=to_float16(np.concatenate([reading.nll for reading in readings])),
        skipped=[
            {"document": answer.slot, "place": answer.prompt.place, "reason": answer.reason}
            for answer in answers
            if answer.reason is not None
        ],
        alternatives=np.concatenate([reading.packed for reading in readings]),
        files={
            name: {
                "bytes": len(content),
                "lines": content.count(b"\n"),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
            for name, content in documents.items()
        },
    )


def _written(records: list[Record], answers: Sequence[RoundAnswer]) -> dict[str, Any]:
    """The documents as a corpus that is opened describes itself."""
    sources = [
        {"name": name, "documents": about["lines"], "sha256": about["sha256"]}
        for record in records
        for name, about in record["files"].items()
        if name.startswith(f"{DATA_FOLDER}/")
    ]
    prompts = len({answer.prompt.index for answer in answers})
    return {"written": {"prompts": prompts, **described_documents(sources, True)}}


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as its folder holds it."""

    prompt_index: int
    ids: list[int]
    nll: np.ndarray
    finished: bool
    content: str
    right: bool | None
    reading: Reading


@dataclass(frozen=True)
class StoredRound:
    answers: list[StoredAnswer]
    measures: dict[str, Any]
    identity: dict[str, Any]


def read_round(folder: Path) -> StoredRound:
    """The kept answers of a finished round, in their order."""
    store = LossStore.open(folder)
    names = [name for name in document_files(store.manifest) if name.startswith(f"{DATA_FOLDER}/")]
    rows: list[dict[str, Any]] = []
    for name in names:
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        if hashlib.sha256(content).hexdigest() != document_files(store.manifest)[name]["sha256"]:
            raise TrainingError(
                f"{folder / name} is missing or has other bytes than were written. Restore it from "
                "a copy, or begin the run again in another run.folder."
            )
        rows += map(json.loads, content.decode().splitlines())
    if len(rows) != len(store):
        raise TrainingError(f"{folder} holds {len(rows)} answers, its store {len(store)}.")
    answers = []
    for number, row in enumerate(rows):
        token_bytes, nll = store[number]
        reading = Reading(token_bytes, nll, store.alternatives(number).packed)
        answers.append(
            StoredAnswer(
                prompt_index=row["prompt_index"],
                ids=row["student_ids"],
                nll=np.array(row["student_nll"], np.float32),
                finished=row["finished"],
                content=row["messages"][-1]["content"],
                right=row.get("right"),
                reading=reading,
            )
        )
    return StoredRound(answers, store.manifest["round"], store.manifest["identity"])
