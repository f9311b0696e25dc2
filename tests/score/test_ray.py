"""A real Ray cluster on this machine, a head and two nodes: whatever dies, the store is that of one
process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from score.teacher_kit import SETTINGS, save_teacher, store_bytes, write_corpus
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import ScoreError
from vocagnolm.score import RayCluster, score_corpus
from vocagnolm.score.plan import PLAN_FILE, TeacherSource, describe
from vocagnolm.store.format import shard_name

pytest.importorskip("ray")

SHARDS = 8
POISON = "\x07"
# A teacher with code of its own: it takes its time, leaves its process id, and can be poisoned.
CODE = """
import os, signal, time
from pathlib import Path
from transformers import LlamaForCausalLM

class OddForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.register_forward_pre_hook(self.look)

    def look(self, module, inputs):
        lab = Path(self.config.lab)
        (lab / "pids" / str(os.getpid())).touch()
        time.sleep(0.1)
        if (lab / "poisonous").exists() and (inputs[0] == self.config.poison).any():
            os.kill(os.getpid(), signal.SIGKILL)
"""


class Lab:
    """A teacher, a corpus of eight shards, what one process makes of them, and a cluster."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        self.folder = folder
        (folder / "pids").mkdir()
        self.teacher = save_teacher(folder / "teacher")
        (self.teacher / "odd.py").write_text(CODE)
        config = json.loads((self.teacher / "config.json").read_text())
        config |= {"auto_map": {"AutoModelForCausalLM": "odd.OddForCausalLM"}, "lab": str(folder)}
        config["poison"] = _token_of(self.teacher, POISON)
        (self.teacher / "config.json").write_text(json.dumps(config))
        self.corpus = write_corpus(folder / "corpus.jsonl", documents=SHARDS * 5 - 2)
        lines = self.corpus.read_text().splitlines()
        lines[13] = json.dumps({"text": f"shard two is {POISON} poisoned"})
        self.corpus.write_text("\n".join(lines) + "\n")
        self.score(folder / "whole")
        self.whole = store_bytes(folder / "whole")
        small = {"object_store_memory": 80 * 2**20}
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, **small},
        )
        self.add_node = lambda: self.cluster.add_node(num_cpus=1, **small)
        self.nodes = [self.add_node(), self.add_node()]

    def score(self, out, **options):
        return score_corpus(
            self.teacher, self.corpus, out, settings=SETTINGS, trust_remote_code=True, **options
        )

    def score_on_ray(self, out, **options):
        for pid in (self.folder / "pids").iterdir():
            pid.unlink()
        told = []
        cluster = RayCluster(address=self.cluster.address, **options)
        summary = self.score(out, cluster=cluster, on_progress=told.append)
        assert store_bytes(out) == self.whole
        return summary, told

    def worker_pids(self):
        """Of those that have scored something."""
        ours = {str(os.getpid())}
        return [int(path.name) for path in (self.folder / "pids").iterdir() if path.name not in ours]

    def once_working(self, out, do):
        """Call `do` in the background when two workers are at work and a shard is there."""

        def wait():
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                if len(self.worker_pids()) >= 2 and any((out / "shards").glob("*.safetensors")):
                    return do()
                time.sleep(0.01)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread


def _token_of(teacher, text):
    from vocagnolm.alignment import load_tokenizer

    (index,) = load_tokenizer(teacher).spans(text).ids
    return int(index)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    lab = Lab(tmp_path_factory.mktemp("ray"))
    yield lab
    ray.shutdown()
    lab.cluster.shutdown()


def test_a_worker_killed_by_the_kernel_s_hand(lab, tmp_path):
    killed = lab.once_working(tmp_path / "s", lambda: os.kill(lab.worker_pids()[0], signal.SIGKILL))
    summary, told = lab.score_on_ray(tmp_path / "s")
    killed.join()
    assert summary.scored_shards == SHARDS and summary.tokens > 0
    assert len(summary.notes) == 1 and "died with shard" in summary.notes[0]
    assert {1, 2} <= {now.workers for now in told}
    assert told[-1].shards == told[-1].total_shards == SHARDS
    assert told[-1].tokens == summary.tokens and told[-1].documents == 38
    assert not (tmp_path / "s" / PLAN_FILE).exists()


def test_a_node_that_never_comes_back(lab, tmp_path):
    node = lab.nodes.pop()
    gone = lab.once_working(
        tmp_path / "s", lambda: lab.cluster.remove_node(node, allow_graceful=False)
    )
    summary, told = lab.score_on_ray(tmp_path / "s")
    gone.join()
    assert summary.scored_shards == SHARDS
    assert told[-1].workers == 1
    lab.nodes.append(lab.add_node())


def test_a_shard_that_kills_its_workers_is_set_aside_and_named(lab, tmp_path):
    out = tmp_path / "s"
    (lab.folder / "poisonous").touch()
    try:
        with pytest.raises(ScoreError) as raised:
            lab.score_on_ray(out)
    finally:
        (lab.folder / "poisonous").unlink()
    message = str(raised.value)
    assert "1 shards were set aside: 3 workers died on each" in message
    assert "shard 2 (documents 10 to 14)" in message and "other 7 were scored" in message
    assert not (out / shard_name(2)).exists() and (out / PLAN_FILE).exists()
    summary, _ = lab.score_on_ray(out)
    assert summary.scored_shards == 1 and summary.found_shards == 7


def test_a_driver_that_is_killed_goes_on_when_run_again(lab, tmp_path, monkeypatch):
    out = tmp_path / "s"
    command = [
        *("score", "--teacher", lab.teacher, "--corpus", lab.corpus, "--out", out, "--device"),
        *("cpu", "--context", 64, "--stride", 16, "--batch-tokens", 256, "--shard-documents", 5),
        *("--threads", 1, "--trust-remote-code", "--ray", lab.cluster.address),
    ]
    command = [str(word) for word in command]
    process = subprocess.Popen([sys.executable, "-m", "vocagnolm", *command])
    deadline = time.monotonic() + 120
    while not (out / shard_name(0)).exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert (out / shard_name(0)).exists() and not (out / "manifest.json").exists()
    monkeypatch.setenv("VOCAGNOLM_PROGRESS_SECONDS", "0")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "were there" in result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("scoring: ")]
    assert " shards, " in lines[-1] and " workers, 100%" in lines[-1] and "ETA" in lines[-1]
    assert store_bytes(out) == lab.whole


def test_nobody_alive_is_an_end_and_not_a_wait(lab, tmp_path):
    """More is asked of every node than it has."""
    with pytest.raises(ScoreError, match=r"no worker has been alive for 1 s \(0 shards.*num_cpus"):
        score_corpus(
            lab.teacher,
            lab.corpus,
            tmp_path / "s",
            settings=SETTINGS.__class__(**{**SETTINGS.__dict__, "threads": 64}),
            trust_remote_code=True,
            cluster=RayCluster(address=lab.cluster.address, patience_seconds=1),
        )


def test_a_driver_without_a_gpu_asks_a_worker_what_the_teacher_is(lab):
    source = TeacherSource(str(lab.teacher), trust_remote_code=True)
    with RayCluster(address=lab.cluster.address).connected() as connection:
        there = connection.describe_there(source, SETTINGS, {"num_cpus": 1})
    assert there == describe(source.open(SETTINGS), SETTINGS)
