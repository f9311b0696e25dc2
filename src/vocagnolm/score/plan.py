"""*Plan*, the first of three verbs: what a store will be, made once.

The plan is written into the growing store, and every process that works on it may take it from
there: nobody counts and hashes the corpus again. A finished store has none.
"""

import base64
import contextlib
import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from vocagnolm import __version__
from vocagnolm.alignment.tokenizer import warn_of_missing_beginning
from vocagnolm.base.files import address_of, differences, json_bytes, read_json
from vocagnolm.base.ranks import Ranks
from vocagnolm.data.corpus import Corpus, RecordLayout, files_of_folder, open_corpus
from vocagnolm.data.sources import DatasetSource, JsonLines, ParquetRows, RemoteFile, TextFile
from vocagnolm.errors import CorpusError, ScoreError, StoreError, UsageError
from vocagnolm.jobs.cluster import Connection
from vocagnolm.model.load import ModelFiles, open_model
from vocagnolm.model.served import Server
from vocagnolm.recipe.sections import WriteSection
from vocagnolm.score.teacher import LocalTeacher, ScoreSettings, ServerTeacher, Teacher
from vocagnolm.storage import storage_of
from vocagnolm.storage.copies import version
from vocagnolm.store.format import encode_vocabulary
from vocagnolm.store.writer import StoreWriter, measured_apart, with_values_of

PLAN_FILE = "plan.json"
AnyPlan = TypeVar("AnyPlan")


@dataclass(frozen=True)
class TeacherSource:
    """Where a teacher comes from: what another process needs to open it."""

    source: str
    revision: str | None = None
    trust_remote_code: bool = False
    conversations: bool = False
    """It reads them in its template."""
    server: Server | None = None
    """That has the weights; `source` is then asked for the tokenizer alone."""

    def open(
        self, settings: ScoreSettings, *, patient: bool = False
    ) -> LocalTeacher | ServerTeacher:
        """Open the teacher; weights are loaded later. `patient` waits for a server that starts."""
        served, talks = self.server is not None, self.conversations
        here = replace(settings, device="cpu", dtype="auto") if served else settings
        files = self.find(here, weights=not served)
        if settings.bos == "auto" and not talks:
            warn_of_missing_beginning(files.tokenizer)
        if self.server is None:
            return LocalTeacher(files, settings, conversations=talks)
        return ServerTeacher(files, self.server, settings, patient=patient, conversations=talks)

    def find(self, settings: ScoreSettings | WriteSection, *, weights: bool = True) -> ModelFiles:
        return open_model(
            self.source,
            device=settings.device,
            dtype=settings.dtype,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            weights=weights,
        )

    def absolute(self) -> "TeacherSource":
        return replace(self, source=_absolute(self.source))


