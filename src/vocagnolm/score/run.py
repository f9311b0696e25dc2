"""Score a corpus into a store: *plan*, *work*, *finish*, by one process, by the ranks of torchrun,
by shares, or by the workers of a Ray cluster."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vocagnolm.chat.messages import Format
from vocagnolm.data.corpus import MAX_DOCUMENT_BYTES, Corpus
from vocagnolm.data.sources import Split
from vocagnolm.errors import UsageError
from vocagnolm.model.runtime import compiling_seconds
from vocagnolm.model.server import Server
from vocagnolm.processes import Ranks, running_ranks, running_teams
from vocagnolm.progress import Seconds
from vocagnolm.recipe import CorpusSection
from vocagnolm.score.cluster import RayCluster
from vocagnolm.score.plan import (
    CorpusSource,
    Plan,
    TeacherSource,
    describe,
    make_plan,
    planned_corpus,
    shared_corpus,
)
from vocagnolm.score.teacher import ScoreSettings, Teacher
from vocagnolm.score.work import Claims, Done, Progress, Scored, ShardQueue, Share, Worker, finish
from vocagnolm.storage import require_storage
from vocagnolm.store.writer import StoreWriter, store_lock

# ---- seconds ----


@dataclass(frozen=True, kw_only=True)
class Times(Seconds):
    start: float = 0.0
    """Imports, opening the teacher, counting and hashing the corpus, looking at the store."""
    loading: float = 0.0
    """The weights and a first pass through them, while the first shard is tokenised; on a cluster,
    until a worker scores."""
    compiling: float = 0.0
    scoring: float = 0.0
    """Reading and writing shards included."""
    finishing: float = 0.0
    """Waiting for other processes, writing the manifest, reading the store through."""


# ---- score ----


@dataclass(frozen=True)
class ScoreSummary:
    """What a run did, and the resulting store."""

    store: dict[str, Any]
    """As in `vocagnolm store inspect`."""
    scored_shards: int
    """Scored by this process in this run; 0 if the store was already complete."""
    found_shards: int
    """Finished by earlier runs."""
    mended: list[str]
    """What was damaged and scored again."""
    tokens: int
    seconds: float
    """Time for scoring only."""
    times: Times
    """Times of this process, from the call of `score_corpus` to its end."""
    missing_shards: list[int] = field(default_factory=list)
    """Left to other shares, if this run had only a share."""
    missing_shares: list[str] = field(default_factory=list)
    """The shares to which they belong: `2/3`."""
    notes: list[str] = field(default_factory=list)
    """What happened to the workers of a cluster."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.scored_shards and self.seconds else None


