"""What a learning rate is chosen by."""

import json
from pathlib import Path

import pytest
from study_kit import tiny_study, write_materials

from vocagnolm.errors import StudyError
from vocagnolm_studies.design import load_study, study_from_dict
from vocagnolm_studies.run import work
from vocagnolm_studies.table import study_table
from vocagnolm_studies.tasks import StudyTasks


def tuned(folder: Path, by: str, results: dict[float, dict]) -> StudyTasks:
    study = study_from_dict(
        {
            "name": "x",
            "rows": {"a": {"tuned": "g"}},
            "tune": {"learning_rates": list(results), "rows": {"g": "a"}, "by": by},
            "evaluate": {"validation_requests": "questions.jsonl"},
        }
    )
    for rate, result in results.items():
        path = folder / "tuning" / f"g-{rate:g}" / "evaluation.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"group": "g", "learning_rate": rate, **result}))
    return StudyTasks(study, folder)


def test_bits_per_byte_and_accuracy_may_disagree(tmp_path: Path) -> None:
    results = {
        1e-4: {"validation": {"text": 0.8}, "validation_accuracy": 10.0},
        3e-4: {"validation": {"text": 0.7}, "validation_accuracy": 12.0},
        9e-4: {"validation": {"text": 0.6}, "validation_accuracy": 9.0},
        2e-3: {"validation": {"text": float("nan")}, "validation_accuracy": 12.0},
    }
    assert tuned(tmp_path, "bits_per_byte", results).learning_rate("g") == 9e-4
    assert tuned(tmp_path, "accuracy", results).learning_rate("g") == 3e-4  # of equals the lower


def test_a_rate_tuned_by_another_measure_is_named(tmp_path: Path) -> None:
    home = tuned(tmp_path, "accuracy", {1e-4: {"validation": {"text": 0.8}}})
    with pytest.raises(StudyError, match="holds no validation_accuracy"):
        home.learning_rate("g")


def test_tuning_runs_answer_the_validation_questions(tmp_path: Path) -> None:
    materials = write_materials(tmp_path / "materials")
    questions = materials / "validation-requests.jsonl"
    lines = (materials / "requests.jsonl").read_text().splitlines(keepends=True)
    questions.write_text("".join(lines[:4]))
    overrides = [
        "tune.by=accuracy",
        f"evaluate.validation_requests={questions}",
        "rows.cpt.seeds=[1]",
        "use=[cpt]",
    ]
    study = load_study(tiny_study(tmp_path / "tiny.yaml"), overrides, materials=materials)
    home = StudyTasks(study, tmp_path / "out")
    assert work(home, say=lambda line: None).left == []
    tuning = study_table(home)["tuning"]
    assert [entry["row"] for entry in tuning] == ["cpt", "cpt"]
    assert all(0 <= entry["validation_accuracy"] <= 100 for entry in tuning)
    best = max(tuning, key=lambda entry: (entry["validation_accuracy"], -entry["learning_rate"]))
    assert home.learning_rate("all_tokens") == best["learning_rate"]
