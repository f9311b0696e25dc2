"""Chat endpoints as OpenAI has made them usual: messages in, texts out, with the log probabilities
and the likeliest tokens at every place where the server gives them. No tokenizer is needed, since
the bytes of tokens stand in the answer.

What a server can do is found out by a few short requests: how many of the likeliest tokens it
gives, several answers to one request or one, whether it thinks before it answers, whether the
bytes of its tokens are those of its text, whether its log probabilities are raw.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from vocagnolm.errors import ServerError, UsageError, VocagnolmWarning
from vocagnolm.model.served.answers import ChatAnswer, ChatChoice, MalformedError, parse_chat
from vocagnolm.model.served.engines import chosen_model, listed_models, unusable
from vocagnolm.model.served.exchange import Exchange, RefusedError
from vocagnolm.model.served.fleet import Fleet, Server
from vocagnolm.model.served.laying import lay_tokens, tokens_behind
from vocagnolm.model.served.raw import Losses, require_raw

_PATHS = ("/v1/chat/completions", "/chat/completions")
_PROBE = [{"role": "user", "content": "Write one short sentence about the sea."}]
_PROBE_TOKENS = 16
_USUAL_LIMITS = (20, 10, 8, 5, 4, 3, 2, 1)
"""Limits that servers have for the number of likeliest tokens at a place."""
_RAW_ALTERNATIVES = 5
_RAW_SAMPLES = 8
"""At least so many of the likeliest tokens are compared at two temperatures; where none are listed,
the first tokens of so many answers."""
Numbers = Literal["alternatives", "losses", "none"]
FINISHED = ("stop", "stop_sequence", "eos", "eos_token", "end_turn")
CUT = ("length", "max_tokens", "")
"""What servers say of an answer that came to its end, and of one that was broken off."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ChatRequest:
    """How conversations are to be answered."""

    tokens: int
    """At most."""
    temperature: float = 1.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    alternatives: int = 0
    """At most this number; fewer where the server gives fewer."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of a request; null leaves a field out."""
    keep_reasoning: bool = False

    def body(self, model: str, messages: Sequence[Any], samples: int) -> dict[str, Any]:
        fields = {
            "model": model,
            "messages": list(messages),
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "top_p": self.top_p if self.top_p < 1 else None,
            "n": samples if samples > 1 else None,
            "stop": list(self.stop) or None,
            "chat_template_kwargs": dict(self.template_options) or None,
            **self.options,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Abilities:
    """What a chat endpoint can do."""

    several: bool
    """Several answers to one request (`n`)."""
    asked: int | None
    """How many of the likeliest tokens it is asked for; None: no log probabilities either."""
    given: int
    """How many of them are kept."""

    @property
    def numbers(self) -> Numbers:
        if self.asked is None:
            return "none"
        return "alternatives" if self.given else "losses"


class ChatEndpoint:
    """A model behind a chat endpoint, as its probe has found it."""

    def __init__(self, exchange: Exchange, wanted: str | None, asked: ChatRequest):
        self.exchange, self.url, self.asked = exchange, exchange.url, asked
        self.model = _model_of(exchange, wanted)
        self._path: str | None = None
        self.abilities = self._probed()

    def answer(self, messages: Sequence[Any], samples: int, more: Mapping[str, Any]) -> ChatAnswer:
        """Answers to a conversation: `samples` of them at most, one at least. `more`: fields of the
        request that belong to the conversation, such as its tools."""
        several = samples if self.abilities.several else 1
        body = {**self.asked.body(self.model, messages, several), **more}
        answer = self._sent(body, self.abilities.asked)
        if self.abilities.numbers != "none" and any(c.tokens is None for c in answer.choices):
            raise ServerError(
                f"{self.url} gives an answer without log probabilities, and has given others with "
                "them. Where several providers stand behind it, choose those that have them (for "
                "OpenRouter --server-option 'provider={\"require_parameters\": true}')."
            )
        for choice in answer.choices:
            self._require_shown(choice, answer.thought_tokens)
        return replace(answer, choices=answer.choices[:samples])

    def _sent(self, body: dict[str, Any], likeliest: int | None) -> ChatAnswer:
        if likeliest is not None:
            body = {**body, "logprobs": True, "top_logprobs": likeliest}
        for path in _PATHS if self._path is None else (self._path,):
            content = self.exchange.ask(path, body)
            if content is not None:
                self._path = path
                break
        else:
            raise ServerError(
                f"{self.url} has no chat endpoint under {_PATHS[0]}, or no model {self.model:.100}."
            )
        try:
            answer = parse_chat(content)
        except MalformedError as error:
            raise unusable(self.url, error) from None
        if not answer.choices:
            raise ServerError(f"{self.url} gives no answer to a request, and does not say why.")
        return answer

    def _require_shown(self, choice: ChatChoice, thought_tokens: int) -> None:
        if self.asked.keep_reasoning or not (choice.reasoning or thought_tokens):
            return
        raise ServerError(
            f"the model {self.model:.100} of {self.url} thinks before it answers, so its "
            "alternatives depend on what a student does not see in the answer. Turn its thinking "
            "off (--template-option enable_thinking=false for vLLM and SGLang, --server-option "
            "reasoning_effort=none elsewhere), choose another model, or pass --keep-reasoning."
        )

    # ---- what it can do ----

    def _probed(self) -> Abilities:
        answer, asked = self._first_answer()
        several = len(answer.choices) > 1
        for choice in answer.choices:
            self._require_shown(choice, answer.thought_tokens)
        nothing = Abilities(several, None, 0)
        if asked is None or not all(choice.tokens for choice in answer.choices):
            return self._with_word(nothing, "it gives no log probabilities")
        if any(not self._fits(choice) for choice in answer.choices):
            if not self.asked.alternatives:
                return self._with_word(nothing, "the bytes of its tokens are not those of its text")
            raise ServerError(
                f"the bytes that {self.url} gives for its tokens are not those of its text. Give "
                "--teacher TOKENIZER, so that tokens are known by their ids (vLLM, SGLang), or "
                "--alternatives 0 to keep the texts alone."
            )
        tokens = [token for choice in answer.choices for token in choice.tokens or ()]
        listed = max(len(token.likeliest) for token in tokens)
        try:
            raw = self._is_raw(asked, 1 if listed or not several else _RAW_SAMPLES)
        except ServerError:
            if self.asked.alternatives:
                raise
            return self._with_word(nothing, "its log probabilities are not raw")
        if not raw:
            return self._with_word(
                nothing, "whether its log probabilities are raw cannot be found out"
            )
        given = min(self.asked.alternatives, listed)
        if given < self.asked.alternatives:
            fewer = f"at most {given} tokens at a place: {given} alternatives are kept"
            none = "no other tokens beside the drawn ones: no alternatives are kept"
            text = f"{self.url} names {fewer if given else none}, not {self.asked.alternatives}."
            warnings.warn(text, VocagnolmWarning, stacklevel=2)
        return Abilities(several, asked if given else 0, given)

    def _with_word(self, abilities: Abilities, why: str) -> Abilities:
        warnings.warn(
            f"{self.url}: {why}, so its answers are kept as texts alone, without losses and "
            "alternatives.",
            VocagnolmWarning,
            stacklevel=2,
        )
        return abilities

    def _first_answer(self) -> tuple[ChatAnswer, int | None]:
        """An answer, and how many of the likeliest tokens the server could be asked for; None: it
        refuses to give log probabilities."""
        wanted = self.asked.alternatives or _RAW_ALTERNATIVES
        # one more than wanted: vLLM counts the drawn token among those that it lists
        limits = [wanted + 1, wanted, *(limit for limit in _USUAL_LIMITS if limit < wanted), 0]
        tries: list[int | None] = [*limits, None]
        samples, first_refusal = 2, None
        while True:
            try:
                how = (self.asked.temperature, self.asked.top_p, samples, tries[0])
                return self._tried(*how), tries[0]
            except RefusedError as error:
                first_refusal = first_refusal or error
                if not error.of_the_request or (tries[0] is None and samples == 1):
                    raise first_refusal from None
                if "logprob" in str(error) and tries[0] is not None:
                    tries.pop(0)
                elif samples > 1:
                    samples = 1
                else:
                    tries = [None]

    def _tried(
        self, temperature: float, top_p: float, samples: int, likeliest: int | None
    ) -> ChatAnswer:
        tokens = min(_PROBE_TOKENS, self.asked.tokens)
        how = replace(self.asked, tokens=tokens, temperature=temperature, top_p=top_p, stop=())
        return self._sent(how.body(self.model, _PROBE, samples), likeliest)

    def _fits(self, choice: ChatChoice) -> bool:
        """Whether the tokens spell the text; what was thought before it is not in it."""
        text, finished = choice.text.strip(), choice.reason in FINISHED
        if not text or "\ufffd" in text or choice.tokens is None:
            return True
        tokens = tokens_behind(choice.tokens, choice.text) if choice.reasoning else choice.tokens
        try:
            return lay_tokens(tokens, text, finished=finished) is not None
        except UnicodeEncodeError:
            return False

    def _is_raw(self, likeliest: int, samples: int) -> bool:
        def losses(temperature: float, top_p: float) -> Losses:
            answer = self._tried(temperature, top_p, samples, likeliest)
            first = [choice.tokens[0] for choice in answer.choices if choice.tokens]
            drawn = {token.data: token.nll for token in first}
            listed = {data: loss for token in first for data, loss in token.likeliest}
            return {data: loss for data, loss in (drawn | listed).items() if data}

        or_else = ", or with --alternatives 0 to keep the texts alone"
        return require_raw(self.url, losses, self.asked.temperature, self.asked.top_p, or_else)


def _model_of(exchange: Exchange, wanted: str | None) -> str:
    """The name of the model; some endpoints do not list theirs."""
    try:
        entries = listed_models(exchange)
    except RefusedError as error:
        if wanted is None or error.status in (401, 403):
            raise
        entries = []
    if entries:
        return chosen_model(exchange, entries, wanted).name
    if wanted is None:
        raise UsageError(
            f"the server at {exchange.url} does not list its models: name one with --server-model."
        )
    return wanted


class ChatModel:
    """A model behind one chat endpoint or several, all with the same abilities."""

    def __init__(self, server: Server, asked: ChatRequest, *, patient: bool = False, requests: int):
        self._wanted, self._asked = server.model, asked
        self._first: ChatEndpoint | None = None
        self._fleet: Fleet[ChatEndpoint] = Fleet(server, self._met, requests)
        self._first = self._fleet.first(patient=patient)
        self._fleet.spread()

    @property
    def url(self) -> str:
        return self._fleet.named

    @property
    def model(self) -> str:
        assert self._first is not None
        return self._first.model

    @property
    def abilities(self) -> Abilities:
        assert self._first is not None
        return self._first.abilities

    def _met(self, exchange: Exchange) -> ChatEndpoint:
        """The endpoint of an address. All but the first must be like the first."""
        endpoint, first = ChatEndpoint(exchange, self._wanted, self._asked), self._first
        if first is not None:
            for name in ("model", "abilities"):
                ours, theirs = getattr(first, name), getattr(endpoint, name)
                if ours != theirs:
                    raise ServerError(
                        f"the servers are not alike: {endpoint.url} has {name} {theirs!r:.100}, "
                        f"{first.url} has {ours!r:.100}."
                    )
        return endpoint

    def answer(self, messages: Sequence[Any], samples: int, more: Mapping[str, Any]) -> ChatAnswer:
        """Ask a free server for its answers to a conversation."""
        return self._fleet.call(lambda endpoint: endpoint.answer(messages, samples, more))

    def each(
        self, work: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[tuple[_Item, _Result]]:
        """What `work` makes of every item, as in `Fleet.each`."""
        return self._fleet.each(work, items)
