"""Damage to an evaluation's folder, two evaluations at once, empty benchmarks: one message each."""

import gzip
import json
import multiprocessing

import pytest

from vocagnolm.errors import BenchmarkError, BusyError, EvaluationError
from vocagnolm.evaluate.render import Request, write_requests
from vocagnolm.evaluate.results import Answer, RunFolder
from vocagnolm.questions.benchmarks import load_examples
from vocagnolm_studies.evaluation import grade_answers, questions_of

SETTINGS = {"model": "m", "protocol": "strict"}
DAMAGED = ["", "[]", "{}", "5", "{", "null", '{"settings": 3, "prompts": []}', "[" * 100_000]


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path)
    run.claim(SETTINGS, {"gsm8k": "x"})
    return run


@pytest.mark.parametrize("content", DAMAGED, ids=lambda text: text[:20])
def test_damaged_settings(run, content):
    (run.folder / "settings.json").write_text(content)
    with pytest.raises(EvaluationError, match=r"settings\.json .*evaluate again"):
        run.claim(SETTINGS, {"gsm8k": "x"})


@pytest.mark.parametrize(
    "content", [*DAMAGED, '{"tasks": {"gsm8k": 3}, "bits_per_byte": 1}'], ids=lambda text: text[:20]
)
def test_damaged_results(run, content):
    (run.folder / "results.json").write_text(content)
    with pytest.raises(EvaluationError, match=r"results\.json"):
        run.results()


@pytest.mark.parametrize(
    "line",
    ["{", "5", "[]", "{}", "[" * 100_000, '{"index": "x", "output": "a"}', '{"index": 1}', "\xff"],
)
def test_damaged_answers_of_an_interrupted_run(run, line):
    run.add_answers("gsm8k", [(0, Answer("7"))])
    path = run.outputs / "gsm8k.partial.jsonl"
    with open(path, "ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    with pytest.raises(EvaluationError, match=r"line 2 .*asked again"):
        run.answers("gsm8k")


def test_an_answer_cut_short_is_asked_again(run):
    run.add_answers("gsm8k", [(0, Answer("7")), (1, Answer("8", complete=True))])
    path = run.outputs / "gsm8k.partial.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    assert run.answers("gsm8k") == {0: Answer("7")}
    run.add_answers("gsm8k", [(1, Answer("9"))])
    assert run.answers("gsm8k")[1] == Answer("9")


@pytest.mark.parametrize("content", ["{}\n", "5\n", "{"])
def test_damaged_records(run, content):
    (run.outputs / "gsm8k.jsonl").write_text(content)
    with pytest.raises(EvaluationError, match=r"gsm8k\.jsonl is .*run the evaluation again"):
        run.records("gsm8k")


def hold(folder, ready, enough):
    with RunFolder(folder).lock():
        ready.set()
        enough.wait(30)


def test_two_evaluations_of_one_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, enough = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, enough))
    other.start()
    try:
        assert ready.wait(30)
        with (
            pytest.raises(BusyError, match=rf"pid {other.pid} .*--out"),
            RunFolder(tmp_path).lock(),
        ):
            pass
    finally:
        enough.set()
        other.join()
    with RunFolder(tmp_path).lock():
        pass


def test_what_a_killed_evaluation_left_is_removed(run):
    leftover = run.outputs / ".gsm8k.jsonl.0123abcd.tmp"
    leftover.write_text("half")
    with run.lock():
        assert not leftover.exists()


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_benchmark(tmp_path, content):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text(content)
    with pytest.raises(BenchmarkError, match="gsm8k: no questions in"):
        load_examples("gsm8k", tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", "5", "null", '"text"'])
def test_an_empty_benchmark_of_one_json_value(tmp_path, content):
    (tmp_path / "tabmwp").mkdir()
    (tmp_path / "tabmwp/problems_test1k.json").write_text(content)
    with pytest.raises(BenchmarkError, match="tabmwp"):
        load_examples("tabmwp", tmp_path)


def test_a_study_grades_by_the_protocol_of_the_questions(tmp_path):
    output = "First 5 and then 7"  # no answer in so many words; the paper takes the last number
    with gzip.open(tmp_path / "answers.gz", "wt") as file:
        file.write(json.dumps({"task": "gsm8k", "index": 0, "output": output}) + "\n")
    for protocol, right in (("strict", False), ("paper", True)):
        asked = Request("gsm8k", 0, "How many?", "7", protocol=protocol)
        write_requests(tmp_path / "requests.jsonl", [asked])
        grades = grade_answers(tmp_path / "answers.gz", questions_of(tmp_path / "requests.jsonl"))
        assert grades == {"gsm8k": {0: right}}
