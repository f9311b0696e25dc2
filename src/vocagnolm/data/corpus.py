"""Documents from files, folders and datasets, each with its place for error reports.

A corpus is a numbered sequence of documents. What counts as a document is decided by the files
alone (a line that is not blank, a row, a text file), never by whether it can be used: a broken line
keeps its number, so that numbers, shards and fingerprints do not move when a reader grows wiser.

A text of more than `LONGEST_TEXT` bytes is split at line ends into several documents. A
conversation is always one.
"""

import bisect
import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from vocagnolm.base.files import address_of, local_path, parse_json
from vocagnolm.chat.messages import Format, Refused, conversation_of, format_of, shared_text
from vocagnolm.data.sources import (
    LONGEST_TEXT,
    DatasetSource,
    JsonLines,
    ParquetRows,
    Problem,
    Record,
    Source,
    Split,
    TextFile,
    remote_files,
)
from vocagnolm.errors import CorpusError
from vocagnolm.recipe.sections import CorpusSection
from vocagnolm.store.format import (
    DATA_FOLDER,
    FORMAT_NAME,
    MANIFEST_FILE,
    PARTIAL_MANIFEST_FILE,
    count_reasons,
    document_files,
)

TEXT_SUFFIXES = (".txt", ".text", ".md", ".tex")
MAX_DOCUMENT_BYTES = 16 * 2**20


NOT_RIGHT = "not right: the answer is not marked as right"
Answers = Literal["all", "right"]


