"""Scoring on a Ray cluster: Ray places workers, starts their processes and ends them; the driver
hands shards to those that wait, and replaces those that die or hang."""

import contextlib
import logging
import os
import re
import secrets
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vocagnolm import errors
from vocagnolm.errors import AddressError, ScoreError, VocagnolmError, WriteError
from vocagnolm.processes import join_team
from vocagnolm.recipe.sections import RaySection
from vocagnolm.score.plan import Description, Plan, TeacherSource, describe, load_plan
from vocagnolm.score.teacher import ScoreSettings
from vocagnolm.score.work import Claims, Done, Progress, Scored, ShardQueue, Worker

LOCAL = "local"
_TICK_SECONDS, _GROW_SECONDS = 1.0, 10.0
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 0.5, 5.0
Bundles = list[dict[str, float]]
"""CPUs and GPUs for each process of a worker, as Ray's placement groups have it."""


class RayCluster(RaySection, frozen=True):
    """A Ray cluster for scoring, with one worker per GPU, or per `threads` CPUs, or with a server
    per CPU. If their number is not given, there are as many workers as fit, also when the cluster
    grows."""

    address: str | None = None
    """As for `ray.init`: `auto`, `HOST:6379`. None: the cluster that RAY_ADDRESS names, otherwise
    one on this machine for this run."""

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
                ray.shutdown()


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules:  # lines of the raylet on stdout: our own messages say it better
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    return errors.optional("ray", "ray", "scoring on a Ray cluster")


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
                    f"the Ray cluster at {address} requires a token, and that of this machine is "
                    f"unused, missing or different. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
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
    """A process of a worker. It is made from two short strings and reads its plan from the growing
    store, so that it can be made again on any machine at any time."""

    def __init__(self, out: str, digest: str):
        self._out, self._digest = out, digest

    def hello(self) -> str:
        """The machine, as soon as the process is there."""
        return socket.gethostname()

    def load(self, rank: int = 0, team: str = "") -> None:
        """Make the teacher ready, or the part of it that process `rank` of a team holds."""
        plan, teacher = load_plan(self._out, self._digest).on_this_machine()
        if (size := len(worker_bundles(plan.settings))) > 1:  # all of a team are on one machine
            join_team(rank, size, init_method=f"file://{tempfile.gettempdir()}/vocagnolm-{team}")
        teacher.load()
        self._worker = Worker(plan, teacher, plan.writer(teacher.device_name), writes=rank == 0)

    def work(self, number: int, ahead: int | None) -> Scored:
        """Score shard `number`; `ahead` is read meanwhile, for the next call."""
        return self._worker.work(number, ahead)


def worker_bundles(settings: ScoreSettings) -> Bundles:
    """`settings` have been chosen; as many processes as hold a teacher together."""
    assert settings.shard_teacher != "auto"
    on_cpus: dict[str, float] = {"CPU": settings.threads or 1}
    one = {"GPU": 1.0, "CPU": 1.0} if settings.device == "cuda" else on_cpus
    return [one] * settings.shard_teacher


def _options(bundle: dict[str, float]) -> dict[str, float]:
    """The same as arguments of `ray.remote`."""
    return {f"num_{name.lower()}s": count for name, count in bundle.items()}


@dataclass(eq=False)
class _Member:
    """A worker of the run; after a death it goes on with other processes."""

    state: Literal["absent", "placed", "loaded", "useless"] = "absent"
    alive: bool = False
    """Its processes run, and its last attempt to write did not fail."""
    machine: str = "a machine that has not answered"
    group: Any = None
    """Of Ray: the room for its processes."""
    actors: list[Any] = field(default_factory=list)
    awaited: set[Any] = field(default_factory=set)
    """Answers that are to come."""
    shard: int = -1
    rest_seconds: float = _FIRST_REST_SECONDS
    rests_until: float = 0.0


