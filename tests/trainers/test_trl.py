"""TRL's SFTTrainer: `make test-trainers`."""

import sys

import numpy as np
import pytest
from trainers_kit import ARGUMENTS, BATCH, load, logged, our_losses
from training_kit import ROUNDING

pytest.importorskip("trl", reason="`make test-trainers`")


def test_sft_on_packed_answers_makes_the_steps_of_our_loop(tmp_path):
    sys.modules["demo_data"] = demo = load("demo_data.py")
    dataset, store = demo.conversations(tmp_path, 60)
    sft = load("trl_sft.py")

    def trainer():
        settings = {**ARGUMENTS, "output_dir": str(tmp_path / "out"), "bf16": False}
        return sft.guided(*demo.student(), dataset, settings, store)

    packed = trainer().train_dataset
    assert max(map(len, packed["seq_lengths"])) > 1
    rows = []
    for row in packed:
        lengths = row.pop("seq_lengths")
        rows.append({**row, "document": np.repeat(np.arange(len(lengths)), lengths)})
    trained = np.concatenate([row["labels"] for row in rows]) != -100
    assert 0.2 < trained.mean() < 0.8
    expected = our_losses(tmp_path, rows[: 5 * BATCH], packed=True)
    made = trainer()
    made.train()
    np.testing.assert_allclose(logged(made), expected, rtol=ROUNDING)


def test_the_example_without_guidance_trains_too(tmp_path):
    sys.modules["demo_data"] = demo = load("demo_data.py")
    dataset, _ = demo.conversations(tmp_path, 60)
    settings = {**ARGUMENTS, "output_dir": str(tmp_path / "out"), "bf16": False, "max_steps": 1}
    made = load("trl_sft.py").plain(*demo.student(), dataset, settings)
    made.train()
    assert len(logged(made)) == 1