def document_hash(text: str) -> bytes:
    """First 16 bytes of the SHA-256 of the text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).digest()[:16]


@dataclass(frozen=True)
class Document:
    """One document of a corpus. Either `text` or `problem` is set; the text of a conversation is
    its shared text (`vocagnolm.chat`)."""

    index: int
    """Number in the corpus, from 0."""
    place: str
    """Where it stands: `file.jsonl:12`, `file.parquet[3]`, `file.txt`."""
    text: str | None
    problem: str | None = None
    """Why it cannot be used."""
    record: int = -1
    """Number of its record in the corpus, which is its own unless texts were split; -1 for a
    document that no corpus has read."""
    parts: int = 1
    """How many documents the text of its record is."""


class RecordLayout:
    """Which documents the records of a source are: one each, but for those that are split."""

    def __init__(self, records: int, parts: Mapping[int, int]):
        """`parts`: the number of documents of the records that are split, in order."""
        self.records, self.parts = records, parts
        self._split = list(parts)
        self._more = [0, *itertools.accumulate(count - 1 for count in parts.values())]

    def __len__(self) -> int:
        return self.records + self._more[-1]

    def first_document(self, record: int) -> int:
        return record + self._more[bisect.bisect_left(self._split, record)]

    def record_of(self, document: int) -> int:
        at = bisect.bisect_right(self._split, document, key=self.first_document)
        return max(self._split[at - 1], document - self._more[at]) if at else document


def split_text(text: str) -> list[str]:
    """The documents that a text becomes: itself, or pieces of at most `LONGEST_TEXT` bytes, which
    end with lines; where a line is longer, before a space, or else between two characters."""
    if len(text) <= LONGEST_TEXT // 4:
        return [text]
    content, start, pieces = text.encode(), 0, []
    while len(content) - start > LONGEST_TEXT:
        end = start + LONGEST_TEXT
        cut = content.rfind(b"\n", start, end) + 1 or content.rfind(b" ", start + 1, end)
        if cut <= start:
            cut = end
            while content[cut] & 0xC0 == 0x80:
                cut -= 1
        pieces.append(content[start:cut].decode())
        start = cut
    return [*pieces, content[start:].decode()]


class Corpus:
    """An ordered set of sources read as one sequence of documents. May be sent to other processes:
    counts, places to seek to and checksums go with it, open files do not."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        text_field: str = "text",
        format: Format = "auto",
        split: Split = "none",
        limit: int | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        answers: Answers = "all",
    ):
        """`answers`: right leaves out records whose field `right` is not true."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        self.sources = tuple(sources)
        self.text_field = text_field
        self.split = split
        self.limit = limit
        self.max_document_bytes = max_document_bytes
        self.answers = answers
        # One pass over the bytes: counts records, remembers where to seek, takes the checksum.
        self._record_starts = [0, *itertools.accumulate(len(source) for source in self.sources)]
        self._formats = self._source_formats(format)
        self._layouts = [
            RecordLayout(len(s), self._parts_of(n)) for n, s in enumerate(self.sources)
        ]
        self._starts = [0, *itertools.accumulate(map(len, self._layouts))]

    @property
    def conversations(self) -> bool:
        """Whether the documents are conversations, and their texts shared texts."""
        return bool(self._formats) and self._formats[0] != "text"

    def __len__(self) -> int:
        total = self._starts[-1]
        return total if self.limit is None else min(total, self.limit)

    def describe(self) -> dict[str, Any]:
        """Identity of the corpus: what a store remembers and compares. Names are kept without
        their folders, so that a corpus may move."""
        about: dict[str, Any] = {
            "documents": len(self),
            "text_field": self.text_field,
            "limit_documents": self.limit,
            "max_document_bytes": self.max_document_bytes,
            "sources": [
                {"name": s.name, "documents": len(layout), "sha256": s.fingerprint}
                for s, layout in zip(self.sources, self._layouts, strict=True)
            ],
        }
        if self.split != "none":  # written only where it is used: older stores stay the same
            about["split"] = self.split
        if self.conversations:
            about["format"] = sorted(set(self._formats))
        if self.split_texts:
            about["split_texts"] = self.split_texts
        return {"fingerprint": fingerprint_of(about), **about}

    @property
    def fingerprint(self) -> str:
        return str(self.describe()["fingerprint"])

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Document]:
        """Documents `start..stop`, without reading what lies before them where files can seek."""
        stop = len(self) if stop is None else min(stop, len(self))
        if start >= stop:
            return
        first, last = self.record_of(start), self.record_of(stop - 1)
        for number, offset, record in self._records(first, last):
            index = self._starts[number] + self._layouts[number].first_document(offset)
            for document in self._documents(index, offset, record, number):
                if start <= document.index < stop:
                    yield document

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Record]]:
        """Records `start..stop` as they stand in their files, each with its number."""
        stop = self._record_starts[-1] if stop is None else min(stop, self._record_starts[-1])
        stop = stop if self.limit is None else min(stop, self.limit)
        for number, offset, record in self._records(start, stop - 1):
            yield self._record_starts[number] + offset, record

    def _records(self, first: int, last: int) -> Iterator[tuple[int, int, Record]]:
        """Records from the first to the last, each behind the number of its source and its own
        number there."""
        for number, source in enumerate(self.sources):
            begin = max(first - self._record_starts[number], 0)
            end = min(last + 1 - self._record_starts[number], len(source))
            if begin < end:
                for offset, record in zip(range(begin, end), source.read(begin, end), strict=True):
                    yield number, offset, record

    def record_of(self, index: int) -> int:
        """The number of a document's record."""
        number = bisect.bisect_right(self._starts, index) - 1
        offset = self._layouts[number].record_of(index - self._starts[number])
        return self._record_starts[number] + offset

    @property
    def split_texts(self) -> int:
        """How many texts were split into several documents, since they are long."""
        return sum(len(layout.parts) for layout in self._layouts)

    def __iter__(self) -> Iterator[Document]:
        return self.read()

    def field(self, record_number: int) -> Any:
        """What `text_field` holds in a record, text or not; None where there is no such field."""
        ((_, _, record),) = self._records(record_number, record_number)
        return record.value.get(self.text_field) if isinstance(record.value, dict) else None

    def require_unchanged(self) -> None:
        """Refuse files that are not those which were counted and hashed when the corpus was
        opened."""
        if changed := self.changed_sources():
            raise _changed(changed[0])

    def changed_sources(self) -> list[str]:
        """Sources that are not, on this machine, the files that were counted and hashed."""
        return [source.name for source in self.sources if source.changed()]

    def _documents(
        self, index: int, offset: int, record: Record, number: int
    ) -> Iterator[Document]:
        """The documents of a record of a source, of which the first has this index."""
        place, text = record.place, self._text_of(record, number)
        own = self._record_starts[number] + offset
        pieces: list[Any] = [text] if isinstance(text, Problem) else self._pieces(text, number)
        if len(pieces) != self._layouts[number].parts.get(offset, 1):
            raise _changed(self.sources[number].name)
        for part, piece in enumerate(pieces):
            problem = self._problem_of(piece) if isinstance(piece, str) else piece
            where = place
            if len(pieces) > 1:
                between = ", " if ":" in place or "[" in place else ": "
                where = f"{place}{between}part {part + 1} of {len(pieces)}"
            usable, reason = (piece, None) if problem is None else (None, problem.reason)
            yield Document(index + part, where, usable, reason, record=own, parts=len(pieces))

    def _text_of(self, record: Record, number: int) -> str | Problem:
        """The whole text of a record, or why it has none."""
        value: Any = record.value
        format = self._formats[number]
        if self.answers == "right" and not isinstance(value, Problem) and not _is_right(value):
            return Problem(NOT_RIGHT)
        if format != "text" and not isinstance(value, Problem):
            value = _conversation(value, format, not isinstance(self.sources[number], JsonLines))
        elif isinstance(value, dict):
            value = value.get(self.text_field, Problem(f"no field {self.text_field!r}"))
        if isinstance(value, str | Problem):
            return value
        return Problem(f"field {self.text_field!r} holds {type(value).__name__}, not text")

    def _pieces(self, text: str, number: int) -> list[str]:
        """The documents that a text of a source is."""
        try:
            return split_text(text) if self._formats[number] == "text" else [text]
        except UnicodeEncodeError:  # a lone surrogate: it cannot be used as it is
            return [text]

    def _parts_of(self, number: int) -> dict[int, int]:
        """The number of documents of the records of a source that are split."""
        if self._formats[number] != "text":
            return {}
        counts: dict[int, int] = {}
        source = self.sources[number]
        for offset in source.long_records:
            (record,) = source.read(offset, offset + 1)
            text = self._text_of(record, number)
            if isinstance(text, str) and (count := len(self._pieces(text, number))) > 1:
                counts[offset] = count
        return counts

    def _problem_of(self, text: str) -> Problem | None:
        if not text:
            return Problem("empty")
        try:
            n_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            return Problem(f"lone surrogate: at character {error.start}")
        if n_bytes > self.max_document_bytes:
            return Problem(f"huge: {n_bytes:,} bytes, the limit is {self.max_document_bytes:,}")
        return None

    def _source_formats(self, wanted: Format) -> list[Format]:
        """What the records of each source hold, judged by the first record. A wrong --text-field
        would skip every document, so it is an error at the start."""
        formats: list[Format] = []
        for source in self.sources:
            holds: Format = "text" if wanted == "auto" else wanted
            for record in source.read(0, min(1, len(source))):
                fields = record.value if isinstance(record.value, dict) else None
                if fields is None:
                    continue
                if wanted == "auto":
                    holds = format_of(fields, self.text_field) or "text"
                if holds == "text" and self.text_field not in fields:
                    raise self._no_text_field(record, fields)
            formats.append(holds)
        known = [holds for s, holds in zip(self.sources, formats, strict=True) if len(s)]
        if known:  # an empty file is of the kind of the others
            pairs = zip(self.sources, formats, strict=True)
            formats = [holds if len(s) else known[0] for s, holds in pairs]
        if len({holds == "text" for holds in formats}) > 1:
            names = [f"{s.name} ({holds})" for s, holds in zip(self.sources, formats, strict=True)]
            raise CorpusError(
                f"the corpus mixes texts and conversations: {', '.join(names[:4])}. Read them "
                f"separately, or set --format (corpus.format in a recipe)."
            )
        return formats

    def _no_text_field(self, record: Record, content: dict[str, Any]) -> CorpusError:
        fields = sorted(map(str, content))
        near = difflib.get_close_matches(self.text_field, fields, n=1)
        advice = (
            f"Did you mean --text-field {near[0]}" if near else "Name the text with --text-field"
        )
        return CorpusError(
            f"{record.place} has no field {self.text_field!r}; its fields are: "
            f"{', '.join(fields)}. {advice} (corpus.text_field in a recipe){'?' if near else '.'}"
        )


