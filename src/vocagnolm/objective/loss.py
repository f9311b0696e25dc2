"""The door: one loss for every method."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vocagnolm.objective import reference, two_phase
from vocagnolm.objective.batch import IGNORE_INDEX, Decided, Targets, Teacher
from vocagnolm.objective.config import ObjectiveConfig
from vocagnolm.objective.distill import distil, distil_reference
from vocagnolm.objective.head import (
    TORCH_ROWS,
    Head,
    Implementation,
    RowLosses,
    RowOperations,
    SoftRows,
    row_operations,
)
from vocagnolm.objective.output import ObjectiveOutput
from vocagnolm.objective.selection import Ranks, ScoredBatch, filled_guidance, select_batches
from vocagnolm.objective.weighting import FlatTargets


def objective_loss(
    hidden_BTD: Tensor,
    head: Head,
    targets: Targets,
    config: ObjectiveConfig | None = None,
    *,
    step: int = 0,
    teacher: Teacher | None = None,
    decided: Decided | None = None,
    impl: Implementation = "auto",
    group: "torch.distributed.ProcessGroup | None" = None,
) -> ObjectiveOutput:
    """Loss of one micro-batch, with gradient for the hidden states and the head.

        hidden = model.model(ids[:, :-1]).last_hidden_state
        targets = Targets(labels_BT=ids[:, 1:], guidance_BT=guidance[:, 1:])
        output = objective_loss(hidden, Head(weight=model.lm_head.weight), targets)
        output.loss.backward()
        output.nll_BT, output.selected_BT    # the student's loss of every token, and which count

    hidden_BTD: last hidden states, after the final norm; `hidden[b, t]` predicts
        `targets.labels_BT[b, t]`.
    targets: labels, -100 where there is nothing to predict, and the guidance, NaN where there is
        none; for distill the teacher's alternatives in the student's vocabulary. Rows of unequal
        length: `Targets.from_rows`.
    config: the method; guided, 40 % kept, where it is left out.
    step: for methods that draw at random; give every call of a run another number (optimiser
        step * accumulation + micro-batch), or the sequences' places in `targets`.
    teacher: for kld and uld.
    decided: what the micro-batches of a step share, see below.
    impl: `reference` holds full logits, `chunked` is torch on any device, `fused` uses Triton on
        CUDA; `auto` is fused where it can run, else chunked.

    Accumulation. For a step of several micro-batches give each the same `decided.denominator`, the
    count over all of them (and all ranks), and add up the losses: then 1 x 8 sequences and 8 x 1
    give the same step. With `normalise: all` it is the number of labels that are not ignored,
    which is known beforehand. DDP and FSDP average gradients over ranks: multiply the loss by the
    number of ranks when the denominator counts all of them.

    Scope global. With one micro-batch a step, call this on all ranks: it exchanges counts. With
    accumulation: `student_nll` for each micro-batch, `weigh_step` over all, then this function
    with `decided`.

    Nothing selected: the loss is exactly 0 and so are the gradients. The gradients are made in
    the forward pass: call backward once.
    """
    config = config or ObjectiveConfig()
    decided = decided or Decided()
    _check(hidden_BTD, head, targets, decided)
    if config.rule.distribution and config.distill_weight > 0:
        if teacher is None:
            raise ValueError(f"method {config.method} needs an online teacher, got teacher=None")
        function = distil_reference if impl == "reference" else distil
        done = function(hidden_BTD, head, targets.labels_BT, teacher, config)
        weights = targets.valid_BT.float()
        return _output(done.total, done.nll_BT, weights, targets, config, decided, done.stats)
    ranks = Ranks.of(group)
    if config.graded and decided.weights_BT is None:
        return _graded(hidden_BTD, head, targets, config, decided, impl, ranks)
    return _chosen(hidden_BTD, head, targets, config, decided, impl, step, ranks)


def _chosen(
    hidden_BTD: Tensor,
    head: Head,
    targets: Targets,
    config: ObjectiveConfig,
    decided: Decided,
    impl: Implementation,
    step: int,
    ranks: Ranks,
) -> ObjectiveOutput:
    """Weights that are decided already, or a choice of tokens."""
    labels_BT, nll_BT = targets.labels_BT, decided.nll_BT

    def choose(losses_BT: Tensor) -> Tensor:
        if decided.weights_BT is not None:
            return torch.where(targets.valid_BT, decided.weights_BT, 0)
        return select_batches([ScoredBatch(targets, losses_BT)], config, step, ranks)[0]

    soft = _soft_targets(targets, config, ranks)
    if impl == "reference":
        logits = head.logits(hidden_BTD)
        nll_BT = reference.token_nll(logits, labels_BT).detach()
        weights_BT = choose(nll_BT)
        total = reference.weighted_sum(logits, labels_BT, weights_BT)
        above_BT = _soft_reference(logits, targets, nll_BT, soft)
        if above_BT is not None:
            total = total + (above_BT * weights_BT).sum()
        stats = _soft_stats(above_BT, nll_BT, weights_BT, targets)
        return _output(total, nll_BT, weights_BT.float(), targets, config, decided, stats, ranks)
    hidden_ND, labels_N = hidden_BTD.flatten(0, 1), labels_BT.flatten().clamp(min=0)
    rows = row_operations(impl, hidden_BTD)
    losses: RowLosses | None = None
    if config.selects_all and decided.weights_BT is None:
        weights_BT = choose(targets.valid_BT.float())  # whatever the losses are: one phase
    else:
        if nll_BT is None:
            losses = _phase_one(hidden_ND, head, labels_N, rows)
            nll_BT = _where_valid(losses.nll_N, labels_BT)
        weights_BT = choose(nll_BT)
    index_K = _places(weights_BT != 0, decided.kept)
    weigh = None
    if weights_BT.dtype != torch.bool and config.graded:
        weigh = _Known(weights_BT.flatten()[index_K])
    soften = None if soft is None else soft[index_K]
    summed = two_phase.summed_loss(hidden_ND, head, labels_N, index_K, rows, losses, weigh, soften)
    if nll_BT is None:
        nll_BT = _scattered(summed.nll_K, index_K, labels_BT)
    above_BT = _scattered_or_none(summed.distance_K, index_K, labels_BT)
    stats = _soft_stats(above_BT, nll_BT, weights_BT, targets)
    return _output(summed.total, nll_BT, weights_BT.float(), targets, config, decided, stats, ranks)


def _graded(
    hidden_BTD: Tensor,
    head: Head,
    targets: Targets,
    config: ObjectiveConfig,
    decided: Decided,
    impl: Implementation,
    ranks: Ranks,
) -> ObjectiveOutput:
    """Weights that each stretch decides for itself, in one phase: they are known as soon as the
    logits of its tokens are, so that no token passes the head twice."""
    labels_BT = targets.labels_BT
    (teacher_BT,) = filled_guidance([targets], config, ranks)
    flat = FlatTargets.of(targets, teacher_BT, config)
    soft = _soft_targets(targets, config, ranks)
    if impl == "reference":
        logits = head.logits(hidden_BTD)
        nll_BT = reference.token_nll(logits, labels_BT).detach()
        weights_BT = flat.weights(nll_BT.flatten(), config).view(labels_BT.shape)
        total = reference.weighted_sum(logits, labels_BT, weights_BT)
        above_BT = _soft_reference(logits, targets, nll_BT, soft)
        if above_BT is not None:
            total = total + (above_BT * weights_BT).sum()
    else:
        # the tokens of a stretch stay together: all of them, also those that end up at 0
        index_K = _places(targets.valid_BT, decided.kept)
        summed = two_phase.summed_loss(
            hidden_BTD.flatten(0, 1),
            head,
            labels_BT.flatten().clamp(min=0),
            index_K,
            row_operations(impl, hidden_BTD),
            None,
            _ByRule(flat[index_K], config),
            None if soft is None else soft[index_K],
        )
        assert summed.weights_K is not None
        total = summed.total
        nll_BT = _scattered(summed.nll_K, index_K, labels_BT)
        weights_BT = _scattered(summed.weights_K, index_K, labels_BT)
        above_BT = _scattered_or_none(summed.distance_K, index_K, labels_BT)
    stats = _soft_stats(above_BT, nll_BT, weights_BT, targets)
    if config.graded_by == "likelihood":
        # the weights are its derivative; its value is this
        nll_N = nll_BT.flatten()
        distance, stretches = flat.distance(nll_N, config)
        stats["distill_loss"] = distance / stretches.clamp(min=1)
        value = config.distill_weight * distance + (nll_N * _entropy_part(flat, config)).sum()
        total = total + (value.to(total.dtype) - total).detach()
    return _output(total, nll_BT, weights_BT.float(), targets, config, decided, stats, ranks)


def _entropy_part(flat: FlatTargets, config: ObjectiveConfig) -> Tensor:
    """alm: what the cross entropy of each token counts beside the distance."""
    rest = 0.0 if config.unmapped == "exclude" else 1.0
    part = torch.where(flat.compared_N, config.cross_entropy, rest)
    return torch.where(flat.valid_N, part, 0.0)


@dataclass(frozen=True)
class _Known:
    """Weights that were decided before."""

    weights_K: Tensor

    def rows(self, a: int, b: int, nll: Tensor) -> Tensor:
        return self.weights_K[a:b].to(nll.dtype)

    def cut(self, ends: list[int]) -> list[int]:
        return ends


@dataclass(frozen=True)
class _ByRule:
    """Weights by the rule, from the losses of whole stretches."""

    flat: FlatTargets
    config: ObjectiveConfig

    def rows(self, a: int, b: int, nll: Tensor) -> Tensor:
        return self.flat[a:b].weights(nll, self.config)

    def cut(self, ends: list[int]) -> list[int]:
        if not self.config.by_stretch or len(ends) < 2:
            return ends
        place = torch.arange(len(self.flat), device=self.flat.valid_N.device)
        began = torch.where(self.flat.begins_N, place, 0).cummax(0).values
        inner = began[torch.tensor(ends[:-1], device=place.device)].tolist()
        return sorted({*(end for end in inner if end > 0), ends[-1]})


@dataclass(frozen=True)
class _Soft:
    """Targets beside the label, of tokens in a row; the mix is one number, or one a token that its
    own loss decides."""

    ids_NK: Tensor
    p_NK: Tensor
    mix: float
    share: _ByRule | None
    """What of the mix a token gets, by its loss."""

    def __getitem__(self, index: Tensor) -> "_Soft":
        share = None if self.share is None else _ByRule(self.share.flat[index], self.share.config)
        return _Soft(self.ids_NK[index], self.p_NK[index], self.mix, share)

    def rows(self, a: int, b: int, nll: Tensor) -> SoftRows:
        weights = self.p_NK[a:b].to(nll.dtype) * self.mix
        if self.share is not None:
            weights = weights * self.share.rows(a, b, nll)[:, None]
        return SoftRows(self.ids_NK[a:b].long(), weights)

    def cut(self, ends: list[int]) -> list[int]:
        return ends if self.share is None else self.share.cut(ends)


def _soft_targets(targets: Targets, config: ObjectiveConfig, ranks: Ranks) -> _Soft | None:
    """None where the labels are all there is: then it is plain training to the last bit."""
    if not config.rule.alternatives or config.mix == 0.0:
        return None
    ids, p = targets.soft_ids_BTK, targets.soft_p_BTK
    if ids is None or p is None:
        raise ValueError(f"method {config.method} needs soft_ids_BTK and soft_p_BTK, got None")
    share = None
    if config.mix_by == "reducible":
        rule = replace(config, weighting="reducible", floor=0.0, unmapped="exclude")
        (teacher_BT,) = filled_guidance([targets], rule, ranks)
        share = _ByRule(FlatTargets.of(targets, teacher_BT, rule), rule)
    return _Soft(ids.flatten(0, 1), p.flatten(0, 1), config.mix, share)


def _soft_reference(
    logits_BTV: Tensor, targets: Targets, nll_BT: Tensor, soft: _Soft | None
) -> Tensor | None:
    if soft is None:
        return None
    found = soft.rows(0, nll_BT.numel(), nll_BT.flatten())
    shape = (*nll_BT.shape, -1)
    return reference.soft_distance(
        logits_BTV, targets.labels_BT, found.ids_NK.view(shape), found.weights_NK.view(shape)
    )


@torch.no_grad()
def _soft_stats(
    above_BT: Tensor | None, nll_BT: Tensor, weights_BT: Tensor, targets: Targets
) -> dict[str, Tensor]:
    """For the log: the mean loss of the kept tokens against their targets, and the probability that
    the teacher's alternatives take from their labels."""
    if above_BT is None or targets.soft_p_BTK is None:
        return {}
    kept = weights_BT != 0
    count = kept.sum().clamp(min=1)
    mass = torch.where(kept, targets.soft_p_BTK.float().sum(-1), 0.0)
    return {
        "distill_loss": torch.where(kept, nll_BT + above_BT.detach(), 0.0).sum() / count,
        "target_mass": mass.sum() / count,
    }


