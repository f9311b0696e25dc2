"""Publishing a store: its card, the Parquet beside it, and reading it from the hub."""

import huggingface_hub
import pytest
import yaml
from score.teacher_kit import SETTINGS, ArithmeticTeacher, write_corpus
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import AddressError, StoreError, UsageError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import score_corpus
from vocagnolm.storage import Folder
from vocagnolm.store import LossStore, inspect_store, verify_store
from vocagnolm.store.card import store_card


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    corpus = write_corpus(folder / "corpus.jsonl")
    score_corpus(ArithmeticTeacher(), corpus, folder / "store", settings=SETTINGS)
    return folder / "store"


def command(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def header(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_the_card_says_what_the_store_is(store):
    about, text = inspect_store(store), store_card(Folder(store), "odc-by")
    found = header(text)
    assert found["license"] == "odc-by" and "vocagnolm" in found["tags"]
    assert found["viewer"] is False and "configs" not in found
    facts = found["loss_store"]
    assert facts["teacher"] == "arithmetic" and facts["corpus"] == "corpus.jsonl"
    assert facts["bits_per_byte"] == round(about["bits_per_byte"], 4)
    assert facts["format"] == "vocagnolm-loss-store 1" and facts["tokens"] == about["tokens"]
    assert "license" not in header(store_card(Folder(store)))


def test_a_path_of_this_machine_is_not_told(tmp_path):
    class Local(ArithmeticTeacher):
        name = "/home/somebody/models/teacher-7b"

    corpus = write_corpus(tmp_path / "c.jsonl", documents=5)
    score_corpus(Local(), corpus, tmp_path / "s", settings=SETTINGS)
    text = store_card(Folder(tmp_path / "s"))
    assert "teacher-7b" in text and "somebody" not in text and str(tmp_path) not in text


@pytest.mark.slow
def test_card_and_parquet_are_what_datasets_loads(store, tmp_path):
    import datasets

    said = command("store", "card", store)
    assert f"store export {store} --out {store}/parquet/losses.parquet" in said
    out = store / "parquet" / "losses.parquet"
    command("store", "export", store, "--format", "parquet", "--out", out)
    said = command("store", "card", store, "--license", "cc-by-4.0")
    assert f"hf upload OWNER/NAME {store} ." in said and "store export" not in said
    assert header((store / "README.md").read_text())["configs"]
    rows = datasets.load_dataset(str(store), split="train", cache_dir=str(tmp_path / "hf"))
    ours = LossStore.open(store)
    assert len(rows) == len(ours) == 23
    assert rows[3]["token_bytes"] == ours[3][0].tolist() and rows[3]["nll"][0] is None
    assert verify_store(store) == []  # what stands beside the shards is no harm


def test_a_store_of_the_hub(store, monkeypatch):
    asked = []

    def snapshot(repository, **given):
        asked.append((repository, given))
        return str(store.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    address = "hf://datasets/owner/name@v1/store"
    found = LossStore.open(address)
    assert found[0][1].tobytes() == LossStore.open(store)[0][1].tobytes()
    assert asked[0] == (
        "owner/name",
        {
            "repo_type": "dataset",
            "revision": "v1",
            "allow_patterns": [
                *("store/manifest.json", "store/vocabulary.safetensors"),
                *("store/shards/*", "store/data/*", "store/dropped/*"),
            ],
        },
    )
    assert inspect_store(address)["complete"] and verify_store(address) == []
    assert recipe_from_dict({"store": {"path": address}}).stores == [address]
    with pytest.raises(UsageError, match="cannot be written"):
        command("store", "card", address)
    with pytest.raises(UsageError, match=r"hf://.* not supported here"):
        score_corpus(ArithmeticTeacher(), "c.jsonl", address)


def test_a_store_that_the_hub_does_not_have(monkeypatch):
    def snapshot(repository, **given):
        raise OSError("Repository Not Found.\nmore than one line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(AddressError, match=r"hub: Repository Not Found\. Check.*hf auth login"):
        LossStore.open("hf://datasets/owner/name")
    for address in ("hf://owner/name", "hf://datasets/name", "hf://datasets//name"):
        with pytest.raises(AddressError, match="hf://datasets/OWNER/NAME"):
            LossStore.open(address)


def test_no_card_of_half_a_store(tmp_path):
    with pytest.raises(StoreError, match="not a loss store"):
        command("store", "card", tmp_path)