def _changed(name: str) -> CorpusError:
    return CorpusError(
        f"{name} changed while it was being read. Do not change it during the run; start again "
        "with another --out."
    )


def _is_right(value: Any) -> bool:
    return isinstance(value, dict) and value.get("right") is True


def _conversation(value: Any, format: Format, of_a_table: bool) -> str | Problem:
    if not isinstance(value, dict):
        return Problem("no conversation: a text, not a record")
    try:
        return shared_text(conversation_of(value, format, of_a_table=of_a_table))
    except Refused as error:
        return Problem(str(error))


def fingerprint_of(about: Mapping[str, Any]) -> str:
    """The digest of a corpus, from its description."""
    sources = about["sources"]
    parts = [about["text_field"], str(about["documents"]), *(s["sha256"] for s in sources)]
    parts += [f"{name} {about[name]}" for name in ("split", "format") if name in about]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def described_documents(sources: Sequence[dict[str, Any]], conversations: bool) -> dict[str, Any]:
    """What `Corpus.describe` would say of these files of documents, which are not read; `sources`
    name each with its documents and its SHA-256."""
    about: dict[str, Any] = {
        "documents": sum(source["documents"] for source in sources),
        "text_field": CorpusSection.text_field,
        "limit_documents": None,
        "max_document_bytes": MAX_DOCUMENT_BYTES,
        "sources": [*sources],
        **({"format": ["messages"]} if conversations else {}),
    }
    return {"fingerprint": fingerprint_of(about), **about}


