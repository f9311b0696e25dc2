"""The loss of every method: `objective_loss` for a micro-batch that is already shifted, and
`guided_loss` for the batches of any trainer."""

import bisect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vocagnolm.base.ranks import Ranks
from vocagnolm.errors import ObjectiveError
from vocagnolm.objective.distill import Teacher, distil, distil_reference
from vocagnolm.objective.head import (
    IGNORE_INDEX,
    TORCH_ROWS,
    Bucket,
    BucketRows,
    Head,
    Implementation,
    RowLosses,
    RowOperations,
    SoftRows,
    WeighRows,
    Workspace,
    isolated,
    row_losses,
    row_operations,
    soft_distance,
    summed_loss,
    token_nll,
    weighted_sum,
)
from vocagnolm.objective.on_policy import BUCKETS, bucket_distance
from vocagnolm.objective.selection import (
    ScoredBatch,
    Targets,
    WeightRule,
    compared,
    select_batches,
    weight_rules,
)
from vocagnolm.recipe.sections import ObjectiveConfig

FLOAT16 = (
    "The student's weights are float16, in which small gradients vanish and large ones overflow: "
    "it would train to NaN. Load it in float32 (from_pretrained(..., dtype=torch.float32), "
    "student.dtype: float32); for fast arithmetic train with bf16=True or fp16=True."
)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Facts for one micro-batch that were decided over all micro-batches of its step."""

    denominator: Tensor | float | None = None
    """Divisor of the summed loss. None: this micro-batch's count, or with scope global the count of
    all ranks."""
    weights_BT: Tensor | None = None
    """Weights of the tokens, if already decided (second pass of scope global, see `weigh_step`);
    bool or float."""
    nll_BT: Tensor | None = None
    """The losses on which the weights are based; phase 1 is then skipped."""
    kept: int | None = None
    """Number of tokens of this micro-batch that count, if known without its losses (`count_kept`);
    the host then does not wait for the device."""
    micro_batches: int = 1
    """Number of micro-batches of the step on all ranks, for means over them."""


def objective_loss(
    hidden_BTD: Tensor,
    head: Head | None,
    targets: Targets,
    config: ObjectiveConfig | None = None,
    *,
    step: int = 0,
    teacher: Teacher | None = None,
    decided: Decided | None = None,
    impl: Implementation = "auto",
    group: "torch.distributed.ProcessGroup | None" = None,
) -> "ObjectiveOutput":
    """Loss of one micro-batch, with gradients for the hidden states and the head.

        hidden = model.model(ids[:, :-1]).last_hidden_state
        targets = Targets(labels_BT=ids[:, 1:], guidance_BT=guidance[:, 1:])
        output = objective_loss(hidden, Head(weight=model.lm_head.weight), targets)
        output.loss.backward()
        output.nll_BT, output.selected_BT    # the student's loss on every token, and which count

    hidden_BTD: last hidden states, after the final norm; `hidden[b, t]` predicts
        `targets.labels_BT[b, t]`.
    head: None: `hidden_BTD` holds the logits themselves, which takes more memory.
    targets: labels (-100 where there is nothing to predict) and guidance (NaN where there is none);
        for distill also the teacher's alternatives in the student's vocabulary. For rows of
        different lengths use `Targets.from_rows`.
    config: the method; default: guided, 40 % kept.
    step: for methods that use random numbers; give every call of a run a different number
        (optimizer step * accumulation + micro-batch), or the indices of the sequences in `targets`.
    teacher: for kld and uld.
    decided: what the micro-batches of a step share, see below.
    impl: `reference` holds full logits, `chunked` is torch on any device, `fused` uses Triton on
        CUDA; `auto` is fused where it can run, otherwise chunked.

    Accumulation. For a step of several micro-batches, give each the same `decided.denominator`, the
    count over all of them (and all ranks), and add up the losses: then 1 x 8 sequences and 8 x 1
    give the same step. With `normalise: all` it is the number of labels that are not ignored, which
    is known beforehand. DDP and FSDP average gradients over ranks: multiply the loss by the number
    of ranks if the denominator counts all of them.

    Scope global. With one micro-batch per step, call this function on all ranks: it exchanges
    counts. With accumulation, call `student_nll` for each micro-batch, `weigh_step` over all, then
    this function with `decided`.

    If nothing is selected, the loss and the gradients are exactly 0. The gradients are computed in
    the forward pass: call backward once.
    """
    config = config or ObjectiveConfig()
    decided = decided or Decided()
    _check(hidden_BTD, head, targets, decided)
    ranks, entropy_BT = Ranks.of(group), None
    if config.rule.distance is not None and config.distill_weight > 0:
        if teacher is None:
            raise ValueError(f"method {config.method} needs an online teacher, got teacher=None")
        if head is None:
            raise ValueError(f"method {config.method} needs hidden states: pass their head")
        function = distil_reference if impl == "reference" else distil
        total, nll_BT, stats = function(hidden_BTD, head, targets.labels_BT, teacher, config)
        weights_BT = targets.valid_BT
    else:
        weighed = _Weighed(targets, config, decided, step, ranks)
        if head is None or impl == "reference":
            logits_BTV = hidden_BTD.float() if head is None else head.logits(hidden_BTD)
            sums = weighed.with_full_logits(logits_BTV)
        else:
            sums = weighed.in_chunks(hidden_BTD, head, row_operations(impl, hidden_BTD))
        total, nll_BT, weights_BT, above_BT, entropy_BT = sums
        stats = _soft_stats(above_BT, nll_BT, weights_BT, targets)
        if weighed.rule is not None and config.graded_by == "likelihood":
            # the weights are the derivative of this value
            value, stats["distill_loss"] = weighed.rule.likelihood_loss(nll_BT.flatten())
            total = total + (value.to(total.dtype) - total).detach()
        if weighed.rule is not None and config.graded_by == "advantage":
            # whose expectation has this gradient
            value = weighed.rule.reverse_divergence(nll_BT.flatten())
            total = total + (value.to(total.dtype) - total).detach()
    weights_BT, denominator = weights_BT.float(), decided.denominator
    if denominator is None:
        counted = targets.valid_BT
        if config.normalise == "selected":
            counted = weights_BT if config.graded else weights_BT != 0
        denominator = counted.sum()
        if config.scope == "global":
            denominator = ranks.sum(denominator)
    divisor = torch.as_tensor(denominator, device=total.device).to(total.dtype)
    if entropy_BT is not None:  # so that the mean over micro-batches is that of the step's tokens
        share = decided.micro_batches / divisor.clamp(min=1)
        stats["entropy"] = entropy_BT[targets.valid_BT].sum() * share
    return ObjectiveOutput(
        loss=total / torch.where(divisor > 0, divisor, 1.0),
        nll_BT=nll_BT.detach(),
        weights_BT=weights_BT,
        denominator=divisor,
        targets=targets,
        distill_stats=stats,
    )


_WeightedSum = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""(the weighted sum of the losses, with gradient; nll; weights; by how much each loss exceeds the
label's nll, or None without soft targets; the student's entropy, or None where it is not
measured)."""


