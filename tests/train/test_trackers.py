from types import SimpleNamespace

import pytest
from training_kit import recipe_dict
from transformers.integrations import TensorBoardCallback

import vocagnolm.train.trackers as trackers
from vocagnolm.errors import RecipeError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.check import check
from vocagnolm.train.run import train
from vocagnolm.train.trackers import keep_in_run, tracker_problems


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
    assert "tensorbord is no tracker" in problem and "tensorboard" in problem
    # the folder that wandb leaves in the current directory is no package
    monkeypatch.setattr(trackers, "find_spec", lambda package: SimpleNamespace(origin=None))
    assert len(tracker_problems(["wandb"])) == 1


def test_tensorboard_writes_into_the_run(tmp_path):
    ours, told = (TensorBoardCallback.__new__(TensorBoardCallback) for _ in range(2))
    ours.logging_dir, told.logging_dir = None, "/elsewhere"  # by TENSORBOARD_LOGGING_DIR
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[ours, told]))
    keep_in_run(trainer, tmp_path)
    assert ours.logging_dir == str(tmp_path / "tensorboard")
    assert told.logging_dir == "/elsewhere"


def test_settings_that_transformers_refuses_are_one_message(lab, tmp_path):
    run = {"folder": str(tmp_path / "run")}
    recipe = recipe_from_dict(recipe_dict(lab, run=run, optimizer={"name": "adamwx"}))
    with pytest.raises(RecipeError, match="adamwx"):
        train(recipe, quiet=True)
