"""A folder that a teacher writes, in a bucket: the bytes of a local one, and read from there."""

import dataclasses
import pickle
import shutil
from functools import partial

import pytest
from bucket_kit import bucket_bytes
from write.write_kit import SETTINGS, PlayedWriter, folder_bytes, save_writer, write_prompts

from vocagnolm.data.corpus import open_corpus
from vocagnolm.jobs.cluster import ShardActor
from vocagnolm.score import Share, read_prompts, write_answers
from vocagnolm.score.plan import PLAN_FILE
from vocagnolm.score.write import WriterSource, describe_writer, make_plan, open_worker
from vocagnolm.storage import Bucket, storage_of
from vocagnolm.store import LossStore, verify_store


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Prompts of four shards, and the files of their local folder."""
    folder = tmp_path_factory.mktemp("whole")
    prompts = write_prompts(folder / "prompts.jsonl", 14)
    write_answers(PlayedWriter(), prompts, folder / "out")
    return prompts, folder / "out", folder_bytes(folder / "out")


def test_shares_write_the_bytes_of_a_local_folder(whole, address):
    prompts, _, files = whole
    for share in ("2/2", "1/2"):
        write_answers(PlayedWriter(), prompts, address, share=Share.parse(share))
    assert bucket_bytes(address) == files and verify_store(address) == []
    place = Bucket(address)
    name = next(name for name in files if name.startswith("data/"))
    place.put(name, files[name].replace(b"user", b"uses", 1))
    assert verify_store(address) == [f"{address}/{name}: its bytes do not match its checksum"]
    assert name in write_answers(PlayedWriter(), prompts, address).mended[0]
    assert bucket_bytes(address) == files


def test_corpus_and_store_are_read_from_the_address(whole, address):
    prompts, local, _ = whole
    write_answers(PlayedWriter(), prompts, address)
    here, there = open_corpus(local), open_corpus(address)
    assert [d.text for d in there] == [d.text for d in here]
    assert len(there) == len(LossStore.open(local))
    store = LossStore.open(address)
    assert store.made_from(there.fingerprint)
    assert store.of(list(there)[5].text) == store.place_of(5) == 5
    copied = open_corpus(f"{address}/data")  # the data files alone, as anybody's
    assert copied.fingerprint == here.fingerprint


def test_a_worker_of_a_cluster_takes_plan_and_prompts_from_a_bucket(address, tmp_path):
    """What Ray's actors do, on a machine that has the teacher and the addresses."""
    local = write_prompts(tmp_path / "prompts.jsonl", 10)
    storage_of(f"{address}-text").put("prompts.jsonl", local.read_bytes())
    teacher = str(save_writer(tmp_path / "teacher"))
    settings = dataclasses.replace(SETTINGS, max_new_tokens=8)
    prompts = read_prompts(f"{address}-text/prompts.jsonl")
    source = WriterSource(teacher)
    plan = make_plan(
        describe_writer(source.open(settings, prompts)), prompts, {9: 1}, address, source
    )
    plan.writer().begin()
    digest = plan.save()
    assert digest is not None and PLAN_FILE in Bucket(address).files()
    shutil.rmtree(tmp_path / "cache")
    actor = ShardActor(pickle.dumps(partial(open_worker, address, digest)))
    actor.load()
    amount = actor.work(0, 1)
    assert amount.documents == 12 and amount.counts["answers"] == 12
    summary = write_answers(teacher, f"{address}-text/prompts.jsonl", address, settings=settings)
    assert summary.found_shards == 1 and summary.written_shards == 2
    write_answers(teacher, local, tmp_path / "out", settings=settings)
    assert bucket_bytes(address) == folder_bytes(tmp_path / "out")
