"""A loop of one's own with accelerate, under a teacher's guidance.

python examples/accelerate_loop.py    # a few documents of the demo, scored on the spot
accelerate launch examples/accelerate_loop.py    # on several GPUs, with their configuration
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader

from vocagnolm import GuidedCollator, guide, guided_loss
from vocagnolm.objective import count_items

STEPS, ROWS, MICRO_BATCHES = 30, 4, 2


def train(model: Any, tokenizer: Any, dataset: Any, store: Any) -> list[float]:
    # the end of the data must not end an accumulation: which micro-batches make a step is ours
    plugin = GradientAccumulationPlugin(num_steps=MICRO_BATCHES, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    rows = DataLoader(
        guide(dataset, store, tokenizer), ROWS, collate_fn=GuidedCollator(max_length=128)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    # backward divides by the micro-batches and DDP by the processes, and `items` counts all labels
    scale = MICRO_BATCHES * accelerator.num_processes
    batches, losses = iter(rows), []
    for step in range(STEPS):
        micro_batches = [next(batches) for _ in range(MICRO_BATCHES)]
        items, total = count_items(micro_batches), 0.0
        for batch in micro_batches:
            with accelerator.accumulate(model):
                logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                loss = guided_loss(logits, batch["labels"], batch, num_items_in_batch=items)
                accelerator.backward(loss * scale)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach()).item()
        losses.append(total)
        accelerator.print(f"{step:3}  loss {total:.3f}")
    return losses


if __name__ == "__main__":
    import demo_data

    with tempfile.TemporaryDirectory() as folder:
        train(*demo_data.student(), *demo_data.texts(Path(folder), STEPS * ROWS * MICRO_BATCHES))
