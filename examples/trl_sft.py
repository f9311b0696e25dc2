"""TRL's SFTTrainer under a teacher's guidance: answers alone are trained on, packed.

python examples/trl_sft.py            # conversations of the demo, scored on the spot

Two lines more than plain: `guide` gives the dataset its columns, labels of the answers among them,
and `GuidedTrainerMixin` stands before SFTTrainer. TRL's `max_length`, `packing` and `peft_config`
work as ever; what it measures beside its own loss (entropy, mean_token_accuracy) is not logged.
"""

import tempfile
from pathlib import Path
from typing import Any


def plain(model: Any, tokenizer: Any, dataset: Any, settings: dict[str, Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(assistant_only_loss=True, packing=True, max_length=128, **settings)
    return SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)


def guided(model: Any, tokenizer: Any, dataset: Any, settings: dict[str, Any], store: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    from vocagnolm import GuidedTrainerMixin, guide

    class GuidedSFTTrainer(GuidedTrainerMixin, SFTTrainer): ...

    dataset = guide(dataset, store, tokenizer)
    arguments = SFTConfig(packing=True, max_length=128, **settings)
    return GuidedSFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)


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
