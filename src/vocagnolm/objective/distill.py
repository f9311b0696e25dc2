"""Baselines that read the teacher's whole distribution: kld and uld.

Both add to the cross entropy of every token a distance to the teacher's next-token distribution
at the aligned positions: `sum_i [nll_i + lambda * aligned_i * distance_i] / N`. As in the guided
head the logits of both models live for one chunk of tokens at a time.

kld: KL(teacher || student), or KL(student || teacher) as equation 5 of the paper prints it, of one
    vocabulary. Rows only the teacher has (Llemma's 16) are dropped and the rest renormalised; that
    is refused where they hold real mass.
uld: Wasserstein-1 distance of the two sorted probability vectors, the shorter one padded with
    zeros (arXiv 2402.12030): sum_v |p_S sorted - p_T sorted|.

Shape letters: N tokens, V rows of the student's head, U rows of the teacher's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vocagnolm.errors import ObjectiveError
from vocagnolm.objective.head import (
    IGNORE_INDEX,
    TORCH_ROWS,
    Head,
    Wanted,
    Workspace,
    attach,
    backward_chunks,
    compute_dtype,
    isolated,
    token_nll,
)
from vocagnolm.recipe.sections import KlDirection, ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """An online teacher's predictions for the same text, for kld and uld (without gradient)."""

    hidden: Tensor
    """[B, U, D_T] Last hidden states of the teacher; U may differ from the student's T."""
    head: Head | None
    """The teacher's head; None if `hidden` holds the logits themselves, because its head is not
    supported."""
    position_BT: Tensor | None = None
    """[B, T] int64: the teacher position that predicts what student position t predicts, -1 if they
    are not aligned. None: the same position (same tokenizer)."""

    @property
    def rows(self) -> int:
        """Number of tokens in the teacher's distribution."""
        return self.hidden.shape[-1] if self.head is None else self.head.rows


# ---- the Wasserstein distance of sorted rows ----


def wasserstein_rows(z_NV: Tensor, teacher_NU: Tensor) -> tuple[Tensor, Tensor]:
    """The Wasserstein distance of sorted rows: (distance [N], its gradient by the student's logits
    [N, V])."""
    p = F.softmax(z_NV, dim=-1)
    q = F.softmax(teacher_NU, dim=-1)
    distance, by_p = by_sorting(p, q)
    # p is not needed any more: overwrite it by the softmax's Jacobian
    return distance, by_p.sub_((by_p * p).sum(-1, keepdim=True)).mul_(p)


def by_sorting(p_NV: Tensor, q_NU: Tensor) -> tuple[Tensor, Tensor]:
    """(Wasserstein distance, its gradient by p) of rows of probabilities."""
    q, (ranked, index) = _sorted(q_NU), _ranked(p_NV)
    v, u = ranked.shape[1], q.shape[1]
    beyond = q[:, v:].sum(-1) if u > v else 0.0
    if u < v:
        q = F.pad(q, (0, v - u))
    difference = ranked - q[:, :v]
    distance = difference.abs().sum(-1) + beyond
    return distance, torch.empty_like(p_NV).scatter_(1, index, difference.sign())


# On a CPU, NumPy sorts several times as fast as torch.


def _sorted(probability: Tensor) -> Tensor:
    """The rows, each sorted from its largest entry to its smallest."""
    if probability.device.type != "cpu":
        return probability.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(probability.numpy(), axis=-1)).flip(-1)


def _ranked(probability: Tensor) -> tuple[Tensor, Tensor]:
    """(the rows, each sorted from its largest entry to its smallest; where each entry stood). Equal
    entries keep their order."""
    if probability.device.type != "cpu" or probability.dtype != torch.float32:
        return torch.sort(probability, dim=-1, descending=True, stable=True)
    # the bits of a positive float are ordered like it, and its place fits below them
    column = torch.arange(probability.shape[1])
    keys = (~probability.contiguous().view(torch.int32)).long() << 32 | column
    keys.numpy().sort(axis=-1)
    return (~(keys >> 32)).int().view(torch.float32), keys & 0xFFFFFFFF


# ---- kld and uld ----


NEGLIGIBLE_MASS = 0.01
"""Mean probability the teacher may have on rows that the student lacks."""


# (sum over tokens, with gradient; nll [B, T]; for the log)
Distilled = tuple[Tensor, Tensor, dict[str, Tensor]]


def common_rows(head: Head, teacher: Teacher, config: ObjectiveConfig) -> int:
    """The number of rows that are compared: the first ones, which the student's tokenizer can
    produce."""
    if config.rule.one_vocabulary and teacher.rows < head.rows:
        raise ObjectiveError(
            f"{config.method} needs one vocabulary: the student has {head.rows} tokens, the "
            f"teacher only {teacher.rows}. Use method uld or guided for different vocabularies."
        )
    return head.rows


