"""A teacher's guidance as dataset columns, for any trainer. `guide` adds them to a `datasets`
dataset; `export_columns` writes them to a folder for training without this package."""

import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import TextTokenizer, TokenSpans, load_tokenizer
from vocagnolm.alignment.alignment import Aggregation
from vocagnolm.chat import (
    ChatTokenizer,
    Refused,
    TrainOn,
    conversation_of,
    shared_text,
    template_of,
    trained_ranges,
)
from vocagnolm.chat.messages import Format, format_of
from vocagnolm.data.corpus import Corpus, document_hash, open_corpus
from vocagnolm.data.guidance import GuidancePlan, TargetsPlan, target_table
from vocagnolm.data.identity import separator_ids
from vocagnolm.data.packing import Batch, pack_documents
from vocagnolm.errors import CorpusError, StoreError, UsageError, VocagnolmWarning, optional
from vocagnolm.files import address_of, json_digest, local_path, whole_folder
from vocagnolm.model.nll import TokenScores
from vocagnolm.objective.head import IGNORE_INDEX
from vocagnolm.score.plan import TeacherSource
from vocagnolm.score.teacher import ScoreSettings, Teacher, TokenizedDocument
from vocagnolm.store import LossStore

Missing = Literal["error", "drop", "keep"]
_VERSION = 1  # of the columns, for the cache of `datasets`
_SHARED_TEXT = "vocagnolm_shared_text"
"""A column of conversations that are read already, as `shared_text` writes them."""


def guide(
    dataset: Any,
    teacher: LossStore | Teacher | str | Path,
    tokenizer: Any,
    *,
    text_field: str = "text",
    chat_template: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    train_on: TrainOn = "assistant",
    aggregation: Aggregation = "max",
    bos: str | None = "auto",
    eos: str | None = "auto",
    missing: Missing = "error",
    num_proc: int | None = None,
    batch_size: int = 256,
) -> Any:
    """Add columns for training with a teacher's guidance to a `datasets.Dataset` or
    `IterableDataset`.

    The columns have one entry per student token: `input_ids`, `labels` (-100 where nothing is
    trained on), `guidance` (the teacher's loss assigned to the token, NaN if there is none), and,
    if the teacher provides alternatives, `target_ids` and `target_p`. Collate them with
    `GuidedCollator` and train with `guided_loss`.

    dataset: rows with a text or a conversation (`messages`; `prompt` and `completion`; the fields
        of ShareGPT and Alpaca).
    teacher: a loss store (or its address) that contains exactly these documents; or a teacher that
        reads them now: a model folder, a hub id, or a `vocagnolm.score.Teacher`.
    tokenizer: the student's tokenizer from transformers, or anything that `load_tokenizer` accepts.
    chat_template: for conversations, as `student.chat_template` in a recipe; None: the tokenizer's.
    train_on: for conversations, which messages to train on.
    bos, eos: tokens around every text, as `data.bos` and `data.eos` in a recipe.
    missing: what to do with rows that have no guidance or cannot be read: raise an error, drop
        them, or keep those that can be read without guidance.
    num_proc: number of processes, with a store. A `Dataset` is cached as by its own `map`.
    """
    datasets = _datasets()
    first = next(iter(dataset), None)
    if first is None:
        return dataset
    row_format = "messages" if _SHARED_TEXT in first else format_of(first, text_field)
    if row_format is None:
        raise CorpusError(
            f"the dataset has the columns {', '.join(first)}, and neither the text "
            f"({text_field!r}; name it with text_field) nor a conversation among them."
        )
    student = load_tokenizer(tokenizer)
    if conversations := row_format != "text":
        student = ChatTokenizer(student, template_of(student, chat_template, template_options))
    known = _Known.of(teacher, conversations)
    if known.teacher is not None and (num_proc or 1) > 1:
        raise UsageError("num_proc needs a store: a teacher in memory reads in one process.")
    make = _Columns(
        known, student, row_format, text_field, train_on, aggregation, bos, eos, missing
    )
    options: dict[str, Any] = {"batched": True, "batch_size": batch_size}
    if dataset.features is not None:
        options["features"] = datasets.Features(dataset.features | make.features(datasets))
    if isinstance(dataset, datasets.Dataset):
        identity = [_VERSION, dataset._fingerprint, make.identity, batch_size]
        options["new_fingerprint"] = json_digest(identity)[:32]
        options |= {"num_proc": num_proc, "desc": f"Guidance of {known.name}"}
    found = dataset.map(make, **options)
    return found if missing == "error" else found.filter(_has_tokens)


