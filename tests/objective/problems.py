"""Small heads and batches for the tests of the objective, and an obvious selection."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from vocagnolm.objective import Head, ObjectiveConfig, Targets, Teacher

NAN = math.nan


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    head: Head
    labels: Tensor
    guidance: Tensor
    teacher: Teacher

    @property
    def targets(self) -> Targets:
        return Targets(labels_BT=self.labels, guidance_BT=self.guidance)

    def fresh(self) -> "Problem":
        """The same numbers as new leaves that want gradients."""
        bias = self.head.bias
        head = replace(
            self.head,
            weight=self.head.weight.detach().clone().requires_grad_(),
            bias=None if bias is None else bias.detach().clone().requires_grad_(),
        )
        return replace(self, hidden=self.hidden.detach().clone().requires_grad_(), head=head)

    def gradients(self) -> list[Tensor | None]:
        bias = self.head.bias
        return [self.hidden.grad, self.head.weight.grad, None if bias is None else bias.grad]


def problem(
    B: int = 3,
    T: int = 17,
    D: int = 16,
    V: int = 101,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    teacher_rows: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Problem:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V - 3, (B, T), generator=g)  # the last rows are beyond the tokenizer
    labels[:, -1] = -100
    guidance = 5 * torch.rand(B, T, generator=g)
    guidance[torch.rand(B, T, generator=g) < 0.2] = NAN
    head = Head(
        weight=torch.randn(V, D, generator=g).to(device, dtype),
        bias=torch.randn(V, generator=g).to(device, dtype) if bias else None,
        softcap=softcap,
        scale=scale,
    )
    teacher = Teacher(
        hidden=torch.randn(B, T, D, generator=g).to(device, dtype),
        head=Head(weight=torch.randn(teacher_rows or V, D, generator=g).to(device, dtype)),
    )
    hidden = torch.randn(B, T, D, generator=g).to(device, dtype)
    return Problem(hidden, head, labels.to(device), guidance.to(device), teacher)


def some_stretches(given_: Problem, seed: int = 1) -> Targets:
    """The problem's tokens in stretches of one to three, each with one guidance."""
    g = torch.Generator().manual_seed(seed)
    begins = (torch.rand(given_.labels.shape, generator=g) < 0.6).to(given_.labels.device)
    begins[:, 0] = False
    number = begins.long().cumsum(1)
    guidance = given_.guidance.gather(1, number)
    return Targets(labels_BT=given_.labels, guidance_BT=guidance, stretch_BT=number)


def soft_targets(
    given: Problem, count: int = 5, seed: int = 3, targets: Targets | None = None
) -> Targets:
    """Alternatives of every token: some are the label, some the same twice, some have no mass."""
    g = torch.Generator().manual_seed(seed)
    B, T = given.labels.shape
    V = given.head.weight.shape[0]
    ids = torch.randint(0, V, (B, T, count), generator=g)
    ids[..., 1] = ids[..., 0]
    ids[..., 2] = given.labels.clamp(min=0).cpu()
    p = torch.rand(B, T, count, generator=g)
    p = p / p.sum(-1, keepdim=True) * torch.rand(B, T, 1, generator=g)
    p[torch.rand(B, T, generator=g) < 0.2] = 0.0
    device = given.hidden.device
    return replace(
        targets or given.targets,
        soft_ids_BTK=ids.to(device),
        soft_p_BTK=p.to(device, given.hidden.dtype),
    )


def listed(given: Problem, count: int = 4, seed: int = 3) -> Targets:
    """Different tokens for every position, often the label among them; some positions list fewer,
    some none."""
    g = torch.Generator().manual_seed(seed)
    B, T = given.labels.shape
    V = given.head.weight.shape[0]
    ids = torch.stack([torch.randperm(V, generator=g)[:count] for _ in range(B * T)])
    ids = ids.view(B, T, count)
    p = torch.rand(B, T, count, generator=g) + 0.05
    p = p / p.sum(-1, keepdim=True) * torch.rand(B, T, 1, generator=g)
    p[..., -1] = torch.where(torch.rand(B, T, generator=g) < 0.3, 0.0, p[..., -1])
    p[torch.rand(B, T, generator=g) < 0.2] = 0.0
    device = given.hidden.device
    return replace(
        given.targets,
        soft_ids_BTK=torch.where(p > 0, ids, given.labels.clamp(min=0)[..., None].cpu()).to(device),
        soft_p_BTK=p.to(device, given.hidden.dtype),
    )


def obvious_k(n: int, keep: float) -> int:
    k = math.floor(Fraction(str(keep)) * n + Fraction(1, 2))
    return max(k, 1) if n and keep > 0 else k


def obvious_selection(
    nll: list[list[float]],
    guidance: list[list[float]],
    valid: list[list[bool]],
    config: ObjectiveConfig,
) -> list[list[bool]]:
    """The definition, one token at a time, for method guided and local scopes."""
    rows = range(len(nll))
    groups = [[b] for b in rows] if config.scope == "sequence" else [list(rows)]
    chosen = [[False] * len(row) for row in nll]
    for group in groups:
        tokens = [(b, t) for b in group for t in range(len(nll[b])) if valid[b][t]]
        mapped = [(b, t) for b, t in tokens if not math.isnan(guidance[b][t])]
        unmapped = [(b, t) for b, t in tokens if math.isnan(guidance[b][t])]
        teacher = {(b, t): guidance[b][t] for b, t in mapped}
        if config.unmapped == "mean":
            mean = sum(teacher.values()) / len(mapped) if mapped else 0.0
            teacher |= dict.fromkeys(unmapped, mean)
            mapped = tokens
        if config.unmapped == "include":
            for b, t in unmapped:
                chosen[b][t] = True
        ranked = sorted(mapped, key=lambda i: (-(nll[i[0]][i[1]] - teacher[i]), i))
        for b, t in ranked[: obvious_k(len(mapped), config.keep)]:
            chosen[b][t] = True
    return chosen
