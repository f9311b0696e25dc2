"""From a bucket to a trained student: corpus, store and blocks are there, training is here."""

import shutil

import datasets
import pytest
from bucket_children import CONTEXT, copy_blocks, end, start
from bucket_kit import CuttingProxy, bucket_bytes
from faults_kit import flip_bit, tiny_tree
from training_kit import fresh_process, make_lab, recipe_dict

from vocagnolm import export_columns
from vocagnolm.base import files
from vocagnolm.data import prepare as preparing
from vocagnolm.data.materials import Materials, local_blocks
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import AddressError, BlocksError, UsageError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.storage import Bucket, copies
from vocagnolm.train.check import check
from vocagnolm.train.run import open_blocks, train


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    make_lab(folder, 40)
    prepare(recipe_from_dict(recipe_dict(folder)))
    return folder


@pytest.fixture
def tree(lab, address, tmp_path):
    """The laboratory's recipe, with all that can be in a bucket in a bucket."""
    place = Bucket(address)
    place.put("corpus.jsonl", (lab / "corpus.jsonl").read_bytes())
    for path in sorted((lab / "store").rglob("*")):
        if path.is_file():
            place.put(f"store/{path.relative_to(lab / 'store')}", path.read_bytes())
    return tiny_tree(
        lab,
        tmp_path / "run",
        corpus={"files": [f"{address}/corpus.jsonl"]},
        store={"path": f"{address}/store"},
        data={
            "blocks": f"{address}/blocks",
            "cache": str(tmp_path / "near"),
            "block_size": 32,
            "part_documents": 16,
        },
    )


def test_columns_are_exported_from_and_to_a_bucket(lab, tree, address, tmp_path):
    """In two processes; the corpus stands beside the store, which does not name it here."""
    out, corpus = f"{address}/columns", tree["corpus"]["files"]
    made = export_columns(tree["store"]["path"], lab / "student", out, corpus, num_proc=2)
    expected = export_columns(lab / "store", lab / "student", tmp_path / "columns", corpus)
    place = Bucket(out)
    for name in place.files():
        files.write_bytes(tmp_path / "copy" / name, bytes(place.read(name)))
    copied = datasets.load_from_disk(str(tmp_path / "copy"))
    assert copied["input_ids"][:] == expected["input_ids"][:] and len(copied) == len(made) == 40
    with pytest.raises(UsageError, match="exists already"):
        export_columns(tree["store"]["path"], lab / "student", out, corpus)


def parts_of(files):
    return {name: content for name, content in files.items() if name.startswith("part-")}


def local_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_prepare_and_train_from_a_bucket(lab, tree, address, tmp_path):
    recipe = recipe_from_dict(tree)
    manifest = prepare(recipe, workers=1)
    there, here = bucket_bytes(f"{address}/blocks"), local_files(lab / "blocks")
    assert parts_of(there) == parts_of(here) and len(parts_of(there)) == 3
    assert there["settings.json"] == here["settings.json"]
    assert prepare(recipe) == manifest

    shutil.rmtree(tmp_path / "near")  # another machine
    report = check(recipe, measure=False)
    assert report.ready and report.plan["blocks"]["prepared"], report.problems
    fresh_process()
    assert train(recipe, quiet=True)["finished"]
    fresh_process()
    plain = recipe_from_dict(tiny_tree(lab, tmp_path / "plain"))
    assert train(plain, quiet=True)["finished"]
    models = [tmp_path / name / "model" / "model.safetensors" for name in ("run", "plain")]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_blocks_are_copied_once_and_checked(tree, address, tmp_path, monkeypatch):
    recipe = recipe_from_dict(tree)
    prepare(recipe)
    near = tmp_path / "near"
    made = local_blocks(recipe)  # where they were made nothing is copied
    copied = []
    real = copies._copy
    monkeypatch.setattr(copies, "_copy", lambda *given: copied.append(given[1]) or real(*given))
    assert local_blocks(recipe) == made and not copied
    shutil.rmtree(near)
    folder = local_blocks(recipe)
    assert folder == made and len(copied) == 3
    assert local_blocks(recipe) == folder and len(copied) == 3

    flip_bit(folder / "part-00001.safetensors")
    with pytest.raises(BlocksError, match=r"part-00001.*Remove these files: they are copied again"):
        open_blocks(Materials(recipe), verify=True)
    (folder / "part-00001.safetensors").unlink()
    assert len(open_blocks(Materials(recipe), verify=True)) and len(copied) == 4

    (folder / "part-00002.safetensors").unlink()
    content = bytearray(Bucket(f"{address}/blocks").read("part-00002.safetensors"))
    content[-1] ^= 1
    Bucket(f"{address}/blocks").put("part-00002.safetensors", bytes(content))
    with pytest.raises(AddressError, match=r"part-00002.* is damaged: .*checksum.*Remove it there"):
        local_blocks(recipe)
    Bucket(f"{address}/blocks").remove("part-00002.safetensors")
    prepare(recipe)
    assert len(open_blocks(Materials(recipe), verify=True))


