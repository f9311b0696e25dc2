"""Parquet for `datasets`, `polars` and the hub's viewer. Needs the `data` extra."""

from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm import files
from vocagnolm.errors import MissingExtraError, StoreError
from vocagnolm.store.rank import Ranks
from vocagnolm.store.reader import LossStore


def export_parquet(store: str | Path, out: str | Path) -> int:
    """Write one row a document: document_index, document_hash (hex), token_bytes, nll (float32,
    null where unscored). One row group a shard. Returns the number of rows."""
    pa, pq = _pyarrow()
    loss_store = LossStore.open(store)
    with (
        files.whole_file(_new_file(out)) as file,
        pq.ParquetWriter(file, _schema(pa), compression="zstd") as writer,
    ):
        for shard in loss_store.shards():
            writer.write_table(_table(pa, shard.columns))
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


def _schema(pa: Any) -> Any:
    return pa.schema(
        [
            ("document_index", pa.uint64()),
            ("document_hash", pa.string()),
            ("token_bytes", pa.list_(pa.uint32())),
            ("nll", pa.list_(pa.float32())),
        ]
    )


def _table(pa: Any, columns: dict[str, np.ndarray]) -> Any:
    ends = np.concatenate([[0], np.cumsum(columns["token_count"], dtype=np.int64)])
    offsets = pa.array(ends, pa.int32())
    nll = columns["nll"].astype(np.float32)
    hashes = [row.tobytes().hex() for row in columns["document_hash"]]
    token_bytes = pa.array(columns["token_bytes"].astype(np.uint32))
    return pa.table(
        [
            pa.array(columns["document_index"]),
            pa.array(hashes, pa.string()),
            pa.ListArray.from_arrays(offsets, token_bytes),
            pa.ListArray.from_arrays(offsets, pa.array(nll, mask=np.isnan(nll))),
        ],
        schema=_schema(pa),
    )
