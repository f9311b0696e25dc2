"""The guided head beside full logits and Liger: time, memory, errors. One GPU, under two minutes.

    PYTHONPATH=src python benchmarks/head_gpu.py [--third-party DIR] [--json [FILE]] [--smoke]

Forward and backward of the head alone, 16,384 tokens in bf16, for three head shapes. `plain`
trains on every token, `guided` on the 40 % with the largest excess. Errors are against fp32
products of the same bf16 tensors. Targets (last columns): guided takes at most 0.80 x the time of
Liger's plain fused cross entropy as it comes (chunk constant 1) and at most 0.15 x the memory of
full logits. The ratio to Liger's faster setting (larger chunks, more memory) stands beside it.
Experiments (`head_variants.py`): phase 1 in fp8, and its logits kept for phase 2, with the share of
the exact selection that they change; --no-variants leaves them out.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from head_variants import Choice, variants
from measure import arguments, clean, liger_cross_entropy, peak_gib, report, side_by_side
from torch import Tensor

from vocagnolm.objective import (
    Decided,
    Head,
    ObjectiveConfig,
    Targets,
    objective_loss,
    student_nll,
)
from vocagnolm.objective import head as head_module
from vocagnolm.objective.head import Implementation, fp32_output, fused_accumulation

SHAPES = {"TinyLlama": (2048, 32000), "Llama-3.2-1B": (2048, 128256), "Qwen2.5-0.5B": (896, 151936)}
TIME_TARGET, MEMORY_TARGET = 0.80, 0.15
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WAYS: tuple[tuple[torch.dtype | None, Implementation], ...] = (
    (None, "auto"),
    (torch.float64, "reference"),
)


@dataclass
class HeadData:
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    guidance: Tensor


def head_data(tokens: int, d: int, v: int) -> HeadData:
    """Hidden states whose softmax looks like a trained model's: a few likely candidates with
    Zipf-like ids, 5 % of the mass spread over the rest, 8 % surprising labels."""
    g = torch.Generator(device=DEVICE).manual_seed(0)
    rand = partial(torch.rand, device=DEVICE, generator=g)
    randn = partial(torch.randn, device=DEVICE, generator=g)

    def zipf(*shape: int) -> Tensor:
        return (v * rand(shape) ** 3).long().clamp(max=v - 1)

    weight = F.normalize(randn(v, d), dim=1).to(torch.bfloat16)
    candidates = zipf(tokens, 5)
    p = 0.95 * torch.softmax(1.5 * randn(tokens, 5), dim=-1)
    background = math.log(v) + 0.5 - math.log(0.05)  # log-sum-exp of v unit normals, as 5 %
    hidden = randn(tokens, d)
    for c in range(5):
        hidden += (p[:, c].log() + background)[:, None] * weight[candidates[:, c]].float()
    picked = torch.multinomial(p, 1, generator=g)
    labels = candidates.gather(1, picked).squeeze(1)
    labels = torch.where(rand(tokens) < 0.08, zipf(tokens), labels)
    guidance = -p.gather(1, picked).squeeze(1).log() * (0.5 + rand(tokens))
    return HeadData(hidden.to(torch.bfloat16), weight, labels, guidance)


@torch.no_grad()
def exact(data: HeadData, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32: nll of all tokens, gradients of the mean nll of `index` by hidden and weight."""
    weight = data.weight.float()
    nll = torch.empty(len(data.labels), device=DEVICE)
    by_hidden = torch.zeros(data.hidden.shape, device=DEVICE)
    by_weight = torch.zeros_like(weight)
    chosen = torch.zeros(len(nll), 1, device=DEVICE).index_fill_(0, index, 1.0 / len(index))
    for a in range(0, len(nll), 1024):
        part = slice(a, a + 1024)
        hidden = data.hidden[part].float()
        log_p = F.log_softmax(hidden @ weight.t(), dim=-1)
        labels = data.labels[part, None]
        nll[part] = -log_p.gather(1, labels).squeeze(1)
        g = log_p.exp_().scatter_add_(1, labels, torch.full_like(log_p[:, :1], -1.0))
        g *= chosen[part]
        by_hidden[part] = g @ weight
        by_weight.addmm_(g.t(), hidden)
    return nll, by_hidden, by_weight


