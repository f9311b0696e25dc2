"""Answers to many prompts, greedy or sampled: torch and transformers alone, or a server.

Prompts of similar length share a batch, the worked examples before them are read once, and a row
leaves the batch when its answer is complete. The batches are fixed by the prompts and the batch
size, never by what was done before, so that a resumed run gives the same answers. Only where a GPU
has too little memory for a batch is it answered in halves.

The worked examples before a question are the same for a whole task: some 700 tokens of prefix for
100 of question. Their keys and values are computed once and kept once, not once a row. A query
attends to the shared part together with the queries of all other rows and to its own row's part
alone; the two are joined under one softmax, so that the result is that of ordinary attention. In
layers with a sliding window a query sees the end of the shared part alone, as far as it reaches.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vocagnolm.chat import ChatTokenizer
from vocagnolm.evaluate.results import Answer
from vocagnolm.model import ModelFiles
from vocagnolm.model.server import ServedModel

# below this a shared prefix is not worth a pass of its own
_LEAST_SHARED_TOKENS = 16
# A prompt is shortened for this much of an answer and no more: with 1,024 tokens allowed, the
# worked examples would lose their beginning in a context of 2,048.
_ROOM_TOKENS = 512
SERVER_PROMPTS = 32  # in a request
_LIKELY_TOKENS = 1024  # among which a drawn token is looked for first
_GPU_CHECK_STEPS = 8  # on a GPU, looking at the tokens means waiting for them
_END_TOKENS = (
    "</s>", "<|endoftext|>", "<|im_end|>", "<eos>", "<end_of_turn>", "<|eot_id|>",
    "<|end_of_text|>",
)  # fmt: skip
IsDone = Callable[[Sequence[int]], bool]
Item = TypeVar("Item")
Done = TypeVar("Done")


def _never(batch: Sequence[int]) -> bool:
    return False


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of similar length, longest first (a lack of memory shows at once)."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


def default_batch_size(model: PreTrainedModel) -> int:
    """What half of a GPU's memory holds in keys and values, at 2,048 tokens a row; 32 on a CPU."""
    if model.device.type != "cuda":
        return 32
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    total = torch.cuda.get_device_properties(model.device).total_memory
    rows = int(total * 0.5 / (per_token * 2048))
    return max(1, min(256, 1 << max(0, rows.bit_length() - 1)))


def common_prefix_length(rows: Sequence[Sequence[int]]) -> int:
    """Tokens that all rows begin with, leaving every row at least one of its own."""
    return max(0, min(_agreed(*rows), min(map(len, rows)) - 1))


