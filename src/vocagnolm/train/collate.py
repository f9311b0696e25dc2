"""Blocks become batches: shifted labels and guidance, positions that start again per document."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vocagnolm.data.blocks import Block
from vocagnolm.objective import IGNORE_INDEX


class BlockCollator:
    """Stacks blocks. `labels[b, t]` and `guidance[b, t]` belong to the token after position t.

    `document_mask`: positions count from each document's start, which makes transformers keep
    attention inside it, and the first token of a document is not predicted from the one before.
    """

    def __init__(self, document_mask: bool = False):
        self.document_mask = document_mask

    def __call__(self, blocks: Sequence[Block]) -> dict[str, Any]:
        ids = np.stack([block["input_ids"] for block in blocks])
        labels = np.full_like(ids, IGNORE_INDEX)
        labels[:, :-1] = ids[:, 1:]
        batch: dict[str, Any] = {"input_ids": torch.from_numpy(ids)}
        if self.document_mask:
            document = np.stack([block["document"] for block in blocks])
            labels[:, :-1][document[:, 1:] != document[:, :-1]] = IGNORE_INDEX
            batch["position_ids"] = torch.from_numpy(positions_in_document(document))
        batch["labels"] = torch.from_numpy(labels)
        if "guidance" in blocks[0]:
            guidance = np.full(ids.shape, np.nan, np.float32)
            guidance[:, :-1] = np.stack([block["guidance"] for block in blocks])[:, 1:]
            batch["guidance"] = torch.from_numpy(guidance)
        if "block" in blocks[0]:
            batch["block"] = torch.tensor([block["block"] for block in blocks])
        if "teacher_ids" in blocks[0]:
            batch.update(self._teacher(blocks))
        return batch

    def _teacher(self, blocks: Sequence[Block]) -> dict[str, Tensor]:
        """The teacher's view of the same text, padded on the right (causal: the pad is unseen)."""
        width = max(len(block["teacher_ids"]) for block in blocks)
        ids = np.zeros((len(blocks), width), np.int64)
        document = np.full((len(blocks), width), -1, np.int64)
        for row, block in enumerate(blocks):
            length = len(block["teacher_ids"])
            ids[row, :length] = block["teacher_ids"]
            document[row, :length] = block["teacher_document"]
        view = {
            "teacher_ids": torch.from_numpy(ids),
            "teacher_range": torch.from_numpy(np.stack([b["teacher_range"] for b in blocks])),
            "teacher_same_start": torch.from_numpy(
                np.stack([b["teacher_same_start"] for b in blocks])
            ),
        }
        if self.document_mask:
            view["teacher_position_ids"] = torch.from_numpy(positions_in_document(document))
        return view


def positions_in_document(document_BT: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each run of equal document numbers."""
    index = np.arange(document_BT.shape[1])[None]
    new = np.ones(document_BT.shape, bool)
    new[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    start = np.maximum.accumulate(np.where(new, index, 0), axis=1)
    return index - start
