"""-log p of every token of every document, in the order and shapes of a fixed plan; and, if asked
for, the alternatives that the model would have written there.

Shape letters: N tokens, V rows of the head, K alternatives, P processes, G groups of columns.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.alternatives import (
    FOLLOWS_BIT,
    ID_SHIFT,
    NLL_STEPS,
    NOTHING,
    STEPS_PER_NAT,
    AlternativesSpec,
)
from vocagnolm.errors import ModelError
from vocagnolm.model.fp8 import Fp8Linear, head_to_fp8
from vocagnolm.model.runtime import HostCopy, compile_layers, head_form, last_hidden
from vocagnolm.objective.head import (
    IGNORE_INDEX,
    TORCH_ROWS,
    Head,
    OnChunk,
    RowLosses,
    Transform,
    Workspace,
    row_losses,
    row_operations,
)
from vocagnolm.objective.selection import mixed_bits

# ---- windows ----

# Row lengths are rounded up to this, which wastes 1-2 % and keeps attention kernels on their fast
# path.
LENGTH_STEP = 64


@dataclass(frozen=True)
class Window:
    """Tokens `start..stop` of a document pass through the model together; of those, the tokens
    from `first_scored` on are scored here. The rest are context."""

    document: int
    start: int
    stop: int
    first_scored: int

    def __len__(self) -> int:
        return self.stop - self.start

    def scored(self, prefix: int) -> slice:
        """The tokens that are scored: a window's first only where a prefix stands before it."""
        return slice(max(self.first_scored, self.start + (prefix == 0)), self.stop)


@dataclass(frozen=True)
class Batch:
    """Rows of one length; shorter windows are padded on the right, where a causal model cannot
    see it: no mask is needed and the scores are those of the document alone."""

    windows: tuple[Window, ...]
    row_tokens: int
    """Including the beginning-of-text tokens that stand before every window."""


def cut_windows(document: int, tokens: int, *, room: int, stride: int) -> list[Window]:
    """Windows of at most `room` tokens that score every token once, each with at least `stride`
    tokens before it (or all there are). The first window is full; each next one reaches back
    `stride` tokens."""
    if not 0 <= stride < room:
        raise ValueError(f"stride must be from 0 to {room - 1}, not {stride}")
    windows = []
    scored = 0
    while scored < tokens:
        start = max(0, scored - stride)
        stop = min(tokens, start + room)
        windows.append(Window(document, start, stop, scored))
        scored = stop
    return windows


