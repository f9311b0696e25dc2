import math
import os
import re
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from faults_kit import LONG
from safetensors.torch import load_file
from training_kit import LLAMA, recipe_dict, stop_after
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.errors import TrainingError, UsageError, VocagnolmWarning
from vocagnolm.model.fp8 import train_in_fp8
from vocagnolm.model.runtime import last_hidden
from vocagnolm.objective import IGNORE_INDEX, ObjectiveConfig, Targets
from vocagnolm.recipe import load_recipe, recipe_from_dict
from vocagnolm.train import student
from vocagnolm.train.collate import GuidedCollator
from vocagnolm.train.folder import read_metrics, refuse_other_run, run_recipe
from vocagnolm.train.loop import GuidedStudent, MicroBatch, TrainingLoop
from vocagnolm.train.run import train
from vocagnolm.train.student import compile_layers

STEPS = 5
TOKENS = STEPS * 8 * 32


def run(lab, folder, **sections):
    """Train a variant of the lab's recipe and return its metrics."""
    # given, it is not measured in every run
    sections["student"] = {"bits_per_byte": 8.0, **sections.get("student", {})}
    sections["train"] = {"tokens": TOKENS, **sections.get("train", {})}
    sections["run"] = {"folder": str(folder), "save_every": 0, **sections.get("run", {})}
    train(recipe_from_dict(recipe_dict(lab, **sections)), quiet=True)
    return read_metrics(folder / "metrics.jsonl")


def column(records, name):
    return [record[name] for record in records]


@pytest.fixture(scope="module")
def guided(lab, tmp_path_factory):
    """The folder of the lab's own recipe."""
    folder = tmp_path_factory.mktemp("guided") / "run"
    run(lab, folder)
    return folder


@pytest.fixture(scope="module")
def plain(lab, tmp_path_factory):
    """The metrics of training on every token."""
    return run(lab, tmp_path_factory.mktemp("cpt") / "run", objective={"method": "cpt"})


def tiny(kind="llama", **settings):
    set_seed(0)
    base = {k: v for k, v in LLAMA.items() if k != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **base | settings)).eval()