def _has_tokens(row: Mapping[str, Any]) -> bool:
    return len(row["input_ids"]) > 0


def _datasets() -> Any:
    return optional("datasets", "data", "columns of a dataset")


@dataclass(frozen=True)
class _Known:
    """What a teacher says of texts: out of a store, or read now."""

    store: LossStore | None = None
    teacher: Any = None

    @classmethod
    def of(cls, teacher: Any, conversations: bool) -> "_Known":
        if isinstance(teacher, str | Path):
            path = Path(teacher)
            model = (path / "config.json").is_file() or path.suffix == ".gguf"
            if not model and (address_of(teacher) or path.exists()):
                return cls(store=LossStore.open(teacher))
            source = TeacherSource(str(teacher), conversations=conversations)
            teacher = source.open(ScoreSettings())
        if isinstance(teacher, LossStore):
            return cls(store=teacher)
        teacher.load()
        return cls(teacher=teacher)

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the numbers."""
        if self.store is None:
            return dict(self.teacher.describe())
        shards = [entry["sha256"] for entry in self.store.manifest["shards"]]
        return {**self.store.manifest["identity"], "shards": shards}

    @property
    def name(self) -> str:
        about = self.identity.get("teacher")
        return str(about.get("name", "unknown")) if isinstance(about, dict) else str(about)

    def read(self, texts: Sequence[str]) -> list["_Losses | None"]:
        """Per text the teacher's losses; None where it has none."""
        if self.store is None:
            return self._read_now(texts)
        rows = [self.store.find(document_hash(text)) for text in texts]
        return [None if at is None else self._stored(self.store, at) for at in rows]

    @staticmethod
    def _stored(store: LossStore, at: int) -> "_Losses":
        alternatives = store.kept_alternatives
        return _Losses(*store[at], None if alternatives is None else store.alternatives(at).packed)

    def _read_now(self, texts: Sequence[str]) -> list["_Losses | None"]:
        outcomes = self.teacher.tokenize(texts)
        documents = [one for one in outcomes if isinstance(one, TokenizedDocument)]
        start = getattr(self.teacher, "start", None)
        given = iter(self.teacher.nll(documents) if start is None else start(documents)())
        found: list[_Losses | None] = []
        for outcome in outcomes:
            if not isinstance(outcome, TokenizedDocument):
                found.append(None)
                continue
            scores = next(given)
            scores = TokenScores(scores) if isinstance(scores, np.ndarray) else scores
            token_bytes, known = outcome.stored(scores)
            nll = np.where(np.isfinite(known.nll), known.nll, np.nan)
            found.append(_Losses(token_bytes, nll, known.alternatives))
        return found


class _Losses(NamedTuple):
    """Of a document: what a `Batch` takes."""

    token_bytes: NDArray[Any]
    nll: NDArray[Any]
    alternatives: NDArray[np.uint32] | None


