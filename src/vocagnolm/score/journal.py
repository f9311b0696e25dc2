"""Answers of servers, kept as they come: an answer that was given, and perhaps paid for, is never
asked for again, wherever a process is killed. A shard is made from them, and then they go.

Every response is a file of its own in `answers/` beside the claims, which appears whole or not at
all, in folders and buckets, also where two processes work on one shard.
"""

import base64
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vocagnolm.base.files import json_bytes, read_json
from vocagnolm.errors import StoreError, VocagnolmWarning
from vocagnolm.score.written import WrittenAnswer
from vocagnolm.storage import Storage
from vocagnolm.store.format import ANSWER_FOLDER

Answers = Sequence[tuple[int, int, WrittenAnswer]]
"""The number of a prompt, the number of the answer, and the answer."""


class AnswerJournal:
    """The answers to a shard's prompts that are there. `identity` is the digest of the folder's."""

    def __init__(self, storage: Storage, shard: int, identity: str):
        self._storage, self._identity = storage, identity
        self._begin = f"{ANSWER_FOLDER}/{shard:06d}-"

    def read(self) -> dict[tuple[int, int], WrittenAnswer]:
        """By number of the prompt and of the answer. Where two processes were answered, the first
        answer by the name of its file counts."""
        there: dict[tuple[int, int], WrittenAnswer] = {}
        for name in self._names():
            for prompt, number, answer in self._read(name):
                there.setdefault((prompt, number), answer)
        return there

    def add(self, answers: Answers) -> None:
        """Keep a response: it is on the disk when this returns."""
        prompt, number, _ = answers[0]
        rows = [{"prompt": p, "answer": n, **_encoded(a)} for p, n, a in answers]
        content = json_bytes(
            {"identity": self._identity, "answers": rows}, indent=None, sealed=True
        )
        self._storage.create(f"{self._begin}{prompt:08d}-{number:04d}.json", content)

    def remove(self) -> None:
        """When the shard is there."""
        self._storage.remove(*self._names())

    def _names(self) -> list[str]:
        return sorted(n for n in self._storage.files(ANSWER_FOLDER) if n.startswith(self._begin))

    def _read(self, name: str) -> Answers:
        keys = {"identity": str, "answers": list}
        path = self._storage.shown(name)
        try:
            content = read_json(path, StoreError, "", keys, read=lambda: self._storage.read(name))
            if content["identity"] != self._identity:
                raise _StrangerError(f"{path} belongs to another run. Choose another --out.")
            return [(row["prompt"], row["answer"], _decoded(row)) for row in content["answers"]]
        except _StrangerError:
            raise
        except (StoreError, KeyError, TypeError, ValueError) as error:
            text = f"{path} is damaged ({str(error)[:200]}): its prompts are asked again."
            warnings.warn(text, VocagnolmWarning, stacklevel=2)
            self._storage.remove(name)
            return []


class _StrangerError(StoreError):
    """A file that another run has made."""


def _encoded(answer: WrittenAnswer) -> dict[str, Any]:
    packed = answer.alternatives
    return {
        "pieces": _texts(answer.pieces),
        "nll": _base64(answer.nll.astype("<f4")),
        "alternatives": None if packed is None else _base64(packed.astype("<u4")),
        "count": 0 if packed is None else packed.shape[1],
        "entries": None if answer.entries is None else _texts(answer.entries),
        "finished": answer.finished,
        "ended": answer.ended,
        "reasoning": answer.reasoning,
        "refused": answer.refused,
    }


def _decoded(row: dict[str, Any]) -> WrittenAnswer:
    packed, entries = row["alternatives"], row["entries"]
    return WrittenAnswer(
        _bytes(row["pieces"]),
        np.frombuffer(base64.b64decode(row["nll"]), "<f4").astype(np.float32),
        None if packed is None else _array(packed, row["count"]),
        finished=row["finished"],
        ended=row["ended"],
        entries=None if entries is None else _bytes(entries),
        reasoning=row["reasoning"],
        refused=row["refused"],
    )


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _array(text: str, count: int) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32)
    return flat.reshape(-1, count)


def _texts(pieces: Iterable[bytes]) -> list[str]:
    """Bytes as texts of as many characters: JSON knows no bytes."""
    return [piece.decode("latin-1") for piece in pieces]


def _bytes(texts: Iterable[str]) -> list[bytes]:
    return [text.encode("latin-1") for text in texts]
