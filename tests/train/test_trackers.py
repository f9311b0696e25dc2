import html
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from training_kit import fresh_process, recipe_dict
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

import vocagnolm.train.metrics as trackers
from vocagnolm.alignment import load_tokenizer
from vocagnolm.errors import RecipeError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.check import check
from vocagnolm.train.metrics import MetricsFile, selected_text, tracker_problems
from vocagnolm.train.run import train


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_tracker_is_said_before_anything_is_written(name, lab, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    run = {"folder": str(tmp_path / "run"), "report_to": [name]}
    recipe = recipe_from_dict(recipe_dict(lab, run=run))
    (problem,) = check(recipe).problems
    assert f"pip install {name}" in problem and "run.report_to" in problem
    with pytest.raises(RecipeError, match=f"pip install {name}"):
        train(recipe, quiet=True)
    assert not (tmp_path / "run").exists()


def test_names_of_trackers(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: SimpleNamespace(origin="a.py"))
    assert tracker_problems(["tensorboard", "wandb", "mlflow", "none"]) == []
    (problem,) = tracker_problems(["tensorbord"])
    assert "tensorbord is not a tracker" in problem and "tensorboard" in problem
    # the folder that wandb leaves in the current directory is no package
    monkeypatch.setattr(trackers, "find_spec", lambda package: SimpleNamespace(origin=None))
    assert len(tracker_problems(["wandb"])) == 1


def test_settings_that_transformers_refuses_are_one_message(lab, tmp_path):
    run = {"folder": str(tmp_path / "run")}
    recipe = recipe_from_dict(recipe_dict(lab, run=run, optimizer={"name": "adamwx"}))
    with pytest.raises(RecipeError, match="adamwx"):
        train(recipe, quiet=True)


class Writer:
    """In place of TensorBoard's, which is not installed here."""

    made: ClassVar[list["Writer"]] = []

    def __init__(self, log_dir, purge_step=None):
        self.log_dir, self.purge_step = log_dir, purge_step
        self.texts, self.scalars = {}, []
        self.made.append(self)

    def add_text(self, name, text, step=0):
        self.texts[name, step] = text

    def add_scalar(self, name, value, step):
        self.scalars.append((name, step))

    def flush(self):
        pass

    close = flush


def fake_trackers(monkeypatch):
    """W&B and TensorBoard as the Trainer finds them; the calls of `wandb`."""
    from transformers.integrations import integration_utils

    calls = []
    fake = SimpleNamespace(run=None, Html=lambda text: text)

    def init(**options):
        calls.append(("init", options))
        fake.run = SimpleNamespace(id=options["id"])

    def finish():
        calls.append(("finish", None))
        fake.run = None

    fake.init, fake.finish = init, finish
    fake.log = lambda values: calls.append(("log", values))
    board = type(
        "TensorBoardCallback",
        (TensorBoardCallback,),
        {"__init__": lambda self: self.__dict__.update(
            _SummaryWriter=Writer, tb_writer=None, logging_dir=None
        )},
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", fake)
    known = {"wandb": type("WandbCallback", (TrainerCallback,), {}), "tensorboard": board}
    monkeypatch.setattr(integration_utils, "INTEGRATION_TO_CALLBACK", known)
    monkeypatch.setattr(trackers, "find_spec", lambda package: SimpleNamespace(origin="a.py"))
    monkeypatch.setattr(Writer, "made", [])
    for name in ("WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_DIR", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_trackers_get_the_recipe_the_selection_and_the_same_run_again(lab, tmp_path, monkeypatch):
    calls = fake_trackers(monkeypatch)
    run = {"folder": str(tmp_path / "run"), "report_to": ["wandb", "tensorboard"], "save_every": 2}
    recipe = recipe_from_dict(recipe_dict(lab, run=run, train={"tokens": 4 * 8 * 32}))

    def stop_at_three(trainer, record):
        if record["step"] == 3:
            raise KeyboardInterrupt

    fresh_process()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        real = MetricsFile.append
        patch.setattr(MetricsFile, "append", lambda *a: (real(*a), stop_at_three(*a)))
        train(recipe, quiet=True)
    fresh_process()
    assert train(recipe, quiet=True)["finished"]

    (_, first), *between, (_, second) = [call for call in calls if call[0] == "init"]
    assert between == [] and first["id"] == second["id"] and first["resume"] == "allow"
    assert first["config"]["recipe"]["objective"]["method"] == "guided"
    assert first["dir"] == str(tmp_path / "run")
    assert calls[-1][0] == "finish"
    shown = [values for name, values in calls if name == "log"]
    assert [values["train/global_step"] for values in shown] == [1, 2, 3, 4]
    text = shown[0]["selected tokens"]
    assert "<strong>" in text and len(text.replace("<strong>", "")) > 100

    before, after = Writer.made
    assert before.log_dir == after.log_dir == str(tmp_path / "run" / "tensorboard")
    assert before.purge_step is None and after.purge_step == 3
    assert "method: guided" in before.texts["recipe", 0] and ("selected tokens", 4) in after.texts


def test_what_is_kept_is_bold(lab):
    tokenizer = load_tokenizer(str(lab / "student"))
    ids = tokenizer.spans("let <x> be real\n").ids
    weights = torch.zeros(1, len(ids))
    weights[0, :2] = 1.0
    text = selected_text(tokenizer, torch.tensor(ids[None]), weights)
    kept = html.escape(b"".join(tokenizer.bytes_of(int(i)) for i in ids[:2]).decode())
    assert text.startswith(f"<strong>{kept}</strong>") and text.endswith("<br>")
    assert "&lt;x&gt;" in text.replace("<strong>", "").replace("</strong>", "")