class _Weighed:
    """A micro-batch whose tokens are weighted by their losses."""

    def __init__(
        self, targets: Targets, config: ObjectiveConfig, decided: Decided, step: int, ranks: Ranks
    ):
        self.targets, self.config, self.decided = targets, config, decided
        self.step, self.ranks = step, ranks
        self.soft = _soft_targets(targets, config, ranks)
        self.rule: WeightRule | None = None
        """The rule by which every stretch decides the weights of its own tokens, if it does."""
        if config.graded and decided.weights_BT is None:
            (self.rule,) = weight_rules([targets], config, ranks)

    def weights(self, losses_BT: Tensor) -> Tensor:
        """The weights of all tokens, from their losses, unless they are decided already."""
        if self.decided.weights_BT is not None:
            return torch.where(self.targets.valid_BT, self.decided.weights_BT, 0)
        if self.rule is not None:
            return self.rule.weights(losses_BT.flatten()).view(losses_BT.shape)
        scored = ScoredBatch(self.targets, losses_BT)
        return select_batches([scored], self.config, self.step, self.ranks)[0]

    def with_full_logits(self, logits_BTV: Tensor) -> _WeightedSum:
        """The weighted sum by all logits at once: the reference."""
        labels_BT, above_BT = self.targets.labels_BT, None
        nll_BT = token_nll(logits_BTV, labels_BT).detach()
        weights_BT = self.weights(nll_BT)
        total = weighted_sum(logits_BTV, labels_BT, weights_BT)
        if self.soft is not None:
            shape = (*nll_BT.shape, -1)
            ids, p = (t.view(shape) for t in self.soft.rows(slice(None), nll_BT.flatten())[:2])
            if self.config.towards is None:
                above_BT = soft_distance(logits_BTV, labels_BT, ids, p)
            else:
                above_BT = bucket_distance(logits_BTV, labels_BT, ids, p, self.config.divergence)
            total = total + (above_BT * weights_BT).sum()
        entropy_BT = None
        if self.config.rule.on_policy:
            log_p = torch.log_softmax(logits_BTV.detach(), dim=-1)
            entropy_BT = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1)
        return total, nll_BT, weights_BT, above_BT, entropy_BT

    def in_chunks(self, hidden_BTD: Tensor, head: Head, rows: RowOperations) -> _WeightedSum:
        """The weighted sum in chunks of tokens: in one phase if the weight of a token does not
        depend on the losses of all others, else in two."""
        targets, config, decided, rule = self.targets, self.config, self.decided, self.rule
        labels_BT, nll_BT = targets.labels_BT, decided.nll_BT
        hidden_ND, labels_N = hidden_BTD.flatten(0, 1), labels_BT.flatten().clamp(min=0)
        losses: RowLosses | None = None
        if rule is not None:
            # A stretch's weights are known as soon as its logits are: no token passes the head
            # twice. Its tokens stay together, also those that end up at 0.
            nll_BT, counted_BT = None, targets.valid_BT
        elif config.selects_all and decided.weights_BT is None:
            weights_BT = self.weights(targets.valid_BT.float())  # whatever the losses are
            counted_BT = weights_BT != 0
        else:
            if nll_BT is None:
                losses = _phase_one(hidden_ND, head, labels_N, rows)
                nll_BT = _where_valid(losses.nll_N, labels_BT)
            weights_BT = self.weights(nll_BT)
            counted_BT = weights_BT != 0
        # how many tokens have a weight, only the device knows unless `decided` says it
        mask, count = counted_BT.flatten(), decided.kept
        index_K = mask.nonzero() if count is None else mask.nonzero_static(size=count)
        index_K = index_K.squeeze(1)
        rule_K = None if rule is None else rule[index_K]
        soft_K = None if self.soft is None else self.soft[index_K]
        together = soft_K.share if rule_K is None and soft_K is not None else rule_K
        weigh: WeighRows | None = None if rule_K is None else rule_K.weights_of
        if rule is None and config.graded and weights_BT.dtype != torch.bool:
            weights_K = weights_BT.flatten()[index_K]

            def weigh(part: slice, nll: Tensor) -> Tensor:
                return weights_K[part].to(nll.dtype)

        summed = summed_loss(
            hidden_ND,
            head,
            labels_N,
            index_K,
            rows,
            losses,
            weigh=weigh,
            soften=None if soft_K is None else soft_K.rows,
            cut_chunks=None if together is None else together.cut_chunks,
            with_entropy=config.rule.on_policy,
        )

        def everywhere(values_K: Tensor) -> Tensor:
            """Values of the K tokens at their positions, 0 elsewhere."""
            whole = torch.zeros(labels_BT.numel(), dtype=values_K.dtype, device=values_K.device)
            return whole.index_copy_(0, index_K, values_K.detach()).view(labels_BT.shape)

        if rule is not None and summed.weights_K is not None:
            weights_BT = everywhere(summed.weights_K)
        if nll_BT is None:
            nll_BT = everywhere(summed.nll_K)
        above_BT = None if summed.distance_K is None else everywhere(summed.distance_K)
        entropy_BT = None if summed.entropy_K is None else everywhere(summed.entropy_K)
        return summed.total, nll_BT, weights_BT, above_BT, entropy_BT