def _agreed(*rows: Sequence[int]) -> int:
    """How many tokens the rows have in common at their beginning."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))


@dataclass(frozen=True)
class Sampling:
    """Draw tokens instead of taking the likeliest: at a temperature, among the likeliest tokens
    that together hold `top_p` of the probability."""

    temperature: float
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """One token per row of logits [N, V]."""
        p = (logits.float() / self.temperature).softmax(-1)
        if self.top_p == 1:
            return torch.multinomial(p, 1, generator=generator)[:, 0]
        # the likeliest few nearly always hold `top_p`; sorting a whole vocabulary costs more than a
        # small model's step
        likely, ids = p.topk(min(_LIKELY_TOKENS, p.shape[-1]))
        if bool((likely.sum(-1) < self.top_p).any()):
            likely, ids = p.sort(-1, descending=True)
        likely[likely.cumsum(-1) - likely >= self.top_p] = 0.0  # the first one stays in any case
        return ids.gather(-1, torch.multinomial(likely, 1, generator=generator))[:, 0]


@dataclass
class _Row:
    """One answer under way."""

    index: int
    data: bytearray = field(default_factory=bytearray)
    done: bool = False


class _Reader:
    """How a model reads prompts, and where what it writes ends: wherever its weights are."""

    def __init__(
        self, files: ModelFiles, batch_size: int, chat: ChatTokenizer | None, *, context: int | None
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.tokenizer = files.tokenizer
        self.chat = chat
        self._bytes_of = self.tokenizer.bytes_of if chat is None else chat.private_bytes_of
        self.prefix_ids = list(files.prefix_ids) if chat is None else []
        self.max_context = context
        self.batch_size = batch_size
        ends = {self.tokenizer.id_of(token) for token in _END_TOKENS} | set(files.end_ids)
        if chat is not None:
            ends.add(chat.end_of_turn)
        self._ends = {int(end) for end in ends if end is not None}
        self._last_id = max(self.tokenizer.vocabulary.values()) + 1
        self.truncated_prompts = 0

    def notes(self) -> list[str]:
        """What whoever reads the scores should know."""
        if not self.truncated_prompts:
            return []
        return [
            f"Too long for the model's context of {self.max_context:,} tokens: "
            f"{self.truncated_prompts:,} of the prompts, which lost their beginning (worked "
            "examples, as a rule)."
        ]

    def encode(self, prompts: Sequence[str], room_for: int = 0) -> list[list[int]]:
        """Token ids with the model's own beginning-of-text. A prompt that does not fit loses its
        beginning, as in lm-eval."""
        read = self._read(prompts)
        self.truncated_prompts += sum(len(ids) > self._room(room_for) for ids in read)
        return [self._fitted(ids, room_for) for ids in read]

    def _room(self, room_for: int) -> int:
        if self.max_context is None:
            return sys.maxsize
        return max(1, self.max_context - room_for - len(self.prefix_ids))

    def _fitted(self, ids: list[int], room_for: int = 0) -> list[int]:
        return self.prefix_ids + ids[-self._room(room_for) :]

    def _read(self, prompts: Sequence[str]) -> list[list[int]]:
        if self.chat is None:
            return [one.ids.tolist() for one in self.tokenizer.spans_batch(list(prompts))]
        return [self.chat.answering_ids(prompt) for prompt in prompts]

    def _take(self, row: _Row, tokens: list[int], stops: list[bytes]) -> None:
        """Append tokens to an answer until it ends."""
        for token in tokens:
            if row.done:
                return
            if token in self._ends:
                row.done = True
                return
            before = len(row.data)
            row.data += self._bytes_of(token) or b""
            for stop in stops:
                found = row.data.find(stop, max(0, before - len(stop)))
                if found >= 0:
                    del row.data[found:]
                    row.done = True

    def _answer_of(self, row: _Row) -> Answer:
        text, reasoning = bytes(row.data).decode("utf-8", "replace"), ""
        if self.chat is not None:
            reasoning, text = self.chat.answer_of(text)
        return Answer(text, complete=row.done, reasoning=reasoning)

    def _with_options(
        self, prompts: Sequence[str], options: Sequence[Sequence[str]], room_for: int = 0
    ) -> list[list[tuple[list[int], int]]]:
        """Of every prompt with each of its options the tokens, and how many of them are the
        prompt's. Should the two fuse into one token, it is not among these."""
        found = []
        contexts = self.encode(prompts, room_for)
        for prompt, context, listed in zip(prompts, contexts, options, strict=True):
            read = self._read([prompt + option for option in listed])
            rows = [self._fitted(ids, room_for) for ids in read]
            found.append([(row, _agreed(row, context)) for row in rows])
        return found


