"""Per-token nll from hidden states, without the logits of the whole batch.

Logits are made tile by tile in float32 and folded into a running log-sum-exp: the memory is that
of one tile, whatever the batch times the vocabulary. bfloat16 logits would cost up to 0.08 nats.

Shape suffixes: N tokens, D hidden size, V vocabulary rows.
"""

from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from vocagnolm.objective.rows import Transform, losses

# float32 logits alive at a time. On a CPU a tile should stay near the caches; on a GPU it must be
# large enough to keep the matrix units busy.
CPU_TILE_BYTES = 32 * 2**20
CUDA_TILE_BYTES = 1280 * 2**20
# In half precision a CPU needs the weights in float32 too: this many rows are converted at a time,
# once for many tokens.
_CPU_HALF_ROWS = 2048


@torch.no_grad()
def token_nll(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
) -> torch.Tensor:
    """-log p(label) of every token, float32 [N].

    The logits are `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`, computed and
    kept in float32 whatever the inputs are. `chunk` is the number of tokens in a tile; None
    chooses it by memory.
    """
    tokens, rows = hidden_ND.shape[0], weight_VD.shape[0]
    if tokens == 0:
        return torch.empty(0, dtype=torch.float32, device=hidden_ND.device)
    transform = Transform(bias, softcap, scale)
    chunk = chunk or default_chunk(tokens, rows, hidden_ND)
    if _is_half_on_cpu(hidden_ND):
        return _nll_by_vocabulary(hidden_ND, weight_VD, labels_N, transform, chunk)
    row_losses = losses
    if hidden_ND.is_cuda and find_spec("triton") is not None:
        from vocagnolm.objective.triton_rows import losses as row_losses  # one pass over a tile
    nll_N = torch.empty(tokens, dtype=torch.float32, device=hidden_ND.device)
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        products = _products(hidden_ND[part], weight_VD)
        nll_N[part] = row_losses(products, labels_N[part], transform, False).nll_N
        del products  # before the next tile is made
    return nll_N


def default_chunk(tokens: int, rows: int, like: torch.Tensor) -> int:
    if _is_half_on_cpu(like):
        return max(1, CPU_TILE_BYTES // (4 * min(rows, _CPU_HALF_ROWS)))
    if like.is_cuda:  # whole tiles of the matrix kernels
        return max(1, CUDA_TILE_BYTES // (4 * rows) // 256) * 256
    return max(1, min(tokens, CPU_TILE_BYTES // (4 * rows)))


def _is_half_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)


def _products(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float32:
        # half-precision matrix units, float32 accumulation and output: exact at almost no cost
        return torch.mm(hidden_ND, weight_VD.t(), out_dtype=torch.float32)
    return F.linear(hidden_ND.float(), weight_VD.float())


def _nll_by_vocabulary(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    transform: Transform,
    chunk: int,
) -> torch.Tensor:
    """The same in strips of the vocabulary, with a running maximum and sum (online
    log-sum-exp): each weight is converted to float32 once per call, not once per tile."""
    tokens, rows = hidden_ND.shape[0], weight_VD.shape[0]
    hidden = hidden_ND.float()
    peak = torch.full((tokens,), -torch.inf)
    total = torch.zeros(tokens)
    chosen = torch.zeros(tokens)
    for low in range(0, rows, _CPU_HALF_ROWS):
        high = min(low + _CPU_HALF_ROWS, rows)
        strip = weight_VD[low:high].float()
        bias = None if transform.bias is None else transform.bias[low:high]
        strip_transform = replace(transform, bias=bias)
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            logits = strip_transform(_products(hidden[part], strip))
            new_peak = torch.maximum(peak[part], logits.amax(dim=1))
            here = (labels_N[part] >= low) & (labels_N[part] < high)
            column = (labels_N[part] - low).clamp(0, high - low - 1)
            picked = logits.gather(1, column[:, None]).squeeze(1)
            chosen[part] = torch.where(here, picked, chosen[part])
            added = logits.sub_(new_peak[:, None]).exp_().sum(dim=1)
            total[part] = total[part] * torch.exp(peak[part] - new_peak) + added
            peak[part] = new_peak
    return peak + torch.log(total) - chosen