@dataclass(frozen=True)
class _Soft:
    """Targets beside the label, of tokens in a row. The mix is the same for all tokens, or
    multiplied by a share that each token's own loss decides."""

    ids_NK: Tensor
    p_NK: Tensor
    mix: float
    share: WeightRule | None
    """The rule that gives each token's share of the mix; None: all of it."""
    bucket: Bucket | None = None
    """on_policy: the divergence from the targets, in which the label is a token like others."""

    def __getitem__(self, index: Tensor) -> "_Soft":
        share = None if self.share is None else self.share[index]
        return _Soft(self.ids_NK[index], self.p_NK[index], self.mix, share, self.bucket)

    def rows(self, part: slice, nll: Tensor) -> SoftRows | BucketRows:
        """The targets of some of the tokens, whose losses are known now."""
        if self.bucket is not None:
            return BucketRows(self.ids_NK[part].long(), self.p_NK[part], self.bucket)
        weights = self.p_NK[part].to(nll.dtype) * self.mix
        if self.share is not None:
            weights = weights * self.share.weights_of(part, nll)[:, None]
        return SoftRows(self.ids_NK[part].long(), weights)


def _soft_targets(targets: Targets, config: ObjectiveConfig, ranks: Ranks) -> _Soft | None:
    """The targets beside the labels; None if there are none, and the loss is that of plain training
    to the last bit."""
    bucket = None
    if config.towards is not None:
        if not config.towards.bucket:
            return None
        bucket = BUCKETS[config.divergence]
    elif not config.rule.alternatives or config.mix == 0.0:
        return None
    ids, p = targets.soft_ids_BTK, targets.soft_p_BTK
    if ids is None or p is None:
        raise ValueError(f"method {config.method} needs soft_ids_BTK and soft_p_BTK, got None")
    share = None
    if config.mix_by == "reducible" and bucket is None:
        by_loss = replace(config, weighting="reducible", floor=0.0, unmapped="exclude")
        (share,) = weight_rules([targets], by_loss, ranks)
    return _Soft(ids.flatten(0, 1), p.flatten(0, 1), config.mix, share, bucket)