def _output(
    total: Tensor,
    nll_BT: Tensor,
    weights_BT: Tensor,
    targets: Targets,
    config: ObjectiveConfig,
    decided: Decided,
    stats: dict[str, Tensor] | None = None,
    ranks: Ranks | None = None,
) -> ObjectiveOutput:
    denominator = decided.denominator
    if denominator is None:
        counted = targets.valid_BT
        if config.normalise == "selected":
            counted = weights_BT if config.graded else weights_BT != 0
        denominator = counted.sum()
        if ranks is not None and config.scope == "global":
            denominator = ranks.sum(denominator)
    divisor = torch.as_tensor(denominator, device=total.device).to(total.dtype)
    return ObjectiveOutput(
        loss=total / torch.where(divisor > 0, divisor, 1.0),
        nll_BT=nll_BT.detach(),
        weights_BT=weights_BT,
        denominator=divisor,
        targets=targets,
        distill_stats=stats or {},
    )


def _places(mask_BT: Tensor, count: int | None) -> Tensor:
    """Where the mask is set. How often, only the device knows unless it is told."""
    mask_N = mask_BT.flatten()
    found = mask_N.nonzero() if count is None else mask_N.nonzero_static(size=count)
    return found.squeeze(1)


def _scattered(values_K: Tensor, index_K: Tensor, like_BT: Tensor) -> Tensor:
    """Values of some tokens in their places, 0 elsewhere."""
    whole = torch.zeros(like_BT.numel(), dtype=values_K.dtype, device=values_K.device)
    return whole.index_copy_(0, index_K, values_K.detach()).view(like_BT.shape)


