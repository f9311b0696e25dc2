"""*Work* and *finish*, the second and third of three verbs: how a shard is scored, and what
completes the store."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from vocagnolm.alternatives import NOTHING
from vocagnolm.data.corpus import Corpus, Document, document_hash
from vocagnolm.errors import BusyError, ScoreError, StoreError
from vocagnolm.jobs.job import Amount, Begun, ShardWorker, Share
from vocagnolm.model.nll import TokenScores
from vocagnolm.model.runtime import compiling_seconds
from vocagnolm.score.plan import PLAN_FILE, Plan, load_plan
from vocagnolm.score.teacher import ScoreSettings, Teacher, TokenizedDocument
from vocagnolm.storage import storage_of
from vocagnolm.store import inspect_store
from vocagnolm.store.format import HASH_BYTES, Shard, narrowest_unsigned, to_float16
from vocagnolm.store.writer import StoreWriter, store_lock

# ---- a shard ----


Scores = Sequence[TokenScores | np.ndarray]
"""Per document its scores, or its losses alone."""


@dataclass
class PreparedShard:
    """A shard's documents, tokenised: the part of the work that needs no model."""

    number: int
    first_document: int
    document_span: int
    documents: list[Document]
    tokenized: list[TokenizedDocument]
    skipped: list[dict[str, Any]]
    scores: Callable[[], Scores] | None = None
    """Waits for the scores, once they are on their way."""

    @property
    def tokens(self) -> int:
        return sum(len(t.ids) for t in self.tokenized)


def score_shard(corpus: Corpus, teacher: Teacher, settings: ScoreSettings, number: int) -> Shard:
    prepared = prepare_shard(corpus, teacher, settings, number)
    return finished_shard(prepared, _started(teacher, prepared)(), settings)


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


# ---- the job ----


@dataclass
class ScoreWorker:
    """Scores shards of a plan with a teacher in this process."""

    plan: Plan
    teacher: Teacher
    writer: StoreWriter | None
    """None in a process whose shards another one writes."""

    def __post_init__(self) -> None:
        self.compiled_at_start = self.compiled_at_load = compiling_seconds()

    def load(self) -> None:
        self.teacher.load()
        self.compiled_at_load = compiling_seconds()

    def read(self, number: int) -> PreparedShard:
        return prepare_shard(self.plan.corpus, self.teacher, self.plan.settings, number)

    def start(self, shard: PreparedShard, on_part: Callable[[Amount], None]) -> Amount:
        done = 0

        def report(new_tokens: int) -> None:
            nonlocal done
            done += new_tokens
            on_part(Amount(shard.document_span * done / max(1, shard.tokens), done))

        shard.scores = _started(self.teacher, shard, report)
        return Amount(shard.document_span, shard.tokens)

    def finish(self, shard: PreparedShard) -> Amount:
        assert shard.scores is not None
        finished = finished_shard(shard, shard.scores(), self.plan.settings)
        if self.writer is not None:
            self.writer.write_shard(finished)
        return Amount()


def open_worker(out: str, digest: str | None) -> ScoreWorker:
    """A worker on any machine, from the plan in the growing store."""
    planned: Plan = load_plan(out, digest)
    plan, teacher = planned.on_this_machine()
    return ScoreWorker(plan, teacher, plan.writer(teacher.device_name))


class ScoreJob:
    """A store as a job."""

    plan: Any
    """A `Plan`; or of a folder that is made likewise, its own."""

    def __init__(self, plan: Any, device_name: str | None = None):
        self.plan: Any = plan
        self.writer: StoreWriter = plan.writer(device_name)
        self.out, self.shard_count = plan.out, plan.shard_count
        self._digest: str | None = None

    @property
    def worker_needs(self) -> dict[str, float]:
        settings = self.plan.settings
        if settings.device == "cuda":
            return {"GPU": 1.0, "CPU": 1.0}
        return {"CPU": float(settings.threads or 1)}

    def documents_in(self, number: int) -> range:
        documents: range = self.plan.documents_in(number)
        return documents

    def lock(self, *, shared: bool) -> contextlib.AbstractContextManager[None]:
        return store_lock(self.out, shared=shared)

    def begin(self, numbers: Sequence[int]) -> Begun:
        self.writer.begin()
        states = {number: self.writer.has_shard(number) for number in numbers}
        missing = [number for number, (whole, _) in states.items() if not whole]
        damage = {number: damage for number, (_, damage) in states.items() if damage}
        if missing:
            self._digest = replace(self.plan, identity=self.writer.identity).save()
        return Begun(missing, damage, self.writer.identity)

    def join(self, begun: Begun) -> None:
        self.writer.take_identity(begun.state)

    def absent(self) -> list[int]:
        return self.writer.absent_shards()

    def remote_worker(self) -> Callable[[], ShardWorker]:
        return partial(open_worker, self.plan.absolute().out, self._digest)

    def complete(self) -> bool:
        """Make the manifest, from shards that are all there; False where none has a document."""
        return self.writer.finish()

    def publish(self) -> None:
        """Add what stands beside a complete store."""

    def finish(self, share: Share, worked: bool) -> tuple[list[int], dict[str, Any]]:
        """Complete the store: the process that holds it for itself, or of several shares the last
        one."""
        self.plan.corpus.require_unchanged()
        absent = self.writer.absent_shards() if share.count > 1 else []
        if not absent:
            alone = contextlib.nullcontext() if share.count == 1 else store_lock(self.out)
            with contextlib.suppress(BusyError), alone:  # another share is at work, and will do it
                if self.complete() if share.count == 1 else self._finish_last(share, worked):
                    storage_of(self.out).remove(PLAN_FILE)
                    self.writer.tidy()
                    self.publish()
        summary = inspect_store(self.out)
        if not absent and summary["documents"] == 0:
            first = summary["skipped_documents"][0]
            raise ScoreError(
                f"{self.nothing} The first: {first['place']}: {first['reason']}. {self.out} is not "
                f"complete. {self.corrected}"
            )
        return absent, summary

    @property
    def nothing(self) -> str:
        """What is said of a store without documents."""
        return f"none of the {len(self.plan.corpus):,} documents could be scored."

    corrected = "Correct the corpus and run the same command again."

    def _finish_last(self, share: Share, worked: bool) -> bool:
        """Look through what other shares have left, and complete the store."""
        writer = self.writer
        if writer.completed_by_others or (writer.was_complete and not worked):
            return True
        writer.look()
        states = map(writer.has_shard, range(writer.shard_count))
        damaged = {number: damage for number, (whole, damage) in enumerate(states) if not whole}
        if damaged:
            raise StoreError(
                f"{next(iter(damaged.values()))} Run the shares "
                f"{', '.join(share.of_shards([*damaged]))} again, or `score` without --share: what "
                "is damaged is scored again."
            )
        return self.complete()
