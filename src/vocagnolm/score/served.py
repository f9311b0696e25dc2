"""Teachers that write behind servers: one whose tokenizer is here, which is asked by token ids, and
any chat endpoint, of which nothing is known but what it answers.

Nothing is drawn here: a server draws by its own random numbers. What it has answered is kept
instead (`vocagnolm.score.journal`), and never asked for again.
"""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alternatives import AlternativesSpec, Vocabulary
from vocagnolm.chat import ChatTokenizer, Message, Refused
from vocagnolm.chat.answers import tiling_pieces
from vocagnolm.chat.messages import messages_of
from vocagnolm.data.prompts import Prompt
from vocagnolm.errors import LimitError, UsageError
from vocagnolm.generate.reading import known_ids
from vocagnolm.model.load import ModelFiles
from vocagnolm.model.served import ServedModel, Server, WriteRequest
from vocagnolm.model.served.answers import ChatChoice
from vocagnolm.model.served.chat import CUT, FINISHED, ChatModel, ChatRequest
from vocagnolm.model.served.exchange import RefusedError
from vocagnolm.model.served.laying import lay_tokens, tokens_behind
from vocagnolm.recipe.sections import SpendingSection
from vocagnolm.score.journal import AnswerJournal
from vocagnolm.score.teacher import described_alternatives
from vocagnolm.score.writers import LocalWriter, Surroundings, WriteSettings
from vocagnolm.score.written import ReadPrompt, WrittenAnswer

SERVER_SHARD_PROMPTS = 256
WRITING_REQUESTS = 16
"""Requests that each server has under way, if nobody says otherwise."""
_ANSWERS_A_REQUEST = 16
"""Answers in a request to a server that takes several prompts; a probe follows each request."""
_REFUSED_AT_FIRST = 16
"""So many requests are refused before any is answered: then it is not the prompts."""
_BYTES_A_TOKEN = 4.0
"""Where no tokenizer is there to count."""


class Spending(SpendingSection, frozen=True):
    """What a server may be asked for in one run, and what that costs."""

    @property
    def is_limited(self) -> bool:
        return self.max_requests is not None or self.max_server_tokens is not None

    def money(self, read_tokens: int, written_tokens: int) -> float | None:
        """What tokens cost; None where no price is given."""
        if self.price_input is None and self.price_output is None:
            return None
        read = read_tokens * (self.price_input or 0.0)
        return (read + written_tokens * (self.price_output or 0.0)) / 1e6


@dataclass
class Budget:
    """What was asked for in this run."""

    spending: Spending
    requests: int = 0
    tokens: int = 0

    @property
    def reached(self) -> str | None:
        """The limit that is reached, in words."""
        most, tokens = self.spending.max_requests, self.spending.max_server_tokens
        if most is not None and self.requests >= most:
            return f"--max-requests {most:,}"
        if tokens is not None and self.tokens >= tokens:
            return f"--max-server-tokens {tokens:,}"
        return None


@dataclass(frozen=True)
class Response:
    """What came of one request."""

    answers: Sequence[tuple[int, int, WrittenAnswer]]
    """Number of the prompt among those that were asked, number of the answer, the answer."""
    tokens: int
    """Written tokens."""
    spent: int
    """Tokens that were read and written."""


Asked = tuple[tuple[int, ...], tuple[int, ...]]
"""A request: the numbers of its prompts, and of the answers that each of them is to have."""


