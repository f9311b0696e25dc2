"""Teachers that write: what `write` asks of one, and a model in this process as a teacher."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vocagnolm.alignment import token_texts
from vocagnolm.alternatives import AlternativesSpec, Vocabulary
from vocagnolm.chat import ChatTokenizer, Message, Refused, template_of
from vocagnolm.chat.messages import conversation_of, format_of, messages_of
from vocagnolm.data.corpus import document_hash, open_sources
from vocagnolm.data.prompts import Prompt
from vocagnolm.errors import ModelError, ScoreError, TemplateError, TilingError, UsageError
from vocagnolm.generate.decoder import Decoder, PromptTokens, fitting_rows
from vocagnolm.generate.draw import Sampling
from vocagnolm.generate.reading import end_ids, known_ids
from vocagnolm.model.load import ModelFiles
from vocagnolm.model.runtime import import_compiler_meanwhile, torch_threads
from vocagnolm.recipe.sections import WriteSection
from vocagnolm.score.teacher import MOST_THREADS, described_alternatives, require_choice
from vocagnolm.score.written import ReadPrompt, WrittenAnswer

PROMPT_ROOM_TOKENS = 1536
GPU_SHARD_PROMPTS, CPU_SHARD_PROMPTS = 1024, 32
# Ids that two prompts have in common because both begin with the context, less this many: the last
# of them may belong to a token that the prompt goes on with.
_LEAST_SHARED_TOKENS = 16


class WriteSettings(WriteSection, frozen=True):
    """Settings of `vocagnolm write`. None: chosen by model and device, and recorded in the
    manifest."""


class Writer(Protocol):
    """A teacher that writes answers."""

    settings: WriteSettings
    """With everything chosen: another machine that is given them chooses nothing."""
    chat: ChatTokenizer | None
    """Reads conversations in the teacher's template; None for a model without one."""

    @property
    def device_name(self) -> str | None: ...

    def describe(self) -> dict[str, Any]:
        """Everything about the teacher that decides what it writes, for the manifest."""
        ...

    def vocabulary(self) -> Vocabulary | None:
        """What the ids of its alternatives spell; None where only its answers say."""
        ...

    def load(self) -> None:
        """Prepare for writing."""
        ...

    def read(self, prompts: Sequence[Prompt]) -> list[ReadPrompt | str]:
        """The prompts as the teacher reads them, or the reason why it cannot."""
        ...

    def spelled(self, read: ReadPrompt) -> str:
        """What the teacher reads, for people: control tokens by their names."""
        ...

    def write(
        self,
        reads: Sequence[ReadPrompt],
        seeds: Sequence[Sequence[int]],
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, int, WrittenAnswer]]:
        """Answers as they end: (number among `reads`, number of the answer, the answer)."""
        ...


def answer_seed(seed: int, prompt: str, occurrence: int, answer: int) -> int:
    """The number from which all draws of an answer follow: that of its n-th token is a function of
    this number plus n."""
    key = f"{seed} {occurrence} {answer} ".encode() + document_hash(prompt)
    # room for the positions of its tokens
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2


# ---- what the teacher is given beside the prompt ----


def read_examples(path: str | Path) -> list[Message]:
    """Worked examples, each a prompt and its answer, as the turns of a conversation."""
    turns: list[Message] = []
    for source in open_sources(path, None):
        for record in source.read(0, len(source)):
            fields = record.value if isinstance(record.value, dict) else {}
            if "question" in fields and "answer" in fields:
                fields = {"prompt": fields["question"], "completion": str(fields["answer"])}
            kind = format_of(fields, "")
            try:
                if kind is None:
                    raise Refused("neither messages nor a prompt and its completion")
                messages = conversation_of(fields, kind)
                if [m.role for m in messages[-2:]] != ["user", "assistant"]:
                    raise Refused("no answer of the assistant at its end")
            except Refused as error:
                raise UsageError(
                    f"--examples: {record.place} is no worked example: {error}."
                ) from None
            turns += messages
    if not turns:
        raise UsageError(f"--examples {path} holds no worked example.")
    return turns


