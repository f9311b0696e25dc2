"""Several corpora in one run: text without a store, text that a teacher scored, conversations."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_kit import (
    ROUNDING,
    built_setup,
    documents,
    recipe_dict,
    run_processes,
    stop_after,
    write_corpus,
    write_store,
)
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.data.materials import Materials
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import RecipeError, TrainingError
from vocagnolm.objective import Head, ObjectiveConfig, objective_loss
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.train.check import check
from vocagnolm.train.collate import GuidedCollator, batch_targets
from vocagnolm.train.folder import read_metrics, read_run
from vocagnolm.train.run import open_corpora, train
from vocagnolm.train.settings import objective_config

STEPS = 10
SHARES = {"talks": 1, "taught": 5, "web": 2}
OBJECTIVES = {
    "guided": {},
    "distill": {"mix_by": "reducible"},
    "random": {},
    "no_teacher": {},
    "chunk": {},
    "alm": {"cross_entropy": 0.0},
    "stretch": {"method": "guided", "compare": "stretch", "scope": "sequence"},
    "reducible": {"method": "guided", "weighting": "reducible"},
}


@pytest.fixture(scope="module")
def mixed(lab, tmp_path_factory) -> Path:
    """Blocks of the lab's corpus with its store, of other texts and of conversations without."""
    folder = tmp_path_factory.mktemp("mixed")
    write_corpus(folder / "web.jsonl", documents(12, seed=5))
    words = ["sum", "real", "let", "proof", "prime", "answer", "number", "y"]
    talks = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": word}]
        for word in words
    ]
    lines = [json.dumps({"messages": talk}) + "\n" for talk in talks]
    (folder / "talks.jsonl").write_text("".join(lines))
    extra = ["teacher_losses", "stretch", "targets"]
    prepare(recipe_from_dict(tree(lab, folder, folder / "run", data={"extra_columns": extra})))
    return folder


def tree(lab: Path, mixed: Path, run: Path, **sections) -> dict:
    own = {
        "student": {"bits_per_byte": 8.0},
        "data": {"blocks": str(mixed / "blocks")},
        "train": {"tokens": STEPS * 8 * 32},
        "run": {"folder": str(run), "save_every": 2},
    }
    names = {*own, *sections}
    settings = recipe_dict(lab, **{n: own.get(n, {}) | sections.get(n, {}) for n in names})
    taught = {**settings.pop("corpus"), "store": settings.pop("store")}
    files = {name: {"files": [str(mixed / f"{name}.jsonl")]} for name in ("web", "talks")}
    listed = {"taught": taught, **files}
    corpora = {name: {**listed[name], "share": share} for name, share in SHARES.items()}
    return {**settings, "corpora": corpora}


