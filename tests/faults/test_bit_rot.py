"""One flipped bit, or a lost file: it is named by what reads it, and mended where it can be."""

import json
import shutil

import pytest
from faults_kit import copy_of, flip_bit, kill_at, tiny_tree, write_points
from training_kit import fresh_process, recipe_dict
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.data.blocks import Blocks
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError, ModelError, StoreError, TrainingError, VocagnolmWarning
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.store import LossStore, verify_store
from vocagnolm.store.export import export_parquet


@pytest.fixture
def half(lab, tmp_path):
    """A run that was killed behind its second checkpoint, and what it becomes."""
    from vocagnolm.train.run import train

    def work(folder):
        def run(**options):
            fresh_process()
            return train(recipe_from_dict(tiny_tree(lab, folder)), quiet=True, **options)

        return run

    steps = write_points(work(tmp_path / "whole"))
    marks = [n for n, step in enumerate(steps, 1) if step == "renamed complete.json"]
    kill_at(marks[1], work(tmp_path / "run"))
    weights = (tmp_path / "whole" / "model" / "model.safetensors").read_bytes()
    return tmp_path / "run", work(tmp_path / "run"), weights


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(half, capfd, name):
    folder, run, weights = half
    flip_bit(folder / "checkpoints" / "checkpoint-2" / name)
    from vocagnolm.train.checkpoint import newest_complete

    found = newest_complete(folder / "checkpoints")
    assert found.step == 1
    assert found.damaged == [f"checkpoint-2: {name} does not match its checksum"]
    run()
    assert (folder / "model" / "model.safetensors").read_bytes() == weights


