"""A requeued job: two commands on one folder."""

import multiprocessing
import os
import signal
import time

import pytest
from faults_kit import tiny_tree
from training_kit import fresh_process, recipe_dict

from vocagnolm.base.files import claim, folder_lock
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BusyError, WriteError
from vocagnolm.recipe import recipe_from_dict


def hold(folder, held):
    with folder_lock(folder, ""):
        held.set()
        time.sleep(60)


@pytest.fixture
def holder():
    """Holds the lock of a folder in another process, and can be killed."""
    context = multiprocessing.get_context("fork")
    started = []

    def start(folder):
        held = context.Event()
        process = context.Process(target=hold, args=(folder, held), daemon=True)
        process.start()
        assert held.wait(20)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def test_the_second_train_names_the_first(lab, tmp_path, holder):
    from vocagnolm.train.run import train

    recipe = recipe_from_dict(tiny_tree(lab, tmp_path / "run"))
    process = holder(tmp_path / "run")
    with pytest.raises(BusyError, match=rf"another process \(pid {process.pid} on .* since .*\)"):
        train(recipe, quiet=True)
    os.kill(process.pid, signal.SIGKILL)  # the kernel takes the lock back
    process.join()
    fresh_process()
    assert train(recipe, quiet=True)["finished"]


def test_the_second_prepare_names_the_first(lab, tmp_path, holder):
    recipe = recipe_from_dict(recipe_dict(lab, data={"blocks": str(tmp_path / "b")}))
    process = holder(tmp_path / "b")
    with pytest.raises(BusyError, match=str(process.pid)):
        prepare(recipe)


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path):
    with folder_lock(tmp_path, ""):
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()
    with folder_lock(tmp_path, ""), pytest.raises(BusyError), folder_lock(tmp_path, ""):
        raise AssertionError("two holders")


def test_a_claim_is_free_again_when_its_holder_ends(tmp_path):
    path = tmp_path / "task.lock"
    with claim(path) as ours, claim(path) as theirs:
        assert ours and not theirs
    with claim(path) as ours:
        assert ours
    (tmp_path / "planted.lock").symlink_to(tmp_path / "outside")
    with pytest.raises(WriteError, match="symbolic link"), claim(tmp_path / "planted.lock"):
        pass
