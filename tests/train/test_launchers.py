"""Two launchers as on two machines, one of which is lost: the other goes on alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from faults_kit import LONG
from training_kit import ROUNDING, free_port, recipe_dict, run_processes

from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.run import train

pytestmark = pytest.mark.skipif(not LONG, reason="make faults: a minute and a half of waiting")
STEPS = 24


def settings(lab: Path, folder: Path) -> dict:
    return recipe_dict(
        lab,
        objective={"scope": "global", "normalise": "selected"},
        train={"tokens": STEPS * 256, "micro_batch": 2, "parallel": "fsdp2"},
        run={"folder": str(folder), "save_every": 2},
    )


def launch(recipe: Path, port: int, log: Path, *, host: bool) -> subprocess.Popen:
    """torchrun, quick to notice that another is gone. `host`: the others meet at this one."""
    patience = f"last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={host}"
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"]
    words += [*meeting, f"--rdzv-conf={patience}", "-m", "vocagnolm", "train", str(recipe)]
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | quiet,
        )


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def kill(launcher: subprocess.Popen) -> None:
    """As if the machine's power were cut: the launcher and what it has started."""
    for pid in (launcher.pid, *children_of(launcher.pid)):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


def train_whole(tree: dict) -> None:
    train(recipe_from_dict(tree), quiet=True)


def test_one_of_two_machines_is_lost(lab, tmp_path):
    folder, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(settings(lab, folder)))  # JSON is YAML
    port, deadline = free_port(), time.monotonic() + 200
    launchers = [launch(recipe, port, tmp_path / f"{n}.log", host=n == 0) for n in range(2)]

    def records() -> list[dict]:
        return read_metrics(folder / "metrics.jsonl")

    try:
        while not any(r["processes"] == 2 and r["step"] >= 5 for r in records()):
            assert time.monotonic() < deadline and launchers[0].poll() is None
            time.sleep(0.02)
        kill(launchers[1])
        assert launchers[0].wait(deadline - time.monotonic()) == 0, (tmp_path / "0.log").read_text()
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                kill(launcher)
    found = records()
    assert [r["step"] for r in found] == list(range(1, STEPS + 1))
    assert {r["processes"] for r in found} == {1, 2} and found[-1]["processes"] == 1
    assert "lost the connection to another process" in (tmp_path / "0.log").read_text()
    assert (folder / "model" / "model.safetensors").is_file()
    run_processes(train_whole, 1, settings(lab, tmp_path / "whole"))
    whole = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    np.testing.assert_allclose(
        [r["loss"] for r in found], [r["loss"] for r in whole], rtol=ROUNDING
    )
