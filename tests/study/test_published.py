"""The numbers of research/results can be made again, from the runs that are kept beside them."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from faults_kit import LONG

from vocagnolm_studies.run import run_study

RESULTS = Path(__file__).parents[2] / "research" / "results"


def numbers(value: Any, where: str = "") -> dict[str, Any]:
    """Path -> leaf of a JSON tree."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {}
    for key, part in inner:
        nested = isinstance(part, dict | list)
        found |= numbers(part, f"{where}/{key}") if nested else {f"{where}/{key}": part}
    return found


STUDIES = [
    "distill",
    "distill-clean",
    "distill-heal",
    "distill-long",
    "distill-longest",
    "distill-longest-low",
    "distill-peers",
    "distill-second",
    "distill-teachers",
    "distill-unchecked",
    "distill-why",
    "fp8",
    "fp8-all-layers",
    "second",
    "share",
    "weak",
]

# studies that read the runs of another one
KEPT_WITH = {"distill-why": "distill", "fp8-all-layers": "distill-teachers"}
# studies that were run twice, with other code
STUDY_OF = {"fp8-all-layers": "fp8"}


@pytest.mark.parametrize("name", STUDIES if LONG else ["distill-clean", "second"])
def test_the_table_follows_from_the_runs(name: str, tmp_path: Path) -> None:
    with tarfile.open(RESULTS / "runs" / f"{KEPT_WITH.get(name, name)}.tar.xz") as kept:
        kept.extractall(tmp_path / "out", filter="data")
    study = STUDY_OF.get(name, name)
    table, _ = run_study(study, tmp_path / "out", materials=tmp_path, only_table=True)
    published = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert numbers(json.loads(json.dumps(table))) == pytest.approx(numbers(published))
