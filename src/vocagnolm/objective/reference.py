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


def soft_distance(
    logits_BTV: Tensor, labels_BT: Tensor, ids_BTK: Tensor, weights_BTK: Tensor
) -> Tensor:
    """[B, T]: what the cross entropy against `(1 - sum w) * label + sum_k w_k * token_k` is above
    that against the label; 0 where the label is ignored."""
    log_p = F.log_softmax(logits_BTV, dim=-1)
    target = torch.zeros_like(log_p).scatter_add(2, ids_BTK, weights_BTK.to(log_p.dtype))
    label = labels_BT.clamp(min=0)[:, :, None]
    left = 1.0 - weights_BTK.sum(2, keepdim=True).to(log_p.dtype)
    target = target.scatter_add(2, label, left)
    above = -(target * log_p).sum(2) + log_p.gather(2, label)[:, :, 0]
    return torch.where(labels_BT != IGNORE_INDEX, above, 0.0)


def weighted_sum(logits_BTV: Tensor, labels_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Sum of the nll of the tokens, each as often as it counts."""
    labels = torch.where(weights_BT != 0, labels_BT, IGNORE_INDEX).flatten()
    flat = logits_BTV.flatten(0, 1)
    if ((weights_BT == 0) | (weights_BT == 1)).all():
        return F.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = F.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * weights_BT.flatten()).sum()
