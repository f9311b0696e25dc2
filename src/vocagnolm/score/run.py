"""Score a corpus into a store: which shards are missing, who does them, and the end."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vocagnolm.chat.messages import Format
from vocagnolm.data.corpus import MAX_DOCUMENT_BYTES, Corpus, open_corpus
from vocagnolm.data.sources import Split
from vocagnolm.errors import BusyError, CorpusError, ScoreError, StoreError, UsageError
from vocagnolm.files import local_path
from vocagnolm.model.load import open_model
from vocagnolm.processes import Ranks, running_ranks
from vocagnolm.score.settings import ScoreSettings
from vocagnolm.score.shard import PreparedShard, prepare_shard, score_prepared, shard_count
from vocagnolm.score.share import Share
from vocagnolm.score.teacher import LocalTeacher, Teacher
from vocagnolm.store.check import inspect_store
from vocagnolm.store.writer import StoreWriter, store_lock


@dataclass(frozen=True)
class Progress:
    """How far this process is with its share of the shards."""

    documents: float
    total_documents: int
    tokens: int


@dataclass(frozen=True)
class ScoreSummary:
    """What a run did and what the store now is."""

    store: dict[str, Any]
    """As `vocagnolm store inspect` gives it."""
    scored_shards: int
    """Scored by this process in this run; 0 when the store was complete already."""
    found_shards: int
    """Finished by earlier runs."""
    mended: list[str]
    """What was damaged and scored again."""
    tokens: int
    seconds: float
    missing_shards: list[int] = field(default_factory=list)
    """Left to other shares, where this run had a share only."""
    missing_shares: list[str] = field(default_factory=list)
    """The shares that they belong to: `2/3`."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.scored_shards and self.seconds else None