def test_all_checkpoints_damaged_begins_anew_only_on_request(half):
    folder, run, weights = half
    for step in (1, 2):
        flip_bit(folder / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(TrainingError, match=r"checkpoint-2.*checkpoint-1.*--restart"):
        run()
    run(restart=True)
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    (folder / "model" / "model.safetensors").write_bytes(b"of the run before")
    summary = run(restart=True)
    assert not summary["already_finished"], "a finished run starts over too"
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == summary["steps"]


def test_blocks_that_changed_under_a_run_are_noticed(lab, tmp_path):
    from vocagnolm.train.run import train

    blocks = copy_of(lab / "blocks", tmp_path / "b")
    tree = tiny_tree(lab, tmp_path / "run", data={"blocks": str(blocks)})

    def run():
        fresh_process()
        train(recipe_from_dict(tree), quiet=True)

    steps = write_points(lambda: run())
    marks = [n for n, step in enumerate(steps, 1) if step == "renamed complete.json"]
    tree["run"]["folder"] = str(tmp_path / "second")
    kill_at(marks[0], run)
    for path in blocks.iterdir():
        path.unlink()
    blocks.rmdir()
    prepare(recipe_from_dict({**tree, "data": {**tree["data"], "part_documents": 5}}))
    with pytest.raises(TrainingError, match="are not those it began with"):
        run()


@pytest.mark.parametrize("fault", ["flipped", "lost", "cut"])
def test_a_damaged_part_is_named_by_train_and_mended_by_prepare(lab, tmp_path, fault):
    from vocagnolm.train.run import train

    blocks = copy_of(lab / "blocks", tmp_path / "b")
    part = blocks / "part-00001.safetensors"
    good = part.read_bytes()
    if fault == "lost":
        part.unlink()
    elif fault == "cut":
        part.write_bytes(good[:-30])
    else:
        flip_bit(part, 0.9)
    tree = tiny_tree(lab, tmp_path / "run", data={"blocks": str(blocks)})
    with pytest.raises(BlocksError, match=r"part-00001.*prepare` again"):
        train(recipe_from_dict(tree), quiet=True)
    prepare(recipe_from_dict(tree))
    assert part.read_bytes() == good
    Blocks(blocks, 32)


@pytest.mark.parametrize("fault", ["{}", "[]", "", "{"])
def test_a_damaged_manifest_of_blocks_is_mended_by_prepare(lab, tmp_path, fault):
    blocks = copy_of(lab / "blocks", tmp_path / "b")
    good = (blocks / "manifest.json").read_bytes()
    (blocks / "manifest.json").write_text(fault)
    with pytest.raises(BlocksError, match=r"manifest\.json.*prepare"):
        Blocks(blocks, 32)
    prepare(recipe_from_dict(recipe_dict(lab, data={"blocks": str(blocks)})))
    assert (blocks / "manifest.json").read_bytes() == good


@pytest.mark.parametrize("reader", ["prepare", "export"])
def test_a_damaged_shard_is_named_by_what_reads_it(lab, tmp_path, reader):
    store = copy_of(lab / "store", tmp_path / "store")
    flip_bit(store / "shards" / "000000.safetensors", 0.9)
    tree = recipe_dict(lab, store={"path": str(store)}, data={"blocks": str(tmp_path / "b")})
    with pytest.raises(StoreError, match=r"000000.safetensors.*checksum.*makes the damaged"):
        if reader == "prepare":
            prepare(recipe_from_dict(tree))
        else:
            export_parquet(store, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    with pytest.raises(StoreError, match="checksum"):
        LossStore.open(store)[0]


@pytest.mark.parametrize("name", ["../../corpus.jsonl", "/etc/hostname", "a/b.safetensors", "", 3])
def test_a_manifest_names_only_files_of_its_folder(lab, tmp_path, name):
    store, blocks = (copy_of(lab / n, tmp_path / n) for n in ("store", "blocks"))
    for folder, entries, key in ((store, "shards", "file"), (blocks, "parts", "name")):
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["content_sha256"]  # whoever forges it can make that too
        manifest[entries][0][key] = name
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"where shards/000000.safetensors belongs"):
        LossStore.open(store)
    with pytest.raises(BlocksError, match="an invalid part"):
        Blocks(blocks, 32)


@pytest.mark.parametrize("fault", ["flipped", "cut", "lost", "no folder"])
def test_a_finished_model_is_checked_and_made_again(lab, tmp_path, fault):
    from vocagnolm.model import open_model
    from vocagnolm.report.push import push
    from vocagnolm.train.run import train

    def run():
        fresh_process()
        return train(recipe_from_dict(tiny_tree(lab, tmp_path / "run")), quiet=True)

    run()
    model = tmp_path / "run" / "model"
    good = {path.name: path.read_bytes() for path in model.iterdir()}
    weights = model / "model.safetensors"
    (model / "README.md").write_text("my own card")
    assert run()["already_finished"]
    if fault == "flipped":
        flip_bit(weights)
    elif fault == "cut":
        weights.write_bytes(good[weights.name][:-7])
    elif fault == "lost":
        weights.unlink()
    else:
        shutil.rmtree(model)
    if fault != "no folder":
        with pytest.raises(ModelError, match=r"model.safetensors.*train .*recipe.yaml"):
            open_model(model)
        with pytest.raises(TrainingError, match=r"model.safetensors"):
            push(model.parent, "someone/model", dry_run=True)
        said = CliRunner().invoke(app, ["report", str(model.parent)])
        assert "warning:" in said.stderr and "model.safetensors" in said.stderr
    with pytest.warns(VocagnolmWarning, match="made again"):
        assert not run()["already_finished"]
    assert {path.name: path.read_bytes() for path in model.iterdir()} == good
    assert run()["already_finished"]


def test_a_flip_in_a_manifest_is_noticed(lab, tmp_path):
    store, blocks = (copy_of(lab / n, tmp_path / n) for n in ("store", "blocks"))
    tree = tiny_tree(lab, tmp_path / "run", data={"blocks": str(blocks)})
    for path, key in (
        (store / "manifest.json", "histogram"),
        (store / "manifest.json", "first_document"),
        (blocks / "manifest.json", "fingerprint"),
        (blocks / "settings.json", "eos"),
    ):
        good = path.read_bytes()
        at = good.index(f'"{key}"'.encode()) + len(key) + 2
        at += next(n for n, byte in enumerate(good[at:]) if chr(byte).isalnum())
        path.write_bytes(good[:at] + (b"7" if good[at : at + 1] != b"7" else b"6") + good[at + 1 :])
        if path.parent == store:
            with pytest.raises(StoreError, match=r"manifest\.json.*does not match its checksum"):
                verify_store(store)
        elif path.name == "manifest.json":
            with pytest.raises(BlocksError, match=r"manifest\.json.*does not match its checksum"):
                Blocks(blocks, 32)
        else:
            (blocks / "manifest.json").unlink()
            with pytest.raises(BlocksError, match=r"settings\.json.*does not match its checksum"):
                prepare(recipe_from_dict(tree))
        path.write_bytes(good)
    # files of older versions have no checksum
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["content_sha256"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    assert len(LossStore.open(store)) == 20


@pytest.mark.parametrize("fault", ["cut", "lost", "stray"])
def test_what_shows_without_reading_shards_is_an_error(lab, tmp_path, fault):
    store = copy_of(lab / "store", tmp_path / "store")
    shard = store / "shards" / "000000.safetensors"
    if fault == "cut":
        shard.write_bytes(shard.read_bytes()[:-9])
    elif fault == "lost":
        shard.unlink()
    else:
        shutil.copy(shard, store / "shards" / "000099.safetensors")
    said = CliRunner().invoke(app, ["store", "inspect", str(store)])
    assert said.exit_code == 1 and "problem: shards/0000" in said.output, said.output
    assert isinstance(CliRunner().invoke(app, ["store", "card", str(store)]).exception, StoreError)
    if fault == "stray":  # nothing reads it
        return
    tree = tiny_tree(lab, tmp_path / "run", store={"path": str(store)})
    (tmp_path / "r.yaml").write_text(json.dumps(tree))
    said = CliRunner().invoke(app, ["check", str(tmp_path / "r.yaml"), "--no-measure"])
    assert said.exit_code == 1 and f"{store}: shards/0000" in said.output, said.output
    assert "verified names and sizes" in said.output
