"""The sources of a corpus in its blocks, and how much of each is kept."""

from collections.abc import Sequence

import numpy as np

from vocagnolm.data.blocks import Blocks


def predicted_sources(blocks: Blocks, index: int, sources: Sequence[str]) -> np.ndarray:
    """Source of the token that each position of a block predicts [L]."""
    documents = blocks.documents(index)
    ordinal = blocks[index]["document"][1:]
    # the last: what fills a block of conversations up, and is never predicted
    names = np.array([*(sources[document] for document in documents), ""], dtype=object)
    return np.asarray(names[ordinal])


def shares_by_source(
    named: np.ndarray, chosen: np.ndarray, predicted: np.ndarray
) -> dict[str, dict[str, float]]:
    """`{source: {kept, tokens}}` over positions: their sources, whether they were chosen (or what
    they count), whether they predict anything. kept is the share of the source's predicted
    tokens (or their mean weight)."""
    shares = {}
    for source in sorted({str(name) for name in named[predicted]}):
        here = (named == source) & predicted
        tokens = float(here.sum())
        shares[source] = {"kept": float(chosen[here].sum()) / tokens, "tokens": tokens}
    return shares
