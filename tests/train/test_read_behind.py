"""Steps whose totals are read when the next ones are under way: nothing but the waiting changes."""

import functools

import pytest
import torch
from faults_kit import LONG
from torch.utils._python_dispatch import TorchDispatchMode
from training_kit import ROUNDING, built_loop, recipe_dict, run_processes

from vocagnolm.errors import TrainingError
from vocagnolm.objective import ObjectiveConfig, Targets, count_kept, select
from vocagnolm.objective.selection import ScoredBatch
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train import run
from vocagnolm.train.collate import token_counts
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.loop import TrainingLoop

FUSED = {"name": "adamw_torch_fused", "learning_rate": 3e-3, "min_learning_rate": 3e-4}


def tree(lab, folder, **sections):
    return recipe_dict(
        lab,
        optimizer={**FUSED, **sections.pop("optimizer", {})},
        train={"tokens": 6 * 256, "micro_batch": 2, **sections.pop("train", {})},
        run={"folder": str(folder), "save_every": 4, "log_every": 5},
        **sections,
    )


def train_behind(settings, behind):
    original = run.TrainingLoop
    run.TrainingLoop = functools.partial(original, read_behind=behind)
    try:
        run.train(recipe_from_dict(settings), quiet=True)
    finally:
        run.TrainingLoop = original


def built(settings, read_behind, on_step=None) -> TrainingLoop:
    return built_loop(settings, on_step, read_behind=read_behind)


def measured(folder):
    records = read_metrics(folder / "metrics.jsonl")
    for record in records:
        assert record.pop("tokens_per_second") > 0 and 0 <= record.pop("data_wait_share") <= 1
    return records


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch"])
def test_reading_behind_changes_no_record_and_no_weight(lab, tmp_path, name):
    for behind in (0, 1, 3) if name.endswith("fused") else (0, 3):
        folder = tmp_path / str(behind)
        train_behind(tree(lab, folder, optimizer={"name": name}), behind)
        assert [r["step"] for r in measured(folder)] == [1, 2, 3, 4, 5, 6]
        assert measured(folder) == measured(tmp_path / "0")
        weights, expected = (
            (f / "model" / "model.safetensors").read_bytes() for f in (folder, tmp_path / "0")
        )
        assert weights == expected


def test_steps_are_read_behind_and_all_before_a_checkpoint_or_a_log(lab, tmp_path):
    seen = []
    loop = built(
        tree(lab, tmp_path / "run"),
        read_behind=2,
        on_step=lambda record: seen.append((record["step"], loop.step)),
    )
    loop.run()
    # 4: a checkpoint, 5: a log, 6: the last
    assert seen == [(1, 3), (2, 4), (3, 4), (4, 4), (5, 5), (6, 6)]


def break_step(loop, step, factor=torch.nan):
    """The loss of this step's second micro-batch is no number, and so are its gradients. Gives
    the weights before it, in time."""
    before, calls = {}, []

    def broken(module, inputs, output):
        if loop.step == step - 1 and module.training:
            calls.append(1)
            if len(calls) == 2:
                before.update({k: v.clone() for k, v in loop.student.state_dict().items()})
                output["loss"] = output["loss"] * factor
        return output

    loop.student.register_forward_hook(broken)
    return before


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize("behind", [0, 2])
def test_a_loss_that_is_not_finite_never_changes_the_weights(lab, tmp_path, name, behind):
    loop = built(tree(lab, tmp_path / "run", optimizer={"name": name}), read_behind=behind)
    before = break_step(loop, 2)
    with pytest.raises(TrainingError, match=r"nan in step 2, micro-batch 1 of rank 0, blocks \["):
        loop.run()
    assert_untouched(loop, before)
    # where the optimizer can skip a step, the host has gone on
    waits = behind == 0 or name == "adamw_torch"
    assert loop.step == (1 if waits else 4)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def assert_untouched(loop, before):
    after = loop.student.state_dict()
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    steps = {float(state["step"]) for state in loop.optimizer.state.values()}
    assert steps == {1.0}


def break_one_rank(settings):
    loop = built(settings, read_behind=2)
    here = loop.ranks.rank == 1
    before = break_step(loop, 2, torch.nan if here else 1.0)
    expected = r"nan in step 2, micro-batch 1 of rank 1, blocks \["
    if not here:
        expected = "nan in step 2: see the error of another rank"
    with pytest.raises(TrainingError, match=expected):
        loop.run()
    assert_untouched(loop, before)


def test_all_ranks_leave_their_weights_alone(lab, tmp_path):
    run_processes(break_one_rank, 2, tree(lab, tmp_path / "run"))


def train_sharded(settings):
    train_behind(settings, 2)


def test_sharded_weights_too(lab, tmp_path):
    train_behind(tree(lab, tmp_path / "one"), 0)
    settings = tree(lab, tmp_path / "two", train={"parallel": "fsdp2"})
    run_processes(train_sharded, 2, settings)
    one, two = (measured(tmp_path / name) for name in ("one", "two"))
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=ROUNDING)


class NoWaiting(TorchDispatchMode):
    """Fails where the host would wait for a device: it asks for a number or for a size that only
    the device knows, or sends one."""

    WAITS = frozenset(
        {
            *("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal"),
            *("unique_consecutive", "_unique2", "lift_fresh"),
        }
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for the device"
        if name in ("index", "index_put_", "index_put"):
            places = [place for place in args[1] if place is not None]
            assert all(place.dtype != torch.bool for place in places), "indexed by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "objective",
    [
        {"method": "guided"},
        {"method": "guided", "unmapped": "mean", "scope": "sequence"},
        {"method": "random"},
        {"method": "guided", "weighting": "reducible", "compare": "stretch"},
        {"method": "guided", "normalise": "selected", "unmapped": "exclude"},
        {"method": "cpt"},
        {"method": "no_teacher"},
    ][: None if LONG else 4],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_a_step_never_waits_for_the_device(lab, tmp_path, objective):
    loop = built(tree(lab, tmp_path / "run", objective=objective), read_behind=1)
    watched = []

    def watch(name):
        method = getattr(loop, name)

        def call(*args, **kwargs):
            watched.append(name)
            if loop.step in (0, 4, 5):  # caches are filled; saved, logged, the last
                return method(*args, **kwargs)
            with NoWaiting():
                return method(*args, **kwargs)

        setattr(loop, name, call)

    for name in ("train_step", "end_step"):  # the whole of a step
        watch(name)
    loop.run()
    assert loop.step == 6 and len(set(watched)) == 2


@pytest.mark.parametrize("unmapped", ["include", "exclude", "mean"])
@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.4, 1.0])
def test_the_count_is_that_of_the_selection(unmapped, scope, keep):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 50, (3, 17), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[2] = -100
    guidance = torch.rand(labels.shape, generator=generator)
    guidance[torch.rand(labels.shape, generator=generator) < 0.3] = torch.nan
    nll = torch.rand(labels.shape, generator=generator)
    nll[0, 3] = torch.nan
    counts = token_counts({"labels": labels, "guidance": guidance})
    batch = ScoredBatch(Targets(labels_BT=labels, guidance_BT=guidance), nll)
    for method in ("guided", "random", "no_teacher", "cpt"):
        config = ObjectiveConfig(method=method, unmapped=unmapped, scope=scope, keep=keep)
        assert count_kept(counts, config) == int(select(batch, config).sum())
    assert count_kept(counts, ObjectiveConfig(compare="stretch")) is None
    assert count_kept(None, ObjectiveConfig()) is None
