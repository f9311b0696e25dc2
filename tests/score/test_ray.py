"""A real Ray cluster on this machine, of two nodes: whatever dies, the store is that of one
process."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
from faults_kit import LONG
from score.server_kit import SERVER_SETTINGS, Replay, save_served_teacher, write_served_corpus
from score.teacher_kit import SETTINGS, save_teacher, store_bytes, write_corpus
from typer.testing import CliRunner
from write.write_kit import SETTINGS as WRITE_SETTINGS
from write.write_kit import folder_bytes, save_writer, write_prompts

from vocagnolm.cli import app
from vocagnolm.errors import ClusterError, WaitingWarning
from vocagnolm.score import RayCluster, score_corpus, write_answers
from vocagnolm.score.plan import PLAN_FILE, TeacherSource, describe_source
from vocagnolm.store.format import shard_name

pytest.importorskip("ray")

SHARDS = 12
POISON = "\x07"
# A teacher with code of its own: it takes its time, can be held, and can be poisoned.
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
        if (lab / "slow").exists():
            time.sleep(0.1)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 4 and (lab / "hold").exists():  # the first ones may be of loading
            (lab / "held" / str(os.getpid())).touch()
            while (lab / "hold").exists():
                time.sleep(0.02)
        if (lab / "poisonous").exists() and (inputs[0] == self.config.poison).any():
            os.kill(os.getpid(), signal.SIGKILL)
"""


