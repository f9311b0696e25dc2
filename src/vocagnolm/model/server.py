"""Models whose weights are behind a server: JSON over HTTP, with patience and a key that is never
shown, and what vLLM and SGLang want to be asked. Prompts of token ids in; out come their losses,
with the likeliest tokens beside them where these are asked for, or what the model writes next.

The standard library's client is enough: a request carries thousands of tokens, so its connection
costs nothing. It follows no redirection, which could carry the key to another host.

A server is known again by a probe: its losses of a few short documents. Not to the last bit: a
server puts other requests into the same batch, and in half precision that moves a loss by
hundredths of a nat. Another model, revision or quantisation moves the mean of all tokens by more.
"""

import contextlib
import email.utils
import http.client
import itertools
import json
import math
import os
import random
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alternatives import NOTHING, pack
from vocagnolm.errors import ServerError, TilingError, UsageError
from vocagnolm.model.nll import Batch, TokenScores, plan_batches
from vocagnolm.recipe.sections import ServerSection
from vocagnolm.store.writer import apart, measured

SERVER_REQUEST_TOKENS = 16384


class Server(ServerSection, frozen=True):
    """A server that runs a model, and how requests are sent to it. If it needs a key, the key is in
    the environment of every process that sends requests."""

    url: str


# ---- JSON over HTTP ----

KEY_VARIABLE = "VOCAGNOLM_SERVER_KEY"
USUAL_KEY_VARIABLE = "OPENAI_API_KEY"  # what other clients of such servers read
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 15.0
_TOO_MANY_REQUESTS = 429
_NOT_THERE = (404, 405, 501)
_SERVER_ERROR = 500


