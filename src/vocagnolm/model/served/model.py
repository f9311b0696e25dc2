"""A model whose weights are behind servers, by its token ids.

A server is known again by a probe: its losses of a few short documents. Not to the last bit: a
server puts other requests into the same batch, and in half precision that moves a loss by
hundredths of a nat. Another model, revision or quantisation moves the mean of all tokens by more.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alternatives import NOTHING, Alternatives
from vocagnolm.errors import ServerError, TilingError
from vocagnolm.model.nll import Batch, TokenScores, plan_batches
from vocagnolm.model.served.engines import Engine, WriteRequest, Written, open_engine
from vocagnolm.model.served.exchange import Exchange, PassingError
from vocagnolm.model.served.fleet import USUAL_REQUESTS, Fleet, Server
from vocagnolm.model.served.raw import Losses, require_raw
from vocagnolm.store.writer import apart, measured

SERVER_REQUEST_TOKENS = 16384
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
_PROBE_PAUSES = (0.1, 0.5, 2.0)
"""Seconds between attempts of a probe, before its answers are given up with it."""
_RAW_ALTERNATIVES = 5
"""At least so many tokens are compared at two temperatures."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def _tokenized(text: str, engine: Engine) -> list[int] | None:
    return engine.tokenize(text)


class ServedModel:
    """A model behind servers: token ids go there, losses come back, or more token ids.

    Every request has a probe with it, so that no answer of another model is taken, whenever a
    server was started again."""

    def __init__(self, server: Server, *, patient: bool = False, requests: int = USUAL_REQUESTS):
        """`patient` waits for servers that are being started. `requests` as in `Fleet`."""
        self._wanted = server.model
        self._prompts: list[list[int]] = []
        self._losses: list[np.ndarray] = []
        """The probe, and what the first server made of it when this process met it."""
        self._drawing: WriteRequest | None = None
        self._fleet: Fleet[Engine] = Fleet(server, self._met, requests)
        self.engine = self._fleet.first(patient=patient)

    @property
    def url(self) -> str:
        return self._fleet.named

    @property
    def most_requests(self) -> int:
        return self._fleet.most_requests

    def _met(self, exchange: Exchange) -> Engine:
        """The engine behind an address. All but the first must be like the first."""
        engine = open_engine(exchange, self._wanted)
        if self._prompts:
            self._require_alike(engine)
        return engine

    def _require_alike(self, engine: Engine) -> None:
        first = self.engine
        for name in ("name", "version", "model", "context"):
            ours, theirs = getattr(first, name), getattr(engine, name)
            if ours != theirs:
                raise ServerError(
                    f"the servers are not alike: {engine.url} has {name} {theirs!r:.100}, "
                    f"{first.url} has {ours!r:.100}. Start all of them with the same command."
                )
        losses = [scores.nll[1:] for scores in engine.scores(self._prompts)]
        off = apart(np.concatenate(self._losses).tolist(), np.concatenate(losses).tolist())
        if not off <= TOLERANCE:
            raise ServerError(
                f"the servers are not alike: the losses of {engine.url} are {off:.3f} nats per "
                f"token from those of {first.url} ({TOLERANCE} are allowed). Start all of them "
                "with the same model, revision and precision."
            )
        if self._drawing is not None:
            self._require_raw(engine, self._drawing)

    def take_probe(
        self,
        tokenizer: TextTokenizer,
        prefix_ids: Sequence[int],
        *,
        given: str,
        context: int | None = None,
        drawing: WriteRequest | None = None,
    ) -> None:
        """Where the server says how it reads text, it must be as the tokenizer that the user has
        given does: ids of another vocabulary would be read as nonsense, without an error. And where
        it is to draw, its log probabilities must be those of the model as it is."""
        prompts = []
        engine = self.engine
        longest = min(limit for limit in (context, engine.longest, sys.maxsize) if limit)
        for text in TEXTS:
            try:
                ids = tokenizer.spans(text).ids.tolist()
            except TilingError as error:
                raise ServerError(
                    f"the tokenizer of {given} cannot read a probe: {error}"
                ) from None
            there = self._fleet.call(partial(_tokenized, text))
            if there is not None and there != ids:
                raise ServerError(
                    f"the model {engine.model} of {self.url} has another tokenizer than "
                    f"{given}: it reads a probe as {len(there)} tokens, {there[:6]}..., and "
                    f"{given} as {len(ids)}, {ids[:6]}.... Start the server with the same model."
                )
            prompts.append([*prefix_ids, *ids[: longest - len(prefix_ids)]])
        scores = self._fleet.call(lambda engine: engine.scores(prompts))
        self._prompts, self._losses = prompts, [score.nll[1:] for score in scores]
        if missing := sum(int(np.isnan(nll).sum()) for nll in self._losses):
            raise ServerError(
                f"{self.url} has no log-probability for {missing} tokens of the probe. Check the "
                "model's weights and the dtype that the server runs it in."
            )
        if drawing is not None:
            self._drawing = drawing
            self._fleet.call(lambda engine: self._require_raw(engine, drawing))
        self._fleet.spread()

    def _require_raw(self, engine: Engine, asked: WriteRequest) -> None:
        if asked.alternatives is None:
            return
        prompt = self._prompts[0][: 1 + len(self._prompts[0]) // 2]
        count = max(asked.alternatives, _RAW_ALTERNATIVES)

        def losses(temperature: float, top_p: float) -> Losses:
            how = WriteRequest(tokens=1, temperature=temperature, top_p=top_p, alternatives=count)
            (written,) = engine.write([prompt], how)
            assert written.alternatives is not None
            given = Alternatives(written.alternatives[:1])
            with np.errstate(divide="ignore"):
                nll = -np.log(given.probability[0])
            pairs = zip(given.ids[0].tolist(), nll.tolist(), strict=True)
            there = given.present[0].tolist()
            return {
                token: loss
                for (token, loss), is_there in zip(pairs, there, strict=True)
                if is_there
            }

        require_raw(engine.url, losses, asked.temperature, asked.top_p, "")

    def describe(self) -> dict[str, Any]:
        """What is needed to know the server again."""
        return {
            "engine": self.engine.name,
            "version": self.engine.version,
            "model": self.engine.model,
            "probe": measured([float(n) for nll in self._losses for n in nll], TOLERANCE),
        }

    def scores(self, prompts: Sequence[list[int]], alternatives: int = 0) -> list[TokenScores]:
        """One request: every token of every prompt."""
        return self._fleet.call(lambda engine: self._scores(engine, prompts, alternatives))

    def _scores(
        self, engine: Engine, prompts: Sequence[list[int]], alternatives: int = 0
    ) -> list[TokenScores]:
        pairs = zip(self._prompts, self._losses, strict=True)
        probe, losses = min(pairs, key=lambda pair: len(pair[0]))
        probed, *scores = engine.scores([probe, *prompts], alternatives)
        off = apart(losses.tolist(), probed.nll[1:].tolist())
        if not off <= TOLERANCE:
            raise ServerError(
                f"the losses of {engine.url} have changed since this run began: those of a probe "
                f"by {off:.3f} nats per token ({TOLERANCE} are allowed). Another model, revision "
                f"or precision is running there; this response was discarded. Start the server as "
                f"it was, and run the same command again."
            )
        return scores

    def write(self, prompts: Sequence[list[int]], asked: WriteRequest) -> list[Written]:
        """Answers to prompts in one request, as in `Engine.write`."""

        def work(engine: Engine) -> list[Written]:
            written = engine.write(prompts, asked)
            for pause in (*_PROBE_PAUSES, None):  # an answer is worth more than its probe
                try:
                    self._scores(engine, [])
                    break
                except PassingError:
                    if pause is None:
                        raise
                    time.sleep(pause)
            return written

        return self._fleet.call(work)

    def each(
        self, work: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[tuple[_Item, _Result]]:
        """What `work` makes of every item, as in `Fleet.each`."""
        return self._fleet.each(work, items)

    def document_nll(self, documents: Sequence[np.ndarray], **options: Any) -> list[np.ndarray]:
        return [scores.nll for scores in self.document_scores(documents, **options)]

    def document_scores(
        self,
        documents: Sequence[np.ndarray],
        on_tokens: Callable[[int], None] | None = None,
        *,
        context: int,
        stride: int,
        batch_tokens: int,
        prefix_ids: Sequence[int],
        alternatives: int = 0,
    ) -> list[TokenScores]:
        """The scores of every document's token ids, in windows as `NllModel` reads them."""
        prefix = list(prefix_ids)
        nlls = [
            TokenScores(
                np.full(len(ids), np.nan, np.float32),
                np.full((len(ids), alternatives), NOTHING, np.uint32) if alternatives else None,
            )
            for ids in documents
        ]
        batches = plan_batches(
            [len(ids) for ids in documents],
            context=context,
            stride=stride,
            prefix_tokens=len(prefix),
            batch_tokens=batch_tokens,
        )

        def ask(batch: Batch) -> list[TokenScores]:
            cut = [documents[w.document][w.start : w.stop].tolist() for w in batch.windows]
            return self.scores([prefix + ids for ids in cut], alternatives)

        for batch, answers in self.each(ask, batches):
            for window, scores in zip(batch.windows, answers, strict=True):
                skipped = len(prefix) + window.first_scored - window.start
                here, scored = nlls[window.document], slice(window.first_scored, window.stop)
                here.nll[scored] = scores.nll[skipped:]
                if here.alternatives is not None and scores.alternatives is not None:
                    here.alternatives[scored] = scores.alternatives[skipped:]
            if on_tokens is not None:
                on_tokens(sum(w.stop - w.first_scored for w in batch.windows))
        return nlls
