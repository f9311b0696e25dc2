"""transformers' Trainer under a teacher's guidance.

python examples/hf_trainer.py         # a few documents of the demo, scored on the spot
"""

import tempfile
from pathlib import Path
from typing import Any


def plain(model: Any, tokenizer: Any, dataset: Any, arguments: Any) -> Any:
    from transformers import DataCollatorForLanguageModeling, Trainer

    dataset = dataset.map(lambda row: tokenizer(row["text"] + tokenizer.eos_token))
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return Trainer(model, arguments, train_dataset=dataset, data_collator=collator)


def guided(model: Any, tokenizer: Any, dataset: Any, arguments: Any, store: Any) -> Any:
    from vocagnolm import GuidedCollator, GuidedTrainer, guide

    dataset = guide(dataset, store, tokenizer)
    collator = GuidedCollator(max_length=128)
    return GuidedTrainer(model, arguments, train_dataset=dataset, data_collator=collator)


if __name__ == "__main__":
    import demo_data
    from transformers import TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        dataset, store = demo_data.texts(Path(folder))
        arguments = TrainingArguments(
            folder, max_steps=20, learning_rate=2e-3, logging_steps=1, report_to="none"
        )
        guided(*demo_data.student(), dataset, arguments, store).train()
