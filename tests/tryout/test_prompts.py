"""`vocagnolm try --prompts`: prompts to a verdict, with the demo's two models."""

import json

import pytest
from faults_kit import LONG
from test_cli import run
from tryout_kit import chat_models, demo_prompts, digests, killed_at_every_step, speed

from vocagnolm.errors import VocagnolmError
from vocagnolm.recipe import load_recipe
from vocagnolm.tryout.folder import LEAST, TrySettings
from vocagnolm.tryout.prompts import (
    BEFORE,
    DISTILLED,
    GIVEN,
    METHODS,
    WRITTEN,
    scored,
    try_prompts,
    verdict,
    worth_doing,
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    chat_models(folder)
    demo_prompts(folder / "prompts.jsonl")
    return folder


def words(lab, out, *more):
    models = ["--student", lab / "start", "--teacher", lab / "teacher"]
    chosen = ["--minutes", 1, "--max-new-tokens", 48, "--device", "cpu", "--out", out]
    return ["try", *models, "--prompts", lab / "prompts.jsonl", *chosen, *more]


@pytest.fixture(scope="module")
def tried(lab):
    command = words(lab, lab / "out", "--answer-field", "answer")
    with speed(1.0):
        return command, run(*command)


def test_prompts_to_a_verdict_by_right_answers(tried, lab):
    _, done = tried
    assert done.returncode == 0, done.stderr
    out = lab / "out"
    result = json.loads((out / "result.json").read_text())
    assert result["measure"] == "right answers" and f"{LEAST} held-out prompts" in done.stdout
    assert {row["name"] for row in result["rows"]} == {BEFORE, *METHODS}
    runs = result["runs"]
    assert len({(run["tokens"], run["steps"], run["learning_rate"]) for run in runs.values()}) == 1
    assert result["written"]["right_share"] > 0.7  # of a teacher that can calculate
    assert all(n > 0 for step in ("writing", "training") for n in result["whole"][step])
    for sentence in result["verdict"]:
        assert sentence in done.stdout
    assert "Should teacher write for start?" in (out / "report.html").read_text()
    assert "mislead" not in done.stdout
    held_out, asked, given = (
        [json.loads(line) for line in (out / f"sample/{name}.jsonl").read_text().splitlines()]
        for name in ("held-out", "prompts", "given")
    )
    questions = [{row["messages"][0]["content"] for row in rows} for rows in (held_out, asked)]
    assert not questions[0] & questions[1] and len(questions[0]) == LEAST
    source = map(json.loads, (lab / "prompts.jsonl").read_text().splitlines())
    completions = {row["prompt"]: row["completion"] for row in source}
    assert {m[0]["content"]: m[1]["content"] for m in (row["messages"] for row in given)} == {
        question: completions[question] for question in questions[1]
    }


def test_again_it_is_all_there_and_other_prompts_are_refused(tried, lab, monkeypatch):
    command, done = tried
    monkeypatch.setattr("vocagnolm.tryout.prompt_sample.write_answers", None)
    for name in ("prepare", "train_short", "answer_questions"):
        monkeypatch.setattr(f"vocagnolm.tryout.prompts.{name}", None)
    assert run(*command).stdout == done.stdout
    assert json.loads(run(*command, "--json").stdout)["measure"] == "right answers"
    other = run(*command, "--system", "Be brief.")
    assert other.returncode == 2 and "writing.system None, not Be brief." in other.stderr


@pytest.mark.slow
def test_without_expected_answers_it_compares_bits_and_warns(lab):
    with speed(1.0):
        done = run(*words(lab, lab / "bits"))
    assert done.returncode == 0, done.stderr
    result = json.loads((lab / "bits/result.json").read_text())
    assert result["measure"] == "bits per byte" and "which mislead" in done.stdout
    assert result["recommended"] != GIVEN and "cannot say" in " ".join(result["verdict"])
    assert {row["name"] for row in result["rows"]} == {BEFORE, *METHODS}


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="make faults: test_text.py tries the same with a text")
def test_killed_in_any_step_it_ends_with_the_same_models(tried, lab, tmp_path):
    state = json.loads((lab / "out/state.json").read_text())
    assert [*state][:4] == ["try", "plan", "split", "written"]

    def attempt():
        settings = TrySettings(minutes=1, device="cpu")
        asked = {"reading": {"answer_field": "answer"}, "writing": {"max_new_tokens": 48}}
        models = str(lab / "start"), str(lab / "teacher")
        prompts = [str(lab / "prompts.jsonl")]
        try_prompts(*models, prompts, tmp_path, settings=settings, say=lambda line: None, **asked)

    kept = json.dumps({name: state[name] for name in ("try", "plan")})
    (tmp_path / "state.json").write_text(kept)
    killed_at_every_step([*state], attempt)
    assert len(digests(tmp_path)) == 6 and digests(tmp_path) == digests(lab / "out")


