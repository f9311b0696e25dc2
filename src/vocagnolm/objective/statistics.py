"""What a training log wants to know of one micro-batch."""

import torch
from torch import Tensor

QUANTILES = (0.1, 0.5, 0.9)


@torch.no_grad()
def statistics(
    nll_BT: Tensor, selected_BT: Tensor, valid_BT: Tensor, guidance_BT: Tensor | None
) -> dict[str, Tensor]:
    """0-dim tensors on the device; none of them makes the host wait."""
    n_valid = valid_BT.sum().clamp(min=1)
    n_selected = selected_BT.sum()
    stats = {
        "loss_selected": (nll_BT * selected_BT).sum() / n_selected.clamp(min=1),
        "loss_all": (nll_BT * valid_BT).sum() / n_valid,
        "selected_share": n_selected / n_valid,
        "mapped_share": torch.zeros((), device=nll_BT.device),
    }
    if guidance_BT is None:
        return stats
    mapped_BT = valid_BT & ~torch.isnan(guidance_BT)
    stats["mapped_share"] = mapped_BT.sum() / n_valid
    # NaN (unmapped) sorts last: the quantiles are the nearest ranks among the first n
    excess = torch.where(mapped_BT, nll_BT - guidance_BT.float(), torch.nan)
    ranked = excess.flatten().sort().values
    last = (mapped_BT.sum() - 1).clamp(min=0)
    for q in QUANTILES:
        nearest = (last * q).round().long()
        stats[f"excess_p{round(100 * q)}"] = ranked.gather(0, nearest[None]).squeeze(0)
    return stats
