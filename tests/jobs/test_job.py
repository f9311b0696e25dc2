"""The coordinator alone: a job that knows of no teacher, made by shares and on a cluster whose
processes are played by this one."""

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time
import warnings
from functools import partial

import pytest
from faults_kit import in_child, was_killed

from vocagnolm.base.ranks import Ranks
from vocagnolm.errors import ClusterError, StoreError, WaitingWarning, WriteError
from vocagnolm.jobs import cluster as cluster_module
from vocagnolm.jobs.cluster import Connection, RayCluster
from vocagnolm.jobs.job import Amount, Begun, Share, run_job
from vocagnolm.storage import storage_of

WHOLE = {str(n): str(n**2) for n in range(7)}


@dataclasses.dataclass
class SquareWorker:
    out: str

    def load(self):
        pass

    def read(self, number):
        time.sleep(0.01)
        return number

    def start(self, shard, on_part):
        on_part(Amount(5, 1))
        return Amount(10, 2)

    def finish(self, shard):
        storage_of(self.out).create(f"squares/{shard}", str(shard**2).encode())
        return Amount(counts={"even": int(shard % 2 == 0)})


class Squares:
    """A folder of seven texts: shard 3 holds the square of 3."""

    def __init__(self, out):
        self.out, self.shard_count, self.worker_needs = str(out), 7, {"CPU": 1.0}

    def documents_in(self, number):
        return range(10 * number, 10 * number + 10)

    def lock(self, *, shared):
        return contextlib.nullcontext()

    def begin(self, numbers):
        return Begun([number for number in numbers if number in self.absent()], {})

    def join(self, begun):
        pass

    def absent(self):
        there = storage_of(self.out).files("squares")
        return [number for number in range(7) if f"squares/{number}" not in there]

    def remote_worker(self):
        return partial(SquareWorker, self.out)

    def finish(self, share, worked):
        return self.absent(), None


def made(folder):
    return {path.name: path.read_text() for path in (folder / "squares").iterdir()}


def run(out, share="1/1"):
    return run_job(Squares(out), SquareWorker(str(out)), Share.parse(share), Ranks())


def test_the_coordinator_loads_no_torch():
    code = "import sys, vocagnolm.jobs.cluster; assert not {'torch', 'ray'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("number", "count", "ranks"), [(1, 1, 4), (2, 3, 2), (3, 3, 5)])
def test_the_ranks_of_a_share_are_shares_that_divide_it(number, count, ranks):
    share = Share(number, count)
    parts = [share.part(rank, ranks).shards(50) for rank in range(ranks)]
    assert sorted(n for part in parts for n in part) == [*share.shards(50)]
    assert Share().part(2, 8) == Share(3, 8)


def test_any_job_is_made_by_shares(tmp_path):
    out = tmp_path / "s"
    outcome = run(out, "2/3")  # shards 1 and 4
    assert (outcome.done.shards, outcome.left) == (2, [0, 2, 3, 5, 6])
    assert outcome.done.amount == Amount(20, 4, {"even": 1})
    names = ["1/3", "3/3", "2/3", "1/3"]
    children = [in_child(lambda name=name: run(out, name)) for name in names]
    assert not any(was_killed(child) for child in children)
    assert made(out) == WHOLE and run(out).done.shards == 0


# ---- a cluster, played by this process ----


class DeathError(Exception):
    """An error of Ray's: the process of an actor is gone; or, with a cause, an error in it."""

    def __init__(self, text, cause=None):
        super().__init__(text)
        if cause is not None:
            self.cause = cause


class Ray:
    """As much of Ray as the driver uses, with two machines of one CPU each. A call is made when it
    is waited for, and `play(actor, method, arguments)` is asked before: it may raise, or return
    `NEVER`, so that there is no answer now."""

    class exceptions:
        RayError = DeathError

    def __init__(self, play):
        self.play, self.made = play, 0

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 1.0}} for _ in range(2)]

    def available_resources(self):
        return {"CPU": 2.0}

    def remote(self, **options):
        assert options["num_cpus"] == 1

        def make(kind, opened):
            with warnings.catch_warnings():  # a process has its own
                return Actor(self, kind(opened))

        return lambda kind: Remote(partial(make, kind))

    def wait(self, references, timeout):
        ready = [reference for reference in references if self._try(reference)]
        if not ready:
            time.sleep(0.01)
        return ready[:1], []

    def _try(self, reference):
        if reference.outcome is None:
            actor, name, arguments = reference.call
            try:
                if self.play(actor, name, arguments) is NEVER:
                    return False
                reference.outcome = getattr(actor.real, name)(*arguments), None
            except DeathError as error:
                reference.outcome = None, error
            except (StoreError, WriteError) as error:
                reference.outcome = None, DeathError(str(error), error)
        return True

    def get(self, reference):
        value, error = reference.outcome
        if error is not None:
            raise error
        return value

    def kill(self, actor):
        pass


NEVER = object()


class Reference:
    def __init__(self, call):
        self.call, self.outcome = call, None


class Remote:
    def __init__(self, function):
        self.remote = function

    def options(self, **_):
        return self


class Actor:
    def __init__(self, ray, real):
        ray.made += 1
        self.real, self.number = real, ray.made

    def __getattr__(self, name):
        return Remote(lambda *arguments: Reference((self, name, arguments)))