class Surroundings:
    """What the teacher reads before every prompt, and students never see."""

    def __init__(self, settings: WriteSettings):
        self._system = settings.system
        self._examples = read_examples(settings.examples) if settings.examples else []

    def __bool__(self) -> bool:
        return bool(self._system or self._examples)

    def describe(self) -> dict[str, Any]:
        examples = [[turn.role, turn.text] for turn in self._examples]
        return {"system": self._system, "examples": examples or None}

    def around(self, messages: Sequence[Message]) -> list[Message]:
        """A prompt with what stands before it."""
        before = []
        if self._system is not None:
            if messages[0].role == "system":
                raise Refused("system: the prompt has a system message of its own, beside --system")
            before.append(Message("system", self._system))
        elif messages[0].role == "system":
            before, messages = [messages[0]], messages[1:]
        return [*before, *self._examples, *messages]


class TeacherContext:
    """What stands before every prompt, and how the teacher reads both."""

    def __init__(self, files: ModelFiles, settings: WriteSettings, continues: bool, tokens: int):
        self._files, self._continues, self._prompt_tokens = files, continues, tokens
        self.chat: ChatTokenizer | None = None
        if not continues:
            template = template_of(
                files.tokenizer, settings.chat_template, settings.template_options
            )
            if template.origin != "plain" or settings.chat_template == "plain":
                self.chat = ChatTokenizer(files.tokenizer, template)
        self._surroundings = Surroundings(settings)
        if continues and self._surroundings:
            raise UsageError("--continue goes on with texts: remove --system and --examples.")

    def describe(self) -> dict[str, Any]:
        template = None if self.chat is None else self.chat.template.describe()
        return {**self._surroundings.describe(), "template": template}

    def read(self, prompt: Prompt) -> ReadPrompt:
        """A prompt with all that stands before it; `Refused` where the teacher cannot read it."""
        assert prompt.text is not None
        if self._continues:
            return self._beginning(prompt)
        own = messages_of(prompt.text)
        messages = self._surroundings.around(own)
        if self.chat is not None:
            try:
                return ReadPrompt(prompt, self.chat.prompt_ids(messages))
            except TemplateError as error:
                raise Refused(f"template: {error}") from None
        if len(own) > 1:
            raise Refused(
                "no template: the prompt is a conversation, and the teacher has no chat template. "
                "Give it one with --chat-template"
            )
        text = "\n\n".join(message.content for message in messages)
        return ReadPrompt(prompt, [*self._files.prefix_ids, *self._ids(text)])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._files.tokenizer.spans(text).ids.tolist()
        return ids

    def _beginning(self, prompt: Prompt) -> ReadPrompt:
        """The first tokens of a text, up to the last one that ends with a whole character."""
        assert prompt.text is not None
        spans = self._files.tokenizer.spans(prompt.text)
        data = prompt.text.encode()
        for count in range(min(self._prompt_tokens, len(spans)), 0, -1):
            end = int(spans.spans[count - 1, 1])
            if end == len(data) or data[end] & 0xC0 != 0x80:
                ids = [*self._files.prefix_ids, *spans.ids[:count].tolist()]
                return ReadPrompt(prompt, ids, data[:end].decode())
        raise Refused("empty: no token of the text ends with a whole character")

    @cached_property
    def shared_ids(self) -> list[int]:
        """The tokens with which every prompt begins, if they are worth a pass of their own."""
        if self._continues:
            return []
        try:
            rows = [self.read(Prompt(0, "", f"{letter}\x02")).ids for letter in "ab"]
        except (Refused, TilingError):
            return []
        count = next((n for n, (a, b) in enumerate(zip(*rows, strict=False)) if a != b), 0)
        return [*rows[0][: count - 1]] if count > _LEAST_SHARED_TOKENS else []


# ---- a model in this process ----


