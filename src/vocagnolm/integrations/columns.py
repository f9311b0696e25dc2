"""A teacher's guidance as dataset columns, for any trainer. `guide` adds them to a `datasets`
dataset; `export_columns` writes them to a folder for training without this package."""

import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import TextTokenizer, TokenSpans, load_tokenizer
from vocagnolm.alignment.alignment import Aggregation
from vocagnolm.base.files import address_of, json_digest, local_path, whole_folder
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
from vocagnolm.data.corpus import Corpus, document_hash, open_corpus, split_text
from vocagnolm.data.guidance import GuidancePlan, TargetsPlan, target_table
from vocagnolm.data.materials import separator_ids
from vocagnolm.data.packing import Batch, pack_documents
from vocagnolm.errors import (
    CorpusError,
    ModelError,
    StoreError,
    TokenizerError,
    UsageError,
    VocagnolmWarning,
    first_line,
    optional,
)
from vocagnolm.model.nll import TokenScores
from vocagnolm.objective.head import IGNORE_INDEX
from vocagnolm.score.plan import TeacherSource
from vocagnolm.score.teacher import ScoreSettings, Teacher, TokenizedDocument
from vocagnolm.storage import storage_of
from vocagnolm.store import LossStore

Missing = Literal["error", "drop", "keep"]
_VERSION = 2  # of the columns, for the cache of `datasets`
_SHARED_TEXT = "vocagnolm_shared_text"
"""A column of conversations that are read already, as `shared_text` writes them."""
_STATE = "state.json"
"""The file without which `datasets` does not take a folder for a dataset."""


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
    alternatives: int | str = 0,
    num_proc: int | None = None,
    batch_size: int = 256,
) -> Any:
    """Add columns for training with a teacher's guidance to a dataset.

    The columns have one entry per student token: `input_ids`, `labels` (-100 where nothing is
    trained on), `guidance` (the teacher's loss assigned to the token, NaN if there is none), and,
    if the teacher provides alternatives, `target_ids` and `target_p`. `GuidedCollator` makes
    batches of them; `GuidedTrainer`, `GuidedTrainerMixin` and `guided_loss` train with them.

    dataset: a `datasets.Dataset` or `IterableDataset`, a dictionary of them, or a list of rows.
        Rows have a text or a conversation (`messages`; `prompt` and `completion`; the fields of
        ShareGPT and Alpaca). Rows that have `input_ids` keep them, and their `labels`.
    teacher: a loss store (or its address) that contains exactly these documents; or a teacher that
        reads them now: a model folder, a hub id, or a `vocagnolm.score.Teacher`.
    tokenizer: the student's tokenizer from transformers, or anything that `load_tokenizer` accepts.
    chat_template: for conversations, as `student.chat_template` in a recipe; None: the tokenizer's.
    train_on: for conversations, which messages to train on.
    bos, eos: tokens around every text, as `data.bos` and `data.eos` in a recipe.
    missing: what to do with rows that have no guidance or cannot be read: raise an error, drop
        them, or keep those that can be read without guidance.
    alternatives: a model that reads now also gives this many alternatives per token, for distill.
    num_proc: number of processes, with a store. A `Dataset` is cached as by its own `map`.
    """
    datasets = _datasets()
    again = partial(
        guide,
        text_field=text_field,
        chat_template=chat_template,
        template_options=template_options,
        train_on=train_on,
        aggregation=aggregation,
        bos=bos,
        eos=eos,
        missing=missing,
        alternatives=alternatives,
        num_proc=num_proc,
        batch_size=batch_size,
    )
    if isinstance(dataset, Mapping):  # a DatasetDict: the teacher is opened once
        opened: Any = teacher
        kind: Any = type(dataset)
        splits = {}
        for name, split in dataset.items():
            if isinstance(opened, str | Path) and (row := next(iter(split), None)) is not None:
                opened = _Known.of(opened, _format_of(row, text_field) != "text", alternatives)
            splits[name] = again(split, opened, tokenizer)
        return kind(splits)
    if isinstance(dataset, Sequence):
        dataset = datasets.Dataset.from_list([*dataset])
    first = next(iter(dataset), None)
    if first is None:
        return dataset
    row_format = _format_of(first, text_field)
    student = load_tokenizer(tokenizer)
    if conversations := row_format != "text":
        student = ChatTokenizer(student, template_of(student, chat_template, template_options))
    known = _Known.of(teacher, conversations, alternatives)
    if (num_proc or 1) > 1:
        if known.store is None:
            raise UsageError("num_proc needs a store: a teacher in memory reads in one process.")
        known.store.fetch()  # forked processes cannot use a connection to a bucket
    keeps_ids = "input_ids" in first
    make = _Columns(
        known,
        student,
        row_format,
        text_field,
        train_on,
        aggregation,
        bos,
        eos,
        missing,
        keeps_ids=keeps_ids,
        keeps_labels=keeps_ids and "labels" in first,
    )
    options: dict[str, Any] = {"batched": True, "batch_size": batch_size}
    if dataset.features is not None:
        options["features"] = datasets.Features(dataset.features | make.features(datasets))
    if isinstance(dataset, datasets.Dataset):
        identity = [_VERSION, dataset._fingerprint, make.identity, batch_size]
        options["new_fingerprint"] = json_digest(identity)[:32]
        options |= {"num_proc": num_proc, "desc": f"Guidance of {known.name}"}
    guided = dataset.map(make, **options)
    return guided if missing == "error" else guided.filter(_has_tokens)


