"""Distillation in training: a run against the loop written out, a teacher online against a store,
and what is refused before any weights are loaded."""

import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chat_kit import make_chat_lab
from training_kit import LLAMA, built_loop, documents, recipe_dict, write_corpus, write_store
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.train.check import check
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.run import train

pytestmark = pytest.mark.slow

STEPS = 5
TOKENS = STEPS * 8 * 32


def run(lab, folder, **sections):
    sections["train"] = {"tokens": TOKENS, **sections.get("train", {})}
    sections["run"] = {"folder": str(folder), "save_every": 0, **sections.get("run", {})}
    train(recipe_from_dict(recipe_dict(lab, **sections)), quiet=True)
    return read_metrics(folder / "metrics.jsonl")


def column(records, name):
    return [record[name] for record in records]


def written_out(lab, mixes):
    """Full logits, targets as whole distributions, AdamW and the cosine by hand."""
    set_seed(0)
    settings = {k: v for k, v in LLAMA.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings)).train()
    order = TrainingOrder(Blocks(lab / "blocks", 32, targets=True), STEPS * 8, seed=0)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    losses = []
    for step, mix in enumerate(mixes):
        rate = 3e-4 + (3e-3 - 3e-4) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = rate
        blocks = [order[step * 8 + i] for i in range(8)]
        ids = torch.tensor(np.stack([b["input_ids"] for b in blocks]))
        soft_ids = torch.tensor(np.stack([b["target_ids"] for b in blocks])).long()[:, 1:]
        soft_p = torch.tensor(np.stack([b["target_p"] for b in blocks]))[:, 1:]
        log_p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        label = F.one_hot(ids[:, 1:], log_p.shape[-1]).float()
        teacher = torch.zeros_like(log_p).scatter_add(2, soft_ids, soft_p)
        teacher += (1 - soft_p.sum(-1, keepdim=True)) * label
        loss = -(((1 - mix) * label + mix * teacher) * log_p).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(
    ("objective", "mixes"),
    [
        ({"mix": 1.0}, [1.0] * STEPS),
        ({"mix": 0.8, "mix_end": 0.0}, [0.8, 0.6, 0.4, 0.2, 0.0]),
        ({"mix": 1.0, "mix_end": 0.0, "mix_hold": 0.5}, [1.0, 1.0, 1.0, 0.5, 0.0]),
    ],
    ids=str,
)
def test_a_run_equals_the_loop_written_out(lab, tmp_path, objective, mixes):
    records = run(lab, tmp_path / "run", objective={"method": "distill", **objective})
    losses, model = written_out(lab, mixes)
    np.testing.assert_allclose(column(records, "loss"), losses, rtol=2e-6)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    for (name, ours), (_, theirs) in zip(
        trained.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, msg=name)
    assert column(records, "kept_share") == [1.0] * STEPS
    if mixes[0] == 1.0:
        assert records[0]["distill_loss"] == pytest.approx(records[0]["loss"], rel=1e-6)
        assert 0.1 < records[0]["target_mass"] < 0.9


def test_a_mix_of_nothing_is_plain_pretraining_bit_for_bit(lab, tmp_path):
    none = run(lab, tmp_path / "none", objective={"method": "distill", "mix": 0.0})
    plain = run(lab, tmp_path / "cpt", objective={"method": "cpt"})
    assert column(none, "loss") == column(plain, "loss")
    one, two = (tmp_path / name / "model" / "model.safetensors" for name in ("none", "cpt"))
    assert one.read_bytes() == two.read_bytes()


def test_lora(lab, tmp_path):
    records = run(
        lab,
        tmp_path / "run",
        student={"config": None, "model": str(lab / "twin")},
        objective={"method": "distill"},
        lora={"rank": 2},
        optimizer={"learning_rate": 1e-2},
    )
    assert records[-1]["distill_loss"] < records[0]["distill_loss"]


def test_the_card_says_how_it_was_distilled(lab, tmp_path):
    run(lab, tmp_path / "run", objective={"method": "distill", "mix": 0.7, "mix_end": 0.1})
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| distillation | mix 0.7 to 0.1, by constant; alternatives all of the store's |" in card


# ---- online ----


def batches(lab, folder, **sections):
    """What training makes of its first blocks, with a teacher online and from a store."""
    trees = [
        recipe_dict(
            lab,
            train={"tokens": 8 * sections["data"]["block_size"]},
            run={"folder": str(folder / name), "save_every": 0},
            **sections | more,
        )
        for name, more in (
            ("online", {"store": {"path": None}, "teacher": sections["teacher"]}),
            ("stored", {"teacher": {}}),
        )
    ]
    trees[0]["teacher"]["online"] = True
    trees[0]["data"] = {**trees[0]["data"], "blocks": str(folder / "text")}
    prepare(recipe_from_dict(trees[0]))
    prepare(recipe_from_dict(trees[1]))
    found = []
    for tree in trees:
        loop = built_loop(tree)
        inputs = loop.setup.collator([loop.setup.order[place] for place in range(8)])
        if loop.teacher is not None:
            inputs |= loop.teacher.guide(inputs)
        found.append(inputs)
    return found


