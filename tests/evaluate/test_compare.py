"""Runs beside one another: paired differences, and what is not compared."""

import json
import shutil

import pytest
from evaluation_kit import QUICK
from typer.testing import CliRunner

from vocagnolm.base.files import CHECKSUM, LINE_CHECKSUM
from vocagnolm.base.statistics import mcnemar_exact
from vocagnolm.cli import app
from vocagnolm.errors import EvaluationError, VocagnolmWarning
from vocagnolm.evaluate import compare_runs, evaluate
from vocagnolm.evaluate.results import (
    average_difference,
    comparison_table,
    format_table,
    paired_difference,
)
from vocagnolm.questions.suite import SUITES


def test_mcnemar():
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(5, 5) == 1.0
    assert mcnemar_exact(0, 5) == pytest.approx(2 / 32)
    assert mcnemar_exact(1, 9) == pytest.approx(2 * 11 / 1024)
    assert mcnemar_exact(9, 1) == mcnemar_exact(1, 9)


def test_paired_difference():
    first = {i: i < 4 for i in range(10)}
    second = {i: i < 6 for i in range(10)}
    found = paired_difference(first, second)
    assert found.difference == pytest.approx(20)
    assert found.p_value == pytest.approx(0.5)
    assert found.stderr == pytest.approx(100 * (0.16 * 10 / 9 / 10) ** 0.5)
    # questions that only one of them answered do not count
    assert paired_difference(first, {0: True, 99: True}).n == 1
    assert paired_difference(first, {}) is None


def test_average_difference_agrees_with_mcnemar_on_one_task():
    first = {"gsm8k": {i: i < 10 for i in range(50)}}
    second = {"gsm8k": {i: i < 16 or i == 40 for i in range(50)}}
    exact = paired_difference(first["gsm8k"], second["gsm8k"])
    found = average_difference(first, second, ("gsm8k",))
    assert found.difference == pytest.approx(exact.difference)
    assert found.p_value == pytest.approx(exact.p_value, abs=0.02)
    assert average_difference(first, second, ("gsm8k", "math500")) is None


def test_report_table(finished, other_model_folder, benchmarks, tmp_path):
    out, evaluation = finished
    other = tmp_path / "other"
    evaluate(other_model_folder, benchmarks=benchmarks, out=other, **QUICK)
    comparison = compare_runs([out, other, out / "evaluation"])
    table = format_table(comparison_table(comparison))
    assert "GSM8K" in table and "AVG‡" in table and "difference" in table
    same = [listed[1] for listed in comparison.differences.values()]
    assert all(d.difference == 0 and d.p_value == 1.0 for d in same)
    shown = CliRunner().invoke(app, ["report", str(out), str(other)])
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) == 2 + 10 + 3
    values = json.loads(CliRunner().invoke(app, ["report", str(out), str(other), "--json"]).stdout)
    assert values["runs"][0]["tasks"] == evaluation.to_json()["tasks"]
    assert set(values["differences"]) == {
        *SUITES["math"], "avg", "avg_dagger", "avg_double_dagger",
    }  # fmt: skip


def test_report_tells_protocols_apart(finished, model_folder, benchmarks, tmp_path):
    out, _ = finished
    evaluate(model_folder, tasks="gsm8k,svamp", benchmarks=benchmarks, out=tmp_path / "other",
             protocol="paper", **QUICK)  # fmt: skip
    comparison = compare_runs([out, tmp_path / "other"])
    heading, *rows = comparison_table(comparison)
    assert heading == ["task", f"{out.name} (strict)", "other (paper)", "difference", ""]
    assert all(row[3:] == ["-", ""] for row in rows)