def test_what_cannot_be_tried_is_refused_by_name(lab, tmp_path):
    def refused(rows, **asked):
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        models, prompts = (str(lab / "start"), str(lab / "teacher")), [str(tmp_path / "p.jsonl")]
        settings = TrySettings(minutes=1, device="cpu")
        with pytest.raises(VocagnolmError) as error, speed(1.0):
            try_prompts(*models, prompts, tmp_path / "o", settings=settings, **asked)
        return str(error.value)

    rows = [{"prompt": f"What is {n} and {n}?", "answer": "some"} for n in range(40)]
    assert "too few prompts to split: 20" in refused(rows[:20] * 2)
    assert "name their field with --answer-field" in refused(rows, writing={"grade": "number"})
    graded = {"reading": {"answer_field": "answer"}, "writing": {"grade": "number"}}
    assert "0 of 40 prompts have an answer" in refused(rows, **graded)
    assert "has an answer worth keeping" in refused(rows, writing={"max_new_tokens": 1})
    twice = run(*words(lab, tmp_path / "o", "--teacher", "another"))
    assert "takes a single --teacher" in twice.stderr
    both = run(*words(lab, tmp_path / "o", "--corpus", "c.jsonl"))
    assert "either --corpus or --prompts" in both.stderr


def right(share, questions=200):
    return {"right": [int(n < share * questions) for n in range(questions)]}


@pytest.mark.parametrize(
    ("shares", "chosen", "said"),
    [
        ((0.1, 0.2, 0.4, 0.5), DISTILLED, "distil from what it writes"),
        ((0.1, 0.2, 0.5, 0.4), WRITTEN, "train on its text"),
        ((0.1, 0.5, 0.4, 0.5), GIVEN, "Train on the given answers"),
        ((0.1, None, 0.4, 0.2), WRITTEN, "train on its text"),
        ((0.4, 0.4, 0.4, 0.4), BEFORE, "Nothing here is clearly better than the student"),
        ((0.4, 0.1, 0.5, 0.5), DISTILLED, "distil from what it writes"),
    ],
)
def test_what_is_worth_doing_follows_from_the_right_answers(shares, chosen, said):
    names = (BEFORE, GIVEN, WRITTEN, DISTILLED)
    measured = {n: right(share) for n, share in zip(names, shares, strict=True) if share}
    assert worth_doing(measured) == chosen
    about = {"right_share": 0.45}
    sentences = verdict(scored(measured, WRITTEN), measured, about, "T", chosen)
    assert sentences[0] == "T has 45% of its own answers right." and said in sentences[-1]
    if shares[1] == 0.2:
        text = "Teacher's answers: clearly better than given answers, +"
        assert any(sentence.startswith(text) for sentence in sentences)


def test_the_recipe_for_given_answers_is_a_recipe(lab, monkeypatch):
    monkeypatch.setattr("vocagnolm.tryout.prompts.worth_doing", lambda measured: GIVEN)
    done = run(*words(lab, lab / "out", "--answer-field", "answer"))
    recipe = load_recipe(lab / "out/recipe.yaml")
    assert f"vocagnolm train {lab / 'out/recipe.yaml'}" in done.stdout
    assert recipe.corpus.files == [str(lab / "prompts.jsonl")] and recipe.train.epochs == 2
    assert recipe.objective.method == "cpt"
