"""From what a teacher wrote to a shard of a folder: conversations that any trainer reads, the store
over exactly these, and what was left out, each with its reason."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alternatives import NOTHING
from vocagnolm.chat import ChatTokenizer, Refused
from vocagnolm.chat.answers import LaidAnswer, lay_answer, tiling_pieces
from vocagnolm.chat.messages import record_of
from vocagnolm.data.corpus import document_hash
from vocagnolm.data.prompts import Prompt
from vocagnolm.store.format import (
    DATA_FOLDER,
    DROPPED_FOLDER,
    HASH_BYTES,
    Shard,
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
    """In nats, at temperature 1; NaN where it is not known."""
    alternatives: NDArray[np.uint32] | None
    """[T, K]"""
    finished: bool
    """It came to its end by itself."""
    ended: bool
    """Its last token is the one that ended it."""
    reasoning: str | None = None
    """What the model thought, where a server keeps it apart."""
    refused: str | None = None
    """Why there is no answer: `kind: more`."""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as its teacher reads it."""

    prompt: Prompt
    ids: Sequence[int]
    """Of all that the teacher reads, its context included; empty where a server tokenizes."""
    lengths: NDArray[np.int64]
    """Byte lengths of tokens that tile the prompt's text."""
    text: str | None = None
    """The prompt's own text where it is not all of the record's: the beginning that a model goes on
    with."""


Grader = Callable[[str, str, str, bool], bool]
"""(answer, expected answer, prompt, finished) -> whether it is right."""


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
    lines: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    """Right answers to every prompt that was graded."""
    _index: list[int] = field(default_factory=list)
    _hashes: list[bytes] = field(default_factory=list)
    _lengths: list[NDArray[np.int64]] = field(default_factory=list)
    _nll: list[NDArray[np.float32]] = field(default_factory=list)
    _packed: list[NDArray[np.uint32]] = field(default_factory=list)

    def skip(self, prompt: Prompt, reason: str) -> None:
        """A prompt that cannot be asked."""
        for answer in range(self.samples):
            self._leave_out(prompt, answer, reason, None)

    def add(self, read: ReadPrompt, answers: Sequence[WrittenAnswer]) -> None:
        """All answers to a prompt."""
        before: dict[str, int] = {}
        marks = []
        for number, answer in enumerate(answers):
            try:
                laid = self._laid(read, answer)
                self._require_worth(laid, answer, before)
            except Refused as error:
                self._leave_out(read.prompt, number, str(error), answer)
                continue
            before[laid.content] = number
            row = {"finished": answer.finished}
            if self.grader is not None and read.prompt.expected is not None:
                question = read.prompt.text or ""
                right = self.grader(laid.content, read.prompt.expected, question, answer.finished)
                marks.append(right)
                row["right"] = right
            self._keep(read, number, laid, answer, row)
        if marks:
            self.right.append(sum(marks))

    def _laid(self, read: ReadPrompt, answer: WrittenAnswer) -> LaidAnswer:
        if answer.refused is not None:
            raise Refused(answer.refused)
        if not answer.finished and not self.keep_cut and not self.continues:
            raise Refused(f"cut: not finished after {len(answer.pieces):,} tokens")
        text = read.text if read.text is not None else read.prompt.text
        assert text is not None
        if self.continues:
            return _continued(text, answer)
        return lay_answer(
            text,
            answer.pieces,
            finished=answer.finished,
            ended=answer.ended,
            chat=self.chat,
            reasoning=answer.reasoning,
        )

    def _require_worth(
        self, laid: LaidAnswer, answer: WrittenAnswer, before: dict[str, int]
    ) -> None:
        if not laid.content.strip():
            raise Refused("empty")
        if laid.content in before:
            raise Refused(f"same: as answer {before[laid.content]} to this prompt")
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
            self.dropped.append(
                _line({"prompt": prompt.index, "answer": answer, "reason": reason, "text": text})
            )

    def _keep(
        self,
        read: ReadPrompt,
        number: int,
        laid: LaidAnswer,
        answer: WrittenAnswer,
        row: dict[str, Any],
    ) -> None:
        where = {"prompt": read.prompt.index, "answer": number, **row}
        if self.continues:
            self.lines.append(_line({"text": laid.text, **where}))
        else:
            self.lines.append(_line({**plain_record(laid.text), **where}))
        lengths, nll, packed = _tiled(read, laid, answer, self.alternatives)
        self._index.append(read.prompt.index * self.samples + number)
        self._hashes.append(document_hash(laid.text))
        self._lengths.append(lengths)
        self._nll.append(nll)
        self._packed.append(packed)

    def files(self) -> dict[str, bytes]:
        """The contents of the shard's files of conversations, by name."""
        name = f"{self.number:06d}.jsonl"
        return {
            f"{DATA_FOLDER}/{name}": "".join(self.lines).encode(),
            f"{DROPPED_FOLDER}/{name}": "".join(self.dropped).encode(),
        }

    def shard(self, prompts: int) -> Shard:
        """The store's part; `prompts`: how many it stands for."""
        hashes = b"".join(self._hashes)
        packed = None
        if self.alternatives:
            packed = np.concatenate([np.zeros((0, self.alternatives), "<u4"), *self._packed])
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
            files=self._described_files(),
        )

    def _described_files(self) -> dict[str, dict[str, Any]]:
        """What the manifest says of the files; of graded answers also how many prompts have how
        many right ones."""
        about = {name: _about(content) for name, content in self.files().items()}
        if self.grader is not None:
            marks = np.bincount(np.array(self.right, np.int64), minlength=self.samples + 1)
            about[f"{DATA_FOLDER}/{self.number:06d}.jsonl"]["right"] = marks.tolist()
        return about


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


