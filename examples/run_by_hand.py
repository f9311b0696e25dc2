"""A run of `vocagnolm train` once more, by hand: plain torch that reads the run's recipe and blocks
and ends in its weights. Nothing else of the package is used. The rules are those of "A run,
exactly" in docs/how-it-works.md.

python examples/run_by_hand.py RUN    # the folder of a finished run: cpt, guided or distill
"""

import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from vocagnolm.data.blocks import Blocks


def student(section: dict[str, Any], seed: int) -> Any:
    set_seed(seed)
    if section["model"] is not None:
        return AutoModelForCausalLM.from_pretrained(section["model"], dtype=torch.float32)
    settings = dict(section["config"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def weights(nll: Tensor, guidance: Tensor, keep: float) -> Tensor:
    """1 for the tokens of a micro-batch with the largest excess, and for those without guidance."""
    excess, mapped = (nll.detach() - guidance).flatten(), ~guidance.isnan().flatten()
    share, count = Fraction(str(keep)), int(mapped.sum())
    kept = max(1, int(share * count + Fraction(1, 2))) if count else 0  # rounded half up
    ranked = excess.masked_fill(~mapped, -math.inf).argsort(descending=True, stable=True)
    chosen = ~mapped
    chosen[ranked[:kept]] = True
    return chosen.view(nll.shape).float()


def summed_loss(model: Any, rows: list[dict[str, Any]], objective: dict[str, Any]) -> Tensor:
    """Position t reads token t and predicts token t + 1, to which all columns of it belong."""
    column = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    labels = column["input_ids"][:, 1:]
    logits = model(input_ids=column["input_ids"][:, :-1], use_cache=False).logits
    nll = cross_entropy(logits.mT, labels, reduction="none")
    if objective["method"] == "guided":
        return (weights(nll, column["guidance"][:, 1:], objective["keep"]) * nll).sum()
    if objective["method"] == "distill":  # equation 7
        ids, p = column["target_ids"][:, 1:].long(), column["target_p"][:, 1:]
        above = logits.gather(2, labels[..., None]) - logits.gather(2, ids)
        nll = nll + objective["mix"] * (p * above).sum(2)
    return nll.sum()


def run(folder: Path) -> Any:
    """The trained student."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    data, train, settings = recipe["data"], recipe["train"], recipe["optimizer"]
    seed, batch = recipe["run"]["seed"], train["batch_blocks"]
    distils = recipe["objective"]["method"] == "distill"
    blocks = Blocks(data["blocks"], data["block_size"], targets=distils)
    asked = train["tokens"] and train["tokens"] // data["block_size"]
    steps = (asked or int(train["epochs"] * len(blocks))) // batch
    model = student(recipe["student"], seed).train()
    decayed = [
        [p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [{"params": decayed[0], "weight_decay": settings["weight_decay"]}, {"params": decayed[1]}],
        betas=(settings["beta1"], settings["beta2"]),
        eps=1e-8,
        weight_decay=0.0,
    )
    warmup, peak, low = (
        settings[k] for k in ("warmup_steps", "learning_rate", "min_learning_rate")
    )
    for step in range(steps):
        if step < warmup:
            rate = peak * step / warmup  # 0 in the first step
        else:  # `low` would be reached one step after the last
            turn = math.pi * (step - warmup) / (steps - warmup)
            rate = low + (peak - low) * (1 + math.cos(turn)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = []
        for place in range(step * batch, (step + 1) * batch):
            epoch, number = divmod(place, len(blocks))
            order = np.random.default_rng([seed, epoch]).permutation(len(blocks))
            rows.append(blocks[int(order[number])])
        for first in range(0, batch, train["micro_batch"]):  # over which tokens compete
            part = rows[first : first + train["micro_batch"]]
            loss = summed_loss(model, part, recipe["objective"])
            (loss / (batch * data["block_size"])).backward()  # all tokens of the step
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"] or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    mine = run(Path(sys.argv[1])).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(Path(sys.argv[1], "model"), dtype=torch.float32)
    apart = max(float((mine[name] - w).abs().max()) for name, w in theirs.state_dict().items())
    print(f"the largest difference of a weight is {apart:.1e}")
