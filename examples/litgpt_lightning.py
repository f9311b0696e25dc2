"""LitGPT under a teacher's guidance: a data source, and the step of Lightning's Trainer.

python examples/litgpt_lightning.py   # a few documents of the demo, scored on the spot

`LitLLM` is the module of LitGPT's tutorial on its Python API; what guidance adds to it is one line
of its step. The commands `litgpt pretrain` and `litgpt finetune` compute their own cross entropy
from logits and targets alone, so that no guidance reaches them.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from litgpt import LLM
from litgpt.data import DataModule
from torch.utils.data import DataLoader
from transformers import AutoConfig

from vocagnolm import GuidedCollator, guide, guided_loss


class LitLLM(L.LightningModule):
    def __init__(self, checkpoint_dir: Path, tied: bool = False):
        super().__init__()
        self.llm, self.tied = LLM.load(checkpoint_dir, distribute=None), tied

    def setup(self, stage: str) -> None:
        self.llm.trainer_setup()
        if self.tied:  # a checkpoint of LitGPT does not say so
            self.llm.model.lm_head.weight = self.llm.model.transformer.wte.weight

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        _, loss = self.llm(batch["input_ids"], target_ids=batch["labels"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.llm.model.parameters(), lr=2e-3, weight_decay=0.0)


class GuidedLLM(LitLLM):
    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        loss = guided_loss(self.llm(batch["input_ids"]), batch["labels"], batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss


@dataclass
class GuidedData(DataModule):
    """Texts or conversations with their guidance, in the tokens of a LitGPT checkpoint."""

    dataset: Any
    store: Path
    checkpoint_dir: Path
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__init__()

    def connect(
        self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None
    ) -> None:
        self.batch_size, self.collate = batch_size, GuidedCollator(max_length=max_seq_length)

    def setup(self, stage: str = "") -> None:
        self.rows = guide(self.dataset, self.store, self.checkpoint_dir)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, self.batch_size, self.shuffle, collate_fn=self.collate)


def demo_checkpoint(folder: Path) -> Path:
    """The demo's student as `litgpt convert_to_litgpt` makes it; a model that LitGPT has no name
    for needs its sizes."""
    from litgpt.config import name_to_config
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

    from vocagnolm.demo import students

    shutil.copytree(students.START, folder)
    read = AutoConfig.from_pretrained(folder)
    name_to_config[folder.name] = {
        "name": folder.name,
        "block_size": read.max_position_embeddings,
        "n_layer": read.num_hidden_layers,
        "n_embd": read.hidden_size,
        "n_head": read.num_attention_heads,
        "n_query_groups": read.num_key_value_heads,
        "head_size": read.head_dim,
        "intermediate_size": read.intermediate_size,
        "padded_vocab_size": read.vocab_size,
        "vocab_size": read.vocab_size,
        "norm_eps": read.rms_norm_eps,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
    }
    convert_hf_checkpoint(folder, dtype="float32")
    return folder


if __name__ == "__main__":
    import demo_data

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = demo_checkpoint(Path(scratch) / "demo")
        data = GuidedData(*demo_data.texts(Path(scratch)), checkpoint)
        model = GuidedLLM(checkpoint, tied=True)
        data.connect(model.llm.tokenizer, batch_size=8, max_seq_length=128)
        L.Trainer(max_steps=20, accelerator="cpu", default_root_dir=scratch).fit(model, data)
