"""A flipped bit at any place of any file that the pipeline leaves, finished or killed half-way:
whoever reads the file has the same result, or a clear message."""

import hashlib
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from faults_kit import LONG, flip_bit, some, write_recipe
from pipeline_kit import Ended, command, home_before, recipe_tree, words_of

from vocagnolm.base import files
from vocagnolm.data.corpus import open_corpus
from vocagnolm.errors import CorpusError

SHARES = (0.09, 0.5, 1.0) if LONG else (0.31,)
# a command that was killed behind this step of writing
HALF = {
    "score": "renamed\t000001.json",
    "write": "renamed\t000001.json",
    "prepare": "renamed\tpart-00001.safetensors",
    "train": "renamed\tcomplete.json",
    "evaluate": "begin\tgsm8k.jsonl",
}
# a README may be edited; a lock holds a name; of random numbers a checkpoint's marker speaks
NOT_READ = ("README.md", ".lock", "recipe.yaml.lock")


Reader = tuple[list[object], tuple[str, ...]]
"""A command, and how the names of the files begin that it reads in a finished home."""


def readers(state: str, material: Path, home: Path) -> list[Reader]:
    """The commands that read what lies in `home`."""
    if state != "finished":
        return [(words_of(state, material, home), ("",))]
    recipe, written = home / "recipe.yaml", home / "from-written.yaml"
    tree = recipe_tree(material, home)
    tree["corpus"] = {"files": [str(home / "written")]}
    tree["store"] = {"path": str(home / "written")}
    tree["data"] |= {"blocks": str(home / "blocks-of-written"), "block_size": 256}
    write_recipe(written, tree)
    prepare: list[object] = ["prepare", recipe, "--workers", 1]
    anew = f"data.blocks={home / 'blocks-anew'}"
    train: list[object] = ["train", recipe, "--quiet"]
    held_out = ["--text", material / "corpus.jsonl", "--device", "cpu", "--json"]
    about_run = ("run/run.json", "run/recipe.yaml", "run/metrics.jsonl")
    return [
        (["store", "verify", home / "store"], ("store/",)),
        ([*prepare, "--set", anew], ("store/", "cache/")),
        (["store", "verify", home / "written"], ("written/",)),
        (["prepare", written, "--workers", 1], ("written/",)),
        (prepare, ("blocks/",)),
        ([*train, "--set", f"run.folder={home / 'run-anew'}"], ("blocks/",)),
        (train, ("run/",)),
        (["evaluate", home / "run" / "model", *held_out], ("run/model/",)),
        (["report", home / "run", "--html", home / "page.html", "--sample", 0], about_run),
        (["report", home / "evaluated", "--json"], ("evaluated/",)),
        (words_of("evaluate", material, home), ("evaluated/",)),
    ]


@pytest.fixture(scope="session")
def homes(material, whole, tmp_path_factory) -> dict[str, Path]:
    """A finished home, and for every command one in which it was killed half-way."""
    made = {"finished": whole}
    for name, step in HALF.items() if LONG else ():
        steps = (whole.parent / f"{name}.steps").read_text().splitlines()
        number = steps.index(step) + 1 if name != "train" else len(steps) - steps[::-1].index(step)
        home = home_before(name, whole, tmp_path_factory.mktemp(name) / "home")
        words = words_of(name, material, home)
        ended = command(words, home.parent, partial(killed_at, number))
        assert ended.code == -signal.SIGKILL, (name, ended)
        made[name] = home
    return made


def killed_at(number: int) -> None:
    passed = 0

    def reached(point: str, path: object) -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            os.kill(os.getpid(), signal.SIGKILL)

    files.reached = reached


def with_cache(home: Path) -> None:
    os.environ["VOCAGNOLM_CACHE"] = str(home / "cache")


def run_in(home: Path, words: list[object]) -> Ended:
    return command(words, home.parent, partial(with_cache, home))


def what_is_left(home: Path) -> dict[str, str]:
    """Results by name; a run's other files tell times."""
    found = {}
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home).as_posix()
        timed = path.name in ("run.json", "metrics.jsonl", "page.html", "README.md", "recipe.yaml")
        of_the_test = name.startswith("cache/") or name.endswith("-written.yaml")
        if path.is_file() and not timed and not of_the_test:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def shown(text: str, home: Path) -> list[str]:
    """What a command prints, without what another run prints differently."""
    lines = text.replace(str(home), "HOME").splitlines()
    return [line for line in lines if not re.search(r"seconds|tokens/s| MB/s|[\d.]+ s\b", line)]