@pytest.fixture
def on_cluster(monkeypatch):
    """Runs the job on a cluster that plays so; returns how it ended, and how many workers were
    made."""
    for name in ("_TICK_SECONDS", "_FILL_SECONDS"):
        monkeypatch.setattr(cluster_module, name, 0.001)

    def run(out, play, patience=600.0):
        ray = Ray(play)
        connection = Connection(ray, RayCluster(patience_seconds=patience))
        return run_job(Squares(out), None, Share(), Ranks(), connection).done, ray.made

    return run


def test_a_shard_that_kills_its_workers_is_set_aside_and_no_other_is_blamed(tmp_path, on_cluster):
    deaths = []

    def play(actor, name, arguments):
        if name == "work" and 3 in arguments:  # also if it is only read
            deaths.append(arguments)
            raise DeathError("The actor is dead because of 3.")

    with pytest.raises(ClusterError) as raised:
        on_cluster(tmp_path, play)
    message = str(raised.value)
    assert "1 shards were set aside: 3 workers died on each" in message
    assert "shard 3 (documents 30 to 39): DeathError: The actor is dead because of 3." in message
    assert "other 6 were made" in message and deaths == [(2, 3), (3,), (3,)]
    assert made(tmp_path) == {n: square for n, square in WHOLE.items() if n != "3"}


def test_a_worker_that_gets_no_step_further_is_replaced(tmp_path, on_cluster):
    """The first does not answer at all, the second answers and does nothing. Another takes its
    time, longer than a silence may last, but gets further."""
    slow_since = []

    def play(actor, name, arguments):
        if (actor.number == 1 and name in ("work", "steps")) or (
            actor.number == 2 and name == "work"
        ):
            return NEVER
        if name == "work" and arguments[0] == 6:
            slow_since.append(time.monotonic())
            actor.real._step()
            if time.monotonic() < slow_since[0] + 1.0:
                return NEVER
        return None

    done, workers = on_cluster(tmp_path, play, patience=1.0)
    assert made(tmp_path) == WHOLE and done.shards == 7
    assert done.amount == Amount(70, 14, {"even": 4})
    assert workers == 4 and len(done.notes) == 2
    assert all("hung with shard" in note and "no step in 0 s" in note for note in done.notes)


@pytest.mark.parametrize("fate", ["hang", "die"])
def test_when_no_worker_becomes_ready_the_run_says_so_and_ends(tmp_path, on_cluster, fate):
    def play(actor, name, arguments):
        if name == "load" and fate == "die":
            raise DeathError("out of memory")
        return None if name == "hello" else NEVER

    with (
        pytest.warns(WaitingWarning, match=r"no worker .*The run ends in 0 s unless"),
        pytest.raises(ClusterError, match=r"(no step|of memory).* 0 shards were made and"),
    ):
        on_cluster(tmp_path, play, patience=0.5)


def test_a_cluster_that_has_stopped_altogether_is_no_hang(tmp_path, on_cluster, monkeypatch):
    """Ray's own questions to it have no limit of time."""
    stopped, goes_on = threading.Event(), threading.Event()
    there = Ray.nodes

    def play(actor, name, arguments):
        if name == "work":
            stopped.set()
        return NEVER if stopped.is_set() else None

    def nodes(self):
        return goes_on.wait() if stopped.is_set() else there(self)

    monkeypatch.setattr(Ray, "nodes", nodes)
    monkeypatch.setattr(Ray, "kill", lambda *_: stopped.is_set() and goes_on.wait())
    monkeypatch.setattr(cluster_module, "_ANSWER_SECONDS", 0.05)
    with (
        pytest.warns(WaitingWarning, match=r"no worker .* the cluster does not answer"),
        pytest.raises(ClusterError, match=r"does not answer; .* were made and are kept"),
    ):
        try:
            on_cluster(tmp_path, play, patience=0.5)
        finally:
            goes_on.set()


def test_what_a_worker_cannot_write_is_tried_again_and_blames_nobody(tmp_path, on_cluster):
    left = 9

    def play(actor, name, arguments):
        nonlocal left
        if name == "work" and left:
            left -= 1
            raise WriteError("storage is away")

    done, workers = on_cluster(tmp_path / "s", play)
    assert made(tmp_path / "s") == WHOLE and workers == 2
    assert sum("gave back shard" in note and "is away" in note for note in done.notes) == 9
    left = 10**9
    with (
        pytest.warns(WaitingWarning, match="unless one does"),
        pytest.raises(ClusterError, match="last error: storage is away"),
    ):
        on_cluster(tmp_path / "t", play, patience=0.5)


def test_a_machine_of_no_use_is_named_and_left(tmp_path, on_cluster):
    def play(actor, name, arguments):
        if name == "load" and (actor.number == 1 or everywhere):
            raise StoreError("another torch")

    everywhere = False
    done, workers = on_cluster(tmp_path / "a", play)
    assert done.shards == 7 and workers == 2
    assert len(done.notes) == 1 and "was of no use: another torch" in done.notes[0]
    everywhere = True
    with pytest.raises(StoreError, match="another torch"):
        on_cluster(tmp_path / "b", play)
