"""The teacher whose tokenizer is here and whose weights are behind a server (vLLM, SGLang), and the
probe by which a server is known again: its losses of a few short documents.

Not to the last bit: a server puts other requests into the same batch, and in half precision that
moves a loss by hundredths of a nat. Another model, revision or quantisation moves the mean of all
tokens by more.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np

from vocagnolm.alternatives import NOTHING, Vocabulary
from vocagnolm.errors import ScoreError, UsageError
from vocagnolm.model.load import ModelFiles
from vocagnolm.model.nll import Batch, TokenScores, plan_batches
from vocagnolm.score.engines import Engine, Exchange, open_engine
from vocagnolm.score.settings import (
    DEFAULT_CONTEXT,
    SERVER_REQUEST_TOKENS,
    ScoreSettings,
    Server,
)
from vocagnolm.score.teacher import LocalTeacher, TokenizedDocument
from vocagnolm.store.writer import apart, measured

TOLERANCE = 0.05
"""Nats that a token's loss may differ, on the mean of a probe."""
TEXTS = (
    "The bridge was closed for repairs in the spring of 1911, and everyone who lived on the far "
    "bank had to take the ferry. It ran every half hour, except in fog.",
    "Let $f(x) = x^2 - 4x + 7$. Completing the square gives $f(x) = (x-2)^2 + 3$, so the least "
    "value of $f$ is $3$, and it is taken at $x = 2$ only.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
)


@dataclass(frozen=True)
class Probe:
    """The prompts, and what the server made of them when this process met it."""

    prompts: list[list[int]]
    losses: list[np.ndarray]

    @classmethod
    def of(cls, engine: Engine, url: str, prompts: list[list[int]]) -> "Probe":
        losses = [scores.nll[1:] for scores in engine.scores(prompts)]
        if missing := sum(int(np.isnan(nll).sum()) for nll in losses):
            raise ScoreError(
                f"{url} has no log-probability for {missing} tokens of the probe. Check the "
                "model's weights and the dtype that the server runs it in."
            )
        return cls(prompts, losses)

    def describe(self) -> dict[str, Any]:
        return measured([float(value) for nll in self.losses for value in nll], TOLERANCE)

    @property
    def shortest(self) -> int:
        return min(range(len(self.prompts)), key=lambda number: len(self.prompts[number]))

    def require_same(self, number: int, nll: np.ndarray, url: str) -> None:
        """A server that was started again with something else behind the same address."""
        off = apart(self.losses[number].tolist(), nll[1:].tolist())
        if not off <= TOLERANCE:
            raise ScoreError(
                f"the losses of {url} have changed since this run began: those of a probe by "
                f"{off:.3f} nats a token, {TOLERANCE} are allowed. Another model, revision or "
                "precision was started there; this answer was not kept. Start the server as it "
                "was, and run the same command again."
            )


def require_same_tokens(engine: Engine, url: str, documents: list[TokenizedDocument]) -> None:
    """Where the server tells how it reads text, it must be as the teacher's folder does: ids of
    another vocabulary would be read as nonsense, without an error."""
    for text, document in zip(TEXTS, documents, strict=True):
        there = engine.tokenize(text)
        if there is not None and there != document.ids.tolist():
            raise ScoreError(
                f"the model {engine.model} of {url} has another tokenizer than --teacher: it reads "
                f"a probe as {len(there)} tokens, {there[:6]}..., and --teacher as "
                f"{len(document.ids)}, {document.ids[:6].tolist()}.... Start the server with the "
                "same model."
            )


# An address that nobody answers is told soon; a server that has answered once is waited for.
_START_SECONDS = 5.0


