"""Stores with made-up losses: their content does not change the work of who reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.data.corpus import document_hash
from vocagnolm.store import StoreWriter
from vocagnolm.store.format import Shard, narrowest_unsigned, to_float16

Stored = tuple[NDArray[Any], NDArray[Any]]
"""Of a text: the byte lengths of the teacher's tokens, and their losses."""


def made_up(token_bytes: NDArray[Any]) -> Stored:
    return token_bytes, np.random.default_rng(0).gamma(2.0, 1.0, len(token_bytes))


def made_up_store(folder: Path, texts: Sequence[str], stored: Sequence[Stored]) -> None:
    writer = StoreWriter(folder, {"teacher": {"name": "made-up"}}, 1)
    writer.begin()
    writer.write_shard(
        Shard(
            number=0,
            first_document=0,
            document_span=len(texts),
            document_hash=np.stack(
                [np.frombuffer(document_hash(text), np.uint8) for text in texts]
            ),
            document_index=np.arange(len(texts), dtype="<u8"),
            token_count=np.array([len(nll) for _, nll in stored], "<u4"),
            token_bytes=narrowest_unsigned(np.concatenate([sizes for sizes, _ in stored])),
            nll=to_float16(np.concatenate([nll for _, nll in stored])),
        )
    )
    writer.finish()