def _scattered_or_none(values_K: Tensor | None, index_K: Tensor, like_BT: Tensor) -> Tensor | None:
    return None if values_K is None else _scattered(values_K, index_K, like_BT)


@torch.no_grad()
def student_nll(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, *, impl: Implementation = "auto"
) -> Tensor:
    """nll of every token in fp32, without gradient; 0 where the label is ignored."""
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
    """(nll, entropy or None) of every token in fp32, without gradient; 0 where ignored. Any
    model's: an online teacher's guidance and `entropy_BT` come from here."""
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
    hidden_ND: Tensor,
    head: Head,
    labels_N: Tensor,
    rows: RowOperations,
    with_entropy: bool = False,
) -> RowLosses:
    with two_phase.isolated(hidden_ND) as dtype:
        work = two_phase.Workspace.of(hidden_ND, head, rows, dtype)
        return two_phase.token_losses(work, labels_N, with_entropy=with_entropy)


def _check(
    hidden_BTD: Tensor, head: Head, targets: Targets, decided: Decided | None = None
) -> None:
    if hidden_BTD.dim() != 3 or hidden_BTD.shape[-1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden_BTD must be [B, T, {head.weight.shape[1]}] for this head, "
            f"got {list(hidden_BTD.shape)}"
        )
    names = ("labels_BT", "guidance_BT", "entropy_BT", "stretch_BT", "weights_BT", "nll_BT")
    for name in (*names, "soft_ids_BTK", "soft_p_BTK"):
        tensor = getattr(targets, name, None)
        if tensor is None and decided is not None:
            tensor = getattr(decided, name, None)
        if tensor is not None and tensor.shape[:2] != hidden_BTD.shape[:2]:
            raise ValueError(
                f"{name} must be {list(hidden_BTD.shape[:2])}, got {list(tensor.shape)}"
            )
    if hasattr(head.weight, "full_tensor"):
        raise ValueError(
            "Head.weight is a sharded DTensor; call the objective inside the forward of the "
            "FSDP root module, where the parameters are gathered, or pass a gathered tensor"
        )
