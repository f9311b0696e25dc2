"""What vLLM and SGLang want to be asked: prompts of token ids in; out come their losses, with the
likeliest tokens beside them where these are asked for, or what the model writes next."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alternatives import pack
from vocagnolm.errors import ServerError, UsageError
from vocagnolm.model.nll import TokenScores
from vocagnolm.model.served.answers import (
    IdAnswer,
    MalformedError,
    ModelEntry,
    TokenNumbers,
    parse_completions,
    parse_generated,
    parse_length,
    parse_models,
    parse_tokens,
    parse_version,
)
from vocagnolm.model.served.exchange import Exchange, RefusedError

# A server takes what it is not told from the model's generation_config.json: a penalty there would
# change the likeliest tokens, too.
_PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_UNCUT = {"top_k": -1, "min_p": 0.0}
_MOST_NAMED = 8


class Written(NamedTuple):
    """What a model has written after one prompt. `ended`: by itself, not at the limit."""

    ids: list[int]
    ended: bool
    nll: NDArray[np.float32] | None = None
    """In nats, where log probabilities were asked for."""
    alternatives: NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class WriteRequest:
    """How prompts are to be gone on with."""

    tokens: int
    """At most."""
    stop: Sequence[str] = ()
    ends: Sequence[int] = ()
    """Tokens that end an answer."""
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    """Answers to every prompt."""
    alternatives: int | None = None
    """How many of the likeliest tokens; 0: the log probabilities of the drawn tokens alone, None:
    none at all."""

    @property
    def sampling(self) -> dict[str, Any]:
        drawn = _UNCUT if self.temperature else {}
        return {"temperature": self.temperature, "top_p": self.top_p, **_PLAIN, **drawn}


class Engine(ABC):
    """A server and the one model that we use on it."""

    name: str
    version = "unknown"
    _path: str
    """Where it takes prompts."""

    def __init__(self, exchange: Exchange, entry: ModelEntry):
        self.exchange, self.url = exchange, exchange.url
        self.model, self.source, self._most = entry.name, entry.source, entry.context

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of a prompt and its output; None if the server does not say."""
        return self._most

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens of a prompt, leaving room for one generated token."""
        return None if self.context is None else self.context - 1

    def tokenize(self, text: str) -> list[int] | None:
        """A text in the server's own tokens, without special ones; None if it does not say."""
        return None

    @abstractmethod
    def _to_score(self, prompts: list[list[int]], alternatives: int) -> dict[str, Any]:
        """The request for the log probabilities of prompts."""

    @abstractmethod
    def _to_write(self, prompts: list[list[int]], asked: WriteRequest) -> dict[str, Any]:
        """The request to go on after prompts."""

    @abstractmethod
    def _parse(self, answer: Any) -> list[IdAnswer]:
        """What the server answers to either."""

    def scores(self, prompts: Sequence[list[int]], alternatives: int = 0) -> list[TokenScores]:
        """The nll of every token of every prompt (NaN for the first and where the server returns
        none), and this many alternatives. Raises an error if the server has not read exactly these
        tokens."""
        answers = self._answers(self._to_score(list(prompts), alternatives), len(prompts))
        scores = []
        for sent, answer in zip(prompts, answers, strict=True):
            given = answer.prompt
            if given.ids is None or given.nll is None:
                lacking = "log-probabilities" if given.nll is None else "token ids"
                raise ServerError(
                    f"{self.url} does not return the {lacking} of the prompt. vLLM (0.10.2 or "
                    "newer) and SGLang do; llama.cpp has none."
                )
            self._require_read(sent, given.ids, "Its losses would be those of another text.")
            packed = self._packed(given, alternatives, "prompt") if alternatives else None
            given.nll[:1] = np.nan
            scores.append(TokenScores(given.nll, packed))
        return scores

    def write(self, prompts: Sequence[list[int]], asked: WriteRequest) -> list[Written]:
        """`asked.samples` answers to every prompt, one prompt after the other."""
        expected = len(prompts) * asked.samples
        answers = self._answers(self._to_write(list(prompts), asked), expected)
        written = []
        for number, answer in enumerate(answers):
            if answer.drawn is None:
                raise ServerError(
                    f"{self.url} does not return the token ids that the model has written. vLLM "
                    "(0.10.2 or newer) and SGLang do."
                )
            if answer.prompt.ids is not None:
                sent = prompts[number // asked.samples]
                self._require_read(sent, answer.prompt.ids, "Its answer would be to another text.")
            written.append(self._written(answer, asked))
        return written

    def _written(self, answer: IdAnswer, asked: WriteRequest) -> Written:
        assert answer.drawn is not None
        given = answer.drawn.tokens
        assert given.ids is not None
        ids: list[int] = given.ids.tolist()
        if len(ids) > asked.tokens:
            raise ServerError(
                f"{self.url} has written {len(ids):,} tokens where {asked.tokens:,} were asked for."
            )
        if asked.alternatives is None:
            return Written(ids, answer.drawn.stopped)
        if given.nll is None:
            raise ServerError(
                f"{self.url} does not return the log probabilities of what the model has written."
            )
        packed = self._packed(given, asked.alternatives, "answer") if asked.alternatives else None
        return Written(ids, answer.drawn.stopped, given.nll, packed)

    def _answers(self, request: dict[str, Any], expected: int) -> list[IdAnswer]:
        answer = self.exchange.ask(self._path, request)
        if answer is None:
            raise ServerError(f"{self.url} no longer has this endpoint or this model.")
        try:
            answers = self._parse(answer)
        except MalformedError as error:
            raise unusable(self.url, error) from None
        if len(answers) != expected:
            raise ServerError(f"{self.url} answers {len(answers)} of {expected} prompts.")
        return answers

    def _require_read(self, sent: list[int], given: NDArray[np.int64], meaning: str) -> None:
        read: list[int] = given.tolist()
        if read == sent:
            return
        if len(read) > len(sent) and read[-len(sent) :] == sent:
            added = f"adds the token {read[0]} (beginning-of-text?)"
            change = f"{added} before the {len(sent)} it was given"
        elif len(read) != len(sent):
            verb = "drops" if len(read) < len(sent) else "adds"
            change = f"{verb} tokens: it was given {len(sent)} and has read {len(read)}"
        else:
            at = next(i for i, (a, b) in enumerate(zip(sent, read, strict=True)) if a != b)
            change = f"changes token ids: at position {at} it has read {read[at]} for {sent[at]}"
        raise ServerError(f"{self.url} {change}. {meaning}")

    def _packed(self, given: TokenNumbers, count: int, what: str) -> NDArray[np.uint32]:
        """The likeliest at every place, as a store keeps them; none at the first of a prompt."""
        assert given.ids is not None
        if given.likeliest is None or len(given.likeliest.starts) != len(given.ids) + 1:
            raise ServerError(
                f"{self.url} does not return the most likely tokens at each position of the "
                f"{what}, which --alternatives needs."
            )
        ids, nll, fewest = given.likeliest.ranked(count)
        if fewest < count:
            raise ServerError(
                f"{self.url} returns {fewest} of the {count} most likely tokens that "
                "--alternatives asks for."
            )
        if what == "prompt":
            nll[:1] = np.nan
        return pack(ids, nll, ids == given.ids[:, None])


def unusable(url: str, error: MalformedError) -> ServerError:
    """What is said of an answer that is none."""
    return ServerError(
        f"{url} returned an unknown response format: {error}. This response was discarded. Check "
        "the server and its version."
    )


class VLLM(Engine):
    """vLLM's completions endpoint. llama.cpp has it too, without log probabilities of prompts."""

    name, _path = "vllm", "/v1/completions"

    def __init__(self, exchange: Exchange, entry: ModelEntry):
        super().__init__(exchange, entry)
        if entry.owner == "llamacpp":
            raise ServerError(
                f"{exchange.url} is a llama.cpp server, which has no log-probabilities of the "
                f"prompt. Use vLLM or SGLang, or give the GGUF file itself, without --server."
            )
        if about := exchange.ask("/version"):
            self.version = _parsed(exchange.url, parse_version, about)
        else:
            self.name = f"completions of {entry.owner:.80}"

    def tokenize(self, text: str) -> list[int] | None:
        content = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            answer = self.exchange.ask("/tokenize", content)
        except RefusedError:  # it was started without one
            return None
        tokens: list[int] | None = _parsed(self.url, parse_tokens, answer)
        return tokens

    def _answers(self, request: dict[str, Any], expected: int) -> list[IdAnswer]:
        try:
            return super()._answers(request, expected)
        except RefusedError as error:
            wanted = request.get("prompt_logprobs") or request.get("logprobs")
            if not wanted or "logprobs" not in str(error):
                raise
            raise ServerError(
                f"{error} Start the server with --max-logprobs {wanted}, or ask for fewer "
                "--alternatives."
            ) from None

    def _to_score(self, prompts: list[list[int]], alternatives: int) -> dict[str, Any]:
        wanted = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": alternatives}
        return {"model": self.model, "prompt": prompts, "return_token_ids": True, **wanted}

    def _to_write(self, prompts: list[list[int]], asked: WriteRequest) -> dict[str, Any]:
        wanted = {
            "max_tokens": asked.tokens,
            "stop": list(asked.stop),
            "stop_token_ids": list(asked.ends),
            **asked.sampling,
        }
        if asked.samples > 1:
            wanted["n"] = asked.samples
        if asked.alternatives is not None:
            wanted |= {"logprobs": asked.alternatives, "return_tokens_as_token_ids": True}
        return {"model": self.model, "prompt": prompts, "return_token_ids": True, **wanted}

    def _parse(self, answer: Any) -> list[IdAnswer]:
        return parse_completions(answer)


class SGLang(Engine):
    """SGLang's own `/generate`. When it writes it does not say how it has read the prompt."""

    name, _path = "sglang", "/generate"

    def __init__(self, exchange: Exchange, entry: ModelEntry):
        super().__init__(exchange, entry)
        about = exchange.ask("/get_server_info") or exchange.ask("/server_info") or {}
        self.version = _parsed(exchange.url, parse_version, about)
        if self._most is None:
            self._most = _parsed(exchange.url, parse_length, about, "context_length")

    def _to_score(self, prompts: list[list[int]], alternatives: int) -> dict[str, Any]:
        return {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_text_in_logprobs": False,
            **({"top_logprobs_num": alternatives} if alternatives else {}),
        }

    def _to_write(self, prompts: list[list[int]], asked: WriteRequest) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": asked.tokens,
            "stop": list(asked.stop),
            "stop_token_ids": list(asked.ends),
            **asked.sampling,
        }
        # a prompt several times instead of its `n`: the order of the answers is then sure
        repeated = [prompt for prompt in prompts for _ in range(asked.samples)]
        request = {"input_ids": repeated, "sampling_params": sampling}
        if asked.alternatives is None:
            return request
        more = {"top_logprobs_num": asked.alternatives} if asked.alternatives else {}
        return {**request, "return_logprob": True, "return_text_in_logprobs": False, **more}

    def _parse(self, answer: Any) -> list[IdAnswer]:
        return parse_generated(answer)