class Exchange:
    """One server. What passes (5xx, too many requests, a connection that broke or never came, half
    an answer) is tried again, not before the server's `Retry-After`, until it has been of no use
    for `patience_seconds`; what does not pass is an error at once."""

    def __init__(self, url: str, patience_seconds: float):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--server {url}: expected an address such as http://localhost:8000.")
        if parts.username or parts.password or parts.query:
            raise UsageError(
                "--server: an address with a user, a password or a query would be written down "
                f"with the plan. Put the key into the environment variable {KEY_VARIABLE}."
            )
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.patience_seconds = patience_seconds
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._given_up = threading.Event()

    @contextlib.contextmanager
    def all_or_none(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """For requests of several threads that belong together: when the block ends by an error,
        those that are under way end at once."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._given_up.set()
                for connection in self._open:
                    if connection.sock is not None:
                        with contextlib.suppress(OSError):
                            connection.sock.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self._given_up.clear()

    def ask(self, path: str, content: dict[str, Any] | None = None) -> Any:
        """A POST of `content`, or a GET; None where the server has nothing under this path."""
        body = None if content is None else json.dumps(content).encode()
        failing_since = None
        pause = _FIRST_PAUSE_SECONDS
        while True:
            asked = time.monotonic()
            try:
                return self._once(path, body)
            except (OSError, http.client.HTTPException, _PassingError) as error:
                silent = isinstance(error, TimeoutError)
                failing_since = failing_since or (asked if silent else time.monotonic())
                reason = _hidden(f"{type(error).__name__}: {error}".removeprefix("_PassingError: "))
                wait = max(pause * random.uniform(0.5, 1.0), getattr(error, "after_seconds", 0.0))
            if time.monotonic() + wait - failing_since > self.patience_seconds:
                raise ServerError(
                    f"the server at {self.url} has not responded usefully for "
                    f"{self.patience_seconds:.0f} s; last error: {reason[:300].rstrip('.')}. "
                    "Finished work is kept: check the server, and run the same command again."
                )
            if self._given_up.wait(wait):
                raise ServerError("given up, because another request has failed.")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _once(self, path: str, content: bytes | None) -> Any:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=self.patience_seconds)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := _key():
            headers["Authorization"] = f"Bearer {key}"
        try:
            with self._lock:
                self._open.add(connection)
            method = "GET" if content is None else "POST"
            connection.request(method, self._path + path, content, headers)
            response = connection.getresponse()
            status, body = response.status, response.read()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if status in _NOT_THERE:
            return None
        if status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS:
            wanted = response.headers.get("Retry-After", "")
            raise _PassingError(f"{status} {_said(body)}", _seconds_until(wanted))
        if not http.client.OK <= status < http.client.MULTIPLE_CHOICES:
            variables = f"{KEY_VARIABLE} or {USUAL_KEY_VARIABLE}"
            where = f" Its key comes from {variables}." if status in (401, 403) else ""
            raise RefusedError(
                f"the server at {self.url} refuses {path}: {status} {_said(body)}.{where}"
            )
        try:
            return json.loads(body)
        except ValueError:
            raise _PassingError(f"a response that is not JSON: {_said(body)}") from None


class RefusedError(ServerError):
    """An answer that will be the same next time."""


class _PassingError(Exception):
    """An answer that may be better next time, after so many seconds."""

    def __init__(self, said: str, after_seconds: float = 0.0):
        super().__init__(said)
        self.after_seconds = after_seconds


def _seconds_until(retry_after: str) -> float:
    """The header is a number of seconds or a date; 0 where it is neither."""
    if retry_after.strip().isdecimal():
        return float(retry_after)
    with contextlib.suppress(TypeError, ValueError):
        date = email.utils.parsedate_to_datetime(retry_after)
        return max(0.0, date.timestamp() - time.time())
    return 0.0


def _key() -> str:
    """Read where it is used, so that nothing that is printed, pickled or written can hold it."""
    name = KEY_VARIABLE if KEY_VARIABLE in os.environ else USUAL_KEY_VARIABLE
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{name} contains characters that are not allowed in a header.")
    return key


def _said(body: bytes) -> str:
    """What an answer says, in a line."""
    text = body.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return _hidden(" ".join(text.split())[:300].rstrip("."))


def _hidden(text: str) -> str:
    """Servers repeat the key that they refuse."""
    key = _key()
    return text.replace(key, "(key)") if key else text


# ---- engines ----

# JSON has no infinity: vLLM writes this for a probability of zero
_NO_PROBABILITY = -9999.0
_ROUNDING = 0.01  # by which half precision may put a log-probability above 0
# A server takes what it is not told from the model's generation_config.json: a penalty there would
# change the likeliest tokens, too.
_GREEDY = {
    "temperature": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Written(NamedTuple):
    """What a model has written after one prompt. `ended`: by itself, not at the limit."""

    ids: list[int]
    ended: bool


class _Answer(NamedTuple):
    """To one prompt; None for what the server leaves out."""

    ids: list[int] | None
    """The prompt as it has read it."""
    values: list[float | None] | None
    """Log-probabilities of these tokens."""
    likeliest: list[list[tuple[int, float]] | None] | None
    """Ids and log-probabilities at every position."""
    written: Written | None


class Engine(ABC):
    """A server and the one model that we use on it."""

    name: str
    version = "unknown"
    _path: str
    """Where it takes prompts."""

    def __init__(self, exchange: Exchange, entry: dict[str, Any]):
        self._exchange, self._url = exchange, exchange.url
        self.model = str(entry["id"])
        self.source = str(entry.get("root") or self.model)
        """Where the server has the model from."""
        self._most = entry.get("max_model_len")

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of a prompt and its output; None if the server does not say."""
        return None if self._most is None else int(self._most)

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens of a prompt, leaving room for one generated token."""
        return None if self.context is None else self.context - 1

    def tokenize(self, text: str) -> list[int] | None:
        """A text in the server's own tokens, without special ones; None if it does not say."""
        return None

    @abstractmethod
    def _to_score(self, prompts: list[list[int]], alternatives: int) -> dict[str, Any]:
        """The request for the log-probabilities of prompts."""

    @abstractmethod
    def _to_write(
        self, prompts: list[list[int]], tokens: int, stop: list[str], ends: list[int]
    ) -> dict[str, Any]:
        """The request to go on after prompts."""

    @abstractmethod
    def _parse(self, answer: Any) -> list[_Answer]:
        """What the server answers to either."""

    def scores(self, prompts: Sequence[list[int]], alternatives: int = 0) -> list[TokenScores]:
        """The nll of every token of every prompt (NaN for the first and where the server returns
        none), and this many alternatives. Raises an error if the server has not read exactly these
        tokens."""
        found = []
        for sent, one in self._answers(prompts, self._to_score(list(prompts), alternatives)):
            if one.ids is None or one.values is None:
                lacking = "log-probabilities" if one.values is None else "token ids"
                raise ServerError(
                    f"{self._url} does not return the {lacking} of the prompt. vLLM (0.10.2 or "
                    "newer) and SGLang do; llama.cpp has none."
                )
            self._require_read(sent, one.ids, "Its losses would be those of another text.")
            self._refuse_impossible(one.values)
            packed = self._packed(one, alternatives) if alternatives else None
            missing = (None, _NO_PROBABILITY)
            nll = -np.array([np.nan if v in missing else v for v in one.values], np.float32)
            nll[:1] = np.nan
            nll[~np.isfinite(nll)] = np.nan
            found.append(TokenScores(nll, packed))
        return found

    def write(
        self, prompts: Sequence[list[int]], *, tokens: int, stop: Sequence[str], ends: Sequence[int]
    ) -> list[Written]:
        """The most likely tokens after every prompt: at most `tokens` of them, up to one of `ends`
        or until a string of `stop` appears."""
        request = self._to_write(list(prompts), tokens, list(stop), list(ends))
        found = []
        for sent, one in self._answers(prompts, request):
            if one.written is None:
                raise ServerError(
                    f"{self._url} does not return the token ids that the model has written. vLLM "
                    "(0.10.2 or newer) and SGLang do."
                )
            if one.ids is not None:
                self._require_read(sent, one.ids, "Its answer would be to another text.")
            found.append(one.written)
        return found

    def _answers(
        self, prompts: Sequence[list[int]], request: dict[str, Any]
    ) -> Iterator[tuple[list[int], _Answer]]:
        answer = self._exchange.ask(self._path, request)
        if answer is None:
            raise ServerError(f"{self._url} no longer has this endpoint or this model.")
        try:
            answers = self._parse(answer)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self._url} returned an unknown response format: {type(error).__name__}: {error}."
            ) from None
        if len(answers) != len(prompts):
            raise ServerError(f"{self._url} answers {len(answers)} of {len(prompts)} prompts.")
        return zip(prompts, answers, strict=True)

    def _require_read(self, sent: list[int], read: list[int], meaning: str) -> None:
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
        raise ServerError(f"{self._url} {change}. {meaning}")

    def _refuse_impossible(self, values: Sequence[float | None]) -> None:
        """A probability above 1, or one that no model in half precision gives."""
        for value in values:
            if value is not None and (value > _ROUNDING or -math.inf < value < _NO_PROBABILITY):
                raise ServerError(
                    f"{self._url} returned the impossible log-probability {value:g}. This response "
                    "was discarded. Check the server and its version."
                )

    def _packed(self, one: _Answer, count: int) -> np.ndarray:
        """The likeliest at every place, as a store keeps them; none at the first."""
        assert one.ids is not None
        if one.likeliest is None or len(one.likeliest) != len(one.ids):
            raise ServerError(
                f"{self._url} does not return the most likely tokens at each position of the "
                "prompt, which --alternatives needs."
            )
        chosen = np.full((len(one.ids), count), -1, np.int64)
        nll = np.full((len(one.ids), count), np.nan)
        for position, given in enumerate(one.likeliest):
            if position == 0 or not given:
                continue
            self._refuse_impossible([value for _, value in given])
            ranked = sorted(given, key=lambda entry: -entry[1])[:count]
            if len(ranked) < count:
                raise ServerError(
                    f"{self._url} returns {len(ranked)} of the {count} most likely tokens that "
                    "--alternatives asks for."
                )
            chosen[position] = [index for index, _ in ranked]
            nll[position] = [np.nan if value == _NO_PROBABILITY else -value for _, value in ranked]
        return pack(chosen, nll, chosen == np.array(one.ids)[:, None])


