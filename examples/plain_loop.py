"""The shortest loop with the guided loss: blocks, a model, AdamW. No trainer, no recipe.

python examples/plain_loop.py                 # a few documents of the demo, made on the spot
python examples/plain_loop.py BLOCKS MODEL    # blocks that `vocagnolm prepare` made
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from vocagnolm import Head, ObjectiveConfig, objective_loss
from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.train import BlockCollator
from vocagnolm.train.student import batch_targets

STEPS, ROWS, LENGTH = 30, 8, 128


def train(blocks: str, model: str) -> list[float]:
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    order = TrainingOrder(Blocks(blocks, LENGTH), STEPS * ROWS, seed=0)
    loader = torch.utils.data.DataLoader(order, ROWS, collate_fn=BlockCollator())
    head = Head(weight=student.lm_head.weight)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    losses = []
    for step, batch in enumerate(loader):
        hidden = student.model(batch["input_ids"]).last_hidden_state
        output = objective_loss(hidden, head, batch_targets(batch), ObjectiveConfig(), step=step)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
        print(f"{step:3}  loss {losses[-1]:.3f}  kept {output.stats['kept_share']:.0%}")
    return losses


def demo_blocks(folder: Path) -> tuple[str, str]:
    """The demo's teacher reads some of its documents; the blocks, and the student to start with."""
    from vocagnolm.data.prepare import prepare
    from vocagnolm.demo import corpus, students

    corpus.write_jsonl(folder / "corpus.jsonl", corpus.corpus_documents(200))
    students.score(students.TEACHER, folder / "corpus.jsonl", folder / "store")
    prepare(students.recipe_of(folder, "guided", 0, students.Budget()))
    return str(folder / "blocks"), str(students.START)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as made:
            train(*demo_blocks(Path(made)))
