"""Where the seconds of a run went."""

import dataclasses
import json
import threading

import pytest
import yaml
from training_kit import recipe_dict
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import BlocksError
from vocagnolm.train import metrics, run
from vocagnolm.train.folder import read_run
from vocagnolm.train.metrics import Clock, Times


@pytest.fixture
def recipe(lab, tmp_path):
    tree = recipe_dict(
        lab, train={"tokens": 512}, run={"folder": str(tmp_path / "run"), "save_every": 0}
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_the_command_tells_them(recipe, tmp_path):
    told = CliRunner().invoke(app, ["train", str(recipe)])
    assert told.exit_code == 0, told.output
    assert "the first step was made after " in told.stderr
    assert told.stdout.splitlines()[-1].startswith("seconds: start ")
    about = read_run(tmp_path / "run")
    found = Times(**about["times"])
    assert 0 < found.start < about["seconds_to_first_step"] < found.total
    assert found.loading > 0 and found.training > 0 and found.finishing > 0
    assert found.compiling == 0
    again = json.loads(CliRunner().invoke(app, ["train", str(recipe), "--json"]).stdout)
    assert again["already_finished"] and again["times"] is None


def test_the_clock_tells_compiling_apart_and_counts_what_came_before(monkeypatch):
    now, compiled = [100.0], [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(metrics, "compiling_seconds", lambda: compiled[0])
    clock = Clock(earlier=7.0)
    now[0] += 3
    clock.end("start")
    now[0] += 10
    compiled[0] = 6
    assert clock.step() and not clock.step() and clock.first_step == 20
    clock.end("training")
    now[0] += 1
    clock.end("training")
    expected = Times(start=10, compiling=6, training=5)
    assert dataclasses.asdict(clock.times) == dataclasses.asdict(expected)
    assert clock.times.total == 21


def test_the_student_is_loaded_while_the_blocks_are_read(recipe, monkeypatch):
    """Neither ends before the other has begun."""
    both = threading.Barrier(2, timeout=30)

    def meeting(function):
        def call(*args, **kwargs):
            both.wait()
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(run, "build_student", meeting(run.build_student))
    monkeypatch.setattr(run, "damaged_parts", meeting(run.damaged_parts))
    assert CliRunner().invoke(app, ["train", str(recipe)]).exit_code == 0


def test_damaged_blocks_are_told_although_the_student_is_loaded(recipe, monkeypatch):
    monkeypatch.setattr(run, "damaged_parts", lambda folder, manifest: ["part 0: cut short"])
    told = CliRunner().invoke(app, ["train", str(recipe)])
    assert isinstance(told.exception, BlocksError) and "part 0: cut short" in str(told.exception)
