"""The whole way: files in, answers kept, scores out; killed and resumed."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
from evaluation_kit import QUICK, make_model
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import EvaluationError, UsageError
from vocagnolm.evaluate import evaluate
from vocagnolm.evaluate.results import QuestionRecord, RunFolder, score_records
from vocagnolm.evaluate.settings import Engine, Questions
from vocagnolm.generate import Decoder, Generator
from vocagnolm.questions import averages
from vocagnolm.questions.suite import SUITES, average_stderrs

PAPER_CPT = {
    "gsm8k": 6.8, "math500": 4.2, "svamp": 22, "asdiv": 36.4, "mawps": 47.1, "tabmwp": 16.5,
    "mathqa": 12.3, "mmlu_stem": 23.2, "sat": 15.6,
}  # fmt: skip


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_averages_are_those_of_the_paper():
    found = averages(PAPER_CPT)
    assert {key: round(value, 1) for key, value in found.items()} == {
        "avg": 20.5,
        "avg_dagger": 21.5,
        "avg_double_dagger": 21.1,
    }
    assert averages(PAPER_CPT | {"gsm_hard": 99.0, "math": 99.0}) == found
    without_sat = averages({k: v for k, v in PAPER_CPT.items() if k != "sat"})
    assert without_sat["avg"] is None
    assert without_sat["avg_double_dagger"] == found["avg_double_dagger"]


def test_standard_errors():
    record = QuestionRecord(0, "p", "o", "1", "1", True)
    score = score_records([record] * 3 + [QuestionRecord(1, "p", "o", None, "1", False)])
    assert (score.score, score.n, score.no_answer) == (75.0, 4, 1)
    values = [1, 1, 1, 0]
    spread = (sum((v - 0.75) ** 2 for v in values) / 3) ** 0.5
    assert score.stderr == pytest.approx(100 * spread / 2)
    assert score_records([record]).stderr is None
    errors = average_stderrs(dict.fromkeys(PAPER_CPT, 3.0))
    assert errors["avg"] == pytest.approx(1.0)


def test_results_have_the_promised_form(finished):
    out, evaluation = finished
    values = json.loads((out / "evaluation/results.json").read_text())
    assert len(values.pop("content_sha256")) == 64
    assert values == evaluation.to_json()
    assert list(values) == [
        "protocol", "tasks", "avg", "avg_dagger", "avg_double_dagger", "bits_per_byte",
        "bits_per_byte_stderr", "conditions",
    ]  # fmt: skip
    assert values["protocol"] == "strict"
    assert tuple(values["tasks"]) == SUITES["math"]
    for task in values["tasks"].values():
        assert list(task) == ["score", "stderr", "n", "no_answer"]
    assert values["avg"] is not None and values["bits_per_byte"] is None
    for name in SUITES["math"]:
        for line in (out / f"evaluation/outputs/{name}.jsonl").read_text().splitlines():
            assert list(json.loads(line)) == [
                "index", "prompt", "output", "extracted", "gold", "correct", "complete", "crc32",
            ]  # fmt: skip
    assert not list(out.rglob("*.partial.jsonl")) and not list(out.rglob("*tmp"))


def test_second_run_finds_everything_done(finished, model_folder, benchmarks, monkeypatch):
    out, evaluation = finished
    before = files_of(out)
    monkeypatch.setattr(Generator, "__init__", None)  # would fail if it were made
    again = evaluate(model_folder, benchmarks=benchmarks, out=out, **QUICK)
    assert again == evaluation
    assert files_of(out) == before


@pytest.mark.parametrize("torn", [False, True])
def test_resume_by_example_gives_the_same_bytes(
    torn, finished, model_folder, benchmarks, tmp_path, monkeypatch
):
    out, _ = finished
    kept = RunFolder.add_answers
    calls = 0

    def killed(self, task, answers):
        nonlocal calls
        calls += 1
        kept(self, task, answers)
        if calls == 2:
            if torn:  # the machine stops in the middle of a line
                with open(self._partial(task), "ab") as file:
                    file.write(b'{"index": 4, "out')
            raise KeyboardInterrupt

    options = {"tasks": "gsm8k,math500,sat", "benchmarks": benchmarks, **QUICK}
    monkeypatch.setattr(RunFolder, "add_answers", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model_folder, out=tmp_path, **options)
    assert len(RunFolder(tmp_path).answers("gsm8k")) == 4
    monkeypatch.setattr(RunFolder, "add_answers", kept)
    computed = []
    answers = Decoder.answers
    monkeypatch.setattr(
        Decoder,
        "answers",
        lambda self, asked, **rest: computed.append(asked) or answers(self, asked, **rest),
    )
    evaluate(model_folder, out=tmp_path, **options)
    assert sum(map(len, computed)) == 9 - 4
    for name in ("gsm8k", "math500", "sat"):
        kept_file = f"evaluation/outputs/{name}.jsonl"
        assert (tmp_path / kept_file).read_bytes() == (out / kept_file).read_bytes()
    assert not list(tmp_path.rglob("*.partial.jsonl"))


def test_tasks_may_come_one_by_one(finished, model_folder, benchmarks, tmp_path):
    _, evaluation = finished
    for name in ("svamp", "gsm8k"):
        partly = evaluate(model_folder, tasks=name, benchmarks=benchmarks, out=tmp_path, **QUICK)
    assert list(partly.tasks) == ["gsm8k", "svamp"]
    assert all(partly.tasks[name] == evaluation.tasks[name] for name in partly.tasks)


def test_another_evaluation_is_not_mixed_in(finished, model_folder, other_model_folder, benchmarks):
    out, _ = finished
    before = files_of(out)
    options = {"benchmarks": benchmarks, "out": out, "tasks": "gsm8k"} | QUICK
    with pytest.raises(EvaluationError, match=r"the prompts of gsm8k.*another --out"):
        evaluate(model_folder, limit=2, **options)
    with pytest.raises(EvaluationError, match="batch_size: 2 there, 3 now"):
        evaluate(model_folder, **options | {"batch_size": 3})
    with pytest.raises(EvaluationError, match="model: "):
        evaluate(other_model_folder, **options)
    assert files_of(out) == before


def test_the_two_protocols_are_not_mixed(model_folder, benchmarks, text, tmp_path):
    options = {"tasks": "gsm8k", "benchmarks": benchmarks, "out": tmp_path} | QUICK
    evaluate(model_folder, text=[text[0]], out=tmp_path, **QUICK)  # of no protocol
    assert evaluate(model_folder, protocol="paper", **options).protocol == "paper"
    before = files_of(tmp_path)
    with pytest.raises(EvaluationError, match="protocol: 'paper' there, 'strict' now") as error:
        evaluate(model_folder, **options)
    assert str(tmp_path) in str(error.value)
    # text may still be added
    assert evaluate(model_folder, text=[text[0]], out=tmp_path, **QUICK).protocol == "paper"
    assert files_of(tmp_path) == before
    settings = json.loads((tmp_path / "evaluation/settings.json").read_text())
    assert settings["settings"]["protocol"] == "paper"


def test_a_folder_from_before_the_protocols_is_strict(finished, model_folder, benchmarks, tmp_path):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    for name, place in (("settings", ("settings",)), ("results", ())):
        path = tmp_path / f"evaluation/{name}.json"
        values = inner = json.loads(path.read_text())
        for key in place:
            inner = inner[key]
        del inner["protocol"]
        values.pop("content_sha256", None)  # older files have none
        path.write_text(json.dumps(values))
    options = {"benchmarks": benchmarks, "out": tmp_path} | QUICK
    with pytest.raises(EvaluationError, match="protocol: 'strict' there, 'paper' now"):
        evaluate(model_folder, protocol="paper", **options)
    assert evaluate(model_folder, **options) == finished[1]


def test_the_paper_takes_the_last_number_of_any_output(
    model_folder, benchmarks, tmp_path, monkeypatch
):
    # the questions' answers are 2, 3, 4, 5 and 6
    written = ["I say 9. No, 2", "About 1,003 or 3.0", "It is four.", "", "The answer is 6."]
    own = Generator.generate

    def other_words(self, prompts, **options):
        for batch in own(self, prompts, **options):
            yield [(place, replace(answer, output=written[place])) for place, answer in batch]

    monkeypatch.setattr(Generator, "generate", other_words)
    marks = {}
    for protocol in ("paper", "strict"):
        out, asked = tmp_path / protocol, {"tasks": "gsm8k", "benchmarks": benchmarks}
        evaluate(model_folder, out=out, protocol=protocol, **asked, **QUICK)
        records = RunFolder(out).records("gsm8k")
        marks[protocol] = [(record.extracted, record.correct) for record in records]
    none = (None, False)
    assert marks["paper"] == [("2", True), ("3.0", True), none, none, ("6", True)]
    assert marks["strict"] == [none, none, none, none, ("6", True)]


def test_settings_in_groups_or_one_by_one(model_folder, benchmarks):
    asked = Questions(tasks="svamp", benchmarks=benchmarks, limit=1, max_new_tokens=8)
    grouped = evaluate(model_folder, asked, Engine(device="cpu", batch_size=2))
    assert grouped == evaluate(
        model_folder, tasks=["svamp"], benchmarks=benchmarks, limit=1, **QUICK
    )
    assert evaluate(model_folder, asked, tasks="mawps", device="cpu").tasks.keys() == {"mawps"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'task'"):
        evaluate(model_folder, task="svamp")


def test_choices_by_likelihood(model_folder, benchmarks, tmp_path):
    evaluation = evaluate(
        model_folder, tasks="mathqa,sat", benchmarks=benchmarks, out=tmp_path,
        choices="likelihood", device="cpu",
    )  # fmt: skip
    assert all(task.no_answer == 0 for task in evaluation.tasks.values())
    records = RunFolder(tmp_path).records("mathqa")
    assert all(r.output in "ABCDE" and r.correct == (r.output == r.gold) for r in records)
    with pytest.raises(UsageError, match="expected one of generate, likelihood"):
        evaluate(model_folder, tasks="sat", choices="dice")


def test_same_scores_through_lm_eval_itself(finished, model_folder, benchmarks, tmp_path):
    """The task files are lm-eval's as much as ours."""
    logging.disable(logging.WARNING)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from vocagnolm.evaluate.render import TASK_FOLDER

    out, evaluation = finished
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.pad_token = tokenizer.eos_token
    model = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(model_folder), tokenizer=tokenizer,
        batch_size=2, device="cpu",
    )  # fmt: skip
    manager = TaskManager(
        include_path=TASK_FOLDER, include_defaults=False, metadata={"benchmarks": str(benchmarks)}
    )
    names = ["gsm8k", "math500", "mathqa"]
    found = simple_evaluate(
        model=model,
        tasks=[f"vocagnolm_{name}" for name in names] + ["vocagnolm_sat_likelihood"],
        task_manager=manager,
        bootstrap_iters=0,
        gen_kwargs={"max_gen_toks": 8},
    )
    logging.disable(logging.NOTSET)
    for name in names:
        scores = found["results"][f"vocagnolm_{name}"]
        ours = evaluation.tasks[name]
        assert 100 * scores["correct,none"] == pytest.approx(ours.score)
        assert ours.n * scores["no_answer,none"] == pytest.approx(ours.no_answer)
        theirs = {s["doc_id"]: s for s in found["samples"][f"vocagnolm_{name}"]}
        for record in RunFolder(out).records(name):
            sample = theirs[record.index]
            assert sample["arguments"][0][0] == record.prompt
            assert sample["resps"][0][0].strip() == record.output.strip()
    by_likelihood = evaluate(
        model_folder, tasks="sat", benchmarks=benchmarks, choices="likelihood", device="cpu"
    )
    accuracy = found["results"]["vocagnolm_sat_likelihood"]["acc,none"]
    assert by_likelihood.tasks["sat"].score == pytest.approx(100 * accuracy)