@torch.no_grad()
def _soft_stats(
    above_BT: Tensor | None, nll_BT: Tensor, weights_BT: Tensor, targets: Targets
) -> dict[str, Tensor]:
    """Measures of soft targets: the mean loss of the kept tokens against their targets, and the
    probability that the teacher's alternatives take from their labels."""
    if above_BT is None or targets.soft_p_BTK is None:
        return {}
    kept = weights_BT != 0
    count = kept.sum().clamp(min=1)
    mass = torch.where(kept, targets.soft_p_BTK.float().sum(-1), 0.0)
    return {
        "distill_loss": torch.where(kept, nll_BT + above_BT.detach(), 0.0).sum() / count,
        "target_mass": mass.sum() / count,
    }


# ---- in anybody's trainer ----

COLUMNS: dict[str, tuple[str, float]] = {
    "guidance": ("guidance_BT", float("nan")),
    "stretch": ("stretch_BT", 0),
    "target_ids": ("soft_ids_BTK", 0),
    "target_p": ("soft_p_BTK", 0.0),
    "drawn_nll": ("drawn_nll_BT", 0.0),
}
"""Columns of a dataset (`vocagnolm.guide`) -> (the field of `Targets`, the padding)."""


def guided_loss(
    logits: Tensor,
    labels: Tensor,
    columns: Mapping[str, Tensor] | None = None,
    config: ObjectiveConfig | None = None,
    *,
    head: Head | None = None,
    num_items_in_batch: Tensor | int | None = None,
    step: int | None = None,
    **unknown: Any,
) -> Tensor:
    """The loss of a training loop whose batches `GuidedCollator` has made:

        loss = guided_loss(model(batch["input_ids"]).logits, batch["labels"], batch)

    logits: or the last hidden states together with their `head`; then all logits are never held at
        once.
    labels: as in transformers: `labels[b, t]` is the token at t, which position t - 1 predicts.
    columns: `guidance`, and for distill `target_ids` and `target_p`, at the same positions as the
        labels.
    config: the method; default: guided, 40 % kept.
    num_items_in_batch: number of labels of the whole step, over all micro-batches and processes
        (`count_items`). The losses of the micro-batches then add up to the step's. DDP and FSDP
        average gradients over processes: multiply by their number, as transformers' Trainer does.
    step: for methods that use random numbers.

    Without gradients (in an evaluation) it is the mean loss over all tokens, whatever the method.
    """
    if not isinstance(logits, Tensor) or unknown:
        raise ObjectiveError(
            "guided_loss was called as a Trainer's compute_loss_func or as a model's "
            "loss_function, which do not get the guidance in every trainer. Use GuidedTrainer, or "
            "class T(GuidedTrainerMixin, SFTTrainer)."
        )
    how: Any = {"head": head, "num_items_in_batch": num_items_in_batch, "step": step}
    return guided_output(logits, labels, columns or {}, config, **how).loss


