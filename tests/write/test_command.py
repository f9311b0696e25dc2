"""The commands from prompts to a student: write, recipe new, prepare, train."""

import json

import pytest
import yaml
from typer.testing import CliRunner
from write.write_kit import PlayedWriter, rows_of, save_writer, write_prompts

from vocagnolm.cli import app
from vocagnolm.errors import StoreError, UsageError
from vocagnolm.recipe import load_recipe
from vocagnolm.score import score_corpus, write_answers


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A teacher, prompts with expected answers, and what it wrote."""
    folder = tmp_path_factory.mktemp("lab")
    save_writer(folder / "teacher", "pieces")
    save_writer(folder / "student", "bytes", seed=1)
    write_prompts(folder / "prompts.jsonl", 10)
    run(folder, *marked(folder), "--out", folder / "written")
    return folder


def words(lab, *more):
    given = ["write", "--teacher", lab / "teacher", "--prompts", lab / "prompts.jsonl"]
    given += ["--device", "cpu", "--threads", 1, "--max-new-tokens", 20, "--samples", 2]
    return [*given, "--alternatives", 3, "--shard-prompts", 3, *more]


def marked(lab):
    return words(lab, "--answer-field", "answer", "--grade", "mixed", "--system", "Be brief.")


def run(lab, *given):
    result = CliRunner().invoke(app, [str(word) for word in given])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_a_run_says_what_it_has_left_and_what_comes_next(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("VOCAGNOLM_PROGRESS_SECONDS", "0")
    done = run(lab, *marked(lab), "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert "4 shards written; 20 answers, " in done.stdout and "tokens/s" in done.stdout
    assert f"kept          {len(rows)} of 20 answers\n" in done.stdout
    assert "template      its own template\n" in done.stdout
    assert " cut" in done.stdout and "(dropped/ holds their texts)" in done.stdout
    assert f"% of {len(rows)} answers, at least one to" in done.stdout
    assert "nats per token" in done.stdout and "3 per token" in done.stdout
    assert f"vocagnolm recipe new --from {tmp_path / 'out'} --student S" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("writing: ")]
    assert "20/20 answers" in lines[-1] and "tokens/s, ETA" in lines[-1]
    assert "% finished" in lines[-1] and "% right" in lines[-1] and "/s, " in lines[-1]
    again = run(lab, *marked(lab), "--out", tmp_path / "out")
    assert f"{tmp_path / 'out'} is complete already; nothing to do." in again.stdout
    about = json.loads(run(lab, *marked(lab), "--out", tmp_path / "out", "--json").stdout)
    assert about["found_shards"] == 4 and about["folder"]["documents"] == len(rows)


def test_shares_say_what_is_missing(lab, tmp_path):
    told = run(lab, *words(lab), "--out", tmp_path / "s", "--share", "2/4").stdout
    assert "NOT COMPLETE: 3 of 4 shards are missing (the first is 0)" in told
    assert "of the shares 1/4, 3/4, 4/4" in told and "`write` without --share" in told
    told = json.loads(run(lab, *words(lab), "--out", tmp_path / "s", "--json").stdout)
    assert told["folder"]["complete"] and told["written_shards"] == 3


def test_a_dry_run_shows_prompts_and_counts_and_writes_nothing(lab, tmp_path):
    out = tmp_path / "out"
    told = run(lab, *words(lab, "--system", "Be brief.", "--dry-run"), "--out", out).stdout
    assert not out.exists()
    assert told.count(", as teacher reads it ----") == 3
    assert "brief.<|eot|><|header|> user<|body|>" in told
    assert "prompts       10, of which 10 can be asked" in told
    assert "answers       20 in 4 shards" in told and "new tokens    at most 400" in told
    about = json.loads(run(lab, *words(lab, "--dry-run", "--json"), "--out", out).stdout)
    assert about["asked"] == about["counted"] == 10 and about["most_new_tokens"] == 400
    written = json.loads(run(lab, *words(lab, "--json"), "--out", out).stdout)
    size = written["folder"]["file_bytes"]
    assert size < about["most_bytes"] < 3 * size
    assert written["tokens"] <= about["most_new_tokens"]


def test_a_dry_run_counts_what_it_cannot_ask(lab, tmp_path):
    prompts = tmp_path / "p.jsonl"
    rows = [{"prompt": "a b " * 400}, {"prompt": "why"}, {"messages": []}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = words(lab, "--dry-run")
    given[4] = prompts
    told = run(lab, *given, "--out", tmp_path / "out").stdout
    assert "prompts       3, of which 2 can be asked" in told
    assert "1 left out: empty" in told and "1 that the teacher cannot read: too long" in told
    assert "answers       2 in 1 shards" in told


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--ray-workers", "2"], "--ray-workers can only be used with --ray"),
        (["--benchmarks", "b"], "--benchmarks can only be used with --without"),
        (["--ray", "--share", "1/2"], "do not combine it with --share"),
        (["--stop", ""], "--stop is '', expected a text that is not empty"),
        (["--temperature", "-1"], ""),
        (["--instruction", "again"], "has no {text}, where the text belongs"),
    ],
)
def test_options_that_do_not_fit(lab, tmp_path, more, said):
    given = [str(word) for word in (*words(lab), "--out", tmp_path / "out", *more)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code != 0 and not (tmp_path / "out").exists()
    assert said in str(result.exception)


def test_from_a_folder_to_a_student(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    student = lab / "student"
    done = run(lab, "recipe", "new", "--from", lab / "written", "--student", student, "--out", path)
    assert f"vocagnolm prepare {path} && vocagnolm train {path}" in done.stderr
    recipe = load_recipe(path)
    assert recipe.corpus.files == recipe.stores == [str(lab / "written")]
    assert (recipe.objective.method, recipe.objective.mix) == ("distill", 0.5)
    assert (recipe.data.train_on, recipe.train.epochs) == ("assistant", 2)
    text = path.read_text()
    assert "right: only those marked as right (" in text and "3 alternatives per token" in text
    assert "guess" not in text
    assert "ready" in run(lab, "check", path).stdout
    few = ["--set", "train.dtype=float32"]
    told = run(lab, "prepare", path, *few).stdout
    assert "conversations, in its own template; trained on:" in told
    told = json.loads(run(lab, "train", path, "--quiet", "--json", *few).stdout)
    assert told["steps"] > 1 and (tmp_path / "out" / "written" / "run" / "model").is_dir()
    with pytest.raises(UsageError, match=r"recipe\.yaml exists already"):
        run(lab, "recipe", "new", "--from", lab / "written", "--out", path)


def test_a_recipe_without_a_student_is_ready_once_it_is_filled_in(lab, tmp_path):
    text = run(lab, "recipe", "new", "--from", lab / "written").stdout
    tree = yaml.safe_load(text)
    assert tree["student"] == {"model": None} and "guess" in text
    assert all("#" in line for line in text.splitlines() if line.startswith("  "))
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 1
    filled = ["--set", f"student.model={lab / 'student'}"]
    places = ["--set", f"data.blocks={tmp_path / 'b'}", "--set", f"run.folder={tmp_path / 'r'}"]
    assert "ready" in run(lab, "check", path, "--no-measure", *filled, *places).stdout


def test_a_recipe_fits_what_the_folder_holds(lab, tmp_path):
    class Plain(PlayedWriter):
        spec = None
        settings = PlayedWriter.settings.__class__(
            **{**vars(PlayedWriter.settings), "alternatives": 0}
        )

    write_answers(Plain(), lab / "prompts.jsonl", tmp_path / "losses")
    text = run(lab, "recipe", "new", "--from", tmp_path / "losses").stdout
    assert yaml.safe_load(text)["objective"] == {"method": "guided"}
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "one two three"}\n')
    score_corpus(lab / "teacher", corpus, tmp_path / "store")
    with pytest.raises(StoreError, match=r"store was not written by `vocagnolm write`.*try"):
        run(lab, "recipe", "new", "--from", tmp_path / "store")
