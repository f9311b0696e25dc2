"""The loss store: a teacher's nll on a corpus, written once and used by any student."""

from vocagnolm.store.export import export_parquet
from vocagnolm.store.reader import LossStore, inspect_store, verify_store
from vocagnolm.store.writer import StoreWriter

__all__ = ["LossStore", "StoreWriter", "export_parquet", "inspect_store", "verify_store"]
