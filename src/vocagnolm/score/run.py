"""Score a corpus into a store: *plan*, *work*, *finish*, by one process, by the ranks of torchrun,
by shares, or by the workers of a Ray cluster."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vocagnolm.base.progress import Seconds
from vocagnolm.base.ranks import running_ranks, world_size
from vocagnolm.chat.messages import Format
from vocagnolm.data.corpus import MAX_DOCUMENT_BYTES, Corpus
from vocagnolm.data.sources import Split
from vocagnolm.errors import UsageError
from vocagnolm.jobs.cluster import RayCluster
from vocagnolm.jobs.job import Outcome, Progress, Share, run_job
from vocagnolm.model.runtime import compiling_seconds
from vocagnolm.model.served import Server
from vocagnolm.recipe import CorpusSection
from vocagnolm.score.plan import (
    CorpusSource,
    TeacherSource,
    describe,
    describe_on,
    describe_source,
    make_plan,
    planned_corpus,
    shared_corpus,
)
from vocagnolm.score.teacher import ScoreSettings, Teacher
from vocagnolm.score.work import ScoreJob, ScoreWorker
from vocagnolm.storage import require_storage

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
    """What `vocagnolm store inspect` shows of the store."""
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
    server: str | Sequence[str] | Server | None = None,
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
    server: the address of a vLLM or SGLang server that runs the teacher, several addresses, or a
        `Server`; only the tokenizer is then read from the model folder or hub id.
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
        served = None if server is None else Server.of(server)
        teacher_source = TeacherSource(str(teacher), revision, trust_remote_code, server=served)
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
    _require_possible(teacher_source, corpus_source, settings, share, cluster)
    with contextlib.ExitStack() as held:
        ranks = held.enter_context(running_ranks(tensors=settings.shard_teacher))
        if corpus_source is not None:
            corpus = shared_corpus(partial(planned_corpus, out, corpus_source), ranks)
        assert isinstance(corpus, Corpus)
        if teacher_source is not None:
            teacher_source = replace(teacher_source, conversations=corpus.conversations)
        elif corpus.conversations:
            raise UsageError("conversations are read by a model folder, a hub id or a GGUF file.")
        connection = worker = None
        if cluster is not None and teacher_source is not None:
            connection = held.enter_context(cluster.connected())
            about = describe_on(
                connection,
                partial(describe_source, teacher_source.absolute(), settings),
                anywhere=settings.device == "cpu" or server is not None,
            )
        else:
            if teacher_source is not None:
                teacher = teacher_source.open(settings)
            assert not isinstance(teacher, str | Path)
            about = describe(teacher, settings)
        sources = {"teacher_source": teacher_source, "corpus_source": corpus_source}
        job = ScoreJob(make_plan(about, corpus, str(out), **sources), about.device_name)
        if not isinstance(teacher, str | Path):
            writes = ranks.leads or not settings.shard_teacher
            worker = ScoreWorker(job.plan, teacher, job.writer if writes else None)
        share, options = share or Share(), {"as_one": settings.shard_teacher}
        outcome = run_job(job, worker, share, ranks, connection, on_progress=on_progress, **options)
        return _summary(job, share, outcome, worker, began)


def _summary(
    job: ScoreJob, share: Share, outcome: Outcome, worker: ScoreWorker | None, began: float
) -> ScoreSummary:
    """`began`: when the call began."""
    done, seconds, compiling = outcome.done, outcome.done.seconds, 0.0
    if worker is not None:
        compiled = compiling_seconds()
        seconds -= compiled - worker.compiled_at_load
        compiling = compiled - worker.compiled_at_start
    return ScoreSummary(
        store=outcome.result,
        scored_shards=done.shards,
        found_shards=len(share.shards(job.shard_count)) - len(outcome.begun.missing),
        mended=[*outcome.begun.damage.values()],
        tokens=done.amount.tokens,
        seconds=seconds,
        times=Times(
            start=outcome.started - began,
            loading=outcome.ended - outcome.started - seconds - compiling,
            compiling=compiling,
            scoring=seconds,
            finishing=time.perf_counter() - outcome.ended,
        ),
        missing_shards=outcome.left,
        missing_shares=share.of_shards(outcome.left),
        notes=list(done.notes),
    )


def _require_possible(
    teacher: TeacherSource | None,
    corpus: CorpusSource | None,
    settings: ScoreSettings,
    share: Share | None,
    cluster: RayCluster | None,
) -> None:
    """Refuse options that do not go together."""
    if cluster is not None:
        if settings.shard_teacher:
            raise UsageError(
                "--shard-teacher and --ray cannot be combined. Start torchrun on each machine, "
                "with a --share each, or run the teacher with vLLM on several GPUs and pass "
                "--server."
            )
        if teacher is None or corpus is None:
            raise ValueError("on a cluster teacher and corpus are opened by name: give paths")
        if share is not None or world_size() > 1:
            raise UsageError(
                "--ray distributes the shards itself: do not combine it with --share or torchrun."
            )
    if not settings.shard_teacher:
        return
    if teacher is None:
        raise ValueError("shard_teacher needs a teacher that is opened by name: give its path")
    if teacher.server is not None:
        raise UsageError("--shard-teacher does not apply with --server: remove it.")
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if gpus and settings.device == "cpu":
        raise UsageError(
            "--shard-teacher on CPUs: transformers would take the GPUs of this machine. Hide them "
            "with CUDA_VISIBLE_DEVICES=''."
        )
    if world_size() == 1 or 0 < gpus < here:
        running = "this one runs alone" if here == 1 else f"{here} run here on {gpus} GPUs"
        raise UsageError(
            "--shard-teacher: all processes of torchrun hold one teacher together, each on a GPU "
            f"of its own, and {running}. Start: torchrun --nproc_per_node {max(2, gpus)} -m "
            "vocagnolm score --shard-teacher ... (the other options as before)"
        )