def _format_of(row: Mapping[str, Any], text_field: str) -> Format:
    """The format of a dataset's rows, from the first of them."""
    row_format = "messages" if _SHARED_TEXT in row else format_of(row, text_field)
    if row_format is None and "input_ids" in row:  # a text that only its tokens tell
        return "text"
    if row_format is None:
        raise CorpusError(
            f"the dataset has the columns {', '.join(row)}, and neither the text "
            f"({text_field!r}; name it with text_field) nor a conversation among them."
        )
    return row_format


def _has_tokens(row: Mapping[str, Any]) -> bool:
    return len(row["input_ids"]) > 0


def _datasets() -> Any:
    return optional("datasets", "data", "columns of a dataset")


@dataclass(frozen=True)
class _Known:
    """A source of losses for texts: a store, or a teacher that reads them now."""

    store: LossStore | None = None
    teacher: Any = None

    @classmethod
    def of(cls, teacher: Any, conversations: bool, alternatives: int | str = 0) -> "_Known":
        if isinstance(teacher, _Known):
            return teacher
        if isinstance(teacher, str | Path):
            path = Path(teacher)
            model = (path / "config.json").is_file() or path.suffix == ".gguf"
            if not model and (address_of(teacher) or path.exists()):
                return cls(store=LossStore.open(teacher))
            source = TeacherSource(str(teacher), conversations=conversations)
            try:
                teacher = source.open(ScoreSettings(alternatives=alternatives))
            except (ModelError, TokenizerError) as error:
                if path.exists():
                    raise
                raise UsageError(
                    f"{path} does not exist, neither as a loss store nor as a model, and the hub "
                    f"has no such model ({first_line(error)[:120]}). Give the folder or address "
                    "that `vocagnolm score --out` has written, or a model."
                ) from None
        if isinstance(teacher, LossStore):
            return cls(store=teacher)
        teacher.load()
        return cls(teacher=teacher)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the numbers."""
        if self.store is None:
            return dict(self.teacher.describe())
        shards = [entry["sha256"] for entry in self.store.manifest["shards"]]
        return {**self.store.manifest["identity"], "shards": shards}

    @property
    def name(self) -> str:
        about = self.identity.get("teacher")
        return str(about.get("name", "unknown")) if isinstance(about, dict) else str(about)

    def read(self, texts: Sequence[str]) -> list["_Losses | None"]:
        """The teacher's losses on each text; None where it has none."""
        if self.store is None:
            return self._read_now(texts)
        return [self._stored(self.store, text) for text in texts]

    @staticmethod
    def _stored(store: LossStore, text: str) -> "_Losses | None":
        """What a store has of a text, or of the documents that a long text was split into."""
        rows = [store.find(document_hash(text))]
        if rows[0] is None and len(pieces := split_text(text)) > 1:
            rows = [store.find(document_hash(piece)) for piece in pieces]
        known = [at for at in rows if at is not None]
        if len(known) < len(rows):
            return None
        held = [store[at] for at in known]
        token_bytes, nll = (np.concatenate(columns) for columns in zip(*held, strict=True))
        alternatives = None
        if store.kept_alternatives is not None:
            alternatives = np.concatenate([store.alternatives(at).packed for at in known])
        return _Losses(token_bytes, nll, alternatives)

    def _read_now(self, texts: Sequence[str]) -> list["_Losses | None"]:
        outcomes = self.teacher.tokenize(texts)
        documents = [outcome for outcome in outcomes if isinstance(outcome, TokenizedDocument)]
        start = getattr(self.teacher, "start", None)
        given = iter(self.teacher.nll(documents) if start is None else start(documents)())
        losses: list[_Losses | None] = []
        for outcome in outcomes:
            if not isinstance(outcome, TokenizedDocument):
                losses.append(None)
                continue
            scores = next(given)
            scores = TokenScores(scores) if isinstance(scores, np.ndarray) else scores
            token_bytes, known = outcome.stored(scores)
            nll = np.where(np.isfinite(known.nll), known.nll, np.nan)
            losses.append(_Losses(token_bytes, nll, known.alternatives))
        return losses


