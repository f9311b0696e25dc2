"""Scoring with Ray: a queue of shards, workers that each hold a teacher, and the driver that hands
shards to workers and outlives them."""

import contextlib
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vocagnolm.errors import ScoreError, VocagnolmError
from vocagnolm.files import differences
from vocagnolm.score.cluster import first_line
from vocagnolm.score.plan import Plan, describe, load_plan, store_identity
from vocagnolm.score.teacher import Teacher
from vocagnolm.score.work import Done, Progress, Scored, Worker
from vocagnolm.store.writer import told, with_values_of

MOST_DEATHS = 3
"""So many workers may die on a shard before it is set aside."""


class ShardQueue:
    """Every shard is waiting, in somebody's hands, done, or set aside."""

    def __init__(self, numbers: Sequence[int]):
        self._waiting = deque(numbers)
        self._deaths: Counter[int] = Counter()
        self._open = set(numbers)
        self.done: list[int] = []
        self.set_aside: dict[int, str] = {}
        """With the last thing that was heard of their workers."""

    @property
    def open(self) -> int:
        """Shards that are neither done nor set aside."""
        return len(self._open)

    def take(self) -> int | None:
        return self._waiting.popleft() if self._waiting else None

    def take_beside(self, number: int) -> int | None:
        """One to be made ready while `number` is scored. A shard that was with a worker when it
        died is handed out alone: should it be the cause, no other must be blamed."""
        if number in self._deaths or not self._waiting or self._waiting[0] in self._deaths:
            return None
        return self._waiting.popleft()

    def finished(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)
            self.done.append(number)

    def died(self, numbers: Iterable[int], reason: str) -> None:
        """Their worker died: they go to the end of the queue, and those on which too many have died
        are set aside."""
        for number in numbers:
            self._deaths[number] += 1
            if self._deaths[number] < MOST_DEATHS:
                self._waiting.append(number)
            else:
                self._open.discard(number)
                self.set_aside[number] = reason


# ---- a worker ----


class ScoringActor:
    """What the driver asks of a worker. It is made from two short strings and reads its plan from
    the growing store, so that it can be made again on any machine at any time; what can fail
    happens in `load`.

    A teacher that needs several GPUs would be a group of processes behind the same three calls.
    """

    def __init__(self, out: str, digest: str):
        self._out = out
        self._digest = digest
        self._worker: Worker | None = None

    def hello(self) -> str:
        """The machine, as soon as the process is there."""
        return socket.gethostname()

    def load(self) -> None:
        """Make the teacher ready. It must be, on this machine too, the one of the plan."""
        if self._worker is not None:
            return
        plan = load_plan(self._out, self._digest).on_this_machine()
        assert plan.teacher_source is not None
        teacher = plan.teacher_source.open(plan.settings, patient=True)
        _require_planned(plan, teacher)
        teacher.load()
        self._worker = Worker(plan, teacher, plan.writer(teacher.device_name))

    def work(self, number: int, ahead: int | None) -> Scored:
        """Shard `number`; `ahead` is read meanwhile, for the next call."""
        assert self._worker is not None
        return self._worker.work(number, ahead)


def _require_planned(plan: Plan, teacher: Teacher) -> None:
    here = store_identity(describe(teacher, plan.settings), plan.corpus)
    here = with_values_of(plan.identity, here)
    for name, planned, found in differences(plan.identity, here):
        told_apart = told(name, planned, found)
        raise ScoreError(
            f"{name} is {told_apart or repr(found)[:80]} on this machine, the plan has "
            f"{planned!r:.80}. Give all machines the same teacher, corpus and packages."
        )


# ---- the driver ----


_TICK_SECONDS = 1.0
_GROW_SECONDS = 10.0
_FIRST_REST_SECONDS = 0.5
_LONGEST_REST_SECONDS = 5.0
_MOST_NAMED = 8

State = Literal["called", "loading", "ready", "working", "resting", "useless"]
_ALIVE: tuple[State, ...] = ("loading", "ready", "working")