def guided_output(
    logits: Tensor,
    labels: Tensor,
    columns: Mapping[str, Tensor],
    config: ObjectiveConfig | None = None,
    *,
    head: Head | None = None,
    num_items_in_batch: Tensor | int | None = None,
    step: int | None = None,
) -> "ObjectiveOutput":
    """`guided_loss` with everything that `objective_loss` gives beside the loss."""
    config = config or ObjectiveConfig()
    device = logits.device.type
    if not torch.is_grad_enabled():
        config = ObjectiveConfig(method="cpt")
    elif logits.dtype == torch.float16 and not torch.is_autocast_enabled(device):
        raise ObjectiveError(FLOAT16)

    if config.rule.distance is not None:
        raise ObjectiveError(
            f"method {config.method} compares whole distributions, which no column holds: "
            "`vocagnolm train` keeps a teacher in memory for it."
        )
    bucket = config.towards is not None and config.towards.bucket
    advantage = config.towards is not None and not bucket
    needed = ["guidance"] * (config.rule.guidance or advantage) + ["stretch"] * config.by_stretch
    needed += ["target_ids", "target_p"] * (config.rule.alternatives or bucket)
    if missing := [column for column in needed if columns.get(column) is None]:
        raise ObjectiveError(
            f"method {config.method} needs the columns {', '.join(needed)}, and the batch has no "
            f"{', '.join(missing)}. Make them with vocagnolm.guide, collate with GuidedCollator, "
            "and set remove_unused_columns=False in the trainer's arguments."
        )

    def moved(values: Tensor, fill: float) -> Tensor:
        """Entry t of the result is entry t + 1 of the values."""
        return torch.cat([values[:, 1:], torch.full_like(values[:, :1], fill)], dim=1)

    targets = Targets(
        labels_BT=moved(labels, IGNORE_INDEX),
        **{
            name: moved(columns[column], fill)
            for column, (name, fill) in COLUMNS.items()
            if columns.get(column) is not None
        },
    )
    if step is None and (config.rule.ranking == "chance" or config.by_chance):
        raise ObjectiveError(f"method {config.method} uses random numbers: pass step=")
    if config.at(0.0) is not config:
        raise ObjectiveError("mix_end changes the mix during a run: pass config.at(progress)")
    if num_items_in_batch is not None and (
        config.reaches_over_step or config.normalise == "selected"
    ):
        count = targets.valid_BT.sum()
        if config.scope == "global":
            count = Ranks.of().sum(count)
        if int(num_items_in_batch) != int(count):
            raise ObjectiveError(
                f"objective.scope {config.scope} with objective.normalise {config.normalise} is "
                f"decided over a whole step of {int(num_items_in_batch)} labels, and this "
                f"micro-batch has {int(count)}. Use scope batch or sequence and normalise all, or "
                "`vocagnolm train`, which reads a step ahead."
            )
        num_items_in_batch = None
    decided = Decided(denominator=num_items_in_batch)
    return objective_loss(logits, head, targets, config, step=step or 0, decided=decided)


