"""*Work* and *finish*, the second and third of three verbs: which shard a worker claims, how it is
scored, and what completes the store."""

import contextlib
import re
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from vocagnolm.alternatives import NOTHING
from vocagnolm.data.corpus import Corpus, Document, document_hash
from vocagnolm.errors import BusyError, ScoreError, StoreError, UsageError
from vocagnolm.model.nll import TokenScores
from vocagnolm.score.plan import Plan, remove_plan
from vocagnolm.score.teacher import ScoreSettings, Teacher, TokenizedDocument
from vocagnolm.store import inspect_store
from vocagnolm.store.format import (
    CLAIM_FOLDER,
    HASH_BYTES,
    SHARD_FOLDER,
    Shard,
    narrowest_unsigned,
    shard_name,
    to_float16,
)
from vocagnolm.store.writer import StoreWriter, store_lock

# ---- who scores what ----


@dataclass(frozen=True)
class Share:
    """Share `number` of `count`, from 1, of all shards and not only of the missing ones: these
    change while others work, so a shard could be left to nobody."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"--share {self}: the work is split into at least one share, 1/1.")
        if not 1 <= self.number <= self.count:
            raise UsageError(
                f"--share {self}: the shares of {self.count} are 1/{self.count} to "
                f"{self.count}/{self.count}."
            )

    @classmethod
    def parse(cls, text: str) -> "Share":
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None:
            raise UsageError(f"--share {text}: expected I/N, for example 3/8, the third of eight.")
        return cls(int(found[1]), int(found[2]))

    def shards(self, shard_count: int) -> range:
        return range(self.number - 1, shard_count, self.count)

    @property
    def marker(self) -> str:
        """Name of the file that marks this share as begun."""
        return f"share-{self.number}-of-{self.count}"

    def of_shards(self, numbers: list[int]) -> list[str]:
        """The shares to which these shards belong."""
        return [f"{n + 1}/{self.count}" for n in sorted({m % self.count for m in numbers})]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


MOST_DEATHS = 3
"""The number of workers that may die on a shard before it is set aside."""
_MOST_NAMED = 8
# A shard is handed out a second time when it takes so many times the median, or, when nothing else
# is left, to a worker that would be idle; never within the first seconds.
_LATE, _LATE_AT_THE_END, _LATE_SECONDS = 4.0, 1.5, 2.0
_LONGEST_PAUSE_SECONDS = 10.0


class Claims:
    """What the ranks or shares that make one store know of each other: files in the store."""

    def __init__(self, writer: StoreWriter, share: Share, damaged: Sequence[int]):
        self._writer, self._share, self._damaged = writer, share, set(damaged)

    def take(self, number: int, holders: int) -> bool:
        """Whether this process is the first to claim a shard that `holders` others have."""
        return self._writer.claim(number, holders)

    def is_done(self, number: int) -> bool:
        """Not to be said of a shard that stood there before, damaged."""
        return number not in self._damaged and self._writer.storage.has(shard_name(number))

    def left_by_others(self) -> list[int]:
        """What is missing of other shares that have begun; from the end, which they reach last."""
        found, count = self._writer.storage.files(SHARD_FOLDER, CLAIM_FOLDER), self._share.count
        others = [Share(n + 1, count) for n in range(count) if n + 1 != self._share.number]
        begun = [one for one in others if f"{CLAIM_FOLDER}/{one.marker}" in found]
        numbers = [n for one in begun for n in one.shards(self._writer.shard_count)]
        return [n for n in sorted(numbers, reverse=True) if shard_name(n) not in found]


class ShardQueue:
    """Hands out shards to workers, one at a time and one to be read ahead. Every shard is waiting,
    with a worker, done, or set aside; a late one is with two workers, and the first commit counts.
    A worker is any key of a dictionary. No step grows with the number of shards.

    `claims`: other processes have queues of their own for the same shards. A shard that one of them
    has claimed is with a worker of which no more is known, and may be late like any other."""

    def __init__(
        self,
        numbers: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
    ):
        self._clock, self._claims, self._helping = clock, claims, False
        self._waiting = deque(numbers)
        self._open = set(numbers)
        self._ahead: dict[Any, int] = {}
        self._begun: dict[Any, tuple[int, float]] = {}
        """The shard of every worker, and since when; first the one that has its shard longest."""
        self._holders: Counter[int] = Counter()
        self._seconds: deque[float] = deque(maxlen=101)
        self._deaths: Counter[int] = Counter()
        self.done: set[int] = set()
        self.set_aside: dict[int, str] = {}
        """With the reason why the last worker died."""

    @property
    def open(self) -> int:
        """How many shards are neither done nor set aside."""
        return len(self._open)

    def claim(self, worker: Any) -> tuple[int, int | None] | None:
        """A shard to be scored, and one to be read meanwhile; None: nothing is left for now."""
        while (number := self._next(worker)) is not None and not self._granted(number):
            pass
        if number is None:
            return None if self._claims is None or self._helping else self._help(worker)
        self._begun[worker] = (number, self._clock())
        self._holders[number] += 1
        # A shard that was with a worker when it died is handed out alone: should it be the cause,
        # no other must be blamed.
        if self._waiting and number not in self._deaths and self._waiting[0] not in self._deaths:
            self._ahead[worker] = self._waiting.popleft()
        return number, self._ahead.get(worker)

    def _next(self, worker: Any) -> int | None:
        """What it has read already, what is late, what waits, what others have only read, or what
        they are late with at the end."""
        number = self._ahead.pop(worker, None)
        if number is None:
            number = self._late(_LATE)
        while number is None and self._waiting:
            first = self._waiting.popleft()
            number = first if first in self._open else None
        if number is None and self._ahead:
            return self._ahead.pop(next(iter(self._ahead)))
        return self._late(_LATE_AT_THE_END) if number is None else number

    def _granted(self, number: int) -> bool:
        """Whether no other process has done or claimed this shard."""
        if self._claims is None:
            return True
        if self._claims.is_done(number):
            self.finished(None, number)
        elif self._claims.take(number, self._holders[number]):
            return True
        else:
            self._begun[number, self._holders[number]] = (number, self._clock())
            self._holders[number] += 1
        return False

    def _help(self, worker: Any) -> tuple[int, int | None] | None:
        """All of ours is done, or with others: go on with what they have not begun."""
        assert self._claims is not None
        self._helping = True
        others = [number for number in self._claims.left_by_others() if number not in self._open]
        self._waiting.extend(others)
        self._open.update(others)
        return self.claim(worker)

    def wait_for_others(self) -> bool:
        """Whether there is a reason to ask again: a shard that another process has claimed, and may
        be late with. Pauses, and looks what is done meanwhile."""
        held = [n for n in self._open if self._holders[n] == 1] if self._seconds else []
        if held:
            time.sleep(min(_LONGEST_PAUSE_SECONDS, self._limit(_LATE_AT_THE_END) / 10))
        for number in held:
            if self._claims is not None and self._claims.is_done(number):
                self.finished(None, number)
        return bool(held)

    def _late(self, factor: float) -> int | None:
        """The shard that its only worker has had for longest, if that is too long."""
        for number, since in self._begun.values():
            if self._clock() - since <= self._limit(factor):
                break
            if number in self._open and self._holders[number] == 1:
                return number
        return None

    def _limit(self, factor: float) -> float:
        if not self._seconds:
            return float("inf")
        return max(_LATE_SECONDS, factor * statistics.median(self._seconds))

    def is_stuck(self, worker: Any) -> bool:
        """Whether another one has finished its shard, and it is still late with it."""
        number, since = self._begun.get(worker, (None, 0.0))
        return number in self.done and self._clock() - since > self._limit(_LATE)

    def finished(self, worker: Any, number: int) -> bool:
        """Whether it is the first that has finished this shard."""
        if worker in self._begun:
            self._seconds.append(self._clock() - self._released(worker)[1])
        if number in self.done:
            return False
        self._open.discard(number)
        self.set_aside.pop(number, None)
        self.done.add(number)
        return True

    def _released(self, worker: Any) -> tuple[int, float]:
        number, since = self._begun.pop(worker)
        self._holders[number] -= 1
        return number, since

    def give_back(self, worker: Any, death: str | None = None) -> list[int]:
        """What the worker has goes to the end of the queue. `death`: why the worker died; a shard
        on which too many have died is set aside. Returns the shard that it had begun, if any."""
        begun = [self._released(worker)[0]] if worker in self._begun else []
        ahead = [self._ahead.pop(worker)] if worker in self._ahead else []
        for number in (*begun, *ahead):
            if number not in self._open:
                continue
            self._deaths[number] += death is not None
            if death is not None and self._deaths[number] >= MOST_DEATHS:
                self._open.remove(number)
                self.set_aside[number] = death
            elif not self._holders[number]:
                self._waiting.append(number)
        return begun

    def require_none_set_aside(self, plan: Plan) -> None:
        if not self.set_aside:
            return
        named = [
            f"  shard {number} (documents {where.start:,} to {where.stop - 1:,}): {reason}"
            for number, reason in sorted(self.set_aside.items())[:_MOST_NAMED]
            for where in [plan.documents_in(number)]
        ]
        if len(self.set_aside) > _MOST_NAMED:
            named.append(f"  and {len(self.set_aside) - _MOST_NAMED:,} more")
        raise ScoreError(
            f"{len(self.set_aside):,} shards were set aside: {MOST_DEATHS} workers died on each.\n"
            + "\n".join(named)
            + f"\nThe other {len(self.done):,} were scored and are kept. Check the workers' logs "
            f"and these documents (out of memory?), and run the same command again."
        )


# ---- a shard ----


@dataclass(frozen=True)
class PreparedShard:
    """A shard's documents, tokenised: the part of the work that needs no model."""

    number: int
    first_document: int
    document_span: int
    documents: list[Document]
    tokenized: list[TokenizedDocument]
    skipped: list[dict[str, Any]]

    @property
    def tokens(self) -> int:
        return sum(len(t.ids) for t in self.tokenized)