def _continued(text: str, answer: WrittenAnswer) -> LaidAnswer:
    """A text and how it went on; what ends it is no part of it."""
    pieces = answer.pieces[:-1] if answer.ended else answer.pieces
    data = b"".join(pieces)
    content = data.decode(errors="ignore")
    if len(content.encode()) < len(data) - 3 or "\ufffd" in content:
        raise Refused("not UTF-8: in the middle of the text")
    begin = len(text.encode())
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    ends = np.minimum(np.cumsum(sizes), len(content.encode()))
    spans = np.stack([np.minimum(ends, np.cumsum(sizes) - sizes), ends], 1) + begin
    if answer.ended:
        last = begin + len(content.encode())
        spans = np.concatenate([spans, [[last, last]]])
    return LaidAnswer(text + content, content, "", begin, spans)


def _tiled(
    read: ReadPrompt, laid: LaidAnswer, answer: WrittenAnswer, alternatives: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.uint32]]:
    """Byte lengths that tile the document, with losses and alternatives where a token was drawn:
    what the prompt's tokens and what no token covers has neither."""
    held = np.flatnonzero(laid.spans[:, 0] < laid.spans[:, 1])
    n_bytes = len(laid.text.encode())
    edges = np.concatenate([[laid.begin], laid.spans[held].ravel(), [n_bytes]])
    gaps = np.diff(edges)
    every = np.full(len(gaps), -1)
    every[1::2] = held
    kept = gaps > 0
    source = np.concatenate([np.full(len(read.lengths), -1), every[kept]])
    lengths = np.concatenate([read.lengths, gaps[kept]])
    drawn = source >= 0
    nll = np.full(len(source), np.nan, np.float32)
    nll[drawn] = answer.nll[source[drawn]]
    packed = np.full((len(source), alternatives), NOTHING, np.uint32)
    if alternatives and answer.alternatives is not None:
        packed[drawn] = answer.alternatives[source[drawn]]
    return lengths, nll, packed


def prompt_lengths(prompt: str, chat: ChatTokenizer | None) -> NDArray[np.int64]:
    """Byte lengths that tile a prompt's shared text: the teacher's tokens, where it has a template
    that reads it alone."""
    n_bytes = len(prompt.encode())
    if chat is not None:
        (tokens,) = chat.outcomes([prompt])
        if not isinstance(tokens, str):
            held = tokens.spans[tokens.token_bytes > 0]
            lengths = np.diff(np.concatenate([[0], held.ravel(), [n_bytes]]))
            return np.asarray(lengths[lengths > 0], np.int64)
    return tiling_pieces(n_bytes)


def by_prompt(
    reads: Sequence[ReadPrompt], answers: Iterable[tuple[int, int, WrittenAnswer]], samples: int
) -> Iterator[tuple[ReadPrompt, list[WrittenAnswer]]]:
    """Prompts with all of their answers, in order, from answers that come as they end."""
    there: list[dict[int, WrittenAnswer]] = [{} for _ in reads]
    for prompt, number, answer in answers:
        there[prompt][number] = answer
    for read, found in zip(reads, there, strict=True):
        yield read, [found[number] for number in range(samples)]
