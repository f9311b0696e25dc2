"""`vocagnolm train` in rounds: what a run leaves, what it refuses, and what a kill costs."""

import json
import multiprocessing
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chat_kit import loaded
from faults_kit import LONG, some
from rounds.rounds_kit import ASKED, write_prompts
from safetensors.torch import load_file
from training_kit import fresh_process, run_processes
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import VocagnolmError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.report.runs import read_run
from vocagnolm.rounds import rounds, train_rounds
from vocagnolm.rounds.folder import read_round
from vocagnolm.rounds.offline import OfflineAnswers
from vocagnolm.rounds.rounds import PromptPool
from vocagnolm.rounds.run import build_rounds, rounds_schedule
from vocagnolm.rounds.writer import merged_weights
from vocagnolm.store import LossStore, verify_store
from vocagnolm.store.writer import StoreWriter
from vocagnolm.train import checkpoint
from vocagnolm.train.check import check
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.loop import TrainingLoop
from vocagnolm.train.run import train
from vocagnolm.train.settings import training_arguments


def recipe(lab: Path, folder: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, dict[str, Any]] = {
        "student": {"model": str(lab / "start")},
        "teacher": {"model": str(lab / "teacher")},
        "rounds": {
            "prompts": [str(lab / "prompts.jsonl")],
            "rounds": 3,
            "prompts_per_round": 6,
            "updates_per_round": 2,
            "max_new_tokens": 16,
        },
        "data": {"block_size": 64},
        "objective": {"method": "on_policy"},
        "optimizer": {"learning_rate": 3e-3, "min_learning_rate": 3e-4},
        "train": {"device": "cpu", "micro_batch": 2},
        "run": {"folder": str(folder), "save_every": 1, "log_every": 1},
    }
    for name, content in sections.items():
        tree[name] = {**tree.get(name, {}), **content}
    return tree