def score_shard(corpus: Corpus, teacher: Teacher, settings: ScoreSettings, number: int) -> Shard:
    prepared = prepare_shard(corpus, teacher, settings, number)
    return finished_shard(prepared, _started(teacher, prepared)(), settings)


Scores = Sequence[TokenScores | np.ndarray]
"""Per document its scores, or its losses alone."""


def _started(
    teacher: Any, prepared: PreparedShard, on_tokens: Callable[[int], None] | None = None
) -> Callable[[], Scores]:
    """Waits for the numbers of a shard, which are on their way where the teacher can do that."""
    if hasattr(teacher, "start"):
        waiting: Callable[[], Scores] = teacher.start(prepared.tokenized, on_tokens)
        return waiting
    scores: Scores = teacher.nll(prepared.tokenized, on_tokens)
    return lambda: scores


def prepare_shard(
    corpus: Corpus, teacher: Teacher, settings: ScoreSettings, number: int
) -> PreparedShard:
    first = number * settings.shard_documents
    found = list(corpus.read(first, first + settings.shard_documents))
    texts = [document.text for document in found if document.text is not None]
    outcomes = iter(teacher.tokenize(texts))
    documents, tokenized, skipped = [], [], []
    for document in found:
        outcome = document.problem if document.text is None else next(outcomes)
        if isinstance(outcome, TokenizedDocument):
            documents.append(document)
            tokenized.append(outcome)
            continue
        if settings.strict:
            raise ScoreError(
                f"{document.place} (document {document.index}) cannot be scored: {outcome}. "
                "Fix it, or run without --strict to skip and count such documents."
            )
        skipped.append(
            {"document": document.index, "place": document.place, "reason": outcome or "unknown"}
        )
    return PreparedShard(number, first, len(found), documents, tokenized, skipped)


