"""What scoring asks of a teacher, and the teacher that is a model in this process."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from vocagnolm.alignment import TextTokenizer, TokenSpans
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.errors import ScoreError, TilingError, UsageError
from vocagnolm.model import fp8
from vocagnolm.model.compiled import import_compiler_meanwhile
from vocagnolm.model.load import ModelFiles
from vocagnolm.model.nll import NllModel
from vocagnolm.model.threads import torch_threads
from vocagnolm.model.windows import LENGTH_STEP
from vocagnolm.score.settings import (
    CPU_BATCH_TOKENS,
    CUDA_BATCH_TOKENS,
    DEFAULT_CONTEXT,
    MOST_THREADS,
    STRIDE_SHARE,
    ScoreSettings,
)


@dataclass(frozen=True)
class TokenizedDocument:
    """A document as the teacher reads it. The byte lengths tile the document's UTF-8 bytes; of a
    conversation, whose template has tokens that hold no text, there are spans instead."""

    ids: np.ndarray
    token_bytes: np.ndarray
    spans: TokenSpans | None = None

    def stored(self, nll: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Byte lengths that tile the document, and their losses: NaN for text that no token of the
        template holds. The template's own tokens are left out."""
        if self.spans is None:
            return self.token_bytes, nll
        held = self.token_bytes > 0
        edges = np.concatenate([[0], self.spans.spans[held].ravel(), [self.spans.n_bytes]])
        lengths = np.diff(edges)
        losses = np.full(len(lengths), np.nan, nll.dtype)
        losses[1::2] = nll[held]
        kept = lengths > 0
        return lengths[kept], losses[kept]


