"""Rows of prompts and answers in blocks of one width, and these in micro-batches of all ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.data.bins import fill_bins
from vocagnolm.objective import IGNORE_INDEX
from vocagnolm.rounds.targets import Columns

_FILLINGS: dict[str, Any] = {
    "labels": IGNORE_INDEX,
    "document": -1,
    "guidance": np.nan,
}
"""What pads a column; 0 the others."""


def packed_blocks(rows: Sequence[Columns], width: int) -> list[Columns]:
    """Blocks of `width` tokens, each of whole rows; rows that teach nothing are left out."""
    if not rows:
        return []
    listed = max(row["target_ids"].shape[1] for row in rows)
    rows = [{name: _widened(name, values, listed) for name, values in r.items()} for r in rows]
    lengths = np.array([len(row["input_ids"]) for row in rows], np.int64)
    taught = [np.flatnonzero(row["labels"] != IGNORE_INDEX) for row in rows]
    first = np.array([where[0] if len(where) else -1 for where in taught], np.int64)
    bins = fill_bins(lengths, first, width)
    return [_block([rows[n] for n in bins.documents(index)], width) for index in range(len(bins))]


def _block(rows: Sequence[Columns], width: int) -> Columns:
    starts = np.cumsum([0, *(len(row["input_ids"]) for row in rows[:-1])])
    block: Columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name == "stretch":  # numbers differ within a block
            values = [numbers + start for numbers, start in zip(values, starts, strict=True)]
        block[name] = _padded(np.concatenate(values), width, _FILLINGS.get(name, 0))
    documents = [np.full(len(row["input_ids"]), n) for n, row in enumerate(rows)]
    block["document"] = _padded(np.concatenate(documents), width, _FILLINGS["document"])
    return block


def _widened(name: str, values: NDArray[Any], listed: int) -> NDArray[Any]:
    """Targets with as many columns as those of other rows, which may know more alternatives."""
    if name not in ("target_ids", "target_p") or values.shape[1] == listed:
        return values
    return np.pad(values, ((0, 0), (0, listed - values.shape[1])))


def _padded(values: NDArray[Any], width: int, filling: Any) -> NDArray[Any]:
    whole = np.full((width, *values.shape[1:]), filling, values.dtype)
    whole[: len(values)] = values[:width]
    return whole


def empty_block(like: Columns) -> Columns:
    """A block that holds nothing, in the shapes of another."""
    return {name: np.full_like(values, _FILLINGS.get(name, 0)) for name, values in like.items()}


def dealt_blocks(
    blocks: Sequence[Columns], micro_batch: int, rank: int, ranks: int
) -> list[list[Columns]]:
    """The micro-batches of a rank: as many as every other rank has, filled up with empty blocks.
    They are dealt in turn, so that a step holds the same blocks however it is split."""
    count = -(-len(blocks) // (micro_batch * ranks))
    whole = [*blocks, *[empty_block(blocks[0])] * (count * micro_batch * ranks - len(blocks))]
    places = [number * ranks + rank for number in range(count)]
    return [whole[place * micro_batch : (place + 1) * micro_batch] for place in places]