class VLLM(Engine):
    """vLLM's completions endpoint. llama.cpp has it too, without log-probabilities of prompts."""

    name, _path = "vllm", "/v1/completions"

    def __init__(self, exchange: Exchange, entry: dict[str, Any]):
        super().__init__(exchange, entry)
        if (owner := entry.get("owned_by")) == "llamacpp":
            raise ServerError(
                f"{exchange.url} is a llama.cpp server, which has no log-probabilities of the "
                f"prompt. Use vLLM or SGLang, or give the GGUF file itself, without --server."
            )
        if about := exchange.ask("/version"):
            self.version = str(about["version"])
        else:
            self.name = f"completions of {owner}"

    def tokenize(self, text: str) -> list[int] | None:
        content = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            answer = self._exchange.ask("/tokenize", content)
        except RefusedError:  # it was started without one
            return None
        return answer.get("tokens") if isinstance(answer, dict) else None

    def scores(self, prompts: Sequence[list[int]], alternatives: int = 0) -> list[TokenScores]:
        try:
            return super().scores(prompts, alternatives)
        except RefusedError as error:
            if not alternatives or "logprobs" not in str(error):
                raise
            raise ServerError(
                f"{error} Start the server with --max-logprobs {alternatives}, or ask for fewer "
                "--alternatives."
            ) from None

    def _to_score(self, prompts: list[list[int]], alternatives: int) -> dict[str, Any]:
        wanted = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": alternatives}
        return {"model": self.model, "prompt": prompts, "return_token_ids": True, **wanted}

    def _to_write(
        self, prompts: list[list[int]], tokens: int, stop: list[str], ends: list[int]
    ) -> dict[str, Any]:
        wanted = {"max_tokens": tokens, "stop": stop, "stop_token_ids": ends, **_GREEDY}
        return {"model": self.model, "prompt": prompts, "return_token_ids": True, **wanted}

    def _parse(self, answer: Any) -> list[_Answer]:
        found = []
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
            ids, rows = choice.get("prompt_token_ids"), choice.get("prompt_logprobs")
            values, likeliest = None, None
            if rows is not None and ids is not None:
                pairs = zip(ids, rows, strict=True)
                values = [None if row is None else row[str(n)]["logprob"] for n, row in pairs]
                # the token itself stands there too, however unlikely it is
                likeliest = [
                    row and [(int(n), one["logprob"]) for n, one in row.items()] for row in rows
                ]
            written = None
            if (new := choice.get("token_ids")) is not None:
                written = Written(new, choice.get("finish_reason") == "stop")
            found.append(_Answer(ids, rows if values is None else values, likeliest, written))
        return found