# --- bits per byte --------------------------------------------------------------------------


def test_text_without_a_task_is_bits_alone(model_folder, text, tmp_path):
    evaluation = evaluate(model_folder, text=[text[0]], out=tmp_path, device="cpu")
    assert evaluation.tasks == {} and evaluation.bits_per_byte > 0
    assert evaluation.to_json()["avg"] is None


def test_command(model_folder, benchmarks, text, tmp_path):
    arguments = [
        "evaluate", str(model_folder), "--tasks", "svamp,mawps", "--benchmarks", str(benchmarks),
        "--text", str(text[0]), "--out", str(tmp_path), "--limit", "1", "--device", "cpu",
        "--max-new-tokens", "8",
    ]  # fmt: skip
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.output
    values = json.loads(shown.stdout)
    assert set(values["tasks"]) == {"svamp", "mawps"}
    assert values["tasks"]["svamp"]["n"] == 1 and values["avg"] is None
    assert values["bits_per_byte"] > 0
    table = CliRunner().invoke(app, arguments).stdout
    assert "SVAMP" in table and "bits per byte" in table


def test_prompts_that_were_cut_are_told(benchmarks, tmp_path):
    short = make_model(tmp_path, context=64)
    arguments = [
        "evaluate", str(short), "--tasks", "svamp,mathqa", "--benchmarks", str(benchmarks),
        "--limit", "2", "--device", "cpu", "--max-new-tokens", "8", "--choices", "likelihood",
    ]  # fmt: skip
    shown = CliRunner().invoke(app, arguments)
    assert "context of 64 tokens: 4 of the prompts, which lost their beginning" in shown.stderr
    (note,) = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["notes"]
    assert note in shown.stderr


def test_progress_counts_over_all_tasks(model_folder, benchmarks, tmp_path, monkeypatch):
    monkeypatch.setenv("VOCAGNOLM_PROGRESS_SECONDS", "0")
    text = tmp_path / "held-out.jsonl"
    text.write_text('{"text": "Two and two."}\n{broken\n')
    arguments = [
        "evaluate", str(model_folder), "--tasks", "svamp,gsm8k", "--benchmarks", str(benchmarks),
        "--text", str(text), "--device", "cpu", "--max-new-tokens", "2", "--batch-size", "2",
    ]  # fmt: skip
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    told = [line for line in shown.stderr.splitlines() if line.startswith("answering: ")]
    assert "0/7 questions" in told[0] and "7/7 questions (" in told[-1], shown.output
    assert all("questions/s, ETA" in line for line in told)
    assert "reading text: 2/2 documents, 100%" in shown.stderr
    assert json.loads(shown.stdout)["left_out"]["reasons"] == {"not JSON": 1}
