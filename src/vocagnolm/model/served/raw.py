"""Whether the log probabilities of a server are those of the model as it is, or of the distribution
that it draws from, after temperature and top_p. A store keeps the former alone."""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping

from vocagnolm.errors import ServerError

Losses = Mapping[Hashable, float]
"""Losses of the likeliest tokens at one place, by id or by text."""
# Nats, on the median of some tokens: more than other batches make in half precision, less than a
# temperature that is tried.
_TOLERANCE = 0.15
_FAR_TEMPERATURE = 0.5
_NEAR = (0.8, 1.25)
"""Between these a temperature is too close to 1 to be told from it."""


def require_raw(
    url: str, ask: Callable[[float, float], Losses], temperature: float, top_p: float, or_else: str
) -> bool:
    """Refuse a server whose log probabilities depend on how it draws. `ask` gives the losses at the
    first place of a short answer, for a temperature and a top_p. `or_else`: what else may be done.
    False where it cannot be told, since the server names no token twice."""
    if temperature == 1 and top_p == 1:
        return True  # both are the same
    tried = _FAR_TEMPERATURE if _NEAR[0] < temperature < _NEAR[1] else temperature
    plain, drawn = ask(1.0, 1.0), ask(tried, top_p)
    pairs = [(loss, drawn[token]) for token, loss in plain.items() if token in drawn]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not pairs:
        return False
    off = statistics.median(abs(a - b) for a, b in pairs)
    if off <= _TOLERANCE:
        return True
    raise ServerError(
        f"{url} gives log probabilities of the distribution that it draws from, and not the raw "
        f"ones: at temperature {tried:g} they are {off:.2f} nats from those at temperature 1. A "
        "folder keeps the raw ones. Start vLLM with --logprobs-mode raw_logprobs (its default), "
        "SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1, or write with --temperature 1 and without "
        f"--top-p{or_else}."
    )
