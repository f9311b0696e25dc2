"""TRL's SFTTrainer under a teacher's guidance: answers alone are trained on, packed.

python examples/trl_sft.py            # conversations of the demo, scored on the spot

TRL makes labels and packs by itself and would lose the guidance on the way: `guide` makes the
labels, TRL's `pack_dataset` packs all columns, and the trainer is told to leave the dataset as it is.
Its loss never asks the model's loss function, so that `compute_loss` is the Trainer's again; TRL's
own measures (entropy, mean_token_accuracy) are then not logged.
"""

import tempfile
from pathlib import Path
from typing import Any


def plain(model: Any, tokenizer: Any, dataset: Any, **settings: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        assistant_only_loss=True,
        packing=True,
        max_length=128,
        **settings,
    )
    return SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)


def guided(model: Any, tokenizer: Any, dataset: Any, store: Any, **settings: Any) -> Any:
    from transformers import Trainer
    from trl import SFTConfig, SFTTrainer, pack_dataset

    from vocagnolm import GuidedCollator, guide, guided_loss

    class GuidedSFTTrainer(SFTTrainer):
        compute_loss = Trainer.compute_loss

    dataset = guide(dataset, store, tokenizer).remove_columns(dataset.column_names)
    model.loss_function = guided_loss
    arguments = SFTConfig(
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        **settings,
    )
    return GuidedSFTTrainer(
        model,
        arguments,
        train_dataset=pack_dataset(dataset, 128),
        processing_class=tokenizer,
        data_collator=GuidedCollator(),
    )


if __name__ == "__main__":
    import demo_data

    with tempfile.TemporaryDirectory() as folder:
        dataset, store = demo_data.conversations(Path(folder))
        settings = {"max_steps": 20, "learning_rate": 2e-3, "logging_steps": 1}
        model, tokenizer = demo_data.student()
        guided(model, tokenizer, dataset, store, output_dir=folder, **settings).train()
