"""The objective with full logits: slow, obvious, and what every fast path must match."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vocagnolm.objective.config import IGNORE_INDEX, Head
from vocagnolm.objective.rows import Transform


def full_logits(hidden: Tensor, head: Head) -> Tensor:
    """[..., V], fp32 unless the model is fp64."""
    logits = F.linear(hidden, head.weight)
    return Transform(head.bias, head.softcap, head.scale)(logits)


def token_nll(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """[B, T]; 0 where the label is ignored."""
    flat = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return flat.view(labels_BT.shape)


def masked_sum(logits_BTV: Tensor, labels_BT: Tensor, selected_BT: Tensor) -> Tensor:
    """Sum of the nll of the selected tokens."""
    labels = torch.where(selected_BT, labels_BT, IGNORE_INDEX)
    return F.cross_entropy(
        logits_BTV.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
