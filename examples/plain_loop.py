"""The shortest loop with the guided loss: a dataset, a model, AdamW. No trainer, no recipe.

python examples/plain_loop.py         # a few documents of the demo, scored on the spot
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from vocagnolm import GuidedCollator, guide, guided_loss
from vocagnolm.objective import count_items

STEPS, ROWS, MICRO_BATCHES = 30, 4, 2


def train(model: Any, tokenizer: Any, dataset: Any, store: Any) -> list[float]:
    rows = guide(dataset, store, tokenizer)
    batches = iter(DataLoader(rows, ROWS, collate_fn=GuidedCollator(max_length=128)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        micro_batches = [next(batches) for _ in range(MICRO_BATCHES)]
        items, total = count_items(micro_batches), 0.0
        for batch in micro_batches:
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = guided_loss(logits, batch["labels"], batch, num_items_in_batch=items)
            loss.backward()  # with DDP: times the number of processes
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        print(f"{step:3}  loss {total:.3f}")
    return losses


if __name__ == "__main__":
    import demo_data

    with tempfile.TemporaryDirectory() as folder:
        train(*demo_data.student(), *demo_data.texts(Path(folder), STEPS * ROWS * MICRO_BATCHES))
