"""Scoring on a Ray cluster: Ray places workers, starts their processes and ends them; a coroutine
for each worker claims shards for it, and replaces it when it dies or hangs."""

import asyncio
import contextlib
import importlib
import logging
import os
import re
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from vocagnolm.errors import (
    AddressError,
    MissingExtraError,
    ScoreError,
    VocagnolmError,
    WaitingWarning,
    WriteError,
)
from vocagnolm.files import differences
from vocagnolm.recipe.sections import RaySection
from vocagnolm.score.plan import (
    Description,
    Plan,
    TeacherSource,
    describe,
    load_plan,
    store_identity,
)
from vocagnolm.score.settings import ScoreSettings
from vocagnolm.score.work import Done, Progress, Scored, ShardQueue, Worker
from vocagnolm.store.writer import measured_apart, with_values_of

LOCAL = "local"
_TICK_SECONDS, _GROW_SECONDS = 1.0, 10.0
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 0.5, 5.0


class RayCluster(RaySection, frozen=True):
    """Where shards are scored, by one worker for every GPU, or on CPUs for every `threads` of
    them; with a server, for every CPU. Its workers are as many as the cluster has room for, also
    when it grows, where their number is not given."""

    address: str | None = None
    """As `ray.init` takes it: `auto`, `HOST:6379`. None: the cluster that RAY_ADDRESS names, else
    one on this machine, for this run."""

    @contextlib.contextmanager
    def connected(self) -> Iterator["Connection"]:
        """A connection that the caller's program already has is used and left alone."""
        ray = import_ray()
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, self.address or os.environ.get("RAY_ADDRESS") or LOCAL)
        try:
            yield Connection(ray, self)
        finally:
            if ours:
                ray.shutdown()


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules:  # lines of the raylet on stdout: our own messages say it better
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingExtraError("ray", "ray", "scoring on a Ray cluster") from None


