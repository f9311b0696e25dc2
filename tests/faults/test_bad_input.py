"""Damaged files and wild settings: one message, never a traceback, nothing lost."""

import contextlib
import errno
import json
import os
import random
import signal

import pytest
from faults_kit import LONG, SEED, copy_of, in_child, some, tiny_tree, was_killed
from training_kit import fresh_process, recipe_dict

from vocagnolm.base.files import folder_lock, write_text
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import RecipeError, VocagnolmError, VocagnolmWarning, WriteError
from vocagnolm.recipe import Recipe, load_recipe, recipe_from_dict
from vocagnolm.recipe.schema import hints
from vocagnolm.recipe.sections import NamedCorpusSection
from vocagnolm.store import LossStore, inspect_store, verify_store

WILD = [
    *("", "null", "-1", "0", "1", "1e9", "-0.5", ".nan", ".inf", "true", "lots", "[]", "[1, 2]"),
    *("[a]", "{}", "{a: 1}", "{a: {b: c}}", "'\\0'", "9999999999999999999999", "2020-01-01", "~"),
    *(
        "!!python/object:os.system x",
        "&a [*a]",
        "é",
        "1_000",
        "0x10",
        "'../..'",
        "-",
        "[",
        "{",
        "%",
    ),
]
BROKEN = [b"", b"[]", b"{}", b"null", b"3", b"{", b"\xff\xfe", b"[" * 5000, b'{"a": 1}', b"\0" * 50]


def keys() -> list[str]:
    sections = {**hints(Recipe), "corpora": NamedCorpusSection}
    places = {name: f"{name}.web" if name == "corpora" else name for name in sections}
    return [f"{places[name]}.{key}" for name, section in sections.items() for key in hints(section)]


def test_any_setting_is_taken_or_refused_in_words(lab, tmp_path):
    """Every key with wild values: a recipe, or a RecipeError; then `check` has an answer."""
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(tiny_tree(lab, tmp_path / "run")))
    taken = []
    places = [place for key in keys() for place in (key, f"{key}.deeper")]
    for override in some((f"{place}={value}" for place in places for value in WILD), 600):
        try:
            taken.append((override, load_recipe(path, [override])))
        except RecipeError as error:
            assert str(error).strip()
    from vocagnolm.train.check import check

    for override, recipe in some(taken, 12):
        try:
            check(recipe, measure=False)
        except Exception as error:
            raise AssertionError(override) from error


def test_wild_overrides_by_chance(lab, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(recipe_dict(lab)))
    draw = random.Random(SEED)
    letters = "abcdefghijklmnopqrstuvwxyz._=[]{}:,'\"!&*#%@ \t\n0123456789éß"
    for _ in range(20_000 if LONG else 400):
        text = "".join(draw.choice(letters) for _ in range(draw.randint(0, 30)))
        start = draw.choice(["", "run.", "run.seed=", "student.config.", f"{draw.choice(keys())}="])
        with contextlib.suppress(RecipeError):
            load_recipe(path, [start + text])


@pytest.mark.parametrize("name", ["manifest.json", "settings.json"])
def test_broken_files_of_blocks(lab, tmp_path, name):
    for number, content in enumerate(some(BROKEN, 5)):
        blocks = copy_of(lab / "blocks", tmp_path / f"{number}")
        (blocks / name).write_bytes(content)
        try:
            prepare(recipe_from_dict(recipe_dict(lab, data={"blocks": str(blocks)})))
        except VocagnolmError as error:
            assert name in str(error) or "settings" in str(error)


def test_broken_manifests_of_a_store(lab, tmp_path):
    for number, content in enumerate(BROKEN):
        store = copy_of(lab / "store", tmp_path / f"{number}")
        (store / "manifest.json").write_bytes(content)
        for read in (LossStore.open, verify_store, inspect_store):
            with pytest.raises(VocagnolmError, match=r"manifest\.json"):
                read(store)


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml", "metrics.jsonl"])
def test_broken_files_of_a_run(lab, tmp_path, name):
    """A run that is half done goes on, or says which file is wrong."""
    from faults_kit import kill_at, write_points

    from vocagnolm.train.run import train

    def run(folder):
        fresh_process()
        return train(recipe_from_dict(tiny_tree(lab, folder)), quiet=True)

    steps = write_points(lambda: run(tmp_path / "whole"))
    mark = next(n for n, step in enumerate(steps, 1) if step == "renamed complete.json")
    kill_at(mark, lambda: run(tmp_path / "half"))
    for number, content in enumerate(some(BROKEN, 3)):
        folder = copy_of(tmp_path / "half", tmp_path / f"{number}")
        (folder / name).write_bytes(content)
        try:
            assert run(folder)["finished"]
        except (VocagnolmError, VocagnolmWarning) as error:
            assert name in str(error) or "another recipe" in str(error), content