def kl_rows(
    z_NV: Tensor, teacher_NU: Tensor, rows: int, direction: KlDirection = "forward"
) -> tuple[Tensor, Tensor, Tensor]:
    """The Kullback-Leibler divergence of rows of logits: (divergence, its gradient by the student's
    logits, the teacher's probability beyond the first `rows`)."""
    q = F.softmax(teacher_NU, dim=-1)
    dropped = q[:, rows:].sum(-1)
    if direction == "reverse":
        # over the common rows alone, both renormalised: elsewhere the teacher has no probability
        log_p = F.log_softmax(z_NV[:, :rows], dim=-1)
        log_ratio = log_p - F.log_softmax(teacher_NU[:, :rows], dim=-1)
        p = log_p.exp_()
        distance = torch.where(p > 0, p * log_ratio, 0.0).sum(-1)
        gradient = torch.zeros_like(z_NV)
        gradient[:, :rows] = torch.where(p > 0, p * (log_ratio - distance[:, None]), 0.0)
        return distance, gradient, dropped
    q = q[:, :rows] / q[:, :rows].sum(-1, keepdim=True)
    log_p = F.log_softmax(z_NV, dim=-1)
    distance = (torch.special.xlogy(q, q) - q * log_p[:, :rows]).sum(-1)
    gradient = log_p.exp_()
    gradient[:, :rows] -= q
    return distance, gradient, dropped


def kl_reference(z: Tensor, q: Tensor, rows: int, config: ObjectiveConfig) -> Tensor:
    q = q[:, :rows] / q[:, :rows].sum(-1, keepdim=True)
    if config.kl_direction == "forward":
        return F.kl_div(F.log_softmax(z, -1)[:, :rows], q, reduction="none").sum(-1)
    p = F.softmax(z[:, :rows], -1)
    return (p * (p.log() - q.log())).sum(-1)


def wasserstein_reference(z: Tensor, q: Tensor, rows: int, config: ObjectiveConfig) -> Tensor:
    p = F.softmax(z, -1)
    width = max(p.shape[1], q.shape[1])
    p, q = (
        F.pad(probability, (0, width - probability.shape[1])).sort(-1, descending=True).values
        for probability in (p, q)
    )
    return (p - q).abs().sum(-1)


@dataclass(frozen=True)
class Distance:
    """A distance between the student's and the teacher's distribution, of N tokens."""

    rows: Callable[[Tensor, Tensor, int, ObjectiveConfig], tuple[Tensor, Tensor, Tensor | None]]
    """(student's logits, teacher's logits, common rows, config) -> the distance, its gradient by
    the student's logits, and the teacher's probability beyond the common rows, if dropped."""
    reference: Callable[[Tensor, Tensor, int, ObjectiveConfig], Tensor]
    """(student's logits, teacher's probabilities, common rows, config) -> the distance, by
    autograd."""


DISTANCES: dict[str, Distance] = {
    "kl": Distance(
        lambda z, teacher_z, rows, config: kl_rows(z, teacher_z, rows, config.kl_direction),
        kl_reference,
    ),
    "wasserstein": Distance(
        lambda z, teacher_z, rows, config: (*wasserstein_rows(z, teacher_z), None),
        wasserstein_reference,
    ),
}
"""The distances by their names in `METHODS`."""