class Teacher(Protocol):
    """Documents in, byte lengths and nll out. A server behind a socket can be one as well. An
    attribute `device_name`, where there is one, is noted for every shard; `packages` are those
    whose versions decide the numbers. A method `start`, where there is one, is `nll` in two steps:
    what it returns waits for the numbers, while the next documents are started."""

    def describe(self) -> dict[str, Any]:
        """Everything about the teacher that decides its numbers, for the manifest."""
        ...

    def load(self) -> None:
        """Make ready for `nll`. Not called when there is nothing to score."""
        ...

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedDocument | str]:
        """Each text's tokens, or the reason why it cannot be scored."""
        ...

    def nll(
        self,
        documents: Sequence[TokenizedDocument],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[np.ndarray]:
        """float32 nll in nats of every token, NaN where it has no context. A function of the
        documents alone, also in its last bit."""
        ...


class LocalTeacher:
    """A causal language model in this process. The weights are loaded when first needed, so
    that a finished store is recognised at once."""

    def __init__(self, files: ModelFiles, settings: ScoreSettings, *, conversations: bool = False):
        """`conversations`: texts are shared texts, and are read in the model's template."""
        self._files = files
        self._tokenizer: TextTokenizer = files.tokenizer
        if conversations:
            template = template_of(
                files.tokenizer, settings.chat_template, settings.template_options
            )
            self._tokenizer = ChatTokenizer(files.tokenizer, template)
        on_gpu = files.device.type == "cuda"
        self.prefix_ids = _prefix(self._tokenizer, settings.bos)
        self.context = _context(files, settings.context)
        self.stride = settings.stride or max(1, self.context // STRIDE_SHARE)
        if self.stride >= self.context - len(self.prefix_ids):
            raise UsageError(
                f"--stride {self.stride} leaves no room in windows of {self.context} tokens. "
                f"Use at most {self.context - len(self.prefix_ids) - 1}."
            )
        self.batch_tokens = settings.batch_tokens or (
            CUDA_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS
        )
        assert settings.shard_teacher != "auto"  # whoever makes the group has chosen
        self.shards = settings.shard_teacher
        if self.shards > 1:
            files.require_shardable(self.shards)
        self.compiled = on_gpu if settings.compiled is None else settings.compiled
        self.threads = None if on_gpu else settings.threads or _processors()
        self.settings = dataclasses.replace(
            settings,
            device=files.device.type,
            dtype=files.dtype_name,
            context=self.context,
            stride=self.stride,
            batch_tokens=self.batch_tokens,
            compiled=self.compiled,
            threads=self.threads,
        )
        """As chosen here: another machine that is given them chooses nothing."""

    def describe(self) -> dict[str, Any]:
        tokenizer = self._tokenizer
        in_template = (
            {"template": tokenizer.template.describe()}
            if isinstance(tokenizer, ChatTokenizer)
            else {}
        )
        return {
            "teacher": self._files.describe(),
            "tokenizer": {
                "name": tokenizer.name,
                "kind": tokenizer.kind,
                "vocabulary_size": tokenizer.vocabulary_size,
                "fingerprint": tokenizer.fingerprint,
            },
            "scoring": {
                "dtype": self._files.dtype_name,
                "device": self._files.device.type,
                "context": self.context,
                "stride": self.stride,
                "prefix_ids": list(self.prefix_ids),
                "batch_plan": {
                    "kind": "by length, longest first, padded on the right",
                    "batch_tokens": self.batch_tokens,
                    "length_step": LENGTH_STEP,
                },
                "compiled": self.compiled,
                "threads": self.threads,
                # sums over parts differ in their last bits; stores of one GPU stay what they were
                **({"shard_teacher": self.shards} if self.shards > 1 else {}),
            },
            **in_template,
        }

    @property
    def device_name(self) -> str | None:
        """Which GPU; a CPU's sums depend on its threads, which the identity has."""
        device = self._files.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else None

    def load(self) -> None:
        model = self._model
        with self._computing():
            model.warm_up()

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedDocument | str]:
        if isinstance(self._tokenizer, ChatTokenizer):
            return [
                one if isinstance(one, str) else TokenizedDocument(one.ids, one.token_bytes, one)
                for one in self._tokenizer.outcomes(texts)
            ]
        try:
            spans: list[TokenSpans | str] = list(self._tokenizer.spans_batch(texts))
        except TilingError:  # one of them: find out which
            spans = [self._spans_or_reason(text) for text in texts]
        return [entry if isinstance(entry, str) else _tokenized(entry) for entry in spans]

    def nll(
        self,
        documents: Sequence[TokenizedDocument],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[np.ndarray]:
        return self.start(documents, on_tokens)()

    def start(
        self,
        documents: Sequence[TokenizedDocument],
        on_tokens: Callable[[int], None] | None = None,
    ) -> Callable[[], list[np.ndarray]]:
        with self._computing():
            return self._model.start([d.ids for d in documents], on_tokens)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        try:
            with torch_threads(self.threads):
                yield
        except torch.OutOfMemoryError as error:
            raise ScoreError(
                f"the device ran out of memory with {self.batch_tokens:,} tokens at a time. Use a "
                f"smaller --batch-tokens (for example {self.batch_tokens // 2}) and another --out: "
                "the batch plan is part of a store's identity."
            ) from error

    @cached_property
    def _model(self) -> NllModel:
        if self.compiled:
            import_compiler_meanwhile()
        return NllModel(
            self._files.load(self.shards),
            context=self.context,
            stride=self.stride,
            batch_tokens=self.batch_tokens,
            prefix_ids=self.prefix_ids,
            compiled=self.compiled,
            fp8_head=self._files.fp8 and fp8.HEAD_TOO,
        )

    def _spans_or_reason(self, text: str) -> TokenSpans | str:
        try:
            return self._tokenizer.spans(text)
        except TilingError as error:
            return f"does not tile: {error}"


def _processors() -> int:
    # not torch's own number: torchrun sets it to 1, and it must not depend on torchrun
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def _tokenized(spans: TokenSpans) -> TokenizedDocument | str:
    if len(spans) == 0:
        return "no tokens: the tokenizer drops all of it"
    ends = np.concatenate([[0], spans.spans[:, 1]])
    starts = np.concatenate([spans.spans[:, 0], [spans.n_bytes]])
    gaps = np.flatnonzero(starts != ends)
    if len(gaps):
        return (
            f"does not tile: the tokenizer leaves out {spans.lost_bytes} bytes, the first at byte "
            f"{int(ends[gaps[0]])}"
        )
    return TokenizedDocument(spans.ids, spans.token_bytes)


def _prefix(tokenizer: TextTokenizer, bos: str) -> tuple[int, ...]:
    if bos == "auto":
        return tokenizer.prefix_ids
    if bos == "none":
        return ()
    index = tokenizer.id_of(bos)
    if index is None:
        raise UsageError(f"--bos {bos}: {tokenizer.name} has no such token.")
    return (index,)


def _context(files: ModelFiles, wanted: int | None) -> int:
    longest = files.max_context
    if wanted is None:
        return DEFAULT_CONTEXT if longest is None else min(DEFAULT_CONTEXT, longest)
    if longest is not None and wanted > longest:
        raise UsageError(f"--context {wanted}: {files.name} reads at most {longest} tokens.")
    return wanted