def outcome(home: Path, words: list[object]) -> tuple[Ended, list[str], dict[str, str]]:
    ended = run_in(home, words)
    return ended, shown(ended.out, home), what_is_left(home)


def names_of(home: Path) -> list[str]:
    files_of = (p for p in sorted(home.rglob("*")) if p.is_file() and p.stat().st_size)
    names = [p.relative_to(home).as_posix() for p in files_of if p.name not in NOT_READ]
    return [name for name in names if not name.endswith(".yaml") or name.startswith("run/")]


def require_noticed(
    name: str, words: list[object], good: tuple, found: tuple, flipped: str
) -> None:
    """`flipped`: digest of the flipped file, which is no result."""
    (before, printed, left), (ended, now_printed, now_left) = good, found
    where = (name, words, ended)
    assert "should not have happened" not in ended.said and "Traceback" not in ended.said, where
    assert len(ended.said) < 2500, where
    told = {line for line in ended.said.splitlines() if line.startswith(("warning:", "damaged"))}
    told -= set(before.said.splitlines())
    if ended.code != 0:
        assert ended.code in (1, 2), where
        assert re.search(
            r"^error: |^problem: |is damaged|checksum", ended.said + ended.out, re.M
        ), where
    elif not told:
        same = {n: d for n, d in now_left.items() if n != name or d != flipped}
        assert same == {n: d for n, d in left.items() if n in same}, where
        assert left.keys() <= now_left.keys(), where
        mended = any(line.startswith(("scored again", "written again")) for line in now_printed)
        assert mended or now_printed == printed, where


def test_a_flipped_bit_is_noticed_or_changes_nothing(material, homes, tmp_path):
    cases = [(state, name) for state, home in homes.items() for name in names_of(home)]
    if not LONG:
        cases = some(cases, 2)
    known: dict[tuple, tuple] = {}
    problems: list[str] = []
    for number, (state, name) in enumerate(cases):
        print(f"{number} of {len(cases)}: {state} {name}; {len(problems)} problems", flush=True)
        for at, share in enumerate(SHARES):
            home = tmp_path / f"{number}-{at}" / "home"
            listed = readers(state, material, _copied(homes[state], home))
            for reader, (words, read) in enumerate(listed):
                if not name.startswith(read):
                    continue
                if (state, reader) not in known:
                    good = _copied(homes[state], tmp_path / f"{state}-{reader}" / "home")
                    known[state, reader] = outcome(good, readers(state, material, good)[reader][0])
                    assert known[state, reader][0].code == 0, known[state, reader][0]
                shutil.rmtree(home)
                readers(state, material, _copied(homes[state], home))
                flip_bit(home / name, share)
                flipped = hashlib.sha256((home / name).read_bytes()).hexdigest()
                try:
                    found = outcome(home, words)
                    require_noticed(name, words, known[state, reader], found, flipped)
                except AssertionError as wrong:
                    problems.append(f"{state} {name} at {share}: {str(wrong)[:900]}")
            shutil.rmtree(home.parent)
    assert not problems, "\n\n".join(problems)


def _copied(source: Path, home: Path) -> Path:
    """A home whose recipe names its own folders."""
    shutil.copytree(source, home, dirs_exist_ok=True)
    recipe = home / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(source), str(home)))
    for path in home.rglob("recipe.yaml"):
        if path != recipe:
            path.write_text(path.read_text().replace(str(source), str(home)))
    return home


def test_what_a_teacher_wrote_is_compared_with_its_manifest(whole, tmp_path):
    """Otherwise a document that has changed would only be one that the store does not hold."""
    shutil.copytree(whole / "written", tmp_path / "written")
    document = next((tmp_path / "written" / "data").glob("*.jsonl"))
    assert len(open_corpus(tmp_path / "written"))
    flip_bit(document, 0.5)
    with pytest.raises(CorpusError, match=rf"{document.name} is damaged .* wrote it again"):
        open_corpus(tmp_path / "written")
