"""Short runs of every method and every kind of run, as they were before the source was rearranged
(2026-11-18, the kinds 2026-11-19): losses to six digits, which another machine gives too, and
selections and blocks to the last bit."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from training_kit import LLAMA, recipe_dict, run_processes, stop_after

from vocagnolm.data.blocks import read_manifest
from vocagnolm.data.prepare import prepare
from vocagnolm.objective import ObjectiveConfig, ScoredBatch, Targets, weigh_step
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.recipe.methods import METHODS
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.run import train

METHOD_SETTINGS: dict[str, dict] = {
    **{name: {"method": name} for name, method in METHODS.items() if not method.on_policy},
    "chunk": {"method": "chunk", "aggregation": "mean"},  # the default when it was pinned
    "stretch": {"method": "guided", "compare": "stretch"},
    "reducible": {"method": "guided", "weighting": "reducible"},
    "mean": {"method": "guided", "unmapped": "mean"},
    "sequence": {"method": "guided", "scope": "sequence", "normalise": "selected"},
    "half": {"method": "distill", "keep": 0.5, "mix_by": "reducible"},
}
GLOBAL = {"scope": "global", "normalise": "selected"}
DROPOUT = {"config": {**LLAMA, "attention_dropout": 0.1}}
KINDS: dict[str, dict] = {
    "one micro-batch": {"train": {"micro_batch": 4}},
    "global scope over accumulation": {"objective": GLOBAL},
    "dropout": {"student": DROPOUT},
    "resumed": {"student": DROPOUT},
    "bfloat16 arithmetic": {"train": {"dtype": "bfloat16"}},
    "adapters": {"lora": {"rank": 2, "dropout": 0.1}},
    "documents kept apart": {"data": {"document_mask": True}},
    "online teacher": {"teacher": {"online": True}},
    "online teacher, distilled": {"teacher": {"online": True}, "objective": {"method": "distill"}},
    "two processes": {"objective": GLOBAL, "train": {"micro_batch": 1}},
    "two shards": {"objective": GLOBAL, "train": {"micro_batch": 1, "parallel": "fsdp2"}},
}
"""Changes to a guided run of two micro-batches a step in one process."""
SAME_AS = {
    "resumed": "dropout",
    "two processes": "global scope over accumulation",
    "two shards": "global scope over accumulation",
}
MEASURES = ("loss", "nll_all", "kept_share")
PINS = json.loads((Path(__file__).parent / "pinned.json").read_text())


def settings(lab: Path, folder: Path, **sections: dict) -> dict:
    """The recipe of a short run: four steps."""
    steps = {"batch_blocks": 4, "micro_batch": 2, "tokens": 4 * 4 * 32}
    sections["train"] = {"device": "cpu", **steps, **sections.get("train", {})}
    sections["run"] = {"folder": str(folder), "save_every": 0, **sections.get("run", {})}
    return recipe_dict(lab, **sections)


def of_method(lab: Path, folder: Path, name: str) -> dict:
    method = METHODS[METHOD_SETTINGS[name]["method"]]
    tree = settings(lab, folder, objective=METHOD_SETTINGS[name])
    if method.distance:
        tree["teacher"] = {"model": str(lab / ("twin" if method.one_vocabulary else "other"))}
    elif method.one_vocabulary:  # a reference model beside the student
        tree |= {"teacher": {"model": str(lab / "twin"), "online": True}, "store": {}}
    return tree


def of_kind(lab: Path, folder: Path, name: str) -> dict:
    # given, they are not measured in every run
    changes = {**KINDS[name], "student": {"bits_per_byte": 8.0, **KINDS[name].get("student", {})}}
    if name == "adapters":
        changes["student"] |= {"config": None, "model": str(lab / "twin")}
    if name == "resumed":
        changes["run"] = {"save_every": 2}
    if name == "documents kept apart":
        changes["data"] |= {"blocks": str(folder.parent / "blocks")}
    tree = settings(lab, folder, **changes)
    if "teacher" in changes:
        tree |= {"teacher": {"model": str(lab / "other"), "online": True}, "store": {}}
    return tree


def run(tree: dict) -> None:
    train(recipe_from_dict(tree), quiet=True)


def run_and_stop(tree: dict) -> None:
    """Ends in an error after the third step, the checkpoint of the second behind it."""
    stop_after(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(tree)


def assert_pinned(folder: Path, expected: dict[str, list[float]]) -> None:
    steps = read_metrics(folder / "metrics.jsonl")
    for name in MEASURES:
        values = [step[name] for step in steps]
        assert values == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("name", METHOD_SETTINGS)
def test_a_short_run_is_what_it_was(lab: Path, tmp_path: Path, name: str) -> None:
    run(of_method(lab, tmp_path / "run", name))
    assert_pinned(tmp_path / "run", PINS["runs"][name])


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_run_is_what_it_was(lab: Path, tmp_path: Path, name: str) -> None:
    tree = of_kind(lab, tmp_path / "run", name)
    if name == "documents kept apart":
        prepare(recipe_from_dict(tree))
    if name == "resumed":
        run_processes(run_and_stop, 1, tree)
    run_processes(run, 2 if name.startswith("two") else 1, tree)
    assert_pinned(tmp_path / "run", PINS["kinds"][SAME_AS.get(name, name)])


SELECTIONS: dict[str, dict] = {
    **{f"{scope}, {unmapped}": {"scope": scope, "unmapped": unmapped}
       for scope in ("sequence", "batch", "global") for unmapped in ("include", "exclude", "mean")},
    "half": {"keep": 0.5},
    "selected": {"normalise": "selected"},
    "stretch": {"compare": "stretch"},
    "reducible": {"weighting": "reducible"},
    "reducible stretches": {"weighting": "reducible", "compare": "stretch", "unmapped": "exclude"},
    "random": {"method": "random"},
    "no teacher": {"method": "no_teacher"},
    "chunks": {"method": "chunk", "n_chunks": 5},
    "random chunks": {"method": "chunk", "chunk_choice": "random", "n_chunks": 5},
    "rho1": {"method": "rho1"},
    "certain": {"method": "rho1", "entropy_keep": 0.7},
    "distill": {"method": "distill", "keep": 0.4},
    "alm": {"method": "alm"},
    "cpt": {"method": "cpt"},
}  # fmt: skip


def scored_batches(stretches: bool) -> list[ScoredBatch]:
    """Two micro-batches of made-up losses on a grid of 1 / 1,024 nat, whose sums are exact."""
    generator = torch.Generator().manual_seed(0)

    def nats() -> torch.Tensor:
        return torch.randint(1, 5000, (3, 29), generator=generator) / 1024

    batches = []
    for _ in range(2):
        labels = torch.randint(0, 50, (3, 29), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        guidance = nats()
        guidance[torch.rand(labels.shape, generator=generator) < 0.2] = torch.nan
        begins = torch.rand(labels.shape, generator=generator) < 0.6
        targets = Targets(
            labels_BT=labels,
            guidance_BT=guidance,
            entropy_BT=nats(),
            stretch_BT=begins.long().cumsum(1).clamp(max=28) if stretches else None,
        )
        batches.append(ScoredBatch(targets, nats()))
    return batches


@pytest.mark.parametrize("name", SELECTIONS)
def test_weights_are_what_they_were(name: str) -> None:
    """Which tokens are kept to the last bit, graded weights to six digits, and their divisor."""
    config = ObjectiveConfig(**SELECTIONS[name])
    step = weigh_step(scored_batches(config.by_stretch), config, step=3)
    kept = torch.stack(step.weights) != 0
    expected = PINS["weights"][name]
    assert hashlib.sha256(kept.numpy().tobytes()).hexdigest()[:16] == expected["kept"]
    total = float(torch.stack(step.weights).double().sum())
    assert [total, float(step.denominator)] == pytest.approx(expected["sums"], rel=1e-6)


def test_blocks_are_what_they_were(lab: Path) -> None:
    folder = lab / "blocks"
    columns: dict[str, str] = {}
    for part in read_manifest(folder)["parts"]:
        for name, values in sorted(load_file(folder / part["name"]).items()):
            digest = hashlib.sha256(columns.get(name, "").encode() + values.tobytes())
            columns[name] = digest.hexdigest()
    assert columns == PINS["blocks"]
