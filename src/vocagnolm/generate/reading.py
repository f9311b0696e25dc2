"""How a model reads prompts, and where what it writes ends: wherever its weights are."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from vocagnolm.chat import ChatTokenizer

if TYPE_CHECKING:
    from vocagnolm.model import ModelFiles

# A prompt is shortened for this much of an answer and no more: with 1,024 tokens allowed, the
# worked examples would lose their beginning in a context of 2,048.
_ROOM_TOKENS = 512
_END_TOKENS = (
    "</s>", "<|endoftext|>", "<|im_end|>", "<eos>", "<end_of_turn>", "<|eot_id|>",
    "<|end_of_text|>",
)  # fmt: skip
IsDone = Callable[[Sequence[int]], bool]
"""Whether all of these prompts have been answered before."""


@dataclass(frozen=True)
class Answer:
    """What a model wrote, and whether it came to an end by itself."""

    output: str
    complete: bool | None = None
    reasoning: str = ""
    """What the model thought, in a format that keeps it apart from the answer."""


def never(batch: Sequence[int]) -> bool:
    return False


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of similar length, longest first (a lack of memory shows at once)."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


def common_prefix_length(rows: Sequence[Sequence[int]]) -> int:
    """Tokens that all rows begin with, leaving every row at least one of its own."""
    return max(0, min(_agreed(*rows), min(map(len, rows)) - 1))


def _agreed(*rows: Sequence[int]) -> int:
    """How many tokens the rows have in common at their beginning."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))


@dataclass
class TextSoFar:
    """The text of an answer under way."""

    index: int
    data: bytearray = field(default_factory=bytearray)
    done: bool = False


class Reader:
    """Turns prompts into tokens, and tokens into answers."""

    def __init__(
        self,
        files: "ModelFiles",
        batch_size: int,
        chat: ChatTokenizer | None,
        *,
        context: int | None,
    ) -> None:
        """`chat`: prompts are shared texts of conversations, and are read in its template."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.tokenizer = files.tokenizer
        self.chat = chat
        self._bytes_of = self.tokenizer.bytes_of if chat is None else chat.private_bytes_of
        self.prefix_ids = list(files.prefix_ids) if chat is None else []
        self.max_context = context
        self.batch_size = batch_size
        self.ends = end_ids(files, chat)
        self.known_ids = known_ids(files)
        self.truncated_prompts = 0

    def notes(self) -> list[str]:
        """What whoever reads the scores should know."""
        if not self.truncated_prompts:
            return []
        return [
            f"Too long for the model's context of {self.max_context:,} tokens: "
            f"{self.truncated_prompts:,} of the prompts, which lost their beginning (worked "
            "examples, as a rule)."
        ]

    def encode(self, prompts: Sequence[str], new_tokens: int = 0) -> list[list[int]]:
        """Token ids with the model's own beginning-of-text. A prompt that leaves too little room
        for new tokens loses its beginning, as in lm-eval."""
        room_for = min(new_tokens, _ROOM_TOKENS)
        read = self._read(prompts)
        self.truncated_prompts += sum(len(ids) > self._room(room_for) for ids in read)
        return [self._fitted(ids, room_for) for ids in read]

    def limit(self, prompt_tokens: int, new_tokens: int) -> int:
        """The new tokens that the context has room for, at least one."""
        if self.max_context is None:
            return new_tokens
        return max(1, min(new_tokens, self.max_context - prompt_tokens))

    def _room(self, room_for: int) -> int:
        if self.max_context is None:
            return sys.maxsize
        return max(1, self.max_context - room_for - len(self.prefix_ids))

    def _fitted(self, ids: list[int], room_for: int = 0) -> list[int]:
        return self.prefix_ids + ids[-self._room(room_for) :]

    def _read(self, prompts: Sequence[str]) -> list[list[int]]:
        if self.chat is None:
            return [tokens.ids.tolist() for tokens in self.tokenizer.spans_batch(list(prompts))]
        return [self.chat.answering_ids(prompt) for prompt in prompts]

    def take(self, text: TextSoFar, tokens: Sequence[int], stops: Sequence[bytes]) -> None:
        """Append tokens to an answer until it ends."""
        for token in tokens:
            if text.done:
                return
            if token in self.ends:
                text.done = True
                return
            before = len(text.data)
            text.data += self._bytes_of(token) or b""
            for stop in stops:
                position = text.data.find(stop, max(0, before - len(stop)))
                if position >= 0:
                    del text.data[position:]
                    text.done = True

    def answer_of(self, text: TextSoFar) -> Answer:
        content, reasoning = bytes(text.data).decode("utf-8", "replace"), ""
        if self.chat is not None:
            reasoning, content = self.chat.answer_of(content)
        return Answer(content, complete=text.done, reasoning=reasoning)

    def with_options(
        self, prompts: Sequence[str], options: Sequence[Sequence[str]], new_tokens: int = 0
    ) -> list[list[tuple[list[int], int]]]:
        """The tokens of every prompt with each of its options, and how many of them are the
        prompt's. Should the two fuse into one token, it is not among these."""
        rows = []
        contexts = self.encode(prompts, new_tokens)
        for prompt, context, listed in zip(prompts, contexts, options, strict=True):
            read = self._read([prompt + option for option in listed])
            fitted = [self._fitted(ids, new_tokens) for ids in read]
            rows.append([(row, _agreed(row, context)) for row in fitted])
        return rows


def end_ids(files: "ModelFiles", chat: ChatTokenizer | None = None) -> frozenset[int]:
    """Tokens with which an answer of this model ends."""
    ends = {files.tokenizer.id_of(token) for token in _END_TOKENS} | set(files.end_ids)
    if chat is not None:
        ends.add(chat.end_of_turn)
    return frozenset(int(end) for end in ends if end is not None)


def known_ids(files: "ModelFiles") -> int:
    """One more than the last id that the tokenizer can spell: a head may have more rows."""
    return max(files.tokenizer.vocabulary.values()) + 1