def distil(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, teacher: Teacher, config: ObjectiveConfig
) -> Distilled:
    """The loss of kld and uld, chunk by chunk, with gradients that are made in the forward pass."""
    assert config.rule.distance is not None
    measure, rows = DISTANCES[config.rule.distance], common_rows(head, teacher, config)
    wanted = Wanted.of(hidden_BTD, head)
    hidden_ND = hidden_BTD.flatten(0, 1)
    index_K = (labels_BT.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    labels_K = labels_BT.flatten()[index_K]
    teacher_K = _teacher_index(teacher, labels_BT)[index_K]
    with isolated(hidden_ND) as dtype:
        work = Workspace.of(hidden_ND.index_select(0, index_K), head, TORCH_ROWS, dtype)
        teacher_logits = _logits_of(teacher)
        nll_K = torch.empty(len(index_K), dtype=work.wide, device=hidden_ND.device)
        distance_K, dropped_K = torch.zeros_like(nll_K), torch.zeros_like(nll_K)

        def gradient_of_rows(a: int, b: int, x: Tensor) -> Tensor:
            z = work.transform(x)
            lse = torch.logsumexp(z, dim=-1, keepdim=True)
            target = labels_K[a:b, None]
            nll_K[a:b] = (lse - z.gather(1, target)).squeeze(1)
            gradient = torch.exp(z - lse)
            gradient.scatter_add_(1, target, torch.full_like(lse, -1.0))
            aligned = (teacher_K[a:b] >= 0).nonzero().squeeze(1)
            teacher_z = teacher_logits(teacher_K[a:b][aligned])
            distance, by_z, dropped = measure.rows(z[aligned], teacher_z, rows, config)
            if dropped is not None:
                dropped_K[a:b][aligned] = dropped.to(nll_K.dtype)
            distance_K[a:b][aligned] = distance.to(nll_K.dtype)
            gradient.index_add_(0, aligned, by_z.to(z.dtype), alpha=config.distill_weight)
            return work.transform.chain(gradient, z)

        # both models' logits, probabilities, sorted copies and indices are alive at once
        rows_alive = 4 * (head.weight.shape[0] + teacher.rows)
        gradients = backward_chunks(
            work, wanted, gradient_of_rows, exact=True, logits_per_token=rows_alive
        )
        total = nll_K.sum() + config.distill_weight * distance_K.sum()
        nll_N = torch.zeros(labels_BT.numel(), dtype=nll_K.dtype, device=nll_K.device)
        nll_BT = nll_N.index_copy_(0, index_K, nll_K).view(labels_BT.shape)
    if any(wanted):
        total = attach(total, gradients, hidden_ND, head, index_K)
    stats = _stats(distance_K, dropped_K, teacher_K >= 0, config)
    return total, nll_BT, stats


def distil_reference(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, teacher: Teacher, config: ObjectiveConfig
) -> Distilled:
    """The loss of kld and uld by full logits of both models and autograd: the reference."""
    z_BTV = head.logits(hidden_BTD)
    nll_BT = token_nll(z_BTV, labels_BT)
    teacher_N = _teacher_index(teacher, labels_BT)
    keep = ((teacher_N >= 0) & (labels_BT.flatten() != IGNORE_INDEX)).nonzero().squeeze(1)
    z = z_BTV.flatten(0, 1)[keep]
    with torch.no_grad():
        chosen = teacher.hidden.flatten(0, 1)[teacher_N[keep]]
        q = F.softmax(chosen.float() if teacher.head is None else teacher.head.logits(chosen), -1)
    rows = common_rows(head, teacher, config)
    dropped = q[:, rows:].sum(-1)
    assert config.rule.distance is not None
    distance = DISTANCES[config.rule.distance].reference(z, q, rows, config)
    total = nll_BT.sum() + config.distill_weight * distance.sum()
    aligned = teacher_N[labels_BT.flatten() != IGNORE_INDEX] >= 0
    return total, nll_BT.detach(), _stats(distance.detach(), dropped, aligned, config)


def _logits_of(teacher: Teacher) -> Callable[[Tensor], Tensor]:
    """A function that gives the teacher's logits at some of its flattened positions."""
    flat = teacher.hidden.flatten(0, 1)
    if teacher.head is None:
        return lambda index: flat.index_select(0, index).float()
    dtype = compute_dtype(teacher.hidden)
    return Workspace.of(flat, teacher.head, TORCH_ROWS, dtype).logits


def _teacher_index(teacher: Teacher, labels_BT: Tensor) -> Tensor:
    """For each student token the row of the teacher's flattened hidden states, or -1."""
    B, U = teacher.hidden.shape[:2]
    if labels_BT.shape[0] != B:
        raise ValueError(f"teacher has {B} sequences, the student {labels_BT.shape[0]}")
    position = teacher.position_BT
    if position is None:
        if labels_BT.shape[1] != U:
            raise ValueError(
                f"teacher has {U} positions, the student {labels_BT.shape[1]}: "
                "give Teacher.position_BT"
            )
        position = torch.arange(U, device=labels_BT.device).expand(B, U)
    first = torch.arange(B, device=labels_BT.device)[:, None] * U
    return torch.where(position >= 0, position + first, -1).flatten()


def _stats(
    distance: Tensor, dropped: Tensor, aligned: Tensor, config: ObjectiveConfig
) -> dict[str, Tensor]:
    count = aligned.sum().clamp(min=1)
    stats = {
        "distill_loss": distance.sum() / count,
        "aligned_share": aligned.sum() / max(1, aligned.numel()),
    }
    if config.rule.one_vocabulary:
        mass = dropped.sum() / count
        stats["teacher_dropped_mass"] = mass
        if float(mass) > NEGLIGIBLE_MASS:
            raise ObjectiveError(
                f"the teacher puts {float(mass):.1%} of its probability on tokens the student "
                f"does not have (expected at most {NEGLIGIBLE_MASS:.0%}): the two vocabularies "
                "are not the same. Use method uld or guided."
            )
    return stats
