"""The servers we know, behind one small interface: prompts of token ids in, their losses out, and
the likeliest tokens beside them where these are asked for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vocagnolm.alternatives import pack
from vocagnolm.errors import ScoreError, UsageError
from vocagnolm.model.nll import TokenScores
from vocagnolm.score.server.exchange import Exchange, RefusedError

# JSON has no infinity: vLLM writes this for a probability of zero
_NO_PROBABILITY = -9999.0


class Engine(Protocol):
    """A server and the one model that we ask it for."""

    name: str
    version: str
    model: str
    longest: int | None
    """Tokens of a prompt at most; None: it does not say."""

    def scores(self, prompts: Sequence[list[int]], alternatives: int = 0) -> list[TokenScores]:
        """Of every token of every prompt its nll, NaN for the first and where the server has none,
        and so many alternatives. An error where it has not read exactly these tokens."""
        ...

    def tokenize(self, text: str) -> list[int] | None:
        """A text as the server's own tokenizer reads it, without special tokens; None: it does not
        tell."""
        ...


def open_engine(exchange: Exchange, model: str | None) -> Engine:
    """The engine behind an address, by what it says of itself."""
    found = exchange.get("/v1/models")
    models = found.get("data") if isinstance(found, dict) else None
    if not models:
        raise ScoreError(
            f"{exchange.url} lists no model under /v1/models: it is not a server of vLLM or SGLang."
        )
    entry = _chosen(models, model, exchange.url)
    kind = SGLang if entry.get("owned_by") == "sglang" else VLLM
    return kind(exchange, entry)


def _chosen(models: list[dict[str, Any]], wanted: str | None, url: str) -> dict[str, Any]:
    names = [str(entry["id"]) for entry in models]
    if wanted is None and len(models) == 1:
        return models[0]
    if wanted not in names:
        asked = "several models" if wanted is None else f"no model {wanted!r}"
        raise UsageError(
            f"the server at {url} has {asked}: choose with --server-model among "
            f"{', '.join(names[:8])}."
        )
    return models[names.index(wanted)]


class VLLM:
    """vLLM's completions endpoint. Others that speak it (llama.cpp) lack the log-probabilities of
    the prompt."""

    name = "vllm"

    def __init__(self, exchange: Exchange, entry: dict[str, Any]):
        self._exchange = exchange
        self.model = str(entry["id"])
        if (owner := entry.get("owned_by")) == "llamacpp":
            raise ScoreError(
                f"{exchange.url} is a server of llama.cpp, which has no log-probabilities of the "
                "prompt. Use vLLM or SGLang, or give the GGUF file as --teacher without --server."
            )
        about = exchange.get("/version")
        if about is None:
            self.name = f"completions of {owner}"
        self.version = str(about["version"]) if about else "unknown"
        most = entry.get("max_model_len")
        self.longest = None if most is None else int(most) - 1  # one token is generated

    def scores(self, prompts: Sequence[list[int]], alternatives: int = 0) -> list[TokenScores]:
        content = {
            "model": self.model,
            "prompt": list(prompts),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": alternatives,
            "return_token_ids": True,
        }
        try:
            answer = self._exchange.post("/v1/completions", content)
        except RefusedError as error:
            if not alternatives or "logprobs" not in str(error):
                raise
            raise ScoreError(
                f"{error} Start the server with --max-logprobs {alternatives}, or ask for fewer "
                "--alternatives."
            ) from None
        return _read(self._exchange.url, prompts, answer, _vllm_answers, alternatives)

    def tokenize(self, text: str) -> list[int] | None:
        content = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            answer = self._exchange.post("/tokenize", content)
        except RefusedError:  # it was started without one
            return None
        return answer.get("tokens") if isinstance(answer, dict) else None


class SGLang:
    """SGLang's own `/generate`."""

    name = "sglang"

    def __init__(self, exchange: Exchange, entry: dict[str, Any]):
        self._exchange = exchange
        self.model = str(entry["id"])
        about = exchange.get("/get_server_info") or exchange.get("/server_info") or {}
        self.version = str(about.get("version", "unknown"))
        most = entry.get("max_model_len") or about.get("context_length")
        self.longest = None if most is None else int(most) - 1

    def scores(self, prompts: Sequence[list[int]], alternatives: int = 0) -> list[TokenScores]:
        answer = self._exchange.post(
            "/generate",
            {
                "input_ids": list(prompts),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "return_text_in_logprobs": False,
                **({"top_logprobs_num": alternatives} if alternatives else {}),
            },
        )
        return _read(self._exchange.url, prompts, answer, _sglang_answers, alternatives)

    def tokenize(self, text: str) -> list[int] | None:
        return None


