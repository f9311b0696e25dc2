"""Studies for a GPU run from end to end on tiny materials before they are given hours."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults_kit import LONG
from made import sentencepiece_bpe
from study_kit import TINY, save_model, write_materials

from vocagnolm_studies import load_study, run_study, shipped_studies

PLACE = Path("materials")


def materials_of(tree: Any) -> set[str]:
    """The files and folders below the materials that a study names."""
    if isinstance(tree, str):
        path = Path(tree)
        return {str(path.relative_to(PLACE))} if path.is_relative_to(PLACE) else set()
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    inner = vars(tree).values() if hasattr(tree, "__dict__") else inner
    return {name for part in inner for name in materials_of(part)}


SHIPPED = {name: load_study(name, materials=PLACE) for name in shipped_studies()}
# not the grids of dozens of rows, and what needs a store or models that cannot be made here
STUDIES = [
    name
    for name, study in SHIPPED.items()
    if 0 < len(study.use) <= 12 and "written" not in materials_of(study)
]


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What any study names: texts as copies of a few, models with random weights."""
    folder = write_materials(tmp_path_factory.mktemp("planned") / "materials")
    for name in sorted({part for study in STUDIES for part in materials_of(SHIPPED[study])}):
        path = folder / name
        if path.exists():
            continue
        if path.suffix != ".jsonl":
            save_model(path, sentencepiece_bpe(600), seed=5)
            continue
        kind = "requests" if name.endswith("requests.jsonl") else "main"
        path.write_text((folder / f"{kind}.jsonl").read_text())
    return folder


@pytest.mark.parametrize("name", STUDIES if LONG else ["distill-heal"])
def test_it_runs_from_end_to_end(name: str, materials: Path, tmp_path: Path) -> None:
    study = load_study(name, materials=materials)
    tree: dict[str, Any] = {"extends": name, **copy.deepcopy(TINY)}
    tree["base"]["data"]["eos"] = "auto"
    if "same" not in study.teachers:
        del tree["teachers"]
    if study.start is None:
        del tree["start"]
    tree["tune"] = {"learning_rates": [1e-3], "set": {"train.tokens": 512}}
    tree["rows"] = {row: {"seeds": [1]} for row in study.rows}
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    table, _ = run_study(str(path), tmp_path / "out", materials=materials)
    seeds = {row["row"]: row["seeds"] for row in table["rows"]}
    assert table["missing"] == []
    assert {row: seeds[row] for row in study.use} == {row: [1] for row in study.use}
