"""The commands, as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from faults_kit import LONG
from score.teacher_kit import save_teacher, store_bytes, write_corpus
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import CorpusError
from vocagnolm.store.format import shard_name

OPTIONS = [
    *("--device", "cpu", "--context", "64", "--stride", "16", "--batch-tokens", "256"),
    *("--shard-documents", "5", "--threads", "1"),
]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    teacher = save_teacher(folder / "teacher")
    corpus = write_corpus(folder / "corpus.jsonl")
    with corpus.open("a") as file:
        file.write('{"text": ""}\n')
    command = ["score", "--teacher", teacher, "--corpus", corpus, "--out", folder / "s", *OPTIONS]
    return folder, command


def test_score_then_look(lab):
    folder, command = lab
    first = run(*command)
    assert first.exit_code == 0, first.output
    assert "5 shards scored" in first.stdout and "left out 1 documents: 1 empty" in first.stdout
    again = run(*command)
    assert "is complete already; nothing to do" in again.stdout
    as_json = json.loads(run(*command, "--json").stdout)
    assert as_json["scored_shards"] == 0 and as_json["found_shards"] == 5

    about = json.loads(run("store", "inspect", folder / "s", "--json").stdout)
    wanted = "complete documents tokens bytes mean_nll bits_per_byte skipped bytes_per_token "
    wanted += "teacher format_version"
    assert set(wanted.split()) <= set(about)
    assert about["complete"] is True and about["documents"] == 23 and about["skipped"] == 1
    assert "bits per byte" in run("store", "inspect", folder / "s").stdout

    assert run("store", "verify", folder / "s").exit_code == 0
    exported = run("store", "export", folder / "s", "--out", folder / "s.parquet")
    assert exported.exit_code == 0 and (folder / "s.parquet").is_file()


def test_verify_names_the_shard_and_fails(lab):
    folder, command = lab
    out = folder / "damaged"
    assert run(*command, "--out", out).exit_code == 0
    path = out / shard_name(3)
    path.write_bytes(path.read_bytes()[:-4])
    found = run("store", "verify", out)
    assert found.exit_code == 1 and "000003.safetensors" in found.stdout
    as_json = run("store", "verify", out, "--json")
    assert as_json.exit_code == 1 and json.loads(as_json.stdout)["ok"] is False
    mended = run(*command, "--out", out)
    assert "scored again" in mended.stdout and run("store", "verify", out).exit_code == 0


@pytest.mark.skipif(not LONG, reason="make faults")
def test_a_real_process_killed_by_the_kernel_s_hand(lab, tmp_path):
    """kill -9 on the command itself, as soon as its first shard is there."""
    folder, command = lab
    assert run(*command, "--out", folder / "whole").exit_code == 0
    out = tmp_path / "killed"
    arguments = [str(a) for a in (*command, "--out", out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "vocagnolm", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if (out / shard_name(0)).exists():
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    process.wait()
    assert (out / shard_name(0)).exists()
    resumed = run(*command, "--out", out)
    assert resumed.exit_code == 0
    assert store_bytes(out) == store_bytes(folder / "whole")


def test_an_early_error_leaves_no_bar(lab, tmp_path):
    folder, _ = lab
    found = run("score", "--teacher", folder / "teacher", "--corpus", "no.jsonl", "--out", tmp_path)
    assert isinstance(found.exception, CorpusError)
    assert found.output == ""


def test_progress_moves_within_a_shard(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("VOCAGNOLM_PROGRESS_SECONDS", "0")
    _, command = lab
    told = run(*command, "--out", tmp_path / "s", "--shard-documents", 1000).stderr.splitlines()
    lines = [line for line in told if line.startswith("scoring: ")]
    assert len(lines) > 3 and all("tokens/s, ETA" in line for line in lines)
    assert len({line.split(",")[0] for line in lines}) > 3 and "24/24 documents" in lines[-1]


def test_a_recipe_with_several_stores_does_not_say_which_to_make(lab, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("store: {path: [a, b]}\nteacher: {model: t}\ncorpus: {files: [c.jsonl]}\n")
    result = run("score", "--recipe", recipe)
    assert "several stores" in str(result.exception) and "--out" in str(result.exception)
