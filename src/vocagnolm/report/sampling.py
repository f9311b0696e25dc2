"""Make the selection sample of a run: the finished student reads some documents of its corpus
beside the teachers' stored losses, and the run's own rule selects."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import TargetTable, TextTokenizer, TokenSpans, align, load_tokenizer
from vocagnolm.alternatives import Alternatives
from vocagnolm.chat import ChatTokenizer
from vocagnolm.data.corpus import Corpus, Document, document_hash
from vocagnolm.data.guidance import common_alternatives, target_table, tiling
from vocagnolm.data.identity import recipe_corpus, student_chat
from vocagnolm.data.teachers import Lookup
from vocagnolm.errors import TemplateError, VocagnolmError
from vocagnolm.files import parse_json, write_text
from vocagnolm.recipe import Recipe, load_recipe
from vocagnolm.report.page_data import (
    FORMAT_VERSION,
    Passage,
    Preflight,
    Selection,
    TeacherRow,
    TokenRow,
    plain,
)
from vocagnolm.report.passage import Expected, preflight, teacher_row, token_row, with_alternatives
from vocagnolm.report.settings import student_name
from vocagnolm.report.view import model_scorer, only_answers
from vocagnolm.report.weights import weigh_passages
from vocagnolm.store import LossStore

# ---- the sample in its file ----

SAMPLE_FILE = "tokens.json"


class SampleError(VocagnolmError):
    """A selection sample cannot be read or made."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    passages: list[Passage] = field(default_factory=list)
    selection: Selection | None = None
    preflight: list[Preflight] = field(default_factory=list)


def save_sample(sample: Sample, run: str | Path) -> Path:
    """Write `tokens.json` into a run folder, whole or not at all."""
    path = Path(run) / SAMPLE_FILE
    content = json.dumps({"format": FORMAT_VERSION, **plain(sample)}, separators=(",", ":"))
    write_text(path, content)
    return path


def has_sample(run: str | Path) -> bool:
    """Whether there is a sample of today's form; older ones showed another rule's selection."""
    path = Path(run) / SAMPLE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError):
        return True  # damaged: `read_sample` says so
    older = isinstance(content, dict) and isinstance(content.get("format"), int)
    return not (older and content["format"] < FORMAT_VERSION)


def read_sample(run: str | Path) -> Sample:
    path = Path(run) / SAMPLE_FILE
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT_VERSION:
            raise SampleError(
                f"{path} has format {content.get('format')!r}, this program reads "
                f"{FORMAT_VERSION}. Remove it: `vocagnolm report --html` makes it again"
            )
        return Sample(
            passages=[_read_passage(entry) for entry in content.get("passages", [])],
            selection=Selection(**content["selection"]) if "selection" in content else None,
            preflight=[Preflight(**entry) for entry in content.get("preflight", [])],
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SampleError(
            f"{path} is no selection sample ({error}). Remove it and make it again"
        ) from None


def _read_passage(entry: dict[str, Any]) -> Passage:
    rows = {
        "student": TokenRow(**entry["student"]),
        "teachers": [TeacherRow(**row) for row in entry.get("teachers", [])],
    }
    return Passage(**{**entry, **rows})


# ---- making it ----


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
    example the start of training) and of the teachers' stores."""
    from vocagnolm.train.arguments import objective_config

    folder = Path(run)
    recipe = load_recipe(folder / "recipe.yaml")
    _require_losses(folder, recipe)
    student = Path(model) if model is not None else folder / "model"
    if not student.is_dir():
        raise SampleError(f"{student} is not there: a sample needs the trained model")
    stores = [LossStore.open(path) for path in recipe.stores]
    corpus = recipe_corpus(recipe)
    template = partial(student_chat, recipe) if corpus.conversations else None
    tokenizer, score = model_scorer(str(student), template=template)
    chosen = _choose(corpus, stores, tokenizer, documents, seed)
    texts = [document.text or "" for document, _ in chosen]
    ours = tokenizer.spans_batch(texts)
    losses = _arrays(score([spans.ids for spans in ours]))
    if corpus.conversations:
        losses = [
            only_answers(text, own, nll, recipe.data.train_on)
            for text, own, nll in zip(texts, ours, losses, strict=True)
        ]
    read = [
        _Read(document, text.encode(), own, nll, teachers, tokenizer.shown(text, own))
        for (document, teachers), text, own, nll in zip(chosen, texts, ours, losses, strict=True)
    ]
    spec = None
    if recipe.needs_targets and not recipe.needs_online_teacher:
        spec = common_alternatives(stores, recipe.objective.alternatives)
    tables = [_table(recipe, tokenizer, store) for store in stores]
    names = [student_name(recipe), *(store.teacher_name for store in stores)]
    passages, rule = weigh_passages(
        [
            _passage(group, names, tables, recipe.objective.inside, spec.count if spec else None)
            for group in _groups(read)
        ],
        objective_config(recipe),
        aggregation=recipe.objective.aggregation,
        how=recipe.store.combine or "min",
        alternatives=spec,
    )
    return Sample(
        passages=passages,
        selection=rule,
        preflight=[
            _preflight(recipe, tokenizer, (names[0], store.teacher_name), at, read)
            for at, store in enumerate(stores)
        ],
    )


def _require_losses(folder: Path, recipe: Recipe) -> None:
    if recipe.objective.entropy_keep is not None:
        raise SampleError(
            f"{folder} selects by the reference model's entropy too (objective.entropy_keep), "
            "which no store holds"
        )
    if recipe.needs_guidance and not recipe.stores:
        raise SampleError(
            f"{folder} has no loss store in its recipe: a sample needs the teacher's losses"
        )