def score_corpus(
    teacher: str | Path | Teacher,
    corpus: str | Path | Sequence[str | Path] | Corpus,
    out: str | Path,
    *,
    settings: ScoreSettings | None = None,
    text_field: str = CorpusSection.text_field,
    format: Format = CorpusSection.format,
    split: Split = CorpusSection.split,
    limit_documents: int | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    revision: str | None = None,
    trust_remote_code: bool = False,
    share: Share | None = None,
    cluster: RayCluster | None = None,
    server: str | Server | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ScoreSummary:
    """Score `corpus` with `teacher` and write a loss store to the folder `out`, or to a bucket
    (`s3://bucket/stores/qwen`).

        summary = score_corpus("Qwen/Qwen2.5-Math-7B", "corpus.jsonl", "stores/qwen")
        summary.store["bits_per_byte"]                   # how well it predicts the text
        token_bytes, nll = LossStore.open("stores/qwen")[0]

    teacher: a model folder, hub id or GGUF file, or an object with the methods of `Teacher`.
    corpus: a file (jsonl, jsonl.gz, jsonl.zst, parquet, txt), a folder of those, a hub dataset
        (`owner/name`, `owner/name:split`), a list of these, or a `Corpus`.
    format: content of the records: a text, or a conversation (`messages`, or `prompt` and
        `completion`), which the teacher reads in its own template.
    split: how a text file is split into documents: not at all (`none`), by paragraph (`blank_line`)
        or by `line`.
    settings: context, dtype, device and the like; `ScoreSettings()` chooses by the model.
    share: score one share of the shards, for independent machines, then help shares that others
        have begun; the last one completes the store.
    cluster: use the workers of a Ray cluster; all machines must see `out` and `corpus`. A worker
        that dies is replaced, and its shard is scored by another.
    server: the address of a vLLM or SGLang server that runs the teacher, or a `Server`; only the
        tokenizer is then read from the model folder or hub id.
    on_progress: called with a `Progress` after every batch, on a cluster after every shard.

    Documents that cannot be read are skipped and counted in `summary.store`. Run it again to
    resume; a finished store is recognized. Under torchrun the ranks claim shards one by one; the
    store has the same bytes for any number of processes.
    """
    began = time.perf_counter()
    settings = settings or ScoreSettings()
    require_storage(out)
    teacher_source = corpus_source = None
    if isinstance(teacher, str | Path):
        if isinstance(server, str):
            server = Server(url=server)
        teacher_source = TeacherSource(str(teacher), revision, trust_remote_code, server=server)
    elif server is not None:
        raise ValueError("with a server the teacher is opened by name: give a path or a hub id")
    if not isinstance(corpus, Corpus):
        corpus_source = CorpusSource.of(
            corpus,
            text_field=text_field,
            format=format,
            split=split,
            limit=limit_documents,
            max_document_bytes=max_document_bytes,
        )
    with _ranks(teacher_source, settings, cluster) as ranks:
        if cluster is None:
            settings = replace(settings, shard_teacher=ranks.team_size)
        else:
            if teacher_source is None or corpus_source is None:
                raise ValueError("on a cluster teacher and corpus are opened by name: give paths")
            if share is not None or ranks.count > 1:
                raise UsageError(
                    "--ray distributes the shards itself: do not combine it with --share or "
                    "torchrun."
                )
        if corpus_source is not None:
            corpus = shared_corpus(partial(planned_corpus, out, corpus_source), ranks)
        assert isinstance(corpus, Corpus)
        if teacher_source is not None:
            teacher_source = replace(teacher_source, conversations=corpus.conversations)
        elif corpus.conversations:
            raise UsageError("conversations are read by a model folder, a hub id or a GGUF file.")
        planned = partial(
            make_plan,
            corpus=corpus,
            out=str(out),
            teacher_source=teacher_source,
            corpus_source=corpus_source,
        )
        if cluster is not None and teacher_source is not None:
            with cluster.connected() as connection:
                plan = planned(connection.describe(teacher_source, settings))
                work = partial(connection.work_through, plan, on_progress=on_progress)
                return _score(plan, plan.writer(), ranks, Share(), work, began)
        if teacher_source is not None:
            teacher = teacher_source.open(settings)
        assert not isinstance(teacher, str | Path)
        plan = planned(describe(teacher, settings))
        writer = plan.writer(getattr(teacher, "device_name", None))
        here = partial(_work_here, plan, writer, teacher, ranks, on_progress)
        return _score(plan, writer, ranks, share or Share(), here, began)


def _ranks(
    teacher: TeacherSource | None, settings: ScoreSettings, cluster: RayCluster | None
) -> contextlib.AbstractContextManager[Ranks]:
    if settings.shard_teacher == 1:
        return running_ranks()
    if teacher is None:
        raise ValueError("shard_teacher needs a teacher that is opened by name: give its path")
    if teacher.server is not None:
        raise UsageError("--shard-teacher does not apply with --server: remove it.")
    if cluster is not None:  # which makes its teams itself
        return running_ranks()
    return running_teams(partial(team_size, teacher, settings))


def _score(
    plan: Plan,
    writer: StoreWriter,
    ranks: Ranks,
    share: Share,
    work: Callable[[list[int], str | None, Claims | None], Done],
    began: float,
) -> ScoreSummary:
    """`work` is given the shards that are to be done, first those of this process, the digest of
    the plan, and what tells it of other processes, where there are some."""
    alone = share.count == 1
    together = ranks.teams > 1 or not alone
    with contextlib.ExitStack() as held:

        def begin() -> tuple[list[int], dict[int, str], str | None, dict[str, Any]]:
            held.enter_context(store_lock(writer.path, shared=not alone))
            writer.begin()
            states = {number: writer.has_shard(number) for number in share.shards(plan.shard_count)}
            missing = [number for number, (whole, _) in states.items() if not whole]
            damages = {number: damage for number, (_, damage) in states.items() if damage}
            if missing and together:
                writer.begin_claims(missing, share.marker)
            begun = replace(plan, identity=writer.identity)
            return missing, damages, begun.save() if missing else None, writer.identity

        missing, mended, digest, identity = ranks.decide(begin)
        writer.take_identity(identity)
        ours = missing[ranks.team :: ranks.teams]
        rest = sorted({*missing} - {*ours}, reverse=True)  # from the end, where others are last
        claims = Claims(writer, share, [*mended]) if together else None
        started = time.perf_counter()
        done = work(ours + rest, digest, claims) if ours else Done()
        ended = time.perf_counter()
        ranks.wait_for_all()

        def end() -> tuple[list[int], dict[str, Any]]:
            if not alone:  # of two that end together one must get the store for itself
                held.close()
            return finish(plan, writer, share, bool(missing))

        left, summary = ranks.decide(end)
    return ScoreSummary(
        store=summary,
        scored_shards=done.shards,
        found_shards=len(share.shards(plan.shard_count)) - len(missing),
        mended=[*mended.values()],
        tokens=done.tokens,
        seconds=done.seconds,
        times=Times(
            start=started - began,
            loading=ended - started - done.seconds - done.compiling,
            compiling=done.compiling,
            scoring=done.seconds,
            finishing=time.perf_counter() - ended,
        ),
        missing_shards=left,
        missing_shares=share.of_shards(left),
        notes=list(done.notes),
    )


def _work_here(
    plan: Plan,
    writer: StoreWriter,
    teacher: Teacher,
    ranks: Ranks,
    on_progress: Callable[[Progress], None] | None,
    numbers: list[int],
    digest: str | None,
    claims: Claims | None,
) -> Done:
    """One shard after the other, in this process. As many as would be its part are counted as its
    work; it may become more or less."""
    part_of_ours = numbers[: -(-len(numbers) // ranks.teams)]
    total = sum(len(plan.documents_in(number)) for number in part_of_ours)
    scored, shards = Scored(), 0
    queue = ShardQueue(numbers, claims=claims)

    def note(part: Scored) -> None:
        if on_progress is not None:
            now = scored + part
            on_progress(Progress(now.documents, max(total, int(now.documents)), now.tokens))

    def claimed() -> tuple[int, int | None] | None:
        while (found := queue.claim(worker)) is None and queue.wait_for_others():
            pass
        return found

    with contextlib.closing(Worker(plan, teacher, writer, ranks.leads_team)) as worker:
        worker.read_ahead(numbers[0])
        before = compiling_seconds()
        teacher.load()
        started, loaded = time.perf_counter(), compiling_seconds()
        while (claim := ranks.decide_in_team(claimed)) is not None:
            number, ahead = claim
            scored += worker.begin(number, ahead, note)
            shards += 1
            queue.finished(worker, number)
            note(Scored())
        worker.settle()
    compiled = compiling_seconds()
    seconds = time.perf_counter() - started - (compiled - loaded)
    return Done(scored.tokens, seconds, compiled - before, shards)


# ---- teachers over several processes ----


def team_size(source: TeacherSource, settings: ScoreSettings, processes: int) -> int:
    """As `settings` say, or as few as hold the teacher's weights; checked against the number of
    processes that run on this machine."""
    wanted = settings.shard_teacher
    size = source.find(settings).fewest_shards() if wanted == "auto" else wanted
    gpus = torch.cuda.device_count()
    if size == 1:
        return 1
    if gpus and settings.device == "cpu":
        raise UsageError(
            "--shard-teacher on CPUs: transformers would take the GPUs of this machine. Hide them "
            "with CUDA_VISIBLE_DEVICES=''."
        )
    if processes % size == 0 and not 0 < gpus < processes:
        return size
    found = "this one runs alone" if processes == 1 else f"{processes} processes run here"
    found += f" on {gpus} GPUs" if gpus else ""
    fitting = max(1, min(processes, gpus or processes) // size) * size
    raise UsageError(
        f"--shard-teacher {wanted}: {size} processes hold one teacher together, each on a GPU of "
        f"its own, and {found}. Start: torchrun --nproc_per_node {fitting} -m vocagnolm score "
        f"--shard-teacher {size} ... (the other options as before)"
    )