def test_the_ranks_of_a_machine_copy_once(tree, env, server, tmp_path):
    prepare(recipe_from_dict(tree))
    shutil.rmtree(tmp_path / "near")
    heads = []
    proxy = CuttingProxy(server, lambda head: heads.append(head))
    ready = CONTEXT.Barrier(3)
    values = {**env, "AWS_ENDPOINT_URL": proxy.endpoint}
    ranks = [start(copy_blocks, values, tree, ready) for _ in range(3)]
    assert [end(rank) for rank in ranks] == [0, 0, 0]
    assert sum("part-" in head for head in heads) == 3
    assert len(open_blocks(Materials(recipe_from_dict(tree)), verify=True))


def test_other_blocks_at_the_same_address_have_a_copy_of_their_own(tree, tmp_path):
    first = recipe_from_dict(tree)
    prepare(first)
    folder = local_blocks(first)
    place = Bucket(first.data.blocks)
    place.remove(*place.files())
    other = recipe_from_dict({**tree, "objective": {"aggregation": "mean"}})
    prepare(other)
    assert local_blocks(other) != folder and folder.is_dir()


def test_an_upload_that_broke_off_goes_on(lab, tree, address, monkeypatch):
    recipe = recipe_from_dict(tree)
    real, sent = Bucket.put, []

    def put(place, name, content):
        if len(sent) == 2:
            raise AddressError("cut")
        sent.append(name)
        real(place, name, content)

    monkeypatch.setattr(preparing, "_UPLOADS", 1)
    monkeypatch.setattr(Bucket, "put", put)
    with pytest.raises(AddressError, match="cut"):
        prepare(recipe)
    with pytest.raises(BlocksError, match=r"blocks is not complete"):
        local_blocks(recipe)
    monkeypatch.setattr(Bucket, "put", lambda p, name, c: sent.append(name) or real(p, name, c))
    prepare(recipe)
    assert sorted(sent) == sorted(parts_of(local_files(lab / "blocks")))  # each of them once


def test_a_place_that_is_taken(tree, address):
    recipe = recipe_from_dict(tree)
    Bucket(f"{address}/blocks").put("holiday.jpg", b"x")
    with pytest.raises(BlocksError, match="is not empty and holds no blocks"):
        prepare(recipe)
    Bucket(f"{address}/blocks").remove("holiday.jpg")
    prepare(recipe)
    other = recipe_from_dict({**tree, "objective": {"aggregation": "mean"}})
    with pytest.raises(BlocksError, match=r"(?s)other settings.*objective.aggregation"):
        prepare(other)
    Bucket(f"{address}/blocks").remove("manifest.json")
    with pytest.raises(BlocksError, match=r"(?s)made with other settings.*guidance.aggregation"):
        prepare(other)


def test_addresses_in_a_recipe(tree):
    for section, key, value in (
        ("run", "folder", "s3://b/run"),
        ("data", "cache", "s3://b/cache"),
        ("data", "blocks", "https://b/blocks"),
        ("data", "blocks", "hf://datasets/a/b"),
        ("store", "path", "ftp://b/store"),
    ):
        with pytest.raises(UsageError, match=r"is an address|has a scheme that is not supported"):
            recipe_from_dict({**tree, section: {**tree[section], key: value}})
