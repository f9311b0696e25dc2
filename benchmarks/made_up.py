"""Stores with made-up losses: their content does not change the work of who reads them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import TextTokenizer, TokenSpans, token_texts
from vocagnolm.alternatives import pack
from vocagnolm.data.corpus import document_hash
from vocagnolm.store import StoreWriter
from vocagnolm.store.format import Shard, encode_vocabulary, narrowest_unsigned, to_float16

Stored = tuple[NDArray[Any], NDArray[Any]]
"""Of a text: the byte lengths of the teacher's tokens, and their losses."""


def made_up(token_bytes: NDArray[Any]) -> Stored:
    return token_bytes, np.random.default_rng(0).gamma(2.0, 1.0, len(token_bytes))


def made_up_alternatives(read: Sequence[TokenSpans], count: int) -> NDArray[np.uint32]:
    """Of every token of these texts: in two places of three itself first, and tokens that the same
    texts hold elsewhere, as often as they do."""
    ids = np.concatenate([spans.ids for spans in read])
    rng = np.random.default_rng(1)
    chosen = rng.choice(ids, (len(ids), count))
    first = rng.random(len(ids)) < 2 / 3
    chosen[first, 0] = ids[first]
    nll = 0.5 + 1.5 * np.arange(count) + rng.random((len(ids), count))
    return pack(chosen, nll, chosen == ids[:, None])


def made_up_store(
    folder: Path,
    texts: Sequence[str],
    stored: Sequence[Stored],
    teacher: TextTokenizer | None = None,
    alternatives: NDArray[np.uint32] | None = None,
) -> None:
    identity: dict[str, Any] = {"teacher": {"name": "made-up"}}
    vocabulary = None
    if alternatives is not None and teacher is not None:
        vocabulary = encode_vocabulary(token_texts(teacher, []))
        identity["alternatives"] = {
            "count": alternatives.shape[1],
            "sampled": False,
            "vocabulary_sha256": hashlib.sha256(vocabulary).hexdigest(),
            "vocabulary_bytes": len(vocabulary),
        }
    writer = StoreWriter(folder, identity, 1, vocabulary=vocabulary)
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
            alternatives=alternatives,
        )
    )
    writer.finish()
