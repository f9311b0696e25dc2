"""For the examples in other people's trainers: the demo's pair, its store, and what the loop of
`vocagnolm train` makes of the same batches. Imports what every environment has."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from training_kit import built_loop

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS, BATCH, RATE = 5, 4, 2e-3
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
"""transformers' Trainer with the settings of `our_losses`."""


def load(path: str) -> Any:
    """An example, and what stands beside it."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))


def prepared(folder: Path, micro_batch: int = BATCH, **objective: Any) -> dict[str, Any]:
    """A recipe for the demo's pair, with store and blocks of some documents."""
    import demo_data

    from vocagnolm.data.prepare import prepare
    from vocagnolm.demo import students
    from vocagnolm.recipe import recipe_from_dict

    demo_data.texts(folder / "ours", 60)
    tree = {
        "student": {"model": str(students.START)},
        "corpus": {"files": [str(folder / "ours/corpus.jsonl")]},
        "store": {"path": str(folder / "ours/store")},
        "data": {"blocks": str(folder / "ours/blocks"), "block_size": 64},
        "objective": {"method": "guided", **objective},
        "optimizer": {
            "learning_rate": RATE,
            "min_learning_rate": RATE,
            "weight_decay": 0.0,
            "beta2": 0.999,
            "warmup_steps": 0,
        },
        "train": {
            "tokens": STEPS * BATCH * 64,
            "batch_blocks": BATCH,
            "micro_batch": micro_batch,
            "device": "cpu",
        },
        "run": {"folder": str(folder / "ours/run"), "save_every": 0},
    }
    if not (folder / "ours/blocks").exists():
        prepare(recipe_from_dict(tree))
    return tree


def our_losses(
    folder: Path, rows: Any, *, micro_batch: int = BATCH, packed: bool = False, **objective: Any
) -> list[float]:
    """The loss of every step when `vocagnolm train` reads these rows, in their order."""
    from vocagnolm.train import GuidedCollator

    losses: list[float] = []
    built_loop(
        prepared(folder, micro_batch, **objective),
        lambda record: losses.append(record["loss"]),
        order=rows,
        collator=GuidedCollator.for_blocks(packed),
    ).run()
    assert len(losses) == STEPS
    return losses


def cut(rows: Any, length: int = 128) -> list[dict[str, Any]]:
    """Rows as the collator cuts them."""
    names = ("input_ids", "labels", "guidance")
    return [{name: row[name][:length] for name in names} for row in rows]


def logged(trainer: Any) -> list[float]:
    """The losses of a trainer of transformers that has trained."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
