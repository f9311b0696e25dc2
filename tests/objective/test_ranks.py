"""Scope global over two processes: the selection and the loss of one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_kit import run_processes

from vocagnolm.objective import (
    Head,
    ObjectiveConfig,
    ScoredBatch,
    Targets,
    objective_loss,
    weigh_step,
)

CONFIGS = [
    ObjectiveConfig(scope="global"),
    ObjectiveConfig(scope="global", unmapped="mean", normalise="selected"),
    ObjectiveConfig(scope="global", method="random"),
    ObjectiveConfig(scope="global", method="chunk", n_chunks=3),
    ObjectiveConfig(scope="global", method="rho1", entropy_keep=0.7),
    ObjectiveConfig(scope="batch", method="cpt"),
]
B, T, D, V = 8, 6, 5, 32


def data() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    nll = torch.randint(0, 6, (B, T), generator=g) / 2.0  # ties, also across the ranks
    guidance = torch.randint(0, 4, (B, T), generator=g) / 2.0
    guidance[torch.rand(B, T, generator=g) < 0.2] = torch.nan
    labels = torch.randint(0, V, (B, T), generator=g)
    labels[:, -1] = -100
    return {
        "nll": nll,
        "guidance": guidance,
        "labels": labels,
        "entropy": torch.rand(B, T, generator=g),
        "hidden": torch.randn(B, T, D, generator=g),
        "weight": torch.randn(V, D, generator=g),
    }


def scored(x: dict[str, torch.Tensor], rows: slice) -> ScoredBatch:
    return ScoredBatch(targets(x, rows), x["nll"][rows])


def targets(x: dict[str, torch.Tensor], rows: slice) -> Targets:
    return Targets(
        labels_BT=x["labels"][rows],
        guidance_BT=x["guidance"][rows],
        entropy_BT=x["entropy"][rows],
    )


def loss(x: dict[str, torch.Tensor], rows: slice, config: ObjectiveConfig):
    weight = x["weight"].clone().requires_grad_()
    output = objective_loss(
        x["hidden"][rows], Head(weight=weight), targets(x, rows), config, step=5
    )
    output.loss.backward()
    return output.loss.detach(), weight.grad


def work(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, results = data(), []
    for config in CONFIGS:
        # two micro-batches of two sequences a rank, dealt as accelerate deals them
        mine = [slice(2 * rank, 2 * rank + 2), slice(4 + 2 * rank, 6 + 2 * rank)]
        step = weigh_step([scored(x, rows) for rows in mine], config, step=5)
        results.append(
            {
                "selected": list(zip([r.start for r in mine], step.weights, strict=True)),
                "denominator": step.denominator,
                # one micro-batch of four: the door exchanges the counts itself
                "loss": loss(x, slice(4 * rank, 4 * rank + 4), config),
            }
        )
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_processes(work, 2, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("which", range(len(CONFIGS)), ids=lambda i: f"{CONFIGS[i].method}{i}")
def test_two_processes_select_what_one_does(two_ranks, which):
    x, config = data(), CONFIGS[which]
    one = weigh_step([scored(x, slice(0, B))], config, step=5)
    together = torch.zeros(B, T, dtype=torch.bool)
    for results in two_ranks:
        assert int(results[which]["denominator"]) == int(one.denominator)
        for first, selected in results[which]["selected"]:
            together[first : first + 2] = selected
    assert torch.equal(together, one.weights[0])
    if config.scope == "global":
        alone_loss, alone_gradient = loss(x, slice(0, B), config)
        losses, gradients = zip(*(results[which]["loss"] for results in two_ranks), strict=True)
        torch.testing.assert_close(sum(losses), alone_loss)
        torch.testing.assert_close(sum(gradients), alone_gradient)