@dataclass(frozen=True)
class CorpusSource:
    """Where a corpus comes from and how it is read: the arguments of `open_corpus`."""

    paths: tuple[str, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, paths: str | Path | Sequence[str | Path], **options: Any) -> "CorpusSource":
        listed = [paths] if isinstance(paths, str | Path) else paths
        return cls(tuple(map(str, listed)), options)

    def open(self) -> Corpus:
        return open_corpus(self.paths, **self.options)

    def absolute(self) -> "CorpusSource":
        return replace(self, paths=tuple(map(_absolute, self.paths)))

    def is_still(self, corpus: Corpus) -> bool:
        """Whether opening it now would give this corpus, as far as names, sizes and dates of local
        files tell. Nothing can be told of a dataset of the hub, nor of a file behind an address."""
        if any(address_of(path) is not None for path in self.paths):
            return False
        files = {getattr(source, "path", None) for source in corpus.sources}
        folders = [Path(path) for path in self.paths if Path(path).is_dir()]
        return (
            None not in files
            and all(set(files_of_folder(folder)) <= files for folder in folders)
            and not corpus.changed_sources()
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides a store, and where it grows: no open files and no model."""

    out: str
    identity: dict[str, Any]
    corpus: Corpus
    settings: ScoreSettings
    teacher_source: TeacherSource | None = None
    """None: an object of the caller's, which other processes cannot open."""
    corpus_source: CorpusSource | None = None
    """None: a `Corpus` of the caller's."""
    vocabulary: bytes | None = None
    """The teacher's vocabulary as it is written, in the process that begins a store with
    alternatives."""
    version: str = __version__

    @property
    def shard_count(self) -> int:
        return -(-len(self.corpus) // self.settings.shard_documents)

    def documents_in(self, number: int) -> range:
        """The documents of a shard, by their numbers in the corpus."""
        first = number * self.settings.shard_documents
        return range(first, min(first + self.settings.shard_documents, len(self.corpus)))

    def writer(self, device: str | None = None) -> StoreWriter:
        return StoreWriter(self.out, self.identity, self.shard_count, device, self.vocabulary)

    def save(self) -> str | None:
        """Write the plan into the growing store, for processes that come later. Returns the digest
        of what was written; None where the corpus is an object of the caller's."""
        if self.corpus_source is None:
            return None
        return save_plan(self.out, replace(self.absolute(), vocabulary=None))

    def absolute(self) -> "Plan":
        """The plan for processes that stand in another folder."""
        return replace(
            self,
            out=self.out if address_of(self.out) else str(Path(self.out).absolute()),
            corpus_source=self.corpus_source and self.corpus_source.absolute(),
            teacher_source=self.teacher_source and self.teacher_source.absolute(),
        )

    def on_this_machine(self) -> "tuple[Plan, LocalTeacher | ServerTeacher]":
        """The plan with the corpus as it is here, since a machine may have its own copy, and the
        teacher, which must be the one of the plan."""
        assert self.corpus_source is not None and self.teacher_source is not None
        corpus = _as_here(self.corpus, self.corpus_source.open, "this machine")
        teacher = self.teacher_source.open(self.settings, patient=True)
        here = store_identity(describe(teacher, self.settings), corpus)
        for name, planned, found in differences(self.identity, with_values_of(self.identity, here)):
            is_here = measured_apart(name, planned, found) or repr(found)[:80]
            raise ScoreError(
                f"{name} is {is_here} on this machine, the "
                f"plan has {planned!r:.80}. Give all machines the same teacher, corpus, packages."
            )
        return replace(self, corpus=corpus), teacher


@dataclass(frozen=True)
class Description:
    """A teacher on the machine where it works."""

    teacher: dict[str, Any]
    """The teacher's own description."""
    software: dict[str, str]
    settings: Any
    """`ScoreSettings` or `WriteSettings` with everything chosen: another machine chooses
    nothing."""
    vocabulary: bytes | None = None
    """The file that goes into a store with alternatives."""
    device_name: str | None = None
    """The GPU, where it is known and there is one."""


def describe(teacher: Teacher, settings: ScoreSettings) -> Description:
    packages = getattr(teacher, "packages", ("tokenizers", "torch", "transformers"))
    software = {name: version(name) for name in packages}
    chosen = getattr(teacher, "settings", settings)
    about, vocabulary = teacher.describe(), None
    if settings.kept_alternatives is not None:
        if "alternatives" not in about:
            raise UsageError(
                "--alternatives: this teacher provides only losses. Remove the option."
            )
        vocabulary = encode_vocabulary(teacher.vocabulary())  # type: ignore[attr-defined]
    device_name = getattr(teacher, "device_name", None)
    return Description(about, software, chosen, vocabulary, device_name)


def describe_on(
    cluster: Connection, describing: Callable[[], Description], *, anywhere: bool
) -> Description:
    """The teacher as the workers of a cluster will have it: a driver without a GPU asks a node that
    has one. `anywhere`: it is the same on every machine."""
    if anywhere or torch.cuda.is_available() or not cluster.room({"GPU": 1})[0]:
        return describing()
    description: Description = cluster.ask(describing, {"GPU": 1})
    return description


def describe_source(source: TeacherSource, settings: ScoreSettings) -> Description:
    return describe(source.open(settings), settings)


def store_identity(about: Description, corpus: Corpus) -> dict[str, Any]:
    """Everything that decides the bytes of a store."""
    return {
        **about.teacher,
        "corpus": corpus.describe(),
        "shard_documents": about.settings.shard_documents,
        "software": about.software,
    }


def make_plan(about: Description, corpus: Corpus, out: str, **sources: Any) -> Plan:
    """`sources`: `teacher_source` and `corpus_source`, where other processes can open them."""
    return Plan(
        out=out,
        identity=store_identity(about, corpus),
        corpus=corpus,
        settings=about.settings,
        vocabulary=about.vocabulary,
        **sources,
    )


def save_plan(out: str, plan: Any) -> str:
    """Write a plan into the folder that grows, and return the digest of what was written."""
    content = json_bytes(_encoded(plan), indent=None, sealed=True)
    storage_of(out).put(PLAN_FILE, content)
    return hashlib.sha256(content).hexdigest()


def load_plan(out: str | Path, digest: str | None = None, kind: type[AnyPlan] = Plan) -> AnyPlan:  # type: ignore[assignment]
    """The plan of a growing folder; with `digest` only the very plan that was saved."""
    storage = storage_of(out)
    path = storage.shown(PLAN_FILE)
    try:
        content = bytes(storage.read(PLAN_FILE))
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror or error}. Every machine must see the store "
            f"under this name."
        ) from None
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise StoreError(f"{path} is not the plan of this run: another run has taken the store.")
    try:
        plan = _decoded(read_json(path, StoreError, "", read=lambda: content))
    except Exception as error:  # damaged bytes can raise anything
        raise StoreError(f"{path} cannot be read: {error}. Run the command again.") from None
    if not isinstance(plan, kind) or getattr(plan, "version", None) != __version__:
        raise StoreError(f"{path} was written by another version of vocagnolm.")
    return plan


