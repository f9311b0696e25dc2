"""What is said of a GPU that a run leaves unused."""

from types import SimpleNamespace

import pytest
import torch
from training_kit import recipe_dict

from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train import check
from vocagnolm.train.settings import plan_schedule, room_left, slow_arithmetic
from vocagnolm.train.student import build_student, choose_attention

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """As if there were one, of which a run has taken 20 of 80 GiB."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "current_device": 0,
        "max_memory_reserved": 20 * GIB,
        "get_device_properties": SimpleNamespace(total_memory=80 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return monkeypatch


def recipe_of(lab, train=None, **sections):
    return recipe_from_dict(recipe_dict(lab, train={"device": "auto", **(train or {})}, **sections))


def test_float32_on_a_gpu(lab, gpu):
    recipe = recipe_of(lab)
    assert "Set train.dtype: bfloat16" in slow_arithmetic(recipe)
    assert slow_arithmetic(recipe_of(lab, {"dtype": "bfloat16"})) is None
    assert slow_arithmetic(recipe_of(lab, {"device": "cpu"})) is None
    half = {**recipe_dict(lab)["student"], "dtype": "bfloat16"}
    assert slow_arithmetic(recipe_of(lab, student=half)) is None
    gpu.undo()
    assert slow_arithmetic(recipe) is None


def test_check_says_it_too(lab, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "slow_arithmetic", lambda recipe: "slow, said the test")
    report = check.check(recipe_of(lab, run={"folder": str(tmp_path / "run")}))
    assert report.ready and "slow, said the test" in report.warnings


def test_room_for_more_blocks(lab, gpu):
    schedule = plan_schedule(recipe_of(lab), 100)
    assert schedule.accumulation == 2
    said = room_left(schedule)
    assert said.startswith("4 blocks at a time take 20.0 of 80.0 GiB: train.micro_batch: auto")
    assert room_left(plan_schedule(recipe_of(lab, {"micro_batch": 8}), 100)) is None
    gpu.setattr(torch.cuda, "max_memory_reserved", lambda: 40 * GIB)
    assert room_left(schedule) is None
    gpu.undo()
    assert room_left(schedule) is None


@pytest.mark.parametrize(
    ("attention", "documents", "block_size", "expected"),
    [
        ("auto", True, 256, "flex_attention"),
        ("auto", False, 256, "sdpa"),
        ("auto", True, 200, "sdpa"),
        (None, True, 256, "sdpa"),
        ("eager", True, 256, "eager"),
    ],
)
def test_attention_that_passes_over_what_is_hidden(
    lab, gpu, attention, documents, block_size, expected
):
    tree = recipe_dict(lab)
    recipe = recipe_of(
        lab,
        student={**tree["student"], "attention": attention},
        data={**tree["data"], "block_size": block_size},
    )
    model = build_student(recipe)
    choose_attention(model, recipe, documents=documents)
    assert model.config._attn_implementation == expected
    gpu.undo()
    other = build_student(recipe)
    choose_attention(other, recipe, documents=documents)
    assert other.config._attn_implementation == ("eager" if attention == "eager" else "sdpa")
