"""What scoring asks of a teacher, the teacher that is a model in this process, and the one whose
tokenizer is here and whose weights are behind a server."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from vocagnolm.alignment import TextTokenizer, TokenSpans, token_texts
from vocagnolm.alignment.spans import batches
from vocagnolm.alternatives import MOST_IDS, NOTHING, AlternativesSpec, Vocabulary
from vocagnolm.base.ranks import world_size
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.errors import ScoreError, TilingError, UsageError
from vocagnolm.model import fp8
from vocagnolm.model.load import ModelFiles
from vocagnolm.model.nll import LENGTH_STEP, NllModel, TokenScores
from vocagnolm.model.runtime import import_compiler_meanwhile, torch_threads
from vocagnolm.model.served import SERVER_REQUEST_TOKENS, ServedModel, Server
from vocagnolm.recipe.sections import ScoreSection
from vocagnolm.store.format import encode_vocabulary

DEFAULT_CONTEXT = 2048
CUDA_BATCH_TOKENS = 16384
CPU_BATCH_TOKENS = 4096
MOST_THREADS = 16
# Below this a stride gives hardly any context; an eighth of the window costs at most 1/7 more work.
STRIDE_SHARE = 8


class ScoreSettings(ScoreSection, frozen=True):
    """Settings of `vocagnolm score`. None: chosen by model and device, and recorded in the
    manifest."""

    @property
    def kept_alternatives(self) -> AlternativesSpec | None:
        return AlternativesSpec.parse(self.alternatives)


@dataclass(frozen=True)
class TokenizedDocument:
    """A document as the teacher reads it. The byte lengths tile the document's UTF-8 bytes. For a
    conversation, whose template has tokens without text, there are spans instead."""

    ids: np.ndarray
    token_bytes: np.ndarray
    spans: TokenSpans | None = None

    def stored(self, scores: TokenScores) -> tuple[np.ndarray, TokenScores]:
        """Byte lengths that tile the document, and their scores. Text that no token of the template
        covers has a loss of NaN and no alternatives. The template's own tokens are omitted."""
        if self.spans is None:
            return self.token_bytes, scores
        held = self.token_bytes > 0
        edges = np.concatenate([[0], self.spans.spans[held].ravel(), [self.spans.n_bytes]])
        lengths = np.diff(edges)
        kept = lengths > 0

        def between(values: np.ndarray, missing: float) -> np.ndarray:
            every = np.full((len(lengths), *values.shape[1:]), missing, values.dtype)
            every[1::2] = values[held]
            return every[kept]

        others = scores.alternatives
        return lengths[kept], TokenScores(
            between(scores.nll, np.nan), None if others is None else between(others, NOTHING)
        )


class Teacher(Protocol):
    """Takes documents, and returns byte lengths and nll; a server can be one as well. The attribute
    `device_name`, if present, is recorded for every shard; `packages` are those whose versions
    determine the numbers. The method `start`, if present, is `nll` in two steps: the function that
    it returns waits for the numbers while the next documents are started.

    A teacher with alternatives lists them in `describe()` (`alternatives`: count, sampled, and the
    digest and size of the vocabulary file), has a `vocabulary()`, and returns `TokenScores` instead
    of arrays from `nll` or `start`."""

    def describe(self) -> dict[str, Any]:
        """Everything about the teacher that determines its numbers, for the manifest."""
        ...

    def load(self) -> None:
        """Prepare for `nll`. Not called if there is nothing to score."""
        ...

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedDocument | str]:
        """The tokens of each text, or the reason why it cannot be scored."""
        ...

    def nll(
        self, documents: Sequence[TokenizedDocument], on_tokens: Callable[[int], None] | None = None
    ) -> Sequence[np.ndarray | TokenScores]:
        """float32 nll in nats of every token, NaN where it has no context. Depends only on the
        documents, to the last bit."""
        ...


class LocalTeacher:
    """A causal language model in this process. The weights are loaded when first needed, so a
    finished store is recognized at once."""

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
        self.shards = world_size() if settings.shard_teacher else 1
        if self.shards > 1:
            files.require_shardable(self.shards)
        self.alternatives = settings.kept_alternatives
        if self.alternatives is not None:
            require_choice(files, self.alternatives)
        self.compiled = on_gpu if settings.compiled is None else settings.compiled
        # not torch's own number: torchrun sets it to 1, and it must not depend on torchrun
        processors = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self.threads = None if on_gpu else settings.threads or processors
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
        """The settings that were chosen here: a machine that is given them chooses nothing."""

    def describe(self) -> dict[str, Any]:
        tokenizer, template = self._tokenizer, {}
        if isinstance(tokenizer, ChatTokenizer):
            template = {"template": tokenizer.template.describe()}
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
            **template,
            **described_alternatives(self.alternatives, self.vocabulary),
        }

    def vocabulary(self) -> Vocabulary:
        """The bytes of every token, and which of them end a text or a turn of a conversation."""
        ends, tokenizer = set(self._files.end_ids), self._tokenizer
        if isinstance(tokenizer, ChatTokenizer):
            ends |= set() if tokenizer.end_of_turn is None else {tokenizer.end_of_turn}
        return token_texts(self._files.tokenizer, ends)

    @property
    def device_name(self) -> str | None:
        """Name of the GPU; None on a CPU, whose sums depend on the threads, which are part of the
        identity."""
        device = self._files.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else None

    def load(self) -> None:
        model = self._model
        with self._computing():
            model.warm_up()

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedDocument | str]:
        return [one for batch in batches(texts, len) for one in self._tokenize(batch)]

    def _tokenize(self, texts: Sequence[str]) -> list[TokenizedDocument | str]:
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
        self, documents: Sequence[TokenizedDocument], on_tokens: Callable[[int], None] | None = None
    ) -> list[np.ndarray]:
        return [scores.nll for scores in self.start(documents, on_tokens)()]

    def start(
        self, documents: Sequence[TokenizedDocument], on_tokens: Callable[[int], None] | None = None
    ) -> Callable[[], list[TokenScores]]:
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
            alternatives=self.alternatives,
        )

    def _spans_or_reason(self, text: str) -> TokenSpans | str:
        try:
            return self._tokenizer.spans(text)
        except TilingError as error:
            return f"does not tile: {error}"


