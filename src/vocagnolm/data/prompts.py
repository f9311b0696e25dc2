"""Prompts: what a model is asked, from the same files as a corpus, with the expected answer where
the records have one."""

import copy
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
from vocagnolm.store.format import count_reasons

_TEXT = "{text}"
_WORDS = re.compile(r"\w+")
SHARED_WORDS = 13
"""So many words in a row that a prompt shares with a benchmark's question leave the prompt out."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. Either `text` or `problem` is set."""

    index: int
    """Number among the prompts, from 0."""
    place: str
    """Where it stands: `file.jsonl:12`."""
    text: str | None
    """The shared text (`vocagnolm.chat`), or the text that is to be continued."""
    expected: str | None = None
    """The right answer, if the record names it."""
    problem: str | None = None
    """Why it cannot be asked."""

    @property
    def messages(self) -> list[Message]:
        assert self.text is not None
        return messages_of(self.text)


class Records(Corpus):
    """Records of any kind: what each holds shows when it is read."""

    def _source_formats(self, wanted: Format) -> list[Format]:
        return ["text"] * len(self.sources)

    def _parts_of(self, number: int) -> dict[int, int]:
        return {}  # a prompt is never split


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
        without_names: Sequence[str] = (),
        paths: Sequence[str] = (),
    ):
        """instruction: a text with `{text}` in it, which asks for something to be done with the
        prompt. continues: prompts are texts that a model goes on with. without: hashes of word
        sequences (`word_sequences`) of which a prompt may hold none; without_names: the benchmarks
        from which they come. paths: where the records were found."""
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
        self.without_names = tuple(without_names)
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def _sequences(self) -> frozenset[int]:
        return frozenset(self.without)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_sequences"}

    def here(self) -> "Prompts":
        """These prompts as this machine has them: it may have copies of its own."""
        if not self.records.changed_sources():
            return self
        own, records = copy.copy(self), self.records
        own.records = Records(
            open_sources(self.paths, None, records.split),
            text_field=records.text_field,
            split=records.split,
            limit=records.limit,
        )
        if own.describe() != self.describe():
            raise CorpusError(
                f"{', '.join(self.paths)}: the prompts on this machine are not those with which "
                "the folder was begun. Give all machines the same files."
            )
        return own

    def describe(self) -> dict[str, Any]:
        """Everything that decides the prompts, for the identity of a written folder."""
        about = self.records.describe()
        shown = {
            "answer_field": self.answer_field,
            "instruction": self.instruction,
            "drop_answers": self.drop_answers or None,
            "continue": self.prompt_tokens if self.continues else None,
            "without": self._without() if self.without else None,
        }
        return about | {name: value for name, value in shown.items() if value is not None}

    def _without(self) -> dict[str, Any]:
        content = b"".join(key.to_bytes(8, "little") for key in self.without)
        return {"names": [*self.without_names], "sha256": hashlib.sha256(content).hexdigest()}

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Prompt]:
        """Prompts `start..stop`."""
        for index, record in self.records.records(start, stop):
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
        except Refused as error:
            return Prompt(index, record.place, None, expected, str(error))
        return Prompt(index, record.place, text, expected)

    def _asked(self, fields: dict[str, Any], text_field: str) -> str:
        messages = prompt_of(fields, text_field, drop_answer=self.drop_answers)
        self._require_own(message.content for message in messages)
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
        self._require_own([text])
        return text

    def _require_own(self, texts: Iterable[str]) -> None:
        """Refuse texts that hold a question of a benchmark."""
        if self.without and any(_shares(text, self._sequences) for text in texts):
            raise Refused(f"benchmark: shares {SHARED_WORDS} words in a row with a question")

    def _expected(self, fields: dict[str, Any]) -> str | None:
        """The expected answer; None where the record has none, so that answers to it are not
        marked."""
        value = None if self.answer_field is None else fields.get(self.answer_field)
        return None if value is None or isinstance(value, dict | list) else str(value)


def open_prompts(
    paths: str | Path | Sequence[str | Path],
    *,
    text_field: str = "text",
    split: Split = "none",
    limit_prompts: int | None = None,
    **options: Any,
) -> Prompts:
    """Prompts from files, folders, addresses or hub datasets, as `open_corpus` finds them;
    `options` as for `Prompts`."""
    listed = [
        str(Path(path).absolute()) if Path(path).exists() else str(path)
        for path in ([paths] if isinstance(paths, str | Path) else paths)
    ]
    records = Records(
        open_sources(listed, None, split), text_field=text_field, split=split, limit=limit_prompts
    )
    if not len(records):
        raise CorpusError(f"{', '.join(listed)} holds no prompts.")
    return Prompts(records, paths=listed, **options)


@dataclass(frozen=True)
class PromptCount:
    """What one reading of all prompts shows."""

    asked: int
    """Prompts that can be asked."""
    expected: int
    """Those of them whose expected answer is known."""
    repeated: dict[int, int]
    """How many equal prompts stand before a prompt, by its number, for those that have some before
    them. What is drawn for the second of two equal prompts differs from the first."""
    problems: dict[str, int]
    """Prompts that cannot be asked, by the kind of reason."""


def count_prompts(prompts: Iterable[Prompt]) -> PromptCount:
    """Read all prompts once. Refuses prompts of which none can be asked, with the first reason."""
    seen: Counter[bytes] = Counter()
    repeated: dict[int, int] = {}
    problems: list[Prompt] = []
    expected = 0
    for prompt in prompts:
        if prompt.text is None:
            problems.append(prompt)
            continue
        expected += prompt.expected is not None
        key = document_hash(prompt.text)
        if seen[key]:
            repeated[prompt.index] = seen[key]
        seen[key] += 1
    asked = seen.total()
    if problems and not asked:
        first = problems[0]
        raise CorpusError(
            f"none of the {len(problems):,} prompts can be asked. The first, {first.place}: "
            f"{first.problem}."
        )
    reasons = count_reasons(prompt.problem or "unknown" for prompt in problems)
    return PromptCount(asked, expected, repeated, reasons)


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


def _shares(text: str, sequences: frozenset[int]) -> bool:
    return not sequences.isdisjoint(_sequences(text, short=True))