def finished_shard(prepared: PreparedShard, given: Scores, settings: ScoreSettings) -> Shard:
    scores = [TokenScores(one) if isinstance(one, np.ndarray) else one for one in given]
    assert [len(one.nll) for one in scores] == [len(t.ids) for t in prepared.tokenized]
    nonfinite = _mask_nonfinite(scores, prepared, settings.max_nonfinite_share)
    hashes = b"".join(document_hash(d.text) for d in prepared.documents if d.text is not None)
    stored = [t.stored(one) for t, one in zip(prepared.tokenized, scores, strict=True)]
    token_bytes = np.concatenate([np.zeros(0, np.int32), *(lengths for lengths, _ in stored)])
    kept, alternatives = settings.kept_alternatives, None
    if kept is not None:
        rows = [one.alternatives for _, one in stored if one.alternatives is not None]
        if len(rows) < len(stored):
            raise ScoreError(
                "--alternatives: this teacher provides only losses. Remove the option."
            )
        alternatives = np.concatenate([np.zeros((0, kept.count), "<u4"), *rows])
    return Shard(
        number=prepared.number,
        first_document=prepared.first_document,
        document_span=prepared.document_span,
        document_hash=np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES),
        document_index=np.array([d.index for d in prepared.documents], "<u8"),
        token_count=np.array([len(lengths) for lengths, _ in stored], "<u4"),
        token_bytes=narrowest_unsigned(token_bytes),
        nll=to_float16(np.concatenate([np.zeros(0, "f4"), *(one.nll for _, one in stored)])),
        skipped=prepared.skipped,
        nonfinite=nonfinite,
        alternatives=alternatives,
    )


def _mask_nonfinite(scores: list[TokenScores], prepared: PreparedShard, most: float) -> int:
    """Make infinities NaN, in place, and count what the teacher should have known. A first token
    without context is NaN by right."""
    total, first = 0, None
    for one, document in zip(scores, prepared.documents, strict=True):
        bad = ~np.isfinite(one.nll)
        one.nll[bad] = np.nan
        if one.alternatives is not None:
            one.alternatives[bad] = NOTHING
        total += int(bad[1:].sum())
        first = first or (document.place if total else None)
    if total > most * prepared.tokens:
        raise ScoreError(
            f"the teacher gave NaN or infinity for {total:,} of {prepared.tokens:,} tokens of "
            f"shard {prepared.number} (first in {first}), more than the allowed {most:.2%}. Use "
            "--dtype bfloat16 or float32 where it was float16, or check the teacher's weights."
        )
    return total


