"""An evaluation of the tiny model as it was before the source was rearranged: prompts, answers and
grades stay what they are."""

import json
from pathlib import Path

import pytest

from vocagnolm.base.files import finished_lines, json_digest
from vocagnolm.evaluate.render import render
from vocagnolm.evaluate.run import checksum
from vocagnolm.questions.suite import TASKS

PINS = json.loads((Path(__file__).parent / "pinned.json").read_text())
WAYS = {
    "strict": {},
    "paper": {"protocol": "paper"},
    "likelihood": {"choices": "likelihood"},
    "chat": {"chat": True, "shots": 1},
}


def test_answers_and_grades(finished):
    out, _ = finished
    found = {}
    for path in sorted((out / "evaluation" / "outputs").glob("*.jsonl")):
        found[path.stem] = json_digest(finished_lines(path))[:16]
    assert found == PINS["outputs"]


@pytest.mark.parametrize("way", WAYS)
def test_prompts(benchmarks, way):
    requests = render(list(TASKS.values()), benchmarks=benchmarks, **WAYS[way])
    assert {name: checksum(listed)[:16] for name, listed in requests.items()} == PINS[way]
