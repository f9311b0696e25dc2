"""Which tokens does the guided objective keep, and how much do its settings change that?

The settings of the paper's table 3 and figure 7 are choices of tokens. How far apart those choices
are depends on the pair of tokenizers and can be counted without training: the student reads a
sample of the corpus once, and every setting then selects from the same losses. Blocks, guidance
and selection are made by the code that training uses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vocagnolm.alignment import KINDS
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.materials import separator_ids
from vocagnolm.data.prepare import tokenise
from vocagnolm.errors import StudyError
from vocagnolm.model import open_model
from vocagnolm.objective import ObjectiveConfig, ScoredBatch, Targets, select, weigh_step
from vocagnolm.store import LossStore
from vocagnolm_studies.labels import LabelFields, LabelStudy, label_study
from vocagnolm_studies.sample import (
    AGGREGATIONS,
    CHUNKS,
    STRETCH,
    Guidance,
    SampleBlocks,
    packed_blocks,
    read_blocks,
    shares_by_source,
    sources_of,
    spread_documents,
    student_nll,
)

KEEPS = (0.4, 0.5, 0.6, 0.7, 0.8)
REFERENCE = "reference"
SHOWN_BY_SOURCE = (REFERENCE, "chunk-16", "no_teacher", "random")
SHOWN_BY_LABEL = (REFERENCE, STRETCH, *SHOWN_BY_SOURCE[2:])  # and the controls
REDUCIBLE = "reducible"

SourceShares = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    label: str
    config: ObjectiveConfig
    guidance: Guidance = "max"


@dataclass(frozen=True, kw_only=True)
class SelectionRow:
    """What one variant keeps, beside what the reference keeps."""

    name: str
    label: str
    tokens: int
    """Number of kept tokens."""
    kept: float
    """Share of the predicted tokens that it keeps."""
    overlap: float
    """Share of the reference's kept tokens that it keeps too; chance alone gives `kept`."""
    student_nll: float
    """Mean over its kept tokens, in nats."""
    excess: float
    """Mean student nll - guidance over its kept tokens that have guidance. The guidance is the
    reference's for all variants: one ruler."""


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """How the two tokenizers meet. Shares are of the predicted tokens; one, two, more and
    unmapped add up to 1."""

    one: float
    """Guidance from exactly one teacher token."""
    two: float
    more: float
    unmapped: float
    separators: float
    """The unmapped tokens between documents, which hold no text."""
    unscored: float
    """The unmapped tokens where the teacher gave no loss (the first token of a document, for a
    teacher without beginning-of-text)."""
    shared_teacher: float
    """Share of the teacher's tokens that several student tokens share."""

    @property
    def mapped(self) -> float:
        return self.one + self.two + self.more


@dataclass(frozen=True, kw_only=True)
class KindShares:
    """Shares of the predicted tokens of one kind."""

    tokens: float
    """Share of all predicted tokens."""
    by_token: float
    """Kept by the reference."""
    by_stretch: float
    """Kept when whole stretches are compared."""
    joined: float
    """Kept by stretch and not by token."""
    left: float
    """Kept by token and not by stretch."""


@dataclass(frozen=True)
class Lead:
    """How far the teacher is ahead of the student: nats per student token, over the stretches of
    text that both models predict whole. Where it is hardly better, it has little to say."""

    student: float
    teacher: float

    @property
    def share(self) -> float:
        """The share of the student's loss that the teacher spares; below 0 where it is worse."""
        return 1 - self.teacher / self.student


