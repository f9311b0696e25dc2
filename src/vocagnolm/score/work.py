"""*Work*, the second of three verbs: one shard of the plan, wherever this process runs."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from vocagnolm.model.nll import TokenScores
from vocagnolm.score.plan import Plan
from vocagnolm.score.shard import PreparedShard, finished_shard, prepare_shard, started
from vocagnolm.score.teacher import Teacher
from vocagnolm.store.writer import StoreWriter


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

    def work(
        self,
        number: int,
        ahead: int | None = None,
        on_part: Callable[[Scored], None] | None = None,
    ) -> Scored:
        """Score shard `number` and write it. `ahead` is the one that will probably be asked for
        next; `on_part` hears after every batch how much of this one is done."""
        scored = self.begin(number, ahead, on_part)
        self.settle()
        return scored

    def begin(
        self,
        number: int,
        ahead: int | None = None,
        on_part: Callable[[Scored], None] | None = None,
    ) -> Scored:
        """The same, but its last batches and writing it are left to go on beside the next one.
        At most two shards are in this process's hands."""
        prepared = self._take(number)
        if ahead is not None:
            self.read_ahead(ahead)
        report = None if on_part is None else _reporter(prepared, on_part)
        scores = started(self._teacher, prepared, report)
        self.settle()
        self._behind = self._finisher.submit(self._finish, prepared, scores)
        return Scored(prepared.document_span, prepared.tokens)

    def settle(self) -> None:
        """Wait until all that was begun is written; its error, if it had one, is raised here."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def _finish(
        self, prepared: PreparedShard, scores: Callable[[], Sequence[TokenScores | np.ndarray]]
    ) -> None:
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

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._finisher.shutdown()


def _reporter(prepared: PreparedShard, on_part: Callable[[Scored], None]) -> Callable[[int], None]:
    done = 0

    def report(new_tokens: int) -> None:
        nonlocal done
        done += new_tokens
        on_part(Scored(prepared.document_span * done / max(1, prepared.tokens), done))

    return report