class ServedWriter(ABC):
    """A teacher behind servers."""

    settings: WriteSettings
    chat: ChatTokenizer | None = None
    device_name: str | None = None
    budget: Budget

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...

    @abstractmethod
    def vocabulary(self) -> Vocabulary | None: ...

    def load(self) -> None:
        """Nothing is left to do: the server has loaded it."""
        return

    @abstractmethod
    def read(self, prompts: Sequence[Prompt]) -> list[ReadPrompt | str]: ...

    @abstractmethod
    def spelled(self, read: ReadPrompt) -> str: ...

    @abstractmethod
    def tokens_of(self, read: ReadPrompt) -> int:
        """Tokens that the server reads for all answers to a prompt."""

    def requests_for(self, prompts: int) -> int:
        """Requests for all answers to so many prompts."""
        return len(self._requests([range(self.settings.samples)] * prompts))

    @abstractmethod
    def _requests(self, wanted: Sequence[Sequence[int]]) -> list[Asked]:
        """Requests for answers; `wanted`: by prompt, the numbers of those that are not there."""

    @abstractmethod
    def _answered(self, reads: Sequence[ReadPrompt], asked: Asked) -> Response:
        """Sends one request. A response may lack some of the answers."""

    @abstractmethod
    def _each(
        self, work: Callable[[Asked], Response], requests: Iterator[Asked]
    ) -> Iterator[tuple[Asked, Response]]: ...

    def responses(
        self, reads: Sequence[ReadPrompt], wanted: Sequence[Sequence[int]]
    ) -> Iterator[Response]:
        """What comes of each request, as it comes, until all answers are there that are `wanted`,
        by prompt. LimitError where the budget ends before; what is under way then still comes."""
        left = [set(numbers) for numbers in wanted]
        ended: list[str] = []

        def within_budget(requests: Sequence[Asked]) -> Iterator[Asked]:
            for request in requests:
                if (limit := self.budget.reached) is not None:
                    ended.append(limit)
                    return
                self.budget.requests += 1
                yield request

        while any(left) and not ended:
            requests = self._requests([sorted(numbers) for numbers in left])
            work = within_budget(requests)
            for _, response in self._each(lambda asked: self._answered(reads, asked), work):
                self.budget.tokens += response.spent
                for prompt, number, _ in response.answers:
                    left[prompt].discard(number)
                yield response
        if ended:
            raise LimitError(
                f"{ended[0]} is reached: {self.budget.requests:,} requests and "
                f"{self.budget.tokens:,} tokens in this run."
            )

    def write(
        self,
        reads: Sequence[ReadPrompt],
        seeds: Sequence[Sequence[int]],
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, int, WrittenAnswer]]:
        """Every answer to the prompts, with its place; a prompt gets as many as it has seeds."""
        for response in self.responses(reads, [range(len(numbers)) for numbers in seeds]):
            if on_tokens is not None:
                on_tokens(response.tokens)
            yield from response.answers


def kept_answers(
    writer: ServedWriter,
    journal: AnswerJournal,
    reads: Sequence[ReadPrompt],
    on_tokens: Callable[[int], None],
) -> Iterator[tuple[int, int, WrittenAnswer]]:
    """Every answer to some prompts: first those in the journal, then those that the server writes
    now, each of which is kept in the journal before it is given."""
    there, samples = journal.read(), writer.settings.samples
    wanted: list[list[int]] = [[] for _ in reads]
    for prompt, read in enumerate(reads):
        for number in range(samples):
            answer = there.get((read.prompt.index, number))
            if answer is None:
                wanted[prompt].append(number)
            else:
                yield prompt, number, answer
    for response in writer.responses(reads, wanted):
        journal.add([(reads[p].prompt.index, n, answer) for p, n, answer in response.answers])
        on_tokens(response.tokens)
        yield from response.answers


def _refuse_local(settings: WriteSettings) -> None:
    """Refuse what is the server's business."""
    own = {
        "--dtype": settings.dtype != "auto",
        "--device cuda": settings.device == "cuda",
        "--compile": settings.compiled,
        "--rows": settings.rows is not None,
        "--threads": settings.threads is not None,
    }
    if given := [name for name, is_given in own.items() if is_given]:
        raise UsageError(
            f"{', '.join(given)} does not apply with --server: remove it, and configure the server "
            "instead."
        )


# ---- by token ids ----


