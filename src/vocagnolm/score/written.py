"""From what a teacher wrote to a shard of a folder: documents that any trainer reads, the store
over exactly these, and what was left out, each with its reason."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alternatives import NOTHING, renumbered
from vocagnolm.chat import ChatTokenizer, Refused
from vocagnolm.chat.answers import LaidAnswer, lay_answer, lay_continuation, tiling_pieces
from vocagnolm.chat.messages import record_of
from vocagnolm.data.corpus import document_hash
from vocagnolm.data.prompts import Prompt
from vocagnolm.store.format import (
    DATA_FOLDER,
    DROPPED_FOLDER,
    HASH_BYTES,
    Shard,
    document_file,
    entry_table,
    narrowest_unsigned,
    to_float16,
)

# An answer is endless repetition where so few of its pieces of text differ from each other.
_REPEATED_BYTES, _LEAST_REPEATED, _DIFFERENT_SHARE = 16, 256, 0.2


@dataclass(frozen=True)
class WrittenAnswer:
    """What an engine gives for one answer."""

    pieces: Sequence[bytes]
    """The text of every token; private characters for control tokens (`ChatTokenizer`)."""
    nll: NDArray[np.float32]
    """Losses in nats, at temperature 1; NaN where one is not known."""
    alternatives: NDArray[np.uint32] | None
    """[T, K]"""
    finished: bool
    """It came to its end by itself."""
    ended: bool
    """The last token is the one that ended it."""
    entries: Sequence[bytes] | None = None
    """What the ids of its alternatives spell, where nobody knows the teacher's vocabulary; the
    empty entry is an end."""
    reasoning: str | None = None
    """What the model thought, where a server keeps it apart."""
    refused: str | None = None
    """Why there is no answer: `kind: more`."""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as its teacher reads it."""

    prompt: Prompt
    ids: Sequence[int]
    """What the teacher reads, with its context; empty where a server tokenizes."""
    text: str | None = None
    """The beginning of a text that a model goes on with, where that is not all of the record's."""

    @property
    def shown(self) -> str:
        """What stands before the answer in the document."""
        text = self.prompt.text if self.text is None else self.text
        assert text is not None
        return text


Grader = Callable[[str, str, str, bool], bool | None]
"""(answer, expected answer, prompt, finished) -> whether it is right; None where nobody can say."""


@dataclass
class ShardBuilder:
    """Collects the answers to some prompts, in their order."""

    number: int
    first_prompt: int
    samples: int
    alternatives: int
    keep_cut: bool = False
    chat: ChatTokenizer | None = None
    continues: bool = False
    grader: Grader | None = None
    own_entries: bool = False
    """Whether the shard says itself what the ids of its alternatives spell."""
    lines: list[str] = field(default_factory=list)
    """The documents, each as a line of JSON."""
    dropped: list[str] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    """The number of right answers to every prompt that was graded."""
    marked: int = 0
    """The number of answers that were marked as right or wrong."""
    _index: list[int] = field(default_factory=list)
    _hashes: list[bytes] = field(default_factory=list)
    _lengths: list[NDArray[np.int64]] = field(default_factory=list)
    _nll: list[NDArray[np.float32]] = field(default_factory=list)
    _packed: list[NDArray[np.uint32]] = field(default_factory=list)
    _entries: list[Sequence[bytes]] = field(default_factory=list)

    def skip(self, prompt: Prompt, reason: str) -> None:
        """Note a prompt that cannot be asked."""
        for answer in range(self.samples):
            self._leave_out(prompt, answer, reason, None)

    def add(self, read: ReadPrompt, answers: Sequence[WrittenAnswer]) -> None:
        """Keep or leave out each of the answers to a prompt."""
        kept: dict[str, int] = {}
        marks = []
        for number, answer in enumerate(answers):
            try:
                laid = self._laid(read, answer)
                self._require_worth(laid, kept)
            except Refused as error:
                self._leave_out(read.prompt, number, str(error), answer)
                continue
            kept[laid.text] = number
            row = {"finished": answer.finished}
            if self.grader is not None and read.prompt.expected is not None:
                question = read.prompt.text or ""
                right = self.grader(laid.content, read.prompt.expected, question, answer.finished)
                if right is not None:
                    marks.append(right)
                    row["right"] = right
            self._keep(read, number, laid, answer, row)
        if marks:
            self.right.append(sum(marks))
            self.marked += len(marks)

    def _laid(self, read: ReadPrompt, answer: WrittenAnswer) -> LaidAnswer:
        if answer.refused is not None:
            raise Refused(answer.refused)
        if not answer.finished and not self.keep_cut and not self.continues:
            raise Refused(f"cut: not finished after {len(answer.pieces):,} tokens")
        ending = {"finished": answer.finished, "ended": answer.ended}
        if self.continues:
            return lay_continuation(read.shown, answer.pieces, **ending)
        chat, thought = self.chat, answer.reasoning
        return lay_answer(read.shown, answer.pieces, **ending, chat=chat, reasoning=thought)

    def _require_worth(self, laid: LaidAnswer, kept: dict[str, int]) -> None:
        """`kept`: documents with other answers to the prompt, and the numbers of these."""
        if not laid.content.strip():
            raise Refused("empty")
        if laid.text in kept:
            raise Refused(f"same: as answer {kept[laid.text]} to this prompt")
        if is_repetition(laid.content.encode()):
            raise Refused("repetition: it says the same again and again")

    def _leave_out(
        self, prompt: Prompt, answer: int, reason: str, written: WrittenAnswer | None
    ) -> None:
        document = (prompt.index * self.samples) + answer
        place = f"{prompt.place}, answer {answer}" if written is not None else prompt.place
        self.skipped.append({"document": document, "place": place, "reason": reason})
        if written is not None:
            text = b"".join(written.pieces).decode(errors="replace")
            text = text if self.chat is None else self.chat.with_control_tokens(text)
            self.dropped.append(_line({**_named(prompt, answer), "reason": reason, "text": text}))

    def _keep(
        self,
        read: ReadPrompt,
        number: int,
        laid: LaidAnswer,
        answer: WrittenAnswer,
        row: dict[str, Any],
    ) -> None:
        record = {"text": laid.text} if self.continues else plain_record(laid.text)
        self.lines.append(_line({**record, **_named(read.prompt, number), **row}))
        lengths, nll, packed = _tiled(laid, answer, self.alternatives)
        self._index.append(read.prompt.index * self.samples + number)
        self._hashes.append(document_hash(laid.text))
        self._lengths.append(lengths)
        self._nll.append(nll)
        self._packed.append(packed)
        self._entries.append(answer.entries or ())

    def documents(self) -> dict[str, bytes]:
        """The contents of the shard's files of documents, by name; none without a line."""
        folders = {DATA_FOLDER: self.lines, DROPPED_FOLDER: self.dropped}
        contents = {folder: "".join(lines).encode() for folder, lines in folders.items()}
        return {
            document_file(folder, self.number, content): content
            for folder, content in contents.items()
            if content
        }

    def shard(self, prompts: int, documents: dict[str, bytes]) -> Shard:
        """The store's part. `prompts`: how many it stands for; `documents`: its files."""
        hashes = b"".join(self._hashes)
        packed = offsets = content = None
        if self.alternatives:
            answers = self._packed
            if self.own_entries:
                answers, entries = self._numbered()
                offsets, content = entry_table(entries)
            packed = np.concatenate([np.zeros((0, self.alternatives), "<u4"), *answers])
        about = {name: _about(content) for name, content in documents.items()}
        if self.grader is not None:
            marks = np.bincount(np.array(self.right, np.int64), minlength=self.samples + 1)
            for name in about:
                if name.startswith(f"{DATA_FOLDER}/"):
                    # answers, and prompts with 0, 1, ... right ones
                    about[name] |= {"marked": self.marked, "right": marks.tolist()}
        return Shard(
            number=self.number,
            first_document=self.first_prompt * self.samples,
            document_span=prompts * self.samples,
            document_hash=np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES),
            document_index=np.array(self._index, "<u8"),
            token_count=np.array([len(lengths) for lengths in self._lengths], "<u4"),
            token_bytes=narrowest_unsigned(np.concatenate([np.zeros(0, np.int64), *self._lengths])),
            nll=to_float16(np.concatenate([np.zeros(0, "f4"), *self._nll])),
            skipped=self.skipped,
            alternatives=packed,
            entry_offsets=offsets,
            entry_bytes=content,
            files=about,
        )

    def _numbered(self) -> tuple[list[NDArray[np.uint32]], list[bytes]]:
        """The alternatives in the ids of one table for all answers, sorted, and this table."""
        entries = sorted(set[bytes]().union(*self._entries))
        number = {entry: index for index, entry in enumerate(entries)}
        answers = [
            renumbered(packed, np.array([number[entry] for entry in own], np.uint32))
            for packed, own in zip(self._packed, self._entries, strict=True)
        ]
        return answers, entries