def score_corpus(
    teacher: str | Path | Teacher,
    corpus: str | Path | Sequence[str | Path] | Corpus,
    out: str | Path,
    *,
    settings: ScoreSettings | None = None,
    text_field: str = "text",
    format: Format = "auto",
    split: Split = "none",
    limit_documents: int | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    revision: str | None = None,
    trust_remote_code: bool = False,
    share: Share | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ScoreSummary:
    """Let `teacher` read `corpus` and leave a loss store in the folder `out`.

        summary = score_corpus("Qwen/Qwen2.5-Math-7B", "corpus.jsonl", "stores/qwen")
        summary.store["bits_per_byte"]                   # how well it knows the text
        token_bytes, nll = LossStore.open("stores/qwen")[0]

    teacher: a model folder, hub id or GGUF file, or an object with the methods of `Teacher`.
    corpus: a file (jsonl, jsonl.gz, jsonl.zst, parquet, txt), a folder of those, a hub dataset
        (`owner/name`, `owner/name:split`), a list of these, or a `Corpus`.
    format: what records hold: a text, or a conversation (`messages`, or `prompt` and `completion`),
        which the teacher reads in its own template.
    split: a text file is one document (`none`), or one a paragraph (`blank_line`) or a `line`.
    settings: context, dtype, device and the like; `ScoreSettings()` chooses by the model.
    share: do a share of the shards only, for machines that are not started together; the one that
        ends last completes the store.
    on_progress: is called with a `Progress` after every batch.

    Documents that cannot be read are counted in `summary.store`, not scored. Run again to resume;
    a finished store is recognised. Under torchrun the shards are split by rank; the store has the
    same bytes whatever the number of processes.
    """
    settings = settings or ScoreSettings()
    folder = local_path(out)
    with running_ranks() as ranks:
        if not isinstance(corpus, Corpus):
            opened = partial(
                open_corpus,
                corpus,
                text_field=text_field,
                format=format,
                split=split,
                limit=limit_documents,
                max_document_bytes=max_document_bytes,
            )
            corpus = shared_corpus(opened, ranks)
        if isinstance(teacher, str | Path):
            files = open_model(
                teacher,
                device=settings.device,
                dtype=settings.dtype,
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
            teacher = LocalTeacher(files, settings, conversations=corpus.conversations)
        elif corpus.conversations:
            raise UsageError("conversations are read by a model folder, a hub id or a GGUF file.")
        return _score(teacher, corpus, folder, settings, ranks, share or Share(), on_progress)


def shared_corpus(opened: Callable[[], Corpus], ranks: Ranks) -> Corpus:
    """The corpus, counted and hashed by the leading process alone. A process that finds other files
    on its machine (or the same, copied at another time) reads its own."""
    corpus: Corpus = ranks.decide(opened)
    if ranks.leads or not corpus.changed_sources():
        return corpus
    own = opened()
    if own.fingerprint != corpus.fingerprint:
        raise CorpusError(
            f"the corpus of process {ranks.rank} is not that of process 0 (fingerprints "
            f"{own.fingerprint[:12]} and {corpus.fingerprint[:12]}). Give all machines the same "
            "files."
        )
    return own


def store_identity(teacher: Teacher, corpus: Corpus, settings: ScoreSettings) -> dict[str, Any]:
    """Everything that decides the bytes of a store."""
    return {
        **teacher.describe(),
        "corpus": corpus.describe(),
        "shard_documents": settings.shard_documents,
        "software": {name: version(name) for name in ("tokenizers", "torch", "transformers")},
    }


def _score(
    teacher: Teacher,
    corpus: Corpus,
    out: Path,
    settings: ScoreSettings,
    ranks: Ranks,
    share: Share,
    on_progress: Callable[[Progress], None] | None,
) -> ScoreSummary:
    count = shard_count(corpus, settings)
    device = getattr(teacher, "device_name", None)
    writer = StoreWriter(out, store_identity(teacher, corpus, settings), count, device)
    alone = share.count == 1
    with contextlib.ExitStack() as held:

        def look() -> tuple[list[int], list[str]]:
            held.enter_context(store_lock(out, shared=not alone))
            writer.begin()
            states = {number: writer.has_shard(number) for number in share.shards(count)}
            missing = [number for number, (whole, _) in states.items() if not whole]
            return missing, [damage for _, damage in states.values() if damage]

        missing, mended = ranks.decide(look)
        ours = missing[ranks.rank :: ranks.count]
        if ours:
            teacher.load()
        started = time.perf_counter()
        tokens = _score_shards(ours, teacher, corpus, settings, writer, on_progress)
        ranks.wait_for_all()

        def end() -> tuple[list[int], dict[str, Any]]:
            corpus.require_unchanged()
            if alone:
                writer.finish()
                writer.tidy()
                return [], inspect_store(out)
            held.close()  # first: of two that end together one must get the store for itself
            return _end_share(writer, share, bool(missing)), inspect_store(out)

        left, summary = ranks.decide(end)
    if summary["complete"] and summary["documents"] == 0:
        raise ScoreError(
            f"none of the {len(corpus):,} documents could be scored; the first: "
            f"{summary['skipped_documents'][0]['place']}: "
            f"{summary['skipped_documents'][0]['reason']}."
        )
    return ScoreSummary(
        store=summary,
        scored_shards=len(ours),
        found_shards=len(share.shards(count)) - len(missing),
        mended=mended,
        tokens=tokens,
        seconds=time.perf_counter() - started,
        missing_shards=left,
        missing_shares=share.of_shards(left),
    )


def _end_share(writer: StoreWriter, share: Share, scored: bool) -> list[int]:
    """Complete the store if nothing is missing and nobody else is at work on it; otherwise the
    last of them will. The shards that are missing."""
    if absent := writer.absent_shards():
        return absent
    with contextlib.suppress(BusyError), store_lock(writer.path):
        if not (writer.completed_by_others or (writer.was_complete and not scored)):
            states = [writer.has_shard(number) for number in range(writer.shard_count)]
            if damaged := [number for number, (whole, _) in enumerate(states) if not whole]:
                raise StoreError(
                    f"{states[damaged[0]][1]} Run the shares "
                    f"{', '.join(share.of_shards(damaged))} again, or `score` without --share: "
                    "what is damaged is scored again."
                )
            writer.finish()
        writer.tidy()
    return []


def _score_shards(
    numbers: list[int],
    teacher: Teacher,
    corpus: Corpus,
    settings: ScoreSettings,
    writer: StoreWriter,
    on_progress: Callable[[Progress], None] | None,
) -> int:
    total_documents = len(numbers) * settings.shard_documents
    if numbers and numbers[-1] == writer.shard_count - 1:
        total_documents -= writer.shard_count * settings.shard_documents - len(corpus)
    documents = tokens = 0
    for prepared in _prepared_ahead(numbers, teacher, corpus, settings):
        report = _reporter(prepared, documents, total_documents, tokens, on_progress)
        writer.write_shard(score_prepared(prepared, teacher, settings, report))
        documents += prepared.document_span
        tokens += prepared.tokens
        if on_progress is not None:
            on_progress(Progress(documents, total_documents, tokens))
    return tokens


def _prepared_ahead(
    numbers: list[int], teacher: Teacher, corpus: Corpus, settings: ScoreSettings
) -> Iterator[PreparedShard]:
    """Read and tokenise the next shard while the teacher is busy with this one."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = None
        for place, number in enumerate(numbers):
            prepared = ahead.result() if ahead else prepare_shard(corpus, teacher, settings, number)
            if place + 1 < len(numbers):
                ahead = pool.submit(prepare_shard, corpus, teacher, settings, numbers[place + 1])
            yield prepared


def _reporter(
    prepared: PreparedShard,
    documents: int,
    total_documents: int,
    tokens: int,
    on_progress: Callable[[Progress], None] | None,
) -> Callable[[int], None] | None:
    if on_progress is None:
        return None
    done = 0

    def report(new_tokens: int) -> None:
        nonlocal done
        done += new_tokens
        inside = prepared.document_span * done / max(1, prepared.tokens)
        on_progress(Progress(documents + inside, total_documents, tokens + done))

    return report
