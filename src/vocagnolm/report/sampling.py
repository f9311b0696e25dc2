"""Make the selection sample of a run: the finished student reads some documents of its corpus
beside the teacher's stored losses, and the run's own rule selects."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vocagnolm.alignment import (
    Aggregation,
    TextTokenizer,
    TokenSpans,
    align,
    load_tokenizer,
    shares,
    token_overlap,
    vocabulary_overlap,
)
from vocagnolm.data.corpus import Document, document_hash, open_corpus
from vocagnolm.errors import VocagnolmError
from vocagnolm.recipe import Recipe, load_recipe
from vocagnolm.report.page_data import Passage, Preflight, Selection
from vocagnolm.report.passage import build_passage, select_passages, token_row
from vocagnolm.report.sample import Sample, SampleError, save_sample
from vocagnolm.report.view import model_scorer
from vocagnolm.store import LossStore

PASSAGE_TOKENS = 600
"""Short documents are joined to passages of about so many student tokens."""
MAX_TOKENS = 50_000
"""Student tokens on a page, over all documents of the sample."""


def write_sample(
    run: str | Path, *, documents: int = 16, seed: int = 0, model: str | Path | None = None
) -> Path:
    """Compute a run's sample and leave it in its folder as `tokens.json`."""
    return save_sample(compute_sample(run, documents=documents, seed=seed, model=model), run)


def compute_sample(
    run: str | Path,
    *,
    documents: int = 16,
    seed: int = 0,
    model: str | Path | None = None,
) -> Sample:
    """Documents drawn at random, with the losses of the run's model (or another `model`, for
    example the start of training) and of the teacher's store."""
    folder = Path(run)
    recipe = load_recipe(folder / "recipe.yaml")
    if not recipe.store.path:
        raise SampleError(
            f"{folder} has no loss store in its recipe: a sample needs the teacher's losses"
        )
    student = Path(model) if model is not None else folder / "model"
    if not student.is_dir():
        raise SampleError(f"{student} is not there: a sample needs the trained model")
    store = LossStore.open(recipe.store.path)
    tokenizer, score = model_scorer(str(student))
    chosen = _choose(recipe, store, tokenizer, documents, seed)
    texts = [document.text or "" for document, _ in chosen]
    ours = tokenizer.spans_batch(texts)
    losses = score([spans.ids for spans in ours])
    read = []
    for (document, at), text, own, nll in zip(chosen, texts, ours, losses, strict=True):
        token_bytes, teacher_nll = store[at]
        ends = np.cumsum(token_bytes)
        teacher_spans = np.stack([ends - token_bytes, ends], axis=1)
        read.append(_Read(document, text.encode(), own, nll, teacher_spans, teacher_nll))
    names = tokenizer.name, _teacher_name(store)
    aggregation = recipe.objective.aggregation
    passages = [_passage(group, names, aggregation) for group in _groups(read)]
    selected, rule = _select(passages, recipe)
    return Sample(
        passages=selected,
        selection=rule,
        preflight=_preflight(recipe, tokenizer, names[1], read),
    )


@dataclass(frozen=True)
class _Read:
    """A document with everything both models know about it."""

    document: Document
    text: bytes
    student: TokenSpans
    student_nll: np.ndarray
    teacher_spans: np.ndarray
    teacher_nll: np.ndarray


def _groups(documents: Sequence[_Read]) -> Iterator[list[_Read]]:
    """Short documents are shown together: a page of fifty passages of one line is no joy."""
    group: list[_Read] = []
    for one in documents:
        group.append(one)
        if sum(len(member.student) for member in group) >= PASSAGE_TOKENS:
            yield group
            group = []
    if group:
        yield group