class LocalWriter:
    """A causal language model in this process. The weights are loaded when it has to write."""

    def __init__(
        self,
        files: ModelFiles,
        settings: WriteSettings,
        *,
        continues: bool = False,
        prompt_tokens: int = 128,
    ):
        self._files = files
        self._context = TeacherContext(files, settings, continues, prompt_tokens)
        self.chat = self._context.chat
        on_gpu = files.device.type == "cuda"
        longest = files.max_context
        context = settings.context or self.usual_context(files, settings)
        if longest is not None and context > longest:
            raise UsageError(f"--context {context}: {files.name} reads at most {longest} tokens.")
        if context <= settings.max_new_tokens:
            raise UsageError(
                f"--max-new-tokens {settings.max_new_tokens} leaves no room for prompts in a "
                f"context of {context} tokens. Use fewer."
            )
        compiled = on_gpu if settings.compiled is None else settings.compiled
        processors = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        rows = None
        if on_gpu:
            shared = len(self._context.shared_ids)
            rows = settings.rows or fitting_rows(
                files.config, files.dtype, _free_bytes(files), context - shared
            )
        self.settings = replace(
            settings,
            device=files.device.type,
            dtype=files.dtype_name,
            context=context,
            rows=rows,
            compiled=compiled,
            threads=None if on_gpu else settings.threads or processors,
            shard_prompts=settings.shard_prompts
            or (GPU_SHARD_PROMPTS if on_gpu else CPU_SHARD_PROMPTS),
        )
        self._stops = [text.encode() for text in settings.stop]
        self._kept = AlternativesSpec(settings.alternatives) if settings.alternatives else None
        if self._kept is not None:
            require_choice(files, self._kept)

    @staticmethod
    def usual_context(files: ModelFiles, settings: WriteSettings) -> int:
        return min(PROMPT_ROOM_TOKENS + settings.max_new_tokens, files.max_context or sys.maxsize)

    @property
    def device_name(self) -> str | None:
        device = self._files.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else None

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return end_ids(self._files, self.chat)

    def describe(self) -> dict[str, Any]:
        tokenizer, settings = self._files.tokenizer, self.settings
        return {
            "teacher": self._files.describe(),
            "tokenizer": {
                "name": tokenizer.name,
                "kind": tokenizer.kind,
                "vocabulary_size": tokenizer.vocabulary_size,
                "fingerprint": tokenizer.fingerprint,
            },
            "writing": {
                **{name: getattr(settings, name) for name in _DECIDING},
                **self._context.describe(),
            },
            **described_alternatives(self._kept, self.vocabulary),
        }

    def vocabulary(self) -> Vocabulary:
        return token_texts(self._files.tokenizer, end_ids(self._files, self.chat))

    def load(self) -> None:
        assert self._decoder is not None

    @cached_property
    def _decoder(self) -> Decoder:
        settings = self.settings
        if settings.compiled and self._files.device.type == "cuda":
            import_compiler_meanwhile()
        return Decoder(
            self._files.load(),
            ends=self.ends,
            known=known_ids(self._files),
            sampling=Sampling(settings.temperature, settings.top_p),
            alternatives=settings.alternatives,
            compiled=bool(settings.compiled),
        )

    def read(self, prompts: Sequence[Prompt]) -> list[ReadPrompt | str]:
        return [self._read(prompt) for prompt in prompts]

    def _read(self, prompt: Prompt) -> ReadPrompt | str:
        try:
            read = self._context.read(prompt)
        except (Refused, TilingError) as error:
            return str(error)
        assert self.settings.context is not None
        room = self.settings.context - self.settings.max_new_tokens
        if len(read.ids) > room:
            return f"too long: {len(read.ids):,} tokens, and there is room for {room:,} (--context)"
        return read

    def write(
        self,
        reads: Sequence[ReadPrompt],
        seeds: Sequence[Sequence[int]],
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, int, WrittenAnswer]]:
        shared = self._context.shared_ids
        begins = [list(read.ids[: len(shared)]) == shared for read in reads]
        for prefix, some in (
            (shared, [n for n, same in enumerate(begins) if same]),
            ([], [n for n, same in enumerate(begins) if not same]),
        ):
            if some:
                yield from self._written(reads, seeds, some, prefix, on_tokens)

    def _written(
        self,
        reads: Sequence[ReadPrompt],
        seeds: Sequence[Sequence[int]],
        some: Sequence[int],
        prefix: Sequence[int],
        on_tokens: Callable[[int], None] | None,
    ) -> Iterator[tuple[int, int, WrittenAnswer]]:
        settings, decoder = self.settings, self._decoder
        assert settings.context is not None
        texts: dict[tuple[int, int], bytearray] = {}

        def stops(prompt: int, answer: int, tokens: Sequence[int]) -> bool:
            text = texts.setdefault((prompt, answer), bytearray())
            text += b"".join(map(self._spelled, tokens))
            return any(stop in text for stop in self._stops)

        asked = [
            PromptTokens(reads[n].ids[len(prefix) :], seeds[n], settings.max_new_tokens)
            for n in some
        ]
        try:
            with torch_threads(settings.threads):
                decoder.share(prefix)
                for done in decoder.answers(
                    asked,
                    rows=settings.rows,
                    slot_tokens=settings.context - len(prefix),
                    is_over=stops if self._stops else None,
                    on_tokens=on_tokens,
                ):
                    tokens = done.tokens
                    if not np.isfinite(tokens.nll).all():
                        raise ScoreError(
                            "the teacher gave NaN or infinity. Use --dtype bfloat16 or float32 "
                            "where it was float16, or check the teacher's weights."
                        )
                    answer = self.answer_of(
                        tokens.ids.tolist(),
                        tokens.nll,
                        tokens.alternatives,
                        finished=tokens.finished,
                        ended=tokens.finished,
                    )
                    yield some[done.prompt], done.answer, answer
        except torch.OutOfMemoryError as error:
            raise ScoreError(
                f"the device ran out of memory with {settings.rows:,} answers at a time. Use fewer "
                f"(for example --rows {(settings.rows or 2) // 2}) and another --out: their number "
                "is part of the folder's identity."
            ) from error

    def answer_of(
        self,
        ids: Sequence[int],
        nll: NDArray[np.float32],
        alternatives: NDArray[np.uint32] | None,
        *,
        finished: bool,
        ended: bool,
    ) -> WrittenAnswer:
        """An answer from the tokens that were drawn, up to a text that stops it."""
        pieces = [self._spelled(token) for token in ids]
        return self._stopped(WrittenAnswer(pieces, nll, alternatives, finished, ended))

    def spelled(self, read: ReadPrompt) -> str:
        data = b"".join(self._spelled(token) for token in read.ids)
        text = data.decode(errors="replace")
        return text if self.chat is None else self.chat.with_control_tokens(text)

    def _spelled(self, token: int) -> bytes:
        spell = self._files.tokenizer.bytes_of if self.chat is None else self.chat.private_bytes_of
        return spell(token) or b""

    def _stopped(self, answer: WrittenAnswer) -> WrittenAnswer:
        """The answer up to a text that stops it. A token that the cut divides has no loss."""
        data = b"".join(answer.pieces)
        places = [place for stop in self._stops if (place := data.find(stop)) >= 0]
        if not places:
            return answer
        left, kept = min(places), list[bytes]()
        for piece in answer.pieces:
            if left <= 0:
                break
            kept.append(piece[:left])
            left -= len(piece)
        nll = answer.nll[: len(kept)].copy()
        if left < 0:
            nll[-1] = np.nan
        packed = answer.alternatives
        return WrittenAnswer(
            kept, nll, None if packed is None else packed[: len(kept)], finished=True, ended=False
        )


# the settings on which the written tokens depend
_DECIDING = (
    "samples", "temperature", "top_p", "max_new_tokens", "seed", "stop", "cut", "grade", "device",
    "dtype", "context", "rows", "compiled", "threads",
)  # fmt: skip


def _free_bytes(files: ModelFiles) -> int:
    """The memory that the weights leave on a GPU that holds nothing else."""
    total = torch.cuda.get_device_properties(files.device).total_memory
    factor = 4.5 if files.gguf_file else 1.0  # four bits become sixteen
    weights = int(sum(path.stat().st_size for path in files.weight_files) * factor)
    if weights >= total:
        raise ModelError(f"{files.name} does not fit on this GPU: use a larger one, or --server.")
    return total - weights