class IdWriter(ServedWriter):
    """A teacher whose tokenizer is here and whose weights are behind vLLM or SGLang."""

    def __init__(
        self,
        files: ModelFiles,
        server: Server,
        settings: WriteSettings,
        *,
        continues: bool = False,
        prompt_tokens: int = 128,
        patient: bool = False,
        spending: Spending | None = None,
    ):
        """`files` without their weights."""
        _refuse_local(settings)
        if settings.server_options:
            raise UsageError(
                "--server-option is for chat endpoints, without --teacher: remove one of the two."
            )
        self.budget = Budget(spending or Spending())
        self._served = ServedModel(server, patient=patient, requests=WRITING_REQUESTS)
        inside = _with_context(settings, files, self._served)
        self._reader = LocalWriter(files, inside, continues=continues, prompt_tokens=prompt_tokens)
        self.chat = self._reader.chat
        self.settings = replace(
            self._reader.settings,
            device="cpu",
            dtype="auto",
            compiled=None,
            threads=None,
            shard_prompts=settings.shard_prompts or SERVER_SHARD_PROMPTS,
        )
        self._ends, self._known = self._reader.ends, known_ids(files)
        self._asked = WriteRequest(
            tokens=settings.max_new_tokens,
            stop=settings.stop,
            ends=sorted(self._ends),
            temperature=settings.temperature,
            top_p=settings.top_p,
            alternatives=settings.alternatives,
        )
        self._served.take_probe(
            files.tokenizer,
            files.prefix_ids,
            given="--teacher",
            context=self.settings.context,
            drawing=self._asked,
        )

    def describe(self) -> dict[str, Any]:
        about = self._reader.describe()
        writing = about["writing"]
        kept = [name for name in writing if name not in _OF_THIS_PROCESS]
        return {
            **about,
            "writing": {name: writing[name] for name in kept},
            "server": self._served.describe(),
        }

    def vocabulary(self) -> Vocabulary:
        return self._reader.vocabulary()

    def read(self, prompts: Sequence[Prompt]) -> list[ReadPrompt | str]:
        return self._reader.read(prompts)

    def spelled(self, read: ReadPrompt) -> str:
        return self._reader.spelled(read)

    def tokens_of(self, read: ReadPrompt) -> int:
        return len(read.ids)

    def _requests(self, wanted: Sequence[Sequence[int]]) -> list[Asked]:
        """Prompts that lack the same answers go together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for prompt, numbers in enumerate(wanted):
            if numbers:
                alike.setdefault(tuple(numbers), []).append(prompt)
        requests = []
        for numbers, prompts in alike.items():
            size = max(1, _ANSWERS_A_REQUEST // len(numbers))
            for at in range(0, len(prompts), size):
                requests.append((tuple(prompts[at : at + size]), numbers))
        return requests

    def _each(
        self, work: Callable[[Asked], Response], requests: Iterator[Asked]
    ) -> Iterator[tuple[Asked, Response]]:
        return self._served.each(work, requests)

    def _answered(self, reads: Sequence[ReadPrompt], asked: Asked) -> Response:
        prompts, numbers = asked
        sent = [list(reads[prompt].ids) for prompt in prompts]
        written = iter(self._served.write(sent, replace(self._asked, samples=len(numbers))))
        answers, tokens = [], 0
        for prompt in prompts:
            for number in numbers:
                ids, finished, nll, packed = next(written)
                assert nll is not None
                answers.append((prompt, number, self._answer(ids, nll, packed, finished)))
                tokens += len(ids)
        return Response(answers, tokens, tokens + sum(map(len, sent)))

    def _answer(
        self,
        ids: Sequence[int],
        nll: NDArray[np.float32],
        packed: NDArray[np.uint32] | None,
        finished: bool,
    ) -> WrittenAnswer:
        if any(token >= self._known for token in ids):
            text = f"unknown token: {max(ids)}, and --teacher has {self._known:,}"
            return _without_numbers("", refused=text)
        ended = bool(ids) and ids[-1] in self._ends
        return self._reader.answer_of(ids, nll, packed, finished=finished or ended, ended=ended)


_OF_THIS_PROCESS = ("seed", "device", "dtype", "rows", "compiled", "threads")
"""Settings on which nothing depends that a server writes."""


def _with_context(settings: WriteSettings, files: ModelFiles, served: ServedModel) -> WriteSettings:
    """The settings with the server's context as a limit, as the model's own is one."""
    longest = served.engine.context
    if longest is None:
        return settings
    if settings.context is not None and settings.context > longest:
        raise UsageError(
            f"--context {settings.context}: the server at {served.url} reads and writes at most "
            f"{longest} tokens. Start it with --max-model-len {settings.context}, or remove "
            "--context."
        )
    usual = LocalWriter.usual_context(files, settings)
    return replace(settings, context=settings.context or min(usual, longest))


# ---- chat endpoints ----

_FIXED = ("model", "messages", "n", "stream", "logprobs", "top_logprobs", "stop")
_OWN_OPTIONS = {
    "temperature": "--temperature",
    "top_p": "--top-p",
    "max_tokens": "--max-new-tokens",
}


class ChatWriter(ServedWriter):
    """A teacher behind a chat endpoint: no tokenizer of it is needed."""

    def __init__(
        self,
        server: Server,
        settings: WriteSettings,
        *,
        continues: bool = False,
        patient: bool = False,
        spending: Spending | None = None,
    ):
        _refuse_local(settings)
        _refuse_unknown(settings, continues)
        self.budget = Budget(spending or Spending())
        self._surroundings = Surroundings(settings)
        asked = ChatRequest(
            tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop=settings.stop,
            alternatives=settings.alternatives,
            template_options=settings.template_options,
            options=settings.server_options,
            keep_reasoning=settings.keep_reasoning,
        )
        self._model = ChatModel(server, asked, patient=patient, requests=WRITING_REQUESTS)
        self.settings = replace(
            settings,
            alternatives=self._model.abilities.given,
            device="cpu",
            shard_prompts=settings.shard_prompts or SERVER_SHARD_PROMPTS,
        )
        self._lock = threading.Lock()
        self._taken = self._refused = 0

    def describe(self) -> dict[str, Any]:
        settings, model = self.settings, self._model
        named = ("samples", "temperature", "top_p", "max_new_tokens", "stop", "cut", "grade")
        more = {
            "template_options": dict(settings.template_options) or None,
            "server_options": dict(settings.server_options) or None,
            "hidden_reasoning": "kept" if settings.keep_reasoning else None,
        }
        spec = AlternativesSpec(settings.alternatives) if settings.alternatives else None
        return {
            "teacher": {"name": model.model},
            "writing": {
                **{name: getattr(settings, name) for name in named},
                **self._surroundings.describe(),
                **{name: value for name, value in more.items() if value is not None},
            },
            "server": {
                "engine": "chat completions",
                "model": model.model,
                "numbers": model.abilities.numbers,
            },
            **described_alternatives(spec, None),
        }

    def vocabulary(self) -> None:
        """Nobody knows it: every shard says what it has seen."""
        return None

    def read(self, prompts: Sequence[Prompt]) -> list[ReadPrompt | str]:
        return [self._read(prompt) for prompt in prompts]

    def _read(self, prompt: Prompt) -> ReadPrompt | str:
        assert prompt.text is not None
        try:
            self._surroundings.around(messages_of(prompt.text))
        except Refused as error:
            return str(error)
        return ReadPrompt(prompt, [])

    def spelled(self, read: ReadPrompt) -> str:
        messages = self._messages(read)
        return "\n".join(f"{message.role}: {message.content}" for message in messages)

    def tokens_of(self, read: ReadPrompt) -> int:
        size = sum(len(message.text.encode()) for message in self._messages(read))
        times = 1 if self._model.abilities.several else self.settings.samples
        return times * int(size / _BYTES_A_TOKEN)

    def _messages(self, read: ReadPrompt) -> list[Message]:
        assert read.prompt.text is not None
        return self._surroundings.around(messages_of(read.prompt.text))

    def _requests(self, wanted: Sequence[Sequence[int]]) -> list[Asked]:
        if self._model.abilities.several:
            return [((n,), tuple(numbers)) for n, numbers in enumerate(wanted) if numbers]
        return [((n,), (number,)) for n, numbers in enumerate(wanted) for number in numbers]

    def _each(
        self, work: Callable[[Asked], Response], requests: Iterator[Asked]
    ) -> Iterator[tuple[Asked, Response]]:
        return self._model.each(work, requests)

    def _answered(self, reads: Sequence[ReadPrompt], asked: Asked) -> Response:
        (prompt,), numbers = asked
        messages, more = request_messages(self._messages(reads[prompt]))
        if kwargs := more.get("chat_template_kwargs"):
            more["chat_template_kwargs"] = {**self.settings.template_options, **kwargs}
        try:
            answer = self._model.answer(messages, len(numbers), more)
        except RefusedError as error:
            refused = self._refusal(error)
            return Response([(prompt, number, refused) for number in numbers], 0, 0)
        with self._lock:
            self._taken += 1
        answers = [
            (prompt, number, self._written(choice))
            for number, choice in zip(numbers, answer.choices, strict=False)
        ]
        known = sum(len(choice.tokens or ()) for choice in answer.choices)
        tokens = answer.new_tokens or known
        return Response(answers, tokens, answer.prompt_tokens + tokens)

    def _refusal(self, error: RefusedError) -> WrittenAnswer:
        """A prompt that the server does not take, for its length or its content. An error where it
        takes none: then it is not the prompts."""
        with self._lock:
            self._refused += 1
            if not error.of_the_request or (not self._taken and self._refused >= _REFUSED_AT_FIRST):
                raise error
        return _without_numbers("", refused=f"refused by the server: {str(error)[:300]}")

    def _written(self, choice: ChatChoice) -> WrittenAnswer:
        numbers, settings = self._model.abilities.numbers, self.settings
        return chat_answer(choice, settings.alternatives, numbers, settings.stop)


def _refuse_unknown(settings: WriteSettings, continues: bool) -> None:
    """Refuse what needs a tokenizer, and fields of requests that are ours."""
    for name, is_given in (
        ("--continue", continues),
        ("--chat-template", settings.chat_template is not None),
        ("--context", settings.context is not None),
    ):
        if is_given:
            raise UsageError(
                f"{name} does not apply to a chat endpoint: remove it, or give --teacher TOKENIZER "
                "(vLLM, SGLang)."
            )
    for name, value in settings.server_options.items():
        if name in _FIXED or (name in _OWN_OPTIONS and value is not None):
            instead = _OWN_OPTIONS.get(name, "the options of this command")
            raise UsageError(f"--server-option {name}: use {instead} instead.")
    left_out = [n for n in ("temperature", "top_p") if n in settings.server_options]
    if left_out and (settings.temperature, settings.top_p) != (1, 1):
        raise UsageError(
            f"--server-option {left_out[0]}=null leaves it to the server, whose own is taken to be "
            "1: write with --temperature 1 and without --top-p."
        )


def request_messages(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages as a chat endpoint takes them, and what else of the conversation belongs into the
    request (tools)."""
    listed, more = [], {}
    for message in messages:
        fields = dict(message.fields)
        for name in ("tools", "chat_template_kwargs"):
            if value := fields.pop(name, None):
                more[name] = value
        if calls := fields.get("tool_calls"):
            fields["tool_calls"] = [_call(call) for call in calls]
        listed.append({"role": message.role, "content": message.content, **fields})
    return listed, more


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as the text that endpoints expect."""
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function = {**function, "arguments": json.dumps(arguments)}
    return {**call, "function": function}


def chat_answer(
    choice: ChatChoice, count: int, numbers: str, stop: Sequence[str] = ()
) -> WrittenAnswer:
    """An answer of a chat endpoint, with `count` alternatives where it gives numbers."""
    text, finished = choice.text.strip(), choice.reason in FINISHED
    try:
        text.encode()
        choice.reasoning.encode()
    except UnicodeEncodeError:
        return _without_numbers("", refused="not Unicode: the answer holds half a character")
    if "\ufffd" in text:
        return _without_numbers(text, refused="not UTF-8: a part of the answer is no character")
    if why := _refusal_of(choice):
        return _without_numbers(text, refused=why)
    about: dict[str, Any] = {"finished": finished, "reasoning": choice.reasoning or None}
    if numbers == "none" or choice.tokens is None:
        return _without_numbers(text, **about)
    tokens = tokens_behind(choice.tokens, choice.text) if choice.reasoning else choice.tokens
    laid = lay_tokens(tokens, text, finished=finished, stop=stop)
    if laid is None:
        why = "bytes: what the server says of its tokens is not the text of the answer"
        return _without_numbers(text, refused=why)
    packed, entries = laid.alternatives(count) if count else (None, None)
    pieces = [token.data for token in laid.tokens]
    return WrittenAnswer(pieces, laid.nll, packed, ended=laid.ended, entries=entries, **about)


def _refusal_of(choice: ChatChoice) -> str | None:
    """Why an answer is none, `kind: more`."""
    if choice.refusal:
        return f"refusal: {' '.join(choice.refusal.split())[:100]}"
    if choice.calls:
        return "tool calls: the model calls a tool instead of answering"
    if choice.reason == "content_filter":
        return "content filter: the server withholds the answer"
    if choice.reason not in (*FINISHED, *CUT):
        return f"not finished: the server says {choice.reason!r}"
    return None


def _without_numbers(text: str, **about: Any) -> WrittenAnswer:
    """An answer of which nothing is known but its text."""
    data = text.encode()
    ends = np.cumsum(tiling_pieces(len(data))).tolist()
    pieces = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    nll = np.full(len(pieces), np.nan, np.float32)
    return WrittenAnswer(pieces, nll, None, ended=False, **{"finished": False, **about})
