"""Studies for a GPU run from end to end on tiny materials before they are given hours."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults_kit import LONG
from made import sentencepiece_bpe
from study_kit import TINY, save_model, write_materials

from vocagnolm_studies import run_study
from vocagnolm_studies.design import SHIPPED

STUDIES = ["distill-heal", "distill-longest", "distill-longest-low", "distill-unchecked"]
CORPORA = ("noisy-50", "unchecked", "unchecked-50", "unchecked-00")
HELD_OUT = (
    "answers",
    "results",
    "solutions-right",
    "solutions-wrong",
    "mmlu-right",
    "mmlu-wrong",
)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_materials(tmp_path_factory.mktemp("planned") / "materials")
    save_model(folder / "tinyllama", sentencepiece_bpe(600), seed=5)
    copies = dict.fromkeys(CORPORA, "main") | dict.fromkeys(HELD_OUT, "held-out-gsm8k")
    copies |= {"validation-requests": "requests", "whole-requests": "requests"}
    for name, source in copies.items():
        (folder / f"{name}.jsonl").write_text((folder / f"{source}.jsonl").read_text())
    return folder


@pytest.mark.parametrize("name", STUDIES if LONG else STUDIES[:1])
def test_it_runs_from_end_to_end(name: str, materials: Path, tmp_path: Path) -> None:
    own = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    tree: dict[str, Any] = {"extends": str(SHIPPED / f"{name}.yaml"), **copy.deepcopy(TINY)}
    del tree["teachers"]
    if own.get("start", "") is None:
        del tree["start"]
    tree["tune"] = {"learning_rates": [1e-3], "set": {"train.tokens": 512}}
    tree["rows"] = {row: {"seeds": [1]} for row in own["use"]}
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    table, _ = run_study(str(path), tmp_path / "out", materials=materials)
    rows = {row["row"]: row for row in table["rows"]}
    assert {*own["use"]} <= rows.keys()
    assert all(rows[row]["seeds"] == [1] for row in own["use"])
