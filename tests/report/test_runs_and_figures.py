"""Run folders as pages, the selection sample's file, and the static figures."""

import json
from pathlib import Path

import made
import pytest
from report.pages import known_page, known_passage, select_passages
from typer.testing import CliRunner

from vocagnolm.alignment import load_tokenizer
from vocagnolm.cli import app
from vocagnolm.errors import EvaluationError, UsageError
from vocagnolm.report.comparison import SAMPLE, overlap_bars, tokenisation_rows
from vocagnolm.report.page_data import plain
from vocagnolm.report.runs import (
    CURVE_POINTS,
    SAMPLE_FILE,
    RunError,
    Sample,
    SampleError,
    read_run,
    read_sample,
    report_page,
    save_sample,
)
from vocagnolm_studies import figures as study_figures
from vocagnolm_studies.granularity import granularity_study


def make_run(folder: Path, method: str = "guided", steps: int = 20) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"objective:\n  method: {method}\n")
    lines = [
        json.dumps({"step": s, "loss": 8 / s, "nll_all": 9 / s, "tokens": 64 * s, "x": "y"})
        for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_folder_becomes_its_loss_and_facts(tmp_path) -> None:
    run = read_run(make_run(tmp_path / "guided-0"))
    assert (run.name, run.method) == ("guided-0", "guided")
    assert run.loss[0] == (1.0, 9.0)  # of all tokens
    assert run.facts == {"steps": "20", "tokens": "1,280", "last loss": "0.4000"}


def test_a_run_of_before_has_the_loss_of_today(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0, "loss_selected": 3.0, "loss_all": 2.0, "selected_share": 0.4}\n'
        '{"step": 2, "loss": 1.0, "nll_kept": 2.0, "nll_all": 1.0, "kept_share": 0.5}\n'
    )
    assert read_run(tmp_path).loss == [(1.0, 2.0), (2.0, 1.0)]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 1.0}\n')
    assert read_run(tmp_path).loss == [(1.0, 3.0), (2.0, 1.0)]


def test_long_curves_are_means_of_bins(tmp_path) -> None:
    run = read_run(make_run(tmp_path / "long", steps=1000))
    assert len(run.loss) <= CURVE_POINTS
    assert run.steps_per_point == 20
    expected = sum(9 / step for step in range(1, 21)) / 20
    assert run.loss[0][1] == pytest.approx(expected, rel=1e-4)


