"""Killed between any two steps of writing, a command goes on when it is run again, to the same
result."""

import hashlib
import shutil
from pathlib import Path

import pytest
from faults_kit import copy_of, kill_at, some, tiny_tree, write_points
from training_kit import fresh_process, make_lab, recipe_dict

from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError
from vocagnolm.recipe import recipe_from_dict


def digests(folder: Path, pattern: str = "*") -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
    }


def test_prepare(lab, tmp_path):
    def work(name):
        data = {"blocks": str(tmp_path / name), "part_documents": 8}
        recipe = recipe_from_dict(recipe_dict(lab, data=data))
        return lambda: prepare(recipe)

    steps = write_points(work("whole"))
    expected = digests(tmp_path / "whole")
    assert len(steps) > 15
    for number in some(range(1, len(steps) + 1), 8):
        kill_at(number, work(f"killed-{number}"))
        work(f"killed-{number}")()
        assert digests(tmp_path / f"killed-{number}") == expected, steps[number - 1]


def test_prepare_with_alternatives(tmp_path):
    make_lab(tmp_path, 20, alternatives=3)

    def work(name):
        data = {"blocks": str(tmp_path / name), "part_documents": 8}
        tree = recipe_dict(tmp_path, data=data, objective={"method": "distill"})
        return lambda: prepare(recipe_from_dict(tree))

    steps = write_points(work("whole"))
    expected = digests(tmp_path / "whole")
    parts = [n for n, step in enumerate(steps, 1) if step == "renamed part-00001.safetensors"]
    kill_at(parts[0], work("killed"))
    work("killed")()
    assert digests(tmp_path / "killed") == expected


@pytest.mark.parametrize("wrong", ["missing", "empty", "short"])
def test_prepare_that_failed_leaves_its_folder_to_the_corrected_recipe(lab, tmp_path, wrong):
    """A corpus that the store does not hold, one that gives no token, and one of too few."""
    tree = recipe_dict(lab, data={"blocks": str(tmp_path / "b"), "missing": "error"})
    corpus = tmp_path / "other.jsonl"
    texts = {"missing": '{"text": "not in the store"}', "empty": '{"text": 3}'}
    first = (lab / "corpus.jsonl").read_text().partition("\n")[0]
    corpus.write_text(texts.get(wrong, first) + "\n")
    broken = {**tree, "corpus": {"files": [str(corpus)]}}
    if wrong == "short":
        broken["data"] = {**tree["data"], "block_size": 4096}
    with pytest.raises(BlocksError, match=r"not in the loss store|gave no tokens|4,096"):
        prepare(recipe_from_dict(broken))
    prepare(recipe_from_dict(tree))
    prepare(recipe_from_dict({**tree, "data": {**tree["data"], "blocks": str(tmp_path / "fresh")}}))
    assert digests(tmp_path / "b") == digests(tmp_path / "fresh")
    with pytest.raises(BlocksError, match="made with other settings"):
        prepare(recipe_from_dict(broken))
    assert digests(tmp_path / "b") == digests(tmp_path / "fresh")


def test_train(lab, tmp_path):
    from vocagnolm.train.run import train

    def work(name):
        def run():
            fresh_process()
            train(recipe_from_dict(tiny_tree(lab, tmp_path / name)), quiet=True)

        return run

    steps = write_points(work("whole"))
    expected = digests(tmp_path / "whole" / "model", "*.safetensors")
    last = {"renamed model", "begin run.json", "synced run.json"}  # model there, run not finished
    ends = [n for n, step in enumerate(steps, 1) if step in last and n > len(steps) - 9]
    numbers = sorted({*some(range(1, len(steps) + 1), 3), *ends[-2:]})
    for number in numbers:
        kill_at(number, work(f"killed-{number}"))
        work(f"killed-{number}")()
        folder = tmp_path / f"killed-{number}"
        assert digests(folder / "model", "*.safetensors") == expected, steps[number - 1]
        assert not list(folder.glob(".*")), "leftovers are removed"


def test_a_full_disk_at_the_first_write_leaves_nothing_foreign(lab, tmp_path, monkeypatch):
    from vocagnolm.base import files
    from vocagnolm.errors import WriteError
    from vocagnolm.train.run import train

    real, full = files.os.fsync, True

    def fsync(descriptor):
        if full:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    blocks = recipe_from_dict(recipe_dict(lab, data={"blocks": str(tmp_path / "b")}))
    recipe = recipe_from_dict(tiny_tree(lab, tmp_path / "run"))
    for command in (lambda: prepare(blocks), lambda: train(recipe, quiet=True)):
        with pytest.raises(
            WriteError, match=r"No space left on device.*run the same command again"
        ):
            command()
    full = False
    prepare(blocks)
    assert train(recipe, quiet=True)["finished"]


def test_leftovers_of_an_older_kill_are_removed(lab, tmp_path):
    folder = copy_of(lab / "blocks", tmp_path / "b")
    (folder / "manifest.json").unlink()
    (folder / ".part-00000.safetensors.0123abcd.tmp").write_bytes(b"half")
    prepare(recipe_from_dict(recipe_dict(lab, data={"blocks": str(folder)})))
    assert not list(folder.glob(".*"))
    shutil.rmtree(folder)
