"""Parquet out of a store, for `datasets`, `polars` and the hub's viewer. Needs the `data` extra."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.alternatives import Alternatives
from vocagnolm.base import files
from vocagnolm.errors import StoreError, optional
from vocagnolm.store.analysis import RankedDocuments
from vocagnolm.store.format import HASH_BYTES
from vocagnolm.store.reader import LossStore

_PYARROW = ("pyarrow", "pyarrow.parquet")


def export_parquet(store: str | Path, out: str | Path, texts: Iterable[str] | None = None) -> int:
    """Write one row per document: document_index, document_hash (hex), token_bytes, nll (float32,
    null where unscored), and, if the store has them, the alternatives of every token with text, id
    and probability. One row group per shard. Returns the number of rows.

    texts: the documents of the corpus in their order; then each row also has `text`, and `tokens`,
        the bytes of every token.

        pandas.read_parquet("store.parquet")
    """
    pa, pq = (optional(name, "data", "exporting to Parquet") for name in _PYARROW)
    loss_store = LossStore.open(store)
    vocabulary_texts, content = None, None if texts is None else iter(texts)
    if loss_store.kept_alternatives is not None:
        vocabulary = loss_store.vocabulary
        # tokens that are no whole characters are written as escapes
        entries = (vocabulary[n].decode(errors="backslashreplace") for n in range(len(vocabulary)))
        vocabulary_texts = pa.array(entries, pa.string())

    def table(columns: dict[str, np.ndarray]) -> Any:
        written = None if content is None else _contents(columns, content, loss_store.path)
        return _table(pa, columns, vocabulary_texts, written)

    tables = (table(shard.columns) for shard in loss_store.shards())
    first = next(tables)
    with (
        files.whole_file(_new_file(out)) as file,
        pq.ParquetWriter(file, first.schema, compression="zstd") as writer,
    ):
        for rows in itertools.chain([first], tables):
            writer.write_table(rows)
    return len(loss_store)


def export_ranks(ranks: RankedDocuments, out: str | Path) -> None:
    """Write one row per document, the best first."""
    pa, pq = (optional(name, "data", "exporting to Parquet") for name in _PYARROW)
    hashes = [row.tobytes().hex() for row in ranks.documents.hashes[ranks.order]]
    table = pa.table({**ranks.columns(), "document_hash": hashes})
    with files.whole_file(_new_file(out)) as file:
        pq.write_table(table, file, compression="zstd")


def _new_file(out: str | Path) -> Path:
    path = files.local_path(out)
    if path.exists():
        raise StoreError(f"{out} exists already; choose another name for the export.")
    return path


def _contents(
    columns: dict[str, np.ndarray], texts: Iterator[str], store: str | Path
) -> list[bytes]:
    """The texts of a shard's documents, found by their hashes. Both have the corpus's order."""
    contents = []
    for wanted in columns["document_hash"]:
        for text in texts:
            content = text.encode()
            if hashlib.sha256(content).digest()[:HASH_BYTES] == wanted.tobytes():
                contents.append(content)
                break
        else:
            raise StoreError(
                f"the corpus does not hold document {wanted.tobytes().hex()} of {store}, or not in "
                "the order in which it was scored. Give the corpus that the store was made from."
            )
    return contents


def _pieces(contents: list[bytes], token_bytes: np.ndarray) -> list[bytes]:
    """The bytes of every token of these documents."""
    content = b"".join(contents)
    cuts = [0, *np.cumsum(token_bytes, dtype=np.int64).tolist()]
    return [content[start:end] for start, end in itertools.pairwise(cuts)]


def _table(
    pa: Any, columns: dict[str, np.ndarray], texts: Any, contents: list[bytes] | None
) -> Any:
    ends = np.concatenate([[0], np.cumsum(columns["token_count"], dtype=np.int64)])
    offsets = pa.array(ends, pa.int32())
    nll = columns["nll"].astype(np.float32)
    hashes = [row.tobytes().hex() for row in columns["document_hash"]]
    token_bytes = pa.array(columns["token_bytes"].astype(np.uint32))
    table = {
        "document_index": pa.array(columns["document_index"]),
        "document_hash": pa.array(hashes, pa.string()),
        "token_bytes": pa.ListArray.from_arrays(offsets, token_bytes),
        "nll": pa.ListArray.from_arrays(offsets, pa.array(nll, mask=np.isnan(nll))),
    }
    if contents is not None:
        pieces = pa.array(_pieces(contents, columns["token_bytes"]), pa.binary())
        table["text"] = pa.array([content.decode() for content in contents], pa.string())
        table["tokens"] = pa.ListArray.from_arrays(offsets, pieces)
    if texts is not None:
        per_token = _alternatives(pa, Alternatives(columns["alternatives"]), texts)
        table["alternatives"] = pa.ListArray.from_arrays(offsets, per_token)
    return pa.table(table)


def _alternatives(pa: Any, given: Alternatives, texts: Any) -> Any:
    """A list of structures for every token; empty where the teacher gave none."""
    present = given.present
    ids = given.ids[present]
    known = pa.array(np.where(ids < len(texts), ids, 0), mask=ids >= len(texts))
    fields = {
        "text": texts.take(known),
        "id": pa.array(ids),
        "probability": pa.array(given.probability[present]),
        "follows": pa.array(given.follows[present]),
    }
    structures = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    ends = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), structures)