# ---- work on a shard ----


@dataclass(frozen=True)
class Scored:
    """So much of a shard, or of several."""

    documents: float = 0
    tokens: int = 0

    def __add__(self, other: "Scored") -> "Scored":
        return Scored(self.documents + other.documents, self.tokens + other.tokens)


@dataclass(frozen=True)
class Done:
    """What became of the shards that were to be scored."""

    tokens: int = 0
    seconds: float = 0.0
    """Without loading the teacher and without compiling it."""
    compiling: float = 0.0
    shards: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far a process is with the shards that it has to do, or a whole cluster."""

    documents: float
    total_documents: int
    tokens: int
    shards: int = 0
    total_shards: int = 0
    workers: int | None = None
    """Of a cluster: those that are alive."""


class Worker:
    """Scores one shard after the other. Meanwhile one thread reads and tokenises the next, and
    another finishes and writes the last."""

    def __init__(self, plan: Plan, teacher: Teacher, writer: StoreWriter, writes: bool = True):
        """`writes`: False in a process that holds a part of a teacher; another one writes."""
        self._plan = plan
        self._teacher = teacher
        self._writer = writer
        self._writes = writes
        self._reader = ThreadPoolExecutor(max_workers=1)
        self._ahead: tuple[int, Future[PreparedShard]] | None = None
        self._finisher = ThreadPoolExecutor(max_workers=1)
        self._behind: Future[None] | None = None

    def read_ahead(self, number: int) -> None:
        """Read and tokenise a shard meanwhile: the next, or the first while weights are loaded."""
        self._ahead = number, self._reader.submit(self._prepare, number)

    def work(self, number: int, ahead: int | None = None) -> Scored:
        """Score shard `number` and write it. `ahead`: probably the next one."""
        scored = self.begin(number, ahead)
        self.settle()
        return scored

    def begin(
        self, number: int, ahead: int | None = None, on_part: Callable[[Scored], None] | None = None
    ) -> Scored:
        """The same, but its last batches and writing it are left to go on beside the next one, so
        that this process has at most two shards. `on_part` hears after every batch how much of this
        one is done."""
        prepared = self._take(number)
        if ahead is not None:
            self.read_ahead(ahead)
        done = 0

        def report(new_tokens: int) -> None:
            nonlocal done
            done += new_tokens
            assert on_part is not None
            on_part(Scored(prepared.document_span * done / max(1, prepared.tokens), done))

        scores = _started(self._teacher, prepared, report if on_part else None)
        self.settle()
        self._behind = self._finisher.submit(self._finish, prepared, scores)
        return Scored(prepared.document_span, prepared.tokens)

    def settle(self) -> None:
        """Wait until all that was begun is written; its error, if it had one, is raised here."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._finisher.shutdown()

    def _finish(self, prepared: PreparedShard, scores: Callable[[], Scores]) -> None:
        shard = finished_shard(prepared, scores(), self._plan.settings)
        if self._writes:
            self._writer.write_shard(shard)

    def _take(self, number: int) -> PreparedShard:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == number:
            return ahead[1].result()
        if ahead is not None:
            ahead[1].exception()  # two at once would read the corpus through one open file
        return self._prepare(number)

    def _prepare(self, number: int) -> PreparedShard:
        return prepare_shard(self._plan.corpus, self._teacher, self._plan.settings, number)


# ---- finish ----


def finish(
    plan: Plan, writer: StoreWriter, share: Share, scored: bool
) -> tuple[list[int], dict[str, Any]]:
    """Complete the store: the process that holds it for itself, or of several shares the last one.
    Returns the shards that are missing, and what the store is now."""
    plan.corpus.require_unchanged()
    absent = writer.absent_shards() if share.count > 1 else []
    if not absent:
        alone = contextlib.nullcontext() if share.count == 1 else store_lock(writer.path)
        with contextlib.suppress(BusyError), alone:  # another share is at work, and will do it
            if share.count == 1:
                writer.finish()
            elif not (writer.completed_by_others or (writer.was_complete and not scored)):
                states = map(writer.has_shard, range(writer.shard_count))
                damaged = {n: damage for n, (whole, damage) in enumerate(states) if not whole}
                if damaged:
                    raise StoreError(
                        f"{next(iter(damaged.values()))} Run the shares "
                        f"{', '.join(share.of_shards([*damaged]))} again, or `score` without "
                        "--share: what is damaged is scored again."
                    )
                writer.finish()
            remove_plan(writer.path)
            writer.tidy()
    summary = inspect_store(plan.out)
    if summary["complete"] and summary["documents"] == 0:
        first = summary["skipped_documents"][0]
        raise ScoreError(
            f"none of the {len(plan.corpus):,} documents could be scored; the first: "
            f"{first['place']}: {first['reason']}."
        )
    return absent, summary
