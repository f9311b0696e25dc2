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
from vocagnolm.base.files import address_of, differences
from vocagnolm.base.ranks import Ranks, running_ranks, world_size
from vocagnolm.data.corpus import described_documents
from vocagnolm.data.prompts import (
    Prompt,
    PromptCount,
    Prompts,
    Records,
    count_prompts,
    open_prompts,
    word_sequences,
)
from vocagnolm.errors import LimitError, ScoreError, UsageError
from vocagnolm.jobs.cluster import Connection, RayCluster
from vocagnolm.jobs.job import Amount, OnProgress, ShardWorker, Share, run_job
from vocagnolm.model.load import open_model
from vocagnolm.model.served import Server
from vocagnolm.questions import grade
from vocagnolm.questions.benchmarks import load_examples, tasks_asked
from vocagnolm.score.journal import AnswerJournal
from vocagnolm.score.plan import Description, describe_on, load_plan, may_be_planned, save_plan
from vocagnolm.score.served import ChatWriter, IdWriter, ServedWriter, Spending, kept_answers
from vocagnolm.score.work import ScoreJob
from vocagnolm.score.writers import LocalWriter, Writer, WriteSettings, answer_seed
from vocagnolm.score.written import Grader, ReadPrompt, ShardBuilder, WrittenAnswer
from vocagnolm.storage import require_storage, storage_of
from vocagnolm.storage.copies import version
from vocagnolm.store.card import CARD, store_card
from vocagnolm.store.format import DATA_FOLDER, Record, encode_vocabulary
from vocagnolm.store.writer import StoreWriter, measured_apart, with_values_of

# the task whose grader compares answers of a kind
_GRADED_AS = {"number": "gsm8k", "mixed": "asdiv", "math": "math", "choice": "mathqa"}
_EXPECTED_LOOKED_AT = 100
"""Prompts whose expected answers are tried before anything is written."""
_PACKAGES = ("tokenizers", "torch", "transformers")


# ---- the plan ----


@dataclass(frozen=True)
class WriterSource:
    """Where a teacher that writes comes from: what another process needs to open it."""

    source: str | None
    """A model; or, beside a server, what its tokenizer is read from, None for a chat endpoint."""
    revision: str | None = None
    trust_remote_code: bool = False
    server: Server | None = None
    spending: Spending | None = None

    @classmethod
    def of(
        cls,
        teacher: Any,
        revision: str | None,
        trust_remote_code: bool,
        server: "str | Sequence[str] | Server | None",
        spending: Spending | None = None,
    ) -> "WriterSource | None":
        """From what a caller gives; None for an object of the caller's."""
        if teacher is None and server is None:
            raise UsageError("write needs a teacher: --teacher, --server, or both.")
        if isinstance(teacher, str | Path) or teacher is None:
            named = None if teacher is None else str(teacher)
            served = None if server is None else Server.of(server)
            return cls(named, revision, trust_remote_code, served, spending)
        if server is not None:
            raise ValueError("with a server the teacher is opened by name: give a path or a hub id")
        return None

    def open(
        self, settings: WriteSettings, prompts: Prompts, *, patient: bool = False
    ) -> LocalWriter | ServedWriter:
        """`patient` waits for a server that is being started."""
        about: dict[str, Any] = {"continues": prompts.continues}
        served: dict[str, Any] = {"patient": patient, "spending": self.spending}
        if self.source is None:
            assert self.server is not None
            return ChatWriter(self.server, settings, **about, **served)
        on_server = self.server is not None
        files = open_model(
            self.source,
            device="cpu" if on_server else settings.device,
            dtype="auto" if on_server else settings.dtype,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            weights=not on_server,
        )
        tokens = prompts.prompt_tokens
        if self.server is None:
            return LocalWriter(files, settings, **about, prompt_tokens=tokens)
        return IdWriter(files, self.server, settings, **about, **served, prompt_tokens=tokens)

    def absolute(self) -> "WriterSource":
        """The source for processes that stand in another folder."""
        if self.source is None or not Path(self.source).exists():
            return self
        return replace(self, source=str(Path(self.source).absolute()))


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Everything that decides a written folder, and where it grows: no open files and no model."""

    out: str
    identity: dict[str, Any]
    prompts: Prompts
    settings: WriteSettings
    repeated: dict[int, int]
    """How many equal prompts stand before a prompt, by its number (`PromptCount`)."""
    source: WriterSource | None = None
    """None: an object of the caller's, which other processes cannot open."""
    vocabulary: bytes | None = None
    """The teacher's vocabulary as it is written, in the process that begins the folder."""
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
        source = self.source and self.source.absolute()
        return replace(self, out=out, source=source, settings=absolute_settings(self.settings))

    def save(self) -> str | None:
        if self.source is None:
            return None
        return save_plan(self.out, replace(self.absolute(), vocabulary=None))