def test_report_does_not_compare_other_conditions(finished, model_folder, benchmarks, tmp_path):
    out, _ = finished
    shorter = tmp_path / "shorter"
    evaluate(model_folder, tasks="gsm8k,svamp", benchmarks=benchmarks, out=shorter,
             **(QUICK | {"max_new_tokens": 4}))  # fmt: skip
    comparison = compare_runs([out, shorter])
    assert comparison.differences["gsm8k"] == [None]
    [note] = comparison.notes()
    assert note.startswith(f"GSM8K, SVAMP: {out.name} and shorter are not compared")
    assert "max_new_tokens 8 / 4" in note
    assert all(row[3] == "-" for row in comparison_table(comparison)[1:])

    # fewer questions of the same kind are compared on those that both were asked
    fewer = tmp_path / "fewer"
    evaluate(model_folder, tasks="gsm8k", benchmarks=benchmarks, limit=2, out=fewer, **QUICK)
    assert compare_runs([out, fewer]).differences["gsm8k"][0].n == 2

    # another version of a question is not the same question
    path = fewer / "evaluation/outputs/gsm8k.jsonl"
    lines = path.read_text().replace("apples", "pears").splitlines()
    values = [json.loads(line) for line in lines]
    path.write_text("".join(json.dumps(unsealed_by_hand(row)) + "\n" for row in values))
    assert "prompts" in compare_runs([out, fewer]).notes()[0]

    # two of an older version, which recorded a checksum alone
    for folder in (out, shorter):
        old = tmp_path / f"old {folder.name}"
        shutil.copytree(folder, old)
        path = old / "evaluation/results.json"
        values = json.loads(path.read_text())
        del values["conditions"]
        path.write_text(json.dumps(unsealed_by_hand(values)))
    both = [tmp_path / f"old {folder.name}" for folder in (out, shorter)]
    assert "limit of new tokens" in compare_runs(both).notes()[0]

    # what an older version did not record may be anything
    path = fewer / "evaluation/results.json"
    values = json.loads(path.read_text())
    del values["conditions"]
    path.write_text(json.dumps(unsealed_by_hand(values)))
    assert "did not record" in compare_runs([out, fewer]).notes()[0]


def unsealed_by_hand(values):
    """As older versions wrote it: without a checksum."""
    return {key: value for key, value in values.items() if key not in (CHECKSUM, LINE_CHECKSUM)}


def test_bits_of_other_text_are_not_compared(model_folder, text, tmp_path):
    for name, content in (("a", text[0].read_text()), ("b", '{"text": "other words"}\n')):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(content)
        evaluate(model_folder, text=[file], out=tmp_path / name, device="cpu")
    comparison = compare_runs([tmp_path / "a", tmp_path / "b"])
    assert comparison_table(comparison)[-1][3] == "-"
    assert "bits per byte" in comparison.notes()[0]


def test_a_difference_in_bits_has_its_interval(model_folder, other_model_folder, text, tmp_path):
    """Bootstrap over documents, paired; an evaluation that kept no documents has no difference."""
    file, documents = text
    for name, model in (("a", model_folder), ("b", other_model_folder)):
        evaluate(model, text=[file], out=tmp_path / name, device="cpu")
    runs = [tmp_path / "a", tmp_path / "b"]
    found = compare_runs(runs)
    change = found.differences["bits_per_byte"][0]
    low, high = change.interval
    assert change.n == len(documents) and low < change.difference < high
    *_, own, other, difference, interval = comparison_table(found)[-1]
    assert " ± " in own and " ± " in other and difference == f"{change.difference:+.4f}"
    assert interval == f"95 %: {low:+.4f} to {high:+.4f}"
    assert found.notes() == []
    (tmp_path / "b/evaluation/outputs/bits_per_byte.jsonl").unlink()  # of an older version
    old = compare_runs(runs)
    assert comparison_table(old)[-1][3:] == ["-", ""]
    assert "b kept no numbers of single documents" in old.notes()[0]


def test_report_says_why_an_old_run_has_no_averages(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "evaluation/results.json"
    values = json.loads(path.read_text())
    values["tasks"]["math"] = values["tasks"].pop("math500")
    path.write_text(json.dumps(unsealed_by_hand(values)))
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "MATH-5000" in shown.stdout and "AVG" not in shown.stdout
    assert "--tasks math500" in shown.stderr
    assert "math500" not in CliRunner().invoke(app, ["report", str(finished[0])]).stderr


def test_report_without_an_evaluation(tmp_path):
    with pytest.raises(EvaluationError, match="vocagnolm evaluate MODEL --out"):
        compare_runs([tmp_path])


def test_a_run_without_an_evaluation_is_left_out_of_the_others(finished, tmp_path):
    with pytest.warns(VocagnolmWarning, match="left out"):
        found = compare_runs([finished[0], tmp_path])
    assert len(found.runs) == 1
    with pytest.raises(EvaluationError, match="no finished evaluation"):
        compare_runs([tmp_path, finished[0]])
