"""The documents say what the program says."""

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from command_kit import parse

ROOT = Path(__file__).parent.parent
USER_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*USER_PAGES, *sorted((ROOT / "research").glob("*.md"))]  # these keep commands as they were


@pytest.mark.slow
def test_the_command_reference_is_fresh(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "docs/generate.py"), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().err


def test_every_public_name_has_its_place_in_the_reference_and_in_dir():
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    headings = set(re.findall(r"^### `(\w+)`$", pages, re.MULTILINE))
    assert ":::" not in pages  # Markdown that any viewer shows
    packages = [path.parent.name for path in (ROOT / "src/vocagnolm").glob("*/__init__.py")]
    for name in ("vocagnolm", *(f"vocagnolm.{one}" for one in packages), "vocagnolm_studies"):
        module = importlib.import_module(name)
        public = set(getattr(module, "__all__", ())) - {"__version__"}
        assert public <= headings, (name, public - headings)
        assert public <= set(dir(module)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_on_trainers_runs_as_printed(tmp_path, monkeypatch):
    page = (ROOT / "docs/training-loop.md").read_text()
    *blocks, formula = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(formula.strip().splitlines()) <= 12
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    for code in (*blocks, formula):
        exec(code, found)
    batch, logits, loss = found["batch"], found["logits"].detach().requires_grad_(), found["loss"]
    plain = found["plain_guided_loss"](logits, batch["labels"], batch["guidance"])
    ours = found["guided_loss"](logits, batch["labels"], batch)
    assert plain.item() == pytest.approx(ours.item(), rel=1e-5)
    assert found["trainer"].state.log_history and 0 < loss.item() < ours.item()


def test_the_table_of_faults_names_every_test_of_faults():
    page = (ROOT / "research/faults.md").read_text()
    named = set(re.findall(r"`((?:faults|score)/test_\w+\.py)`", page))
    tried = {f"faults/{path.name}" for path in (ROOT / "tests/faults").glob("test_*.py")}
    assert named == tried | {"score/test_ray.py", "score/test_score_crash.py"}


def test_the_page_on_trouble_quotes_what_the_program_says():
    page = (ROOT / "docs/trouble.md").read_text()
    code = "".join(path.read_text() for path in sorted((ROOT / "src/vocagnolm").rglob("*.py")))
    said = re.sub(r'"\s*\n\s*f?"', "", code)
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    quotes = [quote for row in rows for quote in re.findall(r"\*([^*]+)\*", row)]
    parts = [
        part.strip(" .:") for quote in quotes for part in re.split(r"\.\.\.|[.:] |\bN\b", quote)
    ]
    assert len(quotes) > 15
    assert [part for part in parts if part not in said and part.lower() not in said] == []


def test_the_version_stands_in_one_place():
    version = re.compile(r'^_*version_*\s*[:=]\s*"?\d', re.MULTILINE)
    places = ["CITATION.cff", "pyproject.toml", "src/vocagnolm/__init__.py"]
    found = [place for place in places if version.search((ROOT / place).read_text())]
    assert found == ["src/vocagnolm/__init__.py"]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_parse(page):
    for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("vocagnolm ") and "[" not in line and "..." not in line:
                for command in line.partition("#")[0].split("&&"):
                    parse(shlex.split(command.partition(">")[0])[1:])
