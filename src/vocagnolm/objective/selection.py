"""Weights of tokens in the loss, decided by their losses.

A selection gives 0 and 1. It is reduced to one 64-bit integer per candidate, `order = rank key <<
32 | ~position`: larger is better, and no two candidates are equal, so that "top k" has one answer
whatever the device, the batch shape or the number of ranks. Ties in the score go to the lower
position. A new ranking is one function in `RANKINGS`, named by a row of `METHODS`.

A weighting looks at one stretch (or token) at a time, at its loss S under the student and T under
the teacher; no gradient flows through a weight. A new weighting is one function in `WEIGHTINGS`
and its name in `methods.CHOOSABLE_WEIGHTINGS`.

Shape letters: B sequences, T positions, U units of a sequence (tokens, or chunks), N tokens in a
row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vocagnolm.base.ranks import Ranks
from vocagnolm.objective.head import IGNORE_INDEX
from vocagnolm.recipe.methods import chunk_bound
from vocagnolm.recipe.sections import ObjectiveConfig

# ---- what a micro-batch predicts ----


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The tokens that a micro-batch predicts, and what is known of them before the student reads
    it. Already shifted: entry t belongs to the token that position t predicts. B sequences, T
    positions.

        Targets(labels_BT=ids[:, 1:], guidance_BT=guidance[:, 1:])  # inputs: ids[:, :-1]
    """

    labels_BT: Tensor
    """int64; -100 is ignored."""
    guidance_BT: Tensor | None = None
    """Teacher nll assigned to these tokens, NaN where unmapped. None (random, no_teacher): every
    token counts as mapped."""
    entropy_BT: Tensor | None = None
    """Entropy of the reference model in nats; only for `entropy_keep`."""
    teacher_sums_B2: Tensor | None = None
    """Sum and number of the teacher's losses over each sequence, for `unmapped: mean`. None:
    computed from the guidance, which is the same for one vocabulary."""
    stretch_BT: Tensor | None = None
    """int64: index of each token's stretch in its sequence, for `compare: stretch`. A stretch is
    the smallest piece of text at whose ends both tokenizations have a boundary. `guidance_BT` is
    then the teacher's loss on the whole stretch, the same for all its tokens."""
    soft_ids_BTK: Tensor | None = None
    """int64 or int32: for distill, tokens other than the label that the teacher finds likely. Any
    valid id where `soft_p_BTK` is 0."""
    soft_p_BTK: Tensor | None = None
    """Their probabilities; the rest belongs to the label. on_policy: the probabilities of the
    listed tokens, the label among them, each listed once; the rest belongs to all others."""
    drawn_nll_BT: Tensor | None = None
    """on_policy with several updates in a round: the student's loss on each token when it drew it.
    None: as it is now."""
    sequence_index_B: Tensor | None = None
    """int64: index of each sequence in the whole batch of the optimizer step. Used to break ties
    and for random choices. None: by micro-batch, rank and row, which is the order in which
    accelerate deals batches to ranks."""

    def __post_init__(self) -> None:
        for name in ("labels_BT", "guidance_BT"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(
                    f"{name} must be a tensor [B, T], got {type(value).__name__}; rows of unequal "
                    "length become one with Targets.from_rows(labels, guidance)"
                )

    @classmethod
    def from_rows(
        cls,
        labels: Sequence[Any],
        guidance: Sequence[Any] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> "Targets":
        """Build targets from sequences of different lengths (lists, arrays or tensors). Labels are
        padded on the right with -100, guidance with NaN. Pad the inputs on the right too, with any
        token."""
        if guidance is not None and len(labels) != len(guidance):
            raise ValueError(f"{len(labels)} rows of labels, {len(guidance)} of guidance")
        pairs = () if guidance is None else zip(labels, guidance, strict=True)
        for number, (row, known) in enumerate(pairs):
            if len(row) != len(known):
                raise ValueError(f"row {number} has {len(row)} labels and {len(known)} of guidance")

        def padded(rows: Sequence[Any], dtype: torch.dtype, fill: float) -> Tensor:
            tensors = [torch.as_tensor(row, dtype=dtype, device=device) for row in rows]
            return pad_sequence(tensors, batch_first=True, padding_value=fill)

        return cls(
            labels_BT=padded(labels, torch.int64, IGNORE_INDEX),
            guidance_BT=None if guidance is None else padded(guidance, torch.float32, torch.nan),
        )

    @cached_property
    def valid_BT(self) -> Tensor:
        return self.labels_BT != IGNORE_INDEX

    @cached_property
    def mapped_BT(self) -> Tensor:
        """Tokens that can be compared: all tokens of a stretch or none, because its loss under the
        student is unknown if one of its tokens is not predicted."""
        if self.guidance_BT is None:
            return self.valid_BT
        known = ~torch.isnan(self.guidance_BT)
        if self.stretch_BT is None:
            return self.valid_BT & known
        unseen = (known & ~self.valid_BT).to(torch.int32)
        broken = torch.zeros_like(unseen).scatter_reduce(1, self.stretch_BT, unseen, "amax")
        return self.valid_BT & known & (broken.gather(1, self.stretch_BT) == 0)


# ---- what is compared ----


# Sums that decide are taken in integers (1 / 2^20 nats), because a float sum depends on the order
# and so on the device and on how a batch is split.
FIXED_POINT = float(1 << 20)
LARGEST_NATS = 1e6
# Below this a loss is rounding: nothing is left to reduce, and 1 / S must stay finite.
_SMALLEST_NATS = 1e-4
CLIP = 0.2
"""By how much the probability of a stretch may change while the same answers are trained on."""


class Compared(NamedTuple):
    """The two losses that are compared for each token [B, T]: its own, or those of its stretch."""

    own_BT: Tensor
    teacher_BT: Tensor
    """NaN where unmapped."""
    first_BT: Tensor | None
    """The position of the first token of the token's stretch; None if tokens are compared."""


def compared(nll_BT: Tensor, targets: Targets, teacher_BT: Tensor | None = None) -> Compared:
    """The losses that a selection compares. `teacher_BT`: the guidance with its gaps filled
    (`unmapped: mean`)."""
    assert targets.guidance_BT is not None
    teacher = targets.guidance_BT.float() if teacher_BT is None else teacher_BT
    stretch = targets.stretch_BT
    if stretch is None:
        return Compared(nll_BT, teacher, None)
    B, T = stretch.shape
    mapped = targets.mapped_BT
    rows = torch.arange(B, device=stretch.device)[:, None] * T
    own = stretch_losses(nll_BT.flatten(), (stretch + rows).flatten(), mapped.flatten(), B * T)
    position = torch.arange(T, device=stretch.device).expand(B, T)
    # unmapped tokens stand for themselves, wherever they lie
    first = torch.where(mapped, position, T)
    first = torch.full_like(stretch, T).scatter_reduce(1, stretch, first, "amin")
    first = torch.where(mapped, first.gather(1, stretch), position)
    return Compared(own.view(B, T), teacher, first)


def stretch_losses(nll_N: Tensor, stretch_N: Tensor, mapped_N: Tensor, stretches: int) -> Tensor:
    """For each token the student's loss on its stretch, or on itself if it is unmapped."""
    if nll_N.dtype == torch.float64:
        values, back = torch.where(mapped_N, nll_N, 0.0), 1.0
    else:
        values, back = torch.where(mapped_N, fixed_point(nll_N), 0), FIXED_POINT
    sums = torch.zeros(stretches, dtype=values.dtype, device=values.device)
    sums = sums.scatter_add(0, stretch_N, values)
    tokens = torch.zeros(stretches, dtype=torch.int64, device=values.device)
    tokens = tokens.scatter_add(0, stretch_N, mapped_N.long())
    whole = (sums.double() / back).to(nll_N.dtype).gather(0, stretch_N)
    # a stretch of one token is that token, to the last bit
    return torch.where(mapped_N & (tokens.gather(0, stretch_N) > 1), whole, nll_N)


def fixed_point(nats: Tensor) -> Tensor:
    """Losses as integers, whose sums do not depend on the order."""
    limited = nats.float().nan_to_num(nan=LARGEST_NATS).clamp(-LARGEST_NATS, LARGEST_NATS)
    return (limited * FIXED_POINT).round().long()


# ---- the choice ----


Count = TypeVar("Count", int, Tensor)
Counts = Sequence[tuple[int, int]]
"""(predicted, mapped) tokens of each sequence."""
_NOT_A_CANDIDATE = torch.iinfo(torch.int64).min
_POSITIONS = 1 << 32


@dataclass(frozen=True)
class ScoredBatch:
    """The targets of a micro-batch and the student's losses on them: the input of a selection."""

    targets: Targets
    nll_BT: Tensor

    @property
    def valid_BT(self) -> Tensor:
        return self.targets.valid_BT

    @property
    def mapped_BT(self) -> Tensor:
        return self.targets.mapped_BT


def kept(count: Count, keep: float) -> Count:
    """The number of n tokens that are kept: keep * n, rounded half up in exact arithmetic, and at
    least 1 if keep > 0 and n > 0."""
    share = Fraction(str(keep)).limit_denominator(1_000_000)
    k = (2 * share.numerator * count + share.denominator) // (2 * share.denominator)
    return k + ((k == 0) & (count > 0)) if keep > 0 else k


def count_kept(counts: Counts | None, config: ObjectiveConfig) -> int | None:
    """The number of tokens of a micro-batch that will have a weight, whatever its losses; None if
    it depends on them, or if nothing was counted."""
    if counts is None:
        return None
    predicted, mapped = sum(row[0] for row in counts), sum(row[1] for row in counts)
    if config.selects_all or config.graded:
        return predicted
    if config.rule.unit == "chunk" or config.by_stretch or config.scope == "global":
        return None
    pools = [row[0 if config.unmapped == "mean" else 1] for row in counts]
    if config.scope == "batch":
        pools = [sum(pools)]
    chosen = sum(kept(pool, config.keep) for pool in pools)
    return chosen + predicted - mapped if config.unmapped == "include" else chosen


def select(batch: ScoredBatch, config: ObjectiveConfig, *, step: int = 0) -> Tensor:
    """The selected tokens of a micro-batch (scope sequence or batch): bool [B, T]."""
    if config.scope == "global":
        raise ValueError("scope global needs all micro-batches and ranks: use weigh_step")
    return select_batches([batch], config, step, Ranks.of())[0]


def select_batches(
    batches: Sequence[ScoredBatch], config: ObjectiveConfig, step: int, ranks: Ranks
) -> list[Tensor]:
    """The selected tokens of each micro-batch of this rank, bool [B, T]; with scope global they
    compete with those of all ranks. The result does not depend on how a step is split."""
    if config.rule.ranking is None or (config.rule.alternatives and config.selects_all):
        return [batch.valid_BT for batch in batches]
    if config.rule.guidance and not config.by_chance:
        for batch in batches:
            if batch.targets.guidance_BT is None:
                raise ValueError(f"method {config.method} needs guidance_BT, got None")
            if config.by_stretch and batch.targets.stretch_BT is None:
                raise ValueError("compare stretch needs stretch_BT, got None")
    guidance = filled_guidance([b.targets for b in batches], config, ranks)
    candidates = [b.valid_BT if config.unmapped == "mean" else b.mapped_BT for b in batches]
    index = _sequence_indices(batches, config, ranks)
    parts = [_Part(*part) for part in zip(batches, guidance, index, candidates, strict=True)]
    select_units = _select_chunks if config.rule.unit == "chunk" else _select_tokens
    chosen = select_units(parts, config, step, ranks)
    if config.unmapped == "include":
        return [c | (b.valid_BT & ~b.mapped_BT) for c, b in zip(chosen, batches, strict=True)]
    return chosen


class _Part(NamedTuple):
    """A micro-batch and its tokens that compete."""

    batch: ScoredBatch
    guidance_BT: Tensor | None
    index_B: Tensor
    candidate_BT: Tensor


class _Units(NamedTuple):
    """The units of a micro-batch that compete, tokens or chunks: [B, U]."""

    key: Tensor
    candidate: Tensor
    pool: Tensor
    """The units of which `keep` is a share."""
    index_B: Tensor
    together: Tensor | None = None
    """A number that units share which are chosen together: the first position of their stretch.
    They share a key too. None: each is chosen for itself."""

    @property
    def position(self) -> Tensor:
        own = torch.arange(self.key.shape[1], device=self.key.device).expand(self.key.shape)
        return own if self.together is None else self.together


def _select_tokens(
    parts: list[_Part], config: ObjectiveConfig, step: int, ranks: Ranks
) -> list[Tensor]:
    candidates = [part.candidate_BT for part in parts]
    if config.entropy_keep is not None:
        certain = []
        for batch, _, index, pool in parts:
            if batch.targets.entropy_BT is None:
                raise ValueError("entropy_keep needs entropy_BT, the reference model's entropy")
            certain.append(_Units(float_key(-batch.targets.entropy_BT), pool, pool, index))
        candidates = _top(certain, config.entropy_keep, config, ranks)
    assert config.rule.ranking is not None
    ranking, units = RANKINGS[config.rule.ranking], []
    for (batch, guidance, index, pool), candidate in zip(parts, candidates, strict=True):
        ranked = ranking(batch, guidance, index, config, step)
        units.append(_Units(ranked.key_BT, candidate, pool, index, ranked.unit_BT))
    return _top(units, config.keep, config, ranks)


class Ranked(NamedTuple):
    """The ranks of the tokens of a micro-batch."""

    key_BT: Tensor
    """int64 of 32 bits, larger is better (`float_key`, `random_key`)."""
    unit_BT: Tensor | None = None
    """A number that tokens share which are chosen together, and which have one key; None: each is
    chosen for itself."""


# (micro-batch, guidance with its gaps filled, index of each sequence, config, step)
Ranking = Callable[[ScoredBatch, Tensor | None, Tensor, ObjectiveConfig, int], Ranked]


def rank_by_excess(
    batch: ScoredBatch, guidance: Tensor | None, index_B: Tensor, config: ObjectiveConfig, step: int
) -> Ranked:
    """Rank tokens by the student's loss minus the teacher's, on the token or on its stretch."""
    both = compared(batch.nll_BT, batch.targets, guidance)
    return Ranked(float_key(both.own_BT - both.teacher_BT), both.first_BT)


RANKINGS: dict[str, Ranking] = {
    "excess": rank_by_excess,
    "loss": lambda batch, guidance, index_B, config, step: Ranked(float_key(batch.nll_BT)),
    "chance": lambda batch, guidance, index_B, config, step: Ranked(
        random_key(index_B, batch.nll_BT.shape[1], config.seed, step)
    ),
}
"""The rankings of tokens by their names in `METHODS`."""


def _select_chunks(
    parts: list[_Part], config: ObjectiveConfig, step: int, ranks: Ranks
) -> list[Tensor]:
    """Select whole chunks, by the mean excess of their candidate tokens. Only candidates of a
    chosen chunk are selected here; unmapped tokens follow their own strategy."""
    units, layouts, n = [], [], config.n_chunks
    for batch, guidance, index, candidate in parts:
        (B, T), device = candidate.shape, candidate.device
        starts = chunk_bound(torch.arange(n, device=device), T, n)
        chunk_T = torch.searchsorted(starts, torch.arange(T, device=device), right=True) - 1
        layout, zeros = chunk_T.expand(B, T), torch.zeros(B, n, dtype=torch.int64, device=device)
        count = zeros.scatter_add(1, layout, candidate.long())
        if config.chunk_choice == "random":
            key = random_key(index, n, config.seed, step)
        else:
            assert guidance is not None
            excess = fixed_point(batch.nll_BT - _share_of_stretch(guidance, batch.targets))
            total = zeros.scatter_add(1, layout, torch.where(candidate, excess, 0))
            key = float_key(total / count.clamp(min=1))
        units.append(_Units(key, count > 0, count > 0, index))
        layouts.append(layout)
    chosen = zip(parts, _top(units, config.keep, config, ranks), layouts, strict=True)
    return [part.candidate_BT & picked.gather(1, layout) for part, picked, layout in chosen]


def _share_of_stretch(guidance_BT: Tensor, targets: Targets) -> Tensor:
    """The guidance of each token for sums over tokens: that of a stretch is shared evenly by its
    tokens."""
    if targets.stretch_BT is None:
        return guidance_BT
    mapped = targets.mapped_BT.float()
    count = torch.zeros_like(guidance_BT).scatter_add(1, targets.stretch_BT, mapped)
    return guidance_BT / count.gather(1, targets.stretch_BT).clamp(min=1)


def filled_guidance(
    batches: Sequence[Targets], config: ObjectiveConfig, ranks: Ranks
) -> list[Tensor | None]:
    """The guidance of each micro-batch in fp32. With `unmapped: mean`, unmapped tokens are given
    the mean loss of the scope's teacher tokens. If there are none it is 0, a constant, so that the
    student's nll alone ranks."""
    given = [None if b.guidance_BT is None else b.guidance_BT.float() for b in batches]
    if config.unmapped != "mean" or any(g is None for g in given):
        return list(given)
    totals, counts = [], []
    for batch, guidance in zip(batches, given, strict=True):
        assert guidance is not None
        if batch.teacher_sums_B2 is None:
            count = batch.mapped_BT.sum(1, keepdim=True)
            total = torch.where(batch.mapped_BT, fixed_point(guidance), 0).sum(1, keepdim=True)
        else:
            count = batch.teacher_sums_B2[:, 1:].long()
            total = fixed_point(batch.teacher_sums_B2[:, :1])
        totals.append(total if config.scope == "sequence" else total.sum())
        counts.append(count if config.scope == "sequence" else count.sum())
    if config.scope == "global":
        both = ranks.sum(torch.stack([torch.stack(totals).sum(), torch.stack(counts).sum()]))
        totals, counts = [both[0]] * len(batches), [both[1]] * len(batches)
    filled: list[Tensor | None] = []
    for batch, guidance, total, count in zip(batches, given, totals, counts, strict=True):
        assert guidance is not None
        mean = total / count.clamp(min=1) / FIXED_POINT
        unmapped = torch.isnan(guidance) | (batch.valid_BT & ~batch.mapped_BT)
        filled.append(torch.where(unmapped, mean.to(guidance.dtype), guidance))
    return filled


def _sequence_indices(
    batches: Sequence[ScoredBatch], config: ObjectiveConfig, ranks: Ranks
) -> list[Tensor]:
    sizes = [b.nll_BT.shape[0] for b in batches]
    device = batches[0].nll_BT.device
    if config.scope == "global":
        by_rank = ranks.gather(torch.tensor(sizes, device=device)).tolist()
    else:  # no message for a local scope: assume equal shapes, only random choices depend on it
        by_rank = [sizes] * ranks.count
    indices, first = [], 0
    for m, batch in enumerate(batches):
        start = first + sum(of_rank[m] for of_rank in by_rank[: ranks.rank])
        first += sum(of_rank[m] for of_rank in by_rank)
        if batch.targets.sequence_index_B is None:
            indices.append(torch.arange(start, start + sizes[m], device=device))
        else:
            indices.append(batch.targets.sequence_index_B.to(device=device, dtype=torch.int64))
    return indices


def _top(parts: list[_Units], keep: float, config: ObjectiveConfig, ranks: Ranks) -> list[Tensor]:
    """The best candidates, as many as `keep` of each pool's size, bool [B, U] for each part. Units
    that are chosen together are taken whole, so that a little more than `keep` may be chosen."""
    if config.scope == "global":
        return _top_global(parts, keep, ranks)
    chosen = []
    for units in parts:
        shape, position = units.key.shape, units.position
        if config.scope == "batch":
            row = torch.arange(shape[0], device=position.device)[:, None]
            position, shape = position + row * shape[1], torch.Size((1, shape.numel()))
        key, candidate, pool = (t.reshape(shape) for t in (units.key, units.candidate, units.pool))
        order = _order(key, candidate, position.reshape(shape))
        k = kept(pool.sum(1), keep).minimum(candidate.sum(1))
        ranked = order.sort(dim=1, descending=True).values
        threshold = ranked.gather(1, (k - 1).clamp(min=0)[:, None])
        chosen.append(((order >= threshold) & (k > 0)[:, None]).view(units.key.shape))
    return chosen


def _top_global(parts: list[_Units], keep: float, ranks: Ranks) -> list[Tensor]:
    widest = torch.tensor(max(u.key.shape[1] for u in parts), device=parts[0].key.device)
    width = ranks.max(widest)
    orders = [_order(u.key, u.candidate, u.index_B[:, None] * width + u.position) for u in parts]
    pool = ranks.sum(torch.stack([u.pool.sum() for u in parts]).sum())
    available = ranks.sum(torch.stack([u.candidate.sum() for u in parts]).sum())
    k = int(kept(pool, keep).minimum(available))
    if k == 0:
        return [torch.zeros_like(u.candidate) for u in parts]
    flat = torch.cat([order[u.candidate] for order, u in zip(orders, parts, strict=True)])
    threshold = kth_largest(flat, k, ranks)
    return [order >= threshold for order in orders]


def kth_largest(values: Tensor, k: int, ranks: Ranks) -> int:
    """The k-th largest of the int64 values of all ranks (k from 1 to their number), by radix: four
    histograms of 16 bits each are summed over the ranks, and the values are not sent."""
    unsigned = values ^ _NOT_A_CANDIDATE  # flipping the sign bit turns signed into unsigned order
    prefix = 0
    for shift in (48, 32, 16, 0):
        digit = (unsigned >> shift) & 0xFFFF
        if shift < 48:
            above = (unsigned >> (shift + 16)) & ((1 << (48 - shift)) - 1)
            digit = digit[above == prefix]
        from_top = ranks.sum(torch.bincount(digit, minlength=1 << 16)).flip(0).cumsum(0).cpu()
        index = int(torch.searchsorted(from_top, k))
        if index > 0:
            k -= int(from_top[index - 1])
        prefix = (prefix << 16) | (0xFFFF - index)
    return prefix - (1 << 63)


def _order(key: Tensor, candidate: Tensor, position: Tensor) -> Tensor:
    order = key * _POSITIONS + (_POSITIONS - 1 - position)
    return torch.where(candidate, order, _NOT_A_CANDIDATE)


def float_key(score: Tensor) -> Tensor:
    """int64 with the order of the fp32 score; NaN comes first, so that a broken loss is trained
    on, seen and stopped, not silently left out."""
    score = score.float()
    bits = (score + 0.0).view(torch.int32).long()  # + 0.0: minus zero ties with zero
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(torch.isnan(score), 0x7FFFFFFF, key)


def random_key(sequence_index_B: Tensor, units: int, seed: int, step: int) -> Tensor:
    """Random keys, uniform in 32 bits: a pure function of (seed, step, sequence, unit)."""
    unit = torch.arange(units, device=sequence_index_B.device)
    start = _signed(seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03)
    mixed = mixed_bits(mixed_bits(sequence_index_B[:, None] ^ start) + unit)
    return mixed >> 32


def mixed_bits(x: Tensor) -> Tensor:
    """A hash of int64 numbers: the finaliser of splitmix64 (Steele et al. 2014), whose products
    wrap."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


# ---- the weights ----


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """The weights of one optimizer step, as seen by one rank."""

    weights: list[Tensor]
    """fp32 [B, T] for each of this rank's micro-batches."""
    denominator: Tensor
    """Divisor of the summed loss, over all ranks and micro-batches."""


@torch.no_grad()
def weigh_step(
    batches: Sequence[ScoredBatch],
    config: ObjectiveConfig,
    *,
    step: int = 0,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> StepWeights:
    """Weights of a whole optimizer step: of all micro-batches of this rank, with scope global
    together with those of all other ranks. Every rank must call it, with the same number of
    micro-batches."""
    if not batches:
        raise ValueError("weigh_step needs at least one micro-batch")
    ranks = Ranks.of(group)
    if config.graded:
        rules = weight_rules([b.targets for b in batches], config, ranks)
        pairs = zip(rules, batches, strict=True)
        weights = [rule.weights(b.nll_BT.flatten()).view(b.nll_BT.shape) for rule, b in pairs]
    else:
        weights = [chosen.float() for chosen in select_batches(batches, config, step, ranks)]
    if config.normalise == "all":
        counts = [b.valid_BT.sum() for b in batches]
    else:
        counts = [w.double().sum() if config.graded else (w != 0).sum() for w in weights]
    return StepWeights(weights=weights, denominator=ranks.sum(torch.stack(counts).sum()))


def weight_rules(
    batches: Sequence[Targets], config: ObjectiveConfig, ranks: Ranks
) -> list["WeightRule"]:
    """The rule of each micro-batch, for weightings that every stretch decides for itself."""
    rules = []
    for targets, teacher_BT in zip(batches, filled_guidance(batches, config, ranks), strict=True):
        if teacher_BT is None:
            raise ValueError(f"method {config.method} needs guidance_BT, got None")
        valid, mapped = targets.valid_BT, targets.mapped_BT
        stretch = torch.arange(valid.numel(), device=valid.device)
        if config.by_stretch:
            if targets.stretch_BT is None:
                raise ValueError("compare stretch needs stretch_BT, got None")
            begins = torch.ones_like(mapped)
            begins[:, 1:] = targets.stretch_BT[:, 1:] != targets.stretch_BT[:, :-1]
            stretch = begins.flatten().long().cumsum(0) - 1
        compared = valid if config.unmapped == "mean" else mapped
        columns = (column.flatten() for column in (valid, mapped, compared, teacher_BT, stretch))
        drawn = None if targets.drawn_nll_BT is None else targets.drawn_nll_BT.flatten()
        rules.append(replace(WeightRule(config, *columns), drawn_N=drawn))
    return rules


@dataclass(frozen=True)
class WeightRule:
    """A weighting of tokens in a row, with everything that it reads besides the student's losses.
    Any run of tokens that cuts no stretch can be weighed by itself."""

    config: ObjectiveConfig
    valid_N: Tensor
    mapped_N: Tensor
    compared_N: Tensor
    """The tokens whose loss is compared with the teacher's: the mapped ones, and with `unmapped:
    mean` also the others, each for itself."""
    teacher_N: Tensor
    stretch_N: Tensor
    """int64, ascending: the same number for the tokens of a stretch."""
    drawn_N: Tensor | None = None
    """The student's losses when it drew the tokens, if it has changed since (on_policy)."""

    def __getitem__(self, rows: slice | Tensor) -> "WeightRule":
        columns: dict[str, Any] = {
            name: column[rows] for name, column in vars(self).items() if isinstance(column, Tensor)
        }
        return replace(self, **columns)

    @property
    def _begins_N(self) -> Tensor:
        """The tokens with which a stretch begins, as bool."""
        begins = torch.ones_like(self.valid_N)
        begins[1:] = self.stretch_N[1:] != self.stretch_N[:-1]
        return begins

    @property
    def _number_N(self) -> Tensor:
        return self._begins_N.long().cumsum(0) - 1

    def _losses(self, nll_N: Tensor) -> Tensor:
        """For each token the student's loss on its stretch."""
        return stretch_losses(nll_N, self._number_N, self.mapped_N, len(nll_N))

    def _everywhere(self, compared: Tensor | float) -> Tensor:
        """The weights of all tokens, given those of the tokens that are compared."""
        left_out = self.config.unmapped == "exclude" or self.config.rule.on_policy
        rest = 0.0 if left_out else 1.0
        return torch.where(self.valid_N, torch.where(self.compared_N, compared, rest), 0.0)

    @torch.no_grad()
    def weights(self, nll_N: Tensor) -> Tensor:
        """The weights of the tokens, given their losses."""
        assert self.config.graded_by is not None
        weighting = WEIGHTINGS[self.config.graded_by]
        own, teacher = self._losses(nll_N), self.teacher_N.to(nll_N.dtype)
        if self.drawn_N is None:
            weights = weighting(own, teacher, self.config)
        else:
            drawn = self._losses(self.drawn_N.to(nll_N.dtype))
            weights = clipped(weighting(drawn, teacher, self.config), own, drawn)
        # a loss that is not a number must reach the total, be noticed and stop the run
        return torch.where(self.valid_N & torch.isnan(nll_N), 1.0, self._everywhere(weights))

    def weights_of(self, part: slice, nll_N: Tensor) -> Tensor:
        """The weights of some of the tokens, whose losses are `nll_N`."""
        return self[part].weights(nll_N)

    def cut_chunks(self, ends: list[int]) -> list[int]:
        """The ends of chunks, moved so that no stretch is cut."""
        if not self.config.by_stretch or len(ends) < 2:
            return ends
        position = torch.arange(len(self.valid_N), device=self.valid_N.device)
        began = torch.where(self._begins_N, position, 0).cummax(0).values
        inner = began[torch.tensor(ends[:-1], device=position.device)].tolist()
        return sorted({*(end for end in inner if end > 0), ends[-1]})

    @torch.no_grad()
    def likelihood_loss(self, nll_N: Tensor) -> tuple[Tensor, Tensor]:
        """The value of alm: (the loss whose derivative the `likelihood_weights` are, the mean over
        stretches of tau times the divergence)."""
        compared, number, tau = self.compared_N, self._number_N, self.config.temperature
        tokens = torch.zeros_like(nll_N).scatter_add(0, number, compared.to(nll_N.dtype))
        tokens = tokens.gather(0, number)[compared]
        own = self._losses(nll_N)[compared].clamp(min=_SMALLEST_NATS)
        teacher = self.teacher_N[compared].to(nll_N.dtype)
        a, not_a = torch.exp(-teacher / tau), -torch.expm1(-teacher / tau)
        not_b = -torch.expm1(-own / tau)
        kl = a * (own - teacher) / tau + torch.special.xlogy(not_a, not_a / not_b)
        # every token of a stretch carries its part
        distance, stretches = tau * (kl / tokens).sum(), (1 / tokens).sum()
        cross_entropy = (nll_N * self._everywhere(self.config.cross_entropy)).sum()
        loss = self.config.distill_weight * distance + cross_entropy
        return loss, distance / stretches.clamp(min=1)

    def reverse_divergence(self, nll_N: Tensor) -> Tensor:
        """The sum over stretches of log p - log q, whose expectation is the reverse divergence.
        Every token of a stretch carries its part."""
        compared, number = self.compared_N, self._number_N
        tokens = torch.zeros_like(nll_N).scatter_add(0, number, compared.to(nll_N.dtype))
        tokens = tokens.gather(0, number)[compared]
        teacher = self.teacher_N[compared].to(nll_N.dtype)
        return ((teacher - self._losses(nll_N)[compared]) / tokens).sum()


def reducible_weights(own: Tensor, teacher: Tensor, config: ObjectiveConfig) -> Tensor:
    """Weights by the share of the student's loss that the teacher shows to be reducible."""
    share = (1.0 - teacher / own.clamp(min=_SMALLEST_NATS)).clamp(min=0.0)
    return config.floor + (1.0 - config.floor) * share


def likelihood_weights(own: Tensor, teacher: Tensor, config: ObjectiveConfig) -> Tensor:
    """Approximate Likelihood Matching (arXiv 2503.20083) as a weight: with a = p_T^(1/tau) and
    b = p_S^(1/tau) of a stretch, the derivative by S of tau * KL(Bernoulli(a) || Bernoulli(b)) is
    (a - b) / (1 - b) = 1 - (1 - a) / (1 - b), the same for all its tokens; negative where the
    student is surer than the teacher. The factor tau makes lambda weigh the same for every tau."""
    tau = config.temperature
    surprise = torch.expm1(-teacher / tau) / torch.expm1(-own.clamp(min=_SMALLEST_NATS) / tau)
    pull = 1.0 - surprise
    if config.positive:
        pull = pull.clamp(min=0.0)
    return config.cross_entropy + config.distill_weight * pull


def advantage_weights(own: Tensor, teacher: Tensor, config: ObjectiveConfig) -> Tensor:
    """The gradient of the reverse divergence KL(student || teacher) of what was drawn, as a weight:
    by the score function it is E[(log p - log q) * d log p], where p and q are the two
    probabilities of a stretch. Every token of the stretch gets all of it, since log p is the sum of
    theirs. Positive where the teacher finds the stretch likelier than the student does."""
    return own - teacher


def clipped(weights: Tensor, own: Tensor, drawn: Tensor) -> Tensor:
    """Weights of stretches that were drawn from an earlier student, by PPO's clipped ratio: times p
    now over p when it was drawn, and 0 where that has moved by `CLIP` in the weight's direction."""
    ratio = torch.exp(drawn - own)
    beyond = torch.where(weights > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
    return torch.where(beyond, 0.0, weights * ratio)


# (student's loss, teacher's loss, config) of tokens in a row, or of their stretches -> weights
Weighting = Callable[[Tensor, Tensor, ObjectiveConfig], Tensor]
WEIGHTINGS: dict[str, Weighting] = {
    "reducible": reducible_weights,
    "likelihood": likelihood_weights,
    "advantage": advantage_weights,
}
"""The weightings that leave no token out, by their names in `objective.weighting`, `METHODS` or
`DIVERGENCES`."""