_Likeliest = list[tuple[int, float]]
"""Ids and log-probabilities at one place."""


class _Answer(NamedTuple):
    """Of one prompt; None for what the server leaves out."""

    ids: list[int] | None
    values: list[float | None] | None
    likeliest: list[_Likeliest | None] | None = None


def _vllm_answers(answer: Any) -> list[_Answer]:
    found = []
    for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
        ids, rows = choice.get("prompt_token_ids"), choice.get("prompt_logprobs")
        if ids is None or rows is None:
            found.append(_Answer(ids, rows))
            continue
        pairs = zip(ids, rows, strict=True)
        values = [None if row is None else row[str(index)]["logprob"] for index, row in pairs]
        # the token itself stands there too, however unlikely it is
        likeliest = [row and [(int(n), one["logprob"]) for n, one in row.items()] for row in rows]
        found.append(_Answer(ids, values, likeliest))
    return found


def _sglang_answers(answer: Any) -> list[_Answer]:
    found = []
    for one in answer if isinstance(answer, list) else [answer]:
        about = one["meta_info"]
        rows, top = about.get("input_token_logprobs"), about.get("input_top_logprobs")
        if not rows:
            found.append(_Answer(None, None))
            continue
        likeliest = top and [
            place and [(int(row[1]), row[0]) for row in place if row[0] is not None]
            for place in top
        ]
        ids, values = [int(row[1]) for row in rows], [row[0] for row in rows]
        found.append(_Answer(ids, values, likeliest))
    return found


def _read(
    url: str,
    prompts: Sequence[list[int]],
    answer: Any,
    parse: Callable[[Any], list[_Answer]],
    alternatives: int,
) -> list[TokenScores]:
    if answer is None:
        raise ScoreError(f"{url} has no such endpoint any more, or no longer this model.")
    try:
        answers = parse(answer)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ScoreError(
            f"{url} answers in a form that is not known: {type(error).__name__}: {error}."
        ) from None
    if len(answers) != len(prompts):
        raise ScoreError(f"{url} answers {len(answers)} of {len(prompts)} prompts.")
    found = []
    for sent, (ids, values, likeliest) in zip(prompts, answers, strict=True):
        if ids is None or values is None:
            lacking = "log-probabilities" if values is None else "token ids"
            raise ScoreError(
                f"{url} does not return the {lacking} of the prompt. vLLM (0.10.2 or newer) and "
                "SGLang do; llama.cpp has none."
            )
        if ids != sent:
            raise ScoreError(f"{url} {_change(sent, ids)}. Its losses would be of another text.")
        packed = None
        if alternatives:
            if likeliest is None or len(likeliest) != len(ids):
                raise ScoreError(
                    f"{url} does not return the likeliest tokens of the prompt's places, which "
                    "--alternatives asks for."
                )
            packed = _packed(url, ids, likeliest, alternatives)
        found.append(TokenScores(_losses(values), packed))
    return found


def _packed(
    url: str, ids: list[int], likeliest: Sequence[_Likeliest | None], count: int
) -> np.ndarray:
    """The likeliest at every place, as a store keeps them; none at the first."""
    chosen = np.full((len(ids), count), -1, np.int64)
    nll = np.full((len(ids), count), np.nan)
    for place, given in enumerate(likeliest):
        if place == 0 or not given:
            continue
        ranked = sorted(given, key=lambda entry: -entry[1])[:count]
        if len(ranked) < count:
            raise ScoreError(
                f"{url} returns {len(ranked)} of the {count} likeliest tokens that --alternatives "
                "asks for."
            )
        chosen[place] = [index for index, _ in ranked]
        nll[place] = [np.nan if value == _NO_PROBABILITY else -value for _, value in ranked]
    return pack(chosen, nll, chosen == np.array(ids)[:, None])


def _change(sent: list[int], back: list[int]) -> str:
    if len(back) > len(sent) and back[-len(sent) :] == sent:
        return f"adds the token {back[0]} (beginning-of-text?) before the {len(sent)} it was given"
    if len(back) < len(sent):
        return f"drops tokens: it was given {len(sent)} and has read {len(back)}"
    if len(back) > len(sent):
        return f"adds tokens: it was given {len(sent)} and has read {len(back)}"
    place = next(i for i, (a, b) in enumerate(zip(sent, back, strict=True)) if a != b)
    return f"changes token ids: at position {place} it has read {back[place]} for {sent[place]}"


def _losses(values: list[float | None]) -> np.ndarray:
    missing = (None, _NO_PROBABILITY)
    nll = -np.array([np.nan if v in missing else v for v in values], np.float32)
    nll[:1] = np.nan
    nll[~np.isfinite(nll)] = np.nan
    return nll