class SGLang(Engine):
    """SGLang's own `/generate`. When it writes it does not say how it has read the prompt."""

    name, _path = "sglang", "/generate"

    def __init__(self, exchange: Exchange, entry: dict[str, Any]):
        super().__init__(exchange, entry)
        about = exchange.ask("/get_server_info") or exchange.ask("/server_info") or {}
        self.version = str(about.get("version", "unknown"))
        self._most = self._most or about.get("context_length")

    def _to_score(self, prompts: list[list[int]], alternatives: int) -> dict[str, Any]:
        return {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_text_in_logprobs": False,
            **({"top_logprobs_num": alternatives} if alternatives else {}),
        }

    def _to_write(
        self, prompts: list[list[int]], tokens: int, stop: list[str], ends: list[int]
    ) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "stop": stop, "stop_token_ids": ends, **_GREEDY}
        return {"input_ids": prompts, "sampling_params": sampling}

    def _parse(self, answer: Any) -> list[_Answer]:
        found = []
        for one in answer if isinstance(answer, list) else [answer]:
            about = one["meta_info"]
            rows = about.get("input_token_logprobs") or None
            likeliest = about.get("input_top_logprobs") and [
                position and [(int(row[1]), row[0]) for row in position if row[0] is not None]
                for position in about["input_top_logprobs"]
            ]
            written = None
            if (new := one.get("output_ids")) is not None:
                written = Written(new, (about.get("finish_reason") or {}).get("type") == "stop")
            ids, values = rows and [int(row[1]) for row in rows], rows and [row[0] for row in rows]
            found.append(_Answer(ids, values, likeliest, written))
        return found


def open_engine(exchange: Exchange, wanted: str | None) -> Engine:
    """The engine behind an address, by what it says of itself."""
    found = exchange.ask("/v1/models")
    listed = found.get("data") if isinstance(found, dict) else None
    models = {str(entry["id"]): entry for entry in listed or ()}
    if not models:
        raise ServerError(
            f"{exchange.url} lists no model under /v1/models: it is not a server of vLLM or SGLang."
        )
    if wanted is None and len(models) == 1:
        (wanted,) = models
    if wanted not in models:
        asked = "several models" if wanted is None else f"no model {wanted!r}"
        raise UsageError(
            f"the server at {exchange.url} has {asked}: choose with --server-model among "
            f"{', '.join([*models][:8])}."
        )
    entry = models[wanted]
    return (SGLang if entry.get("owned_by") == "sglang" else VLLM)(exchange, entry)


