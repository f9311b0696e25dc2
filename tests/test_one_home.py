"""One rule, one place: what only one module may do."""

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vocagnolm"

HOMES = {
    "locks": (r"^import fcntl|fcntl\.flock", {"files.py"}),
    "flushing and renaming": (r"os\.(fsync|replace|rename)\(", {"files.py"}),
    "YAML": (r"yaml\.safe_load\(", {"recipe/schema.py", "evaluate/fewshot.py"}),  # lm-eval's own
    "schemas": (r"^from pydantic import .*BaseModel", {"recipe/schema.py"}),
    "tests of hypotheses": (r"scipy", {"statistics.py"}),
}


@pytest.mark.parametrize("what", HOMES)
def test_it_has_one_home(what):
    pattern, homes = HOMES[what]
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == homes