class Lab:
    """A teacher, a corpus of twelve shards, what one process makes of them, and a cluster."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        self.folder = folder
        (folder / "held").mkdir()
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
            head_node_args={"num_cpus": 1, "include_dashboard": False, **small},
        )
        self.add_node = lambda **more: self.cluster.add_node(num_cpus=1, **small, **more)
        self.second = self.add_node()

    def score(self, out, **options):
        settings = dataclasses.replace(SETTINGS, alternatives=2)
        return score_corpus(
            self.teacher, self.corpus, out, settings=settings, trust_remote_code=True, **options
        )

    def command(self, out):
        words = [
            *("score", "--teacher", self.teacher, "--corpus", self.corpus, "--out", out),
            *("--device", "cpu", "--context", 64, "--stride", 16, "--batch-tokens", 256),
            *("--shard-documents", 5, "--threads", 1, "--trust-remote-code", "--alternatives", 2),
            *("--ray", self.cluster.address),
        ]
        return [str(word) for word in words]

    @contextlib.contextmanager
    def once_held(self, do):
        """Hold workers in the middle of a shard, and call `do` in the background when two of them
        are; then let go."""
        hold = self.folder / "hold"
        for path in (self.folder / "held").iterdir():  # of a test before
            path.unlink()
        hold.touch()

        def wait():
            while hold.exists():
                held = [int(path.name) for path in (self.folder / "held").iterdir()]
                if len(held) >= 2:
                    do(held)
                    hold.unlink()
                time.sleep(0.02)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try:
            yield
        finally:
            hold.unlink(missing_ok=True)
            thread.join()


def raylet_of(node):
    (info,) = node.all_processes["raylet"]
    return info.process.pid


def parents_of(pid):
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def _token_of(teacher, text):
    from vocagnolm.alignment import load_tokenizer

    (index,) = load_tokenizer(teacher).spans(text).ids
    return int(index)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    lab = Lab(tmp_path_factory.mktemp("ray"))
    ray.init(address=lab.cluster.address, log_to_driver=False)
    yield lab
    ray.shutdown()
    lab.cluster.shutdown()


@pytest.mark.timeout(1200)  # a minute; on a busy machine many
def test_a_worker_dies_with_its_node_and_another_stops(lab, tmp_path, monkeypatch):
    """A command that goes on where another ended loses both workers: one is killed with its node,
    the other neither works nor dies. Another node has room then, and both are replaced."""
    import ray

    out = tmp_path / "s"
    with pytest.raises(Left):
        lab.score(out, on_progress=leave_midway)
    second, stopped = lab.second, []
    lab.second = lab.add_node(resources={"spare": 1})
    other = another_run({"CPU": 1, "spare": 1})

    def lose_both(workers):
        (there,) = [pid for pid in workers if raylet_of(second) in parents_of(pid)]
        (here,) = {*workers} - {there}
        os.kill(here, signal.SIGSTOP)
        stopped.append(here)
        lab.cluster.remove_node(second, allow_graceful=False)
        with contextlib.suppress(ProcessLookupError):  # it would outlive its raylet a while
            os.kill(there, signal.SIGKILL)
        ray.util.remove_placement_group(other)

    monkeypatch.setenv("VOCAGNOLM_PROGRESS_SECONDS", "0")
    try:
        with lab.once_held(lose_both):
            more = ["--ray-workers", "2", "--ray-patience", "60"]
            result = CliRunner().invoke(app, [*lab.command(out), *more])
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert stopped and result.exit_code == 0, (result.output, result.exception)
    assert store_bytes(out) == lab.whole
    assert "died with shard" in result.stdout and "were there" in result.stdout
    assert "hung with shard" in result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("scoring: ")]
    # how many workers a line sees depends on when it is written
    assert re.search(r" shards, \d workers, 100%, ", lines[-1]) and "tokens/s, ETA" in lines[-1]


def another_run(*needs):
    """Has this room, without a process, until it is removed."""
    import ray

    group = ray.util.placement_group(list(needs))
    assert group.wait(60)
    return group


class Left(Exception):
    pass


def leave_midway(progress):
    if progress.documents >= 40:
        raise Left


@pytest.mark.skipif(not LONG, reason="make faults: starts seven processes that import torch")
def test_driver_worker_and_node_are_killed_in_turn(lab, tmp_path):
    """The driver first; the command, run again, loses a worker and a node that never comes back."""
    out = tmp_path / "s"
    (lab.folder / "slow").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "vocagnolm", *lab.command(out), "--ray-workers", "1"]
    )
    deadline = time.monotonic() + 300
    while not (out / shard_name(1)).exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    (lab.folder / "slow").unlink()
    assert (out / shard_name(1)).exists() and not (out / "manifest.json").exists()
    assert (out / PLAN_FILE).exists()

    second = lab.second

    def kill_both(workers):
        """One worker, and the other with its node: a process would outlive its raylet a while."""
        assert any(raylet_of(second) in parents_of(pid) for pid in workers)
        lab.cluster.remove_node(second, allow_graceful=False)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with lab.once_held(kill_both):
        result = CliRunner().invoke(app, lab.command(out))
    lab.second = lab.add_node()
    assert result.exit_code == 0, (result.output, result.exception)
    assert store_bytes(out) == lab.whole
    assert result.stdout.count("died with shard") == 2 and "were there" in result.stdout


@pytest.mark.skipif(not LONG, reason="make faults")
def test_a_stopped_worker_does_not_hold_its_shard(lab, tmp_path):
    """It neither works nor dies: its shard goes to the other, and it is replaced."""
    stopped = []

    def stop_one(workers):
        os.kill(workers[0], signal.SIGSTOP)
        stopped.append(workers[0])

    try:
        with lab.once_held(stop_one):
            on = RayCluster(address=lab.cluster.address, patience_seconds=30)
            summary = lab.score(tmp_path / "s", cluster=on)
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert stopped and summary.scored_shards == SHARDS
    assert store_bytes(tmp_path / "s") == lab.whole


@pytest.mark.skipif(not LONG, reason="make faults")
def test_a_shard_that_kills_its_workers_is_set_aside_and_named(lab, tmp_path):
    out = tmp_path / "s"
    (lab.folder / "poisonous").touch()
    try:
        with pytest.raises(ClusterError) as raised:
            lab.score(out, cluster=RayCluster(address=lab.cluster.address))
    finally:
        (lab.folder / "poisonous").unlink()
    message = str(raised.value)
    assert "1 shards were set aside: 3 workers died on each" in message
    assert "shard 2 (documents 10 to 14)" in message and "other 11 were made" in message
    assert not (out / shard_name(2)).exists() and (out / PLAN_FILE).exists()
    summary = lab.score(out)  # one process mends what a cluster could not
    assert summary.scored_shards == 1 and summary.found_shards == 11
    assert store_bytes(out) == lab.whole


def test_a_cluster_writes_the_folder_of_one_process(lab, tmp_path, monkeypatch):
    """A worker dies on its way. Paths are relative to a folder that is not the workers' own."""
    monkeypatch.chdir(tmp_path)
    save_writer(tmp_path / "writer")
    write_prompts(tmp_path / "prompts.jsonl", 24)
    (tmp_path / "examples.jsonl").write_text('{"question": "one", "answer": "two"}\n')
    settings = dataclasses.replace(WRITE_SETTINGS, examples="examples.jsonl")
    write_answers("writer", "prompts.jsonl", "whole", settings=settings)
    killed = []

    def kill_one(progress):
        if not killed and progress.shards:
            killed.append(next(processes_of_workers()))
            os.kill(killed[0], signal.SIGKILL)

    on = RayCluster(address=lab.cluster.address, workers=2)
    given = {"settings": settings, "cluster": on, "on_progress": kill_one}
    summary = write_answers("writer", "prompts.jsonl", "out", **given)
    assert killed and summary.written_shards == 6 and summary.answers == 72
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def processes_of_workers():
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and b"ray::ShardActor" in (path / "cmdline").read_bytes():
                yield int(path.name)


