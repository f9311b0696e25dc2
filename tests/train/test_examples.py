"""The examples are run, torchtitan's with stand-ins for what it inherits from; those in other
packages' trainers are in `tests/trainers`."""

import contextlib
import inspect
import os
import sys
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainers_kit import ARGUMENTS, BATCH, EXAMPLES, STEPS, cut, load, logged, our_losses
from training_kit import ROUNDING, run_processes
from transformers import TrainingArguments

from vocagnolm import GuidedCollator, guide, guided_loss
from vocagnolm.objective import Decided, Head, ObjectiveConfig, Targets, count_items, objective_loss


@pytest.fixture(scope="session")
def demo() -> Any:
    return load("demo_data.py")


@pytest.fixture(scope="session")
def scored(demo, tmp_path_factory) -> Any:
    """A folder, and in it documents and their store."""
    folder = tmp_path_factory.mktemp("examples")
    sys.modules["demo_data"] = demo
    return folder, *demo.texts(folder, STEPS * BATCH)


def added_lines(example: Any) -> int:
    sources = [inspect.getsource(one).splitlines()[1:] for one in (example.guided, example.plain)]
    guided, plain = ({line.strip() for line in lines if line.strip()} for lines in sources)
    return len(guided - plain)


@pytest.mark.parametrize(("name", "most"), [("hf_trainer.py", 5), ("trl_sft.py", 5)])
def test_guidance_takes_few_lines(name, most):
    assert 2 <= added_lines(load(name)) <= most


def test_axolotls_plugin_takes_three_lines():
    lines = (EXAMPLES / "axolotl/guided.yaml").read_text().splitlines()
    at = lines.index("plugins:")
    added, rest = lines[at : at + 3], lines[:at] + lines[at + 3 :]
    assert yaml.safe_load("\n".join(added)).keys() == {"plugins", "guidance"}
    assert not {"plugins", "guidance"} & yaml.safe_load("\n".join(rest)).keys()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_transformers_trainer_makes_the_steps_of_our_loop(demo, scored, tmp_path, micro_batches):
    folder, dataset, store = scored
    model, tokenizer = demo.student()
    rows = BATCH // micro_batches
    expected = our_losses(folder, cut(guide(dataset, store, tokenizer)), micro_batch=rows)
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    arguments = TrainingArguments(str(tmp_path), **{**ARGUMENTS, **settings})
    trainer = load("hf_trainer.py").guided(model, tokenizer, dataset, arguments, store)
    trainer.train()
    np.testing.assert_allclose(logged(trainer), expected, rtol=ROUNDING)
    one = trainer.train_dataset.select([0])
    batch = trainer.data_collator([*one])
    nll = F.cross_entropy(model(batch["input_ids"]).logits[0, :-1], batch["labels"][0, 1:])
    assert trainer.evaluate(one)["eval_loss"] == pytest.approx(nll.item(), rel=1e-5)


def two_trainers(demo, scored, folder, expected):
    _, dataset, store = scored
    model, tokenizer = demo.student()
    settings = {**ARGUMENTS, "per_device_train_batch_size": BATCH // 2}
    arguments = TrainingArguments(str(folder), **settings)
    trainer = load("hf_trainer.py").guided(model, tokenizer, dataset, arguments, store)
    trainer.train()
    np.testing.assert_allclose(logged(trainer), expected, rtol=ROUNDING)
    gradients_of_a_loop(demo.student()[0], trainer.train_dataset)


def gradients_of_a_loop(model, rows):
    """Of two processes, with rows of unequal length: those of one that reads both halves."""
    batches = [GuidedCollator()([rows[n] for n in half]) for half in ((0, 1), (2,))]
    items = sum(int((batch["labels"] != -100).sum()) for batch in batches)

    def backward(trained, batch, items, times=1):
        loss = guided_loss(
            trained(batch["input_ids"]).logits, batch["labels"], batch, num_items_in_batch=items
        )
        (loss * times).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for batch in batches:
        expected = backward(model, batch, items)
    model.zero_grad()
    mine = batches[dist.get_rank()]
    assert int(count_items([mine])) == items
    found = backward(DistributedDataParallel(model), mine, count_items([mine]), times=2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_transformers_trainer_on_two_processes(demo, scored, tmp_path):
    folder, dataset, store = scored
    rows = cut(guide(dataset, store, demo.student()[1]))
    expected = our_losses(folder, rows, micro_batch=BATCH // 2)
    run_processes(two_trainers, 2, demo, scored, tmp_path, expected)


def test_the_plain_loop_makes_the_steps_of_our_loop(demo, scored, monkeypatch):
    folder, dataset, store = scored
    loop = load("plain_loop.py")
    monkeypatch.setattr(loop, "STEPS", STEPS)
    monkeypatch.setattr(loop, "ROWS", BATCH // loop.MICRO_BATCHES)
    losses = loop.train(*demo.student(), dataset, store)
    rows = cut(guide(dataset, store, demo.student()[1]))
    expected = our_losses(folder, rows, micro_batch=BATCH // loop.MICRO_BATCHES)
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)


def accelerate_steps(demo, scored, rows, expected):
    """The last step of the data among them, after which there is no micro-batch."""
    os.environ["ACCELERATE_USE_CPU"] = "1"  # as `accelerate launch --cpu` sets it
    _, dataset, store = scored
    loop = load("accelerate_loop.py")
    loop.STEPS, loop.ROWS = STEPS, rows
    losses = loop.train(*demo.student(), dataset, store)
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_accelerate_loop_makes_the_steps_of_our_loop(demo, scored, processes):
    folder, dataset, store = scored
    rows = BATCH // 2 // processes
    expected = our_losses(folder, cut(guide(dataset, store, demo.student()[1])), micro_batch=rows)
    run_processes(accelerate_steps, processes, demo, scored, rows, expected)


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


def test_a_loop_on_policy(demo, tmp_path, monkeypatch):
    """Answers that transformers draws, a teacher with other tokens: the divergence falls."""
    sys.modules["demo_data"] = demo
    example = load("on_policy_loop.py")
    monkeypatch.setattr(example, "STEPS", 6)
    monkeypatch.setattr(example, "ROWS", 6)
    losses = example.train(*example.demo(tmp_path))
    assert len(losses) == 6 and all(np.isfinite(losses))
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
