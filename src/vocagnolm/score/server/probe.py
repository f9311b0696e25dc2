"""By which a server is known again: its losses of a few short documents.

Not to the last bit: a server puts other requests into the same batch, and in half precision that
moves a loss by hundredths of a nat. Another model, revision or quantisation moves the mean of all
tokens by more.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vocagnolm.errors import ScoreError
from vocagnolm.score.server.engines import Engine
from vocagnolm.score.teacher import TokenizedDocument
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
