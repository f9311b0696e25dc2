"""axolotl with its plugin: `make test-trainers`."""

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from trainers_kit import BATCH, EXAMPLES, RATE, STEPS, cut, load, our_losses
from training_kit import ROUNDING

pytest.importorskip("axolotl", reason="`make test-trainers`")


def settings(folder: Path, start: Path, **more):
    """The example's, on the demo's pair."""
    tree = yaml.safe_load((EXAMPLES / "axolotl/guided.yaml").read_text())
    tree["datasets"][0]["path"] = str(folder / "corpus.jsonl")
    return tree | {
        "guidance": {"store": str(folder / "store")},
        "base_model": str(start),
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
        "micro_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler": "constant",
        "sequence_len": 128,
        "sample_packing": False,
        "curriculum_sampling": True,  # in their order
        "bf16": False,
        "torch_dtype": "float32",
        "use_cpu": True,
        "tf32": False,
        "pad_to_sequence_len": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "weight_decay": 0.0,
        "special_tokens": {"pad_token": "</s>"},
        **more,
    }


def trained(tree, monkeypatch):
    """What axolotl logs of every step."""
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train
    from axolotl.utils.dict import DictDefault
    from transformers import Trainer, TrainerCallback

    logs = []

    class Logs(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(logs)

    seen = logs
    begin = Trainer.train

    def train(self, *args, **kwargs):
        self.add_callback(Logs())
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", train)
    do_train(load_cfg(DictDefault(tree)), None)
    steps = [entry for entry in logs if "loss" in entry]
    assert all(0.2 < float(entry["kept_share"]) < 0.7 for entry in steps)
    return [float(entry["loss"]) for entry in steps]


def test_the_plugin_makes_the_steps_of_our_loop(tmp_path, monkeypatch):
    from vocagnolm import guide
    from vocagnolm.demo import students

    sys.modules["demo_data"] = demo = load("demo_data.py")
    dataset, store = demo.texts(tmp_path, STEPS * BATCH)
    rows = cut(guide(dataset, store, demo.student()[1]))
    expected = our_losses(tmp_path, rows)
    losses = trained(settings(tmp_path, students.START), monkeypatch)
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)


ADAPTERS = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
ADAPTERS |= {f"lora_{name}_kernel": False for name in ("mlp", "qkv", "o")}  # which are CUDA's


@pytest.mark.parametrize("more", [{"sample_packing": True}, ADAPTERS], ids=["packed", "adapters"])
def test_it_packs_and_adapts(tmp_path, monkeypatch, more):
    from vocagnolm.demo import students

    sys.modules["demo_data"] = demo = load("demo_data.py")
    demo.texts(tmp_path, 200)
    losses = trained(settings(tmp_path, students.START, **more), monkeypatch)
    assert len(losses) == STEPS and all(0 < loss < 2 for loss in losses)


def test_a_loss_that_would_win_is_refused(tmp_path):
    from vocagnolm.errors import UsageError
    from vocagnolm.integrations.axolotl import GuidedPlugin

    with pytest.raises(UsageError, match="cut_cross_entropy"):
        GuidedPlugin().register({"guidance": {"store": "s"}, "cut_cross_entropy": True})
    with pytest.raises(UsageError, match="needs a store"):
        GuidedPlugin().register({})