class Generator(_Reader):
    """A model that answers prompts, and compares continuations."""

    def __init__(
        self,
        model: PreTrainedModel,
        files: ModelFiles,
        batch_size: int | None = None,
        chat: ChatTokenizer | None = None,
    ) -> None:
        """`chat`: prompts are shared texts of conversations, and are read in its template."""
        if batch_size is None:
            batch_size = default_batch_size(model)
        super().__init__(files, batch_size, chat, context=files.max_context)
        self.model = model
        self.device = model.device
        # rows of a recurrent model cannot be padded apart
        self._drops_rows = all(issubclass(kind, DynamicLayer) for kind in _layer_kinds(model))
        if not self._drops_rows:
            self.batch_size = 1
        self._shares = enable_shared_prefix(self.model)
        self.halvings = 0

    def notes(self) -> list[str]:
        found = super().notes()
        if self.halvings:
            found.append(
                f"The device had too little memory left, and batches were halved {self.halvings:,} "
                f"times. A batch size below {self.batch_size} saves the time."
            )
        return found

    def close(self) -> None:
        """Give the model its ordinary attention back."""
        if self.model.config._attn_implementation == _NAME:
            self.model.set_attn_implementation("sdpa")

    def _shared(self, rows: Sequence[Sequence[int]]) -> "tuple[int, Prefix | None]":
        length = common_prefix_length(rows) if self._shares else 0
        if length < _LEAST_SHARED_TOKENS:
            return 0, None
        return length, read_prefix(self.model, list(rows[0][:length]))

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[str],
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        is_done: IsDone = _never,
        sampling: Sampling | None = None,
    ) -> Iterator[list[tuple[int, Answer]]]:
        """Answers batch by batch, as (index of the prompt, text up to the stop string). Batches
        of which `is_done` says that they are there already are passed over."""
        rows = self.encode(prompts, room_for=min(max_new_tokens, _ROOM_TOKENS))
        batches = plan_batches([len(row) for row in rows], self.batch_size)
        batches = [batch for batch in batches if not is_done(batch)]
        if not batches:
            return
        length, shared = self._shared(rows)
        stops = [text.encode() for text in stop]

        def answer(batch: list[int]) -> list[_Row]:
            own = [rows[i][length:] for i in batch]
            choose = self._chooser(sampling, batch)
            return self._answer(batch, own, length, stops, max_new_tokens, choose)

        for batch in batches:
            with sharing(shared):
                answers = self._in_memory(answer, batch)
            yield [(row.index, self._answer_of(row)) for row in answers]

    def _in_memory(self, work: Callable[[list[Item]], list[Done]], batch: list[Item]) -> list[Done]:
        """A batch, in halves where it does not fit beside what else the device holds just now."""
        try:
            return work(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        self.halvings += 1
        torch.cuda.empty_cache()
        half = (len(batch) + 1) // 2
        return self._in_memory(work, batch[:half]) + self._in_memory(work, batch[half:])

    def _chooser(
        self, sampling: Sampling | None, batch: Sequence[int]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The next token from logits [N, V]. Every batch draws from a seed of its own."""
        if sampling is None:
            return lambda logits: logits.argmax(-1)
        generator = torch.Generator(self.device)
        generator.manual_seed(sampling.seed * 1_000_003 + min(batch))
        return lambda logits: sampling.draw(logits, generator)

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        keep: int,
    ) -> torch.Tensor:
        """Logits of the last `keep` positions, over the tokens that the tokenizer knows."""
        if _active is not None:
            _active.positions = positions
        logits: torch.Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits[:, -keep:, : self._last_id]

    def _padded(self, rows: list[list[int]], shared: int) -> tuple[torch.Tensor, ...]:
        """ids, mask, positions: padded on the left, so that all rows end together."""
        width = max(len(row) for row in rows)
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(width) >= width - lengths[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0) + shared
        return tuple(part.to(self.device) for part in (ids, mask, positions))

    def _answer(
        self,
        batch: list[int],
        rows: list[list[int]],
        shared: int,
        stops: list[bytes],
        max_new_tokens: int,
        choose: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[_Row]:
        ids, mask, positions = self._padded(rows, shared)
        cache = new_cache(self.model, shared > 0)
        answers = [_Row(index) for index in batch]
        alive = list(answers)
        limit = max_new_tokens
        if self.max_context is not None:
            limit = min(limit, self.max_context - shared - ids.shape[1])
        check = 1 if self.device.type == "cpu" else _GPU_CHECK_STEPS
        fresh: list[torch.Tensor] = []
        next_ids = choose(self._forward(ids, mask, positions, cache, keep=1)[:, -1])
        positions = positions[:, -1:]
        for step in range(1, limit + 1):
            fresh.append(next_ids)
            if step % check == 0 or step == limit:
                for row, tokens in zip(alive, torch.stack(fresh, 1).tolist(), strict=True):
                    self._take(row, tokens, stops)
                fresh = []
                keep = [i for i, row in enumerate(alive) if not row.done]
                if not keep or step == limit:
                    break
                # dropping rows copies the cache: worth it for a few at a time
                if self._drops_rows and len(keep) <= len(alive) - max(1, len(alive) // 8):
                    chosen = torch.tensor(keep, device=self.device)
                    cache.batch_select_indices(chosen)
                    mask, positions, next_ids = mask[chosen], positions[chosen], next_ids[chosen]
                    alive = [alive[i] for i in keep]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            positions = positions + 1
            logits = self._forward(next_ids[:, None], mask, positions, cache, keep=1)
            next_ids = choose(logits[:, -1])
        return answers

    @torch.inference_mode()
    def compare(
        self, prompts: Sequence[str], options: Sequence[Sequence[str]], is_done: IsDone = _never
    ) -> Iterator[list[tuple[int, list[float]]]]:
        """Log-likelihood in nats of every option after its prompt, batch by batch."""
        whole = self._with_options(prompts, options)
        batches = plan_batches([len(rows[0][0]) for rows in whole], self.batch_size)
        batches = [batch for batch in batches if not is_done(batch)]
        if not batches:
            return
        # what is compared stays out of the shared part, and so does the token that predicts it
        length, shared = self._shared([row[:agreed] for rows in whole for row, agreed in rows])

        def compare(part: list[tuple[int, list[int], int]]) -> list[float]:
            counts = [max(1, len(row) - agreed) for _, row, agreed in part]
            return self._likelihood([row[length:] for _, row, _ in part], length, counts)

        for batch in batches:
            rows = [(i, row, agreed) for i in batch for row, agreed in whole[i]]
            likelihoods: dict[int, list[float]] = {i: [] for i in batch}
            with sharing(shared):
                for at in range(0, len(rows), self.batch_size):
                    part = rows[at : at + self.batch_size]
                    for (i, *_), value in zip(part, self._in_memory(compare, part), strict=True):
                        likelihoods[i].append(value)
            yield list(likelihoods.items())

    def _likelihood(self, rows: list[list[int]], shared: int, counts: list[int]) -> list[float]:
        """Sum of log p of the last `counts[i]` tokens of each row."""
        ids, mask, positions = self._padded(rows, shared)
        cache = new_cache(self.model, shared > 0)
        widest = min(max(counts) + 1, ids.shape[1])
        logits = self._forward(ids, mask, positions, cache, keep=widest)
        log_p = torch.log_softmax(logits[:, :-1].float(), -1)
        taken = log_p.gather(-1, ids[:, -(widest - 1) :, None])[..., 0]
        return [float(row[-count:].sum()) for row, count in zip(taken, counts, strict=True)]


class ServerGenerator(_Reader):
    """The same of a model behind a server, asked in requests of `batch_size` prompts. What the
    server writes is read token by token, as if the model were here."""

    def __init__(
        self,
        served: ServedModel,
        files: ModelFiles,
        batch_size: int | None = None,
        chat: ChatTokenizer | None = None,
    ) -> None:
        known = [limit for limit in (files.max_context, served.engine.context) if limit]
        super().__init__(
            files,
            SERVER_PROMPTS if batch_size is None else batch_size,
            chat,
            context=min(known, default=None),
        )
        self._served = served

    def close(self) -> None:
        """The server goes on."""

    def generate(
        self,
        prompts: Sequence[str],
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        is_done: IsDone = _never,
    ) -> Iterator[list[tuple[int, Answer]]]:
        """As `Generator.generate`, request by request as they come. A prompt of which `is_done`
        says that its answer is there is not sent."""
        rows = self.encode(prompts, room_for=min(max_new_tokens, _ROOM_TOKENS))
        stops = [text.encode() for text in stop]

        def ask(planned: tuple[list[int], int]) -> list[tuple[int, Answer]]:
            batch, limit = planned
            answers = self._served.write(
                [rows[i] for i in batch], tokens=limit, stop=stop, ends=sorted(self._ends)
            )
            found = []
            for index, written in zip(batch, answers, strict=True):
                row = _Row(index)
                known = [token for token in written.ids if token < self._last_id]
                self._take(row, known, stops)
                row.done |= written.ended
                found.append((index, self._answer_of(row)))
            return found

        requests = []
        for batch in plan_batches([len(row) for row in rows], self.batch_size):
            limit = max_new_tokens
            if self.max_context is not None:  # as much as all of a batch have room for
                limit = max(1, min(limit, self.max_context - len(rows[batch[0]])))
            if batch := [i for i in batch if not is_done([i])]:
                requests.append((batch, limit))
        for _, answers in self._served.each(ask, requests):
            yield answers

    def compare(
        self, prompts: Sequence[str], options: Sequence[Sequence[str]], is_done: IsDone = _never
    ) -> Iterator[list[tuple[int, list[float]]]]:
        """As `Generator.compare`. A server writes a token after what it reads, which needs room."""
        whole = self._with_options(prompts, options, room_for=1)

        def ask(batch: list[int]) -> list[tuple[int, list[float]]]:
            scores = iter(self._served.scores([row for i in batch for row, _ in whole[i]]))
            return [
                (i, [_log_likelihood(next(scores).nll, agreed) for _, agreed in whole[i]])
                for i in batch
            ]

        left = [i for i in range(len(prompts)) if not is_done([i])]
        most = max((len(rows) for rows in whole), default=1)
        lengths = [len(whole[i][0][0]) for i in left]
        batches = plan_batches(lengths, max(1, self.batch_size // most))
        for _, found in self._served.each(ask, [[left[n] for n in batch] for batch in batches]):
            yield found


def _log_likelihood(nll: np.ndarray, agreed: int) -> float:
    """Of a row's tokens from `agreed` on, and of the last in any case. A first token has nothing
    before it; one without a loss has the probability zero."""
    compared = nll[max(1, min(agreed, len(nll) - 1)) :]
    return -math.inf if np.isnan(compared).any() else -float(compared.sum(dtype=np.float64))


# ---- attention in which all rows of a batch share one prefix ----

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # each [1, heads, tokens, size]

_NAME = "vocagnolm_shared_prefix"
_GROW_TOKENS = 64
_MAX_SCORES = 2**26  # elements of a score matrix that are held at a time

_UNSEEN = -1e30  # not infinite: of a row that sees no shared key the sum must stay a number


@dataclass
class Prefix:
    """The shared part. A layer with a sliding window keeps the last tokens that any row sees."""

    tokens: int
    layers: list[KeysAndValues]
    windows: list[int | None]
    positions: torch.Tensor | None = None
    """[rows, queries]: where the queries of the step under way stand in their texts."""


_active: Prefix | None = None  # while a batch is under way


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`key` and `value` are the rows' own part; the shared part is the active prefix."""
    if _active is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    shared_key, shared_value = _active.layers[layer]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, (Q, K, P) = _active.windows[layer], (query.shape[2], key.shape[2], shared_key.shape[2])
    mask, seen_BQP = attention_mask, None
    if mask is None and Q > 1:  # transformers leaves the mask out where it is plainly causal
        mask = query.new_ones(Q, K, dtype=torch.bool).tril(K - Q)[None, None]
    if window is not None:  # of the last P shared tokens
        assert _active.positions is not None
        position = torch.arange(_active.tokens - P, _active.tokens, device=query.device)
        seen_BQP = _active.positions[:, :, None] - position < window
    fused = window is None and _is_fused(query.device, query.dtype, query.shape[-1])
    rows = max(1, _MAX_SCORES // (query.shape[1] * Q * (K if fused else K + P)))
    parts = []
    for at in range(0, len(query), rows):
        here = slice(at, at + rows)
        part_mask = mask if mask is None or len(mask) == 1 else mask[here]
        seen = None if seen_BQP is None else seen_BQP[here]
        own = query[here], key[here], value[here], part_mask
        parts.append(_attend(*own, shared_key[0], shared_value[0], scale, seen))
    return torch.cat(parts), None


def _attend(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    mask_B1QK: torch.Tensor | None,
    shared_key_GPD: torch.Tensor,
    shared_value_GPD: torch.Tensor,
    scale: float,
    seen_BQP: torch.Tensor | None = None,
) -> torch.Tensor:
    """B rows, H query heads in G groups, Q queries, K own keys, P shared keys, D numbers each."""
    B, H, Q, D = query_BHQD.shape
    G = key_BGKD.shape[1]
    query = (query_BHQD * scale).reshape(B, G, H // G, Q, D)
    of_group = query.transpose(0, 1).reshape(G, -1, D)
    if seen_BQP is not None:
        seen_BQP = seen_BQP[:, None].expand(-1, H // G, -1, -1).reshape(-1, seen_BQP.shape[-1])
    shared, lse = _attend_shared(of_group, shared_key_GPD, shared_value_GPD, seen_BQP)
    shared = shared.reshape(G, B, H // G, Q, -1).transpose(0, 1)
    lse = lse.reshape(G, B, H // G, Q, 1).transpose(0, 1)
    own = torch.einsum("bgrqd,bgkd->bgrqk", query, key_BGKD).float()
    if mask_B1QK is not None:
        mask = mask_B1QK[:, :, None]
        own = own.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else own + mask
    # The shared part enters the softmax like one more key, with its sum as weight.
    top = torch.maximum(lse, own.amax(-1, keepdim=True))
    weight, own = (lse - top).exp_(), (own - top).exp_()
    total = weight + own.sum(-1, keepdim=True)
    out = torch.einsum("bgrqk,bgkd->bgrqd", own.to(query.dtype), value_BGKD)
    out = (out + weight.to(out.dtype) * shared) / total.to(out.dtype)
    return out.reshape(B, H, Q, -1).transpose(1, 2).contiguous()


def _attend_shared(
    query_GND: torch.Tensor,
    key_GPD: torch.Tensor,
    value_GPD: torch.Tensor,
    seen_NP: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of N scaled queries to the shared keys alone, and log sum exp of their scores."""
    if seen_NP is None and _is_fused(query_GND.device, query_GND.dtype, query_GND.shape[-1]):
        return _fused(query_GND, key_GPD, value_GPD)
    scores = (query_GND @ key_GPD.transpose(1, 2)).float()
    if seen_NP is not None:
        scores = scores.masked_fill_(~seen_NP, _UNSEEN)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(query_GND.dtype) @ value_GPD, lse


def _fused(
    query_GND: torch.Tensor, key_GPD: torch.Tensor, value_GPD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch's flash attention, without the matrix of scores."""
    one = (query_GND[None], key_GPD[None], value_GPD[None])
    if query_GND.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*one, scale=1.0)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*one, scale=1.0)
    return out[0], lse[0]


@cache
def _is_fused(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether flash attention is there for such tensors and gives what it should. Half precision
    on a GPU alone: the answers of a CPU stay what they are."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, tokens, size, generator=random).to(device, dtype) for tokens in (48, 80, 80)
    )
    scores = query.float() @ key.float().transpose(1, 2)
    expected = scores.softmax(-1) @ value.float(), scores.logsumexp(-1)
    try:
        found = _fused(query, key, value)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a.float(), b, rtol=2e-2, atol=2e-2)
        for a, b in zip(found, expected, strict=True)
    )


class GrowingLayer(DynamicLayer):
    """Keys and values in a buffer with room to spare: no copy of everything at every token."""

    _buffers: list[torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeysAndValues:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        states = (key_states, value_states)
        held = self.get_seq_length()
        needed = held + key_states.shape[-2]
        if self._buffers is None or needed > self._buffers[0].shape[-2]:
            old, room = self._buffers or (), needed + _GROW_TOKENS
            self._buffers = [one.new_empty(*one.shape[:2], room, one.shape[-1]) for one in states]
            for buffer, before in zip(self._buffers, old, strict=False):
                buffer[:, :, :held] = before[:, :, :held]
        for buffer, new in zip(self._buffers, states, strict=True):
            buffer[:, :, held:needed] = new
        self.keys, self.values = (buffer[:, :, :needed] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._buffers is not None:
            held = self.get_seq_length()
            self._buffers = [buffer[indices] for buffer in self._buffers]
            self.keys, self.values = (buffer[:, :, :held] for buffer in self._buffers)


def new_cache(model: PreTrainedModel, shared: bool) -> Cache:
    """A cache for the rows' own part; for models with sliding windows or recurrent layers, their
    own kind of cache."""
    if shared or all(kind is DynamicLayer for kind in _layer_kinds(model)):
        return Cache(layer_class_to_replicate=GrowingLayer)
    return DynamicCache(config=model.config)


def _layer_kinds(model: PreTrainedModel) -> list[type]:
    return [type(layer) for layer in DynamicCache(config=model.config).layers]


def enable_shared_prefix(model: PreTrainedModel) -> bool:
    """Switch the model to attention that can share a prefix; False where it cannot be done."""
    config = model.config.get_text_config()
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap or getattr(config, "attention_chunk_size", None):  # chunks are kept like windows
        return False
    kinds = _layer_kinds(model)
    if (
        not set(kinds) <= {DynamicLayer, DynamicSlidingWindowLayer}
        or len(kinds) != config.num_hidden_layers  # some layers read another one's keys
        or model.config._attn_implementation != "sdpa"
        or not getattr(model, "_supports_attention_backend", False)
    ):
        return False
    AttentionInterface.register(_NAME, shared_prefix_attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    return bool(model.config._attn_implementation == _NAME)


def read_prefix(model: PreTrainedModel, ids: list[int]) -> Prefix:
    """One pass over the shared tokens."""
    cache = DynamicCache(config=model.config)
    input_ids = torch.tensor([ids], device=model.device)
    model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    found = Prefix(len(ids), [], [])
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None and layer.values is not None
        found.layers.append((layer.keys, layer.values))
        found.windows.append(getattr(layer, "sliding_window", None))
    return found


@contextmanager
def sharing(prefix: Prefix | None) -> Iterator[None]:
    """Within, attention sees `prefix` before every row."""
    global _active
    before, _active = _active, prefix
    try:
        yield
    finally:
        _active = before
