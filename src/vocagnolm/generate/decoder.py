"""Answers token by token, for many prompts at once: rows that end make room for new ones.

A `Decoder` works through a closed set of prompts. On a GPU its rows are replayed as CUDA graphs,
and which row stands where follows from the prompts and the number of rows alone, so that the same
set gives the same bytes again. On a CPU every product has the same shape whatever the rows hold: an
answer is the same to the last bit beside any others.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from vocagnolm.generate import attention
from vocagnolm.generate.attention import Pass, Prefix, Slots
from vocagnolm.generate.draw import Drawn, Sampling, choose
from vocagnolm.model.runtime import (
    HeadForm,
    compile_layers,
    decoder_of,
    head_form,
    one_document_a_row,
)
from vocagnolm.objective.head import needs_width, product

CPU_ROWS = 16
"""Rows that a CPU computes together, whether they hold answers or not."""
MOST_ROWS = 1024
_LENGTH_STEP = 128  # lengths of slots on a CPU
_CHUNK_STEPS = 8  # on a GPU between two looks at the tokens, which mean waiting for them
_LEAST_ROWS = 16  # of a CUDA graph
_PROMPT_TOKENS = 16384  # that are read together on a GPU
_REFILL_SHARE = 8  # one in so many rows must be free before others are begun
_MEMORY_SHARE = 0.8  # of a GPU's free memory, for slots and logits
_PROBE_TOKENS = 12


@dataclass(frozen=True)
class PromptTokens:
    """A prompt to be answered: its own tokens, behind the shared prefix."""

    ids: Sequence[int]
    seeds: Sequence[int] = (0,)
    """One for each answer that is wanted: its draws depend on this number, the position and the
    logits alone."""
    limit: int = 512
    """New tokens of an answer, at most."""


class AnswerTokens(NamedTuple):
    """What was written after a prompt."""

    ids: NDArray[np.int32]
    """The drawn tokens, with the one that ends the answer if it ended by itself."""
    nll: NDArray[np.float32]
    """The loss on every token in nats, at temperature 1."""
    alternatives: NDArray[np.uint32] | None
    """[tokens, K]"""
    finished: bool
    """Whether it ended by itself, not at the limit."""


class Answered(NamedTuple):
    prompt: int
    answer: int
    """Number among the prompt's answers."""
    tokens: AnswerTokens


IsOver = Callable[[int, int, Sequence[int]], bool]
"""Given the numbers of prompt and answer and the tokens that came: whether the answer is over."""


@dataclass
class _Row:
    """An answer under way."""

    prompt: int
    answer: int
    seed: int
    slot: int
    begin: int
    """Own tokens of the prompt."""
    limit: int
    next_id: int = 0
    ids: list[NDArray[Any]] = field(default_factory=list)
    nll: list[NDArray[Any]] = field(default_factory=list)
    packed: list[NDArray[Any]] = field(default_factory=list)
    count: int = 0

    @property
    def position(self) -> int:
        """Where the last token stands among the row's own, which is fed next."""
        return self.begin + self.count - 1

    def take(self, ids: Any, nll: Any, packed: Any, ends: Collection[int]) -> bool:
        """Append tokens up to an end or the limit. Returns whether the answer has ended itself."""
        ids, nll = ids[: self.limit - self.count], nll[: self.limit - self.count]
        stops = [n for n, token in enumerate(ids.tolist()) if token in ends]
        kept = stops[0] + 1 if stops else len(ids)
        self.ids.append(ids[:kept])
        self.nll.append(nll[:kept])
        if packed is not None:
            self.packed.append(packed[:kept])
        self.count += kept
        self.next_id = int(ids[kept - 1])
        return bool(stops)

    def answered(self, finished: bool) -> Answered:
        packed = np.concatenate(self.packed).view(np.uint32) if self.packed else None
        ids, nll = np.concatenate(self.ids).astype(np.int32), np.concatenate(self.nll)
        tokens = AnswerTokens(ids, nll.astype(np.float32), packed, finished)
        return Answered(self.prompt, self.answer, tokens)


