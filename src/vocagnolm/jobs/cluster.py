"""A Ray cluster as the engine of a job. Ray places workers, starts their processes and ends them;
the driver hands shards to workers that wait, and replaces those that die or give no sign of life.
"""

import atexit
import contextlib
import logging
import os
import pickle
import re
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from vocagnolm import errors
from vocagnolm.base.children import answer_within
from vocagnolm.errors import (
    AddressError,
    ClusterError,
    VocagnolmError,
    WaitingWarning,
    WriteError,
)
from vocagnolm.jobs.job import Amount, Done, Job, OnProgress, Pipeline, Progress, ShardWorker
from vocagnolm.recipe.sections import RaySection

LOCAL = "local"
MOST_DEATHS = 3
"""The number of workers that may die on a shard before it is set aside."""
_MOST_NAMED = 8
# One round of the driver, and how often it asks for workers that are missing.
_TICK_SECONDS, _FILL_SECONDS = 1.0, 2.0
# A worker that gets no step further for half the patience is replaced: the other half is left for
# its successor to start. It is asked for a sign of life so many times in this time.
_SILENT_SHARE, _SIGNS = 0.5, 30
# After such a silence of all workers the driver says what it waits for.
_SAID_SECONDS = 30.0
# Ray's own calls have no limit of time, and wait for ever for a cluster that has stopped.
_ANSWER_SECONDS = 10.0
Needs = dict[str, float]
"""CPUs and GPUs of a worker, by Ray's names."""


class RayCluster(RaySection, frozen=True):
    """A Ray cluster that works on a job, with one worker per GPU, or per `threads` CPUs, or with a
    server per CPU. If their number is not given, there are as many workers as fit, also when the
    cluster grows."""

    address: str | None = None
    """The address that `ray.init` takes: `auto`, `HOST:6379`. None: the cluster that RAY_ADDRESS
    names, otherwise one on this machine for this run."""

    @contextlib.contextmanager
    def connected(self) -> Iterator["Connection"]:
        """Connect to the cluster. A connection that the caller has is used and left open."""
        ray = import_ray()
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, self.address or os.environ.get("RAY_ADDRESS") or LOCAL)
        try:
            yield Connection(ray, self)
        finally:
            if ours:
                try:
                    answer_within(_ANSWER_SECONDS, ray.shutdown)
                except TimeoutError:
                    atexit.unregister(ray.shutdown)  # Python would wait there for ever, too


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules:  # lines of the raylet on stdout: our own messages say it better
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    return errors.optional("ray", "ray", "work on a Ray cluster")