@dataclass(frozen=True)
class _Read:
    """A document with everything that the models know about it."""

    document: Document
    text: bytes
    student: TokenSpans
    student_nll: NDArray[np.float32]
    teachers: "list[_Held | None]"
    """By store; None where it lacks the document."""
    shown: list[str | None]

    def teacher_spans(self, store: int) -> NDArray[np.int64]:
        held = self.teachers[store]
        return np.zeros((0, 2), np.int64) if held is None else tiling(held.token_bytes)


class _Held(NamedTuple):
    """A document as a store has it."""

    token_bytes: NDArray[np.int64]
    nll: NDArray[np.float32]
    alternatives: Alternatives | None


def _arrays(losses: Sequence[Any]) -> list[NDArray[np.float32]]:
    return [one if isinstance(one, np.ndarray) else one.nll for one in losses]


def _table(recipe: Recipe, student: TextTokenizer, store: LossStore) -> TargetTable | None:
    """How a store's alternatives become targets; None where it has none."""
    if store.kept_alternatives is None:
        return None
    base = student.base if isinstance(student, ChatTokenizer) else student
    eos = base.eos_id if recipe.data.eos == "auto" else base.id_of(recipe.data.eos or "")
    return target_table(student, store.vocabulary, eos)


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


def _passage(
    group: Sequence[_Read],
    names: Sequence[str],
    tables: Sequence[TargetTable | None],
    inside: bool,
    count: int | None = None,
) -> Passage:
    """`count`: how many of a store's alternatives the run has; None: all."""
    sizes = [len(one.text) for one in group]
    origins = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    text = b"".join(one.text for one in group)
    ours = np.concatenate([o.student.spans + at for o, at in zip(group, origins, strict=True)])
    student = token_row(
        names[0],
        text,
        ours,
        np.concatenate([one.student.ids for one in group]),
        np.concatenate([one.student_nll for one in group]),
        [name for one in group for name in one.shown],
    )

    ids = np.concatenate([one.student.ids for one in group])

    def teacher(store: int, name: str) -> TeacherRow:
        parts = [one.teacher_spans(store) + at for one, at in zip(group, origins, strict=True)]
        held = [found for one in group if (found := one.teachers[store]) is not None]
        spans = np.concatenate(parts)
        nll = np.concatenate([*(one.nll for one in held), np.zeros(0, np.float32)])
        row = teacher_row(token_row(name, text, spans, nll=nll), align(ours, spans))
        table = tables[store]
        kept = [one.alternatives for one in held if one.alternatives is not None]
        if table is None or not kept:
            return row
        packed = np.concatenate([one.packed[:, :count] for one in kept])
        expected = Expected(table, Alternatives(packed, kept[0].sampled), origins)
        return with_alternatives(row, expected, ids, ours, spans, text, inside=inside)

    title = group[0].document.place
    if len(group) > 1:
        title += f" and {len(group) - 1} more"
    begins = np.cumsum([len(one.student) for one in group])[:-1]
    return Passage(
        title=title,
        student=student,
        teachers=[teacher(store, name) for store, name in enumerate(names[1:])],
        breaks=begins.tolist() or None,
    )


def _choose(
    corpus: Corpus,
    stores: Sequence[LossStore],
    tokenizer: TextTokenizer,
    documents: int,
    seed: int,
) -> "list[tuple[Document, list[_Held | None]]]":
    """Random documents that a store holds, in corpus order, up to the page's token limit; without
    a store any document will do."""
    lookups = [Lookup(store, corpus.fingerprint) for store in stores]
    chosen: list[tuple[Document, list[_Held | None]]] = []
    room = MAX_TOKENS
    for index in np.random.default_rng(seed).permutation(len(corpus)).tolist():
        if len(chosen) == documents:
            break
        document = next(corpus.read(index, index + 1))
        if not document.text:
            continue
        digest = document_hash(document.text)
        teachers = [_held(lookup, index, digest) for lookup in lookups]
        if stores and all(losses is None for losses in teachers):
            continue
        try:
            n_tokens = len(tokenizer.spans(document.text))
        except TemplateError:  # prepare left it out as well
            continue
        if n_tokens <= room:
            chosen.append((document, teachers))
            room -= n_tokens
    if not chosen:
        raise SampleError(
            "no document of the corpus is in the store and short enough for a page. "
            "Check that corpus.files and store.path of the recipe belong together"
        )
    return sorted(chosen, key=lambda pair: pair[0].index)


def _held(lookup: Lookup, index: int, digest: bytes) -> _Held | None:
    at, store = lookup.place(index, digest), lookup.store
    if at is None:
        return None
    has_more = store.kept_alternatives is not None
    return _Held(*store[at], store.alternatives(at) if has_more else None)


def _preflight(
    recipe: Recipe,
    student: TextTokenizer,
    names: tuple[str, str],
    store: int,
    read: Sequence[_Read],
) -> Preflight:
    held = [one for one in read if one.teachers[store] is not None]
    theirs = [one.teacher_spans(store) for one in held]
    return preflight(
        names,
        student,
        _teacher_tokenizer(recipe),
        [one.student for one in held],
        theirs,
        [align(one.student.spans, spans) for one, spans in zip(held, theirs, strict=True)],
        exact=all(one.student.lost_bytes == 0 for one in held),
    )


def _teacher_tokenizer(recipe: Recipe) -> TextTokenizer | None:
    """The one that the recipe names, of its one teacher; the store itself needs none."""
    if recipe.teacher_tokenizer is None or len(recipe.stores) > 1:
        return None
    try:
        return load_tokenizer(recipe.teacher_tokenizer)
    except VocagnolmError:
        return None