def test_a_crash_and_a_resume_leave_readable_metrics(tmp_path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 7.0, "nll_all": 7.0}\n{"step": 4, "lo')
    assert read_run(folder).loss[-1] == (3.0, 7.0)


def test_what_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        read_run(tmp_path)


def test_runs_of_one_name_are_told_apart(tmp_path) -> None:
    runs = [make_run(tmp_path / seed / "guided") for seed in ("seed0", "seed1")]
    page = report_page(runs)
    assert [run.name for run in page.runs] == ["seed0/guided", "seed1/guided"]


def test_a_sample_travels_through_its_file(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    passages, rule = select_passages([known_passage()])
    sample = Sample(passages=passages, selection=rule, preflight=known_page().preflight)
    save_sample(sample, run)
    assert plain(read_sample(run)) == plain(sample)
    page = report_page([run])
    assert page.statistics is not None and page.statistics.kept == 3
    assert not page.notes


def test_evaluations_become_the_results(tmp_path) -> None:
    runs = []
    for name, method, score in (("a", "cpt", 20.5), ("b", "guided", 29.0), ("c", "guided", 31.0)):
        runs.append(make_run(tmp_path / name, method))
        (runs[-1] / "evaluation").mkdir()
        task = {"score": score, "stderr": 1.5, "n": 9, "no_answer": 0}
        content = {"tasks": {"gsm8k": task}, "avg": None, "bits_per_byte": 0.5}
        (runs[-1] / "evaluation" / "results.json").write_text(json.dumps(content))
    results = report_page(runs).results
    assert results is not None
    assert [measure.name for measure in results.measures] == ["gsm8k", "bits per byte"]
    assert [(group.name, group.values[0]) for group in results.groups] == [
        ("cpt", [20.5]),
        ("guided", [29.0, 31.0]),
    ]
    (runs[0] / "evaluation" / "results.json").write_text("{}")
    with pytest.raises(EvaluationError, match=r"results\.json is damaged"):
        report_page(runs)


def test_the_command_writes_a_page_and_says_why_it_has_no_text(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    out = tmp_path / "report.html"
    arguments = ["report", str(run), "--html", str(out)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.stdout.strip() == str(out)
    assert "no selection sample could be made" in out.read_text()


@pytest.mark.parametrize("content", ["{", '{"format": 99}', '{"format": 2, "passages": [{}]}'])
def test_a_damaged_sample_is_named(tmp_path, content: str) -> None:
    (tmp_path / SAMPLE_FILE).write_text(content)
    with pytest.raises(SampleError, match=SAMPLE_FILE):
        read_sample(tmp_path)


def test_a_sample_of_an_older_form_is_made_again(tmp_path) -> None:
    assert read_sample(tmp_path) is None
    (tmp_path / SAMPLE_FILE).write_text('{"format": 1, "passages": [{}]}')
    assert read_sample(tmp_path) is None


def test_figures_are_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    student = load_tokenizer(made.tokenizer("sentencepiece prepend"))
    teacher = load_tokenizer(made.tokenizer("byte-level"))
    text = "Probability, 🙂 <b>$x$</b> naïve\n"
    study = granularity_study(student, teacher, SAMPLE[:1], n_chunks=[2, 8])
    points = [
        study_figures.TeacherPoint(name="weak", bits_per_byte=1.1, gain=-3, interval=(-4, -2)),
        study_figures.TeacherPoint(
            name="strong", bits_per_byte=0.8, gain=1, interval=(0.2, 1.8), seed_gains=[0.5, 1.5]
        ),
    ]
    made_files = [
        overlap_bars(student, [teacher, student], tmp_path / "1.png"),
        tokenisation_rows([student, teacher], text, tmp_path / "2.svg"),
        study_figures.granularity_curve(study, tmp_path / "3.svg"),
        study_figures.teacher_strength(points, tmp_path / "5.pdf", student_bits_per_byte=0.9),
    ]
    starts = [b"\x89PNG", b"<?xml", b"<?xml", b"%PDF"]
    assert [
        path.read_bytes()[: len(s)] for path, s in zip(made_files, starts, strict=True)
    ] == starts
    again = study_figures.granularity_curve(study, tmp_path / "again.svg")
    assert again.read_bytes() == made_files[2].read_bytes()
    assert "token level, IoS" in made_files[2].read_text()  # text stays text


def test_an_unknown_figure_format_is_refused(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match=r"expected one of .png, .svg, .pdf"):
        study_figures.teacher_strength([], tmp_path / "x.bmp")


def make_evaluated(folder: Path, recipe: str, score: float, conditions: dict | None = None) -> Path:
    folder = make_run(folder)
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "evaluation").mkdir()
    task = {"score": score, "stderr": 1.5, "n": 9, "no_answer": 0}
    content = {"tasks": {"gsm8k": task}, "bits_per_byte": None, "conditions": conditions or {}}
    (folder / "evaluation" / "results.json").write_text(json.dumps(content))
    return folder


def test_runs_are_seeds_of_one_setting_only_if_all_else_is_equal(tmp_path) -> None:
    recipes = {
        "a": "objective: {keep: 0.4}\nrun: {seed: 1, folder: a}\n",
        "b": "objective: {keep: 0.8}\nrun: {seed: 1, folder: b}\n",
        "c": "run: {seed: 2, folder: c, log_every: 3}\nobjective: {method: guided}\n",
        "d": "objective: {method: cpt}\n",
    }
    runs = [
        make_evaluated(tmp_path / name, recipe, score)
        for (name, recipe), score in zip(recipes.items(), (20.0, 40.0, 30.0, 10.0), strict=True)
    ]
    page = report_page(runs)
    groups = {group.name: group.values[0] for group in page.results.groups}
    assert groups == {
        "guided · objective.keep 0.4": [20.0, 30.0],  # 0.4 is the default of the third
        "guided · objective.keep 0.8": [40.0],
        "cpt": [10.0],
    }
    assert page.results.groups[1].errors == [[1.5]]
    assert [run.setting for run in page.runs][2] == "guided · objective.keep 0.4"


def test_other_blocks_are_another_setting(tmp_path) -> None:
    runs = [make_evaluated(tmp_path / name, "run: {seed: 1}\n", 20.0) for name in "ab"]
    for run, blocks in zip(runs, ("1" * 64, "2" * 64), strict=True):
        about = {"finished": True, "schedule": {}, "blocks": blocks}
        (run / "run.json").write_text(json.dumps(about))
    names = [group.name for group in report_page(runs).results.groups]
    assert names == ["guided · blocks 11111111", "guided · blocks 22222222"]


def test_many_differences_still_tell_settings_apart(tmp_path) -> None:
    texts = [
        f"student: {{model: m{at}, tokenizer: t{at}, revision: '{at}'}}\n"
        f"optimizer: {{learning_rate: 0.{last}}}\n"
        for at, last in ((1, 1), (2, 2), (2, 3))
    ]
    runs = [make_evaluated(tmp_path / str(at), text, 1.0) for at, text in enumerate(texts)]
    assert len(report_page(runs).results.groups) == 3


def test_runs_without_a_recipe_stand_alone(tmp_path) -> None:
    runs = [make_evaluated(tmp_path / name, "x", 20.0) for name in "ab"]
    assert [group.name for group in report_page(runs).results.groups] == ["a", "b"]


def test_scores_of_other_conditions_have_columns_of_their_own(tmp_path) -> None:
    known = {"protocol": "strict", "few_shot": 8, "max_new_tokens": 512, "questions": 9}
    runs = [
        make_evaluated(tmp_path / "a", "run: {seed: 1}", 20.0, {"gsm8k": known}),
        make_evaluated(tmp_path / "b", "run: {seed: 2}", 30.0, {"gsm8k": known}),
        make_evaluated(
            tmp_path / "c", "run: {seed: 3}", 40.0, {"gsm8k": known | {"max_new_tokens": 64}}
        ),
        make_evaluated(tmp_path / "d", "run: {seed: 4}", 50.0),
    ]
    assert [m.name for m in report_page(runs[:2]).results.measures] == ["gsm8k"]
    results = report_page(runs).results
    [group] = results.groups
    columns = dict(zip([m.name for m in results.measures], group.values, strict=True))
    assert columns == {
        "gsm8k (max_new_tokens 512)": [20.0, 30.0, None, None],
        "gsm8k (max_new_tokens 64)": [None, None, 40.0, None],
        "gsm8k (conditions not recorded)": [None, None, None, 50.0],
    }