class Connection:
    """A cluster that answers, and the run on it."""

    def __init__(self, ray: Any, cluster: RayCluster):
        self._ray, self._cluster = ray, cluster
        self._members: list[_Member] = []
        self._scored, self._started = Scored(), 0.0
        self._notes: list[str] = []
        self._trouble: VocagnolmError | None = None
        self._last_words = "nothing was heard of one."

    def describe(
        self, source: TeacherSource, settings: ScoreSettings, needed: Bundles | None = None
    ) -> Description:
        """As the workers will have it: a driver without a GPU asks a node with one (`needed`)."""
        here = settings.device == "cpu" or source.server is not None or torch.cuda.is_available()
        if needed is None and (here or not self._room([{"GPU": 1}])[0]):
            return describe(source.open(settings), settings)
        there, needed = source.absolute(), needed or [{"GPU": 1}]
        task = self._ray.remote(lambda: describe(there.open(settings), settings))
        room, patience = self._room(needed, say=True)[1], self._cluster.patience_seconds
        try:
            answer = task.options(**_options(needed[0])).remote()
            found: Description = self._ray.get(answer, timeout=patience)
        except self._ray.exceptions.GetTimeoutError:
            raise ScoreError(f"no room within {patience:.0f} s: {room}.") from None
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return found

    def _room(self, worker: Bundles, *, say: bool = False) -> tuple[int, str]:
        """How many workers the nodes can hold, and what of them is free. `say`: that we wait."""
        name = "GPU" if "GPU" in worker[0] else "CPU"
        needed = sum(bundle[name] for bundle in worker)
        there = [node["Resources"].get(name, 0) for node in self._ray.nodes() if node["Alive"]]
        free = self._ray.available_resources().get(name, 0)
        each = f", {needed:g} for a worker" if needed > 1 else ""
        room = f"{free:g} of {sum(there):g} {name}s free{each}"
        if say and free < needed:
            warnings.warn(f"waiting for room: {room}", errors.WaitingWarning, stacklevel=2)
        return sum(int(one // needed) for one in there), room

    def work_through(
        self,
        plan: Plan,
        numbers: list[int],
        digest: str | None,
        claims: Claims | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Done:
        """Score these shards; those that are set aside are an error in the end."""
        self._queue, self._bundles = (
            ShardQueue(numbers, claims=claims),
            worker_bundles(plan.settings),
        )
        self._made_from = (plan.absolute().out, digest)
        documents = sum(len(plan.documents_in(number)) for number in numbers)
        alive_at, grows_at = time.monotonic(), 0.0
        self._room(self._bundles, say=True)
        try:
            while self._queue.open:
                now = time.monotonic()
                if now >= grows_at:  # one is asked for in any case: there are clusters that grow
                    grows_at = now + _GROW_SECONDS
                    wanted = self._cluster.workers or max(1, self._room(self._bundles)[0])
                    missing = min(wanted, self._queue.open) - len(self._members)
                    self._members += [_Member() for _ in range(missing)]
                if any(member.alive for member in self._members):
                    alive_at = now
                elif now - alive_at > self._cluster.patience_seconds:
                    raise self._trouble or self._nobody()
                for member in self._members:
                    if self._queue.is_stuck(member):
                        self._end(member)
                    elif not member.awaited and now >= member.rests_until:
                        member.awaited = {*self._asked(member)}
                self._listen()
                if on_progress is not None and self._started:
                    alive = sum(member.alive for member in self._members)
                    so_far = (self._scored.documents, documents, self._scored.tokens)
                    on_progress(Progress(*so_far, len(self._queue.done), len(numbers), alive))
        finally:
            for member in self._members:
                self._end(member)
        self._queue.require_none_set_aside(plan)
        seconds = time.monotonic() - self._started if self._started else 0.0
        done = len(self._queue.done)
        return Done(self._scored.tokens, seconds, shards=done, notes=tuple(self._notes))

    def _asked(self, member: _Member) -> list[Any]:
        """The next step of a worker: its processes, its teacher, or a shard."""
        if member.state == "absent":
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Placed

            member.group = self._ray.util.placement_group(self._bundles, strategy="STRICT_PACK")
            actor = self._ray.remote(**_options(self._bundles[0]))(ScoringActor)
            member.actors = [
                actor.options(scheduling_strategy=Placed(member.group, rank)).remote(
                    *self._made_from
                )
                for rank in range(len(self._bundles))
            ]
            return [one.hello.remote() for one in member.actors]
        if member.state == "placed":
            member.alive, team = True, secrets.token_hex(8)
            return [one.load.remote(rank, team) for rank, one in enumerate(member.actors)]
        if member.state == "useless" or (claim := self._queue.claim(member)) is None:
            return []
        member.shard = claim[0]
        return [one.work.remote(*claim) for one in member.actors]

    def _listen(self) -> None:
        """To answers that are there, or come within a moment."""
        awaited = {answer: member for member in self._members for answer in member.awaited}
        if not awaited:
            return time.sleep(_TICK_SECONDS / 2)
        for answer in self._ray.wait([*awaited], timeout=_TICK_SECONDS)[0]:
            member = awaited[answer]
            if answer not in member.awaited:  # another process of this worker has failed
                continue
            member.awaited.remove(answer)
            try:
                said = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:  # of ours, or the process, or its node
                self._failed(member, getattr(error, "cause", error))
                continue
            if member.awaited:
                continue
            if member.state == "absent":
                member.state, member.machine = "placed", said
            elif member.state == "placed":
                member.state, self._started = "loaded", self._started or time.monotonic()
            else:
                member.alive, member.rest_seconds = True, _FIRST_REST_SECONDS
                if self._queue.finished(member, member.shard):
                    self._scored += said

    def _failed(self, member: _Member, error: BaseException) -> None:
        member.alive, member.awaited = False, set()
        away = isinstance(error, WriteError | AddressError)
        if isinstance(error, WriteError | AddressError):  # storage that may come back
            self._trouble = error
        elif isinstance(error, VocagnolmError):
            others = [one for one in self._members if one is not member]
            if member.state == "loaded" or all(one.state == "useless" for one in others):
                raise error from None
            member.state = "useless"  # its room is kept: another would fare no better there
            self._notes.append(f"a worker on {member.machine} was of no use: {error}")
            return
        self._last_words = str(error) if away else first_line(error)
        what, blamed = ("gave back", None) if away else ("died with", self._last_words)
        for number in self._queue.give_back(member, blamed):
            self._notes.append(
                f"a worker on {member.machine} {what} shard {number}, which went to another: "
                f"{self._last_words}"
            )
        if not (away and member.state == "loaded"):  # what is left in it may be broken
            self._end(member)
            member.state = "absent"
        member.rests_until = time.monotonic() + member.rest_seconds
        member.rest_seconds = min(2 * member.rest_seconds, _LONGEST_REST_SECONDS)

    def _end(self, member: _Member) -> None:
        with contextlib.suppress(Exception):  # it is dead, or the cluster is
            for actor in member.actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(member.group)

    def _nobody(self) -> ScoreError:
        one, count = self._bundles[0], len(self._bundles)
        needs = " and ".join(f"{count * amount:g} {name}s" for name, amount in one.items())
        return ScoreError(
            f"no worker has been alive for {self._cluster.patience_seconds:.0f} s "
            f"({len(self._queue.done):,} shards were scored and are kept). Each needs {needs}, and "
            f"there are {self._room(self._bundles)[1]}; last error: {self._last_words} Check "
            f"`ray status`, and run the same command again to resume, with a longer "
            f"--ray-patience for a busy cluster."
        )