def _passage(group: Sequence[_Read], names: tuple[str, str], aggregation: Aggregation) -> Passage:
    sizes = [len(one.text) for one in group]
    origins = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    text = b"".join(one.text for one in group)
    ours = np.concatenate([o.student.spans + at for o, at in zip(group, origins, strict=True)])
    theirs = np.concatenate([o.teacher_spans + at for o, at in zip(group, origins, strict=True)])
    title = group[0].document.place
    if len(group) > 1:
        title += f" and {len(group) - 1} more"
    passage = build_passage(
        title,
        token_row(
            names[0],
            text,
            ours,
            np.concatenate([one.student.ids for one in group]),
            np.concatenate([one.student_nll for one in group]),
        ),
        token_row(names[1], text, theirs, nll=np.concatenate([o.teacher_nll for o in group])),
        align(ours, theirs),
        aggregation=aggregation,
    )
    begins = np.cumsum([len(one.student) for one in group])[:-1]
    return dataclasses.replace(passage, breaks=begins.tolist() or None)


def _choose(
    recipe: Recipe, store: LossStore, tokenizer: TextTokenizer, documents: int, seed: int
) -> list[tuple[Document, int]]:
    """Random documents that the store holds, in corpus order, up to the page's token limit."""
    corpus = open_corpus(
        recipe.corpus.files,
        text_field=recipe.corpus.text_field,
        split=recipe.corpus.split,
        limit=recipe.corpus.limit_documents,
    )
    chosen: list[tuple[Document, int]] = []
    room = MAX_TOKENS
    for index in np.random.default_rng(seed).permutation(len(corpus)).tolist():
        if len(chosen) == documents:
            break
        document = next(corpus.read(index, index + 1))
        at = store.find(document_hash(document.text)) if document.text else None
        if document.text is None or at is None:
            continue
        n_tokens = len(tokenizer.spans(document.text))
        if n_tokens <= room:
            chosen.append((document, at))
            room -= n_tokens
    if not chosen:
        raise SampleError(
            "no document of the corpus is in the store and short enough for a page. "
            "Check that corpus.files and store.path of the recipe belong together"
        )
    return sorted(chosen, key=lambda pair: pair[0].index)


def _select(passages: list[Passage], recipe: Recipe) -> tuple[list[Passage], Selection]:
    objective = recipe.objective
    keep = 1.0 if objective.method == "cpt" else objective.keep
    selected, rule = select_passages(passages, keep=keep, unmapped=objective.unmapped)
    return selected, dataclasses.replace(
        rule, method=objective.method, aggregation=objective.aggregation, scope="this sample"
    )


def _teacher_name(store: LossStore) -> str:
    teacher = store.manifest.get("teacher")
    name = teacher.get("name") if isinstance(teacher, dict) else teacher
    return str(name or "teacher")


def _preflight(
    recipe: Recipe, student: TextTokenizer, teacher_name: str, read: Sequence[_Read]
) -> Preflight:
    alignments = [align(one.student.spans, one.teacher_spans) for one in read]
    counts = [shares(alignment) for alignment in alignments]
    tokens = max(sum(count.tokens for count in counts), 1)
    covers = [
        token_overlap(one.student.spans, one.teacher_spans, alignment)
        for one, alignment in zip(read, alignments, strict=True)
    ]
    found = Preflight(
        student=student.name,
        teacher=teacher_name,
        student_vocabulary=student.vocabulary_size,
        ios=float(np.nanmean(np.concatenate([cover.ios for cover in covers]))),
        iou=float(np.nanmean(np.concatenate([cover.iou for cover in covers]))),
        one_to_one=sum(count.one_to_one for count in counts) / tokens,
        one_to_many=sum(count.one_to_many for count in counts) / tokens,
        many_to_one=sum(count.many_to_one for count in counts) / tokens,
        unmapped=sum(count.unmapped for count in counts) / tokens,
        student_tokens=tokens,
        teacher_tokens=sum(len(one.teacher_spans) for one in read),
        text_bytes=sum(len(one.text) for one in read),
        exact=all(one.student.lost_bytes == 0 for one in read),
    )
    # the store needs no teacher tokenizer; where the recipe names one, its vocabulary is compared
    if recipe.teacher_tokenizer is None:
        return found
    try:
        teacher = load_tokenizer(recipe.teacher_tokenizer)
    except VocagnolmError:
        return found
    overlap = vocabulary_overlap(student, teacher)
    return dataclasses.replace(
        found,
        teacher_vocabulary=teacher.vocabulary_size,
        overlap_raw=overlap.raw,
        overlap_marks=overlap.marks,
        overlap_bytes=overlap.bytes,
    )