def may_be_planned(*kinds: type) -> None:
    """Allow objects of these classes in plans."""
    _KINDS.update({kind.__name__: kind for kind in kinds})


# What a plan may hold, besides numbers, texts, lists and mappings.
_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Plan, TeacherSource, CorpusSource, ScoreSettings, Server),
        *(Corpus, RecordLayout, JsonLines, ParquetRows, TextFile, DatasetSource, RemoteFile),
    )
}


def _encoded(value: Any) -> Any:
    """A value in JSON: what JSON does not know becomes a mapping whose first key names the kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encoded(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": _encoded([*value])}
    if isinstance(value, Mapping):
        return {"mapping": _encoded([[*pair] for pair in value.items()])}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, array):
        return {"array": value.typecode, "base64": base64.b64encode(value.tobytes()).decode()}
    state = value.__getstate__()
    return {type(value).__name__: {name: _encoded(one) for name, one in state.items()}}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    name, content = next(iter(value.items()))
    if name in ("tuple", "mapping"):
        return (tuple if name == "tuple" else dict)(_decoded(content))
    if name == "path":
        return Path(content)
    if name == "array":
        return array(content, base64.b64decode(value["base64"]))
    made: Any = object.__new__(_KINDS[name])
    state = {key: _decoded(one) for key, one in content.items()}
    getattr(made, "__setstate__", vars(made).update)(state)
    return made


def planned_corpus(out: str | Path, source: CorpusSource) -> Corpus:
    """The corpus, not counted and hashed again where a plan is there and no file has changed."""
    with contextlib.suppress(StoreError, CorpusError):
        plan: Plan = load_plan(out)
        if plan.corpus_source == source.absolute() and source.is_still(plan.corpus):
            return plan.corpus
    return source.open()


def shared_corpus(opened: Callable[[], Corpus], ranks: Ranks) -> Corpus:
    """The corpus, counted and hashed by the leading process alone."""
    corpus: Corpus = ranks.decide(opened)
    return corpus if ranks.leads else _as_here(corpus, opened, f"process {ranks.rank}")


def _as_here(corpus: Corpus, opened: Callable[[], Corpus], here: str) -> Corpus:
    """A process reads its own files where they are others, or were copied at another time."""
    if not corpus.changed_sources():
        return corpus
    own = opened()
    if own.fingerprint != corpus.fingerprint:
        raise CorpusError(
            f"the corpus of {here} is not that of the plan (fingerprints {own.fingerprint[:12]} "
            f"and {corpus.fingerprint[:12]}). Give all machines the same files."
        )
    return own


def _absolute(path: str) -> str:
    """What is not here may be a name of the hub."""
    return str(Path(path).absolute()) if Path(path).exists() else path