@pytest.mark.skipif(not LONG, reason="make faults")
def test_when_all_workers_are_stopped_the_driver_says_so_and_ends(lab, tmp_path):
    """So are those that come in their place."""
    out, ended = tmp_path / "s", threading.Event()

    def stop_all(_):
        def keep_stopping():
            while not ended.is_set():
                for pid in processes_of_workers():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                time.sleep(0.05)

        threading.Thread(target=keep_stopping, daemon=True).start()

    on = RayCluster(address=lab.cluster.address, patience_seconds=16)
    try:
        with warnings.catch_warnings(record=True) as said, lab.once_held(stop_all):
            warnings.simplefilter("always")
            with pytest.raises(ClusterError, match=r"sign of life for 16 s.* made and are kept"):
                lab.score(out, cluster=on)
    finally:
        ended.set()
        for pid in processes_of_workers():
            os.kill(pid, signal.SIGKILL)
    told = [str(one.message) for one in said if issubclass(one.category, WaitingWarning)]
    assert re.search(r"no worker has given a sign of life for \d s: 2 are there on", told[-1])
    assert re.search(r"The run ends in 1\d s unless one does \(--ray-patience\)", told[-1])
    assert lab.score(out).store["complete"]
    assert store_bytes(out) == lab.whole


@pytest.mark.filterwarnings("ignore::vocagnolm.errors.WaitingWarning")
def test_nobody_alive_is_an_end_and_not_a_wait(lab, tmp_path):
    """More is asked of every node than it has."""
    with pytest.raises(ClusterError, match=r"sign of life for 1 s: 0 are .* 64 CPUs.* 0 shards"):
        score_corpus(
            lab.teacher,
            lab.corpus,
            tmp_path / "s",
            settings=dataclasses.replace(SETTINGS, threads=64),
            trust_remote_code=True,
            cluster=RayCluster(address=lab.cluster.address, patience_seconds=1),
        )


def test_a_driver_without_a_gpu_asks_a_worker_what_the_teacher_is(lab):
    source = TeacherSource(str(lab.teacher), trust_remote_code=True)
    with RayCluster(address=lab.cluster.address).connected() as connection:
        there = connection.ask(partial(describe_source, source, SETTINGS), {"CPU": 1})
    assert there == describe_source(source, SETTINGS)


@pytest.mark.skipif(not LONG, reason="make faults: a cluster of its own")
def test_workers_without_a_gpu_ask_a_server_when_there_is_room(lab, tmp_path):
    import ray

    other = another_run({"CPU": 1}, {"CPU": 1})  # all of the cluster
    (tmp_path / "teacher").mkdir()
    teacher = save_served_teacher(tmp_path / "teacher")
    corpus = write_served_corpus(tmp_path / "corpus.jsonl")
    replay = Replay()
    replay.start()
    given = {"settings": SERVER_SETTINGS, "server": replay.server()}
    score_corpus(teacher, corpus, tmp_path / "whole", **given)
    asked = len(replay.requests)
    ended = threading.Timer(1.0, ray.util.remove_placement_group, [other])
    ended.start()
    cluster = RayCluster(address=lab.cluster.address, workers=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        score_corpus(teacher, corpus, tmp_path / "s", **given, cluster=cluster)
    replay.stop()
    waiting = [str(one.message) for one in said if issubclass(one.category, WaitingWarning)]
    assert waiting == ["waiting for room: 0 of 2 CPUs free"]
    assert len(replay.requests) > asked
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "whole")


# ---- connecting ----


CONNECT = """
import sys
from vocagnolm.errors import ClusterError
from vocagnolm.score import RayCluster
try:
    with RayCluster(address=sys.argv[1]).connected():
        print("connected")
except ClusterError as error:
    print(error)
"""
HEAD = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.skipif(not LONG, reason="make faults: a cluster of its own")
def test_a_cluster_that_wants_a_token(tmp_path):
    """Ray turns tokens on where it finds one, and a driver with an address does not use it."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef0123456789abcdef\n")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    plain |= {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    plain["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # attempts to connect
    token = plain | {"RAY_AUTH_MODE": "token"}
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    head = subprocess.Popen([sys.executable, "-c", HEAD], env=token, **ends)

    def connect(env, address):
        words = [sys.executable, "-c", CONNECT, address]
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        assert done.stderr == "" and done.stdout.count("\n") == 1, done
        return done.stdout

    try:
        address = head.stdout.readline().strip()
        said = connect(plain, address)
        assert "requires a token" in said and "RAY_AUTH_MODE=token" in said
        assert connect(token, address) == "connected\n"
        said = connect(token | {"RAY_AUTH_TOKEN": "f" * 32}, address)
        assert "requires a token, and that of this machine is unused, missing or different" in said
    finally:
        head.communicate("")
    said = connect(plain, address)
    assert f"no Ray cluster at {address}: ConnectionRefusedError" in said and "ray start" in said
