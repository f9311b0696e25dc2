"""One rule, one place: what only one module may do."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from vocagnolm.methods import METHODS

SOURCE = Path(__file__).parents[1] / "src"

HOMES = {
    "locks": (r"^import fcntl|fcntl\.flock", {"vocagnolm/files.py"}),
    "flushing and renaming": (r"os\.(fsync|replace|rename)\(", {"vocagnolm/files.py"}),
    "YAML": (
        r"yaml\.safe_load\(",
        {"vocagnolm/recipe/schema.py", "vocagnolm/evaluate/render.py"},  # lm-eval's own
    ),
    "tests of hypotheses": (r"scipy", {"vocagnolm/statistics.py"}),
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


def test_what_a_method_needs_is_asked_of_its_row():
    """No list of methods beside the table: a new method would be missing from it."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                names = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                if len(names) > 1 and all(name in METHODS for name in names):
                    found.add(path.relative_to(SOURCE).as_posix())
    assert found == {"vocagnolm/demo/students.py"}  # what the demo compares


def test_every_imported_package_is_declared():
    """Of those that are needed at once; extras are imported where they are used."""
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    imported = set()
    plugins = {SOURCE / "vocagnolm/axolotl.py"}  # imported by the package that it belongs to
    for path in {*SOURCE.rglob("*.py")} - plugins:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            imported |= {name.partition(".")[0] for name in names}
    imported -= {*sys.stdlib_module_names, "vocagnolm", "vocagnolm_studies"}
    named = {"yaml": "pyyaml"}
    missing = {named.get(name, name) for name in imported} - declared
    assert missing == {"triton"}  # comes with torch; its module is imported where it is there
