"""Training on a GPU is training on a CPU, sooner; the host does not wait for it."""

import pytest
import torch
from training_kit import LLAMA, built_loop, built_setup, recipe_dict

from vocagnolm.errors import TrainingError
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train import run, student
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.micro_batch import find_micro_batch

pytestmark = pytest.mark.gpu


def tree(lab, folder, device="cuda", **sections):
    return recipe_dict(
        lab,
        train={
            "device": "cpu" if device == "cpu" else "auto",
            "tokens": 6 * 256,
            "micro_batch": 4,
            "dtype": "float32",
            **sections.pop("train", {}),
        },
        run={"folder": str(folder), "save_every": 4, "log_every": 5},
        **sections,
    )


@pytest.mark.parametrize(
    "objective",
    [
        {"method": "guided"},
        {"method": "guided", "scope": "global"},
        {"method": "guided", "compare": "stretch", "weighting": "reducible"},
        {"method": "cpt"},
        {"method": "alm"},
        {"method": "distill", "mix": 1.0},
        {"method": "distill", "keep": 0.4},
        {"method": "distill", "weighting": "reducible", "mix_end": 0.0},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_the_losses_are_a_cpus(lab, tmp_path, objective):
    found = {}
    for device in ("cpu", "cuda"):
        run.train(
            recipe_from_dict(tree(lab, tmp_path / device, device, objective=objective)), quiet=True
        )
        found[device] = read_metrics(tmp_path / device / "metrics.jsonl")
    assert [r["step"] for r in found["cuda"]] == [1, 2, 3, 4, 5, 6]
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        for name in ("loss", "nll_kept", "kept_share"):
            assert there[name] == pytest.approx(here[name], rel=2e-2 if name != "loss" else 1e-2)
        assert there["tokens_per_second"] > 0 and 0 <= there["data_wait_share"] <= 1


def test_compiled_bf16_layers_train_as_well(lab, tmp_path):
    found = {}
    for compiled in (False, True):
        train = {"dtype": "bfloat16", "compile": compiled}
        run.train(recipe_from_dict(tree(lab, tmp_path / str(compiled), train=train)), quiet=True)
        found[compiled] = [
            r["loss"] for r in read_metrics(tmp_path / str(compiled) / "metrics.jsonl")
        ]
    assert found[True] == pytest.approx(found[False], rel=2e-2)


def test_fp8_trains_as_well(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(student, "FP8_WIDTH", 0)
    found = {}
    for name, train in {
        "half": {"dtype": "bfloat16"},
        "fp8": {"dtype": "fp8"},
        "compiled": {"dtype": "fp8", "compile": True},
    }.items():
        run.train(recipe_from_dict(tree(lab, tmp_path / name, train=train)), quiet=True)
        found[name] = [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]
    assert found["fp8"] != found["half"]
    assert found["fp8"] == pytest.approx(found["half"], rel=2e-2)
    assert found["compiled"] == pytest.approx(found["half"], rel=2e-2)


def test_documents_apart_by_flex_attention(lab, tmp_path):
    """`student.attention: auto` has the losses of the attention that it takes the place of."""
    found = {}
    for attention in ("auto", None):
        settings = tree(
            lab,
            tmp_path / str(attention),
            student={"attention": attention, "config": {**LLAMA, "hidden_size": 128}},
            data={"block_size": 128, "document_mask": True},
            train={"tokens": 3 * 8 * 128},
        )
        run.train(recipe_from_dict(settings), quiet=True)
        settings["run"]["folder"] = str(tmp_path / "other")
        expected = "flex_attention" if attention else "sdpa"
        assert built_loop(settings).student.causal_lm.config._attn_implementation == expected
        records = read_metrics(tmp_path / str(attention) / "metrics.jsonl")
        found[attention] = [r["loss"] for r in records]
    assert found["auto"] == pytest.approx(found[None], rel=1e-3)


def test_a_loss_that_is_not_finite_is_passed_over(lab, tmp_path):
    loop = built_loop(tree(lab, tmp_path / "run", optimizer={"name": "adamw_torch_fused"}))
    assert loop.read_behind == 1
    before = {}

    def broken(module, inputs, output):
        if loop.step == 1 and module.training and not before:
            before.update({k: v.clone() for k, v in loop.student.state_dict().items()})
            output["loss"] = output["loss"] * torch.nan
        return output

    loop.student.register_forward_hook(broken)
    with pytest.raises(TrainingError, match="nan in step 2, micro-batch 0 of rank 0"):
        loop.run()
    assert loop.step == 3
    after = loop.student.state_dict()
    assert before and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "objective",
    [
        {"method": "guided"},
        {"method": "guided", "scope": "sequence", "unmapped": "mean"},
        {"method": "guided", "weighting": "reducible", "compare": "stretch"},
        {"method": "cpt"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_a_step_does_not_wait(lab, tmp_path, objective):
    """By CUDA's own account, from the first pass to the end of the step."""
    loop = built_loop(
        tree(
            lab,
            tmp_path / "run",
            objective=objective,
            optimizer={"name": "adamw_torch_fused"},
            train={"dtype": "bfloat16"},
        )
    )

    def watch(name):
        method = getattr(loop, name)

        def call(*args, **kwargs):
            if loop.step - (name == "end_step") in (0, 3, 4, 5):  # the first; saved, logged, last
                return method(*args, **kwargs)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        setattr(loop, name, call)

    for name in ("next_batch", "forward", "clip_gradients", "check_finite", "end_step"):
        watch(name)
    loop.run()
    assert loop.step == 6


def test_a_micro_batch_that_has_no_room(lab, tmp_path):
    """A real end of the device's memory, after which a smaller one is tried and trains."""
    wide = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096}
    settings = tree(
        lab,
        tmp_path / "run",
        student={"config": wide},
        train={"batch_blocks": 64, "micro_batch": "auto", "tokens": 2 * 64 * 32},
    )
    setup, _, _, arguments = built_setup(settings)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    weights = sum(p.nbytes for p in setup.student.parameters())
    # gradients and AdamW's moments as well, and what a few blocks need
    room = torch.cuda.memory_reserved() + 3 * weights + (160 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        found = find_micro_batch(setup, ObjectiveConfig(), arguments.device, 64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(tried.tokens_per_second is None for tried in found.tried), str(found)
    assert 1 <= found.micro_batch < 64
