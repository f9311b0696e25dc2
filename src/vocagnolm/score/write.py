"""`vocagnolm write`: a teacher answers prompts, and its alternatives stay.

What it leaves is a corpus of conversations and the store over exactly these in one folder, made
shard by shard: a shard is some prompts with all of their answers, and its bytes depend on these
alone.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm import __version__
from vocagnolm.data.corpus import described_documents
from vocagnolm.data.prompts import Prompt, Prompts, Records, occurrences, open_prompts
from vocagnolm.errors import ScoreError, UsageError
from vocagnolm.files import address_of, differences
from vocagnolm.jobs.cluster import RayCluster
from vocagnolm.jobs.job import Amount, OnProgress, ShardWorker, Share, run_job
from vocagnolm.processes import running_ranks
from vocagnolm.questions import grade
from vocagnolm.score.plan import load_plan, may_be_planned, save_plan
from vocagnolm.score.work import ScoreJob
from vocagnolm.score.writers import Writer, WriterSource, WriteSettings, answer_seed
from vocagnolm.score.written import Grader, ReadPrompt, ShardBuilder, by_prompt
from vocagnolm.storage import require_storage, storage_of
from vocagnolm.storage.copies import version
from vocagnolm.store.export import CARD, store_card
from vocagnolm.store.format import DATA_FOLDER, Record, encode_vocabulary
from vocagnolm.store.writer import StoreWriter

# the task whose grader compares answers of a kind
_GRADED_AS = {"number": "gsm8k", "mixed": "asdiv", "math": "math", "choice": "mathqa"}


# ---- the plan ----


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """All that decides a written folder, and where it grows: no open files and no model."""

    out: str
    identity: dict[str, Any]
    prompts: Prompts
    settings: WriteSettings
    repeated: dict[int, int]
    """Prompts of which equal ones stand before them: how many, by number."""
    source: WriterSource | None = None
    """None: an object of the caller's, which other processes cannot open."""
    vocabulary: bytes | None = None
    """In the process that begins the folder: the teacher's vocabulary, as it is written."""
    version: str = __version__

    @property
    def corpus(self) -> Records:
        return self.prompts.records

    @property
    def shard_prompts(self) -> int:
        assert self.settings.shard_prompts is not None
        return self.settings.shard_prompts

    @property
    def shard_count(self) -> int:
        return -(-len(self.prompts) // self.shard_prompts)

    def prompts_in(self, number: int) -> range:
        first = number * self.shard_prompts
        return range(first, min(first + self.shard_prompts, len(self.prompts)))

    def documents_in(self, number: int) -> range:
        """The answers of a shard."""
        prompts, samples = self.prompts_in(number), self.settings.samples
        return range(prompts.start * samples, prompts.stop * samples)

    def writer(self, device: str | None = None) -> StoreWriter:
        return StoreWriter(self.out, self.identity, self.shard_count, device, self.vocabulary)

    def absolute(self) -> "WritePlan":
        """The plan for processes that stand in another folder."""
        out = self.out if address_of(self.out) else str(Path(self.out).absolute())
        return replace(self, out=out, source=self.source and self.source.absolute())

    def save(self) -> str | None:
        if self.source is None:
            return None
        return save_plan(self.out, replace(self.absolute(), vocabulary=None))


may_be_planned(WritePlan, WriteSettings, WriterSource, Prompts, Records)


def make_plan(
    writer: Writer, prompts: Prompts, out: str, source: WriterSource | None = None
) -> WritePlan:
    """Reads all prompts once. `source`: where other processes can open the teacher."""
    vocabulary = writer.vocabulary() if writer.settings.alternatives else None
    return WritePlan(
        out=out,
        identity=written_identity(writer, prompts),
        prompts=prompts,
        settings=writer.settings,
        repeated=occurrences(prompts.read()),
        vocabulary=None if vocabulary is None else encode_vocabulary(vocabulary),
        source=source,
    )


def written_identity(writer: Writer, prompts: Prompts) -> dict[str, Any]:
    """Everything that decides the bytes of a written folder: the prompts and the settings."""
    samples, shard_prompts = writer.settings.samples, writer.settings.shard_prompts or 1
    asked = {"prompts": len(prompts), "documents": len(prompts) * samples}
    return {
        **writer.describe(),
        "corpus": {**prompts.describe(), **asked},
        "shard_documents": shard_prompts * samples,
        "software": {name: version(name) for name in ("tokenizers", "torch", "transformers")},
    }


# ---- a shard ----


@dataclass
class PreparedPrompts:
    """A shard's prompts as the teacher reads them: the part of the work that needs no model."""

    number: int
    prompts: list[Prompt]
    reads: list[ReadPrompt | str]
    """Each as the teacher reads it, or the reason why it cannot be asked."""
    seeds: list[list[int]]
    """For every prompt that can be asked, one number per answer."""
    written: ShardBuilder | None = None
    """The shard, once its answers are there."""


def prepare_shard(plan: WritePlan, writer: Writer, number: int) -> PreparedPrompts:
    where, settings = plan.prompts_in(number), plan.settings
    prompts = list(plan.prompts.read(where.start, where.stop))
    asked = iter(writer.read([prompt for prompt in prompts if prompt.text is not None]))
    reads = [p.problem or "unknown" if p.text is None else next(asked) for p in prompts]

    def seeds_of(prompt: Prompt) -> list[int]:
        occurrence, text = plan.repeated.get(prompt.index, 0), prompt.text or ""
        return [answer_seed(settings.seed, text, occurrence, n) for n in range(settings.samples)]

    seeds = [seeds_of(read.prompt) for read in reads if isinstance(read, ReadPrompt)]
    return PreparedPrompts(number, prompts, reads, seeds)


def write_shard(
    plan: WritePlan,
    writer: Writer,
    prepared: PreparedPrompts,
    on_tokens: Callable[[int], None] | None = None,
) -> ShardBuilder:
    """The teacher's answers to a shard's prompts, in order."""
    settings = plan.settings
    builder = ShardBuilder(
        prepared.number,
        plan.prompts_in(prepared.number).start,
        settings.samples,
        settings.alternatives,
        keep_cut=settings.cut == "keep",
        chat=writer.chat,
        continues=plan.prompts.continues,
        grader=None if settings.grade is None else grader_of(settings.grade),
    )
    readable = [read for read in prepared.reads if isinstance(read, ReadPrompt)]
    answers = writer.write(readable, prepared.seeds, on_tokens)
    done = by_prompt(readable, answers, settings.samples)
    for prompt, read in zip(prepared.prompts, prepared.reads, strict=True):
        if isinstance(read, ReadPrompt):
            builder.add(*next(done))
        else:
            builder.skip(prompt, read)
    return builder


def grader_of(kind: str) -> Grader:
    """What compares an answer of this kind with the expected one."""

    def is_right(content: str, expected: str, question: str, finished: bool) -> bool:
        marked = grade(_GRADED_AS[kind], content, expected, complete=finished, question=question)
        return marked.correct

    return is_right


# ---- the job ----


@dataclass
class WriteWorker:
    """Writes shards of a plan with a teacher in this process."""

    plan: WritePlan
    teacher: Writer
    store: StoreWriter

    def load(self) -> None:
        self.teacher.load()

    def read(self, number: int) -> PreparedPrompts:
        return prepare_shard(self.plan, self.teacher, number)

    def start(self, shard: PreparedPrompts, on_part: Callable[[Amount], None]) -> Amount:
        answers, done = len(self.plan.documents_in(shard.number)), 0
        most = max(1, sum(map(len, shard.seeds)) * self.plan.settings.max_new_tokens)

        def report(new_tokens: int) -> None:
            nonlocal done
            done += new_tokens
            on_part(Amount(answers * done / most, done))

        shard.written = write_shard(self.plan, self.teacher, shard, report)
        return Amount(answers, done)

    def finish(self, shard: PreparedPrompts) -> None:
        assert shard.written is not None
        content = shard.written.shard(len(shard.prompts))
        self.store.write_shard(content, shard.written.files())


def open_worker(out: str, digest: str | None) -> WriteWorker:
    """A worker on any machine, from the plan in the growing folder."""
    plan = load_plan(out, digest, WritePlan)
    assert plan.source is not None
    teacher = plan.source.open(plan.settings, plan.prompts)
    here = written_identity(teacher, plan.prompts)
    for name, planned, found in differences(plan.identity, here):
        raise ScoreError(
            f"{name} is {found!r:.80} on this machine, the plan has {planned!r:.80}. Give all "
            "machines the same teacher, prompts and packages."
        )
    return WriteWorker(plan, teacher, plan.writer(teacher.device_name))


class WriteJob(ScoreJob):
    """A folder that a teacher writes, as a job."""

    plan: WritePlan

    def remote_worker(self) -> Callable[[], ShardWorker]:
        return partial(open_worker, self.plan.absolute().out, self._digest)

    def complete(self) -> None:
        """The manifest, which completes the folder, and its card."""
        self.writer.finish(self._written)
        storage = storage_of(self.plan.out)
        storage.put(CARD, store_card(storage).encode())

    def _written(self, records: list[Record]) -> dict[str, Any]:
        """What the manifest says of the documents, as a corpus that is opened describes itself."""
        found = [
            (name, about)
            for record in records
            for name, about in record["files"].items()
            if name.startswith(f"{DATA_FOLDER}/")
        ]
        sources = [
            {"name": name, "documents": about["lines"], "sha256": about["sha256"]}
            for name, about in found
        ]
        about = described_documents(sources, not self.plan.prompts.continues)
        if self.plan.settings.grade is not None:
            about |= right_answers(np.sum([entry["right"] for _, entry in found], axis=0).tolist())
        return {"written": {"prompts": len(self.plan.prompts), **about}}

    @property
    def nothing(self) -> str:
        return f"none of the {len(self.plan.prompts):,} prompts has an answer worth keeping."


def right_answers(prompts: Sequence[int]) -> dict[str, Any]:
    """What is said of graded answers, from the numbers of prompts with 0, 1, ... right ones."""
    graded = sum(prompts)
    right = sum(count * number for number, count in enumerate(prompts))
    return {
        "graded_prompts": graded,
        "prompts_by_right_answers": [*prompts],
        "right_answers": right,
    }


# ---- write ----


@dataclass(frozen=True)
class WriteSummary:
    """What a run did, and the resulting folder."""

    folder: dict[str, Any]
    """As in `vocagnolm store inspect`."""
    written_shards: int
    found_shards: int
    """Finished by earlier runs."""
    mended: list[str]
    """What was damaged and written again."""
    tokens: int
    seconds: float
    """Time for writing only."""
    missing_shares: list[str] = field(default_factory=list)
    """Left to other shares, if this run had only a share."""
    notes: list[str] = field(default_factory=list)
    """What happened to the workers of a cluster."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.written_shards and self.seconds else None


def write_answers(
    teacher: str | Path | Writer,
    prompts: str | Path | Sequence[str | Path] | Prompts,
    out: str | Path,
    *,
    settings: WriteSettings | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    share: Share | None = None,
    cluster: RayCluster | None = None,
    on_progress: OnProgress | None = None,
    **reading: Any,
) -> WriteSummary:
    """Let `teacher` answer `prompts`, and write its answers with its alternatives to the folder
    `out`, or to a bucket.

        summary = write_answers("Qwen/Qwen2.5-1.5B-Instruct", "prompts.jsonl", "written")
        # corpus: {files: [written]} and store: {path: written} train a student from it

    teacher: a model folder, hub id or GGUF file, or an object with the methods of `Writer`.
    prompts: files, folders, hub datasets, or `Prompts`; `reading` are options of `open_prompts`.
    share, cluster: as in `score_corpus`.

    Run it again to resume: no prompt is answered twice, and the bytes are those of a run that was
    not interrupted.
    """
    settings = settings or WriteSettings()
    require_storage(out)
    source = None
    if isinstance(teacher, str | Path):
        source = WriterSource(str(teacher), revision, trust_remote_code)
    if cluster is not None and (source is None or share is not None):
        raise UsageError("--ray distributes the shards itself: do not combine it with --share.")
    with contextlib.ExitStack() as held:
        ranks = held.enter_context(running_ranks())
        if not isinstance(prompts, Prompts):
            prompts = open_prompts(prompts, **reading)
        if settings.grade is not None and prompts.answer_field is None:
            raise UsageError(
                "--grade needs the expected answers: name their field with --answer-field."
            )
        if source is not None:
            teacher = source.open(settings, prompts)
        assert not isinstance(teacher, str | Path)
        job = WriteJob(make_plan(teacher, prompts, str(out), source), teacher.device_name)
        connection = worker = None
        if cluster is not None:
            connection = held.enter_context(cluster.connected())
        else:
            worker = WriteWorker(job.plan, teacher, job.writer)
        share = share or Share()
        outcome = run_job(job, worker, share, ranks, connection, on_progress=on_progress)
    done = outcome.done
    return WriteSummary(
        folder=outcome.result,
        written_shards=done.shards,
        found_shards=len(share.shards(job.shard_count)) - len(outcome.begun.missing),
        mended=[*outcome.begun.damage.values()],
        tokens=done.amount.tokens,
        seconds=done.seconds,
        missing_shares=share.of_shards(outcome.left),
        notes=list(done.notes),
    )
