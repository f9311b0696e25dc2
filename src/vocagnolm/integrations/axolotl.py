"""A plugin for axolotl, turned on by three lines of its YAML:

    plugins:
      - vocagnolm.integrations.axolotl.GuidedPlugin
    guidance: {store: out/store}

`guidance` also takes the options of `vocagnolm.guide` (`missing`, `train_on`, ...), and
`objective` with the keys of a recipe's section of that name. The datasets are read by axolotl and
tokenized by `guide`; `sequence_len`, `sample_packing`, `val_set_size`, adapters and all other
options are axolotl's.
"""

from typing import Any

from axolotl.common.datasets import TrainDatasetMeta
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from axolotl.loaders import load_tokenizer
from axolotl.utils.chat_templates import get_chat_template_from_config
from axolotl.utils.data.lock import FileLockLoader
from axolotl.utils.data.shared import load_dataset_with_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.trainer import calculate_total_num_steps
from datasets import DatasetDict, concatenate_datasets
from pydantic import BaseModel

from vocagnolm.errors import UsageError
from vocagnolm.integrations.columns import guide
from vocagnolm.integrations.trainer import GuidedTrainerMixin
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.train.collate import GuidedCollator

_OTHER_LOSSES = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "use_eaft")


class GuidedArgs(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    guidance: dict[str, Any]


class GuidedPlugin(BasePlugin):  # type: ignore[misc]
    """Gives axolotl datasets with a teacher's columns, a collator that keeps them together, and a
    trainer whose loss reads them."""

    def get_input_args(self) -> str:
        return "vocagnolm.integrations.axolotl.GuidedArgs"

    def register(self, cfg: dict[str, Any]) -> None:
        if not (cfg.get("guidance") or {}).get("store"):
            raise UsageError("GuidedPlugin needs a store, for example guidance: {store: out/store}")
        if other := [name for name in _OTHER_LOSSES if cfg.get(name)]:
            raise UsageError(f"{', '.join(other)} would replace the guided loss: turn it off.")
        cfg["remove_unused_columns"] = False

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> TrainDatasetMeta:
        loader = FileLockLoader(cfg)
        try:
            rows = loader.load(lambda: _rows(cfg))
        finally:
            loader.cleanup()
        held_out = None
        if cfg.val_set_size:
            parts = rows.train_test_split(cfg.val_set_size, seed=cfg.seed or 42)
            rows, held_out = parts["train"], parts["test"]
        steps = calculate_total_num_steps(cfg, rows)
        return TrainDatasetMeta(rows, held_out, min(steps, cfg.max_steps or steps))

    def get_trainer_cls(self, cfg: Any) -> Any:
        class GuidedAxolotlTrainer(GuidedTrainerMixin, AxolotlTrainer):  # type: ignore[misc]
            objective = ObjectiveConfig(**(cfg.guidance.get("objective") or {}))

        return GuidedAxolotlTrainer

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> Any:
        def collator(tokenizer: Any, *, pad_to_multiple_of: int = 1, **ignored: Any) -> Any:
            return GuidedCollator(
                max_length=cfg.sequence_len, pad_to_multiple_of=pad_to_multiple_of
            )

        return collator, {}


def _rows(cfg: Any) -> Any:
    """The datasets of a configuration, joined into one with the columns of `guide`."""
    tokenizer = load_tokenizer(cfg)
    if cfg.chat_template:
        tokenizer.chat_template = get_chat_template_from_config(cfg=cfg, tokenizer=tokenizer)
    options = {**cfg.guidance}
    store = options.pop("store")
    options.pop("objective", None)
    parts = []
    for entry in map(DictDefault, cfg.datasets):
        rows = load_dataset_with_config(entry, cfg.hf_use_auth_token)
        if isinstance(rows, DatasetDict):
            rows = rows[entry.split or "train"]
        field = {"text_field": entry.field} if entry.field else {}
        guided = guide(rows, store, tokenizer, num_proc=cfg.dataset_num_proc, **field, **options)
        parts.append(guided.remove_columns(rows.column_names))

    def length(row: dict[str, Any]) -> dict[str, int]:
        return {"length": min(len(row["input_ids"]), cfg.sequence_len)}

    return concatenate_datasets(parts).map(length)