class _Losses(NamedTuple):
    """A teacher's losses on one document, as a `Batch` takes them."""

    token_bytes: NDArray[Any]
    nll: NDArray[Any]
    alternatives: NDArray[np.uint32] | None


@dataclass(frozen=True)
class _Columns:
    """The function that `map` calls with a batch of rows; it may be sent to `map`'s processes."""

    known: _Known
    tokenizer: TextTokenizer
    row_format: Format
    text_field: str
    train_on: TrainOn
    aggregation: Aggregation
    bos: str | None
    eos: str | None
    missing: Missing
    keeps_ids: bool = False
    """Rows have tokens already."""
    keeps_labels: bool = False

    @property
    def identity(self) -> list[Any]:
        """Everything that decides the columns beside the rows."""
        chat = isinstance(self.tokenizer, ChatTokenizer)
        template = self.tokenizer.template.fingerprint if chat else None  # type: ignore[attr-defined]
        named = [self.row_format, self.text_field, self.train_on, self.aggregation, self.missing]
        separators = separator_ids(self.tokenizer, self.bos, self.eos)
        kept = [self.keeps_ids, self.keeps_labels]
        return [
            *(self.known.identity, self.tokenizer.fingerprint, template),
            *(*named, separators, *kept),
        ]

    @cached_property
    def targets(self) -> TargetsPlan | None:
        """The plan by which alternatives become targets; None if the teacher has none."""
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
        """The names of the columns, and the types of their numbers."""
        types = {"input_ids": "int32", "labels": "int32", "guidance": "float32"}
        if self.targets is not None:
            types |= {"target_ids": "int32", "target_p": "float32"}
        return types

    def features(self, datasets: Any) -> dict[str, Any]:
        """The columns as `datasets` describes them."""
        numbers = {name: datasets.List(datasets.Value(kind)) for name, kind in self.types.items()}
        return {
            name: datasets.List(numbers[name]) if name.startswith("target") else numbers[name]
            for name in numbers
        }

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        read = [self._text(row) for row in rows]
        texts = {n: text for n, text in enumerate(read) if isinstance(text, str)}
        tokenized = self._tokens([rows[n] for n in texts], [*texts.values()])
        tokens = dict(zip(texts, tokenized, strict=True))
        losses = dict(zip(texts, self.known.read([*texts.values()]), strict=True))
        kept = []
        for n, text in enumerate(read):
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
            if self.keeps_labels:
                made["labels"] = [np.asarray(rows[n]["labels"], np.int32) for n in kept]
            for name, values in made.items():
                for n, value in zip(kept, values, strict=True):
                    columns[name][n] = value
        return columns

    def _text(self, row: Mapping[str, Any]) -> str | Refused:
        """The text of a row, as the teacher has read it, or why there is none."""
        if _SHARED_TEXT in row:
            return str(row[_SHARED_TEXT])
        if self.row_format == "text":
            text = row.get(self.text_field)
            if text is None and self.keeps_ids:
                return self._spelled(row["input_ids"]).decode(errors="replace")
            return text if isinstance(text, str) else Refused(f"it has no {self.text_field}")
        try:
            return shared_text(conversation_of(row, self.row_format))
        except Refused as error:
            return error

    def _tokens(
        self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]
    ) -> Sequence[TokenSpans | str]:
        """The tokens of each text, or why it has none."""
        if isinstance(self.tokenizer, ChatTokenizer):
            outcomes = self.tokenizer.outcomes(texts)
            if not self.keeps_ids:
                return outcomes
            return [
                _cut_to(outcome, row["input_ids"])
                for row, outcome in zip(rows, outcomes, strict=True)
            ]
        if self.keeps_ids:
            given = zip(rows, texts, strict=True)
            return [self._given(row["input_ids"], text) for row, text in given]
        return self.tokenizer.spans_batch(texts)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, as SentencePiece does."""
        ids = self.tokenizer.spans("a").ids
        return bool(len(ids)) and (self.tokenizer.bytes_of(int(ids[0])) or b"").startswith(b" ")

    def _pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token, without the space that the tokenizer puts before a text."""
        known = self.tokenizer.control_ids
        pieces = [b"" if n in known else self.tokenizer.bytes_of(n) or b"" for n in ids]
        first = next((n for n, piece in enumerate(pieces) if piece), None)
        if first is not None and self._adds_space:
            pieces[first] = pieces[first].removeprefix(b" ")
        return pieces

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._pieces(ids))

    def _given(self, ids: Sequence[int], text: str) -> TokenSpans | str:
        """A row's own tokens with their places in its text, or why they have none. They may end
        before the text does."""
        pieces, content = self._pieces(ids), text.encode()
        if not content.startswith(spelled := b"".join(pieces)):
            return f"its input_ids do not spell its text: {spelled[:40]!r} for {content[:40]!r}"
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        spans = np.stack([np.append(0, ends[:-1]), ends], axis=1)
        return TokenSpans(np.array(ids, np.int32), spans, len(content), len(content) - len(spelled))

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
        """The columns of documents: made as `vocagnolm prepare` makes them, and cut into documents
        again."""
        chat = isinstance(self.tokenizer, ChatTokenizer)
        prefix, eos = separator_ids(self.tokenizer, self.bos, self.eos)
        if self.keeps_ids:  # which hold them already
            prefix, eos = (), None
        others = [None if known is None else known.alternatives for known in losses]
        batch = Batch(
            indices=range(len(texts)),
            students=students,
            teachers=[[None if known is None else known[:2] for known in losses]],
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


def _cut_to(outcome: TokenSpans | str, ids: Sequence[int]) -> TokenSpans | str:
    """A conversation's tokens, as many as its row has; they must be the template's."""
    if isinstance(outcome, str):
        return outcome
    count = len(ids)
    if count > len(outcome) or not np.array_equal(outcome.ids[:count], ids):
        return "its input_ids are not those of the chat template (chat_template)"
    return replace(outcome, ids=outcome.ids[:count], spans=outcome.spans[:count])


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
    `datasets.load_from_disk`, and return the dataset. Store, corpus and folder may be in buckets.

    corpus: the corpus that was scored; default: the files named in the store, beside it.
    reading: options of `open_corpus`; options: those of `guide`, with `num_proc`.
    """
    datasets, opened = _datasets(), LossStore.open(store)
    remote = address_of(out) is not None
    if storage_of(out).files() if remote else local_path(out).exists():
        raise UsageError(f"{out} exists already; choose another folder for the columns.")
    parent = None if remote else local_path(out).parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    read = open_corpus(corpus or _beside(opened), **(reading or {}))
    name = Path(str(out)).name
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}-") as scratch:
        rows = datasets.Dataset.from_generator(
            _rows, gen_kwargs={"corpus": read}, cache_dir=scratch
        )
        guided = guide(rows, opened, student, missing=missing, **options)
        if not len(guided):
            raise StoreError(
                f"{store} holds none of these documents. Give the corpus it was made from."
            )
        if lost := len(rows) - len(guided):
            warnings.warn(
                f"{lost:,} of {len(rows):,} documents were skipped: {store} does not contain "
                f"them, or they cannot be read.",
                VocagnolmWarning,
                stacklevel=2,
            )
        guided = guided.remove_columns(rows.column_names)
        guided.info.description = f"Guidance of {opened.teacher_name} for the tokens of {student}."
        if not remote:
            with whole_folder(local_path(out)) as folder:
                guided.save_to_disk(folder)
            return datasets.load_from_disk(str(local_path(out)))
        guided.save_to_disk(Path(scratch, "columns"))
        _send(Path(scratch, "columns"), out)
        return guided


def _send(folder: Path, address: str | Path) -> None:
    """Copy a dataset's files to an address; the one without which it is no dataset comes last."""
    storage = storage_of(address)
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == _STATE, path.name)):
        storage.put(path.name, path.read_bytes())


def _rows(corpus: Corpus) -> Iterator[dict[str, Any]]:
    column = _SHARED_TEXT if corpus.conversations else "text"
    for document in corpus.read():
        if document.text is not None:
            yield {column: document.text}


def _beside(store: LossStore) -> list[str | Path]:
    """The files that a store was made from, where they stand beside it."""
    about = store.manifest["identity"].get("corpus")
    names = [source["name"] for source in about["sources"]] if isinstance(about, dict) else []
    if names and (address := address_of(store.path)) is not None:
        return [f"{address.rstrip('/').rpartition('/')[0]}/{name}" for name in names]
    files = [local_path(store.path).parent / name for name in names]
    if not files or not all(path.is_file() for path in files):
        named = ", ".join(names) or "does not say what"
        raise UsageError(
            f"{store.path} contains no text, and the corpus it was made from ({named}) was not "
            f"found. Pass it with --corpus FILES."
        )
    return [*files]