@dataclass(frozen=True)
class _Columns:
    """What `map` calls with a batch of rows; may be sent to its processes."""

    known: _Known
    tokenizer: TextTokenizer
    row_format: Format
    text_field: str
    train_on: TrainOn
    aggregation: Aggregation
    bos: str | None
    eos: str | None
    missing: Missing

    @property
    def identity(self) -> list[Any]:
        chat = isinstance(self.tokenizer, ChatTokenizer)
        template = self.tokenizer.template.fingerprint if chat else None  # type: ignore[attr-defined]
        named = [self.row_format, self.text_field, self.train_on, self.aggregation, self.missing]
        separators = separator_ids(self.tokenizer, self.bos, self.eos)
        return [self.known.identity, self.tokenizer.fingerprint, template, *named, separators]

    @cached_property
    def targets(self) -> TargetsPlan | None:
        known, (_, eos) = self.known, separator_ids(self.tokenizer, self.bos, self.eos)
        if known.store is not None:
            spec = known.store.kept_alternatives
            vocabulary = known.store.vocabulary if spec is not None else None
        else:
            spec = getattr(known.teacher, "alternatives", None)
            vocabulary = known.teacher.vocabulary() if spec is not None else None
        if spec is None or vocabulary is None:
            return None
        table = target_table(self.tokenizer, vocabulary, eos)
        return TargetsPlan(tables=(table,), spec=spec, inside=True, weights=(1.0,))

    @cached_property
    def types(self) -> dict[str, str]:
        """The columns, and the types of their numbers."""
        types = {"input_ids": "int32", "labels": "int32", "guidance": "float32"}
        if self.targets is not None:
            types |= {"target_ids": "int32", "target_p": "float32"}
        return types

    def features(self, datasets: Any) -> dict[str, Any]:
        numbers = {name: datasets.List(datasets.Value(kind)) for name, kind in self.types.items()}
        return {
            name: datasets.List(one) if name.startswith("target") else one
            for name, one in numbers.items()
        }

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        found = [self._text(row) for row in rows]
        texts = {n: text for n, text in enumerate(found) if isinstance(text, str)}
        tokens = dict(zip(texts, self._tokens([*texts.values()]), strict=True))
        losses = dict(zip(texts, self.known.read([*texts.values()]), strict=True))
        kept = []
        for n, text in enumerate(found):
            problem = tokens[n] if n in texts else str(text)
            if not isinstance(problem, str):
                if losses[n] is not None or self.missing == "keep":
                    kept.append(n)
                    continue
                problem = self._not_known(texts[n])
            if self.missing == "error":
                raise CorpusError(
                    f"A row cannot be guided: {problem}. Drop such rows with missing='drop'; "
                    f"missing='keep' also trains on those without guidance."
                )
        width = 0 if self.targets is None else self.targets.spec.count
        columns: dict[str, list[Any]] = {
            name: [np.zeros((0, width) if name.startswith("target") else 0, kind)] * len(rows)
            for name, kind in self.types.items()
        }
        if kept:
            made = self._made(
                [texts[n] for n in kept], [tokens[n] for n in kept], [losses[n] for n in kept]
            )
            for name, values in made.items():
                for n, value in zip(kept, values, strict=True):
                    columns[name][n] = value
        return columns

    def _text(self, row: Mapping[str, Any]) -> str | Refused:
        if _SHARED_TEXT in row:
            return str(row[_SHARED_TEXT])
        if self.row_format == "text":
            text = row[self.text_field]
            return text if isinstance(text, str) else Refused(f"it has no {self.text_field}")
        try:
            return shared_text(conversation_of(row, self.row_format))
        except Refused as error:
            return error

    def _tokens(self, texts: Sequence[str]) -> Sequence[TokenSpans | str]:
        """Or why not."""
        if isinstance(self.tokenizer, ChatTokenizer):
            return self.tokenizer.outcomes(texts)
        return self.tokenizer.spans_batch(texts)

    def _not_known(self, text: str) -> str:
        start = f"'{' '.join(text[:60].split())}...'"
        if self.known.store is None:
            return f"the teacher cannot read {start}"
        return (
            f"{self.known.store.path} does not hold {start}: it was not scored, was skipped, or "
            "has changed since"
        )

    def _made(
        self, texts: Sequence[str], students: Sequence[Any], losses: Sequence[_Losses | None]
    ) -> dict[str, list[NDArray[Any]]]:
        """As `vocagnolm prepare` makes them, cut into documents again."""
        chat = isinstance(self.tokenizer, ChatTokenizer)
        prefix, eos = separator_ids(self.tokenizer, self.bos, self.eos)
        others = [None if one is None else one.alternatives for one in losses]
        batch = Batch(
            indices=range(len(texts)),
            students=students,
            teachers=[[None if one is None else one[:2] for one in losses]],
            texts=[text.encode() for text in texts],
            trained=[trained_ranges(text, self.train_on) for text in texts] if chat else None,
            alternatives=None if self.targets is None else [others],
        )
        columns = pack_documents(
            [batch],
            id_dtype=np.uint32,
            prefix=prefix,
            eos=eos,
            guidance=GuidancePlan(aggregation=self.aggregation),
            keep_text=False,
            targets=self.targets,
        ).columns
        columns["input_ids"] = columns["labels"] = columns["ids"].astype(np.int32)
        if chat:
            columns["labels"] = np.where(columns["trained"], columns["labels"], IGNORE_INDEX)
        cuts = np.cumsum(columns["document_tokens"])[:-1]
        return {
            name: np.split(columns[name].astype(kind), cuts) for name, kind in self.types.items()
        }


