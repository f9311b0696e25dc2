"""Rows become batches: documents with guidance from `vocagnolm.guide`, and blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vocagnolm.errors import UsageError
from vocagnolm.objective import COLUMNS, IGNORE_INDEX, Counts, Targets

_FILLINGS: dict[str, float] = {
    "input_ids": 0,
    "labels": IGNORE_INDEX,
    "trained": False,
    "document": -1,
    **{name: filling for name, (_, filling) in COLUMNS.items()},
}
"""Columns with an entry for each student token, and what pads them."""
_READ = ("input_ids", "position_ids")
"""Columns of the token that a position reads; all others belong to the token it predicts."""


class GuidedCollator:
    """Makes a batch of rows with guidance. All columns are truncated, padded or packed together, so
    that labels and guidance stay with their tokens.

    A row is a document (`vocagnolm.guide`), several documents end to end (with `seq_lengths`, as
    `trl.pack_dataset` makes them, or as a list of rows, as axolotl's sampler does), or a block of
    `vocagnolm prepare`.

    Where a row holds several documents, positions restart with each of them, which makes
    transformers restrict attention to it (if the model uses no cache, as in its trainers:
    `use_cache=False`), and its first token is not predicted from the document before it.
    """

    def __init__(
        self,
        *,
        max_length: int | None = None,
        packing: bool = False,
        pad_to_multiple_of: int = 1,
        document_mask: bool = True,
        shifted: bool = False,
    ):
        """`max_length`: longer documents are cut. `packing`: all rows of a batch become one.
        `document_mask`: False reads the documents of a row as one text.

        Entry t of every column belongs to token t, as transformers' models expect it. `shifted`: it
        belongs to the token that position t predicts, for loops that call `objective_loss`
        themselves. Rows are then one token longer than what the model reads, and the batch also
        holds what an online teacher reads, and `counts`.
        """
        self.max_length, self.packing = max_length, packing
        self.pad_to_multiple_of = pad_to_multiple_of
        self.document_mask, self.shifted = document_mask, shifted

    @classmethod
    def for_blocks(cls, document_mask: bool = False) -> "GuidedCollator":
        """The collator of `vocagnolm train`: shifted, with documents apart if asked for."""
        return cls(document_mask=document_mask, shifted=True)

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        groups = [row if isinstance(row, list) else [row] for row in rows]
        _require_columns([row for group in groups for row in group])
        if self.packing:
            groups = [[row for group in groups for row in group]]
        joined = [self._joined(group) for group in groups]
        longest = max(len(row["input_ids"]) for row in joined)
        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        columns = {
            name: padded(joined, name, filling, width)
            for name, filling in _FILLINGS.items()
            if name in joined[0]
        }
        document_BT = columns.pop("document")
        if "trained" in columns:
            columns["labels"][~columns.pop("trained")] = IGNORE_INDEX
        if self.document_mask:
            begins_BT = np.ones(document_BT.shape, bool)
            begins_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
            columns["labels"][begins_BT] = IGNORE_INDEX
        packed = self.packing or any(len(group) > 1 for group in groups)
        packed |= any(name in groups[0][0] for name in ("seq_lengths", "document"))
        if self.document_mask and (packed or self.shifted):
            columns["position_ids"] = positions_in_document(document_BT)
        if self.shifted:
            return self._shifted(columns, joined)
        batch = {name: torch.from_numpy(values) for name, values in columns.items()}
        if not packed:
            lengths = torch.tensor([len(row["input_ids"]) for row in joined])
            batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch

    def _joined(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Rows of documents end to end as one row, with the number of each token's document."""
        first = rows[0]
        if "document" in first and len(rows) == 1:  # a block, or a row that is packed already
            return first if "labels" in first else {**first, "labels": first["input_ids"]}
        lengths = [n for row in rows for n in row.get("seq_lengths", [len(row["input_ids"])])]
        cuts = np.cumsum(lengths)[:-1]
        columns = {name: [row[name] for row in rows] for name in _FILLINGS if name in first}
        columns["labels"] = [row.get("labels", row["input_ids"]) for row in rows]
        columns["document"] = [np.repeat(np.arange(len(lengths)), lengths)]
        joined = {}
        for name, values in columns.items():
            documents = np.split(np.concatenate([np.asarray(value) for value in values]), cuts)
            joined[name] = np.concatenate([document[: self.max_length] for document in documents])
        return joined

    def _shifted(
        self, columns: Mapping[str, NDArray[Any]], rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The batch in which entry t of a column belongs to the token that position t predicts."""
        batch: dict[str, Any] = {
            name: torch.from_numpy((v[:, :-1] if name in _READ else v[:, 1:]).copy())
            for name, v in columns.items()
        }
        batch["counts"] = token_counts(batch)
        for name in ("block", "teacher_sums"):
            if name in rows[0]:
                batch[name] = torch.from_numpy(np.stack([row[name] for row in rows]))
        if "teacher_ids" in rows[0]:
            batch.update(self._teacher(rows))
        return batch

    def _teacher(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The columns that an online teacher reads, padded on the right, where a causal model does
        not see it."""
        document_BU = padded(rows, "teacher_document", -1)
        view: dict[str, Any] = {
            "teacher_ids": torch.from_numpy(padded(rows, "teacher_ids")),
            "teacher_range": torch.from_numpy(padded(rows, "teacher_range", -1)[:, 1:].copy()),
            "teacher_pair": torch.from_numpy(padded(rows, "teacher_pair", -1)[:, 1:].copy()),
        }
        if "laid" in rows[0]:
            view["laid"] = [row["laid"] for row in rows]
        if "teacher_counts" in rows[0]:
            view["teacher_counts"] = torch.from_numpy(padded(rows, "teacher_counts") > 0)
        # a teacher token is predicted from the one before it, which must be of its own document
        # where documents are apart
        follows_BU = document_BU >= 0
        follows_BU[:, 0] = False
        if self.document_mask:
            follows_BU[:, 1:] &= document_BU[:, 1:] == document_BU[:, :-1]
            view["teacher_position_ids"] = torch.from_numpy(positions_in_document(document_BU))
        view["teacher_follows"] = torch.from_numpy(follows_BU)
        return view


def _require_columns(rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows of which some have no guidance: it would be dropped, or filled with nothing."""
    held = [{name for name in COLUMNS if row.get(name) is not None} for row in rows]
    some = set().union(*held)
    for number, columns in enumerate(held):
        if columns != some:
            raise UsageError(
                f"Row {number} of a batch has no {min(some - columns)}, and others have. To mix "
                "them, make its columns too: vocagnolm.guide(dataset, store, tokenizer, "
                'missing="keep") leaves the guidance of unknown documents empty.'
            )


def padded(
    rows: Sequence[Mapping[str, Any]], name: str, filling: float = 0, width: int = 0
) -> NDArray[Any]:
    """A column of rows, which may be lists of unequal length, as one array with rows of at least
    `width` entries."""
    arrays = [np.asarray(row[name]) for row in rows]
    if arrays[0].dtype == np.float64:  # a list of Python's numbers
        arrays = [array.astype(np.float32) for array in arrays]
    elif name in ("input_ids", "labels"):
        arrays = [array.astype(np.int64, copy=False) for array in arrays]
    width = max(width, *(len(array) for array in arrays))
    if all(len(array) == width for array in arrays):
        return np.stack(arrays)
    whole = np.full((len(arrays), width, *arrays[0].shape[1:]), filling, arrays[0].dtype)
    for row, array in zip(whole, arrays, strict=True):
        row[: len(array)] = array
    return whole


def positions_in_document(document_BT: NDArray[Any]) -> NDArray[np.int64]:
    """0, 1, 2, ... within each run of equal document numbers."""
    index = np.arange(document_BT.shape[1])[None]
    begins = np.ones(document_BT.shape, bool)
    begins[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    start = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return np.asarray(index - start)


def batch_targets(batch: Mapping[str, Any], sequence_index_B: Tensor | None = None) -> Targets:
    """The part of a shifted batch that the objective reads."""
    return Targets(
        labels_BT=batch["labels"],
        guidance_BT=batch.get("guidance"),
        entropy_BT=batch.get("entropy"),
        stretch_BT=batch.get("stretch"),
        teacher_sums_B2=batch.get("teacher_sums"),
        soft_ids_BTK=batch.get("target_ids"),
        soft_p_BTK=batch.get("target_p"),
        drawn_nll_BT=batch.get("drawn_nll"),
        sequence_index_B=sequence_index_B,
    )


def token_counts(batch: Mapping[str, Any]) -> Counts:
    """(predicted, mapped) tokens of each sequence as plain numbers, counted while the batch is on
    the host: on a device they would have to be waited for."""
    targets = batch_targets(batch)
    counted = torch.stack([targets.valid_BT.sum(1), targets.mapped_BT.sum(1)], dim=1)
    return [(predicted, mapped) for predicted, mapped in counted.tolist()]
