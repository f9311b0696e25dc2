"""Other ways through the guided head, tried in `head_gpu.py` and nowhere else.

*fp8*: phase 1, which only ranks tokens, multiplies in e4m3 with a scale for every row of both
sides; phase 2 makes the losses of the chosen tokens anew. *kept*: the logits of phase 1 stay in
memory, so that phase 2 need not make them again. Without a GPU the fp8 product is emulated: rounded
to e4m3 and multiplied in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vocagnolm.model.fp8 import rounded_rows, scaled_product
from vocagnolm.objective import Head
from vocagnolm.objective import head as head_module
from vocagnolm.objective.head import Implementation, RowLosses, product, row_operations

CHUNK_BYTES = 512 << 20

# (hidden, weight, the tokens to use or None to choose them) -> loss
Variant = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass
class Choice:
    """What is known of the tokens, and how many are kept."""

    labels: Tensor
    guidance: Tensor
    kept: int
    impl: Implementation = "auto"
    chosen: Tensor | None = None
    """By the variant that ran last."""

    def choose(self, nll: Tensor, forced: Tensor | None) -> Tensor:
        self.chosen = torch.topk(nll - self.guidance, self.kept, sorted=False).indices
        return self.chosen if forced is None else forced


def variants(choice: Choice) -> dict[str, Variant]:
    found: dict[str, Variant] = {
        "guided, phase 1 in fp8": _fp8(choice),
        "guided, exact logits kept": _kept(choice, None, None),
        "guided, exact logits kept in bf16": _kept(choice, None, torch.bfloat16),
        "guided, bf16 logits kept": _kept(choice, torch.bfloat16, torch.bfloat16),
    }
    return found


def _fp8(choice: Choice) -> Variant:
    def call(hidden: Tensor, weight: Tensor, forced: Tensor | None) -> Tensor:
        rows = row_operations(choice.impl, hidden)
        with torch.no_grad():
            index = choice.choose(fp8_losses(hidden, weight, choice), forced)
        head = Head(weight=weight)
        summed = head_module.summed_loss(hidden, head, choice.labels, index, rows, None)
        return summed.total / len(index)

    return call


def fp8_losses(hidden: Tensor, weight: Tensor, choice: Choice) -> Tensor:
    rows = row_operations(choice.impl, hidden)
    transform = head_module.Workspace.of(
        hidden[:1], Head(weight=weight), rows, hidden.dtype
    ).transform
    rounded = compiled_rounding() if hidden.is_cuda else rounded_rows
    h, h_scale = rounded(hidden)
    w, w_scale = rounded(weight)
    size = max(16, CHUNK_BYTES // (4 * len(weight)) // 128 * 128)
    nll = []
    for a in range(0, len(hidden), size):
        part = slice(a, a + size)
        x = scaled_product(h[part], h_scale[part], w, w_scale, torch.float32)
        nll.append(rows.losses(x, choice.labels[part], transform, False).nll_N)
    return torch.cat(nll)


@cache
def compiled_rounding() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """One kernel instead of six."""
    return torch.compile(rounded_rows, dynamic=False)


def _kept(choice: Choice, made: torch.dtype | None, kept: torch.dtype | None) -> Variant:
    """`made`: what phase 1 multiplies into, None: fp32. `kept`: what stays, None: as made."""

    def call(hidden: Tensor, weight: Tensor, forced: Tensor | None) -> Tensor:
        rows = row_operations(choice.impl, hidden)
        head = Head(weight=weight)
        with head_module.isolated(hidden) as dtype:
            work = head_module.Workspace.of(hidden, head, rows, dtype)
            logits, losses = _phase_one(work, choice.labels, made or work.wide, kept)
            index = choice.choose(losses.nll_N, forced)
            labels, chosen = (
                choice.labels[index],
                RowLosses(losses.nll_N[index], losses.lse_N[index], None),
            )
            g = rows.gradient_(
                logits.index_select(0, index), labels, chosen.lse_N, work.transform, None
            )
            del logits
            g = g.to(work.hidden_ND.dtype)
            gradients = head_module.Gradients(
                g @ work.weight_VD, g.t() @ work.hidden_ND.index_select(0, index), None
            )
            del g
        total = chosen.nll_N.sum()
        return head_module.attach(total, gradients, hidden, head, index) / len(index)

    return call


def _phase_one(
    work: head_module.Workspace, labels: Tensor, made: torch.dtype, kept: torch.dtype | None
) -> tuple[Tensor, RowLosses]:
    hidden, weight = work.hidden_ND, work.weight_VD
    made = made if hidden.is_cuda else hidden.dtype
    shape = (len(hidden), len(weight))
    logits = torch.empty(shape, dtype=kept or made, device=hidden.device)
    nll = torch.empty(len(hidden), dtype=work.wide, device=hidden.device)
    lse = torch.empty_like(nll)
    size = max(16, CHUNK_BYTES // (made.itemsize * len(weight)) // 128 * 128)
    buffer = torch.empty(size, len(weight), dtype=made, device=hidden.device)
    for a in range(0, len(hidden), size):
        b = min(a + size, len(hidden))
        there = logits[a:b] if logits.dtype == made else buffer[: b - a]
        x = product(hidden[a:b], weight.t(), out=there)
        part = work.rows.losses(x, labels[a:b], work.transform, False)
        nll[a:b], lse[a:b] = part.nll_N, part.lse_N
        if logits.dtype != made:
            logits[a:b] = x
    return logits, RowLosses(nll, lse, None)
