"""`vocagnolm try`: a pair and a text to a verdict, with the demo's two models."""

import json

import pytest
import yaml
from test_cli import run
from tryout_kit import (
    START,
    TEACHER,
    chat_models,
    demo_prompts,
    digests,
    killed_at_every_step,
    speed,
)

from vocagnolm.data.corpus import read_texts
from vocagnolm.demo import corpus as demo_corpus
from vocagnolm.errors import CorpusError, UsageError
from vocagnolm.evaluate.results import TextScore
from vocagnolm.recipe import load_recipe
from vocagnolm.train.check import check
from vocagnolm.tryout import text as tried_text
from vocagnolm.tryout.folder import LEAST, TrySettings
from vocagnolm.tryout.text import BEFORE, RULES, recommended, try_text, verdict


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    documents = demo_corpus.corpus_documents(300)
    demo_corpus.write_jsonl(path, [one for one in documents if one[0] == demo_corpus.CLEAN])
    return path


@pytest.fixture(scope="module")
def tried(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("try")
    options = ["--minutes", "0.1", "--device", "cpu", "--out", out]
    command = ["try", "--student", START, "--teacher", TEACHER, "--corpus", text, *options]
    return out, command, run(*command)


def test_a_pair_and_a_text_to_a_verdict(tried, text):
    out, _, done = tried
    assert done.returncode == 0, done.stderr
    for part in ("Who predicts this text better?", "Does the teacher help?", "VERDICT", "Next:"):
        assert part in done.stdout
    assert "teacher is better than start on this text" in done.stdout
    result = json.loads((out / "result.json").read_text())
    assert [one["name"] for one in result["strength"]] == ["teacher", "start"]
    low, high = result["strength"][0]["difference_interval"]
    assert low < result["strength"][0]["difference"] < high < 0
    assert {one["name"] for one in result["rules"]} == {BEFORE, *RULES.values()}
    runs = result["runs"].values()
    assert len({(one["tokens"], one["steps"], one["learning_rate"]) for one in runs}) == 1
    assert 0.9 < result["blocks"]["mapped_share"] <= 1 and result["blocks"]["target_share"] > 0.5
    assert all(n > 0 for step in ("scoring", "training") for n in result["whole_corpus"][step])
    assert "Should teacher teach start?" in (out / "report.html").read_text()
    whole = sum(len(one.encode()) for one in read_texts(text)[0])
    assert result["whole_corpus"]["bytes"] == pytest.approx(whole, rel=0.3)
    shards = sum(file.stat().st_size for file in (out / "store/shards").iterdir())
    vocabulary = (
        (out / "store/vocabulary.safetensors").stat().st_size
    )  # does not grow with a corpus
    times = result["whole_corpus"]["bytes"] / result["training"]["bytes"]
    assert result["whole_corpus"]["scoring"][1] == pytest.approx(times * shards + vocabulary)


def test_what_is_held_out_is_not_trained_on(tried, text):
    out, _, _ = tried
    held_out, training = (set(read_texts(out / f"sample/{n}.jsonl")[0]) for n in SAMPLES)
    assert len(held_out) >= LEAST and not held_out & training
    assert held_out | training <= set(read_texts(text)[0])


SAMPLES = ("held-out", "training")


def test_the_recipe_is_ready_for_train(tried, text, tmp_path):
    out, _, _ = tried
    recipe = load_recipe(out / "recipe.yaml")
    assert recipe.corpus.files == [str(text)] and recipe.student.model == START
    tree = yaml.safe_load((out / "recipe.yaml").read_text())
    tree = {key: value for key, value in tree.items() if key not in ("teacher", "store")}
    tree["objective"]["method"] = "cpt"
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(tree))
    assert check(load_recipe(tmp_path / "plain.yaml"), measure=False).problems == []


def test_again_it_is_all_there_and_another_try_is_refused(tried, monkeypatch):
    _, command, done = tried
    for name in ("score_corpus", "prepare", "train_short"):
        monkeypatch.setattr(tried_text, name, None)
    monkeypatch.setattr("vocagnolm.tryout.folder.bits_per_byte", None)
    again = run(*command)
    assert again.returncode == 0 and again.stdout == done.stdout
    printed = run(*command, "--json")
    assert json.loads(printed.stdout)["recommended"] in RULES
    other = run(*command, "--seed", "1")
    assert other.returncode == 2 and "holds a try with seed 0, not 1" in other.stderr


def refused(student, teachers, files, out):
    with pytest.raises((UsageError, CorpusError)) as error:
        try_text(student, teachers, [str(files)], out, settings=TrySettings(device="cpu"))
    return str(error.value)