may_be_planned(WritePlan, WriteSettings, WriterSource, Prompts, Records, Spending)


def make_plan(
    about: Description,
    prompts: Prompts,
    repeated: dict[int, int],
    out: str,
    source: WriterSource | None = None,
) -> WritePlan:
    """`repeated`: as in `PromptCount`. `source`: where other processes can open the teacher."""
    return WritePlan(
        out=out,
        identity=written_identity(about, prompts),
        prompts=prompts,
        settings=about.settings,
        repeated=repeated,
        vocabulary=about.vocabulary,
        source=source,
    )


def describe_writer(writer: Writer) -> Description:
    vocabulary = writer.vocabulary() if writer.settings.alternatives else None
    return Description(
        writer.describe(),
        {name: version(name) for name in _PACKAGES},
        writer.settings,
        None if vocabulary is None else encode_vocabulary(vocabulary),
        writer.device_name,
    )


def describe_source(source: WriterSource, settings: WriteSettings, prompts: Prompts) -> Description:
    return describe_writer(source.open(settings, prompts))


def written_identity(about: Description, prompts: Prompts) -> dict[str, Any]:
    """Everything that decides the bytes of a written folder: the teacher, the prompts and the
    settings."""
    samples, shard_prompts = about.settings.samples, about.settings.shard_prompts
    asked = {"prompts": len(prompts), "documents": len(prompts) * samples}
    return {
        **about.teacher,
        "corpus": {**prompts.describe(), **asked},
        "shard_documents": shard_prompts * samples,
        "software": about.software,
    }


def absolute_settings(settings: WriteSettings) -> WriteSettings:
    """The settings for processes that stand in another folder."""
    changes: dict[str, Any] = {}
    for name in ("examples", "chat_template"):
        path = getattr(settings, name)
        if path is not None and Path(path).exists():
            changes[name] = str(Path(path).absolute())
    return replace(settings, **changes)


# ---- a shard ----


@dataclass
class PreparedPrompts:
    """A shard's prompts as the teacher reads them, and their answers as they come."""

    number: int
    prompts: list[Prompt]
    reads: list[ReadPrompt | str]
    """Each prompt as the teacher reads it, or the reason why it cannot be asked."""
    seeds: list[list[int]]
    """One number per answer, for every prompt that can be asked."""
    answers: list[dict[int, WrittenAnswer]] = field(default_factory=list)
    """The answers by number, for every prompt that can be asked."""

    @property
    def asked(self) -> list[ReadPrompt]:
        return [read for read in self.reads if isinstance(read, ReadPrompt)]


def prepare_shard(plan: WritePlan, writer: Writer, number: int) -> PreparedPrompts:
    """The part of a shard's work that needs no model."""
    where, settings = plan.prompts_in(number), plan.settings
    prompts = list(plan.prompts.read(where.start, where.stop))
    asked = iter(writer.read([prompt for prompt in prompts if prompt.text is not None]))
    reads = [p.problem or "unknown" if p.text is None else next(asked) for p in prompts]

    def seeds_of(prompt: Prompt) -> list[int]:
        occurrence, text = plan.repeated.get(prompt.index, 0), prompt.text or ""
        return [answer_seed(settings.seed, text, occurrence, n) for n in range(settings.samples)]

    seeds = [seeds_of(read.prompt) for read in reads if isinstance(read, ReadPrompt)]
    return PreparedPrompts(number, prompts, reads, seeds, [{} for _ in seeds])