class Decoder:
    """A causal language model that writes. Use it as a context: within, the model's attention is
    that of `generate.attention`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ends: Collection[int],
        known: int,
        sampling: Sampling | None = None,
        alternatives: int = 0,
        compiled: bool = False,
    ):
        """`ends`: ids that end an answer. `known`: only ids below this are drawn. `alternatives`:
        how many of the likeliest tokens to keep at every position."""
        self.model = model
        self.device = model.device
        self._ends = frozenset(ends)
        self._known = known
        self._sampling = sampling or Sampling()
        self._alternatives = alternatives
        self._form: HeadForm | None = head_form(model)
        self._windows = attention.windows_of(model)
        self._cache = attention.PassThroughCache(len(self._windows or ()))
        self._prefix, self._prefix_ids = Prefix(), tuple[int, ...]()
        self._slots: Slots | None = None
        self._graphs: dict[int, _Graph] = {}
        if self._windows is not None:
            attention.use_slots(model)
            if not self._slots_fit():
                attention.use_own(model)
                self._windows = None
            elif compiled and self.device.type == "cuda":
                compile_layers(model, (0, 0))

    @property
    def by_rows(self) -> bool:
        """Whether many answers are written at once. Recurrent models and other kinds of attention
        write one after the other."""
        return self._windows is not None

    def close(self) -> None:
        """Give the model its ordinary attention back, and the memory of the slots."""
        attention.use_own(self.model)
        self._slots, self._graphs = None, {}

    @torch.inference_mode()
    def share(self, prefix_ids: Sequence[int]) -> None:
        """Read what all prompts begin with, once."""
        if tuple(prefix_ids) == self._prefix_ids:
            return
        self._prefix_ids, self._prefix = tuple(prefix_ids), Prefix()
        self._graphs = {}
        if not prefix_ids or self._windows is None:
            return
        captured: list[tuple[Tensor, Tensor]] = []
        ids = torch.tensor([prefix_ids], device=self.device)
        self._forward(ids, torch.arange(len(prefix_ids), device=self.device)[None], captured)
        self._prefix = Prefix(len(prefix_ids), captured)

    def fitting_rows(self, tokens: int) -> int:
        """How many rows of so many own tokens the device's free memory holds."""
        if self.device.type != "cuda" or self._windows is None:
            return CPU_ROWS
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return fitting_rows(self.model.config, self.model.dtype, free, tokens)

    @torch.inference_mode()
    def answers(
        self,
        prompts: Sequence[PromptTokens],
        *,
        rows: int | None = None,
        slot_tokens: int | None = None,
        is_over: IsOver | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Answered]:
        """Answers to a closed set of prompts, as they end. `rows` and `slot_tokens`: the size of
        the cache on a GPU; without them the longest prompt and the free memory decide.
        `on_tokens` is told how many tokens have come."""
        if self._windows is None:
            yield from self._one_by_one(prompts, is_over, on_tokens)
            return
        needed = [len(prompt.ids) + prompt.limit for prompt in prompts]
        order = sorted(range(len(prompts)), key=lambda n: (-len(prompts[n].ids), n))
        if self.device.type != "cuda":
            sizes = {n: -(-needed[n] // _LENGTH_STEP) * _LENGTH_STEP for n in order}
            for size in sorted(set(sizes.values()), reverse=True):
                some = [n for n in order if sizes[n] == size]
                yield from self._in_slots(prompts, some, CPU_ROWS, size, is_over, on_tokens)
            return
        longest = max(needed, default=0)
        tokens = max(slot_tokens or 0, longest) + _CHUNK_STEPS
        wanted = min(rows or self.fitting_rows(tokens), sum(len(p.seeds) for p in prompts))
        count = max(_LEAST_ROWS, -(-wanted // _LEAST_ROWS) * _LEAST_ROWS)
        yield from self._in_slots(prompts, order, count, tokens, is_over, on_tokens)

    @torch.inference_mode()
    def losses(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """The nll in nats of every token of some texts behind the shared prefix; NaN for the first
        of each."""
        if self._windows is None:
            return [self._losses_alone(row) for row in rows]
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        position = torch.arange(width, device=self.device).expand(len(rows), width)
        hidden = self._forward(ids, position)
        losses = []
        for row, hidden_QD in zip(rows, hidden, strict=True):
            nll = np.full(len(row), np.nan, np.float32)
            if len(row) > 1:
                labels = torch.tensor(row[1:], device=self.device)
                logits = self._logits(hidden_QD[: len(row) - 1])
                nll[1:] = F.cross_entropy(logits, labels, reduction="none").cpu().numpy()
            losses.append(nll)
        return losses

    def _losses_alone(self, row: Sequence[int]) -> NDArray[np.float32]:
        ids = torch.tensor([[*self._prefix_ids, *row]], device=self.device)
        nll = np.full(len(row), np.nan, np.float32)
        if len(row) > 1:
            logits = self.model(input_ids=ids, use_cache=False).logits[0, -len(row) : -1].float()
            nll[1:] = F.cross_entropy(logits, ids[0, -len(row) + 1 :], reduction="none").cpu()
        return nll

    # ---- rows in slots ----

    def _in_slots(
        self,
        prompts: Sequence[PromptTokens],
        order: Sequence[int],
        rows: int,
        tokens: int,
        is_over: IsOver | None,
        on_tokens: Callable[[int], None] | None,
    ) -> Iterator[Answered]:
        """The whole work: begin rows where slots are free, write some steps, take what has ended
        away."""
        self._take_slots(rows, tokens)
        waiting = deque((n, m) for n in order for m in range(len(prompts[n].seeds)))
        free = list(range(rows))[::-1]
        active: list[_Row] = []
        while waiting or active:
            if waiting and (not active or len(free) * _REFILL_SHARE >= rows):
                begun = self._begin(prompts, waiting, free)
                active.extend(begun)
                came, written = begun, [row.count for row in begun]
            else:
                before = [row.count for row in active]
                self._write(active)
                came, written = active, [r.count - n for r, n in zip(active, before, strict=True)]
            if on_tokens is not None:
                on_tokens(sum(written))
            ended = [row for row in came if self._is_over(row, is_over)]
            for row in ended:
                free.append(row.slot)
                finished = row.next_id in self._ends
                yield row.answered(finished)
            gone = set(map(id, ended))
            active = [row for row in active if id(row) not in gone]

    def _is_over(self, row: _Row, is_over: IsOver | None) -> bool:
        if row.next_id in self._ends or row.count >= row.limit:
            if is_over is not None:
                is_over(row.prompt, row.answer, row.ids[-1].tolist())
            return True
        return is_over is not None and is_over(row.prompt, row.answer, row.ids[-1].tolist())

    def _take_slots(self, rows: int, tokens: int) -> None:
        held = self._slots
        # a CPU's sums depend on the length of its slots
        longer = held is not None and self.device.type == "cuda" and held.tokens > tokens
        if held is None or held.count != rows + 1 or not (longer or held.tokens == tokens):
            self._slots, self._graphs = None, {}
            self._slots = Slots(rows + 1, tokens)  # the last one for rows that hold nothing

    def _begin(
        self, prompts: Sequence[PromptTokens], waiting: deque[tuple[int, int]], free: list[int]
    ) -> list[_Row]:
        """Read the next prompts into free slots, each once for all of its answers that find room,
        and draw their first tokens."""
        rows: list[_Row] = []
        groups: list[list[_Row]] = []
        while waiting and free:
            number, answer = waiting[0]
            prompt = prompts[number]
            longest = len(prompts[groups[0][0].prompt].ids) if groups else len(prompt.ids)
            fresh = not groups or groups[-1][0].prompt != number
            # on a CPU one prompt at a time, whose numbers then depend on nothing else
            if fresh and groups and self._is_full(len(groups) + 1, longest):
                self._read(prompts, groups)
                groups = []
            waiting.popleft()
            row = _Row(
                number, answer, prompt.seeds[answer], free.pop(), len(prompt.ids), prompt.limit
            )
            rows.append(row)
            if fresh:
                groups.append([row])
            else:
                groups[-1].append(row)
        if groups:
            self._read(prompts, groups)
        return rows

    def _is_full(self, prompts: int, longest: int) -> bool:
        return self.device.type != "cuda" or prompts * longest > _PROMPT_TOKENS

    def _read(self, prompts: Sequence[PromptTokens], groups: list[list[_Row]]) -> None:
        """One pass over prompts, padded on the right, and the first token of every answer."""
        texts = [prompts[group[0].prompt].ids for group in groups]
        width, most = max(map(len, texts)), max(map(len, groups))
        ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
        # a prompt with fewer answers than another is kept twice in the same slot
        slots = [[row.slot for row in group] for group in groups]
        slot_BN = torch.tensor([[*some, *some[-1:] * (most - len(some))] for some in slots])
        position = torch.arange(width).expand(len(texts), width)
        ids, slot_BN, position = (x.to(self.device) for x in (ids, slot_BN, position))
        hidden = self._forward(ids, position, slot_BN=slot_BN)
        last = torch.tensor([len(text) - 1 for text in texts], device=self.device)
        logits = self._logits(hidden[torch.arange(len(texts), device=self.device), last])
        flat = [row for group in groups for row in group]
        of_group = torch.tensor([n for n, group in enumerate(groups) for _ in group])
        seeds = torch.tensor([row.seed for row in flat], device=self.device)
        drawn = self._choose(logits[of_group.to(self.device)], seeds)
        self._hand_out(flat, [part if part is None else part[None].cpu() for part in drawn])

    def _write(self, active: list[_Row]) -> None:
        """Some steps of all rows: one on a CPU, a chunk on a GPU."""
        size = CPU_ROWS if self.device.type != "cuda" else self._graph_size(len(active))
        assert self._slots is not None
        spare = self._slots.count - 1
        by_slot = {row.slot: row for row in active}
        on_cpu = self.device.type != "cuda"
        places = range(size) if on_cpu else [row.slot for row in active]
        rows = [by_slot.get(slot) for slot in places] + [None] * (size - len(places))
        ids = torch.tensor([0 if row is None else row.next_id for row in rows])
        position = torch.tensor([0 if row is None else row.position for row in rows])
        # the next token's number in the answer is its position less the prompt's length
        seeds = torch.tensor([0 if row is None else row.seed - row.begin for row in rows])
        slots = torch.tensor(
            [*range(size)] if on_cpu else [spare if row is None else row.slot for row in rows]
        )
        state = _State(*(x.to(self.device) for x in (ids, position, seeds, slots)))
        if on_cpu:
            drawn = [self._step(state)]
        else:
            if size not in self._graphs:
                self._graphs[size] = _Graph(self, size)
            drawn = self._graphs[size].run(state, _CHUNK_STEPS)
        columns = zip(*drawn, strict=True)
        parts = [torch.stack(part).cpu() if part[0] is not None else None for part in columns]
        living = [n for n, row in enumerate(rows) if row is not None]
        came = [None if part is None else part[:, living] for part in parts]
        self._hand_out([row for row in rows if row is not None], came)

    def _hand_out(self, rows: list[_Row], came: Sequence[Tensor | None]) -> None:
        """Tokens [steps, rows] to the rows that they are of."""
        ids, nll, packed = (None if part is None else part.numpy() for part in came)
        assert ids is not None and nll is not None
        for n, row in enumerate(rows):
            row.take(ids[:, n], nll[:, n], None if packed is None else packed[:, n], self._ends)

    def _graph_size(self, active: int) -> int:
        """The smallest of a few sizes that holds so many rows: that of all, halved again and
        again."""
        assert self._slots is not None
        size = self._slots.count - 1
        while size // 2 >= max(active, _LEAST_ROWS) and size % 2 == 0:
            size //= 2
        return size

    # ---- the model ----

    def _step(self, state: "_State") -> Drawn:
        """One token for every row, and the state after it, in place."""
        hidden = self._forward(
            state.ids[:, None], state.position[:, None], slot_BN=state.slots[:, None], writing=True
        )
        state.position.add_(1)
        drawn = self._choose(self._logits(hidden[:, 0]), state.seeds + state.position)
        state.ids.copy_(drawn.ids)
        return drawn

    def _forward(
        self,
        ids_BQ: Tensor,
        position_BQ: Tensor,
        captured: list[tuple[Tensor, Tensor]] | None = None,
        slot_BN: Tensor | None = None,
        writing: bool = False,
    ) -> Tensor:
        """Hidden states behind the shared prefix [B, Q, D]."""
        assert self._windows is not None
        now = Pass(
            positions_BQ=position_BQ,
            windows=self._windows,
            prefix=self._prefix,
            slots=None if slot_BN is None else self._slots,
            slot_BN=slot_BN,
            writing=writing,
            aligned=self.device.type != "cuda",
            captured=captured,
        )
        # a graph for one row serves no other number of rows: not worth compiling
        eager = torch.compiler.set_stance("force_eager" if len(ids_BQ) == 1 else "default")
        with attention.attending(now), one_document_a_row(), eager:
            hidden: Tensor = decoder_of(self.model)(
                input_ids=ids_BQ,
                position_ids=position_BQ + self._prefix.tokens,
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state
        return hidden

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits in float32, whatever the model's dtype is."""
        if self._form is None:
            linear: Any = self.model.get_output_embeddings()
            logits: Tensor = linear(hidden_ND).float()
            return logits
        head_ = self._form.head(self.model)
        weight = head_.weight
        if hidden_ND.dtype == weight.dtype and hidden_ND.dtype.itemsize < 4:
            if needs_width(hidden_ND.device, hidden_ND.dtype):
                strips = [F.linear(hidden_ND.float(), part.float()) for part in weight.split(8192)]
                return head_.transform(torch.cat(strips, 1))
            out = torch.empty(len(hidden_ND), len(weight), device=hidden_ND.device)
            return head_.transform(product(hidden_ND, weight.T, out=out))
        return head_.transform(F.linear(hidden_ND, weight))

    def _choose(self, logits_NV: Tensor, seeds_N: Tensor) -> Drawn:
        return choose(logits_NV, seeds_N, self._known, self._sampling, self._alternatives)

    @torch.inference_mode()
    def _slots_fit(self) -> bool:
        """Whether reading some tokens into slots and writing the rest gives the hidden states that
        the model itself gives: architectures differ in ways that no configuration tells."""
        model, total, half, shared = self.model, _PROBE_TOKENS, _PROBE_TOKENS // 2, 3
        head: Any = model.get_output_embeddings()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, len(head.weight), (2, total), generator=generator).to(self.device)
        ids[1, :shared] = ids[0, :shared]
        position = torch.arange(total, device=self.device).expand(2, -1) - shared
        slot_BN = torch.arange(2, device=self.device)[:, None]
        try:
            expected = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
            self.share(ids[0, :shared].tolist())
            self._slots = Slots(3, total)
            read = slice(shared, half)
            parts = [self._forward(ids[:, read], position[:, read], slot_BN=slot_BN)]
            for n in range(half, total):
                here = slice(n, n + 1)
                parts.append(
                    self._forward(ids[:, here], position[:, here], slot_BN=slot_BN, writing=True)
                )
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False
        finally:
            self._slots = None
            self.share(())
        apart = (torch.cat(parts, 1) - expected[:, shared:]).float().abs().max()
        tolerance = 1e-4 if model.dtype == torch.float32 else 3e-2
        return bool(apart <= tolerance * expected.float().abs().max())

    # ---- one row at a time ----

    def _one_by_one(
        self,
        prompts: Sequence[PromptTokens],
        is_over: IsOver | None,
        on_tokens: Callable[[int], None] | None,
    ) -> Iterator[Answered]:
        """The slow and obvious way, through the model's own cache and logits."""
        for number, prompt in enumerate(prompts):
            for answer, seed in enumerate(prompt.seeds):
                row = _Row(number, answer, seed, 0, len(prompt.ids), prompt.limit)
                cache = DynamicCache(config=self.model.config)
                ids = torch.tensor([[*self._prefix_ids, *prompt.ids]], device=self.device)
                while True:
                    logits = self.model(
                        input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
                    ).logits[:, -1]
                    seeds = torch.tensor([seed + row.count], device=self.device)
                    drawn = self._choose(logits.float(), seeds)
                    self._hand_out([row], [p if p is None else p[None].cpu() for p in drawn])
                    if on_tokens is not None:
                        on_tokens(1)
                    ids = drawn.ids[:, None]
                    if self._is_over(row, is_over):
                        break
                yield row.answered(row.next_id in self._ends)


def fitting_rows(config: Any, dtype: torch.dtype, free_bytes: int, tokens: int) -> int:
    """How many rows of so many own tokens fit into so much memory, with their logits."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kept = 2 * config.num_hidden_layers * heads * size * dtype.itemsize * tokens
    logits = 3 * 4 * config.vocab_size
    rows = int(free_bytes * _MEMORY_SHARE / (kept + logits))
    return max(1, min(MOST_ROWS, rows // _LEAST_ROWS * _LEAST_ROWS or rows))


class _State(NamedTuple):
    """What a step needs of every row, on the device."""

    ids: Tensor
    position: Tensor
    seeds: Tensor
    slots: Tensor


class _Graph:
    """One step of so many rows as a CUDA graph; where the model cannot be captured (it asks the
    host something on its way), the step itself."""

    def __init__(self, decoder: Decoder, size: int):
        self._decoder = decoder
        zeros = (torch.zeros(size, dtype=torch.int64, device=decoder.device) for _ in range(4))
        self._state = _State(*zeros)
        assert decoder._slots is not None
        self._state.slots.fill_(decoder._slots.count - 1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and lets libraries choose their kernels
                decoder._step(self._state)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph):
                self._drawn = decoder._step(self._state)
        except RuntimeError:
            torch.cuda.synchronize()
            self._graph = None

    def run(self, state: _State, steps: int) -> list[Drawn]:
        for ours, given in zip(self._state, state, strict=True):
            ours.copy_(given)
        draws = []
        for _ in range(steps):
            if self._graph is None:
                drawn = self._decoder._step(self._state)
            else:
                self._graph.replay()
                drawn = self._drawn
            packed = None if drawn.packed is None else drawn.packed.clone()
            draws.append(Drawn(drawn.ids.clone(), drawn.nll.clone(), packed))
        return draws
