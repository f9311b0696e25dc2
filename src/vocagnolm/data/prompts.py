"""Prompts: what a model is asked, from the same files as a corpus, with the expected answer where
the records have one."""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vocagnolm.chat.messages import (
    Format,
    Message,
    Refused,
    messages_of,
    prompt_of,
    shared_text,
)
from vocagnolm.data.corpus import Corpus, document_hash, open_sources
from vocagnolm.data.sources import Problem, Record, Split
from vocagnolm.errors import CorpusError, UsageError
from vocagnolm.recipe.sections import PromptsSection

_TEXT = "{text}"
_WORDS = re.compile(r"\w+")
SHARED_WORDS = 13
"""So many words in a row that a prompt shares with a benchmark's question leave the prompt out."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. Either `messages` or `problem` is set."""

    index: int
    """Number among the prompts, from 0."""
    place: str
    """Where it stands: `file.jsonl:12`."""
    text: str | None
    """Its shared text (`vocagnolm.chat`); of a text that is to be continued, the text itself."""
    expected: str | None = None
    """The right answer, if the record names it."""
    problem: str | None = None
    """Why it cannot be asked."""

    @property
    def messages(self) -> list[Message]:
        assert self.text is not None
        return messages_of(self.text)


class Records(Corpus):
    """Records of any kind: what they hold shows when each is read."""

    def _found_formats(self, wanted: Format) -> list[Format]:
        return ["text"] * len(self.sources)


class Prompts:
    """Prompts in files, by number. May be sent to other processes like a corpus."""

    def __init__(
        self,
        records: "Records",
        *,
        answer_field: str | None = None,
        instruction: str | None = None,
        drop_answers: bool = False,
        continues: bool = False,
        prompt_tokens: int = PromptsSection.prompt_tokens,
        without: Collection[int] = (),
    ):
        """instruction: a text with `{text}` in it, which asks for something to be done with the
        prompt. continues: prompts are texts that a model goes on with. without: hashes of word
        sequences of which a prompt may hold none."""
        if instruction is not None and _TEXT not in instruction:
            raise UsageError(
                f"--instruction {instruction[:60]!r} has no {_TEXT}, where the text belongs."
            )
        if continues and (instruction is not None or drop_answers):
            raise UsageError("--continue goes on with texts: remove --instruction, --drop-answers.")
        self.records = records
        self.answer_field = answer_field
        self.instruction = instruction
        self.drop_answers = drop_answers
        self.continues = continues
        self.prompt_tokens = prompt_tokens
        self.without = tuple(sorted(without))

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def _sequences(self) -> frozenset[int]:
        return frozenset(self.without)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_sequences"}

    def describe(self) -> dict[str, Any]:
        """Everything that decides the prompts, for the identity of what is written."""
        about = self.records.describe()
        shown = {
            "answer_field": self.answer_field,
            "instruction": self.instruction,
            "drop_answers": self.drop_answers or None,
            "continue": self.prompt_tokens if self.continues else None,
            "without": _digest(self.without) if self.without else None,
        }
        return about | {name: value for name, value in shown.items() if value is not None}

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Prompt]:
        """Prompts `start..stop`."""
        for index, record, _ in self.records.records(start, stop):
            yield self._prompt(index, record)

    def _prompt(self, index: int, record: Record) -> Prompt:
        expected = None
        try:
            if isinstance(record.value, Problem):
                raise Refused(record.value.reason)
            fields = record.value if isinstance(record.value, dict) else {"text": record.value}
            field = self.records.text_field if isinstance(record.value, dict) else "text"
            expected = self._expected(fields)
            text = self._continued(fields, field) if self.continues else self._asked(fields, field)
            if not text.strip():
                raise Refused("empty")
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise Refused("lone surrogate")
            if self.without and _shared(text, self._sequences):
                raise Refused(f"benchmark: shares {SHARED_WORDS} words in a row with a question")
        except Refused as error:
            return Prompt(index, record.place, None, expected, str(error))
        return Prompt(index, record.place, text, expected)

    def _asked(self, fields: dict[str, Any], text_field: str) -> str:
        messages = prompt_of(fields, text_field, drop_answer=self.drop_answers)
        if self.instruction is not None:
            if len(messages) != 1:
                raise Refused("messages: --instruction is for texts and single prompts")
            asked = self.instruction.replace(_TEXT, messages[0].content)
            messages = [Message(messages[0].role, asked)]
        return shared_text(messages)

    def _continued(self, fields: dict[str, Any], text_field: str) -> str:
        text = fields.get(text_field)
        if not isinstance(text, str):
            raise Refused(f"field {text_field!r} holds {type(text).__name__}, not text")
        return text

    def _expected(self, fields: dict[str, Any]) -> str | None:
        if self.answer_field is None:
            return None
        value = fields.get(self.answer_field)
        if value is None or isinstance(value, dict | list):
            raise Refused(f"no answer: field {self.answer_field!r} holds {type(value).__name__}")
        return str(value)


def open_prompts(
    paths: str | Path | Sequence[str | Path],
    *,
    text_field: str = "text",
    split: Split = "none",
    limit: int | None = None,
    **options: Any,
) -> Prompts:
    """Prompts from files, folders, addresses or hub datasets, as `open_corpus` finds them;
    `options` as for `Prompts`."""
    records = Records(
        open_sources(paths, None, split), text_field=text_field, split=split, limit=limit
    )
    if not len(records):
        listed = [paths] if isinstance(paths, str | Path) else paths
        raise CorpusError(f"{', '.join(map(str, listed))} holds no prompts.")
    return Prompts(records, **options)


def occurrences(prompts: Iterable[Prompt]) -> dict[int, int]:
    """How many equal prompts stand before a prompt, by its number, for those that have some before
    them. What is drawn for the second of two equal prompts differs from the first."""
    seen: Counter[bytes] = Counter()
    repeated = {}
    for prompt in prompts:
        if prompt.text is not None:
            key = document_hash(prompt.text)
            if seen[key]:
                repeated[prompt.index] = seen[key]
            seen[key] += 1
    return repeated


# ---- prompts that are a benchmark's questions ----


def word_sequences(texts: Iterable[str]) -> frozenset[int]:
    """Hashes of all sequences of words in these texts; of a text with fewer words, of all of it."""
    return frozenset(key for text in texts for key in _sequences(text, short=True))


def _sequences(text: str, *, short: bool = False) -> Iterator[int]:
    words = [word.lower() for word in _WORDS.findall(text)]
    if short and 0 < len(words) < SHARED_WORDS:
        yield _hashed(words)
    for start in range(len(words) - SHARED_WORDS + 1):
        yield _hashed(words[start : start + SHARED_WORDS])


def _hashed(words: Sequence[str]) -> int:
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _shared(text: str, sequences: frozenset[int]) -> bool:
    return not sequences.isdisjoint(_sequences(text, short=True))


def _digest(sequences: Sequence[int]) -> str:
    content = b"".join(key.to_bytes(8, "little") for key in sequences)
    return hashlib.sha256(content).hexdigest()


def require_some(prompts: Sequence[Prompt], paths: Sequence[str]) -> None:
    """Refuse prompts of which none can be asked, with the reason of the first."""
    if prompts and all(prompt.text is None for prompt in prompts):
        first = prompts[0]
        raise CorpusError(
            f"none of the {len(prompts):,} prompts of {', '.join(paths)} can be asked; the first: "
            f"{first.place}: {first.problem}."
        )