class ServerTeacher:
    """Sends token ids to a server and receives losses. The teacher's folder provides tokenizer,
    prefix and windows; its weights are neither needed nor read."""

    device_name = None
    packages = ("tokenizers", "transformers")

    def __init__(
        self,
        files: ModelFiles,
        server: Server,
        settings: ScoreSettings,
        *,
        patient: bool = False,
        conversations: bool = False,
    ):
        if settings.dtype != "auto" or settings.device == "cuda" or settings.compiled:
            raise UsageError(
                "--dtype, --device cuda and --compile do not apply with --server: remove them, "
                "and configure the server instead."
            )
        kept = settings.kept_alternatives
        if kept is not None and kept.sampled:
            raise UsageError(
                f"--alternatives {kept}: a server returns its most likely tokens and cannot "
                f"sample. Use --alternatives {kept.count}, or score without --server."
            )
        self.alternatives = 0 if kept is None else kept.count
        self._served = ServedModel(server, patient=patient)
        inside = self._with_context(settings, files)
        self._reader = LocalTeacher(files, inside, conversations=conversations)
        self._batch_tokens = settings.batch_tokens or SERVER_REQUEST_TOKENS
        self.settings = dataclasses.replace(
            self._reader.settings,
            device="cpu",
            dtype="auto",
            batch_tokens=self._batch_tokens,
            compiled=None,
            threads=1,
        )
        of_texts = LocalTeacher(files, inside)  # the probe is text, also beside conversations
        self._served.take_probe(
            files.tokenizer, of_texts.prefix_ids, context=of_texts.context, given="--teacher"
        )

    def describe(self) -> dict[str, Any]:
        """The size of requests is not included: it does not determine anything reproducible."""
        about = self._reader.describe()
        named = ("context", "stride", "prefix_ids")
        return {
            **about,
            "scoring": {
                "dtype": "as started",
                "device": "a server",
                **{name: about["scoring"][name] for name in named},
            },
            "server": self._served.describe(),
        }

    def vocabulary(self) -> Vocabulary:
        return self._reader.vocabulary()

    def load(self) -> None:
        """Nothing to do: the server has loaded it."""

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedDocument | str]:
        return self._reader.tokenize(texts)

    def nll(
        self, documents: Sequence[TokenizedDocument], on_tokens: Callable[[int], None] | None = None
    ) -> list[TokenScores]:
        return self._served.document_scores(
            [document.ids for document in documents],
            on_tokens,
            context=self._reader.context,
            stride=self._reader.stride,
            batch_tokens=self._batch_tokens,
            prefix_ids=self._reader.prefix_ids,
            alternatives=self.alternatives,
        )

    def _with_context(self, settings: ScoreSettings, files: ModelFiles) -> ScoreSettings:
        """The server's longest prompt is a limit as the model's own is."""
        longest, wanted = self._served.engine.longest, settings.context
        if longest is None:
            return settings
        if wanted is not None and wanted > longest:
            raise UsageError(
                f"--context {wanted}: the server at {self._served.url} reads at most {longest} "
                f"tokens and writes one. Start it with --max-model-len {wanted + 1}, or remove "
                f"--context."
            )
        usual = min(DEFAULT_CONTEXT, files.max_context or DEFAULT_CONTEXT)
        return dataclasses.replace(settings, context=wanted or min(usual, longest))


def described_alternatives(
    kept: AlternativesSpec | None, vocabulary: Callable[[], Vocabulary] | None
) -> dict[str, Any]:
    """For the manifest; nothing where none are kept. A vocabulary that nobody knows yet is no part
    of an identity."""
    if kept is None:
        return {}
    about = {"count": kept.count, "sampled": kept.sampled}
    if vocabulary is None:
        return {"alternatives": about}
    content = encode_vocabulary(vocabulary())
    digest = {
        "vocabulary_sha256": hashlib.sha256(content).hexdigest(),
        "vocabulary_bytes": len(content),
    }
    return {"alternatives": about | digest}


def require_choice(files: ModelFiles, wanted: AlternativesSpec) -> None:
    """Refuse more alternatives than the model has tokens, and a vocabulary whose ids do not fit."""
    rows = int(files.config.get_text_config().vocab_size)
    if wanted.count > rows:
        raise UsageError(
            f"--alternatives {wanted}: {files.name} has only {rows:,} tokens. Use at most {rows}."
        )
    if rows > MOST_IDS:
        raise UsageError(
            f"--alternatives {wanted}: {files.name} has {rows:,} tokens, and a store numbers at "
            f"most {MOST_IDS:,} of them. Remove --alternatives."
        )


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
