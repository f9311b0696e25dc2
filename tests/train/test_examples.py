"""The examples are run, torchtitan's with stand-ins for what it inherits from."""

import contextlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_kit import run_processes

from vocagnolm.objective import Decided, Head, ObjectiveConfig, Targets, objective_loss

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plain_loop_learns(lab, monkeypatch, capsys):
    loop = load("plain_loop.py")
    monkeypatch.setattr(loop, "LENGTH", 32)
    losses = loop.train(str(lab / "blocks"), str(lab / "twin"))
    assert len(losses) == loop.STEPS and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert "kept 4" in capsys.readouterr().out


def test_the_plain_loop_makes_its_own_blocks(tmp_path, monkeypatch):
    loop = load("plain_loop.py")
    monkeypatch.setattr(loop, "STEPS", 2)
    assert all(0 < loss < 3 for loss in loop.train(*loop.demo_blocks(tmp_path)))


# ---- torchtitan ----


class Component:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


class BaseDataLoader(Component):
    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        dataset_path: str | None = None


class TitanTrainer(Component):
    def train_context(self):
        return contextlib.nullcontext()


def compute_logprobs(logits, labels):
    nll = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return -nll.view(labels.shape)


@pytest.fixture
def titan(monkeypatch) -> Any:
    """What the example takes from torchtitan 0.3.0, as that documents it."""
    given = {
        "components.dataloader": {"BaseDataLoader": BaseDataLoader},
        "components.loss": {"BaseLoss": Component, "compute_logprobs": compute_logprobs},
        "trainer": {"Trainer": TitanTrainer},
    }
    for name in ("torchtitan", "torchtitan.components"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, content in given.items():
        module = types.ModuleType(f"torchtitan.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return load("torchtitan/guided.py")


def batches(titan, lab, ranks: int, rank: int) -> Any:
    config = titan.BlockLoader.Config(dataset_path=str(lab / "blocks"))
    return titan.BlockLoader(
        config, dp_world_size=ranks, dp_rank=rank, seq_len=32, local_batch_size=4 // ranks
    )


def made_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(320, 16), nn.Linear(16, 16), nn.Linear(16, 320, bias=False))


def test_titans_loss_is_the_objective(titan, lab):
    """Against the project's own loss, on the same hidden states."""
    inputs, labels = next(iter(batches(titan, lab, 1, 0)))
    model, tokens = made_model(), torch.tensor(labels.numel())
    loss, metrics = titan.GuidedLoss(titan.GuidedLoss.Config(keep=0.3))(
        model(inputs["input"]), labels, tokens, guidance=inputs["guidance"]
    )
    ours = objective_loss(
        model[:2](inputs["input"]),
        Head(weight=model[2].weight),
        Targets(labels_BT=labels, guidance_BT=inputs["guidance"]),
        ObjectiveConfig(keep=0.3),
        decided=Decided(denominator=tokens),
    )
    torch.testing.assert_close(loss, ours.loss, rtol=1e-6, atol=1e-6)
    assert metrics == {} and 0.25 < ours.stats["kept_share"] < 0.5
    validation, _ = titan.GuidedLoss(titan.GuidedLoss.Config())(model(inputs["input"]), labels)
    assert float(validation) == pytest.approx(float(ours.nll_BT.sum()), rel=1e-5)


def sharded_gradients(titan, lab, expected: dict[str, torch.Tensor]) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = made_model()
    fully_shard(model[1])
    fully_shard(model)
    trainer = titan.GuidedTrainer()
    trainer.model_parts = [model]
    trainer.loss_fn = titan.GuidedLoss(titan.GuidedLoss.Config(scope="sequence"))
    inputs, labels = next(iter(batches(titan, lab, 2, rank)))
    extra = {"guidance": inputs["guidance"]}
    trainer._forward_backward_body(inputs["input"], labels, torch.tensor(4 * 32), extra)
    for name, parameter in model.named_parameters():
        # torchtitan has FSDP sum gradients; gloo can only take the mean
        difference = (2 * parameter.grad.full_tensor() - expected[name]).abs().max()
        assert float(difference) < 1e-6, name
    dist.destroy_process_group()


def test_titans_loss_on_two_ranks_has_the_gradients_of_one(titan, lab):
    model = made_model()
    inputs, labels = next(iter(batches(titan, lab, 1, 0)))
    function = titan.GuidedLoss(titan.GuidedLoss.Config(scope="sequence"))
    loss, _ = function(
        model(inputs["input"]), labels, torch.tensor(4 * 32), guidance=inputs["guidance"]
    )
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
    run_processes(sharded_gradients, 2, titan, lab, expected)


def test_titans_loader_goes_on_where_it_stopped(titan, lab):
    loader = batches(titan, lab, 2, 1)
    seen = iter(loader)
    for _ in range(3):
        next(seen)
    again = batches(titan, lab, 2, 1)
    again.load_state_dict(loader.state_dict())
    (ours, labels), (theirs, expected) = next(seen), next(iter(again))
    assert torch.equal(ours["input"], theirs["input"]) and torch.equal(labels, expected)
