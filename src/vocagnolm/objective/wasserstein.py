"""The distance of ULD: sum over ranks of |p_S sorted - p_T sorted|, and its gradient.

By sorting, or by counting. The sum over ranks is the area between the two functions "how many
probabilities are at least t", so a histogram of each vector is enough: no sort of 150,000 numbers
a token (`benchmarks/uld_gpu.py`). Counting is exact for probabilities rounded to `_STEPS` values
an octave (a relative 1e-3). Sorting is the reference, and serves small vocabularies.

Shape letters: N tokens, V rows of the student's head, U of the teacher's, B bins.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_MANTISSA_BITS = 9
_STEPS = 1 << _MANTISSA_BITS
_OCTAVES = 32
"""Down to 2^-32: all smaller probabilities of a vocabulary together weigh less than 1e-4."""
_BINS = _OCTAVES * _STEPS + 1
_SPARE = 256
"""Places where the smaller ones are counted, to be forgotten; one would be fought over."""


def wasserstein_rows(z_NV: Tensor, teacher_NU: Tensor) -> tuple[Tensor, Tensor]:
    """(distance [N], its gradient by the student's logits [N, V])."""
    p = F.softmax(z_NV, dim=-1)
    q = F.softmax(teacher_NU, dim=-1)
    large = p.shape[1] + q.shape[1] > 2 * _BINS and p.dtype == q.dtype == torch.float32
    distance, by_p = (by_counting if large else by_sorting)(p, q)
    # p is not needed any more: the softmax's Jacobian in its place
    return distance, by_p.sub_((by_p * p).sum(-1, keepdim=True)).mul_(p)


def by_sorting(p_NV: Tensor, q_NU: Tensor) -> tuple[Tensor, Tensor]:
    """(distance, its gradient by p)."""
    q = q_NU.sort(dim=-1, descending=True).values
    ranked, place = p_NV.sort(dim=-1, descending=True)
    v, u = ranked.shape[1], q.shape[1]
    beyond = q[:, v:].sum(-1) if u > v else 0.0
    if u < v:
        q = F.pad(q, (0, v - u))
    difference = ranked - q[:, :v]
    distance = difference.abs().sum(-1) + beyond
    return distance, torch.empty_like(p_NV).scatter_(1, place, difference.sign())


def by_counting(p_NV: Tensor, q_NU: Tensor) -> tuple[Tensor, Tensor]:
    """The same for float32 probabilities, without sorting them. Probabilities that fall into one
    bin share its mean gradient."""
    place = _bins(p_NV)
    in_bin = _histogram(place)
    p_from = _at_least(in_bin)
    q_from = _at_least(_histogram(_bins(q_NU)))
    values = _values(p_NV.device)
    width = torch.diff(values, prepend=values.new_zeros(1))
    distance = ((p_from - q_from).abs_() * width).sum(-1)
    # Ranks of this bin's entries: p_above + 1 ... p_from. Those beyond q_from meet a smaller q,
    # those up to q_above a larger one, the others their equal.
    p_above, q_above = p_from - in_bin, F.pad(q_from[:, 1:], (0, 1))
    larger = (p_from - torch.maximum(q_from, p_above)).clamp_(min=0)
    smaller = (torch.minimum(q_above, p_from) - p_above).clamp_(min=0)
    sign = (larger - smaller).div_(in_bin.clamp_(min=1))
    return distance, F.pad(sign, (0, _SPARE)).gather(1, place)


def _bins(probability: Tensor) -> Tensor:
    """Bin of each probability, rounded to the nearest. Positive floats are ordered like the
    integers with the same bits, so exponent and first bits of the mantissa number the bins."""
    shift = 23 - _MANTISSA_BITS
    rounded = (probability.view(torch.int32) + (1 << (shift - 1))) >> shift
    place = rounded - ((127 - _OCTAVES) << _MANTISSA_BITS)
    column = torch.arange(place.shape[1], device=place.device, dtype=torch.int32)
    return torch.where(place >= 0, place, _BINS + column % _SPARE).long()


def _histogram(place: Tensor) -> Tensor:
    counts = torch.zeros(len(place), _BINS + _SPARE, device=place.device)
    one = counts.new_ones(()).expand(place.shape)
    return counts.scatter_add_(1, place, one)[:, :_BINS]


def _at_least(counts: Tensor) -> Tensor:
    """How many are in each bin or above it."""
    return counts.sum(-1, keepdim=True) - counts.cumsum(-1) + counts


def _values(device: torch.device) -> Tensor:
    """The probability that each bin stands for."""
    shift = 23 - _MANTISSA_BITS
    first = (127 - _OCTAVES) << _MANTISSA_BITS
    bits = (torch.arange(_BINS, device=device, dtype=torch.int32) + first) << shift
    return bits.view(torch.float32)