def _connect(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:  # nothing but numbers of shards passes through the object store
        options |= {"include_dashboard": False, "object_store_memory": 100 * 2**20}
    usual = os.dup(2)
    with tempfile.TemporaryFile() as printed:
        try:
            if place := re.fullmatch(r"([\w.-]+):(\d+)", address):  # Ray would try for minutes
                socket.create_connection((place[1], int(place[2])), timeout=10).close()
            os.dup2(printed.fileno(), 2)  # Ray's C++ part tells the reason there and nowhere else
            ray.init(address=address, **options)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            printed.seek(0)
            token = isinstance(error, ray.exceptions.AuthenticationError)
            if token or b"Unauthenticated" in printed.read():
                raise ClusterError(
                    f"the Ray cluster at {address} requires a token, and that of this machine is "
                    f"unused, missing or different. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                    "RAY_AUTH_TOKEN_PATH (or ~/.ray/auth_token) to the token of the cluster."
                ) from None
            raise ClusterError(
                f"no Ray cluster at {address}: {first_line(error)} Start one there with `ray start "
                "--head`, or leave the address out for a cluster on this machine."
            ) from None
        finally:
            os.dup2(usual, 2)
            os.close(usual)


def first_line(error: BaseException) -> str:
    """An error of Ray's in one sentence; with the cause, if it names one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    said = re.sub(r"^The actor [0-9a-f]+ is unavailable: ", "", (causes or lines or ["it"])[0])
    return f"{type(error).__name__}: {said[:200].rstrip('.')}."


class ShardActor:
    """The process of a worker. All it is made from is a few hundred bytes, so that it can be made
    again on any machine at any time."""

    def __init__(self, opened: bytes):
        """`opened`: a pickled function that gives a `ShardWorker`."""
        self._opened, self._steps = opened, 0
        warnings.simplefilter("always", WaitingWarning)
        warnings.showwarning = lambda *_: self._step()  # whoever waits for storage is alive

    def hello(self) -> str:
        """The machine, as soon as the process is there."""
        return socket.gethostname()

    def load(self) -> None:
        worker: ShardWorker = pickle.loads(self._opened)()
        worker.load()
        self._pipeline = Pipeline(worker)

    def work(self, number: int, ahead: int | None = None) -> Amount:
        """Make shard `number`; `ahead` is read meanwhile, for the next call."""
        amount = self._pipeline.make(number, ahead, self._step)
        return amount + self._pipeline.settle()

    def steps(self) -> int:
        """How often this process has got a step further; answered beside its work."""
        return self._steps

    def _step(self, part: Amount | None = None) -> None:
        self._steps += 1


class Connection:
    """A cluster that answers."""

    def __init__(self, ray: Any, cluster: RayCluster):
        self.ray, self.cluster = ray, cluster

    def ask(self, function: Callable[[], Any], needs: Needs) -> Any:
        """What a function returns on a node that has room for it."""
        answer = self.ray.remote(lambda: function()).options(**_options(needs)).remote()
        room, patience = self.room(needs, say=True)[1], self.cluster.patience_seconds
        try:
            return self.ray.get(answer, timeout=patience)
        except self.ray.exceptions.GetTimeoutError:
            raise ClusterError(f"no room within {patience:.0f} s: {room}.") from None
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def room(self, needs: Needs, *, say: bool = False) -> tuple[int, str]:
        """How many workers the nodes can hold, and what of them is free. `say`: warn if we wait."""
        name = "GPU" if "GPU" in needs else "CPU"
        try:
            nodes, resources = answer_within(
                _ANSWER_SECONDS, lambda: (self.ray.nodes(), self.ray.available_resources())
            )
        except TimeoutError:
            return 0, "the cluster does not answer"
        there = [node["Resources"].get(name, 0) for node in nodes if node["Alive"]]
        free = resources.get(name, 0)
        each = f", {needs[name]:g} for a worker" if needs[name] > 1 else ""
        room = f"{free:g} of {sum(there):g} {name}s free{each}"
        if say and free < needs[name]:
            warnings.warn(f"waiting for room: {room}", WaitingWarning, stacklevel=2)
        return sum(int(count // needs[name]) for count in there), room

    def run(self, job: Job, numbers: Sequence[int], on_progress: OnProgress | None = None) -> Done:
        """Make these shards; those that are set aside are an error in the end."""
        return _Run(self, job, numbers, on_progress).to_the_end() if numbers else Done()


def _options(needs: Needs) -> dict[str, float]:
    """The needs of a worker as arguments of `ray.remote`."""
    return {f"num_{name.lower()}s": count for name, count in needs.items()}


@dataclass(eq=False)
class _Worker:
    """A worker as the driver sees it."""

    actor: Any
    answer: Any
    """To the call that is under way; None while there is none."""
    state: Literal["starting", "placed", "ready", "useless"] = "starting"
    machine: str = "a machine that has not answered"
    shards: list[int] = field(default_factory=list)
    """The shard that it makes, and the one that it reads for its next call."""
    writes: bool = True
    """False after an attempt to write has failed, until one succeeds."""
    heard: float = 0.0
    """When it last answered."""
    advanced: float = 0.0
    """When it was last known to get a step further, or to have nothing to do."""
    steps: int = -1
    sign: Any = None
    """The answer that is to come when it is asked for a sign of life."""
    asked: float = 0.0


class _Run:
    """A job on a cluster, until its end."""

    def __init__(
        self,
        connection: Connection,
        job: Job,
        numbers: Sequence[int],
        on_progress: OnProgress | None,
    ):
        self._connection, self._ray, self._job = connection, connection.ray, job
        self._on_progress = on_progress
        self._needs, self._opened = job.worker_needs, pickle.dumps(job.remote_worker())
        self._patience = connection.cluster.patience_seconds
        self._silent_seconds = _SILENT_SHARE * self._patience
        self._workers: list[_Worker] = []
        self._numbers, self._waiting = numbers, deque(numbers)
        self._documents = sum(len(job.documents_in(number)) for number in numbers)
        self._deaths: Counter[int] = Counter()
        self._lost_loading = 0
        """How many workers have died or hung before they were ready, since one was."""
        self._set_aside: dict[int, str] = {}
        """The shards that were set aside, with the reason why the last worker died."""
        self._made, self._amount = 0, Amount()
        self._notes: list[str] = []
        self._last_words = "nothing was heard of one."
        self._alive_at = time.monotonic()
        self._started = self._filled_at = 0.0
        self._said = False

    @property
    def _open(self) -> int:
        """How many shards are neither made nor set aside."""
        return len(self._numbers) - self._made - len(self._set_aside)

    def to_the_end(self) -> Done:
        self._connection.room(self._needs, say=True)
        try:
            while self._open:
                self._fill()
                self._look_after()
                for worker in self._workers:
                    worker.answer = worker.answer or self._ask(worker)
                self._listen()
                if self._on_progress is not None and self._started:
                    alive = len(self._running())
                    amount, shards = self._amount, (self._made, len(self._numbers))
                    so_far = (amount.documents, self._documents, amount.tokens, amount.counts)
                    self._on_progress(Progress(*so_far, *shards, alive))
        finally:
            for worker in self._workers:
                self._kill(worker)
        self._require_none_set_aside()
        seconds = time.monotonic() - self._started if self._started else 0.0
        return Done(self._amount, seconds, self._made, tuple(self._notes))

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.state in ("placed", "ready")]

    def _fill(self) -> None:
        """Ask for workers that are missing; for one in any case, since there are clusters that grow
        when they are asked."""
        if time.monotonic() < self._filled_at + _FILL_SECONDS:
            return
        self._filled_at = time.monotonic()
        wanted = self._connection.cluster.workers or max(1, self._connection.room(self._needs)[0])
        for _ in range(min(wanted, self._open) - len(self._workers)):
            # signs of life are answered by a thread of their own, beside the work
            remote = self._ray.remote(concurrency_groups={"signs": 1}, **_options(self._needs))
            made = partial(remote(ShardActor).remote, self._opened)
            try:
                actor = answer_within(_ANSWER_SECONDS, made)
            except TimeoutError:
                return  # `_look_after` says so
            self._workers.append(_Worker(actor, actor.hello.remote()))

    def _look_after(self) -> None:
        """Ask workers for signs of life, and replace those that get no step further. Say when none
        of them answers, and end the run when that has lasted for the whole patience."""
        now = time.monotonic()
        for worker in self._running():
            if now - worker.advanced > self._silent_seconds:
                self._lose(worker, "hung with", f"no step in {self._silent_seconds:.0f} s.")
            elif worker.sign is None and now >= worker.asked + self._silent_seconds / _SIGNS:
                group = worker.actor.steps.options(concurrency_group="signs")
                worker.sign, worker.asked = group.remote(), now
        # workers that only load are signs of life unless all of them have come to grief in it
        hopeful = self._lost_loading <= MOST_DEATHS * len(self._workers)
        alive = [w for w in self._running() if w.writes and (hopeful or w.state == "ready")]
        self._alive_at = max([self._alive_at, *(worker.heard for worker in alive)])
        silence = now - self._alive_at
        if silence > self._patience:
            raise ClusterError(
                f"{self._silence(silence)} {self._made:,} shards were made and are kept. Check "
                "`ray status`, and run the same command again to resume, with a longer "
                "--ray-patience for a busy cluster."
            )
        is_long = silence > min(_SAID_SECONDS, self._silent_seconds / 2)
        if is_long and not self._said:
            left = f"{self._patience - silence:.0f} s unless one does (--ray-patience)."
            text = f"{self._silence(silence)} The run ends in {left}"
            warnings.warn(text, WaitingWarning, stacklevel=2)
        self._said = is_long

    def _silence(self, seconds: float) -> str:
        needs = " and ".join(f"{amount:g} {name}s" for name, amount in self._needs.items())
        machines = sorted({worker.machine for worker in self._running()})
        where = f" on {', '.join(machines[:_MOST_NAMED])}" if machines else ""
        return (
            f"no worker has given a sign of life for {seconds:.0f} s: {len(self._running())} are "
            f"there{where}, each needs {needs}, {self._connection.room(self._needs)[1]}; last "
            f"error: {self._last_words}"
        )

    def _ask(self, worker: _Worker) -> Any:
        """The next step of a worker: its load, or a shard. None: there is nothing for it now."""
        if worker.state == "placed":
            return worker.actor.load.remote()
        if worker.state == "ready" and self._hand_out(worker):
            worker.advanced = time.monotonic()
            return worker.actor.work.remote(*worker.shards)
        return None

    def _hand_out(self, worker: _Worker) -> bool:
        """Give the worker what waits, or what another has only read, so that it has a shard to make
        and one to read. A shard that was with a worker when it died is handed out alone: should it
        be the cause, no other must be blamed."""
        mine = worker.shards
        if not mine and not self._waiting:
            mine += next(([w.shards.pop()] for w in self._workers if len(w.shards) == 2), [])
        while self._waiting and len(mine) < 2:
            if mine and self._deaths.keys() & {*mine, self._waiting[0]}:
                break
            mine.append(self._waiting.popleft())
        return bool(mine)

    def _listen(self) -> None:
        """Hear what workers say now, or within a moment."""
        answers = {worker.answer: worker for worker in self._workers if worker.answer is not None}
        signs = {worker.sign: worker for worker in self._workers if worker.sign is not None}
        if not answers and not signs:
            return time.sleep(_TICK_SECONDS / 2)
        for reference in self._ray.wait([*answers, *signs], timeout=_TICK_SECONDS)[0]:
            worker = answers.get(reference) or signs[reference]
            try:
                content = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:  # of ours, or the process, or its node
                if reference in answers:
                    self._failed(worker, getattr(error, "cause", error))
                worker.sign = None  # of a process that died; the call under way says why
                continue
            worker.heard = time.monotonic()
            if reference in answers:
                self._answered(worker, content)
            else:
                worker.sign = None
            # while it loads or waits, an answer is enough; with a shard it has to get further
            if reference in answers or not worker.shards or content != worker.steps:
                worker.advanced = worker.heard
            if reference in signs:
                worker.steps = content

    def _answered(self, worker: _Worker, content: Any) -> None:
        worker.answer = None
        if worker.state == "starting":
            worker.state, worker.machine = "placed", content
        elif worker.state == "placed":
            worker.state, self._started = "ready", self._started or time.monotonic()
            self._lost_loading = 0
        else:
            self._amount += content
            self._made += 1
            worker.writes = True
            worker.shards.pop(0)

    def _failed(self, worker: _Worker, error: BaseException) -> None:
        worker.answer = None
        if isinstance(error, WriteError | AddressError):  # storage that may come back
            worker.writes = False
            self._give_back(worker, "gave back", str(error))
        elif isinstance(error, VocagnolmError):
            others = [other for other in self._workers if other is not worker]
            if worker.state == "ready" or all(other.state == "useless" for other in others):
                raise error from None
            worker.state = "useless"  # its room is kept: another would fare no better there
            self._notes.append(f"a worker on {worker.machine} was of no use: {error}")
        else:
            self._lose(worker, "died with", first_line(error))

    def _lose(self, worker: _Worker, what: str, why: str) -> None:
        """Give a worker up; another one is asked for in its place."""
        self._deaths.update(worker.shards)  # also reading one can be a death
        self._lost_loading += worker.state != "ready"
        self._give_back(worker, what, why)
        self._workers.remove(worker)
        self._kill(worker)

    def _give_back(self, worker: _Worker, what: str, why: str) -> None:
        """Give a worker's shards to others; set aside one on which too many workers have died."""
        self._last_words = why
        for number in worker.shards[:1]:
            self._notes.append(
                f"a worker on {worker.machine} {what} shard {number}, which went to another: {why}"
            )
        for number in worker.shards:
            if self._deaths[number] >= MOST_DEATHS:
                self._set_aside[number] = why
            else:
                self._waiting.append(number)
        worker.shards = []

    def _kill(self, worker: _Worker) -> None:
        with contextlib.suppress(Exception):  # it is dead, or the cluster is
            answer_within(_ANSWER_SECONDS, lambda: self._ray.kill(worker.actor))

    def _require_none_set_aside(self) -> None:
        if not self._set_aside:
            return
        named = [
            f"  shard {number} (documents {where.start:,} to {where.stop - 1:,}): {reason}"
            for number, reason in sorted(self._set_aside.items())[:_MOST_NAMED]
            for where in [self._job.documents_in(number)]
        ]
        raise ClusterError(
            f"{len(self._set_aside):,} shards were set aside: {MOST_DEATHS} workers died on each."
            + "\n".join(["", *named])
            + f"\nThe other {self._made:,} were made and are kept. Check the workers' logs and "
            "these documents (out of memory?), and run the same command again."
        )