def test_what_cannot_be_tried_is_refused_by_name(text, tmp_path):
    assert "the same model" in refused(START, [START], text, tmp_path)
    assert "the same model" in refused(START, [TEACHER, TEACHER], text, tmp_path)
    few = tmp_path / "few.txt"
    few.write_text("One document.\n")
    assert "too small to split" in refused(START, [TEACHER], few, tmp_path)
    assert "--split" in refused(START, [TEACHER], few, tmp_path)
    alike = tmp_path / "alike.jsonl"
    alike.write_text('{"text": "The same again."}\n' * 100)
    assert "too small to split" in refused(START, [TEACHER], alike, tmp_path)
    alike.write_text('{"content": "Hi"}\n' * 100)
    assert "--text-field" in refused(START, [TEACHER], alike, tmp_path)
    assert not (tmp_path / "state.json").exists()


@pytest.mark.slow
def test_killed_in_any_step_it_ends_with_the_same_models(text, tmp_path):
    def attempt(out):
        settings = TrySettings(minutes=1, device="cpu")
        return try_text(
            START, [TEACHER], [str(text)], out, settings=settings, say=lambda line: None
        )

    with speed(64.0):
        attempt(tmp_path / "whole")
    steps = list(json.loads((tmp_path / "whole/state.json").read_text()))
    assert steps[:4] == ["try", "plan", "held_out", f"read {START}"] and len(steps) == 11
    (tmp_path / "killed").mkdir()
    state = json.loads((tmp_path / "whole/state.json").read_text())
    kept = json.dumps({name: state[name] for name in ("try", "plan")})
    (tmp_path / "killed/state.json").write_text(kept)
    killed_at_every_step(steps, lambda: attempt(tmp_path / "killed"))
    assert len(digests(tmp_path / "whole")) == 5
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


@pytest.mark.slow
def test_conversations_are_tried_too(tmp_path):
    student, teacher = chat_models(tmp_path)
    demo_prompts(tmp_path / "talks.jsonl", 72, right=True)
    out = tmp_path / "out"
    with speed(64.0):
        done = run(
            *("try", "--student", student, "--teacher", teacher, "--minutes", 1),
            *("--corpus", tmp_path / "talks.jsonl", "--device", "cpu", "--out", out),
        )
    assert done.returncode == 0, done.stderr
    assert "teacher is better than start on this text" in done.stdout
    held_out, training = (
        [json.loads(line) for line in (out / f"sample/{name}.jsonl").read_text().splitlines()]
        for name in SAMPLES
    )
    assert len(held_out) == LEAST <= len(training)
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in held_out)
    sums = json.loads((out / "state.json").read_text())[f"read {teacher}"]["by_document"]
    answers = [row["messages"][1]["content"] for row in held_out]
    # answers are measured, each with its end; questions are not
    assert [size for _, _, size in sums] == [len(text.encode()) + 1 for text in answers]
    assert load_recipe(out / "recipe.yaml").corpus.files == [str(tmp_path / "talks.jsonl")]


def score(name, value, difference, spread):
    low, high = difference - spread, difference + spread
    outcome = "better" if high < 0 else "worse" if low > 0 else "equal"
    return TextScore(name, 50, value, (value, value), difference, (low, high), outcome)


@pytest.mark.parametrize(
    ("rules", "method", "words"),
    [
        ({"distilled": -0.1, "guided": 0.0}, "distill", "Train with this teacher, distilled."),
        ({"distilled": -0.01, "guided": 0.1}, "cpt", "train on every token."),
        ({BEFORE: -0.3, "distilled": -0.1, "guided": 0.1}, "cpt", "a lower --learning-rate"),
    ],
)
def test_the_verdict_says_what_the_intervals_say(rules, method, words):
    shifts = {"every token": 0.0, BEFORE: 0.2} | rules
    rows = [score(name, 1 + by, by, 0.02 * bool(by)) for name, by in shifts.items()]
    rows.sort(key=lambda one: one.bits_per_byte)
    strength = [score("big", 0.8, -0.4, 0.1), score("small", 1.2, 0.0, 0.0)]
    said = verdict(strength, rows, "small", "big")
    assert recommended(rows) == method and words in said[-1]
    assert said[0] == "big is better than small on this text: 0.800 against 1.200 bits per byte."
    if abs(rules["distilled"]) < 0.02:
        assert (
            "Distilled: no difference from training on every token that this sample can show"
            in " ".join(said)
        )
    weak = verdict([score("big", 1.19, -0.01, 0.1), strength[1]], rows, "small", "big")
    assert "can do harm" in weak[1] and "not clearly better than" in weak[0]
