"""Short runs of every method, as they were before the source was rearranged (2026-11-18): losses to
six digits, which another machine gives too, and selections and blocks to the last bit."""

import hashlib
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from training_kit import recipe_dict

from vocagnolm.data.blocks import read_manifest
from vocagnolm.methods import METHODS
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.run import train

METHOD_SETTINGS: dict[str, dict] = {
    **{name: {"method": name} for name in METHODS},
    "chunk": {"method": "chunk", "aggregation": "mean"},  # the default when it was pinned
    "stretch": {"method": "guided", "compare": "stretch"},
    "reducible": {"method": "guided", "weighting": "reducible"},
    "mean": {"method": "guided", "unmapped": "mean"},
    "sequence": {"method": "guided", "scope": "sequence", "normalise": "selected"},
    "half": {"method": "distill", "keep": 0.5, "mix_by": "reducible"},
}
PINS = json.loads((Path(__file__).parent / "pinned.json").read_text())


def short_run(lab: Path, folder: Path, name: str) -> dict[str, list[float]]:
    method = METHODS[METHOD_SETTINGS[name]["method"]]
    teacher = {}
    if method.distance:
        teacher = {"model": str(lab / ("twin" if method.one_vocabulary else "other"))}
    tree = recipe_dict(
        lab,
        objective=METHOD_SETTINGS[name],
        teacher=teacher,
        train={"device": "cpu", "batch_blocks": 4, "micro_batch": 2, "tokens": 4 * 4 * 32},
        run={"folder": str(folder), "save_every": 0, "log_every": 1},
    )
    if method.one_vocabulary and not method.distance:  # a reference model beside the student
        tree["teacher"] = {"model": str(lab / "twin"), "online": True}
        tree["store"] = {}
    train(recipe_from_dict(tree), quiet=True)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {key: [step[key] for step in steps] for key in ("loss", "nll_all", "kept_share")}


@pytest.mark.parametrize("name", METHOD_SETTINGS)
def test_a_short_run_is_what_it_was(lab: Path, tmp_path: Path, name: str) -> None:
    found = short_run(lab, tmp_path / "run", name)
    for key, values in found.items():
        assert values == pytest.approx(PINS["runs"][name][key], rel=2e-5, abs=1e-6), key


def test_blocks_are_what_they_were(lab: Path) -> None:
    folder = lab / "blocks"
    columns: dict[str, str] = {}
    for part in read_manifest(folder)["parts"]:
        for name, values in sorted(load_file(folder / part["name"]).items()):
            digest = hashlib.sha256(columns.get(name, "").encode() + values.tobytes())
            columns[name] = digest.hexdigest()
    assert columns == PINS["blocks"]