def trained(lab: Path, folder: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    return train_rounds(recipe_from_dict(recipe(lab, folder, **sections)), quiet=True)


def left(run: Path) -> dict[str, bytes]:
    """Everything that a run leaves and that does not depend on the clock."""
    parts = ("rounds", "model")
    files = [path for part in parts for path in sorted((run / part).rglob("*")) if path.is_file()]
    card = run / "model" / "README.md"  # it names the folder
    return {str(path.relative_to(run)): path.read_bytes() for path in files if path != card}


@pytest.fixture(scope="module")
def whole(lab, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    trained(lab, run)
    return run


def test_a_run_leaves_a_folder_for_every_round(lab, whole):
    assert sorted(path.name for path in (whole / "rounds").iterdir()) == [
        "000001", "000002", "000003",
    ]  # fmt: skip
    records = read_metrics(whole / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["round"] for record in records] == [1, 1, 2, 2, 3, 3]
    for record in records[::2]:
        assert 0 < record["finished_share"] <= 1 and record["answer_tokens"] > 1
        assert 0 <= record["other_ids_share"] <= 1 and record["entropy"] > 0
    assert "finished_share" not in records[1]
    before = load_file(lab / "start" / "model.safetensors")
    after = load_file(whole / "model" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (whole / "model" / "chat_template.jinja").is_file()
    card = (whole / "model" / "README.md").read_text()
    assert "3, each of 6 prompts" in card and "reverse" in card


def test_a_round_is_a_corpus_with_its_store(lab, whole, tmp_path):
    """What was written can be looked at, and trained on offline."""
    folder = whole / "rounds" / "000002"
    assert verify_store(folder) == []
    store, corpus = LossStore.open(folder), open_corpus(folder)
    assert len(store) == len(corpus) > 1
    assert store.kept_alternatives.count == 16
    student = loaded(lab / "start")
    rows = [
        json.loads(line)
        for path in (folder / "data").iterdir()
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    for row in rows:
        ids = row["student_ids"][: -1 if row["finished"] else None]
        spelled = b"".join(student.base.bytes_of(n) or b"" for n in ids)
        assert row["messages"][-1]["content"] == spelled.decode(errors="ignore").strip()
        assert len(row["student_nll"]) == len(row["student_ids"])
    settings = {
        "student": {"model": str(lab / "start")},
        "corpus": {"files": [str(folder)]},
        "store": {"path": str(folder)},
        "data": {"blocks": str(tmp_path / "blocks"), "block_size": 64},
        "objective": {"method": "distill"},
        "train": {"device": "cpu", "batch_blocks": 1, "micro_batch": 1},
        "run": {"folder": str(tmp_path / "run")},
    }
    offline = recipe_from_dict(settings)
    prepare(offline)
    assert train(offline, quiet=True)["finished"]


def test_the_page_of_a_run_shows_its_rounds(whole):
    page = read_run(whole)
    assert page.facts["rounds"] == "3" and page.facts["finished answers"].endswith("%")
    losses = [record["loss"] for record in read_metrics(whole / "metrics.jsonl")]
    assert [value for _, value in page.loss] == pytest.approx(losses, rel=1e-4)


def test_answers_change_from_round_to_round(whole):
    answers = [
        {
            (row["prompt_index"], tuple(row["student_ids"]))
            for path in (whole / "rounds" / name / "data").iterdir()
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        }
        for name in ("000001", "000002", "000003")
    ]
    assert not answers[0] & answers[1] and not answers[1] & answers[2]


@pytest.mark.parametrize("divergence", ["forward", "reverse"] if LONG else ["reverse"])
def test_the_student_comes_nearer_to_its_teacher(lab, tmp_path, divergence):
    trained(
        lab,
        tmp_path / "run",
        teacher={"model": str(lab / "twin")},
        rounds={"rounds": 14, "prompts_per_round": 24, "updates_per_round": 1},
        objective={"divergence": divergence},
        run={"save_every": 0},
    )
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert np.mean(losses[-4:]) < 0.85 * np.mean(losses[:4])


def test_drawn_tokens_estimate_the_reverse_divergence(lab, tmp_path):
    run = tmp_path / "run"
    trained(
        lab,
        run,
        teacher={"model": str(lab / "twin")},
        rounds={"rounds": 1, "prompts_per_round": 24, "updates_per_round": 1},
        objective={"divergence": "sampled_token"},
    )
    (record,) = read_metrics(run / "metrics.jsonl")
    # the student that trains gives the drawn tokens the probability with which it drew them
    assert record["loss"] == pytest.approx(record["sampled_divergence"], rel=2e-3)


# ---- kills ----


def die(*_: Any, **__: Any) -> None:
    os._exit(9)


def _before_reading() -> None:
    rounds.Rounds._read = die  # type: ignore[method-assign]


def _after(owner: Any, name: str, count: int) -> None:
    """Ends the process right after a call of this method."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        calls[0] += 1
        if calls[0] == count:
            die()
        return result

    setattr(owner, name, wrapped)


PLACES: dict[str, Any] = {
    "between writing and reading": _before_reading,
    "with a shard and no manifest": lambda: _after(StoreWriter, "write_shard", 2),
    "with a manifest, not tidied": lambda: _after(StoreWriter, "finish", 2),
    "before the first step of a round": lambda: _after(rounds, "write_round", 2),
    "within a round, before a checkpoint": lambda: _after(TrainingLoop, "clip_gradients", 4),
    "within a checkpoint": lambda: _after(checkpoint, "_save_random_numbers", 3),
    "after the last step": lambda: _after(TrainingLoop, "run", 1),
}


def _child(tree: dict[str, Any], place: str | None) -> None:
    fresh_process()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if place is not None:
        PLACES[place]()
    train_rounds(recipe_from_dict(tree), quiet=True)
    os._exit(0)


def _killed(tree: dict[str, Any], place: str | None) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=_child, args=(tree, place))
    process.start()
    process.join(120)
    return process.exitcode


def test_a_killed_run_leaves_the_same_bytes(lab, tmp_path):
    tree = recipe(lab, tmp_path / "whole")
    assert _killed(tree, None) == 0
    expected = left(tmp_path / "whole")
    for number, place in enumerate(some(PLACES, 2)):
        run = tmp_path / f"run{number}"
        tree = recipe(lab, run)
        assert _killed(tree, place) == 9, place
        there = {
            path: path.stat().st_mtime_ns
            for path in (run / "rounds").glob("*/shards/*")
            if (path.parents[1] / "manifest.json").is_file()
        }
        assert _killed(tree, None) == 0, place
        assert left(run) == expected, place
        # finished rounds are read, never written again
        assert all(path.stat().st_mtime_ns == when for path, when in there.items())
        records = read_metrics(run / "metrics.jsonl")
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]


def test_rounds_are_read_again_where_checkpoints_are_rare(lab, tmp_path):
    """The folders of rounds that are behind the last checkpoint are taken as they are."""
    sparse = {"save_every": 4}
    tree = recipe(lab, tmp_path / "run", run=sparse)
    PLACES["late"] = lambda: _after(TrainingLoop, "clip_gradients", 6)
    assert _killed(tree, "late") == 9
    moved = (tmp_path / "run" / "rounds" / "000003" / "manifest.json").stat().st_mtime_ns
    assert _killed(tree, None) == 0
    after = (tmp_path / "run" / "rounds" / "000003" / "manifest.json").stat().st_mtime_ns
    assert after == moved
    whole = tmp_path / "whole"
    assert _killed(recipe(lab, whole, run=sparse), None) == 0
    assert left(tmp_path / "run") == left(whole)


def test_a_round_that_is_gone_is_not_written_by_other_weights(lab, tmp_path):
    tree = recipe(lab, tmp_path / "run")
    assert _killed(tree, "within a round, before a checkpoint") == 9
    shutil.rmtree(tmp_path / "run" / "rounds" / "000002")
    with pytest.raises(VocagnolmError, match="000002 is gone"):
        train_rounds(recipe_from_dict(tree), quiet=True)


# ---- processes ----


def _by_ranks(tree: dict[str, Any]) -> None:
    train_rounds(recipe_from_dict(tree), quiet=True)


def test_two_processes_write_the_same_answers(lab, tmp_path):
    settings: dict[str, Any] = {"train": {"micro_batch": 1}}
    for count in (1, 2):
        tree = recipe(lab, tmp_path / f"run{count}", **settings)
        run_processes(_by_ranks, count, tree)
    alone, both = (left(tmp_path / f"run{count}") for count in (1, 2))
    first = [name for name in alone if name.startswith("rounds/000001")]
    assert first and all(alone[name] == both[name] for name in first)
    a, b = (read_metrics(tmp_path / f"run{count}" / "metrics.jsonl") for count in (1, 2))
    assert len(a) == len(b) == 6
    for x, y in zip(a[:2], b[:2], strict=True):
        assert y["loss"] == pytest.approx(x["loss"], rel=1e-4)
        assert y["entropy"] == pytest.approx(x["entropy"], rel=1e-4)
    weights = [load_file(tmp_path / f"run{n}" / "model" / "model.safetensors") for n in (1, 2)]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=2e-3, rtol=0)


# ---- kinds of students and runs ----


def test_adapters(lab, tmp_path):
    """The merged student writes: with its adapters trained, other answers than without."""
    pytest.importorskip("peft")
    run = tmp_path / "run"
    summary = trained(
        lab, run, lora={"rank": 4}, optimizer={"learning_rate": 3e-2}, rounds={"rounds": 2}
    )
    assert summary["finished"]
    before = load_file(lab / "start" / "model.safetensors")
    after = load_file(run / "model" / "model.safetensors")
    assert set(after) == set(before)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_only_the_beginnings_of_answers(lab, tmp_path):
    run = tmp_path / "run"
    trained(lab, run, rounds={"prefix_tokens": 2, "rounds": 1, "prompts_per_round": 8})
    (path,) = (run / "rounds" / "000001" / "data").iterdir()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(len(row["student_ids"]) <= 2 for row in rows)
    assert any(not row["finished"] for row in rows)


def test_right_answers_and_held_out_prompts(lab, tmp_path):
    known = write_prompts(tmp_path / "known.jsonl", ASKED, ["42"] * len(ASKED))
    run = tmp_path / "run"
    trained(
        lab,
        run,
        rounds={
            "prompts": [str(known)],
            "answer_field": "answer",
            "grade": "mixed",
            "held_out": [str(known)],
            "held_out_every": 2,
        },
    )
    records = read_metrics(run / "metrics.jsonl")
    assert [("held_out_right" in record) for record in records] == [True, *[False] * 3, True, False]
    assert all(record["right_share"] is not None for record in records[::2])


def test_a_share_of_answers_from_a_store(lab, whole, tmp_path):
    """With the answers of an earlier round as the corpus: both kinds are in a step."""
    folder = str(whole / "rounds" / "000001")
    given = recipe(
        lab,
        tmp_path / "run",
        rounds={"offline_share": 0.5, "rounds": 2},
        corpus={"files": [folder]},
        store={"path": folder},
    )
    assert train_rounds(recipe_from_dict(given), quiet=True)["finished"]
    a, b = (read_metrics(run / "metrics.jsonl")[0] for run in (whole, tmp_path / "run"))
    assert a["finished_share"] == b["finished_share"]  # the same answers are written
    assert a["loss"] != pytest.approx(b["loss"], rel=1e-3)  # and others are trained on beside them


def test_offline_rows_are_those_of_the_same_answers(lab, whole):
    """What a round trains on comes back from its folder as a corpus, where the student would cut
    the text as it was drawn."""
    folder = whole / "rounds" / "000001"
    given = recipe_from_dict(
        recipe(
            lab,
            whole,
            rounds={"offline_share": 0.5},
            corpus={"files": [str(folder)]},
            store={"path": str(folder)},
        )
    )
    offline = OfflineAnswers.of(given, loaded(lab / "start"))
    assert offline is not None
    rows = {tuple(row["input_ids"].tolist()): row for row in offline.rows(0, 0, 1)}
    arguments = training_arguments(given, rounds_schedule(given, 8))
    built = build_rounds(given, whole, PromptPool.of(given), arguments)[1]
    stored = read_round(folder)
    own = built.rows(stored, range(len(stored.answers)))
    same = [row for row in own if tuple(row["input_ids"].tolist()) in rows]
    assert same
    for row in same:
        other = rows[tuple(row["input_ids"].tolist())]
        assert np.array_equal(row["labels"], other["labels"])
        np.testing.assert_array_equal(row["guidance"], other["guidance"])
        np.testing.assert_allclose(row["target_p"], other["target_p"])


def test_the_copy_that_writes_has_the_adapters_merged(lab):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(lab / "start", dtype=torch.float32)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    ours = merged_weights(adapted)
    theirs = dict(adapted.merge_and_unload().named_parameters())
    assert set(ours) == set(theirs)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight)


def test_a_teacher_that_is_no_better_is_warned_of(lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rounds, "LEAST_COMPARED_BYTES", 16)
    same = recipe(lab, tmp_path / "run", teacher={"model": str(lab / "start")})
    same["rounds"] |= {"rounds": 1}
    train_rounds(recipe_from_dict(same))
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if "on the prompts the teacher has" in line]
    teacher, student = re.findall(r"has (\S+) bits per byte, the student (\S+):", line)[0]
    assert float(teacher) == pytest.approx(float(student), rel=1e-3)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"method": "guided"}}, "set objective.method to on_policy"),
        ({"rounds": {"prompts": []}}, "set rounds.prompts"),
        ({"student": {"model": None, "config": {"model_type": "llama"}}}, "student that answers"),
        ({"teacher": {"model": None}}, "need teacher.model"),
        ({"train": {"parallel": "fsdp2"}}, "use ddp"),
        ({"rounds": {"updates_per_round": 7}}, "at most the 6 answers"),
        ({"rounds": {"grade": "number"}}, "needs rounds.answer_field"),
        ({"rounds": {"offline_share": 0.5}}, "needs corpus.files and store.path"),
        ({"rounds": {"max_new_tokens": 64}}, "leaves no room for prompts"),
        ({"rounds": {"prompts": ["nothing-here.jsonl"]}}, "nothing-here"),
    ],
)
def test_recipes_that_cannot_work(lab, tmp_path, sections, message):
    with pytest.raises(VocagnolmError, match=message):
        trained(lab, tmp_path / "run", **sections)


def test_a_student_that_finishes_nothing_is_refused(lab, tmp_path):
    with pytest.raises(VocagnolmError, match="Let the teacher write first"):
        trained(lab, tmp_path / "run", rounds={"max_new_tokens": 1})


def test_a_recipe_that_has_changed_is_refused(lab, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(VocagnolmError, match=r"rounds.temperature: 1.0 -> 0.5"):
        trained(lab, tmp_path / "run", rounds={"temperature": 0.5})


def test_the_command(lab, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(lab, tmp_path / "run", rounds={"rounds": 1})))
    ran = CliRunner().invoke(app, ["train", str(path)])
    assert ran.exit_code == 0, ran.output
    assert "round     1/1" in ran.output and "last step: loss" in ran.output


def test_training_on_blocks_is_not_for_rounds(lab, tmp_path):
    with pytest.raises(VocagnolmError, match="trains in rounds"):
        train(recipe_from_dict(recipe(lab, tmp_path / "run")), quiet=True)


def test_check_knows_rounds(lab, tmp_path):
    report = check(recipe_from_dict(recipe(lab, tmp_path / "run")))
    assert report.ready, report.problems
    assert report.plan["prompts"]["prompts"] == len(ASKED)
    assert report.plan["prompts"]["answers"] == 18 and report.plan["steps"] == {"steps": 6}
    wrong = recipe(lab, tmp_path / "run", rounds={"grade": "number", "answer_field": "nowhere"})
    wrong["rounds"]["updates_per_round"] = 7
    problems = "\n".join(check(recipe_from_dict(wrong)).problems)
    assert "at most the 6 answers" in problems and "no prompt has a field nowhere" in problems
