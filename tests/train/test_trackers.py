import html
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from training_kit import fresh_process, recipe_dict

import vocagnolm.train.trackers as trackers
from vocagnolm.alignment import load_tokenizer
from vocagnolm.errors import RecipeError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.check import check
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.metrics import MetricsFile
from vocagnolm.train.run import train
from vocagnolm.train.trackers import selected_text, tracker_problems


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
    """In place of TensorBoard's, whose package is not installed here."""

    made: ClassVar[list["Writer"]] = []

    def __init__(self, log_dir, purge_step=None):
        self.log_dir, self.purge_step, self.closed = log_dir, purge_step, False
        self.texts, self.scalars = {}, {}
        self.made.append(self)

    def add_text(self, name, text, global_step=0):
        self.texts[name, global_step] = text

    def add_scalar(self, name, value, global_step):
        self.scalars[name, global_step] = value

    def flush(self):
        pass

    def close(self):
        self.closed = True


def fake_trackers(monkeypatch):
    """The packages behind accelerate's trackers of W&B and TensorBoard; the calls of `wandb`."""
    calls = []
    config = SimpleNamespace(update=lambda values, **_: calls.append(("config", values)))
    fake = SimpleNamespace(run=None, Html=lambda text: text, config=config)

    def init(**options):
        calls.append(("init", options))
        if fake.run is None:
            fake.run = SimpleNamespace(
                id=options["id"],
                log=lambda values, step: calls.append(("log", (step, values))),
                finish=finish,
            )
        return fake.run

    def finish(exit_code):
        calls.append(("finish", exit_code))
        fake.run = None

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(trackers, "find_spec", lambda package: SimpleNamespace(origin="a.py"))
    monkeypatch.setattr(Writer, "made", [])
    for name in ("WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_DIR", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return calls, fake


def given_to(calls, name):
    return [values for called, values in calls if called == name]


def test_trackers_get_the_recipe_the_selection_and_the_same_run_again(lab, tmp_path, monkeypatch):
    calls, _ = fake_trackers(monkeypatch)
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
    assert calls[-1] == ("finish", 1)  # it failed
    fresh_process()
    assert train(recipe, quiet=True)["finished"]
    assert calls[-1] == ("finish", 0)

    first, second = given_to(calls, "init")
    assert first["project"] == "vocagnolm" and first["name"] == "run"
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert first["dir"] == str(tmp_path / "run")
    assert given_to(calls, "config")[0]["recipe"]["objective"]["method"] == "guided"
    logged = given_to(calls, "log")
    shown = [(step, values) for step, values in logged if "selected tokens" in values]
    assert [step for step, _ in shown] == [1, 2, 3, 4]
    text = shown[0][1]["selected tokens"]
    assert "<strong>" in text and len(text.replace("<strong>", "")) > 100
    measured = [(step, values) for step, values in logged if "train/loss" in values]
    assert [step for step, _ in measured] == [1, 2, 3, 4]
    assert all(values["train/global_step"] == step for step, values in measured)

    before, after = Writer.made
    assert before.log_dir == after.log_dir == str(tmp_path / "run" / "tensorboard")
    assert before.purge_step is None and after.purge_step == 3 and before.closed and after.closed
    assert "method: guided" in before.texts["recipe", 0] and ("selected tokens", 4) in after.texts
    assert after.scalars["train/kept_share", 4] == measured[-1][1]["train/kept_share"]


def test_a_run_that_the_caller_has_open_in_wandb_is_used_and_left_open(lab, tmp_path, monkeypatch):
    calls, wandb = fake_trackers(monkeypatch)
    wandb.init(id="mine")
    run = {"folder": str(tmp_path / "run"), "report_to": ["wandb"], "save_every": 0}
    train(recipe_from_dict(recipe_dict(lab, run=run, train={"tokens": 8 * 32})), quiet=True)
    assert wandb.run.id == "mine" and not given_to(calls, "finish")
    assert given_to(calls, "config")[0]["recipe"]["objective"]["method"] == "guided"


class Mine(GeneralTracker):
    """A tracker of a user's own, as accelerate registers it."""

    name = "mine"
    requires_logging_directory = False
    made: ClassVar[list["Mine"]] = []

    def __init__(self, project):
        super().__init__()
        self.project, self.recipe, self.logged, self.finished = project, None, [], False
        self.made.append(self)

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.recipe = values

    def log(self, values, step=None):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("first", [False, True])
def test_trackers_get_the_measures(lab, tmp_path, monkeypatch, first):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mine", Mine)
    monkeypatch.setattr(Mine, "made", [])
    run = {"folder": str(tmp_path / "run"), "log_every": 2, "report_to": ["mine"], "save_every": 0}
    steps = {"tokens": 4 * 8 * 32, "arguments": {"logging_first_step": first}}
    train(recipe_from_dict(recipe_dict(lab, run=run, train=steps)), quiet=True)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (mine,) = Mine.made
    assert mine.project == "vocagnolm" and mine.finished
    assert mine.recipe["objective.method"] == "guided" and mine.recipe["lora.rank"] == 0
    assert [step for step, _ in mine.logged] == [*[1] * first, 2, 4]
    _, values = mine.logged[-1]
    measures = ("loss", "nll_all", "kept_share", "excess_p50", "learning_rate", "grad_norm")
    assert {f"train/{name}" for name in measures} <= set(values)
    assert values["train/loss"] == pytest.approx(np.mean([r["loss"] for r in records[2:]]))


def test_what_is_kept_is_bold(lab):
    tokenizer = load_tokenizer(str(lab / "student"))
    ids = tokenizer.spans("let <x> be real\n").ids
    weights = torch.zeros(1, len(ids))
    weights[0, :2] = 1.0
    text = selected_text(tokenizer, torch.tensor(ids[None]), weights)
    kept = html.escape(b"".join(tokenizer.bytes_of(int(i)) for i in ids[:2]).decode())
    assert text.startswith(f"<strong>{kept}</strong>") and text.endswith("<br>")
    assert "&lt;x&gt;" in text.replace("<strong>", "").replace("</strong>", "")