def built_shard(plan: WritePlan, writer: Writer, prepared: PreparedPrompts) -> ShardBuilder:
    """The documents and losses of a shard whose answers have all come."""
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
        own_entries=isinstance(writer, ChatWriter),
    )
    answers = iter(prepared.answers)
    for prompt, read in zip(prepared.prompts, prepared.reads, strict=True):
        if isinstance(read, ReadPrompt):
            given = next(answers)
            builder.add(read, [given[number] for number in range(settings.samples)])
        else:
            builder.skip(prompt, read)
    return builder


def grader_of(kind: str) -> Grader:
    """A function that compares an answer of this kind with the expected one; None where the
    expected one is not of this kind."""

    def is_right(content: str, expected: str, question: str, finished: bool) -> bool | None:
        try:
            marked = grade(
                _GRADED_AS[kind], content, expected, complete=finished, question=question
            )
        except ValueError:
            return None
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
        samples = self.plan.settings.samples
        asked = shard.asked
        tokens = finished = ended = 0

        def amount() -> Amount:
            skipped = (len(shard.prompts) - len(asked)) * samples
            return Amount(skipped + ended, tokens, {"answers": ended, "finished": finished})

        def report(new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            on_part(amount())

        if isinstance(self.teacher, ServedWriter):
            answers = kept_answers(self.teacher, self._journal(shard.number), asked, report)
        else:
            answers = self.teacher.write(asked, shard.seeds, report)
        try:
            for prompt, number, answer in answers:
                shard.answers[prompt][number] = answer
                ended += 1
                finished += answer.finished
        except LimitError as error:
            raise LimitError(f"{error} {self._left()}") from None
        return amount()

    def finish(self, shard: PreparedPrompts) -> Amount:
        built = built_shard(self.plan, self.teacher, shard)
        documents = built.documents()
        self.store.write_shard(built.shard(len(shard.prompts), documents), documents)
        if isinstance(self.teacher, ServedWriter):
            self._journal(shard.number).remove()
        return Amount(counts={"marked": built.marked, "right": sum(built.right)})

    def _journal(self, number: int) -> AnswerJournal:
        return AnswerJournal(self.store.storage, number, self.store.digest)

    def _left(self) -> str:
        """How much of the folder is not there."""
        missing = 0
        for number in self.store.absent_shards():
            missing += len(self.plan.documents_in(number)) - len(self._journal(number).read())
        total = len(self.plan.prompts) * self.plan.settings.samples
        return (
            f"{missing:,} of {total:,} answers are missing. What came is kept: run the same "
            "command again to go on."
        )


def open_worker(out: str, digest: str | None) -> WriteWorker:
    """A worker on any machine, from the plan in the growing folder."""
    planned = load_plan(out, digest, WritePlan)
    assert planned.source is not None
    plan = replace(planned, prompts=planned.prompts.here())
    teacher = planned.source.open(plan.settings, plan.prompts, patient=True)
    here = written_identity(describe_writer(teacher), plan.prompts)
    for name, wanted, now in differences(plan.identity, with_values_of(plan.identity, here)):
        is_here = measured_apart(name, wanted, now) or repr(now)[:80]
        raise ScoreError(
            f"{name} is {is_here} on this machine, the plan has {wanted!r:.80}. Give all "
            "machines the same teacher, prompts and packages."
        )
    return WriteWorker(plan, teacher, plan.writer(teacher.device_name))


class WriteJob(ScoreJob):
    """A folder that a teacher writes, as a job."""

    plan: WritePlan

    def remote_worker(self) -> Callable[[], ShardWorker]:
        return partial(open_worker, self.plan.absolute().out, self._digest)

    def complete(self) -> bool:
        seen = self.writer.merge_vocabulary()
        return self.writer.finish(lambda records: {**seen, **self._written(records)})

    def publish(self) -> None:
        """Write the card, unless there is one, which may be the user's."""
        storage = storage_of(self.plan.out)
        if not storage.has(CARD):
            storage.put(CARD, store_card(storage).encode())

    def _written(self, records: list[Record]) -> dict[str, Any]:
        """The documents as a corpus that is opened describes itself, and how many are right."""
        files = [
            (name, about)
            for record in records
            for name, about in record["files"].items()
            if name.startswith(f"{DATA_FOLDER}/")
        ]
        sources = [
            {"name": name, "documents": about["lines"], "sha256": about["sha256"]}
            for name, about in files
        ]
        about = described_documents(sources, not self.plan.prompts.continues)
        if self.plan.settings.grade is not None:
            marks = np.array([about["right"] for _, about in files], np.int64)
            by_right = marks.reshape(len(files), -1).sum(0).tolist()
            about |= right_answers(sum(about["marked"] for _, about in files), by_right)
        return {"written": {"prompts": len(self.plan.prompts), **about}}

    @property
    def nothing(self) -> str:
        return f"none of the {len(self.plan.prompts):,} prompts has an answer worth keeping."

    corrected = "Give other prompts or settings another --out."


def right_answers(marked: int, prompts: Sequence[int]) -> dict[str, Any]:
    """What a manifest says of marked answers, from their number and the number of prompts with 0,
    1, ... right ones."""
    return {
        "marked_answers": marked,
        "right_answers": sum(count * number for number, count in enumerate(prompts)),
        "marked_prompts": sum(prompts),
        "solved_prompts": sum(prompts[1:]),
        "prompts_by_right_answers": [*prompts],
    }


# ---- write ----


@dataclass(frozen=True)
class WriteSummary:
    """What a run did, and the resulting folder."""

    folder: dict[str, Any]
    """What `vocagnolm store inspect` shows."""
    written_shards: int
    """Written by this process in this run; 0 if the folder was already complete."""
    found_shards: int
    """Finished by earlier runs."""
    mended: list[str]
    """What was damaged and written again."""
    answers: int
    """Written in this run, kept or not."""
    tokens: int
    seconds: float
    """Time for writing only."""
    missing_shards: list[int] = field(default_factory=list)
    """Left to other shares, if this run had only a share."""
    missing_shares: list[str] = field(default_factory=list)
    """The shares to which they belong: `2/3`."""
    notes: list[str] = field(default_factory=list)
    """What happened to the workers of a cluster."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.written_shards and self.seconds else None


def write_answers(
    teacher: str | Path | Writer | None,
    prompts: str | Path | Sequence[str | Path] | Prompts,
    out: str | Path,
    *,
    settings: WriteSettings | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    share: Share | None = None,
    cluster: RayCluster | None = None,
    server: str | Sequence[str] | Server | None = None,
    spending: Spending | None = None,
    on_progress: OnProgress | None = None,
    **reading: Any,
) -> WriteSummary:
    """Let `teacher` answer `prompts`, and write its answers with its alternatives to the folder
    `out`, or to a bucket.

        summary = write_answers("Qwen/Qwen2.5-1.5B-Instruct", "prompts.jsonl", "written")
        # corpus: {files: [written]} and store: {path: written} train a student from it

    teacher: a model folder, hub id or GGUF file, or an object with the methods of `Writer`.
    prompts: files, folders, hub datasets, or `Prompts`. `reading`: how they are read, as in
        `read_prompts`.
    share, cluster: as in `score_corpus`.
    server: the address of a server that runs the teacher, several addresses, or a `Server`. With a
        teacher, whose tokenizer is read then, a vLLM or SGLang server, which is asked by token ids;
        with None any chat endpoint such as OpenAI's.
    spending: what a server may be asked for in this run. At a limit a LimitError ends it; the same
        call goes on.

    Run it again to resume: no prompt is answered twice, and the bytes are those of a run that was
    not interrupted.
    """
    settings = settings or WriteSettings()
    require_storage(out)
    source = WriterSource.of(teacher, revision, trust_remote_code, server, spending)
    if cluster is not None and (source is None or share is not None or world_size() > 1):
        raise UsageError(
            "--ray distributes the shards itself, to teachers that are opened by name: do not "
            "combine it with --share or torchrun."
        )
    if cluster is not None and spending is not None and spending.is_limited:
        raise UsageError(
            "--max-requests and --max-server-tokens are for one process: write without --ray."
        )
    with contextlib.ExitStack() as held:
        ranks = held.enter_context(running_ranks())
        opened = partial(open_prompts_of, prompts, reading)
        prompts, count = _shared_prompts(opened, settings, ranks)
        connection: Connection | None = None
        writer: Writer | None = None
        if cluster is not None and source is not None:
            connection = held.enter_context(cluster.connected())
            there = source.absolute(), absolute_settings(settings), prompts
            about = describe_on(
                connection,
                partial(describe_source, *there),
                anywhere=settings.device == "cpu" or source.server is not None,
            )
        else:
            if source is not None:
                writer = source.open(settings, prompts)
            else:
                assert not isinstance(teacher, str | Path | None)
                writer = teacher
            about = describe_writer(writer)
        plan = make_plan(about, prompts, count.repeated, str(out), source)
        job = WriteJob(plan, about.device_name)
        worker = None if writer is None else WriteWorker(plan, writer, job.writer)
        share = share or Share()
        outcome = run_job(job, worker, share, ranks, connection, on_progress=on_progress)
    done = outcome.done
    return WriteSummary(
        folder=outcome.result,
        written_shards=done.shards,
        found_shards=len(share.shards(job.shard_count)) - len(outcome.begun.missing),
        mended=[*outcome.begun.damage.values()],
        answers=done.amount.counts.get("answers", 0),
        tokens=done.amount.tokens,
        seconds=done.seconds,
        missing_shards=outcome.left,
        missing_shares=share.of_shards(outcome.left),
        notes=list(done.notes),
    )


def read_prompts(
    paths: str | Path | Sequence[str | Path],
    *,
    without: Sequence[str] = (),
    benchmarks: str | Path | None = None,
    **reading: Any,
) -> Prompts:
    """Prompts as `vocagnolm write` reads them. `without`: names of benchmarks whose questions are
    left out; `benchmarks`: the folder with their files, which are downloaded otherwise. `reading`:
    fields of `PromptsSection`."""
    questions: list[str] = []
    names = [task.name for task in tasks_asked([*without])] if without else []
    for name in names:
        questions += [example.question for example in load_examples(name, benchmarks)]
    sequences = word_sequences(questions)
    return open_prompts(paths, without=sequences, without_names=names, **reading)


def open_prompts_of(
    prompts: str | Path | Sequence[str | Path] | Prompts, reading: dict[str, Any]
) -> Prompts:
    """The argument `prompts` of `write_answers`, opened if it is not."""
    return prompts if isinstance(prompts, Prompts) else read_prompts(prompts, **reading)


def _shared_prompts(
    opened: Callable[[], Prompts], settings: WriteSettings, ranks: Ranks
) -> tuple[Prompts, PromptCount]:
    """The prompts, opened and counted by the leading process alone."""

    def counted() -> tuple[Prompts, PromptCount]:
        prompts = opened()
        count = count_prompts(prompts.read())
        if settings.grade is not None:
            require_expected(prompts, count, settings.grade)
        return prompts, count

    prompts, count = ranks.decide(counted)
    return prompts if ranks.leads else prompts.here(), count


def require_expected(prompts: Prompts, count: PromptCount, kind: str) -> None:
    """Refuse prompts none of whose answers could be marked."""
    if not count.expected:
        raise UsageError(
            "--grade needs the expected answers: name their field with --answer-field."
            if prompts.answer_field is None
            else f"--answer-field {prompts.answer_field}: no prompt has a text or number there."
        )
    is_right = grader_of(kind)
    some = [p for p in prompts.read(0, _EXPECTED_LOOKED_AT) if p.expected is not None]
    if some and all(is_right("", p.expected or "", "", True) is None for p in some):
        raise UsageError(
            f"--grade {kind} does not fit the expected answers: that of {some[0].place} is "
            f"{some[0].expected!r:.60}."
        )
