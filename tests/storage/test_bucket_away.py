"""A storage that is away for a while ends nobody's run. Here nobody listens for some seconds; in
`make faults` the server is killed for a minute, and starts again with what it held."""

import re
import shutil
import threading

import pytest
from bucket_kit import CuttingProxy, bucket_bytes
from faults_kit import LONG, tiny_tree
from score.teacher_kit import SETTINGS, ArithmeticTeacher, save_teacher, store_bytes, write_corpus
from training_kit import fresh_process, make_lab

from vocagnolm.base import files
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import AddressError, WaitingWarning
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import RayCluster, score_corpus
from vocagnolm.storage import Bucket, bucket
from vocagnolm.train.run import train

AWAY_SECONDS = 60.0 if LONG else 1.5


@pytest.fixture
def away(s3, address, monkeypatch):
    """Calling it takes the storage away for a while."""
    monkeypatch.setattr(bucket, "_SAID_SECONDS", 5.0 if LONG else 0.5)
    if LONG:
        return lambda: s3.away(AWAY_SECONDS)
    proxy = CuttingProxy(s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return lambda: proxy.away(AWAY_SECONDS)


@pytest.fixture
def step(monkeypatch):
    """Calls a function once, when a step of writing is reached: `step("begin x.json", f)`."""

    def at(name, do):
        def reached(point, path):
            if f"{point} {path.name}" == name:
                monkeypatch.setattr(files, "reached", real)
                do()

        monkeypatch.setattr(files, "reached", reached)

    real = files.reached
    return at


@pytest.mark.parametrize("when", ["begin 000001.safetensors", "begin 000002.json"])
def test_in_the_middle_of_scoring(away, address, tmp_path, step, when):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "whole", settings=SETTINGS)
    step(when, away)
    with pytest.warns(WaitingWarning, match=r"s3://lab has not answered for .* until \d+:"):
        summary = score_corpus(ArithmeticTeacher(), corpus, address, settings=SETTINGS)
    assert summary.scored_shards == 5
    assert bucket_bytes(address) == store_bytes(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore::vocagnolm.errors.WaitingWarning")
def test_while_reading_writing_and_listing(away, address):
    place = Bucket(address)
    place.put("a", b"one")
    for use, expected in (
        (lambda: bytes(place.read("a")), b"one"),
        (lambda: place.has("b"), False),
        (lambda: place.create("b", b"two"), True),
        (lambda: place.files(), {"a": 3, "b": 3}),
        (lambda: place.remove("a"), None),
    ):
        away()
        assert use() == expected


def test_a_storage_that_stays_away_ends_the_run(address, away, monkeypatch):
    Bucket(address).put("a", b"one")
    monkeypatch.setenv(bucket.PATIENCE_VARIABLE, "0.5")
    away()
    with pytest.raises(AddressError, match=r"a could not be read: .* kept.*again\."):
        Bucket(address).read("a")
    monkeypatch.setattr(bucket, "_SAID_SECONDS", 1e9)
    monkeypatch.setenv(bucket.PATIENCE_VARIABLE, "100")
    assert Bucket(address).read("a") == b"one"


def test_a_server_that_takes_a_request_and_hangs_is_mentioned(monkeypatch):
    """While it hangs: what is waited for, how long, and until when; with one line a request."""
    said, spoken = [], threading.Event()

    def warn(text, *about, **more):
        said.append(text)
        spoken.set()

    monkeypatch.setattr(bucket.warnings, "warn", warn)
    monkeypatch.setattr(bucket, "_HANGING_SECONDS", 0.0)
    assert bucket.patiently(lambda: spoken.wait(60), "s3://lab", limit_seconds=900.0)
    assert len(said) == 1
    assert re.fullmatch(
        r"a request to s3://lab has been under way for 0 s; .* until \d\d:\d\d:\d\d", said[0]
    )


@pytest.mark.filterwarnings("ignore::vocagnolm.errors.WaitingWarning")
def test_in_the_middle_of_preparing_and_training(away, address, tmp_path, step):
    lab = tmp_path / "lab"
    lab.mkdir()
    make_lab(lab, 40)
    place = Bucket(address)
    place.put("corpus.jsonl", (lab / "corpus.jsonl").read_bytes())
    for path in (lab / "store").rglob("*.*"):
        place.put(f"store/{path.relative_to(lab / 'store')}", path.read_bytes())
    data = {"blocks": f"{address}/blocks", "cache": str(tmp_path / "near"), "block_size": 32}
    tree = tiny_tree(
        lab,
        tmp_path / "run",
        corpus={"files": [f"{address}/corpus.jsonl"]},
        store={"path": f"{address}/store"},
        data={**data, "part_documents": 16},
    )
    recipe = recipe_from_dict(tree)
    away()
    step("begin settings.json", away)
    manifest = prepare(recipe, workers=1)
    assert len(manifest["parts"]) == 3
    shutil.rmtree(tmp_path / "near")
    away()
    fresh_process()
    assert train(recipe, quiet=True)["finished"]


@pytest.mark.skipif(not LONG, reason="make faults")
def test_under_ray(away, address, tmp_path, step, monkeypatch):
    """Workers give their shards back, and take them again."""
    pytest.importorskip("ray")
    teacher, corpus = save_teacher(tmp_path / "t"), write_corpus(tmp_path / "corpus.jsonl", 60)
    score_corpus(teacher, corpus, tmp_path / "whole", settings=SETTINGS)
    monkeypatch.setenv(bucket.PATIENCE_VARIABLE, "5")
    step("put plan.json", away)
    cluster = RayCluster(workers=2, address="local")
    score_corpus(teacher, corpus, address, settings=SETTINGS, cluster=cluster)
    assert bucket_bytes(address) == store_bytes(tmp_path / "whole")