def reference_losses(lab, keep):
    """The same run written out: full logits, masks, AdamW and the cosine by hand."""
    set_seed(0)
    model = tiny().train()
    order = TrainingOrder(Blocks(lab / "blocks", 32), STEPS * 8, seed=0)
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1]
    rest = [p for n, p in model.named_parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses = []
    for step in range(STEPS):
        progress = step / STEPS
        rate = 3e-4 + (3e-3 - 3e-4) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        blocks = [order[step * 8 + i] for i in range(8)]
        ids = torch.tensor(np.stack([b["input_ids"] for b in blocks]))
        guidance = torch.tensor(np.stack([b["guidance"] for b in blocks]))[:, 1:]
        logits = model(input_ids=ids).logits[:, :-1]
        nll = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        weight = torch.isnan(guidance)  # the unmapped are included
        for half in (slice(0, 4), slice(4, 8)):  # two micro-batches: scope batch
            excess = (nll - guidance)[half].detach()
            mapped = ~torch.isnan(excess)
            k = math.floor(keep * int(mapped.sum()) + 0.5)
            threshold = excess[mapped].sort(descending=True).values[k - 1]
            weight[half] |= mapped & (excess >= threshold)
        loss = (nll * weight).sum() / nll.numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_a_run_equals_the_loop_written_out(lab, guided):
    records = read_metrics(guided / "metrics.jsonl")
    losses, model = reference_losses(lab, 0.4)
    np.testing.assert_allclose(column(records, "loss"), losses, rtol=2e-6)
    trained = AutoModelForCausalLM.from_pretrained(guided / "model")
    for (name, ours), (_, theirs) in zip(
        trained.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, msg=name)
    rates = column(records, "learning_rate")
    assert rates[0] == pytest.approx(3e-3) and rates[-1] < 1e-3


def test_keeping_everything_is_plain_pretraining(lab, tmp_path, plain):
    whole = run(lab, tmp_path / "guided", objective={"keep": 1.0})
    assert column(whole, "loss") == column(plain, "loss")
    assert column(plain, "loss") == pytest.approx(column(plain, "nll_all"), rel=1e-6)
    assert column(plain, "kept_share") == [1.0] * STEPS


@pytest.mark.parametrize(
    "objective",
    [
        {"method": "guided", "scope": "global", "normalise": "selected"},
        {"method": "distill", "keep": 0.4, "scope": "global", "normalise": "selected"},
        {"method": "distill", "mix_by": "reducible", "scope": "sequence", "keep": 0.6},
        {"method": "guided", "scope": "sequence", "unmapped": "mean"},
        {"method": "random", "scope": "global"},
        {"method": "chunk", "scope": "sequence", "normalise": "selected", "n_chunks": 5},
        {"method": "guided", "compare": "stretch", "scope": "global", "normalise": "selected"},
        {"method": "guided", "weighting": "reducible", "normalise": "selected"},
        {"method": "alm", "scope": "sequence"},
        {"method": "no_teacher", "scope": "global"},
        {"method": "guided", "weighting": "reducible", "compare": "stretch"},
        {"method": "distill", "mix": 1.0, "mix_end": 0.2},
        {"method": "distill", "weighting": "reducible", "compare": "stretch"},
    ][: None if LONG else 9],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_one_batch_of_eight_equals_eight_of_one(lab, tmp_path, objective):
    steps = {"tokens": TOKENS if LONG else 2 * 256}
    whole = run(lab, tmp_path / "8", objective=objective, train={"micro_batch": 8, **steps})
    split = run(lab, tmp_path / "1", objective=objective, train={"micro_batch": 1, **steps})
    for name in ("loss", "nll_all", "nll_kept", "kept_share"):
        np.testing.assert_allclose(column(whole, name), column(split, name), rtol=3e-5)


@pytest.mark.parametrize(
    ("objective", "teacher", "store"),
    [
        ({"method": "chunk", "chunk_choice": "random"}, {}, None),
        ({"method": "chunk", "scope": "global", "normalise": "selected"}, {}, "store"),
        ({"method": "rho1", "entropy_keep": 0.8}, {"model": "twin", "online": True}, None),
        ({"method": "guided"}, {"model": "other", "online": True}, None),
        ({"method": "chunk"}, {"model": "other", "online": True}, None),
        ({"method": "rho1", "compare": "stretch"}, {"model": "twin", "online": True}, None),
        ({"method": "guided", "compare": "stretch"}, {"model": "other", "online": True}, None),
        ({"method": "chunk", "compare": "stretch"}, {"model": "other", "online": True}, None),
        ({"method": "chunk", "compare": "stretch"}, {}, "store"),
        ({"method": "alm"}, {"model": "other", "online": True}, None),
        ({"method": "distill"}, {"model": "other", "online": True}, None),
        ({"method": "distill", "compare": "stretch"}, {"model": "other", "online": True}, None),
        ({"method": "kld"}, {"model": "twin"}, None),
        ({"method": "uld"}, {"model": "other"}, None),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_methods_train_in_other_ways_than_the_pinned_ones(lab, tmp_path, objective, teacher, store):
    if "model" in teacher:
        teacher = {**teacher, "model": str(lab / teacher["model"])}
    records = run(
        lab,
        tmp_path / "run",
        objective=objective,
        teacher=teacher,
        store={"path": str(lab / store) if store else None},
        train={"tokens": 2 * 256},
    )
    assert len(records) == 2 and all(math.isfinite(r["loss"]) for r in records)
    kept = records[0]["kept_share"]
    distils = objective["method"] in ("kld", "uld", "alm", "distill")
    assert kept == 1.0 if distils or "weighting" in objective else 0.3 < kept < 0.65
    if distils:
        assert records[-1]["distill_loss"] > 0
    if objective["method"] in ("kld", "uld"):
        assert records[0]["aligned_share"] > (0.9 if objective["method"] == "kld" else 0.05)
    else:
        assert records[0]["mapped_share"] is None or records[0]["mapped_share"] > 0.9


def test_zero_weight_distillation_is_plain_pretraining(lab, tmp_path, plain):
    none = run(
        lab,
        tmp_path / "kld",
        objective={"method": "kld", "distill_weight": 0.0},
        teacher={"model": str(lab / "twin")},
    )
    assert column(none, "loss") == column(plain, "loss")


def test_kld_refuses_another_vocabulary(lab, tmp_path):
    with pytest.raises(TrainingError, match="one vocabulary"):
        run(
            lab,
            tmp_path / "run",
            objective={"method": "kld"},
            teacher={"model": str(lab / "other")},
        )


def test_documents_do_not_see_each_other_under_the_mask():
    model = tiny()
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 320, size) for size in (9, 14, 9)]
    block = {
        "input_ids": np.concatenate(documents),
        "document": np.repeat([0, 1, 2], [9, 14, 9]),
    }
    batch = GuidedCollator.for_blocks(True)([block, block])
    assert batch["position_ids"][0].tolist() == [*range(9), *range(14), *range(8)]
    assert (batch["labels"][0] == IGNORE_INDEX).nonzero().flatten().tolist() == [8, 22]
    packed = last_hidden(model, batch["input_ids"], batch["position_ids"])
    alone = [last_hidden(model, torch.tensor(d)[None]) for d in documents]
    torch.testing.assert_close(packed[0], torch.cat(alone, dim=1)[0, :-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[1], packed[0])
    contiguous = GuidedCollator.for_blocks()([block])
    assert "position_ids" not in contiguous
    assert (contiguous["labels"][0] == IGNORE_INDEX).sum() == 0


def test_labels_and_guidance_are_shifted_together():
    block = {
        "input_ids": np.array([5, 6, 7]),
        "document": np.zeros(3, np.int64),
        "guidance": np.array([0.5, 0.6, 0.7], np.float32),
    }
    batch = GuidedCollator.for_blocks()([block])
    assert batch["input_ids"].tolist() == [[5, 6]] and batch["labels"].tolist() == [[6, 7]]
    assert batch["guidance"][0].tolist() == pytest.approx([0.6, 0.7])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gemma2", {"final_logit_softcapping": 5.0, "head_dim": 8}),
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("qwen2", {}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320}),
        ("phi", {"partial_rotary_factor": 0.5}),
    ],
)
def test_any_causal_lm_gives_its_own_loss(kind, settings):
    """Gradients too: they flow through head and decoder as through the model's own loss."""
    if kind == "gpt2":
        set_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    else:
        model = tiny(kind, **settings)
    ids = torch.randint(0, 320, (2, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    own = model(input_ids=ids, labels=ids).loss
    model.zero_grad()
    student = GuidedStudent(model)
    batch = GuidedCollator.for_blocks()([{"input_ids": row} for row in ids.numpy()])
    targets = Targets(labels_BT=batch["labels"])
    output = student(MicroBatch.of(batch, targets, ObjectiveConfig(method="cpt")))
    torch.testing.assert_close(output["loss"], own, rtol=1e-5, atol=1e-5)
    output["loss"].backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, own)  # as usual, as ever


def test_a_head_that_is_not_understood_is_refused():
    model = tiny()
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: head(hidden) * 1.5
    with pytest.raises(TrainingError, match="in an unsupported way"):
        GuidedStudent(model)


def test_the_result_is_an_ordinary_model_folder(guided):
    folder = guided / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the sum of", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] == ids.shape[1] + 3
    card = (folder / "README.md").read_text()
    for fact in ("`guided`", "`made-up`", "keep 0.4", "1,280 in 5 steps", "learning_rate: 0.003"):
        assert fact in card
    assert not list(folder.glob("*.bin")) and (folder / "model.safetensors").is_file()
    assert sorted(p.name for p in guided.iterdir()) == [
        *("metrics.jsonl", "model", "recipe.yaml", "run.json")
    ]


def test_the_python_of_the_page_on_recipes_runs(lab, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    settings = recipe_dict(lab, train={"tokens": 256}, run={"folder": "run"})
    settings["data"]["blocks"] = "blocks"
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    names: dict = {}
    exec(code, names)
    assert names["summary"]["finished"] and names["recipe"].objective.keep == 0.5


def test_metrics_have_every_step_and_field(guided):
    records = read_metrics(guided / "metrics.jsonl")
    assert column(records, "step") == [1, 2, 3, 4, 5]
    assert column(records, "tokens") == [256 * step for step in range(1, 6)]
    for name in ("loss", "nll_all", "kept_share", "mapped_share", "tokens_per_second"):
        assert all(isinstance(value, float) for value in column(records, name)), name
    for record in records:
        assert record["excess_p10"] <= record["excess_p50"] <= record["excess_p90"]
        assert 0.4 <= record["kept_share"] < 0.45 and record["mapped_share"] > 0.9
    assert records[0]["mfu"] is None  # the peak of a CPU is not known


def test_lora_trains_the_adapters_and_merges(lab, tmp_path):
    records = run(
        lab,
        tmp_path / "run",
        student={"config": None, "model": str(lab / "twin")},
        lora={"rank": 2},
        optimizer={"learning_rate": 1e-2},
    )
    assert records[-1]["nll_all"] < records[0]["nll_all"]
    before = AutoModelForCausalLM.from_pretrained(lab / "twin").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("proj" in name for name in changed)


@pytest.mark.parametrize("train_section", [{"dtype": "bfloat16"}, {"gradient_checkpointing": True}])
def test_memory_and_precision_options(lab, tmp_path, guided, train_section):
    plain = read_metrics(guided / "metrics.jsonl")
    other = run(lab, tmp_path / "other", train=train_section)
    tolerance = 2e-2 if "dtype" in train_section else 1e-6
    np.testing.assert_allclose(column(other, "loss"), column(plain, "loss"), rtol=tolerance)


def test_a_student_in_fp8(lab, tmp_path, monkeypatch):
    """Emulated on a CPU: it learns as one in bfloat16, resumes exactly, leaves the same files."""
    with pytest.raises(UsageError, match=r"train.dtype: fp8 needs a GPU of the Hopper.* a CPU"):
        run(lab, tmp_path / "refused", train={"dtype": "fp8"})
    monkeypatch.setattr(student, "require_fp8", lambda device, setting: None)
    half = run(lab, tmp_path / "half", train={"dtype": "bfloat16"})
    with pytest.warns(VocagnolmWarning, match="slower than bfloat16 for a student that is 32 wide"):
        whole = run(lab, tmp_path / "whole", train={"dtype": "fp8"})
    np.testing.assert_allclose(column(whole, "loss"), column(half, "loss"), rtol=2e-2)
    assert column(whole, "loss") != column(half, "loss")
    monkeypatch.setattr(student, "FP8_WIDTH", 0)
    cut = {"train": {"dtype": "fp8"}, "run": {"save_every": 2}}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingLoop, "end_step", TrainingLoop.end_step)
        stop_after(3, KeyboardInterrupt())
        run(lab, tmp_path / "cut", **cut)
    assert column(run(lab, tmp_path / "cut", **cut), "loss") == column(whole, "loss")
    weights = [
        load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "cut", "half")
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    shapes = [{n: (v.shape, v.dtype) for n, v in each.items()} for each in weights]
    assert shapes[0] == shapes[2]


@pytest.mark.parametrize("fp8", [False, True])
def test_compiled_layers_change_neither_names_nor_losses(fp8):
    model, plain = tiny(), tiny()
    if fp8:
        train_in_fp8(model), train_in_fp8(plain)
    compile_layers(model, backend="aot_eager")  # the compiler's front end, without C++
    ids = torch.randint(0, 320, (2, 16))
    batch = GuidedCollator.for_blocks()([{"input_ids": row} for row in ids.numpy()])
    losses = []
    for each in (model, plain):
        targets = Targets(labels_BT=batch["labels"])
        output = GuidedStudent(each)(MicroBatch.of(batch, targets, ObjectiveConfig(method="cpt")))
        output["loss"].backward()
        losses.append(output["loss"].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_only_the_shape_of_training_is_compiled(lab, tmp_path, monkeypatch):
    """Not those of the texts on which student and teacher are compared before."""
    from vocagnolm.train import run as run_module

    compiled = []

    def backend(graph, inputs):
        compiled.append({tuple(x.shape) for x in inputs if x.dim() == 3})
        return graph.forward

    def compile_with(model):
        compile_layers(model, backend=backend)

    monkeypatch.setattr(student, "compile_layers", compile_with)
    twin = {"config": None, "model": str(lab / "twin"), "bits_per_byte": None}
    compared = []
    original = run_module.measure_strength
    monkeypatch.setattr(
        run_module, "measure_strength", lambda *a: compared.append(original(*a)) or compared[0]
    )
    run(lab, tmp_path / "run", student=twin, train={"tokens": 512, "compile": True})
    assert compared and compared[0] is not None
    assert compiled and all((4, 32, 32) in shapes for shapes in compiled)


def test_a_loss_that_is_not_finite_stops_with_step_and_blocks(lab, tmp_path):
    with pytest.raises(TrainingError, match=r"nan in step \d+, micro-batch \d .*blocks \["):
        run(lab, tmp_path / "run", optimizer={"learning_rate": 1e6, "max_grad_norm": 0})
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_of_0_1_0_is_still_that_run(lab, tmp_path):
    """Its recipe has `train.bf16`, and none of the keys that came later."""
    folder = tmp_path / "run"
    settings = recipe_dict(lab, train={"dtype": "bfloat16"}, run={"folder": str(folder)})
    recipe = recipe_from_dict(settings)
    (folder / "model").mkdir(parents=True)
    old = {**settings, "train": {**settings["train"], "bf16": True}}
    del old["train"]["dtype"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(old))
    assert run_recipe(folder) == recipe
    refuse_other_run(folder, recipe, {"finished": True})
    with pytest.raises(TrainingError, match=r"train.dtype: 'bfloat16' -> 'float32'"):
        refuse_other_run(folder, recipe_from_dict(recipe_dict(lab)), {"finished": True})


def test_a_finished_run_says_so_and_another_recipe_is_refused(lab, tmp_path):
    folder = tmp_path / "run"
    run(lab, folder)
    state = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    run(lab, folder)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == state
    run(lab, folder, run={"log_every": 3})  # changes nothing of what is trained
    with pytest.raises(TrainingError, match=r"objective.keep: 0.4 -> 0.6"):
        run(lab, folder, objective={"keep": 0.6})


def test_a_folder_with_other_things_is_left_alone(lab, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(TrainingError, match="not a run"):
        run(lab, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_waiting_for_data_is_seen(lab, tmp_path, monkeypatch):
    read = TrainingOrder.__getitem__

    def slow(self, place):
        time.sleep(0.02)
        return read(self, place)

    monkeypatch.setattr(TrainingOrder, "__getitem__", slow)
    records = run(lab, tmp_path / "run")
    assert all(0 < r["data_wait_share"] < 1 and r["processes"] == 1 for r in records)
    waited = [r["data_wait_share"] * 8 * 32 / r["tokens_per_second"] for r in records]
    assert statistics.median(waited) > 0.15  # eight blocks a step


def test_a_process_that_accelerate_left_alone_is_refused(lab, tmp_path, monkeypatch):
    """The environment of `accelerate launch --cpu --num_processes 2`, from accelerate itself."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    def launched(processes):
        words = ["--cpu", "--num_processes", processes, "--num_machines", "1"]
        words += ["--mixed_precision", "no", "train.py"]
        arguments = launch_command_parser().parse_args(words)
        arguments.use_cpu, arguments.dynamo_backend = True, "no"
        return prepare_simple_launcher_cmd_env(arguments)[1].items() - os.environ.items()

    for processes, folder in (("1", "one"), ("2", "two")):
        with monkeypatch.context() as patch:
            for name, value in launched(processes):
                patch.setenv(name, value)
            if processes == "1":
                assert run(lab, tmp_path / folder)
                continue
            with pytest.raises(UsageError, match="torchrun --nproc-per-node"):
                run(lab, tmp_path / folder)
            assert not (tmp_path / folder).exists()


def test_a_run_that_never_began_leaves_its_folder_to_the_corrected_recipe(lab, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(TrainingError, match=r"lora.targets 'nothing'"):
        run(lab, folder, lora={"rank": 2, "targets": "nothing"})
    assert not (folder / "metrics.jsonl").exists()
    assert len(run(lab, folder)) == TOKENS // 256
    assert load_recipe(folder / "recipe.yaml").lora.rank == 0


def test_an_online_teacher_reads_with_the_tokenizer_that_the_recipe_names(lab, tmp_path):
    """A teacher folder without its tokenizer's own files."""
    bare = shutil.copytree(lab / "other", tmp_path / "bare")
    shutil.copytree(lab / "student", bare, dirs_exist_ok=True)  # a wrong one
    teacher = {"model": str(bare), "tokenizer": str(lab / "teacher"), "online": True}
    named = run(lab, tmp_path / "named", teacher=teacher, train={"tokens": 256})
    usual = run(
        lab,
        tmp_path / "usual",
        teacher={"model": str(lab / "other"), "online": True},
        train={"tokens": 256},
    )
    assert named[0]["loss"] == usual[0]["loss"]


def test_documents_that_cannot_be_kept_apart_are_refused(lab, tmp_path):
    config = {"model_type": "opt", "vocab_size": 320, "hidden_size": 32, "ffn_dim": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    with pytest.raises(TrainingError, match=r"OPTForCausalLM.*document_mask to false"):
        run(lab, tmp_path / "run", student={"config": config}, data={"document_mask": True})
    run(lab, tmp_path / "fine", student={"config": config})