def plan_batches(
    token_counts: Sequence[int], *, context: int, stride: int, prefix_tokens: int, batch_tokens: int
) -> list[Batch]:
    """Batches of about `batch_tokens` tokens in rows of similar length, longest first (so that a
    lack of memory shows at once). `prefix_tokens` beginning-of-text tokens stand before every
    window."""
    windows = [
        window
        for document, tokens in enumerate(token_counts)
        for window in cut_windows(document, tokens, room=context - prefix_tokens, stride=stride)
    ]
    windows.sort(key=lambda w: (-len(w), w.document, w.start))
    batches = []
    first = 0
    while first < len(windows):
        longest = len(windows[first]) + prefix_tokens
        row_tokens = min(context, -(-longest // LENGTH_STEP) * LENGTH_STEP)
        rows = max(1, batch_tokens // row_tokens)
        batches.append(Batch(tuple(windows[first : first + rows]), row_tokens))
        first += rows
    return batches


# ---- alternatives ----

# The likeliest tokens of a distribution, or tokens drawn from it, out of a chunk of logits. In two
# steps: *choose* among the logits, chunk by chunk, and *finish* for all tokens at once, as packed
# numbers.

# Columns that are looked at together: the likeliest K tokens lie in the K groups with the largest
# maxima, so that only these are searched. A GPU's own search passes over a row many times.
_GROUP = 128
_ONE_BY_ONE = 16
_EMPTY = NOTHING - (1 << 32)  # as a signed number


@dataclass
class AlternativeChoice:
    """Chooses the alternatives of N tokens, chunk by chunk. `seeds_N`: for draws, a number for each
    token."""

    spec: AlternativesSpec
    values_NK: Tensor
    """Logits."""
    ids_NK: Tensor
    lse_N: Tensor
    seeds_N: Tensor | None

    @classmethod
    def of(
        cls, spec: AlternativesSpec, count: int, device: torch.device, seeds_N: Tensor | None = None
    ) -> "AlternativeChoice":
        assert not spec.sampled or seeds_N is not None
        values = torch.empty(count, spec.count, device=device)
        ids = torch.empty(count, spec.count, dtype=torch.int64, device=device)
        return cls(spec, values, ids, torch.empty(count, device=device), seeds_N)

    def choose(self, first: int, last: int, x_NV: Tensor, lse_N: Tensor, how: Transform) -> None:
        """Choose among the raw products of the tokens `first..last`."""
        z = how(x_NV).float()
        if self.spec.sampled:
            assert self.seeds_N is not None
            uniform = uniform_numbers(self.seeds_N[first:last], self.spec.count)
            values, ids = drawn(z, lse_N.float(), uniform)
        else:
            values, ids = likeliest(z, self.spec.count)
        self.values_NK[first:last], self.ids_NK[first:last] = values, ids
        self.lse_N[first:last] = lse_N

    def finish(self, labels_N: Tensor) -> Tensor:
        """The packed alternatives of all tokens, int32 [N, K]."""
        nll = self.lse_N[:, None] - self.values_NK
        steps = (nll * STEPS_PER_NAT).round().clamp(0, NLL_STEPS)
        packed = (self.ids_NK << ID_SHIFT) | steps.nan_to_num(0.0).long()
        packed |= torch.where(self.ids_NK == labels_N[:, None], FOLLOWS_BIT, 0)
        return torch.where(torch.isfinite(nll), packed, _EMPTY).to(torch.int32)


def likeliest(z_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(logits, columns) [N, K] of the largest logits of each row, in order."""
    groups = z_NV.shape[1] // _GROUP
    if not z_NV.is_cuda or groups <= 4 * count:
        return z_NV.topk(count)
    return by_groups(z_NV, count)


def by_groups(z_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(logits, columns) [N, K] of the largest logits of each row, in two small searches instead of
    a large one: first for `count` groups of columns, then inside these."""
    n, v = z_NV.shape
    groups = v // _GROUP
    grouped = z_NV[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    _, chosen = _largest(grouped.amax(-1), count)
    inside = grouped.gather(1, chosen[:, :, None].expand(n, count, _GROUP)).flatten(1)
    beyond = groups * _GROUP  # columns of no whole group: all are looked at
    if beyond < v:
        inside = torch.cat([inside, z_NV[:, beyond:]], dim=1)
    values, index = _largest(inside, count)
    group = chosen.gather(1, (index // _GROUP).clamp(max=count - 1))
    column = group * _GROUP + index % _GROUP
    return values, torch.where(index < count * _GROUP, column, beyond + index - count * _GROUP)


def _largest(x_NM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` of a tensor that is not needed afterwards. Searching a short row several times is
    faster than a GPU's own search, if only a few values are wanted."""
    if count > _ONE_BY_ONE:
        largest, index = x_NM.topk(count)
        return largest, index
    values, indices = [], []
    for _ in range(count):
        value, index = x_NM.max(dim=1, keepdim=True)
        values.append(value)
        indices.append(index)
        x_NM.scatter_(1, index, float("-inf"))
    return torch.cat(values, dim=1), torch.cat(indices, dim=1)


def drawn(z_NV: Tensor, lse_N: Tensor, uniform_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, columns) [N, K] of tokens drawn with replacement: where the running sum of the
    probabilities passes a uniform number. It is summed over groups first, then inside a group, and
    in float64: a running sum of 150,000 numbers in float32 would be too inexact."""
    v = z_NV.shape[1]
    p = (z_NV - lse_N[:, None]).exp_()
    if v % _GROUP:
        p = F.pad(p, (0, -v % _GROUP))
    p_NGC = p.unflatten(1, (-1, _GROUP))
    upto = p_NGC.sum(-1, dtype=torch.float64).cumsum(1)
    wanted = (uniform_NK * upto[:, -1:]).contiguous()
    group = torch.searchsorted(upto, wanted, right=True).clamp(max=upto.shape[1] - 1)
    before = F.pad(upto, (1, 0)).gather(1, group)
    inside = p_NGC.gather(1, group[:, :, None].expand(*group.shape, _GROUP)).double().cumsum(-1)
    left = (wanted - before)[:, :, None].contiguous()
    index = torch.searchsorted(inside, left, right=True)[:, :, 0]
    # where rounding passes over the last of them
    last = torch.searchsorted(inside, inside[:, :, -1:].contiguous())[:, :, 0]
    ids = group * _GROUP + torch.minimum(index, last)
    return z_NV.gather(1, ids), ids


def uniform_numbers(seeds_N: Tensor, count: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [N, K]: a pure function of the seeds."""
    draw = torch.arange(count, device=seeds_N.device)
    bits = mixed_bits(mixed_bits(seeds_N)[:, None] + draw)
    return (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) / float(1 << 53)


# ---- losses of documents ----


# float32 logits alive at a time. On a CPU a tile should stay near the caches; on a GPU it must be
# large enough to keep the matrix units busy.
_CPU_TILE_BYTES = 32 * 2**20
_CUDA_TILE_BYTES = 1280 * 2**20
# Batches that a device has before it while the host makes the next: it must never run dry.
_BATCHES_AHEAD = 3


@dataclass(frozen=True)
class TokenScores:
    """A model's losses and alternatives on the tokens of a document."""

    nll: np.ndarray
    """float32 [M] in nats, NaN where there is no context."""
    alternatives: np.ndarray | None = None
    """uint32 [M, K], as `vocagnolm.alternatives` packs them."""


class RowScores(NamedTuple):
    """A model's losses and packed alternatives on tokens in a row, on the device."""

    nll_N: Tensor
    packed_NK: Tensor | None


def token_nll(
    hidden_ND: Tensor,
    head: Head,
    labels_N: Tensor,
    *,
    chunk: int | None = None,
) -> Tensor:
    """-log p(label) of every token, float32 [N], without holding the logits of the whole batch:
    they are computed `chunk` tokens at a time, in float32 whatever the inputs are (bfloat16 logits
    would cost up to 0.08 nats)."""
    return token_scores(hidden_ND, head, labels_N, chunk=chunk).nll_N


@torch.no_grad()
def token_scores(
    hidden_ND: Tensor,
    head: Head,
    labels_N: Tensor,
    *,
    chunk: int | None = None,
    alternatives: AlternativesSpec | None = None,
    seeds_N: Tensor | None = None,
) -> RowScores:
    """-log p(label) of every token, as `token_nll` gives it, and the alternatives at its position.
    `seeds_N` are needed for alternatives that are drawn."""
    work = Workspace.of(
        hidden_ND,
        head,
        row_operations("auto", hidden_ND),
        hidden_ND.dtype,
        widen=alternatives is not None,
    )
    if chunk is None and (hidden_ND.is_cuda or work.hidden_ND.dtype == torch.float32):
        chunk = _tile_tokens(head.weight.shape[0], hidden_ND.is_cuda)
    choice, on_chunk = _choosing(alternatives, hidden_ND, seeds_N, work.transform)
    losses = row_losses(work, labels_N, chunk=chunk, on_chunk=on_chunk)
    return RowScores(losses.nll_N, None if choice is None else choice.finish(labels_N))


def _choosing(
    spec: AlternativesSpec | None, rows: Tensor, seeds_N: Tensor | None, transform: Transform
) -> tuple[AlternativeChoice | None, OnChunk | None]:
    """The choice of alternatives for these rows, and the function through which it gets their
    logits; None if no alternatives are kept."""
    if spec is None:
        return None, None
    choice = AlternativeChoice.of(spec, len(rows), rows.device, seeds_N)

    def on_chunk(first: int, last: int, x: Tensor, losses: RowLosses) -> None:
        choice.choose(first, last, x, losses.lse_N, transform)

    return choice, on_chunk


def _tile_tokens(rows: int, on_gpu: bool) -> int:
    if on_gpu:  # whole tiles of the matrix kernels
        return max(1, _CUDA_TILE_BYTES // (4 * rows) // 256) * 256
    return max(1, _CPU_TILE_BYTES // (4 * rows))


class NllModel:
    """A causal language model and the plan by which it reads documents.

    Every window starts with `prefix_ids` (beginning-of-text), also inside a long document, because
    models trained with such a token depend on it. Without a prefix, the first token of a document
    has no context and stays NaN.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        context: int,
        stride: int,
        batch_tokens: int,
        prefix_ids: Sequence[int] = (),
        compiled: bool = False,
        fp8_head: bool = False,
        alternatives: AlternativesSpec | None = None,
    ):
        """`fp8_head`: replace the model's head by one in fp8, if its form is known. `alternatives`:
        keep these beside the losses."""
        room = context - len(prefix_ids)
        if not 1 <= stride < room:
            raise ValueError(f"stride must be from 1 to {room - 1}, not {stride}")
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, not {batch_tokens}")
        self.model = model
        self.context = context
        self.stride = stride
        self.batch_tokens = batch_tokens
        self.prefix_ids = tuple(prefix_ids)
        self.alternatives = alternatives
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary_rows = int(embeddings.weight.shape[0])
        # A model whose head we do not know scores through its own logits, a row at a time.
        self.form = head_form(model)
        if fp8_head and self.form is not None:
            head_to_fp8(model)
        self._full_rows = max(1, batch_tokens // context)
        self._warm = True
        if compiled:
            self._warm = not compile_layers(model, (self._full_rows, context))

    def plan(self, token_counts: Sequence[int]) -> list[Batch]:
        return plan_batches(
            token_counts,
            context=self.context,
            stride=self.stride,
            prefix_tokens=len(self.prefix_ids),
            batch_tokens=self.batch_tokens,
        )

    def document_nll(
        self, documents: Sequence[np.ndarray], on_tokens: Callable[[int], None] | None = None
    ) -> list[np.ndarray]:
        """float32 nll in nats for the token ids of every document; NaN where there is no context.
        `on_tokens` is called with the number of tokens of every batch that is started."""
        return [scores.nll for scores in self.start(documents, on_tokens)()]

    @torch.inference_mode()
    def start(
        self, documents: Sequence[np.ndarray], on_tokens: Callable[[int], None] | None = None
    ) -> Callable[[], list[TokenScores]]:
        """Score documents in two steps. When this returns, the last batches are queued on the
        device; the function that it returns waits for them, and can be called in any thread."""
        largest = max((int(ids.max(initial=0)) for ids in documents), default=0)
        if largest >= self.vocabulary_rows:
            raise ModelError(
                f"token id {largest} is outside the model's {self.vocabulary_rows:,} embedding "
                "rows: the tokenizer does not belong to this model."
            )
        self.warm_up()
        batches = self.plan([len(ids) for ids in documents])
        copies: list[tuple[HostCopy, HostCopy | None]] = []
        for batch in batches:
            if len(copies) >= _BATCHES_AHEAD:
                copies[-_BATCHES_AHEAD][0].numpy()
            nll, packed = self.batch_scores(batch, documents)
            copies.append((HostCopy(nll), None if packed is None else HostCopy(packed)))
            if on_tokens is not None:
                on_tokens(sum(w.stop - w.first_scored for w in batch.windows))
        counts = [len(ids) for ids in documents]
        return lambda: self._collect(batches, copies, counts)

    def _collect(
        self,
        batches: Sequence[Batch],
        copies: Sequence[tuple[HostCopy, HostCopy | None]],
        counts: Sequence[int],
    ) -> list[TokenScores]:
        kept = self.alternatives
        documents = [
            TokenScores(
                np.full(count, np.nan, np.float32),
                None if kept is None else np.full((count, kept.count), NOTHING, np.uint32),
            )
            for count in counts
        ]
        for batch, (losses, others) in zip(batches, copies, strict=True):
            nll = losses.numpy()
            packed = None if others is None else others.numpy().view(np.uint32)
            first = 0
            for window in batch.windows:
                scored = window.scored(len(self.prefix_ids))
                rows = slice(first, first + scored.stop - scored.start)
                scores = documents[window.document]
                scores.nll[scored] = nll[rows]
                if packed is not None and scores.alternatives is not None:
                    scores.alternatives[scored] = packed[rows]
                first = rows.stop
        return documents

    def batch_scores(self, batch: Batch, documents: Sequence[np.ndarray]) -> RowScores:
        """Scores of the scored tokens of a batch, window after window, on the model's device."""
        prefix = len(self.prefix_ids)
        input_ids = np.zeros((len(batch.windows), batch.row_tokens), np.int64)
        input_ids[:, :prefix] = self.prefix_ids
        positions, labels, seeds = [], [], []
        drawn = self.alternatives is not None and self.alternatives.sampled
        for row, window in enumerate(batch.windows):
            ids, scored = documents[window.document], window.scored(prefix)
            targets = np.arange(scored.start, scored.stop)
            input_ids[row, prefix : prefix + len(window)] = ids[window.start : window.stop]
            # the hidden state before a token predicts it
            positions.append(targets + row * batch.row_tokens + prefix - window.start - 1)
            labels.append(ids[scored])
            if drawn:
                seeds.append(_document_seed(ids) + targets)
        device = self.model.device
        return self.rows_scores(
            _sent(input_ids, device),
            _sent(np.concatenate(positions), device),
            _sent(np.concatenate(labels).astype(np.int64), device),
            _sent(np.concatenate(seeds), device) if drawn else None,
        )

    def rows_scores(
        self, input_ids: Tensor, positions: Tensor, labels: Tensor, seeds: Tensor | None = None
    ) -> RowScores:
        """Scores of `labels` [N] as predicted at the flat `positions` [N] of `input_ids` [B, T].
        `seeds` [N] are for sampled alternatives."""
        if self.form is None:
            return self._through_logits(input_ids, positions, labels, seeds)
        hidden = last_hidden(self.model, input_ids).flatten(0, 1)
        if len(positions) != len(hidden):
            hidden = hidden[positions]
        head: Any = self.model.get_output_embeddings()
        if isinstance(head, Fp8Linear):
            chunk = _tile_tokens(self.vocabulary_rows, hidden.is_cuda)
            transform = self.form.transform(head.bias)
            choice, on_chunk = _choosing(self.alternatives, hidden, seeds, transform)
            nll = head.token_nll(hidden, labels, transform, chunk, on_chunk)
            return RowScores(nll, None if choice is None else choice.finish(labels))
        return token_scores(
            hidden,
            self.form.head(self.model),
            labels,
            alternatives=self.alternatives,
            seeds_N=seeds,
        )

    def _through_logits(
        self, input_ids: Tensor, positions: Tensor, labels: Tensor, seeds: Tensor | None
    ) -> RowScores:
        """Scores by the model's own logits, for heads whose form is not known."""
        targets = torch.full_like(input_ids, IGNORE_INDEX).flatten()
        targets[positions] = labels
        every = None
        if seeds is not None:
            every = torch.zeros_like(targets)
            every[positions] = seeds
        choice, on_chunk = _choosing(self.alternatives, targets, every, Transform())
        nll, _ = losses_through_logits(
            self.model, input_ids, targets.view(input_ids.shape), on_chunk=on_chunk
        )
        packed = None if choice is None else choice.finish(targets)[positions]
        return RowScores(nll.flatten()[positions], packed)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the model once before the first documents, so that the graph for all shapes but the
        full batch is made for a fixed example, and the device has loaded its kernels."""
        if self._warm:
            return
        self._warm = True
        shape = (self._full_rows + 1, max(2, self.context // 2))
        zeros = torch.zeros(shape, dtype=torch.int64, device=self.model.device)
        positions = torch.arange(zeros.numel(), device=self.model.device)
        HostCopy(self.rows_scores(zeros, positions, zeros.flatten(), positions).nll_N).numpy()


def _document_seed(ids: np.ndarray) -> int:
    """The seed of a document's draws: a function of its tokens alone."""
    digest = hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # room for its positions


def _sent(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device, sent without waiting: from ordinary memory, the host would wait
    until the device has finished all earlier work."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def losses_through_logits(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    labels_BT: Tensor,
    position_ids_BT: Tensor | None = None,
    with_entropy: bool = False,
    on_chunk: OnChunk | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(nll, entropy or None) [B, T] by the model's own logits, a row at a time, for heads whose
    form is not known; 0 where the label is ignored. Every row is a chunk for `on_chunk`."""
    by_row: list[RowLosses] = []
    for row, labels in enumerate(labels_BT):
        here = slice(row, row + 1)
        where = {} if position_ids_BT is None else {"position_ids": position_ids_BT[here]}
        logits = model(input_ids=input_ids_BT[here], use_cache=False, **where).logits[0]
        losses = TORCH_ROWS.losses(logits, labels.clamp(min=0), Transform(), with_entropy)
        if on_chunk is not None:
            on_chunk(row * len(labels), (row + 1) * len(labels), logits, losses)
        by_row.append(losses)
    nll = torch.where(labels_BT >= 0, torch.stack([losses.nll_N for losses in by_row]), 0.0)
    entropy = [losses.entropy_N for losses in by_row if losses.entropy_N is not None]
    return nll, torch.stack(entropy) if entropy else None
