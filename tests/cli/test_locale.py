"""A locale without UTF-8: commands do not depend on it, and library calls say what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training_kit import make_lab, recipe_dict

from vocagnolm.alignment import load_tokenizer
from vocagnolm.base.files import local_path
from vocagnolm.errors import UsageError
from vocagnolm.model import open_model
from vocagnolm.recipe import load_recipe

# Python would leave a C locale by itself; others, as of Latin-1, are rarely installed
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def run(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | ASCII,
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.slow
def test_the_stages_take_names_and_texts_beyond_ascii(tmp_path: Path) -> None:
    folder = tmp_path / "dépôt 東京"
    make_lab(folder, 24)
    recipe = recipe_dict(
        folder, train={"tokens": 256}, run={"folder": str(folder / "läuft"), "save_every": 0}
    )
    text = yaml.safe_dump(recipe, allow_unicode=True)
    (folder / "rezept ½.yaml").write_text(text, encoding="utf-8")
    pair = ["--student", folder / "student", "--teacher", folder / "teacher"]
    for words in (
        ["align", *pair, "--text", "naïve café"],
        ["store", "inspect", folder / "store"],
        ["prepare", folder / "rezept ½.yaml"],
        ["train", folder / "rezept ½.yaml"],
    ):
        done = run("-m", "vocagnolm", *words)
        assert done.returncode == 0, done.stderr
        assert words[0] != "align" or "é" in done.stdout
    assert (folder / "läuft" / "model" / "model.safetensors").is_file()


def test_a_library_call_says_that_the_name_does_not_fit() -> None:
    done = run(
        "-c", "from vocagnolm.alignment import load_tokenizer; load_tokenizer('d\\xe9p\\xf4t')"
    )
    said = done.stderr.splitlines()[-1]
    assert said.startswith("vocagnolm.errors.UsageError: 'd\\xe9p\\xf4t' cannot be opened")
    assert "which is ascii here. Set PYTHONUTF8=1" in said


@pytest.mark.parametrize("door", [local_path, load_tokenizer, open_model, load_recipe])
def test_a_name_that_is_not_utf8_is_refused(door) -> None:
    with pytest.raises(UsageError, match=r"'caf\\udce9' cannot be opened.*Rename it"):
        door(os.fsdecode(b"caf\xe9"))