class ServerTeacher:
    """Token ids go to the server, losses come back. The folder of the teacher gives tokenizer,
    prefix and windows; its weights are neither needed nor read.

    Every request carries a probe, so that no answer of another model is taken, whenever the server
    was started again."""

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
                "--dtype, --device cuda and --compile are the server's business: leave them out "
                "with --server, and start the server with what you want."
            )
        kept = settings.kept_alternatives
        if kept is not None and kept.sampled:
            raise UsageError(
                f"--alternatives {kept}: a server tells its likeliest tokens and draws none. Use "
                f"--alternatives {kept.count}, or score without --server."
            )
        self.alternatives = 0 if kept is None else kept.count
        start = server.patience_seconds if patient else _START_SECONDS
        self._exchange = Exchange(server.url, min(start, server.patience_seconds))
        self._server = server
        self._engine = open_engine(self._exchange, server.model)
        inside = self._with_context(settings, files)
        self._reader = LocalTeacher(files, inside, conversations=conversations)
        self.settings = dataclasses.replace(
            self._reader.settings,
            device="cpu",
            dtype="auto",
            batch_tokens=settings.batch_tokens or SERVER_REQUEST_TOKENS,
            compiled=None,
            threads=1,
        )
        self._exchange.patience_seconds = server.patience_seconds
        # the probe is text, also where conversations are scored
        self._probe = self._probed(LocalTeacher(files, inside))

    def describe(self) -> dict[str, Any]:
        """The requests' size is not there: it decides nothing that could be had again."""
        about = self._reader.describe()
        named = ("context", "stride", "prefix_ids")
        return {
            **about,
            "scoring": {
                "dtype": "as started",
                "device": "a server",
                **{name: about["scoring"][name] for name in named},
            },
            "server": {
                "engine": self._engine.name,
                "version": self._engine.version,
                "model": self._engine.model,
                "probe": self._probe.describe(),
            },
        }

    def vocabulary(self) -> Vocabulary:
        return self._reader.vocabulary()

    def load(self) -> None:
        """It was loaded where it is."""

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedDocument | str]:
        return self._reader.tokenize(texts)

    def nll(
        self,
        documents: Sequence[TokenizedDocument],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[TokenScores]:
        found = [self._nothing(len(d.ids)) for d in documents]
        assert self.settings.batch_tokens is not None
        batches = plan_batches(
            [len(d.ids) for d in documents],
            context=self._reader.context,
            stride=self._reader.stride,
            prefix_tokens=len(self._reader.prefix_ids),
            batch_tokens=self.settings.batch_tokens,
        )
        pool = ThreadPoolExecutor(self._server.requests)
        with self._exchange.all_or_none(pool):
            calls = {pool.submit(self._batch_scores, b, documents): b for b in batches}
            for call in as_completed(calls):
                batch = calls[call]
                self._place(batch, call.result(), found)
                if on_tokens is not None:
                    on_tokens(sum(w.stop - w.first_scored for w in batch.windows))
        return found

    def _nothing(self, tokens: int) -> TokenScores:
        packed = np.full((tokens, self.alternatives), NOTHING, np.uint32)
        nll = np.full(tokens, np.nan, np.float32)
        return TokenScores(nll, packed if self.alternatives else None)

    def _batch_scores(
        self, batch: Batch, documents: Sequence[TokenizedDocument]
    ) -> Sequence[TokenScores]:
        """One request: every token of every prompt, the prefix's too."""
        number = self._probe.shortest
        prefix = self._reader.prefix_ids
        prompts = [
            [*prefix, *documents[w.document].ids[w.start : w.stop].tolist()] for w in batch.windows
        ]
        probed, *answers = self._engine.scores(
            [self._probe.prompts[number], *prompts], self.alternatives
        )
        self._probe.require_same(number, probed.nll, self._exchange.url)
        return answers

    def _place(
        self, batch: Batch, answers: Sequence[TokenScores], found: Sequence[TokenScores]
    ) -> None:
        prefix = len(self._reader.prefix_ids)
        for window, scores in zip(batch.windows, answers, strict=True):
            skipped = prefix + window.first_scored - window.start
            here, place = found[window.document], slice(window.first_scored, window.stop)
            here.nll[place] = scores.nll[skipped:]
            if here.alternatives is not None and scores.alternatives is not None:
                here.alternatives[place] = scores.alternatives[skipped:]

    def _probed(self, reader: LocalTeacher) -> Probe:
        url = self._exchange.url
        outcomes = reader.tokenize(TEXTS)
        if reasons := [outcome for outcome in outcomes if isinstance(outcome, str)]:
            raise ScoreError(f"the tokenizer of --teacher cannot read a probe: {reasons[0]}.")
        documents = [outcome for outcome in outcomes if isinstance(outcome, TokenizedDocument)]
        require_same_tokens(self._engine, url, documents)
        room = reader.context - len(reader.prefix_ids)
        prompts = [[*reader.prefix_ids, *d.ids[:room].tolist()] for d in documents]
        return Probe.of(self._engine, url, prompts)

    def _with_context(self, settings: ScoreSettings, files: ModelFiles) -> ScoreSettings:
        """The server's longest prompt is a limit as the model's own is."""
        longest, wanted = self._engine.longest, settings.context
        if longest is None:
            return settings
        if wanted is not None and wanted > longest:
            raise UsageError(
                f"--context {wanted}: the server at {self._exchange.url} reads at most {longest} "
                f"tokens and writes one. Start it with --max-model-len {wanted + 1}, or leave "
                "--context out."
            )
        usual = min(DEFAULT_CONTEXT, files.max_context or DEFAULT_CONTEXT)
        return dataclasses.replace(settings, context=wanted or min(usual, longest))