def open_corpus(
    paths: str | Path | Sequence[str | Path],
    *,
    text_field: str = "text",
    format: Format = "auto",
    split: Split = "none",
    limit: int | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    answers: Answers = "all",
) -> Corpus:
    """A corpus from files (jsonl, jsonl.gz, jsonl.zst, parquet, txt), folders of those, addresses
    of files, folders or patterns (`s3://bucket/corpus/*.jsonl.gz`, gs://, hf://, https://), or
    datasets of the Hugging Face hub (`owner/name` or `owner/name:split`). A text file is one
    document, unless `split` cuts it at every blank line or line. `format`: records hold a text, or
    a conversation (`messages`; `prompt` and `completion`); auto: by the fields of the first.
    `answers`: all, or those that are marked as right."""
    # a conversation that is asked for is read also where there is a text beside it
    sources = open_sources(paths, text_field if format in ("auto", "text") else "", split)
    if isinstance(paths, str | Path):
        paths = [paths]
    if split != "none" and not any(isinstance(source, TextFile) for source in sources):
        raise CorpusError(
            f"split {split} is for text files ({', '.join(TEXT_SUFFIXES)}), and "
            f"{', '.join(map(str, paths))} has none. Remove --split (corpus.split)."
        )
    corpus = Corpus(
        sources,
        text_field=text_field,
        format=format,
        split=split,
        limit=limit,
        max_document_bytes=max_document_bytes,
        answers=answers,
    )
    if len(corpus) == 0:
        raise CorpusError(f"{', '.join(map(str, paths))} holds no documents.")
    return corpus


def open_sources(
    paths: str | Path | Sequence[str | Path], text_field: str | None, split: Split = "none"
) -> list[Source]:
    """The sources that these paths name. `text_field`: the only field of a record that is read, or
    else those of conversations; None: every field."""
    listed = [paths] if isinstance(paths, str | Path) else paths
    if not listed:
        raise ValueError("a corpus needs at least one path")
    return [source for path in listed for source in _sources_of(path, text_field, split)]