@dataclass
class _Member:
    actor: Any
    state: State
    call: Any = None
    """What it was asked to do, until it answers."""
    machine: str = "a machine that has not answered yet"
    shard: int | None = None
    ahead: int | None = None
    rest_seconds: float = _FIRST_REST_SECONDS
    rests_until: float = 0.0


class Crew:
    """The workers of one run. Their life: called, loading, ready, working; resting after a death,
    until Ray has restarted them; useless where the teacher cannot be had on their machine."""

    def __init__(
        self,
        ray: Any,
        plan: Plan,
        digest: str,
        *,
        resources: dict[str, float],
        room: Callable[[], int],
        patience_seconds: float,
        on_progress: Callable[[Progress], None] | None = None,
    ):
        self._ray = ray
        self._plan = plan
        self._room = room
        self._patience_seconds = patience_seconds
        self._on_progress = on_progress
        options = {"max_restarts": -1, "max_task_retries": 0, **resources}
        actor_class = ray.remote(**options)(ScoringActor)
        out = plan.absolute().out
        self._new_actor: Callable[[], Any] = lambda: actor_class.remote(out, digest)
        self._needs = ", ".join(f"{name} {value:g}" for name, value in resources.items())
        self._members: list[_Member] = []
        self._scored = Scored()
        self._started: float | None = None
        """Since when there has been a worker with its teacher."""
        self._notes: list[str] = []
        self._last_words = "nothing was heard of one"
        self._alive_at = time.monotonic()
        self._grows_at = 0.0

    def work_through(self, numbers: list[int]) -> Done:
        self._queue = ShardQueue(numbers)
        self._total = Scored(sum(len(self._plan.documents_in(number)) for number in numbers))
        try:
            while self._queue.open:
                self._grow()
                self._wake()
                self._hand_out()
                self._require_life()
                self._tell()
                self._listen()
            self._tell()
        finally:
            for member in self._members:
                with contextlib.suppress(Exception):  # it is dead, or the cluster is
                    self._ray.kill(member.actor)
        if self._queue.set_aside:
            raise self._set_aside()
        seconds = 0.0 if self._started is None else time.monotonic() - self._started
        return Done(self._scored.tokens, seconds, notes=tuple(self._notes))

    # ---- the crew ----

    def _grow(self) -> None:
        if time.monotonic() < self._grows_at:
            return
        self._grows_at = time.monotonic() + _GROW_SECONDS
        wanted = min(self._room(), self._queue.open)
        while len(self._members) < wanted:
            actor = self._new_actor()
            self._members.append(_Member(actor, "called", actor.hello.remote()))

    def _wake(self) -> None:
        for member in self._members:
            if member.state == "resting" and time.monotonic() >= member.rests_until:
                member.state, member.call = "called", member.actor.hello.remote()

    def _hand_out(self) -> None:
        for member in self._members:
            if member.state != "ready":
                continue
            number = self._next_for(member)
            if number is None:
                continue
            member.shard, member.ahead = number, self._queue.take_beside(number)
            member.state = "working"
            member.call = member.actor.work.remote(number, member.ahead)

    def _next_for(self, member: _Member) -> int | None:
        """What it has read already, what waits, or what another has not yet begun."""
        number, member.ahead = member.ahead, None
        if number is None:
            number = self._queue.take()
        if number is None:
            for other in self._members:
                if other.ahead is not None:
                    number, other.ahead = other.ahead, None
                    break
        return number

    def _require_life(self) -> None:
        now = time.monotonic()
        if any(member.state in _ALIVE for member in self._members):
            self._alive_at = now
        elif now - self._alive_at > self._patience_seconds:
            done = f"{len(self._queue.done):,} shards were scored and are kept"
            raise ScoreError(
                f"no worker has been alive for {self._patience_seconds:.0f} s ({done}). The "
                f"cluster should have room for {max(1, len(self._members))} with {self._needs} "
                f"each; the last word: {self._last_words} Look at `ray status`, and run the same "
                "command again: it goes on from there."
            )

    def _tell(self) -> None:
        if self._on_progress is None or self._started is None:
            return
        self._on_progress(
            Progress(
                documents=self._scored.documents,
                total_documents=int(self._total.documents),
                tokens=self._scored.tokens,
                shards=len(self._queue.done),
                total_shards=len(self._queue.done) + self._queue.open + len(self._queue.set_aside),
                workers=sum(member.state in _ALIVE for member in self._members),
            )
        )

    # ---- what they answer ----

    def _listen(self) -> None:
        calls = {member.call: member for member in self._members if member.call is not None}
        if not calls:
            time.sleep(_TICK_SECONDS)
            return
        answered, _ = self._ray.wait([*calls], num_returns=1, timeout=_TICK_SECONDS)
        for call in answered:
            self._hear(calls[call], call)

    def _hear(self, member: _Member, call: Any) -> None:
        member.call = None
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            self._failed(member, error.cause)
        except self._ray.exceptions.RayError as error:
            self._lost(member, error)
        else:
            self._answered(member, answer)

    def _answered(self, member: _Member, answer: Any) -> None:
        if member.state == "called":
            member.machine = answer
            member.state, member.call = "loading", member.actor.load.remote()
            return
        member.rest_seconds = _FIRST_REST_SECONDS
        if member.state == "loading":
            self._started = self._started or time.monotonic()
        else:
            assert member.shard is not None
            self._queue.finished(member.shard)
            self._scored += answer
            member.shard = None
        member.state = "ready"

    def _failed(self, member: _Member, error: BaseException) -> None:
        """An error of our own code or of a library, in a process that lives."""
        if isinstance(error, VocagnolmError):
            if member.state != "loading":
                raise error
            # it keeps its place: another worker would fare no better there
            member.state = "useless"
            self._last_words = f"a worker on {member.machine} was of no use: {error}"
            self._notes.append(self._last_words)
            if all(one.state == "useless" for one in self._members):
                raise error
            return
        with contextlib.suppress(Exception):  # what is left in it may be broken: a fresh one
            self._ray.kill(member.actor, no_restart=False)
        self._lost(member, error)

    def _lost(self, member: _Member, error: BaseException) -> None:
        """Its process, its node or the way to it is gone."""
        reason = f"{type(error).__name__}: {first_line(error)}"
        self._last_words = reason
        if member.state == "working":
            held = [number for number in (member.shard, member.ahead) if number is not None]
            self._queue.died(held, reason)
            self._notes.append(
                f"a worker on {member.machine} died with shard {member.shard}, which went to "
                f"another: {reason}"
            )
        elif member.state == "called" and isinstance(
            error, self._ray.exceptions.ActorDiedError
        ):  # for good: Ray could not make it
            member.actor = self._new_actor()
        member.shard = member.ahead = None
        member.state = "resting"
        member.rests_until = time.monotonic() + member.rest_seconds
        member.rest_seconds = min(2 * member.rest_seconds, _LONGEST_REST_SECONDS)

    def _set_aside(self) -> ScoreError:
        aside = self._queue.set_aside
        named = []
        for number, reason in sorted(aside.items())[:_MOST_NAMED]:
            documents = self._plan.documents_in(number)
            named.append(
                f"  shard {number} (documents {documents.start:,} to {documents.stop - 1:,}): "
                f"{reason}"
            )
        more = f"\n  and {len(aside) - _MOST_NAMED:,} more" if len(aside) > _MOST_NAMED else ""
        return ScoreError(
            f"{len(aside):,} shards were set aside: {MOST_DEATHS} workers died on each.\n"
            + "\n".join(named)
            + more
            + f"\nThe other {len(self._queue.done):,} were scored and are kept. Look at the "
            "workers' logs and at these documents (out of memory?), and run the same command again."
        )
