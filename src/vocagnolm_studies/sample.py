"""A sample of a corpus as training would see it: documents evenly spread over it, packed blocks
with every kind of guidance, the student's losses, and the sources of the tokens."""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.chat.messages import record_of
from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.data.corpus import Corpus, Document, document_hash, open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.data.teachers import Lookup
from vocagnolm.errors import CorpusError, StudyError
from vocagnolm.model import ModelFiles, NllModel
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.store import LossStore
from vocagnolm.train.collate import GuidedCollator

# Documents are read in rounds, each in the order of the files (compressed ones cannot seek), each
# twice as long as the one before.
_FIRST_ROUND = 64
# After so many documents of which the store holds none, the two do not belong together.
_GIVE_UP_AFTER = 1000

CHUNKS = (8, 16, 32, 64)
AGGREGATIONS = ("max", "mean", "sum")

STRETCH = "stretch"

Guidance = str | int | None
"""Where a variant's guidance comes from: an aggregation over the teacher's tokens, a number of
chunks, whole stretches, or no teacher at all."""


@dataclass
class SpreadSample:
    """Documents in the order of the corpus, and what was passed over on the way."""

    indices: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    missing: int = 0
    """Documents that the store does not hold."""
    unusable: int = 0
    """Documents that are no text (empty, broken)."""
    records: list[int] = field(default_factory=list)
    """The number of each document's record in its files."""

    @property
    def looked_at(self) -> int:
        return len(self.indices) + self.missing + self.unusable


def spread_order(count: int) -> list[int]:
    """0..count-1, every one once; the first n of them lie evenly spread, whatever n is."""
    # multiples of the golden section, modulo 1, leave no large gap at any length (Weyl); their
    # ranks are the documents
    golden = (math.sqrt(5) - 1) / 2
    points = np.arange(count) * golden % 1.0
    return [int(rank) for rank in np.argsort(np.argsort(points))]


def spread_documents(
    corpus: Corpus,
    store: LossStore,
    token_counts: Callable[[Sequence[str]], list[int]],
    tokens: int,
) -> SpreadSample:
    """As many documents as give `tokens` student tokens, or all there are. Only documents that the
    store holds are taken."""
    sample = SpreadSample()
    lookup = Lookup(store, corpus.fingerprint)
    order = spread_order(len(corpus))
    start, size = 0, _FIRST_ROUND
    while sample.tokens < tokens and start < len(order):
        found: dict[int, Document] = {}
        here = order[start : start + size]
        for index in sorted(here):
            (document,) = corpus.read(index, index + 1)
            if document.text is None:
                sample.unusable += 1
            elif lookup.row(index, document_hash(document.text)) is None:
                sample.missing += 1
            else:
                found[index] = document
        taken = [index for index in here if index in found]
        texts = [found[index].text or "" for index in taken]
        for index, text, count in zip(taken, texts, token_counts(texts), strict=True):
            if sample.tokens >= tokens:
                break
            sample.indices.append(index)
            sample.records.append(found[index].record)
            sample.texts.append(text)
            sample.tokens += count
        start, size = start + size, 2 * size
        if not sample.indices and sample.looked_at >= _GIVE_UP_AFTER:
            break
    if not sample.indices:
        raise StudyError(
            f"None of {sample.looked_at:,} documents of the corpus can be used: {sample.missing:,} "
            f"are not in the loss store {store.path}, {sample.unusable:,} hold no text. Give the "
            "corpus that the store was made from, or score this one: vocagnolm score"
        )
    order_of_corpus = np.argsort(sample.indices)
    for column in (sample.indices, sample.records, sample.texts):
        column[:] = [column[at] for at in order_of_corpus]
    return sample


def sources_of(
    paths: str | Sequence[str], field_name: str, sample: SpreadSample
) -> list[str] | None:
    """What `field_name` says for each sampled document; None where the corpus has no such field.

    The field is read as if it were the text: so every kind of file works."""
    try:
        corpus = open_corpus(paths, text_field=field_name, format="text")
    except CorpusError:
        return None
    named = []
    for record, text in zip(sample.records, sample.texts, strict=True):
        (document,) = corpus.read(record, record + 1)
        if document.parts > 1 or document.text == text:
            return None  # a file without fields: all of it is the text
        named.append("(none)" if document.text is None else document.text)
    return named


@dataclass(frozen=True)
class SampleBlocks:
    """The blocks that are looked at [N, L], in the order of training. Entry t of every array but
    `input_ids` belongs to the token that position t predicts."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    guidance: dict[Guidance, NDArray[np.float32]]
    stretch: NDArray[np.int64]
    """Number of each token's stretch in its block."""
    teacher_range: NDArray[np.int64]
    """[N, L, 2], -1 where no teacher token covers the token."""
    teacher_sums: NDArray[np.float64]
    """[N, 2]: sum and number of the losses of the teacher tokens behind a block."""
    document: NDArray[np.int64]
    """Number in the sample of each token's document."""
    place: NDArray[np.int64]
    """Number of each token in its document, separators counted."""
    shared_teacher: float
    named: NDArray[Any] | None
    scope_blocks: int
    target_shares: dict[str, float] | None
    """What becomes of the store's alternatives, where it has some."""

    @property
    def predicted(self) -> NDArray[np.bool_]:
        return self.labels >= 0