def _connect(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:  # nothing but numbers of shards passes through the object store
        options |= {"include_dashboard": False, "object_store_memory": 100 * 2**20}
    usual = os.dup(2)
    with tempfile.TemporaryFile() as printed:
        try:
            if found := re.fullmatch(r"([\w.-]+):(\d+)", address):  # Ray would try for minutes
                socket.create_connection((found[1], int(found[2])), timeout=10).close()
            os.dup2(printed.fileno(), 2)  # Ray's C++ part tells the reason there and nowhere else
            ray.init(address=address, **options)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            printed.seek(0)
            token = isinstance(error, ray.exceptions.AuthenticationError)
            if token or b"Unauthenticated" in printed.read():
                raise ScoreError(
                    f"the Ray cluster at {address} wants a token, and that of this machine is not "
                    "used, missing or another. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                    "RAY_AUTH_TOKEN_PATH (or ~/.ray/auth_token) to the token of the cluster."
                ) from None
            raise ScoreError(
                f"no Ray cluster at {address}: {first_line(error)} Start one there with `ray start "
                "--head`, or leave the address out for a cluster on this machine."
            ) from None
        finally:
            os.dup2(usual, 2)
            os.close(usual)


def first_line(error: BaseException) -> str:
    """One of Ray's errors in a sentence; with the cause, if it names one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    said = re.sub(r"^The actor [0-9a-f]+ is unavailable: ", "", (causes or lines or ["it"])[0])
    return f"{type(error).__name__}: {said[:200].rstrip('.')}."


class ScoringActor:
    """What the driver asks of a worker. It is made from two short strings and reads its plan from
    the growing store, so that it can be made again on any machine at any time."""

    def __init__(self, out: str, digest: str):
        self._out, self._digest = out, digest

    def hello(self) -> str:
        """The machine, as soon as the process is there."""
        return socket.gethostname()

    def load(self) -> None:
        """Make the teacher ready. It must be, on this machine too, the one of the plan."""
        plan = load_plan(self._out, self._digest).on_this_machine()
        assert plan.teacher_source is not None
        teacher = plan.teacher_source.open(plan.settings, patient=True)
        here = store_identity(describe(teacher, plan.settings), plan.corpus)
        for name, planned, found in differences(plan.identity, with_values_of(plan.identity, here)):
            is_here = measured_apart(name, planned, found) or repr(found)[:80]
            raise ScoreError(
                f"{name} is {is_here} on this machine, the "
                f"plan has {planned!r:.80}. Give all machines the same teacher, corpus, packages."
            )
        teacher.load()
        self._worker = Worker(plan, teacher, plan.writer(teacher.device_name))

    def work(self, number: int, ahead: int | None) -> Scored:
        """Score shard `number`; `ahead` is read meanwhile, for the next call."""
        return self._worker.work(number, ahead)


def worker_resources(settings: ScoreSettings) -> dict[str, float]:
    """What a worker is given; `settings` have been chosen."""
    if settings.device == "cuda":
        return {"num_gpus": 1, "num_cpus": 1}
    assert settings.threads is not None
    return {"num_cpus": settings.threads}


@dataclass(eq=False)
class _Member:
    """A worker of the run; after a death it goes on with another process."""

    actor: Any = None
    machine: str = "a machine that has not answered"
    loaded: bool = False
    alive: bool = False
    """Its process runs, and its last attempt to write did not fail."""


class Connection:
    """A cluster that answers, and the run on it."""

    def __init__(self, ray: Any, cluster: RayCluster):
        self._ray = ray
        self._workers, self._patience_seconds = cluster.workers, cluster.patience_seconds
        self._members: list[_Member] = []
        self._useless = 0
        self._scored = Scored()
        self._started: float | None = None
        self._interrupted = False
        self._notes: list[str] = []
        self._trouble: VocagnolmError | None = None
        self._last_words = "nothing was heard of one."

    def describe(self, source: TeacherSource, settings: ScoreSettings) -> Description:
        """The teacher as the workers will have it: a driver without a GPU asks one that has."""
        here = settings.device == "cpu" or source.server is not None or torch.cuda.is_available()
        if here or not self._room({"num_gpus": 1})[0]:
            return describe(source.open(settings), settings)
        return self.describe_there(source, settings, {"num_gpus": 1})

    def describe_there(
        self, source: TeacherSource, settings: ScoreSettings, resources: dict[str, float]
    ) -> Description:
        source = source.absolute()
        task = self._ray.remote(**resources)(lambda: describe(source.open(settings), settings))
        room = self._room(resources, say=True)[1]
        try:
            found: Description = self._ray.get(task.remote(), timeout=self._patience_seconds)
        except self._ray.exceptions.GetTimeoutError:
            raise ScoreError(f"no room within {self._patience_seconds:.0f} s: {room}.") from None
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return found

    def _room(self, resources: dict[str, float], *, say: bool = False) -> tuple[int, str]:
        """How many workers the nodes can hold, and what of them is free. `say`: that we wait."""
        name = "GPU" if "num_gpus" in resources else "CPU"
        needed = resources[f"num_{name.lower()}s"]
        there = [node["Resources"].get(name, 0) for node in self._ray.nodes() if node["Alive"]]
        free = self._ray.available_resources().get(name, 0)
        each = f", {needed:g} for a worker" if needed > 1 else ""
        room = f"{free:g} of {sum(there):g} {name}s free{each}"
        if say and free < needed:
            warnings.warn(f"waiting for room: {room}", WaitingWarning, stacklevel=2)
        return sum(int(one // needed) for one in there), room

    def work_through(
        self,
        plan: Plan,
        numbers: list[int],
        digest: str | None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Done:
        """Score these shards; those that are set aside are an error in the end."""
        self._queue = ShardQueue(numbers)
        self._resources = worker_resources(plan.settings)
        remote = self._ray.remote(max_task_retries=0, **self._resources)(ScoringActor)
        self._new_actor: Callable[[], Any] = lambda: remote.remote(plan.absolute().out, digest)
        documents = sum(len(plan.documents_in(number)) for number in numbers)

        def report() -> None:
            if on_progress is not None and self._started is not None:
                alive = sum(member.alive for member in self._members)
                so_far = (self._scored.documents, documents, self._scored.tokens)
                on_progress(Progress(*so_far, len(self._queue.done), len(numbers), alive))

        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop of its own
            try:
                thread.submit(asyncio.run, self._run(report)).result()
            finally:
                self._interrupted = True
        self._queue.require_none_set_aside(plan)
        seconds = 0.0 if self._started is None else time.monotonic() - self._started
        return Done(self._scored.tokens, seconds, notes=tuple(self._notes))

    async def _run(self, report: Callable[[], None]) -> None:
        self._news = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []
        alive_at, grows_at = time.monotonic(), 0.0
        self._room(self._resources, say=True)
        try:
            while self._queue.open and not self._interrupted:
                now = time.monotonic()
                if now >= grows_at:  # one is asked for in any case: there are clusters that grow
                    grows_at = now + _GROW_SECONDS
                    wanted = self._workers or max(1, self._room(self._resources)[0])
                    for _ in range(min(wanted, self._queue.open) - len(self._members)):
                        self._members.append(_Member())
                        tasks.append(asyncio.create_task(self._live(self._members[-1])))
                if any(member.alive for member in self._members):
                    alive_at = now
                elif now - alive_at > self._patience_seconds:
                    raise self._trouble or self._nobody()
                for member in filter(self._queue.is_stuck, self._members):
                    self._kill(member)
                report()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _TICK_SECONDS)
                self._news.clear()
                for task in filter(asyncio.Task.done, tasks):
                    task.result()  # raises what ended it
            report()
        finally:
            for task in tasks:
                task.cancel()
            for member in self._members:
                self._kill(member)

    async def _live(self, member: _Member) -> None:
        """The life of a worker, through as many processes as it takes."""
        rest = _FIRST_REST_SECONDS
        while True:
            try:
                await self._work(member)
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, WriteError | AddressError):  # storage that may come back
                    self._trouble = cause
                    self._note(member, "gave back", self._queue.give_back(member), str(cause))
                elif not isinstance(cause, VocagnolmError):  # what is left in it may be broken
                    self._lost(member, cause)
                elif member.loaded or self._useless + 1 == len(self._members):
                    raise cause from None
                else:  # it keeps its place: another worker would fare no better there
                    self._useless += 1
                    member.alive = False
                    self._notes.append(f"a worker on {member.machine} was of no use: {cause}")
                    return
            except self._ray.exceptions.RayError as error:  # process, node or the way to it
                self._lost(member, error)
            else:
                rest = _FIRST_REST_SECONDS
                continue
            member.alive = False
            self._news.set()
            await asyncio.sleep(rest)
            rest = min(2 * rest, _LONGEST_REST_SECONDS)

    async def _work(self, member: _Member) -> None:
        """One step: a process, its teacher, or a shard."""
        if member.actor is None:
            member.actor = self._new_actor()
            member.machine = await member.actor.hello.remote()
        elif not member.loaded:
            member.alive = True
            await member.actor.load.remote()
            member.loaded = True
            self._started = self._started or time.monotonic()
        elif (claim := self._queue.claim(member)) is None:
            await asyncio.sleep(_TICK_SECONDS / 2)
        else:
            scored = await member.actor.work.remote(*claim)
            member.alive = True
            if self._queue.finished(member, claim[0]):
                self._scored += scored
            self._news.set()

    def _lost(self, member: _Member, error: BaseException) -> None:
        reason = first_line(error)
        self._note(member, "died with", self._queue.give_back(member, reason), reason)
        self._kill(member)
        member.actor, member.loaded = None, False

    def _note(self, member: _Member, what: str, shards: list[int], reason: str) -> None:
        self._last_words = reason
        for number in shards:
            self._notes.append(
                f"a worker on {member.machine} {what} shard {number}, which went to another: "
                f"{reason}"
            )

    def _kill(self, member: _Member) -> None:
        with contextlib.suppress(Exception):  # it is dead, or the cluster is
            self._ray.kill(member.actor)

    def _nobody(self) -> ScoreError:
        needs = ", ".join(f"{name} {value:g}" for name, value in self._resources.items())
        return ScoreError(
            f"no worker has been alive for {self._patience_seconds:.0f} s "
            f"({len(self._queue.done):,} shards were scored and are kept). Each needs {needs}, and "
            f"there are {self._room(self._resources)[1]}; the last word: {self._last_words} Look "
            "at `ray status`, and run the same command again, with a longer --ray-patience for a "
            "busy cluster: it goes on from there."
        )
