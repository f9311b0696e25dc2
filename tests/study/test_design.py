"""Study files: shipped ones are whole, mistakes are named."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from faults_kit import some

from vocagnolm.errors import StudyError
from vocagnolm_studies import design
from vocagnolm_studies.design import (
    RowPlan,
    expand_rows,
    load_study,
    plan_runs,
    shipped_studies,
    study_from_dict,
)
from vocagnolm_studies.tasks import StudyTasks, score_teacher


@pytest.mark.parametrize("name", shipped_studies())
def test_every_recipe_of_a_shipped_study_is_valid(name: str, tmp_path: Path) -> None:
    home = StudyTasks(load_study(name, materials="materials"), tmp_path)
    assert home.tasks()
    for run in some(home.runs, 3):
        recipe = home.recipe(run, learning_rate=1e-4)
        assert recipe.run.seed == run.seed
        own = run.overrides.get("optimizer.learning_rate", 1e-4)
        assert recipe.optimizer.min_learning_rate == pytest.approx(own / 10)
        # what needs a teacher has one
        if recipe.needs_guidance and not recipe.teacher.online:
            assert recipe.store.path
        if recipe.needs_online_teacher:
            assert recipe.teacher.model


def test_the_command_names_the_shipped_studies():
    from typer.testing import CliRunner

    from vocagnolm_studies.cli import app

    listed = CliRunner().invoke(app, ["list"]).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(shipped_studies())


def test_primary_comparison_runs_first() -> None:
    runs = plan_runs(load_study("miniature", materials="m"))
    assert [run.name for run in runs[:4]] == [
        "cpt-s1",
        "guided-qwen-s1",
        "cpt-s2",
        "guided-qwen-s2",
    ]
    assert {run.row for run in runs[:10]} == {"cpt", "guided-qwen"}


def test_a_grid_becomes_rows() -> None:
    rows = expand_rows({"g": RowPlan(grid={"objective.keep": [0.4, 0.6]}, label="kept")})
    assert list(rows) == ["g-0.4", "g-0.6"]
    assert rows["g-0.6"].set == {"objective.keep": 0.6}
    assert rows["g-0.6"].label == "kept, 0.6"


def test_a_matched_row_brings_its_target_along() -> None:
    study = load_study("miniature", ["use=[matched]"], materials="m")
    assert {run.row for run in plan_runs(study)} == {"matched", "guided-qwen"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rows": {"a": {"sed": [1]}}}, "Did you mean 'seeds'"),
        ({"rowz": {}}, "Did you mean 'rows'"),
        ({"rows": {"cpt": {}}, "use": ["ctp"]}, "Did you mean 'cpt'"),
        ({"rows": {"a": {"teacher": "t"}}}, "unknown teacher 't'"),
        ({"teachers": {"t": {"label": "nobody"}}}, "either `model` or `train`"),
        ({"rows": {"a": {"seeds": "123"}}}, "rows.a.seeds is '123', expected a list"),
        ({"rows": {"a": {"seeds": []}}}, "a list that is not empty"),
        ({"evaluate": {"max_new_tokens": "lots"}}, "is 'lots', expected an integer above 0"),
        ({"rows": {"a": {}}, "comparisons": [["a"]]}, "a list of at least 2 entries"),
        ({"rows": {"a": {}}, "comparisons": [["a", "a", "a"]]}, "two rows or of four"),
        ({"rows": {"a": {}}, "comparisons": [["a", "a", "a", "start"]]}, "start"),
        ({"tune": {"learning_rates": [1], "rows": {}, "by": "accuracy"}}, "validation_requests"),
        ({"tune": {"learning_rates": [1], "rows": {}, "by": "accurcy"}}, "bits_per_byte, accuracy"),
        ({"rows": {"a": {}, "b": {"matched_to": "a"}}}, "no teacher"),
        ({"rows": {"a": {"targets": "shuffled"}}}, "for rows of method distill"),
        ({"teachers": {"t": {"model": "start"}}}, "teachers.t is the start: set `start`"),
        ({"rows": {"a": {"also": ["t"]}}}, "rows.a.also: unknown teacher 't'"),
        (
            {"teachers": {"t": {"model": "m"}}, "rows": {"a": {"against": "t"}}},
            "without a `teacher`",
        ),
    ],
)
def test_mistakes_are_named(tree: dict, message: str) -> None:
    with pytest.raises(StudyError, match=message):
        study_from_dict({"name": "x", **tree})


def test_a_study_trains_on_one_corpus() -> None:
    base = {"corpora": {"web": {"files": ["web.jsonl"], "share": 1}}}
    with pytest.raises(StudyError, match=r"row a: a study trains on one corpus\. Give corpus"):
        design.recipe_with(base, {"run.seed": 1}, "row a")


def test_a_part_of_a_file_is_a_study_that_extends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(design, "SHIPPED", tmp_path)
    shared = "title: two\nbase: {train: {tokens: 8, compile: true}}\nrows: {a: {}, b: {}}\n"
    parts = "parts:\n  few: {title: few, use: [a]}\n  few-more: {extends: two-few, title: more,"
    (tmp_path / "two.yaml").write_text(f"{shared}{parts} base: {{train: {{tokens: 9}}}}}}\n")
    (tmp_path / "setting.yaml").write_text("rows: {}\n")
    assert shipped_studies() == {"two": "two", "two-few": "few", "two-few-more": "more"}
    assert load_study("two").use == [] and load_study("two-few").use == ["a"]
    more = load_study("two-few-more")
    assert (more.name, more.use) == ("two-few-more", ["a"])
    assert more.base == {"train": {"tokens": 9, "compile": True}}
    (tmp_path / "own.yaml").write_text("extends: two-few\nuse: [b]\n")
    assert load_study(tmp_path / "own.yaml").use == ["b"]
    with pytest.raises(StudyError, match="no study 'two-many'"):
        load_study("two-many")
    with pytest.raises(StudyError, match="unknown key 'parts'"):  # of shipped files alone
        load_study(tmp_path / "two.yaml")


def test_materials_are_asked_for() -> None:
    with pytest.raises(StudyError, match="--materials"):
        load_study("table1")
    with pytest.raises(StudyError, match="shipped ones are"):
        load_study("table9")


def test_overrides_reach_rows_and_recipe_keys() -> None:
    overrides = ["rows.cpt.seeds=[9]", "start.train.tokens=64", "tune.set.train.tokens=32"]
    overrides.append("teachers.same.train.train.tokens=16")
    study = load_study("miniature", overrides, materials="m")
    assert study.rows["cpt"].seeds == [9]
    assert study.start is not None and study.start["train.tokens"] == 64
    assert study.tune is not None and study.tune.set["train.tokens"] == 32
    assert (study.teachers["same"].train or {})["train.tokens"] == 16


def test_rows_of_several_teachers_and_of_chosen_documents(tmp_path: Path) -> None:
    study = load_study("toy", ["use=[guided-both-best_document, documents]"], materials="m")
    home = StudyTasks(study, tmp_path)
    stores = tmp_path / "stores"
    both, documents = (next(r for r in home.runs if r.row.startswith(n)) for n in ("g", "d"))
    recipe = home.recipe(both, learning_rate=None)
    assert recipe.stores == [str(stores / "sums"), str(stores / "products")]
    assert recipe.store.combine == "best_document"
    chosen = home.recipe(documents, learning_rate=None).corpus.keep_documents
    assert chosen is not None and chosen.against == str(stores / "start")
    assert (chosen.by, chosen.share) == ("difference", 0.4)
    tasks = {task.name: task for task in home.tasks()}
    assert {"score-sums", "score-products", "score-teacher", "score-start"} <= set(tasks)
    blocks = next(t for name, t in tasks.items() if name.startswith("blocks-teacher"))
    assert stores / "start" / "manifest.json" in blocks.needs


def test_a_teacher_is_scored_by_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study("distill-teachers", materials=tmp_path)
    seen = {}

    def score(model, files, store, settings, **_):
        seen[Path(store).name] = settings.alternatives
        return SimpleNamespace(tokens=1, seconds=1.0, store={"bits_per_byte": 1.0})

    monkeypatch.setattr("vocagnolm.score.score_corpus", score)
    home = StudyTasks(study, tmp_path / "out")
    for teacher in ("crawl", "drawn", "weak"):
        score_teacher(home, teacher)
    assert seen == {"crawl": 4, "drawn": "sampled:4", "weak": 4}
