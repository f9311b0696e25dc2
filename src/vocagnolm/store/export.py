"""Parquet for `datasets`, `polars` and the hub's viewer. Needs the `data` extra."""

from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm import files
from vocagnolm.alternatives import Alternatives
from vocagnolm.errors import MissingExtraError, StoreError
from vocagnolm.store.analysis import Ranks
from vocagnolm.store.reader import LossStore


def export_parquet(store: str | Path, out: str | Path) -> int:
    """Write one row a document: document_index, document_hash (hex), token_bytes, nll (float32,
    null where unscored), and where the store has them the alternatives of every token, each with
    its text, id and probability. One row group a shard. Returns the number of rows."""
    pa, pq = _pyarrow()
    loss_store = LossStore.open(store)
    texts = None
    if loss_store.kept_alternatives is not None:
        vocabulary = loss_store.vocabulary
        # tokens that are no whole characters are written as escapes
        entries = (vocabulary[n].decode(errors="backslashreplace") for n in range(len(vocabulary)))
        texts = pa.array(entries, pa.string())
    schema = _schema(pa, texts is not None)
    with (
        files.whole_file(_new_file(out)) as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for shard in loss_store.shards():
            writer.write_table(_table(pa, schema, shard.columns, texts))
    return len(loss_store)


def export_ranks(ranks: Ranks, out: str | Path) -> None:
    """One row a document, the best first."""
    pa, pq = _pyarrow()
    hashes = [row.tobytes().hex() for row in ranks.documents.hashes[ranks.order]]
    table = pa.table({**ranks.columns(), "document_hash": hashes})
    with files.whole_file(_new_file(out)) as file:
        pq.write_table(table, file, compression="zstd")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError("pyarrow", "data", "exporting to Parquet") from None
    return pa, pq


def _new_file(out: str | Path) -> Path:
    path = files.local_path(out)
    if path.exists():
        raise StoreError(f"{out} exists already; choose another name for the export.")
    return path


def _schema(pa: Any, alternatives: bool) -> Any:
    alternative = [
        ("text", pa.string()),
        ("id", pa.int32()),
        ("probability", pa.float32()),
        ("follows", pa.bool_()),
    ]
    columns = [
        ("document_index", pa.uint64()),
        ("document_hash", pa.string()),
        ("token_bytes", pa.list_(pa.uint32())),
        ("nll", pa.list_(pa.float32())),
    ]
    if alternatives:
        columns.append(("alternatives", pa.list_(pa.list_(pa.struct(alternative)))))
    return pa.schema(columns)


def _table(pa: Any, schema: Any, columns: dict[str, np.ndarray], texts: Any) -> Any:
    ends = np.concatenate([[0], np.cumsum(columns["token_count"], dtype=np.int64)])
    offsets = pa.array(ends, pa.int32())
    nll = columns["nll"].astype(np.float32)
    hashes = [row.tobytes().hex() for row in columns["document_hash"]]
    token_bytes = pa.array(columns["token_bytes"].astype(np.uint32))
    arrays = [
        pa.array(columns["document_index"]),
        pa.array(hashes, pa.string()),
        pa.ListArray.from_arrays(offsets, token_bytes),
        pa.ListArray.from_arrays(offsets, pa.array(nll, mask=np.isnan(nll))),
    ]
    if texts is not None:
        per_token = _alternatives(pa, Alternatives(columns["alternatives"]), texts)
        arrays.append(pa.ListArray.from_arrays(offsets, per_token))
    return pa.table(arrays, schema=schema)


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
