"""A benchmark of one's own, from a YAML file."""

import pytest
from evaluation_kit import QUICK, write_rows

from vocagnolm.errors import BenchmarkError, UsageError
from vocagnolm.evaluate import compare_runs, evaluate
from vocagnolm.evaluate.render import render
from vocagnolm.evaluate.results import comparison_table, scores_table
from vocagnolm.questions import grade
from vocagnolm.questions.benchmarks import SOURCES, load_examples, tasks_asked
from vocagnolm.questions.suite import AVERAGES, TASKS

SUMS = """
title: Sums
kind: number
file: rows.jsonl
question: sum
examples:
  - question: What is 1 + 1?
    answer: 1 + 1 = 2. The answer is 2.
"""


@pytest.fixture(autouse=True)
def _forgotten():
    tables = [(table, dict(table)) for table in (TASKS, SOURCES)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


@pytest.fixture
def sums(tmp_path):
    write_rows(tmp_path, "rows.jsonl", [{"sum": f"{n} + 2?", "answer": n + 2} for n in range(3)])
    path = tmp_path / "sums.yaml"
    path.write_text(SUMS)
    return path


def test_it_is_evaluated_resumed_and_compared(sums, model_folder, benchmarks, tmp_path):
    asked = {"tasks": f"gsm8k,{sums}", "benchmarks": benchmarks}
    found = evaluate(model_folder, **asked, out=tmp_path / "a", **QUICK)
    assert list(found.tasks) == ["gsm8k", "sums"] and found.tasks["sums"].n == 3
    again = evaluate(model_folder, **asked, out=tmp_path / "a", **QUICK)
    assert again == found and scores_table(again)[2][0] == "Sums"
    assert "sums" not in AVERAGES["avg"]
    # another process knows its name alone
    del TASKS["sums"], SOURCES["sums"]
    table = comparison_table(compare_runs([tmp_path / "a", tmp_path / "a"]))
    assert [row[0] for row in table] == ["task", "GSM8K", "sums"]


def test_its_prompts_and_grades(sums):
    (task,) = tasks_asked([str(sums)])
    requests = render([task])["sums"]
    assert requests[1].prompt == (
        "Question: What is 1 + 1?\nAnswer: 1 + 1 = 2. The answer is 2.\n\n\n"
        "Question: 1 + 2?\nAnswer:"
    )
    assert requests[1].gold == "3"
    assert grade("sums", "The answer is 3.", requests[1].gold).correct
    assert render([task], chat=True, shots=0)["sums"][0].prompt
    assert tasks_asked(str(sums)) == [task]  # twice is once


@pytest.mark.parametrize(
    ("kind", "gold", "output"),
    [
        ("math", "\\frac{1}{2}", "so $\\boxed{0.5}$"),
        ("mixed", "Luna", "The answer is Luna."),
        ("choice", 1, "The answer is (B)."),
    ],
)
def test_every_kind_of_answer(kind, gold, output, tmp_path):
    row = {"question": "Which?", "answer": gold, "options": ["one", "two", "three"]}
    write_rows(tmp_path, "rows.jsonl", [row])
    path = tmp_path / "mine.yml"
    path.write_text(f"kind: {kind}\nfile: rows.jsonl\n")
    tasks = tasks_asked(str(path))
    (request,) = render(tasks)["mine"]
    assert grade("mine", output, request.gold).correct
    if kind == "choice":
        (compared,) = render(tasks, choices="likelihood")["mine"]
        assert compared.options == (" (A)", " (B)", " (C)") and compared.gold == "B"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kind: number", ": file is missing"),
        ("{", " is not valid YAML"),
        ("{kind: word, file: a}", ": kind is 'word', expected one of number, mixed, math, choice"),
        ("{kind: number, file: a, shot: 1}", ": unknown key 'shot'. Known: answer, examples, file"),
        ("{kind: number, file: a, examples: 3}", ": examples is 3, expected a list"),
        ("{kind: math, file: a, examples: [{question: q}]}", ": examples.0.answer is missing"),
    ],
)
def test_what_is_wrong_with_it_is_said(content, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=f"mine.yaml{message}"):
        tasks_asked(str(path))


def test_a_name_that_is_taken_and_rows_that_are_not_there(sums, tmp_path):
    taken = tmp_path / "gsm8k.yaml"
    taken.write_text(SUMS)
    with pytest.raises(UsageError, match="give the file another name"):
        tasks_asked(str(taken))
    tasks_asked(str(sums))
    (tmp_path / "rows.jsonl").write_text('{"sum": "q", "answer": "many"}\n')
    with pytest.raises(BenchmarkError, match="line 1: the answer 'many' is not a number"):
        load_examples("sums")
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(BenchmarkError, match=r"rows\.jsonl"):
        load_examples("sums")
