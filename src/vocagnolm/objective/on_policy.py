"""Divergences of an on-policy method between a student and what is known of its teacher.

At each token that the student drew, the teacher's alternatives are known as probabilities r of some
of the student's tokens. All other tokens are one bucket: the teacher has R = 1 - sum r there, the
student P = 1 - sum p. Comparing these K + 1 probabilities gives at most the divergence of the whole
distributions, and exactly that where all tokens are listed.

Both gradients by the logits are `scale * softmax` with some sparse values (`SparseRows`): with the
derivative a_k of the divergence by p_k, and c for every token in the bucket, softmax's Jacobian
gives p_j (a_j - f), where f = sum_k p_k a_k + P c; so scale = c - f, and p_k (a_k - c) is added at
the listed tokens. A chunk of logits is all that is held, as for the cross entropy.

`sampled_token`, which needs no alternatives, is a weighting: `selection.advantage_weights`.

Shape letters: B sequences of T positions, N tokens in a row, K listed tokens, V rows of the head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vocagnolm.alternatives import NLL_STEPS, STEPS_PER_NAT
from vocagnolm.objective.head import IGNORE_INDEX, Bucket

SMALLEST_STUDENT = 1e-6
"""Below this a student's probability of the bucket is rounding: a difference from 1 in fp32."""
SMALLEST_TEACHER = math.exp(-NLL_STEPS / STEPS_PER_NAT)
"""The smallest probability that an alternative can have. The bucket's is no smaller, so that a
reverse divergence stays finite where rounded alternatives add up to 1."""


def forward_bucket(
    log_p_NK: Tensor, r_NK: Tensor, rest_N: Tensor, left_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(teacher || student)."""
    rest = rest_N.clamp(min=SMALLEST_STUDENT)
    listed = torch.where(r_NK > 0, torch.special.xlogy(r_NK, r_NK) - r_NK * log_p_NK, 0.0)
    bucket = torch.special.xlogy(left_N, left_N) - left_N * rest.log()
    ratio = left_N / rest
    values = torch.where(r_NK > 0, log_p_NK.exp() * ratio[:, None] - r_NK, 0.0)
    return listed.sum(1) + bucket, 1.0 - ratio, values


def reverse_bucket(
    log_p_NK: Tensor, r_NK: Tensor, rest_N: Tensor, left_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(student || teacher)."""
    p = log_p_NK.exp()
    above = torch.where(r_NK > 0, log_p_NK - r_NK.log(), 0.0)
    bucket = rest_N.clamp(min=SMALLEST_STUDENT).log() - left_N.clamp(min=SMALLEST_TEACHER).log()
    divergence = torch.where(r_NK > 0, p * above, 0.0).sum(1) + rest_N * bucket
    values = torch.where(r_NK > 0, p * (above - bucket[:, None]), 0.0)
    return divergence, bucket - divergence, values


BUCKETS: dict[str, Bucket] = {"forward": forward_bucket, "reverse": reverse_bucket}
"""The divergences over alternatives, by their names in `DIVERGENCES`."""


def bucket_distance(
    logits_BTV: Tensor, labels_BT: Tensor, ids_BTK: Tensor, r_BTK: Tensor, name: str
) -> Tensor:
    """[B, T]: by how much a divergence exceeds the label's nll, by full logits and autograd; 0
    where the label is ignored. The reference of `BUCKETS`."""
    log_p = F.log_softmax(logits_BTV, dim=-1)
    r, there = r_BTK.to(log_p.dtype), r_BTK > 0
    own = torch.where(there, log_p.gather(2, ids_BTK), 0.0)
    p = torch.where(there, own.exp(), 0.0)
    rest, left = (1.0 - p.sum(2)).clamp(min=0.0), (1.0 - r.sum(2)).clamp(min=0.0)
    rest_log, some_r = rest.clamp(min=SMALLEST_STUDENT).log(), torch.where(there, r, 1.0)
    if name == "forward":
        listed = torch.where(there, r * (some_r.log() - own), 0.0)
        divergence = listed.sum(2) + torch.special.xlogy(left, left) - left * rest_log
    else:
        listed = torch.where(there, p * (own - some_r.log()), 0.0)
        divergence = listed.sum(2) + rest * (rest_log - left.clamp(min=SMALLEST_TEACHER).log())
    label = labels_BT.clamp(min=0)[:, :, None]
    above = divergence + log_p.gather(2, label)[:, :, 0]
    return torch.where(labels_BT != IGNORE_INDEX, above, 0.0)
