"""The objective with full logits: slow, obvious, and what every fast path must match."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vocagnolm.objective.batch import IGNORE_INDEX


def token_nll(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """[B, T]; 0 where the label is ignored."""
    flat = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return flat.view(labels_BT.shape)


def weighted_sum(logits_BTV: Tensor, labels_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Sum of the nll of the tokens, each as often as it counts."""
    labels = torch.where(weights_BT != 0, labels_BT, IGNORE_INDEX).flatten()
    flat = logits_BTV.flatten(0, 1)
    if ((weights_BT == 0) | (weights_BT == 1)).all():
        return F.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = F.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * weights_BT.flatten()).sum()