# ---- the model behind a server ----

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
# An address that nobody answers is told soon; a server that has answered once is waited for.
_START_SECONDS = 5.0
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ServedModel:
    """A model behind a server: token ids go there, losses come back, or more token ids.

    Every request has a probe with it, so that no answer of another model is taken, whenever the
    server was started again."""

    _prompts: list[list[int]]
    _losses: list[np.ndarray]
    """The probe, and what the server made of it when this process met it."""

    def __init__(self, server: Server, *, patient: bool = False):
        """`patient` waits for a server that is being started."""
        start = server.patience_seconds if patient else _START_SECONDS
        self._exchange = Exchange(server.url, min(start, server.patience_seconds))
        self._requests = server.requests
        self.engine = open_engine(self._exchange, server.model)
        self._exchange.patience_seconds = server.patience_seconds

    @property
    def url(self) -> str:
        return self._exchange.url

    def take_probe(
        self,
        tokenizer: TextTokenizer,
        prefix_ids: Sequence[int],
        *,
        given: str,
        context: int | None = None,
    ) -> None:
        """Where the server says how it reads text, it must be as the tokenizer that the user has
        given does: ids of another vocabulary would be read as nonsense, without an error."""
        prompts = []
        longest = min(limit for limit in (context, self.engine.longest, sys.maxsize) if limit)
        for text in TEXTS:
            try:
                ids = tokenizer.spans(text).ids.tolist()
            except TilingError as error:
                raise ServerError(
                    f"the tokenizer of {given} cannot read a probe: {error}"
                ) from None
            there = self.engine.tokenize(text)
            if there is not None and there != ids:
                raise ServerError(
                    f"the model {self.engine.model} of {self.url} has another tokenizer than "
                    f"{given}: it reads a probe as {len(there)} tokens, {there[:6]}..., and "
                    f"{given} as {len(ids)}, {ids[:6]}.... Start the server with the same model."
                )
            prompts.append([*prefix_ids, *ids[: longest - len(prefix_ids)]])
        self._prompts = prompts
        self._losses = [scores.nll[1:] for scores in self.engine.scores(prompts)]
        if missing := sum(int(np.isnan(nll).sum()) for nll in self._losses):
            raise ServerError(
                f"{self.url} has no log-probability for {missing} tokens of the probe. Check the "
                "model's weights and the dtype that the server runs it in."
            )

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
        pairs = zip(self._prompts, self._losses, strict=True)
        probe, losses = min(pairs, key=lambda pair: len(pair[0]))
        probed, *found = self.engine.scores([probe, *prompts], alternatives)
        off = apart(losses.tolist(), probed.nll[1:].tolist())
        if not off <= TOLERANCE:
            raise ServerError(
                f"the losses of {self.url} have changed since this run began: those of a probe by "
                f"{off:.3f} nats per token ({TOLERANCE} are allowed). Another model, revision or "
                f"precision is running there; this response was discarded. Start the server as "
                f"it was, and run the same command again."
            )
        return found

    def write(self, prompts: Sequence[list[int]], **options: Any) -> list[Written]:
        """Greedy answers to prompts in one request; options as in `Engine.write`."""
        found = self.engine.write(prompts, **options)
        self.scores([])
        return found

    def each(
        self, work: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> Iterator[tuple[_Item, _Result]]:
        """What `work` makes of every item, as it comes, with several requests under way. What has
        come before an error, or together with it, comes before it here."""
        pool = ThreadPoolExecutor(self._requests)
        left = iter(items)
        calls: dict[Future[_Result], _Item] = {}
        with self._exchange.all_or_none(pool):
            while True:
                for item in itertools.islice(left, 2 * self._requests - len(calls)):
                    calls[pool.submit(work, item)] = item
                if not calls:
                    return
                done, _ = wait(calls, return_when=FIRST_COMPLETED)
                for call in sorted(done, key=lambda call: call.exception() is not None):
                    yield calls.pop(call), call.result()

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
        """Of the token ids of every document, in windows as `NllModel` reads them."""
        prefix = list(prefix_ids)
        found = [
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
                here, scored = found[window.document], slice(window.first_scored, window.stop)
                here.nll[scored] = scores.nll[skipped:]
                if here.alternatives is not None and scores.alternatives is not None:
                    here.alternatives[scored] = scores.alternatives[skipped:]
            if on_tokens is not None:
                on_tokens(sum(w.stop - w.first_scored for w in batch.windows))
        return found