def assert_same(folder: Path, whole: Path) -> None:
    ours, theirs = (read_metrics(f / "metrics.jsonl") for f in (folder, whole))
    for record in (*ours, *theirs):
        for name in ("tokens_per_second", "data_wait_share", "mfu"):
            record.pop(name, None)
    assert ours == theirs
    weights, expected = (load_file(f / "model" / "model.safetensors") for f in (folder, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_corpus_by_itself_among_corpora_is_that_corpus_alone(lab, tmp_path):
    alone = recipe_dict(
        lab,
        student={"bits_per_byte": 8.0},
        objective={"method": "distill"},
        train={"tokens": 512},
        run={"folder": str(tmp_path / "alone")},
    )
    train(recipe_from_dict(alone), quiet=True)
    changed = {"blocks": str(tmp_path / "blocks"), "extra_columns": ["targets"]}
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "only").symlink_to(lab / "blocks")
    among = {k: v for k, v in alone.items() if k not in ("corpus", "store")}
    among |= {
        "corpora": {"only": {**alone["corpus"], "store": alone["store"], "share": 3}},
        "data": {**alone["data"], **changed},
        "run": {**alone["run"], "folder": str(tmp_path / "among")},
    }
    train(recipe_from_dict(among), quiet=True)
    assert_same(tmp_path / "among", tmp_path / "alone")


def test_a_run_reads_every_corpus_by_its_share_and_in_epochs_of_its_own(lab, mixed, tmp_path):
    setup, recipe, schedule, _ = built_setup(tree(lab, mixed, tmp_path / "run"))
    order, blocks = setup.order, setup.order.blocks
    read: dict[str, list[int]] = {name: [] for name in SHARES}
    for position in range(len(order)):
        index = order.block_index(position)
        number = int(np.searchsorted(blocks.starts, index, side="right")) - 1
        read[blocks.names[number]].append(index)
        for name, share in SHARES.items():
            assert abs(len(read[name]) - share / 8 * (position + 1)) < 1
    assert len(order) == STEPS * 8 == schedule.steps * schedule.batch_blocks
    sizes = dict(zip(blocks.names, map(len, blocks.parts), strict=True))
    assert len(read["talks"]) > sizes["talks"], "so short that it is read more than once"
    for name, indices in read.items():
        first, second = indices[: sizes[name]], indices[sizes[name] : 2 * sizes[name]]
        assert len(set(first)) == len(first) and len(set(second)) == len(second)
    train(recipe, quiet=True)
    about = read_run(tmp_path / "run")
    assert about["blocks"] == blocks.fingerprint
    for name, facts in about["corpora"].items():
        assert facts["blocks"] == sizes[name] and facts["share"] == SHARES[name] / 8
        assert facts["blocks_read"] == len(read[name])
        assert facts["tokens_read"] == len(read[name]) * 32
        assert facts["epochs"] == len(read[name]) / sizes[name]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "taught 62.5% (" in card and "made-up" in card


def test_blocks_of_every_corpus_have_the_same_columns(lab, mixed, tmp_path):
    objective = {"method": "distill", "compare": "stretch"}
    setup, *_ = built_setup(tree(lab, mixed, tmp_path / "run", objective=objective))
    blocks = setup.order.blocks
    talk, taught, web = (blocks[start] for start in blocks.starts[:-1])
    assert talk.keys() == taught.keys() == web.keys()
    shapes = [{name: (v.shape, v.dtype) for name, v in b.items()} for b in (talk, taught, web)]
    assert shapes[0] == shapes[1] == shapes[2]
    for block in (talk, web):
        assert np.isnan(block["guidance"]).all() and not block["target_p"].any()
    assert taught["target_p"].any() and not np.isnan(taught["guidance"][1:]).all()
    # conversations are apart, texts are packed as one, and trained on as a whole
    assert len(set(talk["document"])) > 1 and not talk["trained"].all()
    for block in (taught, web):
        assert not block["document"].any() and block["trained"].all()
    apart = {"document_mask": True}
    setup, *_ = built_setup(tree(lab, mixed, tmp_path / "run", data=apart))
    ordinals = [setup.order.blocks[n]["document"] for n in range(*setup.order.blocks.starts[2:4])]
    assert any(len(set(ordinal)) > 1 for ordinal in ordinals)


def test_stores_with_unequal_alternatives_are_mixed(lab, mixed, tmp_path):
    texts = documents(12, seed=5)
    write_store(tmp_path / "store", texts, lab / "teacher", alternatives=2)
    own = {"data": {"blocks": str(tmp_path / "blocks")}, "objective": {"method": "distill"}}
    settings = tree(lab, mixed, tmp_path / "run", **own)
    settings["corpora"]["web"]["store"] = {"path": str(tmp_path / "store")}
    recipe = recipe_from_dict(settings)
    prepare(recipe)
    blocks = open_corpora(Materials(recipe))
    talk, taught, web = (blocks[start]["target_p"] for start in blocks.starts[:-1])
    assert taught.shape == web.shape == talk.shape == (33, 3)
    assert taught[:, 2].any() and web[:, 1].any() and not web[:, 2].any()
    np.testing.assert_array_equal(web[:, :2], blocks.parts[2][0]["target_p"])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_text_without_a_store_is_trained_plainly(lab, mixed, tmp_path, name):
    """A micro-batch of it has the loss of plain training, whatever the method."""
    settings = {"method": name, **OBJECTIVES[name]}
    recipe = recipe_from_dict(tree(lab, mixed, tmp_path / "run", objective=settings))
    blocks = open_corpora(Materials(recipe))
    rows = [blocks[index] for index in range(blocks.starts[2], blocks.starts[3])][:4]
    batch = GuidedCollator.for_blocks(True)(rows)
    torch.manual_seed(0)
    hidden, head = torch.randn(*batch["labels"].shape, 16), Head(weight=torch.randn(320, 16))
    ours = objective_loss(hidden, head, batch_targets(batch), objective_config(recipe))
    plain = objective_loss(hidden, head, batch_targets(batch), ObjectiveConfig(method="cpt"))
    torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-6, atol=0)
    train(recipe, quiet=True)
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == STEPS and np.isfinite(losses).all()


class Interrupted(Exception):
    pass


def run_to(step: int, settings: dict) -> None:
    """Train, in this rank, up to an error after this step; 0: to the end."""
    stop_after(step, Interrupted())
    try:
        train(recipe_from_dict(settings), quiet=True)
    except Interrupted:
        assert step


