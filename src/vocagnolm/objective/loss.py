"""The door: one loss for every method."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from vocagnolm.objective import head as two_phase
from vocagnolm.objective import reference
from vocagnolm.objective.config import (
    DISTILLING,
    IGNORE_INDEX,
    Head,
    Implementation,
    ObjectiveConfig,
    ObjectiveOutput,
    Teacher,
)
from vocagnolm.objective.distill import Distilled, distil, distil_reference
from vocagnolm.objective.rows import TORCH_ROWS, RowLosses, RowOperations
from vocagnolm.objective.selection import ScoredBatch, select, select_step


def objective_loss(
    hidden_BTD: Tensor,
    head: Head,
    labels_BT: Tensor,
    guidance_BT: Tensor | None = None,
    config: ObjectiveConfig | None = None,
    *,
    impl: Implementation = "auto",
    step: int = 0,
    sequence_index_B: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    teacher: Teacher | None = None,
    selected_BT: Tensor | None = None,
    nll_BT: Tensor | None = None,
    denominator: Tensor | float | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> ObjectiveOutput:
    """Loss of one micro-batch, with gradient for the hidden states and the head.

    hidden_BTD: last hidden states, after the final norm.
    labels_BT: int64, already shifted: `labels[b, t]` is what `hidden[b, t]` predicts; -100 is
        ignored.
    guidance_BT: teacher nll carried to the same tokens; NaN where unmapped.
    impl: `reference` holds full logits, `chunked` is torch on any device, `fused` uses Triton on
        CUDA; `auto` is fused where it can run, else chunked.
    step: for methods that draw at random; give every call of a run another number (optimiser
        step * accumulation + micro-batch), or the sequences' places in `sequence_index_B`.
    entropy_BT: entropy of the reference model, for `entropy_keep`.
    teacher: for kld and uld.
    selected_BT, nll_BT: a selection already made and the losses it was made from (second pass
        of scope global, see `select_step`); phase 1 is then left out.
    denominator: what the summed loss is divided by. None: this micro-batch's count, or with scope
        global the count of all ranks.

    Accumulation. For a step of several micro-batches give each the same `denominator`, the count
    over all of them (and all ranks), and add up the losses: then 1 x 8 sequences and 8 x 1 give
    the same step. With `normalise: all` it is the number of labels that are not ignored, which
    is known beforehand. DDP and FSDP average gradients over ranks: multiply the loss by the
    number of ranks when the denominator counts all of them.

    Scope global. With one micro-batch a step, call this on all ranks: it exchanges counts. With
    accumulation: `student_nll` for each micro-batch, `select_step` over all, then this function
    with `selected_BT`, `nll_BT` and `denominator`.

    Nothing selected: the loss is exactly 0 and so are the gradients. The gradients are made in
    the forward pass: call backward once.
    """
    config = config or ObjectiveConfig()
    _check(hidden_BTD, head, labels_BT, guidance_BT, selected_BT, nll_BT)
    valid_BT = labels_BT != IGNORE_INDEX
    counted: Tensor | None = None  # the denominator that comes with a selection over all ranks

    def choose(losses_BT: Tensor) -> Tensor:
        nonlocal counted
        if selected_BT is not None:
            return selected_BT & valid_BT
        batch = ScoredBatch(
            nll_BT=losses_BT,
            labels_BT=labels_BT,
            guidance_BT=guidance_BT,
            entropy_BT=entropy_BT,
            sequence_index_B=sequence_index_B,
        )
        if config.scope != "global":
            return select(batch, config, step=step)
        whole = select_step([batch], config, step=step, group=group)
        counted = whole.denominator
        return whole.selected[0]

    distilled: Distilled | None = None
    if config.method in DISTILLING and config.distill_weight > 0:
        if teacher is None:
            raise ValueError(f"method {config.method} needs an online teacher, got teacher=None")
        selected = choose(valid_BT.float())
        function = distil_reference if impl == "reference" else distil
        distilled = function(hidden_BTD, head, labels_BT, teacher, config)
        total, nll_BT = distilled.total, distilled.nll_BT
    elif impl == "reference":
        logits = reference.full_logits(hidden_BTD, head)
        nll_BT = reference.token_nll(logits, labels_BT).detach()
        selected = choose(nll_BT)
        total = reference.masked_sum(logits, labels_BT, selected)
    else:
        foreseen = None
        if config.selects_all and selected_BT is None:
            foreseen = choose(valid_BT.float())  # whatever the losses are
        total, nll_BT, selected = _in_phases(
            hidden_BTD, head, labels_BT, nll_BT, foreseen, choose, impl
        )

    if denominator is None:
        denominator = counted
    if denominator is None:
        denominator = (selected if config.normalise == "selected" else valid_BT).sum()
    divisor = torch.as_tensor(denominator, device=total.device).to(total.dtype)
    return ObjectiveOutput(
        loss=total / torch.where(divisor > 0, divisor, 1.0),
        nll_BT=nll_BT,
        selected_BT=selected,
        denominator=divisor,
        valid_BT=valid_BT,
        guidance_BT=guidance_BT,
        distill_stats=distilled.stats if distilled else {},
    )


def _in_phases(
    hidden_BTD: Tensor,
    head: Head,
    labels_BT: Tensor,
    nll_BT: Tensor | None,
    foreseen_BT: Tensor | None,
    choose: Callable[[Tensor], Tensor],
    impl: Implementation,
) -> tuple[Tensor, Tensor, Tensor]:
    """(summed loss, nll_BT, selected_BT). A selection that is foreseen needs no first phase, nor
    does one whose losses are known."""
    hidden_ND, labels_N = hidden_BTD.flatten(0, 1), labels_BT.flatten().clamp(min=0)
    rows = row_operations(impl, hidden_BTD)
    losses: RowLosses | None = None
    if foreseen_BT is not None:
        selected_BT = foreseen_BT
    else:
        if nll_BT is None:
            losses = _phase_one(hidden_ND, head, labels_N, rows)
            nll_BT = _where_valid(losses.nll_N, labels_BT)
        selected_BT = choose(nll_BT)
    index_K = selected_BT.flatten().nonzero().squeeze(1)
    total, nll_K = two_phase.summed_loss(hidden_ND, head, labels_N, index_K, rows, losses)
    if nll_BT is None:
        nll_N = torch.zeros(labels_N.shape, dtype=nll_K.dtype, device=nll_K.device)
        nll_BT = nll_N.index_copy_(0, index_K, nll_K).view(labels_BT.shape)
    return total, nll_BT, selected_BT


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
    _check(hidden_BTD, head, labels_BT)
    labels_N = labels_BT.flatten().clamp(min=0)
    hidden_ND = hidden_BTD.flatten(0, 1)
    if impl == "reference":
        x = torch.nn.functional.linear(hidden_ND, head.weight)
        transform = two_phase.Transform(head.bias, head.softcap, head.scale)
        losses = TORCH_ROWS.losses(x, labels_N, transform, with_entropy)
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


def row_operations(impl: Implementation, hidden: Tensor) -> RowOperations:
    """Torch's row operations, or Triton's (which know no fp64)."""
    usable = hidden.device.type == "cuda" and hidden.dtype != torch.float64 and _has_triton()
    if impl == "chunked" or (impl == "auto" and not usable):
        return TORCH_ROWS
    if impl not in ("auto", "fused"):
        raise ValueError(f"impl must be auto, reference, chunked or fused; got {impl!r}")
    if not _has_triton() or hidden.dtype == torch.float64:
        raise ValueError(
            "impl='fused' needs the package 'triton', which comes with torch for CUDA, and no "
            "fp64; use impl='auto' or 'chunked' here"
        )
    from vocagnolm.objective.triton_rows import TRITON_ROWS

    return TRITON_ROWS


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _check(hidden_BTD: Tensor, head: Head, labels_BT: Tensor, *others_BT: Tensor | None) -> None:
    if hidden_BTD.dim() != 3 or hidden_BTD.shape[-1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden_BTD must be [B, T, {head.weight.shape[1]}] for this head, "
            f"got {list(hidden_BTD.shape)}"
        )
    names = ("labels_BT", "guidance_BT", "selected_BT", "nll_BT")
    for name, tensor in zip(names, (labels_BT, *others_BT), strict=False):
        if tensor is not None and tensor.shape != hidden_BTD.shape[:2]:
            raise ValueError(
                f"{name} must be {list(hidden_BTD.shape[:2])}, got {list(tensor.shape)}"
            )
    if hasattr(head.weight, "full_tensor"):
        raise ValueError(
            "Head.weight is a sharded DTensor; call the objective inside the forward of the "
            "FSDP root module, where the parameters are gathered, or pass a gathered tensor"
        )