def _named(prompt: Prompt, answer: int) -> dict[str, int]:
    """Which answer a row holds. (TRL takes a field called `prompt` for the text of one.)"""
    return {"prompt_index": prompt.index, "answer_index": answer}


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _about(content: bytes) -> dict[str, Any]:
    return {
        "bytes": len(content),
        "lines": content.count(b"\n"),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def plain_record(text: str) -> dict[str, Any]:
    """A shared text as a record without fields that say nothing, which trainers read as it is."""

    def kept(entry: dict[str, Any]) -> dict[str, Any]:
        must = ("role", "content")
        return {
            name: value for name, value in entry.items() if name in must or value not in _UNSAID
        }

    record = record_of(text)
    messages = [kept(entry) for entry in record.pop("messages")]
    rest = {n: v for n, v in record.items() if n != "finished" and v not in _UNSAID}
    return {"messages": messages, **rest}


_UNSAID: tuple[Any, ...] = (None, "", {}, [])


def is_repetition(content: bytes) -> bool:
    """Whether a text says the same again and again: of its pieces of some bytes, few differ."""
    pieces = len(content) - _REPEATED_BYTES + 1
    if pieces < _LEAST_REPEATED:
        return False
    different = {content[at : at + _REPEATED_BYTES] for at in range(pieces)}
    return len(different) < _DIFFERENT_SHARE * pieces


def _tiled(
    laid: LaidAnswer, answer: WrittenAnswer, alternatives: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.uint32]]:
    """Byte lengths that tile the document, with losses and alternatives where a token was drawn.
    What no such token covers, all of the prompt included, has neither."""
    held = np.flatnonzero(laid.spans[:, 0] < laid.spans[:, 1])
    edges = np.concatenate([[laid.begin], laid.spans[held].ravel(), [len(laid.text.encode())]])
    gaps = np.diff(edges)
    source = np.full(len(gaps), -1)
    source[1::2] = held
    before = tiling_pieces(laid.begin)
    source = np.concatenate([np.full(len(before), -1), source[gaps > 0]])
    lengths = np.concatenate([before, gaps[gaps > 0]])
    drawn = source >= 0
    nll = np.full(len(source), np.nan, np.float32)
    nll[drawn] = answer.nll[source[drawn]]
    packed = np.full((len(source), alternatives), NOTHING, np.uint32)
    if alternatives and answer.alternatives is not None:
        packed[drawn] = answer.alternatives[source[drawn]]
    packed[np.isnan(nll)] = NOTHING
    return lengths, nll, packed