def test_a_flipped_bit_in_run_json_is_noticed(lab, tmp_path):
    from vocagnolm.train.run import train

    recipe = recipe_from_dict(tiny_tree(lab, tmp_path / "run"))
    train(recipe, quiet=True)
    about = tmp_path / "run" / "run.json"
    about.write_text(about.read_text().replace('"steps": 3', '"steps": 2'))
    with pytest.raises(VocagnolmError, match=r"run\.json is damaged: .* checksum"):
        train(recipe, quiet=True)


def test_a_file_where_a_run_is_meant(lab, tmp_path):
    from vocagnolm.evaluate.results import open_run
    from vocagnolm.train.run import train

    (tmp_path / "run").touch()
    with pytest.raises(VocagnolmError, match=r"run is a file, and run\.folder is a folder"):
        train(recipe_from_dict(tiny_tree(lab, tmp_path / "run")), quiet=True)
    with pytest.raises(VocagnolmError, match="run is a file; expected the folder of a run"):
        open_run(tmp_path / "run")


def test_what_is_finished_can_be_read_from_read_only_media(lab, tmp_path, monkeypatch):
    """Store, blocks and run; as root every right is there, so the file system's answer is given
    here."""
    from vocagnolm.base import files
    from vocagnolm.train.run import train

    folder = copy_of(lab, tmp_path / "media")
    recipe = recipe_from_dict(tiny_tree(folder, folder / "run"))
    prepare(recipe)
    train(recipe, quiet=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def refusing(real):
        def call(path, *given, **named):
            writes = real is not open_file or (given and given[0] & (os.O_CREAT | os.O_RDWR))
            if writes and str(path).startswith(str(folder)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real(path, *given, **named)

        return call

    open_file = os.open
    for name in ("open", "unlink", "rmdir", "replace", "rename", "link", "truncate", "chmod"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(WriteError, match="Read-only"), folder_lock(folder / "run", ""):
        pass
    monkeypatch.setattr(files, "_is_read_only", lambda path: str(path).startswith(str(folder)))
    fresh_process()
    assert prepare(recipe)["parts"] and train(recipe, quiet=True)["finished"]
    assert len(LossStore.open(folder / "store")) and inspect_store(folder / "store")["complete"]
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_link_planted_in_a_shared_folder_reaches_nothing(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / ".lock").symlink_to(outside)
    with pytest.raises(WriteError, match="symbolic link"), folder_lock(folder, ""):
        pass
    (folder / "metrics.json").symlink_to(outside)
    write_text(folder / "metrics.json", "ours")  # replaced, not written through
    assert outside.read_text() == "precious" and (folder / "metrics.json").read_text() == "ours"


def test_a_disk_that_fills_up_inside_a_checkpoint_is_one_message(lab, tmp_path):
    """The kernel's own refusal while transformers and torch write, not our code."""
    import resource

    from vocagnolm.train.run import train

    recipe = recipe_from_dict(tiny_tree(lab, tmp_path / "run"))

    def work():
        fresh_process()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        try:
            train(recipe, quiet=True)
        except VocagnolmError as error:
            os.write(out, str(error).encode())

    read, out = os.pipe()
    assert not was_killed(in_child(work))
    os.close(out)
    message = os.read(read, 10_000).decode()
    assert "checkpoint" in message and "run the same command again" in message
    fresh_process()
    assert train(recipe, quiet=True)["finished"]


def test_weights_can_be_read_by_whom_the_umask_lets(lab, tmp_path):
    from vocagnolm.train.run import train

    before = os.umask(0o027)
    try:
        fresh_process()
        train(recipe_from_dict(tiny_tree(lab, tmp_path / "run")), quiet=True)
    finally:
        os.umask(before)
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o777 in (0o640, 0o600 | 0o040), path.name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_steps", "set train.tokens instead"),
        ("output_dir", "set run.folder instead"),
        ("learning_rate", "set optimizer.learning_rate instead"),
        ("per_device_train_batch_size", "set train.micro_batch instead"),
        ("hub_token", "must not hold secrets"),
        ("disable_tqdm", "set by the program"),
        ("no_such_thing", "no_such_thing"),
    ],
)
def test_arguments_that_the_recipe_decides_are_refused(lab, tmp_path, name, message):
    from vocagnolm.train.check import check
    from vocagnolm.train.run import train

    tree = tiny_tree(lab, tmp_path / "run", train={"arguments": {name: 1}})
    with pytest.raises(RecipeError, match=message):
        train(recipe_from_dict(tree), quiet=True)
    assert any(message in problem for problem in check(recipe_from_dict(tree)).problems)
