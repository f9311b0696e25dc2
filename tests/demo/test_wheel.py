"""What is uploaded as a release: a wheel that runs where there is no source tree. `make faults`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest
from faults_kit import LONG

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
FIRST_STEPS = """
import sys
from pathlib import Path
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import pipeline, students
from vocagnolm.train.run import train

out, budget = Path(sys.argv[1]), students.Budget(documents=60, problems=4, tokens=2_048)
pipeline.make_corpus(out, budget)
pipeline.compare_vocabularies()
pipeline.score(out)
recipe = students.recipe_of(out, "distill", 0, budget, alternatives=True)
recipe.optimizer.warmup_steps = 0
prepare(recipe)
train(recipe, quiet=True)
"""


def run(*command: object, **options) -> str:
    """In a bare environment: nothing leads to the source tree."""
    home = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**home, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copied(source: Path) -> Path:
    """What a package is built from, and a test, which is no part of it."""
    source.mkdir()
    for name in (*BUILT_FROM, "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests" / "test_wheel.py")
    return source


@pytest.mark.slow
def test_the_sdist_is_the_source_alone_and_names_its_address(tmp_path):
    source = copied(tmp_path / "source")
    setup = (source / "setup.py").read_text(encoding="utf-8")
    address = setup.replace('REPOSITORY = ""', 'REPOSITORY = "https://example.org/v"')
    assert address != setup
    (source / "setup.py").write_text(address, encoding="utf-8")
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run(sys.executable, "-c", build, cwd=source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as content:
        names = {"/".join(Path(name).parts[1:]) for name in content.getnames()}
        about = content.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        metadata = message_from_string(about.read().decode())
    assert {name for name in names if not name.startswith("src")} - {
        "",
        "PKG-INFO",
        "setup.cfg",
    } == {
        *BUILT_FROM,
        "CHANGELOG.md",
        "CITATION.cff",
    }
    places = dict(place.split(", ") for place in metadata.get_all("Project-URL"))
    assert places["Issues"] == "https://example.org/v/issues"
    assert places["Paper"].startswith("https://arxiv.org/")


@pytest.mark.skipif(not LONG, reason="`make faults`")
def test_the_wheel_runs_without_the_source_tree(tmp_path):
    """Built from what is tracked, installed into a new environment that has the dependencies of
    this one; run through its console script, as pipx does."""
    source = copied(tmp_path / "source")
    building = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", tmp_path)
    run(sys.executable, "-m", "pip", "wheel", source, *building)
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("*.whl")

    with ZipFile(wheel) as content:
        names = content.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(content.read(about).decode())
    assert {"vocagnolm/py.typed", "vocagnolm/demo/start/model.safetensors"} <= set(names)
    assert metadata["Name"] == "vocagnolm" and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    for field in ("Version", "Summary", "Requires-Python", "Project-URL", "Classifier", "Keywords"):
        assert metadata[field], field

    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment)
    python, (packages,) = environment / "bin/python", environment.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel)
    home = tmp_path / "home"
    home.mkdir()
    found = run(python, "-c", "import vocagnolm; print(vocagnolm.__file__)", cwd=home)
    assert Path(found.strip()).is_relative_to(environment)
    script = environment / "bin/vocagnolm"
    assert run(script, "--version", cwd=home).split()[1] == metadata["Version"]
    assert "guided" in run(script, "recipe", "list", cwd=home)
    assert "study" in run(script, "--help", cwd=home)
    said = run(python, "-c", FIRST_STEPS, home / "demo", cwd=home)
    assert "corpus: 60 documents" in said and "score: the teacher read" in said
    assert (home / "demo/runs/distill-0/model/model.safetensors").is_file()