def count_items(batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """The number of predicted labels in the micro-batches of a step, on all processes: the
    `num_items_in_batch` of `guided_loss`."""
    counts = [(batch["labels"][:, 1:] != IGNORE_INDEX).sum() for batch in batches]
    return Ranks.of().sum(torch.stack(counts).sum())


@torch.no_grad()
def student_nll(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, *, impl: Implementation = "auto"
) -> Tensor:
    """The nll of every token in fp32, without gradient; 0 where the label is ignored."""
    return token_losses(hidden_BTD, head, labels_BT, impl=impl)[0]


@torch.no_grad()
def token_losses(
    hidden_BTD: Tensor,
    head: Head,
    labels_BT: Tensor,
    *,
    impl: Implementation = "auto",
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(nll, entropy or None) of every token in fp32, without gradient; 0 where ignored. Works for
    any model: an online teacher's guidance and `entropy_BT` are computed here."""
    _check(hidden_BTD, head, Targets(labels_BT=labels_BT))
    labels_N = labels_BT.flatten().clamp(min=0)
    hidden_ND = hidden_BTD.flatten(0, 1)
    if impl == "reference":
        x = torch.nn.functional.linear(hidden_ND, head.weight)
        losses = TORCH_ROWS.losses(x, labels_N, head.transform, with_entropy)
    else:
        rows = row_operations(impl, hidden_BTD)
        losses = _phase_one(hidden_ND, head, labels_N, rows, with_entropy)
    nll_BT = _where_valid(losses.nll_N, labels_BT)
    if losses.entropy_N is None:
        return nll_BT, None
    return nll_BT, _where_valid(losses.entropy_N, labels_BT)


def _where_valid(value_N: Tensor, labels_BT: Tensor) -> Tensor:
    return torch.where(labels_BT != IGNORE_INDEX, value_N.view(labels_BT.shape), 0.0)


def _phase_one(
    hidden_ND: Tensor, head: Head, labels_N: Tensor, rows: RowOperations, with_entropy: bool = False
) -> RowLosses:
    with isolated(hidden_ND) as dtype:
        work = Workspace.of(hidden_ND, head, rows, dtype)
        return row_losses(work, labels_N, with_entropy=with_entropy)


def _check(
    hidden_BTD: Tensor, head: Head | None, targets: Targets, decided: Decided | None = None
) -> None:
    width = hidden_BTD.shape[-1] if head is None else head.weight.shape[1]
    if hidden_BTD.dim() != 3 or hidden_BTD.shape[-1] != width:
        what = "logits" if head is None else "hidden_BTD"
        raise ValueError(f"{what} must be [B, T, {width}], got {list(hidden_BTD.shape)}")
    shape = hidden_BTD.shape[:2]
    for name, tensor in {**vars(targets), **vars(decided or Decided())}.items():
        if name.endswith(("_BT", "_BTK")) and tensor is not None and tensor.shape[:2] != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if head is not None and hasattr(head.weight, "full_tensor"):
        raise ValueError(
            "Head.weight is a sharded DTensor; call the objective inside the forward of the "
            "FSDP root module, where the parameters are gathered, or pass a gathered tensor"
        )


# ---- what comes out ----

SUMS = ("nll", "nll_kept", "kept", "weight", "predicted", "mapped")
QUANTILES = (0.1, 0.5, 0.9)
# The excess in a histogram: quantiles of a step are those of all its tokens, to this width.
_STEP_NATS = 0.02
_REACH_NATS = 20.0
BINS = round(2 * _REACH_NATS / _STEP_NATS) + 1


@torch.no_grad()
def batch_sums(nll_BT: Tensor, weights_BT: Tensor, targets: Targets) -> Tensor:
    """The sums behind the measures of a micro-batch: float32 [len(SUMS) + BINS] on the device.
    Counts are exact up to 16 million tokens."""
    kept = weights_BT != 0
    mapped = targets.mapped_BT if targets.guidance_BT is not None else torch.zeros_like(kept)
    sums = torch.stack(
        [
            torch.where(targets.valid_BT, nll_BT, 0.0).sum(),
            torch.where(kept, nll_BT, 0.0).sum(),
            kept.sum(),
            weights_BT.sum(),
            targets.valid_BT.sum(),
            mapped.sum(),
        ]
    ).float()
    histogram = torch.zeros(BINS, device=nll_BT.device)
    if targets.guidance_BT is not None:
        both = compared(nll_BT, targets)
        excess = (both.own_BT - both.teacher_BT).nan_to_num(0.0)
        bins = ((excess + _REACH_NATS) / _STEP_NATS).round().clamp(0, BINS - 1).long()
        histogram = histogram.scatter_add(0, bins.flatten(), mapped.flatten().float())
    return torch.cat([sums, histogram])


def measures(sums: list[float]) -> dict[str, float]:
    """The measures of the tokens whose `batch_sums` were added up."""
    total = dict(zip(SUMS, sums, strict=False))
    predicted = max(total["predicted"], 1.0)
    values = {
        "nll_kept": total["nll_kept"] / max(total["kept"], 1.0),
        "nll_all": total["nll"] / predicted,
        "kept_share": total["kept"] / predicted,
        "weight_share": total["weight"] / predicted,
        "mapped_share": total["mapped"] / predicted,
    }
    below = list(itertools.accumulate(sums[len(SUMS) :]))
    if below[-1]:
        for q in QUANTILES:
            index = bisect.bisect_right(below, round(q * (below[-1] - 1)))
            values[f"excess_p{round(100 * q)}"] = index * _STEP_NATS - _REACH_NATS
    return values


@dataclass(frozen=True, kw_only=True)
class ObjectiveOutput:
    """The result of `objective_loss`. `loss` has the gradient; everything else is detached."""

    loss: Tensor
    nll_BT: Tensor
    """Student nll in nats, fp32; 0 where the label is ignored."""
    weights_BT: Tensor
    """fp32: the weight of each token in the loss; 0 and 1 where tokens are selected."""
    denominator: Tensor
    """Divisor of the summed loss; 0 if there was nothing."""
    targets: Targets
    distill_stats: dict[str, Tensor] = field(default_factory=dict)

    @property
    def selected_BT(self) -> Tensor:
        """The tokens that are trained on, as bool."""
        return self.weights_BT != 0

    @cached_property
    def sums(self) -> Tensor:
        """Sums for logging that add up over micro-batches and ranks (`measures`). They stay on the
        device, without waiting."""
        return batch_sums(self.nll_BT, self.weights_BT, self.targets)

    @cached_property
    def stats(self) -> dict[str, float]:
        """Metrics for the training log: nll_kept, nll_all, kept_share, weight_share, mapped_share,
        with guidance excess_p10, excess_p50, excess_p90; distill, kld, uld and alm add
        distill_loss, distill target_mass, kld and uld aligned_share, kld teacher_dropped_mass.
        Reading it waits for the device."""
        return measures(self.sums.tolist()) | {
            name: float(value) for name, value in self.distill_stats.items()
        }