@dataclass(frozen=True, kw_only=True)
class SelectionStudy:
    student: str
    teacher: str
    documents: int
    missing_documents: int
    unusable_documents: int
    tokens: int
    """Predicted tokens that were looked at."""
    blocks: int
    block_size: int
    scope_blocks: int
    keep: float
    pair: PairFacts
    lead: Lead
    """Both losses over the same text."""
    rows: list[SelectionRow]
    """The reference comes first."""
    by_kind: dict[str, KindShares]
    """Kind of the stretch (student tokens : teacher tokens) -> what the two comparisons keep."""
    by_source: dict[str, SourceShares] | None
    """Variant -> source -> kept share and tokens; None where the corpus names no sources."""
    lead_by_source: dict[str, Lead] | None
    target_shares: dict[str, float] | None = None
    """What distillation would make of the store's alternatives; None where it has none."""
    labels: LabelStudy | None = None
    """Where labels were asked for."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "pair": {"mapped": self.pair.mapped, **asdict(self.pair)}}


def variants(keep: float = 0.4, seed: int = 0) -> list[Variant]:
    """The reference and everything it is compared with, each one setting away from it."""
    guided = ObjectiveConfig(method="guided", keep=keep, seed=seed)
    listed = [
        Variant(name=REFERENCE, label=f"guided, max, include, keep {keep:.0%}", config=guided)
    ]
    whole = replace(guided, compare="stretch")
    listed.append(Variant(name=STRETCH, label="by whole stretches", config=whole, guidance=STRETCH))
    for how in AGGREGATIONS[1:]:
        listed.append(
            Variant(name=how, label=f"{how} over teacher tokens", config=guided, guidance=how)
        )
    exclude, mean = replace(guided, unmapped="exclude"), replace(guided, unmapped="mean")
    listed.append(Variant(name="unmapped-exclude", label="unmapped: exclude", config=exclude))
    listed.append(Variant(name="unmapped-mean", label="unmapped: mean", config=mean))
    for share in KEEPS:
        if share != keep:
            other = replace(guided, keep=share)
            listed.append(Variant(name=f"keep-{share:g}", label=f"keep {share:.0%}", config=other))
    for n in CHUNKS:
        config = replace(guided, method="chunk", n_chunks=n)
        listed.append(
            Variant(name=f"chunk-{n}", label=f"{n} chunks, teacher", config=config, guidance=n)
        )
    # without a teacher every token competes, as in a run without a store
    alone = replace(guided, method="no_teacher")
    listed.append(
        Variant(name="no_teacher", label="student loss alone", config=alone, guidance=None)
    )
    chance = replace(guided, method="random")
    listed.append(Variant(name="random", label="random", config=chance, guidance=None))
    return listed


def selection_study(
    student: str | Path,
    store: str | Path,
    corpus: str | Sequence[str],
    *,
    text_field: str = "text",
    source_field: str = "source",
    tokens: int = 65_536,
    block_size: int = 1024,
    scope_blocks: int = 16,
    keep: float = 0.4,
    eos: str | None = "auto",
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    labels: LabelFields | None = None,
    on_tokens: Callable[[int, int], None] | None = None,
) -> SelectionStudy:
    """Let every variant select from the same losses and count.

    About `tokens` student tokens are looked at, of documents evenly spread over the corpus; they
    are packed in the order of the corpus and the blocks shuffled by `seed`, as in training.
    `scope_blocks` blocks compete with each other (training: the micro-batch). `eos` ends every
    document: a token, `auto` or None. `labels` asks whether the losses tell documents of one label
    from those of the other. `on_tokens` is told how many tokens the student has read, of how many.
    """
    if block_size < 2 or scope_blocks < 1:
        raise ValueError("block_size must be at least 2, scope_blocks at least 1")
    compared = variants(keep, seed)
    if tokens < block_size:
        raise StudyError(
            f"{tokens:,} tokens are fewer than one block of {block_size:,}. Use more tokens "
            f"(--tokens) or smaller blocks (--block-size)."
        )
    files = open_model(student, device=device, dtype=dtype)
    if files.max_context is not None and block_size > files.max_context:
        raise StudyError(
            f"A block has {block_size:,} tokens, {files.name} reads at most "
            f"{files.max_context:,}. Choose a smaller --block-size."
        )
    losses = LossStore.open(store)
    tokenizer_source = str(student) if files.gguf_file else str(files.folder)
    texts = open_corpus(corpus, text_field=text_field)
    tokenizer = files.tokenizer
    if texts.conversations:
        tokenizer = ChatTokenizer(tokenizer, template_of(tokenizer))
    prefix, end = separator_ids(tokenizer, "auto", eos)
    separators = len(prefix) + (end is not None)

    def counts(texts: Sequence[str]) -> list[int]:
        if isinstance(tokenizer, ChatTokenizer):  # those that its template refuses are left out
            outcomes = tokenizer.outcomes(texts)
            return [0 if isinstance(spans, str) else len(spans) for spans in outcomes]
        return [len(spans) + separators for spans in tokenise(tokenizer, texts)]

    sample = spread_documents(texts, losses, counts, tokens)
    if sample.tokens < block_size:
        raise StudyError(
            f"{len(sample.texts):,} documents of the corpus are in the store; they hold "
            f"{sample.tokens:,} tokens, fewer than one block of {block_size:,}. Choose a smaller "
            "--block-size."
        )
    sources = sources_of(corpus, source_field, sample)
    talks = texts.conversations
    folder = packed_blocks(sample, tokenizer_source, losses.path, block_size, eos, talks=talks)
    with folder as by_guidance:
        read = read_blocks(by_guidance, sources, min(tokens, sample.tokens), scope_blocks, seed)
    apart = read.document if talks else None
    nll = student_nll(files, read.input_ids, read.labels, on_tokens, apart)
    masks = {v.name: _select(v, read, nll) for v in compared}
    reducible = _reducible(read, nll)
    return SelectionStudy(
        student=files.name,
        teacher=losses.teacher_name,
        documents=len(sample.texts),
        missing_documents=sample.missing,
        unusable_documents=sample.unusable,
        tokens=int(read.predicted.sum()),
        blocks=len(read.input_ids),
        block_size=block_size,
        scope_blocks=read.scope_blocks,
        keep=keep,
        pair=_pair_facts(read),
        lead=teachers_lead(read, nll),
        rows=[_row(v, masks, read, nll) for v in compared],
        by_kind=_by_kind(read, masks[REFERENCE], masks[STRETCH]),
        by_source=None
        if read.named is None
        else {
            name: shares_by_source(read.named, masks[name], read.predicted)
            for name in SHOWN_BY_SOURCE
        },
        lead_by_source=lead_by_source(read, nll),
        target_shares=read.target_shares,
        labels=None
        if labels is None
        else label_study(
            labels,
            corpus,
            sample,
            tokenise(tokenizer, sample.texts),
            read,
            {
                "student loss": nll,
                "teacher loss": read.guidance["max"],
                "excess": nll - read.guidance["max"],
                "reducible share": reducible,
            },
            {**{name: masks[name] for name in SHOWN_BY_LABEL}, REDUCIBLE: reducible},
            len(prefix),
        ),
    )


def _select(variant: Variant, read: SampleBlocks, nll: NDArray[np.float32]) -> NDArray[np.bool_]:
    batches = _scopes(variant.guidance, variant.config.by_stretch, read, nll)
    chosen = [select(b, variant.config, step=step) for step, b in enumerate(batches)]
    return torch.cat(chosen).numpy()


def _reducible(read: SampleBlocks, nll: NDArray[np.float32]) -> NDArray[np.float32]:
    """What each token counts when whole stretches are weighed, without a floor."""
    config = ObjectiveConfig(
        method="guided", compare="stretch", weighting="reducible", floor=0.0, unmapped="exclude"
    )
    batches = _scopes(STRETCH, True, read, nll)
    return torch.cat([weigh_step([batch], config).weights[0] for batch in batches]).numpy()


def _scopes(
    kind: Guidance, by_stretch: bool, read: SampleBlocks, nll: NDArray[np.float32]
) -> Iterator[ScoredBatch]:
    """The blocks that compete with each other, step by step."""
    guidance = None if kind is None else read.guidance[kind]
    for start in range(0, len(nll), read.scope_blocks):
        rows = slice(start, start + read.scope_blocks)
        targets = Targets(
            labels_BT=torch.from_numpy(read.labels[rows]),
            guidance_BT=None if guidance is None else torch.from_numpy(guidance[rows]),
            stretch_BT=torch.from_numpy(read.stretch[rows]) if by_stretch else None,
            teacher_sums_B2=torch.from_numpy(read.teacher_sums[rows]),
        )
        yield ScoredBatch(targets, torch.from_numpy(nll[rows]))


def _row(
    variant: Variant,
    masks: dict[str, NDArray[np.bool_]],
    read: SampleBlocks,
    nll: NDArray[np.float32],
) -> SelectionRow:
    mask, reference = masks[variant.name], masks[REFERENCE]
    excess = (nll - read.guidance["max"])[mask]
    return SelectionRow(
        name=variant.name,
        label=variant.label,
        tokens=int(mask.sum()),
        kept=float(mask.sum() / read.predicted.sum()),
        overlap=_mean((mask & reference).sum(), reference.sum()),
        student_nll=_mean(nll[mask].sum(dtype=np.float64), mask.sum()),
        excess=_mean(np.nansum(excess, dtype=np.float64), (~np.isnan(excess)).sum()),
    )


def _by_kind(
    read: SampleBlocks, by_token: NDArray[np.bool_], by_stretch: NDArray[np.bool_]
) -> dict[str, KindShares]:
    predicted = read.predicted
    kinds = _kinds(read)[predicted]
    ours, theirs = by_token[predicted], by_stretch[predicted]
    shares = {}
    for number, name in enumerate(KINDS):
        here = kinds == number
        if not here.any():
            continue
        shares[name] = KindShares(
            tokens=float(here.mean()),
            by_token=float(ours[here].mean()),
            by_stretch=float(theirs[here].mean()),
            joined=float((theirs & ~ours)[here].mean()),
            left=float((ours & ~theirs)[here].mean()),
        )
    return shares


def _kinds(read: SampleBlocks) -> NDArray[np.int64]:
    """Per token the kind of its stretch, a place in `KINDS`; what a block cuts off is unmapped."""
    known = ~np.isnan(read.guidance[STRETCH])
    rows, width = read.stretch.shape
    number = (read.stretch + width * np.arange(rows)[:, None])[known]
    counts = np.bincount(number, minlength=rows * width)
    first = np.full(rows * width, np.iinfo(np.int64).max)
    last = np.full(rows * width, -1)
    np.minimum.at(first, number, read.teacher_range[known][:, 0])
    np.maximum.at(last, number, read.teacher_range[known][:, 1])
    several_theirs = (last > first)[number].astype(np.int64)
    kinds = np.zeros(read.stretch.shape, np.int64)
    kinds[known] = 1 + several_theirs + 2 * (counts[number] > 1)
    return kinds


def _mean(total: Any, count: Any) -> float:
    return float(total / count) if count else float("nan")


def _pair_facts(read: SampleBlocks) -> PairFacts:
    """Shares over the predicted tokens."""
    ranges = read.teacher_range[read.predicted]
    guided = ~np.isnan(read.guidance["max"][read.predicted])
    covered = ranges[:, 0] >= 0
    width = np.where(guided, ranges[:, 1] - ranges[:, 0] + 1, 0)

    def share(which: NDArray[np.bool_]) -> float:
        return float(which.mean())

    return PairFacts(
        one=share(width == 1),
        two=share(width == 2),
        more=share(width > 2),
        unmapped=share(~guided),
        separators=share(~guided & ~covered),
        unscored=share(~guided & covered),
        shared_teacher=read.shared_teacher,
    )


# ---- how far the teacher is ahead of the student ----


def teachers_lead(read: SampleBlocks, nll: NDArray[np.float32]) -> Lead:
    """Over all of the sample."""
    return _lead(read, nll, np.ones(nll.shape, np.bool_))


def lead_by_source(read: SampleBlocks, nll: NDArray[np.float32]) -> dict[str, Lead] | None:
    if read.named is None:
        return None
    names = sorted({str(name) for name in read.named[read.predicted]})
    return {name: _lead(read, nll, read.named == name) for name in names}


def _lead(read: SampleBlocks, nll: NDArray[np.float32], where: NDArray[np.bool_]) -> Lead:
    stretch_nll = read.guidance[STRETCH]  # the teacher's, of the whole stretch, on each token
    known = where & read.predicted & ~np.isnan(stretch_nll)
    rows, width = read.stretch.shape
    number = (read.stretch + width * np.arange(rows)[:, None])[known]
    _, first = np.unique(number, return_index=True)
    tokens = int(known.sum()) or np.nan
    return Lead(
        student=float(nll[known].sum(dtype=np.float64) / tokens),
        teacher=float(stretch_nll[known][first].sum(dtype=np.float64) / tokens),
    )