# ---- a folder of columns ----


def export_columns(
    store: str | Path,
    student: str | Path,
    out: str | Path,
    corpus: Sequence[str | Path] = (),
    *,
    reading: Mapping[str, Any] | None = None,
    missing: Missing = "drop",
    **options: Any,
) -> Any:
    """Write the columns of `guide` for the documents of a store to a folder for
    `datasets.load_from_disk`, and return the dataset. `corpus`: the corpus that was scored;
    default: the files named in the store. `reading`: as in `open_corpus`; `options`: as in
    `guide`."""
    datasets, path, opened = _datasets(), local_path(out), LossStore.open(store)
    if path.exists():
        raise UsageError(f"{out} exists already; choose another folder for the columns.")
    path.parent.mkdir(parents=True, exist_ok=True)
    read = open_corpus(corpus or _beside(opened), **(reading or {}))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        rows = datasets.Dataset.from_generator(
            _rows, gen_kwargs={"corpus": read}, cache_dir=scratch
        )
        found = guide(rows, opened, student, missing=missing, **options)
        if not len(found):
            raise StoreError(
                f"{store} holds none of these documents. Give the corpus it was made from."
            )
        if lost := len(rows) - len(found):
            warnings.warn(
                f"{lost:,} of {len(rows):,} documents were skipped: {store} does not contain "
                f"them, or they cannot be read.",
                VocagnolmWarning,
                stacklevel=2,
            )
        found = found.remove_columns(rows.column_names)
        found.info.description = f"Guidance of {opened.teacher_name} for the tokens of {student}."
        with whole_folder(path) as folder:
            found.save_to_disk(folder)
    return datasets.load_from_disk(str(path))


def _rows(corpus: Corpus) -> Iterator[dict[str, Any]]:
    column = _SHARED_TEXT if corpus.conversations else "text"
    for document in corpus.read():
        if document.text is not None:
            yield {column: document.text}


def _beside(store: LossStore) -> list[Path]:
    """The files that a store was made from, where they stand beside it."""
    about = store.manifest["identity"].get("corpus")
    names = [source["name"] for source in about["sources"]] if isinstance(about, dict) else []
    found = [local_path(store.path).parent / name for name in names]
    if not found or not all(path.is_file() for path in found):
        named = ", ".join(names) or "does not say what"
        raise UsageError(
            f"{store.path} contains no text, and the corpus it was made from ({named}) was not "
            f"found. Pass it with --corpus FILES."
        )
    return found
