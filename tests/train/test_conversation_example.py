"""The whole way on the command line: conversations, two tiny models with two templates, made on the
spot; a guided run, and with VOCAGNOLM_FAULTS=long a plain one."""

import json
import re

import chat_kit
import pytest
import yaml
from evaluation_kit import ROWS, write_rows
from faults_kit import LONG
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.report.runs import compute_sample


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{arguments}: {result.output}"
    return result.stdout


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    chat_kit.make_chat_lab(folder, count=48)
    for name, rows in ROWS.items():
        write_rows(folder / "benchmarks", name, rows)
    recipe = {
        "student": {"model": str(folder / "start")},
        "teacher": {"model": str(folder / "teacher")},
        "corpus": {"files": [str(folder / "corpus.jsonl")]},
        "store": {"path": str(folder / "store")},
        "data": {"blocks": str(folder / "blocks"), "block_size": 256},
        "optimizer": {"learning_rate": 1e-2, "min_learning_rate": 1e-3},
        "train": {"device": "cpu", "batch_blocks": 4, "micro_batch": 4, "epochs": 3.0},
        "run": {"folder": str(folder / "guided"), "save_every": 0},
    }
    (folder / "guided.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_from_conversations_to_scores(lab):
    recipe = lab / "guided.yaml"
    scored = json.loads(run("score", "--recipe", recipe, "--device", "cpu", "--json"))
    assert scored["store"]["documents"] == 48 and scored["store"]["skipped"] == 0
    prepared = json.loads(run("prepare", recipe, "--workers", 1, "--json"))
    assert prepared["mapped_share"] > 0.99 and prepared["template"] == "own"
    assert 0.2 < prepared["trained"] / prepared["tokens"] < 0.6
    assert run("check", recipe, "--no-measure").endswith("ready\n")
    runs = {"guided": [], "cpt": ["--set", "objective.method=cpt"]}
    for name, method in (runs if LONG else {"guided": []}).items():
        run("train", recipe, *method, "--set", f"run.folder={lab / name}")
        steps = [json.loads(x) for x in (lab / name / "metrics.jsonl").read_text().splitlines()]
        assert steps[-1]["nll_all"] < steps[0]["nll_all"] - 0.5
        assert steps[0]["kept_share"] == pytest.approx(0.4 if method == [] else 1.0, abs=0.02)
        answers = json.loads(
            run(
                *("evaluate", lab / name / "model", "--chat", "--tasks", "gsm8k", "--limit", 2),
                *("--benchmarks", lab / "benchmarks", "--shots", 1, "--max-new-tokens", 4),
                *("--text", lab / "corpus.jsonl", "--device", "cpu", "--json"),
            )
        )
        assert answers["conditions"]["gsm8k"]["few_shot"] == 1
        # it has read these conversations: fewer bits than its start
        assert answers["bits_per_byte"] < 3.5
    sample = compute_sample(lab / "guided", documents=2)
    row, weights = sample.passages[0].student, sample.passages[0].weights
    for text, nll, weight in zip(row.text, row.nll, weights, strict=True):
        assert text != "<|im_start|>" or (nll is None and weight == 0)
    assert 0 < sum(weights) < len(weights)
    card = (lab / "guided/model/README.md").read_text()
    assert "| conversations | trained on: assistant; its own template |" in card


def test_a_store_names_the_template_that_its_teacher_read(lab, tmp_path):
    given = ["score", "--recipe", lab / "guided.yaml", "--device", "cpu", "--out"]
    assert "template      its own template\n" in run(*given, tmp_path / "own")
    assert "template      its own template\n" in run("store", "inspect", tmp_path / "own")
    shown = run(*given, tmp_path / "plain", "--chat-template", "plain")
    assert "template      no template of its own: plain `role: content`\n" in shown


def test_a_model_without_a_template_says_so(lab, tmp_path):
    (tmp_path / "bare").mkdir()
    for file in (lab / "start").iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    changed = ["--set", f"student.model={tmp_path / 'bare'}", "--set", "objective.method=cpt"]
    changed += ["--set", "store.path=null", "--set", f"data.blocks={tmp_path / 'blocks'}"]
    shown = run("prepare", lab / "guided.yaml", "--workers", 1, *changed)
    assert "conversations, in no template of its own: plain `role: content`" in shown
    changed += ["--set", f"run.folder={tmp_path / 'run'}", "--set", "train.epochs=1.0"]
    run("train", lab / "guided.yaml", *changed)
    card = (tmp_path / "run/model/README.md").read_text()
    assert "trained on: assistant; no template of its own: plain `role: content` |" in card
    assert "role" in (tmp_path / "run/model/chat_template.jinja").read_text()


def test_both_templates_over_one_conversation(lab, tmp_path):
    sides = ["--student", lab / "start", "--teacher", lab / "teacher"]
    talk = ["--messages", lab / "corpus.jsonl"]
    pair = json.loads(run("align", *sides, *talk, "--number", 2, "--json"))
    shown = {token["token"] for token in pair["student"]}
    assert {"<|im_start|>", "<|im_end|>"} <= shown
    assert {"<|header|>", "<|eot|>"} <= {token["token"] for token in pair["teacher"]}
    for token in pair["student"]:
        if token["token"] == "<|im_start|>":
            assert token["first"] == -1 and token["start"] == token["end"]
        if token["token"] == "<|im_end|>":
            assert pair["teacher"][token["first"]]["token"] == "<|eot|>"
    assert pair["summary"]["unmapped"] == 0
    assert "<|im_start|>" in run("align", *sides, *talk)
    page = tmp_path / "view.html"
    models = ["--student-model", lab / "start", "--teacher-model", lab / "teacher"]
    run("view", *models, *talk, "--limit", 2, "--html", page)
    data = re.search(
        r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.S
    )
    content = json.loads(data[1])
    passage = content["passages"][0]
    assert "<|im_start|>" in passage["student"]["text"]
    assert "<|header|>" in passage["teachers"][0]["text"]
    for text, nll in zip(passage["student"]["text"], passage["student"]["nll"], strict=True):
        if text == "<|im_start|>":
            assert nll is None, "what a template prints is neither kept nor dropped"
    assert content["preflight"][0]["unmapped"] == 0
    why = dict(zip(passage["student"]["text"], passage["student"]["trained"], strict=True))
    assert why["<|im_end|>"] == "end of turn" and why["<|im_start|>"] is None
    assert "content" in why.values()


def test_wrong_arguments_are_answered(lab):
    sides = ["--student", lab / "start", "--teacher", lab / "teacher"]
    for arguments, words in (
        (["align", *sides, "--messages", lab / "corpus.jsonl", "--number", 99], "fewer than 99"),
        (["align", *sides], "one of --text, --file or --messages"),
        (["align", *sides, "--messages", lab / "start" / "tokenizer.json"], "unknown ending"),
    ):
        result = CliRunner().invoke(app, [str(one) for one in arguments])
        assert result.exit_code != 0
        assert words in f"{result.output}{result.exception}"
