"""A loss store in a bucket, on a real S3 server: the bytes of a local one, whatever happens."""

import json
import shutil
import signal
import warnings
from pathlib import Path

import obstore
import pytest
from bucket_children import end, score, start
from bucket_kit import BUCKET, SECRET, CuttingProxy, bucket_bytes
from score.teacher_kit import TEACHERS, actor_of, save_teacher, store_bytes, write_corpus
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import (
    AddressError,
    MissingExtraError,
    ScoreError,
    StorageWarning,
    StoreError,
    UsageError,
)
from vocagnolm.score import Share, score_corpus
from vocagnolm.score.plan import PLAN_FILE, CorpusSource, TeacherSource, describe, make_plan
from vocagnolm.storage import Bucket, bucket, storage_of
from vocagnolm.store import LossStore, StoreWriter, inspect_store, verify_store
from vocagnolm.store.format import shard_name

ArithmeticTeacher, SETTINGS = TEACHERS["alternatives"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Corpus of five shards, and the files of its local store."""
    folder = tmp_path_factory.mktemp("whole")
    corpus = write_corpus(folder / "corpus.jsonl")
    score_corpus(ArithmeticTeacher(), corpus, folder / "s", settings=SETTINGS)
    return str(corpus), folder / "s", store_bytes(folder / "s")


def run(corpus, out, share=None, teacher=None):
    share = None if share is None else Share.parse(share)
    return score_corpus(teacher or ArithmeticTeacher(), corpus, out, settings=SETTINGS, share=share)


def test_the_bytes_are_those_of_a_local_store(whole, address):
    corpus, _, files = whole
    summary = run(corpus, address)
    assert summary.scored_shards == 5 and summary.store["complete"]
    assert summary.store["path"] == address
    assert bucket_bytes(address) == files
    assert verify_store(address) == []
    again = run(corpus, address)
    assert again.scored_shards == 0 and again.found_shards == 5
    assert bucket_bytes(address) == files


def test_reading_copies_a_shard_when_it_is_used(whole, address, tmp_path):
    corpus, local, _ = whole
    run(corpus, address)
    ours, theirs = LossStore.open(local), LossStore.open(address)
    assert not (tmp_path / "cache").exists() and theirs.bits_per_byte == ours.bits_per_byte
    assert theirs[0][1].tobytes() == ours[0][1].tobytes()
    copies = lambda: sorted((tmp_path / "cache" / "stores").rglob("*.safetensors"))  # noqa: E731
    assert [path.name for path in copies()] == ["000000.safetensors"]
    for mine, copied in zip(ours, theirs, strict=True):
        assert mine[1].tobytes() == copied[1].tobytes()
    assert len(copies()) == 5 and theirs.find(ours.document_hash(7)) == 7

    place = Bucket(address)  # not asked again: it could not answer
    content = bytes(place.read(shard_name(3)))
    place.put(shard_name(3), b"damaged")
    assert LossStore.open(address)[-1][1].tobytes() == ours[-1][1].tobytes()
    copies()[3].unlink()
    with pytest.raises(AddressError, match=r"000003.* is damaged: 7 bytes, the manifest says"):
        list(LossStore.open(address))
    place.put(shard_name(3), content)
    copies()[0].write_bytes(bytes(copies()[0].stat().st_size))
    with pytest.raises(StoreError, match=r"Remove that file: it is copied again from s3://"):
        list(LossStore.open(address))


def test_killed_between_shard_and_record(whole, env, address):
    corpus, _, files = whole
    child = start(score, env, corpus, address, None, "created 000001.safetensors")
    assert end(child) == -signal.SIGKILL
    names = Bucket(address).files()
    assert shard_name(1) in names and "records/000001.json" not in names
    assert "records/000000.json" in names and "manifest.json" not in names
    assert inspect_store(address)["shards"] == 2
    with pytest.raises(StoreError, match="not complete: 2 of 5"):
        LossStore.open(address)
    summary = run(corpus, address)
    assert summary.found_shards == 2 and summary.scored_shards == 3
    assert bucket_bytes(address) == files


def test_going_on_is_one_listing_and_the_records(whole, env, address, monkeypatch):
    corpus, _, _ = whole
    child = start(score, env, corpus, address, None, "begin 000003.safetensors")
    assert end(child) == -signal.SIGKILL
    asked = []
    real_read, real_files = Bucket.read, Bucket.files
    monkeypatch.setattr(Bucket, "read", lambda p, name: asked.append(name) or real_read(p, name))
    monkeypatch.setattr(
        Bucket, "files", lambda p, *folders: asked.append("list") or real_files(p, *folders)
    )

    class Stopping(ArithmeticTeacher):
        def load(self):
            raise ScoreError("far enough")

    with pytest.raises(ScoreError, match="far enough"):
        run(corpus, address, teacher=Stopping())
    records = [f"records/00000{number}.json" for number in range(3)]
    asked = [name for name in asked if not name.startswith("probe-")]
    assert sorted(asked) == ["list", "manifest.partial.json", "plan.json", *records]
    monkeypatch.undo()


def test_a_replacement_and_a_zombie_on_the_same_share(whole, env, address):
    corpus, _, files = whole
    # the zombie sleeps before its second shard; its replacement does all, and the other share too
    zombie = start(score, env, corpus, address, "1/2", None, "begin 000002.safetensors", 4.0)
    others = [start(score, env, corpus, address, share) for share in ("1/2", "2/2", "2/2")]
    assert [end(child) for child in others] == [0, 0, 0]
    run(corpus, address)
    assert Bucket(address).has("manifest.json")
    assert end(zombie) == 0
    run(corpus, address)  # whatever the zombie has left is removed
    assert bucket_bytes(address) == files and verify_store(address) == []


def test_killed_at_any_step(whole, env, address):
    corpus, _, files = whole
    steps = [
        "created manifest.partial.json",
        "begin 000004.safetensors",
        "begin 000004.json",
        "begin manifest.json",
        "created manifest.json",
        "begin removing manifest.partial.json",
        "begin removing 000000.json",
    ]
    children = [
        (start(score, env, corpus, f"{address}/{number}", None, step), f"{address}/{number}")
        for number, step in enumerate(steps)
    ]
    for step, (child, out) in zip(steps, children, strict=True):
        assert end(child) == -signal.SIGKILL, step
        run(corpus, out)
        assert bucket_bytes(out) == files, step


def test_a_run_that_begins_while_another_one_ends(whole, address, monkeypatch):
    """The partial manifest is listed, and gone when it is read."""
    corpus, _, files = whole
    writer = StoreWriter(address, {"corpus": {}}, 5)
    real = Bucket.files

    def completed(place, *folders):
        monkeypatch.setattr(Bucket, "files", real)
        run(corpus, address)
        return {"manifest.partial.json": 9}

    monkeypatch.setattr(Bucket, "files", completed)
    with pytest.raises(StoreError, match="other settings"):
        writer.begin()
    assert bucket_bytes(address) == files


def test_damage_is_found_and_scored_again(whole, address):
    corpus, _, files = whole
    run(corpus, address)
    place = Bucket(address)
    content = bytearray(place.read(shard_name(2)))
    content[-3] ^= 1
    place.put(shard_name(2), bytes(content))
    assert verify_store(address) == [
        f"{shard_name(2)}: its bytes do not match the checksum in the manifest"
    ]
    summary = run(corpus, address)
    assert summary.scored_shards == 1 and address in summary.mended[0]
    assert bucket_bytes(address) == files


def once(method, side, size):
    """Cut every request of this method the first time that it comes."""
    seen = set()

    def cut(head):
        fresh = head.startswith(method) and head not in seen
        seen.add(head)
        return (side, size) if fresh else None

    return cut


def test_half_a_put_and_a_reset_line(whole, server, address, monkeypatch):
    """Every first PUT of a shard or a record breaks off in the middle of its body."""
    corpus, _, files = whole
    proxy = CuttingProxy(server, once("PUT", "request", 900))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    run(corpus, address)
    assert proxy.cuts > 5
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    assert bucket_bytes(address) == files


def test_the_answer_to_a_put_is_lost(whole, server, address, monkeypatch):
    """The server has it, the writer does not know: 'exists' is its own shard."""
    corpus, _, files = whole
    proxy = CuttingProxy(server, once("PUT", "answer", 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    run(corpus, address)
    assert proxy.cuts > 5
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    assert bucket_bytes(address) == files


def test_reads_that_are_cut(whole, server, address, monkeypatch):
    corpus, local, _ = whole
    run(corpus, address)
    proxy = CuttingProxy(server, once("GET", "answer", 700))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    assert verify_store(address) == []
    copied = LossStore.open(address)
    for mine, theirs in zip(LossStore.open(local), copied, strict=True):
        assert mine[1].tobytes() == theirs[1].tobytes()
    assert proxy.cuts > 5


def test_a_line_that_is_always_cut_is_told(whole, server, address, monkeypatch):
    corpus, _, _ = whole
    run(corpus, address)
    monkeypatch.setenv(bucket.PATIENCE_VARIABLE, "0.1")
    proxy = CuttingProxy(server, lambda head: ("answer", 700) if "shards" in head else None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    with pytest.raises(AddressError, match=r"shards/000000.* could not be read: .*again\."):
        list(LossStore.open(address))


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "nobody")]
)
def test_wrong_credentials(whole, address, monkeypatch, name, value):
    corpus, _, _ = whole
    monkeypatch.setenv(name, value)
    for use in (lambda: run(corpus, address), lambda: LossStore.open(address)):
        with pytest.raises(AddressError, match=r"not accept the credentials.*AWS_PROFILE") as told:
            use()
        assert value not in str(told.value) and SECRET not in str(told.value)
        assert "\n" not in str(told.value)


def test_no_such_bucket_or_key(whole, address):
    corpus, _, _ = whole
    for use in (
        lambda: run(corpus, "s3://nobody-has-this/x"),
        lambda: inspect_store("s3://nobody-has-this/x"),
        lambda: LossStore.open("s3://nobody-has-this/x"),
    ):
        with pytest.raises(AddressError, match="there is no bucket s3://nobody-has-this"):
            use()
    with pytest.raises(StoreError, match=rf"{address} is not a loss store"):
        LossStore.open(address)


def test_credentials_of_a_profile_and_none_in_an_address(whole, address, tmp_path, monkeypatch):
    corpus, _, files = whole
    home = tmp_path / "aws"
    home.write_text(f"[lab]\naws_access_key_id = testkey\naws_secret_access_key = {SECRET}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    run(corpus, address)
    assert bucket_bytes(address) == files
    assert not any(SECRET.encode() in content for content in files.values())
    monkeypatch.setenv("AWS_PROFILE", "another")
    with pytest.raises(AddressError, match=r"AWS settings.*another"):
        LossStore.open(address)
    with pytest.raises(AddressError, match="credentials in it") as told:
        Bucket(f"s3://key:{SECRET}@{BUCKET}/x")
    assert SECRET not in str(told.value)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_server_that_ignores_or_refuses_put_if_absent(whole, address, monkeypatch, refuses):
    corpus, _, files = whole
    real = obstore.put

    def put(store, name, content, mode="overwrite", **more):
        if refuses and mode == "create":
            raise obstore.exceptions.GenericError("501: <Code>NotImplemented</Code>")
        return real(store, name, content)

    monkeypatch.setattr(obstore, "put", put)
    with pytest.warns(StorageWarning, match="does not keep to put-if-absent"):
        run(corpus, address)
    assert bucket_bytes(address) == files
    assert run(corpus, address).found_shards == 5


def test_the_command_scores_into_a_bucket_from_a_bucket(address, tmp_path):
    teacher = save_teacher(tmp_path / "t")
    Bucket(address).put("c.jsonl", write_corpus(tmp_path / "c.jsonl", documents=8).read_bytes())
    words = ["score", "--teacher", teacher, "--corpus", f"{address}/c.jsonl"]
    words += ["--out", f"{address}/s", "--device", "cpu", "--context", 64, "--threads", 1]

    def command(*more):
        result = CliRunner().invoke(app, [str(word) for word in (*words, *more)])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    assert f"{address}/s: 1 shards scored" in command()
    assert f"{address}/s is complete already" in command()
    words[4], words[6] = tmp_path / "c.jsonl", tmp_path / "s"
    command()
    assert bucket_bytes(f"{address}/s") == store_bytes(tmp_path / "s")


@pytest.mark.parametrize("conditional", [True, False])
def test_a_file_that_is_taken_and_then_removed_is_not_ours(address, monkeypatch, conditional):
    place, real = Bucket(address), Bucket.read
    place.put("claims/0", b"theirs")

    def removed_before(bucket, name):
        bucket.remove(name)
        return real(bucket, name)

    def refuse(*args, mode="overwrite", **options):
        raise NotImplementedError

    monkeypatch.setattr(Bucket, "read", removed_before)
    if not conditional:
        monkeypatch.setattr(obstore, "put", refuse)
    assert place.create("claims/0", b"ours") is False


def test_the_probe_leaves_nothing_and_says_nothing(address):
    place = Bucket(address)
    assert place.try_writing() is None and place.files() == {}


def test_another_identity_is_refused_and_a_stranger_too(whole, address, tmp_path):
    corpus, _, files = whole
    run(corpus, address)
    other = write_corpus(tmp_path / "other.jsonl", documents=9)
    with pytest.raises(StoreError, match="another corpus"):
        run(other, address)
    assert bucket_bytes(address) == files
    Bucket(f"{address}-2").put("holiday.jpg", b"x")
    with pytest.raises(StoreError, match=r"not a loss store \(it holds holiday.jpg\)"):
        run(corpus, f"{address}-2")


def test_the_commands_take_an_address(whole, address, tmp_path, monkeypatch):
    corpus, local, _ = whole
    monkeypatch.chdir(tmp_path)
    run(corpus, address)

    def command(*words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, (result.output, result.exception)
        said.append(result.stderr)
        return result.stdout

    said = []
    about = json.loads(command("store", "inspect", address, "--json"))
    here = json.loads(command("store", "inspect", local, "--json"))
    assert about.pop("path") == address and here.pop("path") and about == here
    assert "every checksum matches" in command("store", "verify", address)
    assert not any(said)  # neither copies the store
    command("store", "export", address)
    assert f"copying {address} (" in said[-1] and str(tmp_path / "cache") in said[-1]
    assert (tmp_path / f"{address.rpartition('/')[2]}.parquet").is_file()
    assert "23 documents" in command("store", "compare", address, local)
    assert "by bits_per_byte" in command("store", "rank", address)
    assert not (tmp_path / "s3:").exists()


def test_what_no_code_serves(tmp_path):
    for address in ("ftp://host/x", "https://host/x", "file:///x"):
        with pytest.raises(UsageError, match=r"Use a local folder or s3://, gs://, az://"):
            storage_of(address)
    with pytest.raises(AddressError, match="names no bucket"):
        Bucket("s3:///x")


def test_without_the_extra(monkeypatch, env):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"package 'obstore'.*vocagnolm\[bucket\]"):
        LossStore.open(f"s3://{BUCKET}/x")


def test_no_warning_where_all_is_well(whole, address):
    corpus, _, _ = whole
    with warnings.catch_warnings():
        warnings.simplefilter("error", StorageWarning)
        run(corpus, address)


def test_a_worker_of_a_cluster_takes_plan_and_corpus_from_a_bucket(whole, address, tmp_path):
    """What Ray's actors do, on a machine that has nothing but the addresses."""
    corpus, _, _ = whole
    text = storage_of(address + "-text")
    text.put("corpus.jsonl", Path(corpus).read_bytes())
    teacher = TeacherSource(str(save_teacher(tmp_path / "t")))
    source = CorpusSource.of(f"{text}/corpus.jsonl")
    about = describe(teacher.open(SETTINGS), SETTINGS)
    plan = make_plan(about, source.open(), address, teacher_source=teacher, corpus_source=source)
    plan.writer().begin()
    digest = plan.save()
    assert digest is not None and PLAN_FILE in Bucket(address).files()
    shutil.rmtree(tmp_path / "cache")
    actor = actor_of(plan.absolute().out, digest)
    actor.load()
    for number in range(plan.shard_count - 1):
        actor.work(number, None)
    summary = score_corpus(str(tmp_path / "t"), f"{text}/corpus.jsonl", address, settings=SETTINGS)
    assert summary.found_shards == plan.shard_count - 1 and summary.scored_shards == 1
    score_corpus(str(tmp_path / "t"), f"{text}/corpus.jsonl", tmp_path / "s", settings=SETTINGS)
    assert bucket_bytes(address) == store_bytes(tmp_path / "s")
