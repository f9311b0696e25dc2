"""What a scheduler sends, to the real commands in processes of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from faults_kit import LONG, in_child, tiny_tree, was_killed, write_recipe
from tqdm import tqdm
from training_kit import fresh_process, recipe_dict, run_processes

from vocagnolm.train.checkpoint import newest_complete
from vocagnolm.train.folder import read_metrics

STEPS = 40


def wait_until(condition, alive, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert alive() and time.monotonic() < deadline
        time.sleep(0.02)


def command_in_child(*words: object) -> int:
    """The command in a forked process, where all is imported already. It trains ten steps in a
    second."""

    def work():
        from vocagnolm.cli import main
        from vocagnolm.train.loop import TrainingLoop

        end_step = TrainingLoop.end_step

        def slowly(self, learning_rate):
            time.sleep(0.1)
            end_step(self, learning_rate)

        TrainingLoop.end_step = slowly
        fresh_process()
        # a shell that runs the tests in the background lets them ignore the key
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["vocagnolm", *map(str, words)]
        try:
            main()
        except SystemExit as left:
            os._exit(left.code or 0)

    import vocagnolm.train.run  # noqa: F401

    return in_child(work)


def alive(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] == 0


def test_progress_bars_of_a_child_and_its_parent_do_not_stop_each_other():
    """Of these tests: transformers draws one whenever it saves a model, and they kill children."""

    def killed():
        with tqdm.get_lock():
            os.kill(os.getpid(), signal.SIGKILL)

    assert was_killed(in_child(killed))
    assert tqdm.get_lock().acquire(timeout=5)
    tqdm.get_lock().release()
    drawing, forked = threading.Event(), threading.Event()

    def draw():
        with tqdm.get_lock():
            drawing.set()
            forked.wait(60)

    def drawn():
        with open(os.devnull, "w") as nowhere:
            tqdm(range(3), file=nowhere).close()

    thread = threading.Thread(target=draw)
    thread.start()
    assert drawing.wait(60)
    child = in_child(drawn)
    try:
        assert not was_killed(child, 30)
    finally:
        forked.set()
        thread.join()


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_sigusr1_saves_and_goes_on_sigterm_and_ctrl_c_save_and_leave(lab, tmp_path, asked, capfd):
    from vocagnolm.recipe import recipe_from_dict
    from vocagnolm.train.run import train

    def tree(folder):
        return tiny_tree(lab, folder, train={"tokens": STEPS * 4 * 32}, run={"save_every": 0})

    folder, whole = tmp_path / "run", tmp_path / "whole"
    child = command_in_child("train", write_recipe(tmp_path / "r.yaml", tree(folder)), "--quiet")

    def steps():
        return len(read_metrics(folder / "metrics.jsonl"))

    wait_until(lambda: steps() > 2, lambda: alive(child))
    os.kill(child, signal.SIGUSR1)
    wait_until(lambda: newest_complete(folder / "checkpoints").step > 0, lambda: alive(child))
    first = newest_complete(folder / "checkpoints").step
    wait_until(lambda: steps() > first + 2, lambda: alive(child))
    os.kill(child, asked)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + asked
    newest = newest_complete(folder / "checkpoints").step
    assert first < newest == steps() < STEPS
    assert f"after step {newest} of {STEPS}; a checkpoint was written" in capfd.readouterr().err
    assert not (folder / "model").exists() and not (folder / ".lock").exists()
    # run again it is the same as a run that nobody disturbed
    for target in (folder, whole):
        fresh_process()
        assert train(recipe_from_dict(tree(target)), quiet=True)["finished"]
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (folder, whole)]
    assert weights[0] == weights[1]
    losses = [[r["loss"] for r in read_metrics(f / "metrics.jsonl")] for f in (folder, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


@pytest.mark.parametrize(("minutes", "made"), [(1e-12, {1, 2, 3}), (1e9, set()), (0, set())])
def test_checkpoints_are_also_made_by_time_and_change_no_result(lab, tmp_path, minutes, made):
    from vocagnolm.recipe import recipe_from_dict
    from vocagnolm.train.run import train

    kept = {"save_every": 0, "save_minutes": minutes, "keep_checkpoints": 9}
    for name, run in (("timed", kept), ("whole", {"save_every": 0, "save_minutes": 0})):
        fresh_process()
        train(recipe_from_dict(tiny_tree(lab, tmp_path / name, run=run)), quiet=True)
    folders = (tmp_path / "timed" / "checkpoints").glob("checkpoint-*")
    assert {int(path.name.rpartition("-")[2]) for path in folders} == made
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("timed", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_second_ctrl_c_leaves_at_once_and_names_the_checkpoint(lab, tmp_path, capfd):
    tree = tiny_tree(lab, tmp_path / "run", train={"tokens": STEPS * 4 * 32}, run={"save_every": 2})

    def work():
        from vocagnolm.cli import main
        from vocagnolm.train.loop import TrainingLoop

        end_step = TrainingLoop.end_step

        def twice(self, learning_rate):
            end_step(self, learning_rate)
            if self.step == 3:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        TrainingLoop.end_step = twice
        fresh_process()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        recipe = write_recipe(tmp_path / "r.yaml", tree)
        sys.argv = ["vocagnolm", "train", str(recipe), "--quiet"]
        try:
            main()
        except SystemExit as left:
            os._exit(left.code or 0)

    _, status = os.waitpid(in_child(work), 0)
    assert os.waitstatus_to_exitcode(status) == 130
    said = capfd.readouterr().err
    assert "Ctrl-C again leaves at once" in said
    assert said.endswith("resumes from the checkpoint of step 2, with the same result.\n"), said
    assert newest_complete(tmp_path / "run" / "checkpoints").step == 2


def train_all(trees) -> None:
    from vocagnolm.recipe import recipe_from_dict
    from vocagnolm.train.run import train

    for tree in trees:
        train(recipe_from_dict(tree), quiet=True)


def stop_one_rank(tree) -> None:
    """Only one of two processes hears the signal; both act, after the same step."""
    from vocagnolm.errors import StoppedError
    from vocagnolm.train.loop import TrainingLoop

    end_step = TrainingLoop.end_step

    def signalled(self, learning_rate):
        if self.step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        end_step(self, learning_rate)

    TrainingLoop.end_step = signalled
    with pytest.raises(StoppedError, match="after step 2 of 3"):
        train_all([tree])


def test_two_processes_without_a_gpu_and_device_auto(lab, tmp_path):
    """`auto` means the same everywhere: the run equals that of device cpu, and of one process."""

    def tree(name, device):
        return tiny_tree(lab, tmp_path / name, train={"device": device, "micro_batch": 2})

    run_processes(stop_one_rank, 2, tree("auto", "auto"))
    run_processes(train_all, 2, [tree("auto", "auto"), tree("cpu", "cpu")])
    run_processes(train_all, 1, [tree("one", "cpu")])
    losses = {
        name: [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("auto", "cpu", "one")
    }
    assert losses["auto"] == losses["cpu"] and len(losses["cpu"]) == 3
    assert losses["auto"] == pytest.approx(losses["one"], rel=1e-5)


@pytest.mark.skipif(not LONG, reason="make faults: starts torchrun itself")
def test_torchrun_without_a_gpu(lab, tmp_path):
    losses = []
    for processes in (1, 2):
        tree = tiny_tree(lab, tmp_path / str(processes), train={"device": "auto", "micro_batch": 2})
        recipe = write_recipe(tmp_path / f"{processes}.yaml", tree)
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        words = [*launcher, "-m", "vocagnolm", "train", str(recipe), "--quiet"]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=180,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        records = read_metrics(tmp_path / str(processes) / "metrics.jsonl")
        losses.append([record["loss"] for record in records])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_of_prepare_end_with_it(lab, tmp_path, number):
    data = {"blocks": str(tmp_path / "b"), "part_documents": 1}
    files = [str(lab / "corpus.jsonl")] * 40
    tree = recipe_dict(lab, data=data, corpus={"files": files})
    recipe = write_recipe(tmp_path / "r.yaml", tree)
    child = command_in_child("prepare", recipe, "--workers", 2)
    wait_until(lambda: len(list((tmp_path / "b").glob("part-*"))) > 2, lambda: alive(child))
    workers = children_of(child)
    assert workers
    os.kill(child, number)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker goes on"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]