def _sources_of(path: str | Path, text_field: str | None, split: Split) -> list[Source]:
    def opened(file: Path, name: str) -> JsonLines | ParquetRows | TextFile:
        reader = _reader_of(file)
        assert reader is not None
        if issubclass(reader, TextFile):
            return reader(file, name, split)
        return reader(file, name, text_field)

    if (address := address_of(path)) is not None:
        sources: list[Source] = []
        by_name = {file.name: file for file in remote_files(address)}

        def content(name: str) -> bytes | None:
            return by_name[name].fetch().read_bytes() if name in by_name else None

        documents = _documents_of(by_name, content, str(address))
        for file in by_name.values():
            if file.name in documents:
                source = opened(file.fetch(), file.name)
                source.origin = file
                _require_content(source, documents[file.name], str(address))
                sources.append(source)
        if not sources:
            raise CorpusError(f"{address} holds no file that can be read. {_KNOWN}")
        return sources
    local = local_path(path)
    if local.is_dir():
        files = _documents_in(local)
        if not files:
            raise CorpusError(f"{local} holds no file that can be read. {_KNOWN}")
        there = [opened(file, file.relative_to(local).as_posix()) for file in files]
        for source, digest in zip(there, files.values(), strict=True):
            _require_content(source, digest, str(local))
        return [*there]
    if local.is_file():
        if not is_corpus_file(local):
            raise CorpusError(_unknown_ending(local))
        return [opened(local, local.name)]
    named_like_hub = isinstance(path, str) and path.count("/") == 1 and path[0] not in "./~"
    if named_like_hub and not is_corpus_file(local):
        return [DatasetSource(str(path), text_field)]
    wrong = "is neither a file nor a folder" if local.exists() else "does not exist"
    raise CorpusError(f"{path} {wrong}. {_KNOWN}")


_READERS: dict[str, type[JsonLines] | type[ParquetRows] | type[TextFile]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), JsonLines),
    ".parquet": ParquetRows,
    **dict.fromkeys(TEXT_SUFFIXES, TextFile),
}
_CARD = "README.md"
_KNOWN = (
    f"Known are {', '.join(_READERS)} files (jsonl also with .gz or .zst), folders of those, "
    "addresses of these (s3://, gs://, hf://, https://), and datasets of the hub (owner/name)."
)


_CONVERTERS = {".json": "json", ".csv": "csv", ".tsv": "csv"}
"""Endings of tables that `datasets` reads, and the name of its reader."""


def _unknown_ending(path: Path) -> str:
    """Why a file is not read; for a table, with the line that converts it."""
    if (reader := _CONVERTERS.get(path.suffix.lower())) is None:
        return f"{path} has an unknown ending. {_KNOWN}"
    tabs = ", sep='\\t'" if path.suffix.lower() == ".tsv" else ""
    return (
        f"{path} has an unknown ending. This line converts it: "
        f'python -c "from datasets import load_dataset as load; '
        f"load('{reader}', data_files='{path}', split='train'{tabs})"
        f".to_json('{path.with_suffix('.jsonl')}')\""
    )


def _reader_of(path: Path) -> type[JsonLines] | type[ParquetRows] | type[TextFile] | None:
    compressed = path.suffix.lower() in (".gz", ".zst")
    reader = _READERS.get((path.with_suffix("") if compressed else path).suffix.lower())
    return None if compressed and reader is not JsonLines else reader


def is_corpus_file(path: str | Path) -> bool:
    """Whether documents can be read from a file of this name."""
    return _reader_of(Path(path)) is not None


def files_of_folder(folder: Path) -> list[Path]:
    """The files of a folder that hold documents, at any depth."""
    return [*_documents_in(folder)]


def _require_content(source: Source, digest: str | None, place: str) -> None:
    """Refuse a file of a folder that a teacher wrote, which is not as its manifest says."""
    if digest is not None and source.fingerprint != digest:
        raise CorpusError(
            f"{place}: {source.name} is damaged or was edited: its bytes do not match the checksum "
            "in the manifest, and the teacher's losses are those of other texts. Run the command "
            "that wrote it again."
        )