@contextmanager
def packed_blocks(
    sample: SpreadSample,
    tokenizer: str,
    store: str | Path,
    block_size: int,
    eos: str | None,
    *,
    talks: bool = False,
) -> Iterator[dict[Guidance, Blocks]]:
    """The sample as packed blocks, one set for every kind of guidance, in a folder that goes.
    `talks`: its texts are conversations."""
    with tempfile.TemporaryDirectory(prefix="vocagnolm-selection-") as name:
        folder = Path(name)
        file = folder / "sample.jsonl"
        records = map(record_of, sample.texts) if talks else ({"text": t} for t in sample.texts)
        file.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
        found: dict[Guidance, Blocks] = {}
        for how in AGGREGATIONS:
            data: dict[str, Any] = {
                "blocks": str(folder / how),
                "block_size": block_size,
                "eos": eos,
            }
            # one part: teacher ranges then point into one array
            extra = ["teacher_losses", "stretch"]
            if how == AGGREGATIONS[0] and LossStore.open(store).kept_alternatives is not None:
                extra.append("targets")  # to tell what becomes of them
            data |= {"part_documents": len(sample.texts), "extra_columns": extra}
            recipe = recipe_from_dict(
                {
                    "student": {"tokenizer": tokenizer},
                    "corpus": {"files": [str(file)]},
                    "store": {"path": str(store)},
                    "data": data,
                    "objective": {"aggregation": how},
                }
            )
            prepare(recipe)
            found[how] = Blocks(folder / how, block_size, teacher_sums=True)
        for n in CHUNKS:
            found[n] = Blocks(folder / "max", block_size, chunks=n)
        found[STRETCH] = Blocks(folder / "max", block_size, stretches=True)
        yield found


def read_blocks(
    by_guidance: dict[Guidance, Blocks],
    sources: Sequence[str] | None,
    tokens: int,
    scope_blocks: int,
    seed: int,
) -> SampleBlocks:
    blocks = by_guidance["max"]
    count = min(len(blocks), tokens // blocks.block_size)
    scope = min(scope_blocks, count)
    count -= count % scope  # a scope that is not full would keep another share of the best
    order = TrainingOrder(blocks, count, seed)
    indices = [order.block_index(position) for position in range(count)]
    collate = GuidedCollator.for_blocks()
    guidance: dict[Guidance, NDArray[np.float32]] = {}
    for key, those in by_guidance.items():
        batch = collate([those[index] for index in indices])
        guidance[key] = batch["guidance"].numpy()
        if key == "max":
            sums = batch["teacher_sums"].numpy()
        elif key == STRETCH:
            stretch = batch["stretch"].numpy()
    all_ranges = blocks.read("teacher_range", 0, blocks.tokens).astype(np.int64)
    positions = np.stack([blocks.positions(index)[1:] for index in indices])
    ranges = np.where(positions[..., None] < 0, -1, all_ranges[positions])
    places = [blocks.places(index) for index in indices]
    named = None
    if sources is not None:
        named = np.stack([predicted_sources(blocks, index, sources) for index in indices])
    return SampleBlocks(
        input_ids=batch["input_ids"].numpy(),
        labels=batch["labels"].numpy(),
        guidance=guidance,
        stretch=stretch,
        teacher_range=ranges,
        teacher_sums=sums,
        document=np.stack([document[1:] for document, _ in places]),
        place=np.stack([place[1:] for _, place in places]),
        shared_teacher=shared_teacher_share(all_ranges),
        named=named,
        scope_blocks=scope,
        target_shares=blocks.manifest["summary"].get("target_shares"),
    )


def shared_teacher_share(ranges: NDArray[np.int64]) -> float:
    """Share of the teacher tokens behind the sample that two or more student tokens point to."""
    first, last = ranges[ranges[:, 0] >= 0].T
    edges = np.zeros(int(last.max(initial=-1)) + 2, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last + 1, -1)
    pointed_to = np.cumsum(edges)
    return float((pointed_to > 1).sum() / max(int((pointed_to > 0).sum()), 1))


def student_nll(
    files: ModelFiles,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    on_tokens: Callable[[int, int], None] | None,
    documents: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """nll [N, L] of the token after each position. `documents`: each token's, where attention never
    crosses from one to the next; 0 for a token that nothing stands before."""
    windows = np.concatenate([input_ids, np.maximum(labels[:, -1:], 0)], axis=1)
    scorer = NllModel(
        files.load(),
        context=windows.shape[1],
        stride=1,  # a block is one window: nothing reaches back
        batch_tokens=4096 if files.device.type == "cpu" else 32768,
    )
    done = 0

    def note(scored: int) -> None:
        nonlocal done
        done += scored
        if on_tokens is not None:
            on_tokens(done, windows.size)

    if documents is None:
        return np.stack(scorer.document_nll(list(windows), note))[:, 1:]
    pieces = []
    for window, own in zip(windows, documents, strict=True):
        pieces += np.split(window, np.flatnonzero(np.diff(own)) + 2)
    nll = np.concatenate(scorer.document_nll(pieces, note)).reshape(windows.shape)
    return np.asarray(np.nan_to_num(nll[:, 1:]), dtype=np.float32)


# ---- the sources of tokens ----


def predicted_sources(blocks: Blocks, index: int, sources: Sequence[str]) -> np.ndarray:
    """Source of the token that each position of a block predicts [L]."""
    documents = blocks.documents(index)
    ordinal = blocks[index]["document"][1:]
    # the last: what fills a block of conversations up, and is never predicted
    names = np.array([*(sources[document] for document in documents), ""], dtype=object)
    return np.asarray(names[ordinal])


def shares_by_source(
    named: np.ndarray, chosen: np.ndarray, predicted: np.ndarray
) -> dict[str, dict[str, float]]:
    """`{source: {kept, tokens}}` over positions: their sources, whether they were chosen (or what
    they count), whether they predict anything. kept is the share of the source's predicted
    tokens (or their mean weight)."""
    shares = {}
    for source in sorted({str(name) for name in named[predicted]}):
        here = (named == source) & predicted
        tokens = float(here.sum())
        shares[source] = {"kept": float(chosen[here].sum()) / tokens, "tokens": tokens}
    return shares