def test_a_run_that_is_stopped_goes_on_bit_by_bit_and_with_other_ranks(lab, mixed, tmp_path):
    objective = {"method": "distill", "scope": "global", "keep": 0.5}
    trees = [
        tree(lab, mixed, tmp_path / name, objective=objective, train={"micro_batch": 2})
        for name in ("whole", "stopped", "elastic")
    ]
    run_processes(run_to, 1, 0, trees[0])
    run_processes(run_to, 1, 3, trees[1])
    run_processes(run_to, 1, 0, trees[1])
    assert_same(tmp_path / "stopped", tmp_path / "whole")
    run_processes(run_to, 2, 3, trees[2])
    run_processes(run_to, 1, 0, trees[2])
    whole, elastic = (
        [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "elastic")
    )
    np.testing.assert_allclose(elastic, whole, rtol=ROUNDING)


def test_a_run_does_not_go_on_with_other_shares_or_blocks(lab, mixed, tmp_path):
    settings = tree(lab, mixed, tmp_path / "run", train={"tokens": 512})
    train(recipe_from_dict(settings), quiet=True)
    settings["corpora"]["web"]["share"] = 3
    with pytest.raises(TrainingError, match=r"corpora\.web\.share: 2\.0 -> 3\.0"):
        train(recipe_from_dict(settings), quiet=True)


def test_check_shows_what_each_corpus_gives(lab, mixed, tmp_path):
    found = check(recipe_from_dict(tree(lab, mixed, tmp_path / "run")))
    assert found.ready, found.problems
    talks, taught, web = found.plan["corpora"]
    assert [c["name"] for c in (talks, taught, web)] == sorted(SHARES)
    assert taught["teacher"] == "made-up" and web["teacher"] == "none, trained plainly"
    assert (taught["share"], taught["tokens_read"]) == (5 / 8, STEPS * 5 * 32)
    assert talks["epochs"] == STEPS / talks["blocks"] and web["documents"] == 12
    blocks = sum(corpus["blocks"] for corpus in found.plan["corpora"])
    assert found.plan["schedule"]["epochs"] == STEPS * 8 / blocks
    missing = tree(lab, mixed, tmp_path / "run")
    missing["corpora"]["web"]["files"] = [str(tmp_path / "none.jsonl")]
    missing["corpora"]["talks"]["files"] = []
    problems = "\n".join(check(recipe_from_dict(missing)).problems)
    assert "corpora.talks.files is not set" in problems
    assert f"corpora.web: {tmp_path / 'none.jsonl'} does not exist" in problems
    often = tree(lab, mixed, tmp_path / "run", train={"tokens": 10**7})
    warnings = check(recipe_from_dict(often), measure=False).warnings
    assert any("reads corpora.talks" in line and "its share" in line for line in warnings)


def test_commands_take_several_corpora_or_say_why_not(lab, mixed, tmp_path):
    settings = tree(lab, mixed, tmp_path / "run", train={"tokens": 512})
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(settings))

    def command(*given, code=0):
        done = CliRunner().invoke(app, [*map(str, given)])
        assert done.exit_code == code, done.output
        return done

    parts = sorted(mixed.glob("blocks/*/part-*"))
    before = [part.stat().st_mtime_ns for part in parts]
    summaries = json.loads(command("prepare", path, "--json").stdout)["corpora"]
    assert sorted(summaries) == sorted(SHARES) and summaries["taught"]["mapped_share"] > 0.9
    assert [part.stat().st_mtime_ns for part in parts] == before, "finished blocks are kept"
    shown = command("prepare", path, "--workers", 1).stdout
    assert all(str(mixed / "blocks" / name) in shown for name in SHARES)
    assert "corpora: name taught, share 62.5%" in command("check", path).stdout
    command("train", path, "--quiet")
    command(
        "train",
        path,
        "--quiet",
        "--set",
        f"run.folder={tmp_path / 'other'}",
        "--set",
        "corpora.web.share=3",
    )
    command("report", tmp_path / "run", tmp_path / "other", "--html", tmp_path / "report.html")
    assert "trained on several corpora" in (tmp_path / "report.html").read_text()
    refused = command("score", "--recipe", path, "--teacher", lab / "other", code=1)
    assert "names several corpora: score them one by one" in str(refused.exception)
    with pytest.raises(RecipeError, match="needs the store of at least one"):
        only = {name: settings["corpora"][name] for name in ("web", "talks")}
        recipe = recipe_from_dict(settings | {"corpora": only})
        open_corpora(Materials(recipe))
