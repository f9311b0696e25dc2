"""One rule, one place: what only one module may do."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from vocagnolm.recipe.methods import METHODS

SOURCE = Path(__file__).parents[1] / "src"

HOMES = {
    "locks": (r"^import fcntl|fcntl\.flock", {"vocagnolm/base/files.py"}),
    "flushing and renaming": (r"os\.(fsync|replace|rename)\(", {"vocagnolm/base/files.py"}),
    "YAML": (
        r"yaml\.(safe_)?load\(",
        {"vocagnolm/recipe/schema.py", "vocagnolm/evaluate/render.py"},  # lm-eval's own
    ),
    "bits": (r"log\(2", {"vocagnolm/base/statistics.py"}),
    "tests of hypotheses": (r"scipy", {"vocagnolm/base/statistics.py"}),
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


def test_text_is_read_and_written_as_utf8():
    """Whatever the locale says: each call names its encoding, or opens bytes."""
    root, unnamed = SOURCE.parent, []
    for folder in ("src", "runs", "examples", "benchmarks", "docs"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _takes_the_locales_encoding(node):
                    unnamed.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not unnamed


# place of the argument that is the encoding, or a mode, which may say that there is none
_ENCODING = {"read_text": 0, "write_text": 1}
_MODE = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}


def _takes_the_locales_encoding(call: ast.Call) -> bool:
    """`open` is the built-in one: methods of that name belong to classes of many kinds."""
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if method else getattr(call.func, "id", "")
    given = {word.arg: word.value for word in call.keywords}
    if name in _ENCODING and method:
        return len(call.args) <= _ENCODING[name] and "encoding" not in given
    if name not in _MODE or (method and name == "open") or "encoding" in given:
        return False
    place, usual = _MODE[name], "w+b" if "Temporary" in name else "r"
    mode = call.args[place] if len(call.args) > place else given.get("mode", ast.Constant(usual))
    return isinstance(mode, ast.Constant) and "b" not in str(mode.value)


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


def test_docstrings_stand_alone():
    """They do not begin with words that need the line above: "Of", "The same", ..."""
    leaning = re.compile(r"(Of|As|The same|All|Its|Not)\b")
    unclear = []
    for path in sorted((SOURCE / "vocagnolm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:  # of functions, classes and modules, or below a name
                case ast.Expr(ast.Constant(str() as text)) if leaning.match(text.strip()):
                    unclear.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not unclear


def test_every_imported_package_is_declared():
    """Of those that are needed at once; extras are imported where they are used."""
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    imported = set()
    plugins = {
        SOURCE / "vocagnolm/integrations/axolotl.py"
    }  # imported by the package that it belongs to
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