def _parsed(url: str, parse: Any, *given: Any) -> Any:
    try:
        return parse(*given)
    except MalformedError as error:
        raise unusable(url, error) from None


def listed_models(exchange: Exchange) -> list[ModelEntry]:
    entries: list[ModelEntry] = _parsed(exchange.url, parse_models, exchange.ask("/v1/models"))
    return entries


def chosen_model(
    exchange: Exchange, entries: Sequence[ModelEntry], wanted: str | None
) -> ModelEntry:
    """The model that the user wants, among those that the server lists."""
    models = {entry.name: entry for entry in entries}
    if wanted is None and len(models) == 1:
        (wanted,) = models
    if wanted not in models:
        asked = "several models" if wanted is None else f"no model {wanted!r:.100}"
        raise UsageError(
            f"the server at {exchange.url} has {asked}: choose with --server-model among "
            f"{', '.join(name[:100] for name in [*models][:_MOST_NAMED])}."
        )
    return models[wanted]


def open_engine(exchange: Exchange, wanted: str | None) -> Engine:
    """The engine behind an address, by what it says of itself."""
    entries = listed_models(exchange)
    if not entries:
        raise ServerError(
            f"{exchange.url} lists no model under /v1/models: it is not a server of vLLM or SGLang."
        )
    entry = chosen_model(exchange, entries, wanted)
    return (SGLang if entry.owner == "sglang" else VLLM)(exchange, entry)
