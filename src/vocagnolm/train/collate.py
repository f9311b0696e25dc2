"""Blocks become batches: the one place where labels and guidance are shifted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vocagnolm.data.blocks import Block
from vocagnolm.objective import IGNORE_INDEX, Counts, Targets


class BlockCollator:
    """Stacks blocks of N tokens into batches of N - 1 positions: position t reads token t and
    predicts token t + 1, and everything but `input_ids` and `position_ids` belongs to the token
    that is predicted.

    `document_mask`: positions count from each document's start, which makes transformers keep
    attention inside it, and the first token of a document is not predicted from the one before.
    Tokens of conversations that are not `trained` on are read and not predicted.
    """

    def __init__(self, document_mask: bool = False):
        self.document_mask = document_mask

    def __call__(self, blocks: Sequence[Block]) -> dict[str, Any]:
        ids = np.stack([block["input_ids"] for block in blocks])
        labels = ids[:, 1:].copy()
        batch: dict[str, Any] = {"input_ids": torch.from_numpy(ids[:, :-1].copy())}
        if self.document_mask:
            document = np.stack([block["document"] for block in blocks])
            labels[document[:, 1:] != document[:, :-1]] = IGNORE_INDEX
            batch["position_ids"] = torch.from_numpy(positions_in_document(document[:, :-1]))
        if "trained" in blocks[0]:
            labels[~np.stack([block["trained"] for block in blocks])[:, 1:]] = IGNORE_INDEX
        batch["labels"] = torch.from_numpy(labels)
        for name in ("guidance", "stretch", "target_ids", "target_p"):
            if name in blocks[0]:
                batch[name] = _predicted(blocks, name)
        batch["counts"] = token_counts(batch)
        for name in ("block", "teacher_sums"):
            if name in blocks[0]:
                batch[name] = torch.from_numpy(np.stack([block[name] for block in blocks]))
        if "teacher_ids" in blocks[0]:
            batch.update(self._teacher(blocks))
        return batch

    def _teacher(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """The teacher's view of the same text, padded on the right (causal: the pad is unseen)."""
        width = max(len(block["teacher_ids"]) for block in blocks)
        document = _padded(blocks, "teacher_document", width)
        view: dict[str, Any] = {
            "teacher_ids": torch.from_numpy(_padded(blocks, "teacher_ids", width).clip(min=0)),
            "teacher_range": _predicted(blocks, "teacher_range"),
            "teacher_pair": _predicted(blocks, "teacher_pair"),
        }
        if "teacher_stretch" in blocks[0]:
            view["teacher_stretch"] = torch.from_numpy(_padded(blocks, "teacher_stretch", width))
        if "laid" in blocks[0]:
            view["laid"] = [block["laid"] for block in blocks]
        if "teacher_counts" in blocks[0]:
            view["teacher_counts"] = torch.from_numpy(_padded(blocks, "teacher_counts", width) > 0)
        # what a teacher token is predicted from must be of its own document where those are apart
        follows = document >= 0
        follows[:, 0] = False
        if self.document_mask:
            follows[:, 1:] &= document[:, 1:] == document[:, :-1]
            view["teacher_position_ids"] = torch.from_numpy(positions_in_document(document))
        view["teacher_follows"] = torch.from_numpy(follows)
        return view


def batch_targets(batch: dict[str, Any], sequence_index_B: Tensor | None = None) -> Targets:
    """What the objective is given of a batch."""
    return Targets(
        labels_BT=batch["labels"],
        guidance_BT=batch.get("guidance"),
        entropy_BT=batch.get("entropy"),
        stretch_BT=batch.get("stretch"),
        teacher_sums_B2=batch.get("teacher_sums"),
        soft_ids_BTK=batch.get("target_ids"),
        soft_p_BTK=batch.get("target_p"),
        sequence_index_B=sequence_index_B,
    )


def token_counts(batch: dict[str, Any]) -> Counts:
    """Counted here, as plain numbers: on a device they would have to be waited for."""
    targets = batch_targets(batch)
    counted = torch.stack([targets.valid_BT.sum(1), targets.mapped_BT.sum(1)], dim=1)
    return [(predicted, mapped) for predicted, mapped in counted.tolist()]


def _predicted(blocks: Sequence[Block], name: str) -> Tensor:
    """A column of the blocks without its first token, which is read and not predicted."""
    return torch.from_numpy(np.stack([block[name] for block in blocks])[:, 1:].copy())


def _padded(blocks: Sequence[Block], name: str, width: int) -> NDArray[np.int64]:
    """Rows of a column of the teacher's tokens, filled up with -1."""
    rows = np.full((len(blocks), width), -1, np.int64)
    for row, block in zip(rows, blocks, strict=True):
        row[: len(block[name])] = block[name]
    return rows


def positions_in_document(document_BT: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each run of equal document numbers."""
    index = np.arange(document_BT.shape[1])[None]
    new = np.ones(document_BT.shape, bool)
    new[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    start = np.maximum.accumulate(np.where(new, index, 0), axis=1)
    return index - start