# A method: (hidden, weight, selection to use or None to make it) -> loss
Method = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def methods(data: HeadData, keep: float) -> dict[str, Method]:
    labels, guidance = data.labels, data.guidance
    k = round(keep * len(labels))

    def ours(impl: Implementation, name: str) -> Method:
        config = ObjectiveConfig(method=name, keep=keep, normalise="selected")

        def call(hidden: Tensor, weight: Tensor, forced: Tensor | None) -> Tensor:
            head = Head(weight=weight)
            targets = Targets(labels_BT=labels[None], guidance_BT=guidance[None])
            return objective_loss(hidden[None], head, targets, config, impl=impl).loss

        return call

    def masked(token_losses: Callable[[Tensor, Tensor], Tensor]) -> Method:
        def call(hidden: Tensor, weight: Tensor, forced: Tensor | None) -> Tensor:
            nll = token_losses(hidden, weight)
            index = forced
            if index is None:
                index = torch.topk(nll.detach() - guidance, k, sorted=False).indices
            return nll[index].mean()

        return call

    def full(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none")

    fused: Implementation = "fused" if CUDA else "chunked"
    found: dict[str, Method] = {
        "plain full logits": lambda h, w, _: full(h, w).mean(),
        "plain ours": ours(fused, "cpt"),
        "guided full logits + mask": masked(full),
        "guided ours, torch rows": ours("chunked", "guided"),
        "guided ours": ours(fused, "guided"),
    }
    liger = liger_cross_entropy() if CUDA else None
    if liger is not None:

        def plain_liger(const: int) -> Method:
            return lambda h, w, _: liger(h, w, labels, chunk_mem_const=const)

        for const in (1, 16):
            found[f"plain Liger, chunk const {const}"] = plain_liger(const)
        found["guided Liger + mask"] = masked(
            lambda h, w: liger(h, w, labels, reduction="none", chunk_mem_const=16)
        )
    return found


def measure_shape(
    name: str, tokens: int, d: int, v: int, keep: float, rounds: int, *, experiments: bool
) -> list[dict[str, Any]]:
    data = head_data(tokens, d, v)
    hidden, weight = (t.detach().requires_grad_() for t in (data.hidden, data.weight))
    head = Head(weight=data.weight)
    config = ObjectiveConfig(keep=keep)
    with torch.no_grad():
        targets = Targets(labels_BT=data.labels[None], guidance_BT=data.guidance[None])
        selected = objective_loss(data.hidden[None], head, targets, config).selected_BT[0]
    index = selected.nonzero().squeeze(1)
    everything = torch.arange(tokens, device=DEVICE)
    truths = {"guided": exact(data, index), "plain": exact(data, everything)}
    nll_error = (
        student_nll(data.hidden[None], head, data.labels[None])[0] - truths["plain"][0]
    ).abs()
    exact_selection = torch.topk(truths["plain"][0] - data.guidance, len(index)).indices
    agreement = float(selected[exact_selection].float().mean())

    def step(method: Method, forced: Tensor | None = None) -> Tensor:
        hidden.grad = weight.grad = None
        loss = method(hidden, weight, forced)
        loss.backward()
        return loss.detach()

    available = methods(data, keep)
    choice = Choice(data.labels, data.guidance, len(index))
    tried = variants(choice) if experiments else {}
    changed: dict[str, float] = {}
    for label, method in tried.items():
        try:
            step(method)
        except RuntimeError as error:  # no such kernel, no memory: the others go on
            print(f"{name}, {label}: {error}", file=sys.stderr, flush=True)
            clean()
            continue
        available[label] = method
        assert choice.chosen is not None
        found = torch.zeros(tokens, dtype=torch.bool, device=DEVICE)
        found[choice.chosen] = True
        changed[label] = 1 - float(found[exact_selection].float().mean())
    rows: list[dict[str, Any]] = []
    for label, method in available.items():
        kind = label.split()[0].rstrip(",")
        nll, by_hidden, by_weight = truths[kind]
        loss = step(method, index if kind == "guided" else None)
        target = nll[index if kind == "guided" else everything].mean()
        errors = {
            "loss error": float((loss - target).abs()),
            "dH error": relative(hidden.grad, by_hidden),
            "dW error": relative(weight.grad, by_weight),
        }
        hidden.grad = weight.grad = None
        rows.append(
            {
                "head": name,
                "method": label,
                "ms": 0.0,
                "peak GiB": peak_gib(partial(step, method)),
                **errors,
            }
        )
    for label, share in changed.items():
        rows[_row(rows, label)]["selection changed"] = share
    rows[_row(rows, "guided ours")].update(
        {"nll max error": float(nll_error.max()), "selection changed": 1 - agreement}
    )
    del truths
    clean()
    times = side_by_side(
        {label: partial(step, method) for label, method in available.items()}, rounds=rounds
    )
    for row in rows:
        row["ms"] = times[row["method"]]
    add_ratios(rows)
    return rows


def _row(rows: list[dict[str, Any]], method: str) -> int:
    return next(i for i, row in enumerate(rows) if row["method"] == method)


def relative(value: Tensor | None, truth: Tensor) -> float:
    assert value is not None
    return float((value.float() - truth).norm() / truth.norm())


def add_ratios(rows: list[dict[str, Any]]) -> None:
    ours = rows[_row(rows, "guided ours")]
    liger = [row["ms"] for row in rows if row["method"].startswith("plain Liger")]
    default, best = (liger[0], min(liger)) if liger else (None, None)
    full = rows[_row(rows, "guided full logits + mask")]
    if default and best:
        ours["time / Liger"] = ours["ms"] / default
        ours["time ok"] = ours["time / Liger"] <= TIME_TARGET
        for row in rows:
            if row["method"].startswith("guided"):
                row["time / Liger tuned"] = row["ms"] / best
    if full["peak GiB"]:
        ours["memory / full"] = ours["peak GiB"] / full["peak GiB"]
        ours["memory ok"] = ours["memory / full"] <= MEMORY_TARGET


def check_features() -> None:
    """Bias, soft cap, scale and odd shapes on this device, several chunks, against full logits in
    fp64: a benchmark of a wrong result would be worthless."""
    usual = head_module._chunk_bytes
    head_module._chunk_bytes = lambda device, exact: 1  # type: ignore[assignment]
    g = torch.Generator(device=DEVICE).manual_seed(1)
    make = partial(torch.randn, device=DEVICE, generator=g)
    labels = torch.randint(0, 5003, (2, 77), device=DEVICE, generator=g)
    labels[:, -1] = -100
    guidance = 10 * make(2, 77).abs()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for softcap, scale in ((None, 1.0), (5.0, 0.5)):
            leaves = [
                make(2, 77, 72).to(dtype),
                0.3 * make(5003, 72).to(dtype),
                make(5003).to(dtype),
            ]
            results, chosen = [], None
            for wide, impl in WAYS:
                hidden, weight, bias = (
                    t.detach().to(wide or t.dtype).requires_grad_() for t in leaves
                )
                head = Head(weight=weight, bias=bias, softcap=softcap, scale=scale)
                targets = Targets(labels_BT=labels, guidance_BT=guidance)
                output = objective_loss(
                    hidden, head, targets, impl=impl, decided=Decided(weights_BT=chosen)
                )
                chosen = output.selected_BT
                (output.loss * 3).backward()
                results.append([output.loss.detach(), hidden.grad, weight.grad, bias.grad])
            worst = max(relative(a, b.float()) for a, b in zip(*results, strict=True))
            limit = 1e-5 if dtype == torch.float32 else 3e-2
            assert worst < limit, f"{dtype}, soft cap {softcap}: relative error {worst:.1e}"
    head_module._chunk_bytes = usual
    device = torch.empty(0, device=DEVICE).device
    print(
        f"features agree with fp64 full logits; products of bf16 into fp32: "
        f"{fp32_output(device, torch.bfloat16)}, with accumulation: "
        f"{fused_accumulation(device, torch.bfloat16)}",
        file=sys.stderr,
    )


def main() -> None:
    given = arguments(
        __doc__,
        tokens={"type": int, "default": 16384},
        keep={"type": float, "default": 0.4},
        rounds={"type": int, "default": 15},
        only={"default": "", "help": "one head by name: " + ", ".join(SHAPES)},
        no_variants={"action": "store_true", "help": "leave the experiments out"},
        chunk_mib={"default": "", "help": "PHASE1,PHASE2: other chunk budgets, to tune them"},
    )
    check_features()
    if given.chunk_mib:
        first, second = (int(x) << 20 for x in given.chunk_mib.split(","))
        budget = {True: first, False: second}
        head_module._chunk_bytes = lambda device, exact: budget[exact]  # type: ignore[assignment]
    rows = []
    for name, (d, v) in SHAPES.items():
        if given.only and given.only != name:
            continue
        tokens, rounds = given.tokens, given.rounds
        if given.smoke:
            tokens, d, v, rounds = 192, 64, 640, 3
        rows += measure_shape(
            name, tokens, d, v, given.keep, rounds, experiments=not given.no_variants
        )
        clean()
    report(
        "head, forward + backward, " + ("smoke" if given.smoke else torch.cuda.get_device_name()),
        rows,
        given.json,
    )


if __name__ == "__main__":
    main()
