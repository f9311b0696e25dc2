"""TRL's SFTTrainer under a teacher's guidance: answers alone are trained on, packed.

python examples/trl_sft.py            # conversations of the demo, scored on the spot

TRL makes labels and packs by itself and would lose the guidance on the way: `guide` makes the
labels, TRL's `pack_dataset` packs all columns, and the trainer leaves the dataset as it is. TRL's
own loss does not ask the model's loss function, that of transformers does; what TRL measures beside
it (entropy, mean_token_accuracy) is then not logged.
"""

import tempfile
from pathlib import Path
from typing import Any


def plain(model: Any, tokenizer: Any, dataset: Any, settings: dict[str, Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    settings |= {"assistant_only_loss": True, "packing": True, "max_length": 128}
    arguments = SFTConfig(**settings)
    trainer = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    return trainer


def guided(model: Any, tokenizer: Any, dataset: Any, settings: dict[str, Any], store: Any) -> Any:
    from trl import SFTConfig, SFTTrainer, pack_dataset

    from vocagnolm import GuidedCollator, guide, guided_loss

    dataset = pack_dataset(guide(dataset, store, tokenizer).remove_columns("messages"), 128)
    model.loss_function = guided_loss
    settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    arguments = SFTConfig(**settings)
    trainer = SFTTrainer(model, arguments, GuidedCollator(), dataset, processing_class=tokenizer)
    trainer.compute_loss = super(SFTTrainer, trainer).compute_loss  # that of transformers
    return trainer


if __name__ == "__main__":
    import demo_data

    with tempfile.TemporaryDirectory() as folder:
        dataset, store = demo_data.conversations(Path(folder))
        settings = {
            "output_dir": folder,
            "max_steps": 20,
            "learning_rate": 2e-3,
            "logging_steps": 1,
        }
        guided(*demo_data.student(), dataset, settings, store).train()
