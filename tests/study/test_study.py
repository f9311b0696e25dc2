"""A whole study on a CPU: through the ordinary code, resumable, to a table and a figure."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_kit import TINY, tiny_study, write_materials

from vocagnolm.errors import StudyError
from vocagnolm.store.format import read_manifest
from vocagnolm_studies.design import load_study
from vocagnolm_studies.evaluation import read_results
from vocagnolm_studies.run import work
from vocagnolm_studies.table import markdown, study_table
from vocagnolm_studies.tasks import StudyTasks

QUIET = {"say": lambda line: None}
DISTILLED: dict[str, dict[str, Any]] = {
    "distill": {},
    "distill-one": {"objective.alternatives": 1},
    "distill-starts": {"objective.inside": False},
    "distill-top": {"objective.keep": 0.5},
}
CONTROLS = {
    "distill-own": {"teacher": "own"},
    "distill-shuffled": {"targets": "shuffled"},
    "distill-smoothed": {"targets": "uniform"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> StudyTasks:
    folder = tmp_path_factory.mktemp("study")
    materials = write_materials(folder / "materials")
    seeds = {"seeds": [1, 2]}
    study = load_study(
        tiny_study(
            folder / "tiny.yaml",
            title="tiny",
            rows={
                "cpt": seeds,
                "guided-qwen": seeds,
                **{name: {"seeds": [1]} for name in ("matched", "kld", "rho1")},
                "stretch": {
                    "teacher": "qwen",
                    "also": ["gemma"],
                    "against": "gemma",
                    "seeds": [1],
                    "set": {
                        "objective.compare": "stretch",
                        "corpus.keep_documents": {"by": "difference", "share": 0.7},
                        "optimizer.learning_rate": 1e-3,
                    },
                },
                **{
                    name: {
                        "teacher": "qwen",
                        "seeds": [1],
                        "set": {
                            "objective.method": "distill",
                            "objective.keep": 1.0,
                            "optimizer.learning_rate": 1e-3,
                            **DISTILLED.get(name, {}),
                        },
                        **CONTROLS.get(name, {}),
                    }
                    for name in (*DISTILLED, *CONTROLS)
                },
            },
            teachers={**TINY["teachers"], "own": {"model": "start"}},
            use=["cpt", "guided-qwen", "matched", "kld", "rho1", "stretch", *DISTILLED, *CONTROLS],
            score={**TINY["score"], "alternatives": 4},
            comparisons=[
                ["guided-qwen", "cpt"],
                ["guided-qwen", "start"],
                ["guided-qwen", "cpt", "kld", "rho1"],
            ],
        ),
        materials=materials,
    )
    home = StudyTasks(study, folder / "out")
    outcome = work(home, **QUIET)
    failures = {p.name: p.read_text() for p in (folder / "out" / "failed").iterdir()}
    assert not failures, failures
    assert outcome.left == []
    return home


def test_table_has_all_rows_and_comparisons(finished: StudyTasks, tmp_path: Path) -> None:
    table = study_table(finished)
    names = ["start", "cpt", "guided-qwen", "matched", "kld", "rho1", "stretch"]
    names += [*DISTILLED, *CONTROLS]
    assert [row["row"] for row in table["rows"]] == names
    assert [len(row["seeds"]) for row in table["rows"]] == [1, 2, 2, *[1] * (len(names) - 3)]
    assert table["missing"] == []
    assert {(c["a"], c["b"]) for c in table["comparisons"]} == {
        ("guided-qwen", "cpt"),
        ("guided-qwen", "start"),
        ("(guided-qwen - cpt)", "(kld - rho1)"),
    }
    assert all(
        set(row["bits_per_byte"]) == {"gsm8k", "math", "nlab", "openstax"} for row in table["rows"]
    )
    (bits,) = [c["bits_per_byte"] for c in table["comparisons"] if c["b"] == "cpt"]
    means = {row["row"]: row["bits_per_byte"]["math"]["mean"] for row in table["rows"]}
    assert bits["math"]["difference"] == pytest.approx(means["guided-qwen"] - means["cpt"])
    of_differences = table["comparisons"][-1]
    assert of_differences["seeds"] == [1]  # kld and rho1 have no other
    # answers of such small models may all be wrong; their bits per byte are never the same
    results = read_results(finished)
    first = {name: seeds[1]["held_out"]["math"] for name, seeds in results.items() if 1 in seeds}
    gap = (first["guided-qwen"] - first["cpt"]) - (first["kld"] - first["rho1"])
    assert of_differences["bits_per_byte"]["math"]["difference"] == pytest.approx(gap) != 0
    assert len(table["tuning"]) == 4
    assert table["teachers"]["qwen"]["bits_per_byte"] > 0
    text = markdown(table)
    assert "guided by Qwen, 40 %" in text and "p (questions)" in text
    assert f"| guided-qwen - cpt | {bits['gsm8k']['difference']:+.4f} (" in text
    from vocagnolm_studies.figures import draw

    assert draw(table, finished.study.figure, tmp_path / "figure.svg").stat().st_size > 0


def test_a_study_of_teachers_alone_is_a_table_of_their_own_scores(finished: StudyTasks) -> None:
    """As table 4 of the paper: nothing is scored, packed or trained."""
    teachers = {n: replace(t, measured=True) for n, t in finished.study.teachers.items() if t.model}
    study = replace(finished.study, teachers=teachers, rows={}, use=[], comparisons=[], start=None)
    home = StudyTasks(replace(study, tune=None), finished.folder)
    assert {task.kind for task in home.tasks()} == {"evaluate"}
    assert study_table(home)["missing"] == [f"teacher-{name}" for name in sorted(teachers)]
    assert work(home, **QUIET).left == []
    table = study_table(home)
    assert [row["row"] for row in table["rows"]] == [f"teacher-{name}" for name in teachers]
    assert all(row["tasks"] and "accuracy" in row for row in table["rows"])
    assert table["missing"] == [] and "Qwen" in markdown(table)


def test_rows_that_share_no_seed_are_compared_over_all_seeds(finished: StudyTasks) -> None:
    rows = {name: replace(row, seeds=[2]) for name, row in finished.study.rows.items()}
    rows["matched"] = replace(rows["matched"], seeds=[1])
    study = replace(finished.study, rows=rows, comparisons=[["guided-qwen", "matched"]])
    table = study_table(StudyTasks(study, finished.folder))
    (entry,) = table["comparisons"]
    assert entry["seeds"] == [] and entry["difference"] is None and entry["interval"] is None
    assert (entry["all_seeds"]["n_a"], entry["all_seeds"]["n_b"]) == (1, 1)
    line = next(x for x in markdown(table).splitlines() if x.startswith("| guided-qwen - matched"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[1:7] == [""] * 6 and cells[7] and cells[8:] == ["", "1 and 1"]


def test_several_teachers_over_chosen_documents(finished: StudyTasks) -> None:
    """The row `stretch`: two stores combined, whole stretches, the best 70 % of the text."""
    run = next(run for run in finished.runs if run.row == "stretch")
    recipe = finished.recipe(run, learning_rate=None)
    manifest = json.loads((Path(recipe.data.blocks or "") / "manifest.json").read_text())
    assert manifest["teacher"] == "qwen, gemma" and "stretch" in manifest["columns"]
    assert manifest["summary"]["left_out_documents"] > 10
    assert (finished.run_folder(run) / "evaluation.json").is_file()


def test_distilled_rows_read_blocks_with_targets_of_their_own(finished: StudyTasks) -> None:
    """One store serves all; the blocks differ by what is made of its alternatives."""
    runs = {run.row: run for run in finished.runs if run.row in DISTILLED}
    recipes = {row: finished.recipe(run, learning_rate=None) for row, run in runs.items()}
    blocks = {row: recipe.data.blocks for row, recipe in recipes.items()}
    assert blocks["distill"] == blocks["distill-top"]
    assert len({*blocks.values()}) == 3
    counts = {}
    for row, run in runs.items():
        manifest = json.loads((Path(blocks[row] or "") / "manifest.json").read_text())
        assert {"target_ids", "target_p"} <= {*manifest["columns"]}
        counts[row] = manifest["settings"]["guidance"]["targets"]["alternatives"]
        # what trains on every token chooses nothing
        chosen = (finished.run_folder(run) / "selection.json").is_file()
        assert chosen == (row == "distill-top")
    assert counts["distill-one"] == 1 and counts["distill"] == 4


def test_nothing_is_run_twice(finished: StudyTasks) -> None:
    before = {p: os.stat(p).st_mtime_ns for p in finished.folder.rglob("evaluation.json")}
    assert before
    assert work(finished, **QUIET).finished == []
    assert before == {p: os.stat(p).st_mtime_ns for p in finished.folder.rglob("evaluation.json")}


def test_a_lost_run_is_run_again_to_the_same_result(finished: StudyTasks) -> None:
    import shutil

    folder = finished.folder / "runs" / "guided-qwen-s2"
    before = json.loads((folder / "evaluation.json").read_text())
    shutil.rmtree(folder)
    assert work(finished, **QUIET).finished == ["guided-qwen-s2"]
    after = json.loads((folder / "evaluation.json").read_text())
    assert before["held_out"] == after["held_out"]


def test_models_are_removed_once_they_are_evaluated(finished: StudyTasks) -> None:
    assert not list(finished.folder.glob("runs/*/model"))
    assert (finished.folder / "start" / "model").is_dir()


def test_a_teacher_of_the_same_vocabulary_is_trained_by_the_study(finished: StudyTasks) -> None:
    from vocagnolm.recipe import load_recipe

    assert (finished.folder / "teachers" / "same" / "model").is_dir()
    for row in ("kld", "rho1"):
        recipe = load_recipe(finished.folder / "runs" / f"{row}-s1" / "recipe.yaml")
        assert recipe.teacher.model == finished.teacher_model("same")
    assert study_table(finished)["teachers"]["same"]["bits_per_byte"] > 0  # scored for rho1
    assert finished.recipe(finished.runs[0], learning_rate=None).teacher.model is None


def test_runs_of_one_seed_see_the_same_blocks(finished: StudyTasks) -> None:
    """The same data order: plain and guided blocks hold the same tokens."""
    from vocagnolm.data.blocks import Blocks

    blocks = [
        Blocks(finished.recipe(run, learning_rate=None).data.blocks or "", 64)
        for run in finished.runs
        if run.seed == 1 and run.row != "stretch"  # its documents are chosen
    ]
    assert len({len(b) for b in blocks}) == 1
    for number in (0, len(blocks[0]) - 1):
        first = blocks[0][number]["input_ids"].tolist()
        assert all(b[number]["input_ids"].tolist() == first for b in blocks)


def test_matched_control_keeps_the_same_share_of_every_source(finished: StudyTasks) -> None:
    guided = json.loads((finished.folder / "runs/guided-qwen-s1/selection.json").read_text())
    matched = json.loads((finished.folder / "runs/matched-s1/selection.json").read_text())
    for source in ("problems", "noise"):
        wanted = (guided["before"][source]["kept"] + guided["after"][source]["kept"]) / 2
        for when in ("before", "after"):
            found = matched[when][source]
            deviation = (wanted * (1 - wanted) / found["tokens"]) ** 0.5  # kept by chance
            assert found["kept"] == pytest.approx(wanted, abs=3 * deviation)


def test_controls_of_distillation_learn_something_else_each(finished: StudyTasks) -> None:
    results = read_results(finished)
    bits = {row: results[row][1]["held_out"]["math"] for row in ("distill", *CONTROLS)}
    assert len(set(bits.values())) == len(bits)
    own, other = (read_manifest(finished.folder / "stores" / name) for name in ("own", "qwen"))
    assert own["identity"]["teacher"] != other["identity"]["teacher"]


def test_deadline_in_the_past_starts_nothing(finished: StudyTasks, tmp_path: Path) -> None:
    fresh = StudyTasks(finished.study, tmp_path)
    outcome = work(fresh, deadline=1.0, **QUIET)
    assert outcome.finished == [] and "start" in outcome.left


def test_a_missing_folder_of_materials_is_named(tmp_path: Path) -> None:
    from vocagnolm.errors import StudyError
    from vocagnolm_studies import run_study

    with pytest.raises(StudyError, match=r"no folder .*nowhere"):
        run_study("table1", tmp_path / "out", materials=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_command_prints_the_table_of_a_finished_study(
    finished: StudyTasks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vocagnolm.cli import main

    home = finished.folder.parent
    arguments = ["vocagnolm", "study", "run", str(home / "tiny.yaml"), "--table", "--json"]
    arguments += ["--folder", str(finished.folder), "--materials", str(home / "materials")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    table = json.loads(capsys.readouterr().out)
    assert table["rows"][1]["row"] == "cpt"
    assert (finished.folder / "tiny.md").read_text().startswith("**tiny**")
    assert (finished.folder / "tiny.svg").exists()


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 5000])
def test_a_damaged_result_is_named_with_what_to_do(finished: StudyTasks, content: str) -> None:
    path = finished.folder / "runs" / "cpt-s1" / "evaluation.json"
    good = path.read_text()
    path.write_text(content)
    try:
        with pytest.raises(StudyError, match=r"cpt-s1/evaluation\.json.*Remove it and run"):
            study_table(finished)
    finally:
        path.write_text(good)