def assert_close(online, stored, whole):
    """Targets as distributions: of two alternatives that are as likely either may come first."""
    assert torch.equal(online["labels"], stored["labels"])
    compared = 0
    for b, t in zip(*np.nonzero(whole), strict=True):
        ours, theirs = {}, {}
        for target, inputs in ((ours, online), (theirs, stored)):
            for n, p in zip(
                inputs["target_ids"][b, t].tolist(), inputs["target_p"][b, t].tolist(), strict=True
            ):
                if p > 0:
                    target[n] = target.get(n, 0.0) + p
        compared += bool(ours)
        assert ours == pytest.approx(theirs, abs=2e-3)
    return compared


def test_a_teacher_online_gives_the_targets_of_a_store(lab, tmp_path):
    """Documents apart and whole, each read behind the same prefix: as the store was scored."""
    texts = documents(24, seed=5, words=18)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    settings = ScoreSettings(device="cpu", threads=1, context=120, alternatives=4)
    score_corpus(lab / "other", corpus, tmp_path / "store", settings=settings)
    online, stored = batches(
        lab,
        tmp_path,
        corpus={"files": [str(corpus)]},
        store={"path": str(tmp_path / "store")},
        teacher={"model": str(lab / "other")},
        data={"blocks": str(tmp_path / "blocks"), "block_size": 96, "document_mask": True},
        objective={"method": "distill", "alternatives": 4},
    )
    # documents that stand whole in their block: neither the first nor the last of it
    blocks = Blocks(tmp_path / "blocks", 96)
    whole = np.zeros(online["labels"].shape, bool)
    for row, index in enumerate(stored["block"].tolist()):
        document = blocks[index]["document"]
        whole[row] = ((document > 0) & (document < document.max()))[1:]
    assert assert_close(online, stored, whole & (online["labels"] >= 0).numpy()) > 60


def test_conversations_online(tmp_path):
    make_chat_lab(tmp_path, 16)
    corpus = tmp_path / "corpus.jsonl"
    settings = ScoreSettings(device="cpu", threads=1, alternatives=4)
    score_corpus(tmp_path / "teacher", corpus, tmp_path / "store", settings=settings)
    online, stored = batches(
        tmp_path,
        tmp_path,
        student={"model": str(tmp_path / "start"), "config": None, "tokenizer": None},
        corpus={"files": [str(corpus)]},
        store={"path": str(tmp_path / "store")},
        teacher={"model": str(tmp_path / "teacher")},
        data={"blocks": str(tmp_path / "blocks"), "block_size": 256},
        objective={"method": "distill", "alternatives": 4},
    )
    trained = (online["labels"] >= 0).numpy()
    assert assert_close(online, stored, trained) > 100


# ---- refused before weights are loaded ----


def test_check_names_a_store_without_alternatives(lab, tmp_path):
    texts = documents(32)
    write_store(tmp_path / "store", texts, lab / "teacher")
    tree = recipe_dict(
        lab,
        objective={"method": "distill"},
        store={"path": str(tmp_path / "store")},
        data={"blocks": str(tmp_path / "b")},
    )
    report = check(recipe_from_dict(tree), measure=False)
    assert any("holds no alternatives to distil from" in problem for problem in report.problems)
    tree["store"]["path"] = str(lab / "store")
    tree["objective"]["alternatives"] = 9
    report = check(recipe_from_dict(tree), measure=False)
    assert any("holds 3 per token" in problem for problem in report.problems)


def test_check_tells_what_the_blocks_hold(lab):
    report = check(recipe_from_dict(recipe_dict(lab, objective={"method": "distill"})))
    assert report.problems == [] and report.plan["store"]["alternatives"] == "3"
    assert 0.3 < report.plan["blocks"]["target_shares"]["shared"] < 1


def test_training_refuses_blocks_without_targets(lab, tmp_path):
    guided = recipe_dict(lab, data={"blocks": str(tmp_path / "b")})
    prepare(recipe_from_dict(guided))
    with pytest.raises(BlocksError, match="made without the teacher's alternatives"):
        run(
            lab,
            tmp_path / "run",
            data={"blocks": str(tmp_path / "b")},
            objective={"method": "distill"},
        )


def test_a_machine_without_the_store_trains(lab, tmp_path):
    """Blocks stand for themselves."""
    shutil.copytree(lab / "blocks", tmp_path / "blocks")
    records = run(
        lab,
        tmp_path / "run",
        objective={"method": "distill"},
        data={"blocks": str(tmp_path / "blocks")},
        store={"path": str(tmp_path / "gone")},
    )
    assert len(records) == STEPS