def _documents_in(folder: Path) -> dict[Path, str | None]:
    """The files of `files_of_folder`, with their digests as in `_documents_of`."""

    def content(name: str) -> bytes | None:
        return (folder / name).read_bytes() if (folder / name).is_file() else None

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    documents = _documents_of(names, content, str(folder))
    named = zip(files, names, strict=True)
    return {path: documents[name] for path, name in named if name in documents}


def _documents_of(
    names: Iterable[str], content: Callable[[str], bytes | None], place: str
) -> dict[str, str | None]:
    """The files that hold documents, of those with these names in a folder: what can be read, but
    for the card of a dataset; and in a folder that a teacher wrote, its documents alone, with the
    digests that its manifest has. `content` gives a file of the folder, None where there is
    none."""
    written = _written_documents(content, place)
    if written is not None:
        return {name: str(about["sha256"]) for name, about in written.items()}
    readable = {name for name in names if is_corpus_file(name)}
    texts = {name for name in readable if PurePosixPath(name).suffix.lower() in TEXT_SUFFIXES}
    if readable > texts and _CARD in readable and (content(_CARD) or b"").startswith(b"---"):
        readable.remove(_CARD)
    return dict.fromkeys(readable)


def _written_documents(
    content: Callable[[str], bytes | None], place: str
) -> dict[str, dict[str, Any]] | None:
    """The files of documents in a folder that a teacher wrote; None for other folders."""
    for name in (MANIFEST_FILE, PARTIAL_MANIFEST_FILE):
        if (data := content(name)) is None:
            continue
        try:
            manifest = parse_json(data)
            written = manifest["format"] == FORMAT_NAME and "writing" in manifest["identity"]
        except (ValueError, KeyError, TypeError):
            return None
        if not written:
            return None
        if name == PARTIAL_MANIFEST_FILE:
            raise CorpusError(
                f"{place} is still being written. Run the command that started it again to resume."
            )
        named = document_files(manifest).items()
        return {name: about for name, about in named if name.startswith(f"{DATA_FOLDER}/")}
    return None


# ---- documents that are left out ----


MOST_PLACES = 20
_PLACES_SHOWN = 3


@dataclass(frozen=True)
class LeftOut:
    """The one rule for documents that cannot be used (a broken line, no text, bytes that are not
    UTF-8): work goes on without them, and says how many there were, why, and where the first of
    them stand."""

    documents: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Kind of reason (`not JSON`, `empty`) -> documents."""
    first: Sequence[dict[str, Any]] = ()
    """`place` and full `reason` of the first few."""

    def as_json(self) -> dict[str, Any]:
        return {"documents": self.documents, "reasons": self.reasons, "first": list(self.first)}

    def lines(self) -> list[str]:
        """Lines for the console; there are none where nothing was left out."""
        if not self.documents:
            return []
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.items())
        places = [
            f"  {problem['place']}: {problem['reason']}" for problem in self.first[:_PLACES_SHOWN]
        ]
        return [f"left out {self.documents:,} documents: {reasons}", *places]


def left_out_of(problems: Sequence[dict[str, str]]) -> LeftOut:
    """What was left out, from the `place` and `reason` of every such document."""
    reasons = count_reasons(problem["reason"] for problem in problems)
    return LeftOut(len(problems), reasons, problems[:MOST_PLACES])


def read_texts(
    paths: str | Path | Sequence[str | Path] | Corpus, **options: Any
) -> tuple[list[str], LeftOut]:
    """Read the usable texts of a corpus, and what was left out; options as in `open_corpus`."""
    texts: list[str] = []
    problems: list[dict[str, str]] = []
    for document in paths if isinstance(paths, Corpus) else open_corpus(paths, **options):
        if document.text is not None:
            texts.append(document.text)
        else:
            problems.append({"place": document.place, "reason": document.problem or "unknown"})
    if not texts:
        raise CorpusError(
            f"None of the {len(problems):,} documents can be read as text; the first: "
            f"{problems[0]['place']}: {problems[0]['reason']}."
        )
    return texts, left_out_of(problems)
