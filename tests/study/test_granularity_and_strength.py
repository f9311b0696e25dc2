"""IoU and IoS beside the accuracies; gains against the teachers' strength. No model is run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chat_kit
import made
import pytest
from training_kit import save_tokenizer
from typer.testing import CliRunner

from vocagnolm.alignment import load_tokenizer
from vocagnolm.cli import app
from vocagnolm.errors import StudyError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm_studies import figures
from vocagnolm_studies.design import FigurePlan, GranularityPlan, Study, load_study, study_from_dict
from vocagnolm_studies.figures import draw
from vocagnolm_studies.folder import EVALUATION
from vocagnolm_studies.granularity import corpus_granularity, granularity_study
from vocagnolm_studies.run import work
from vocagnolm_studies.table import markdown, study_table
from vocagnolm_studies.tasks import StudyTasks

TEXTS = [f"Ann has {n} apples and finds {n * n} more. é 🙂 " * 6 for n in range(40)]
ROWS: dict[str, dict[str, Any]] = {
    "cpt": {"set": {"objective.method": "cpt"}},
    "guided": {"teacher": "strong", "set": {"objective.method": "guided"}},
    "other": {"teacher": "weak", "set": {"objective.method": "guided"}},
    "matched": {
        "teacher": "strong",
        "matched_to": "guided",
        "set": {"objective.method": "guided"},
    },
    "chunk": {
        "teacher": "strong",
        "set": {"objective.method": "chunk"},
        "grid": {"objective.n_chunks": [4, 8, 12]},
    },
    "other-chunk": {
        "teacher": "weak",
        "set": {"objective.method": "chunk", "objective.n_chunks": 4},
    },
    "random": {
        "set": {
            "objective.method": "chunk",
            "objective.chunk_choice": "random",
            "objective.n_chunks": 8,
        }
    },
}


def small_study(folder: Path, **changes: Any) -> Study:
    """Tokenizers and a corpus, no models."""
    folder.mkdir(exist_ok=True)
    made.byte_level(400).save(str(folder / "student.json"))
    made.sentencepiece_bpe(700).save(str(folder / "strong.json"))
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tree: dict[str, Any] = {
        "name": "small",
        "base": {
            "student": {"tokenizer": str(folder / "student.json")},
            "corpus": {"files": [str(corpus)]},
            "data": {"block_size": 64},
        },
        "teachers": {
            "strong": {
                "model": str(folder / "no-model"),
                "tokenizer": str(folder / "strong.json"),
                "label": "a strong one",
            },
            "weak": {"model": str(folder / "no-model")},
        },
        "rows": ROWS,
        "granularity": {"teacher": "strong", "chunks": [4, 8], "documents": 30},
    }
    return study_from_dict({**tree, **changes})


def pretend_runs(home: StudyTasks) -> None:
    """What finished runs leave."""
    for run in home.runs:
        folder = home.run_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        result = {"held_out": {"text": 1.0}, "learning_rate": 1e-3}
        (folder / EVALUATION).write_text(json.dumps(result))


@pytest.fixture
def home(tmp_path: Path) -> StudyTasks:
    return StudyTasks(small_study(tmp_path / "materials"), tmp_path / "out")


def test_granularity_comes_last_and_needs_no_model(home: StudyTasks) -> None:
    task = home.tasks()[-1]
    assert task.name == "granularity-strong" and task.is_ready and not task.is_done
    outcome = work(home, wait=False, say=lambda line: None)
    assert "granularity-strong" in outcome.finished and task.is_done
    found = json.loads((home.folder / "granularity-strong.json").read_text())
    assert [point["n"] for point in found["chunks"]] == [4, 8]
    assert found["sequence_tokens"] == 64


@pytest.mark.slow
def test_granularity_is_measured_without_torch(tmp_path: Path) -> None:
    """Also where tokenizers are folders of a model, which transformers could open."""
    study = small_study(tmp_path / "materials")
    for name in ("student", "strong"):
        folder = tmp_path / "materials" / name
        folder.mkdir()
        (tmp_path / "materials" / f"{name}.json").rename(folder / "tokenizer.json")
        (folder / "config.json").write_text('{"model_type": "llama"}')
    program = f"""
import sys
from vocagnolm_studies.design import GranularityPlan
from vocagnolm_studies.granularity import corpus_granularity
from vocagnolm.recipe import recipe_from_dict
recipe = recipe_from_dict({dict(study.base)!r})
recipe.student.tokenizer = {str(tmp_path / "materials/student")!r}
plan = GranularityPlan(teacher="strong", chunks=[4])
found = corpus_granularity(recipe, {str(tmp_path / "materials/strong")!r}, plan)
assert found.teacher == "strong" and found.points[-1].ios == 1
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_rows_show_the_overlap_of_their_alignment(home: StudyTasks) -> None:
    pretend_runs(home)
    before = study_table(home)
    assert before["granularity"] is None and "granularity-strong" in before["missing"]
    assert "| IoU | IoS |" in markdown(before)

    work(home, wait=False, say=lambda line: None)
    table = study_table(home)
    assert not any(name.startswith("granularity") for name in table["missing"])
    found = table["granularity"]
    shown = {row["row"]: (row.get("iou"), row.get("ios")) for row in table["rows"]}
    nothing = (None, None)
    points = {point["n"]: (point["iou"], point["ios"]) for point in found["chunks"]}
    token_level = (found["token_level"]["iou"], found["token_level"]["ios"])
    assert token_level[1] == 1
    assert shown == {
        "cpt": nothing,
        "guided": token_level,
        "other": nothing,  # another teacher
        "matched": nothing,  # chosen by chance
        "chunk-4": points[4],
        "chunk-8": points[8],
        "chunk-12": nothing,  # not measured
        "other-chunk": nothing,
        "random": points[8],
    }
    lines = {line.split(" | ")[0].strip("| "): line for line in markdown(table).splitlines()}
    assert f"| {100 * points[4][0]:.1f} | {100 * points[4][1]:.1f} |" in lines["chunk-4"]
    assert "| 100.0 |" in lines["guided"]
    assert "| 0.001 |  |  |" in lines["cpt"]


def test_no_columns_where_the_study_does_not_ask(tmp_path: Path) -> None:
    home = StudyTasks(small_study(tmp_path / "m", granularity=None), tmp_path / "out")
    pretend_runs(home)
    table = study_table(home)
    assert "granularity" not in table and "IoU" not in markdown(table)
    assert not any(task.kind == "granularity" for task in home.tasks())


def test_shipped_table2_measures_every_number_of_chunks_it_shows(tmp_path: Path) -> None:
    for name in ("table2", "figure6"):
        study = load_study(name, materials="m")
        assert study.granularity is not None
        home = StudyTasks(study, tmp_path)
        recipes = [home.recipe(run, learning_rate=None) for run in home.runs]
        wanted = {r.objective.n_chunks for r in recipes if r.objective.method == "chunk"}
        assert wanted == set(study.granularity.chunks)


def test_packed_sequences_run_over_the_ends_of_documents() -> None:
    student, teacher = load_tokenizer(made.byte_level(400)), load_tokenizer(made.byte_level(700))
    texts = ["a short one. ", "", "and another, é 🙂. "] * 50
    apart = granularity_study(student, teacher, texts, n_chunks=[1, 4], sequence_tokens=64)
    packed = granularity_study(
        student, teacher, texts, n_chunks=[1, 4], sequence_tokens=64, packed=True
    )
    tokens = sum(map(len, student.spans_batch(texts)))
    assert packed.sequences == -(-tokens // 64)
    assert apart.sequences == 100
    # a token's own cover does not depend on where sequences end, up to the teacher's cut
    assert packed.points[-1].iou == pytest.approx(apart.points[-1].iou)
    assert packed.points[-1].ios == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": {"teacher": "stong", "chunks": [8]}}, "Did you mean 'strong'"),
        ({"granularity": {"teacher": "strong"}}, "chunks"),
        ({"granularity": {"teacher": "strong", "chunks": 8}}, "chunks is 8, expected a list"),
        ({"granularity": {"teacher": "strong", "chunks": [0]}}, "expected an integer above 0"),
        ({"granularity": {"teacher": "strong", "chunks": [8], "documents": 0}}, "above 0"),
        ({"figure": {"kind": "strengths", "reference": "cpt"}}, "bars, lines, frontier, strength"),
        ({"figure": {"kind": "strength"}}, "needs `reference`"),
        ({"figure": {"kind": "strength", "reference": "ctp"}}, "Did you mean 'cpt'"),
        ({"figure": {"panels": {"reference": "cpt"}}}, "expected a list"),
        ({"figure": {"panels": [{"reference": "ctp"}]}}, "Did you mean 'cpt'"),
        ({"figure": {"panels": [{"referense": "cpt"}]}}, "Did you mean 'reference'"),
        ({"figure": {"series": {"a line": ["guide"]}}}, "Did you mean 'guided'"),
        ({"figure": {"series": {"a line": ["guided"]}}}, "no place for 'guided'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        small_study(tmp_path, **changes)


def strength_table() -> dict[str, Any]:
    def entry(a: str, b: str, difference: float) -> dict[str, Any]:
        interval = (difference - 1, difference + 1)
        every = {"n_a": 2, "n_b": 3, "difference": difference, "p": 0.1, "interval": interval}
        return {"a": a, "b": b, "difference": None, "interval": None, "all_seeds": every}

    def row(name: str, teacher: str | None, accuracy: float) -> dict[str, Any]:
        seeds = {1: accuracy - 0.5, 2: accuracy + 0.5, 3: None}
        about = {"row": name, "label": f"row {name}", "teacher": teacher, "seeds": [1, 2]}
        return {**about, "accuracy": accuracy, "accuracy_spread": 0.7, "accuracy_by_seed": seeds}

    return {
        "study": "small",
        "title": "gains",
        "rows": [
            row("cpt", None, 10),
            row("by-strong", "strong", 11),
            row("by-weak", "weak", 8),
            row("by-unscored", "unscored", 10.5),
        ],
        "teachers": {
            "strong": {"label": "Strong 2B", "bits_per_byte": 0.8},
            "weak": {"label": "Weak 1B", "bits_per_byte": 1.0},
        },
        "student_bits_per_byte": 0.95,
        "comparisons": [
            entry("by-strong", "cpt", 1.0),
            entry("by-weak", "cpt", -2.0),
            entry("by-unscored", "cpt", 0.5),
            entry("by-strong", "by-weak", 3.0),
        ],
    }


def test_strength_figure_shows_the_rows_with_a_scored_teacher(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = FigurePlan(kind="strength", reference="cpt")
    drawn = draw(strength_table(), plan, tmp_path / "s.svg").read_text()
    for text in ("row by-strong", "Strong 2B", "Weak 1B", "row cpt", "the student itself"):
        assert drawn.count(f">{text}<") == 1
    assert "row by-unscored" not in drawn
    with pytest.raises(StudyError, match="Nothing to draw yet"):
        draw({**strength_table(), "comparisons": []}, plan, tmp_path / "s.svg")


def test_strength_is_the_teachers_own_accuracy_where_all_were_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan, table = FigurePlan(kind="strength", reference="cpt"), strength_table()
    table["rows"].append({"row": "teacher-strong", "teacher": "strong", "accuracy": 60.0})
    assert "own accuracy" not in draw(table, plan, tmp_path / "s.svg").read_text()
    table["rows"].append({"row": "teacher-weak", "teacher": "weak", "accuracy": 20.0})
    drawn = draw(table, plan, tmp_path / "s.svg").read_text()
    assert "own accuracy" in drawn and "the student itself" not in drawn


def test_strength_is_of_all_seeds_against_the_mean_of_the_reference(tmp_path: Path) -> None:
    """The rows have no seed in common with it."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    table = strength_table()
    table["comparisons"][1]["all_seeds"]["interval"] = None  # a row with one seed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "teacher_strength", lambda points, *_, **__: drawn.extend(points))
        draw(table, FigurePlan(kind="strength", reference="cpt"), tmp_path / "s.svg")
    assert [(point.gain, point.seed_gains) for point in drawn] == [
        (1, [0.5, 1.5]),
        (-2, [-2.5, -1.5]),
    ]
    assert [point.interval for point in drawn] == [(0, 2), None]
    assert figures.teacher_strength(drawn, tmp_path / "s.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("strengths", "gains"),
    [([0.8, 0.815, 1.0], [1, 1.3, 1.6]), ([0.8, 0.8, 0.8], [0.3, 0.7, 0.7])],
    ids=["nearly the same strength", "one teacher"],
)
def test_labels_of_the_strength_figure_do_not_overlap(
    tmp_path: Path, strengths: list[float], gains: list[float]
) -> None:
    """Gains close to each other."""
    pytest.importorskip("matplotlib")
    boxes: list[Any] = []

    def measure(matplotlib: Any, figure: Any, path: Path) -> Path:
        texts = [text for text in figure.axes[0].texts if "guided" in text.get_text()]
        boxes.extend(text.get_window_extent() for text in texts)
        return path

    points = [
        figures.TeacherPoint(
            name=f"guided by teacher {n}, 40 %\na teacher with a long name",
            bits_per_byte=strength,
            gain=gain,
            interval=(gain - 0.8, gain + 0.8),
        )
        for n, (strength, gain) in enumerate(zip(strengths, gains, strict=True))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save_figure", measure)
        figures.teacher_strength(points, tmp_path / "s.png")
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[:at])


def test_lines_in_panels_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = {
        "kind": "lines",
        "panels": [
            {
                "x_label": label,
                "x": {"guided": 1, "other": 4, "chunk-8": 16},
                "series": {f"{label} line": ["guided", "other", "chunk-8"]},
                "reference": "cpt",
                "log_x": label == "right",
            }
            for label in ("left", "right")
        ],
    }
    plan = small_study(tmp_path / "materials", figure=figure).figure
    rows = [
        {"row": "cpt", "label": "plain", "accuracy": 3.0, "accuracy_spread": None},
        {"row": "guided", "label": "by one", "accuracy": 4.0, "accuracy_spread": 0.5},
        {"row": "other", "label": "by another", "accuracy": 2.0, "accuracy_spread": None},
    ]
    table = {"study": "small", "title": "two panels", "rows": rows}
    drawn = draw(table, plan, tmp_path / "lines.svg").read_text()
    for text in ("left", "right", "left line", "right line", "two panels"):
        assert drawn.count(f">{text}<") == 1
    assert drawn.count(">plain<") == 2  # the reference, by its label
    assert drawn.count(">16<") == 2  # a place where nothing has been run yet


def test_a_frontier_has_a_curve_over_the_learning_rates_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {
            "row": name,
            "label": f"row {name}",
            "accuracy": right,
            "accuracy_spread": 0.5,
            "bits_per_byte": {"text": {"mean": bits, "spread": None}},
        }
        for name, right, bits in (("plain", 3.0, 0.8), ("distilled", 4.0, 0.7), ("once", 2.0, 0.9))
    ]
    measured = {"validation_accuracy": 3.0, "validation_bits_per_byte": 0.8}
    tuning: list[dict[str, Any]] = [
        {"group": f"g-{name}", "row": name, "learning_rate": rate, **measured}
        for name, rates in {"distilled": (4.5e-4, 1.35e-3), "once": (1e-5,)}.items()
        for rate in rates
    ]
    tuning.append({"group": "by-bits", "row": "plain", "learning_rate": 3e-4})
    plan = FigurePlan(kind="frontier", reference="plain", series={"one": ["plain", "distilled"]})
    table = {"study": "small", "title": "", "rows": rows, "tuning": tuning}
    drawn = draw(table, plan, tmp_path / "f.svg").read_text()
    # a point has the number of its row in both panels; one rate, or no accuracy, makes no curve
    assert [drawn.count(f">{number}<") for number in (1, 2, 3)] == [1, 3, 1]
    assert all(drawn.count(f">{rate}<") == 1 for rate in ("4.5e-4", "1.35e-3"))
    assert drawn.count("validation") == 2 and ">2  row distilled<" in drawn
    alone = draw({**table, "tuning": []}, plan, tmp_path / "f.svg").read_text()
    assert "validation" not in alone and alone.count(">2<") == 1


def test_bars_say_the_number_of_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(strength_table(), FigurePlan(reference="cpt"), tmp_path / "b.svg").read_text()
    assert ">row by-weak<" in drawn and ">8.00 ± 0.70  (2)<" in drawn


def test_teachers_carry_their_labels(home: StudyTasks) -> None:
    stores = home.folder / "stores"
    stores.mkdir(parents=True)
    for name in ("strong", "weak"):
        (stores / f"{name}.json").write_text('{"bits_per_byte": 0.9}')
    pretend_runs(home)
    teachers = study_table(home)["teachers"]
    assert {name: t["label"] for name, t in teachers.items()} == {
        "strong": "a strong one",
        "weak": "weak",
    }


def test_studies_are_public_names() -> None:
    import vocagnolm_studies
    from vocagnolm_studies.run import run_study

    assert vocagnolm_studies.run_study is run_study and vocagnolm_studies.load_study is load_study
    assert {"run_study", "load_study"} <= set(dir(vocagnolm_studies))


def test_conversations_are_measured_in_their_templates(tmp_path: Path) -> None:
    """Over the contents: the marks of the two templates differ, and have no text."""
    talks = chat_kit.conversations(12)
    corpus = chat_kit.write_conversations(tmp_path / "talks.jsonl", talks)
    marks = {"student": ["<|im_start|>", "<|im_end|>"], "teacher": ["<|body|>", "<|eot|>"]}
    sources = {"student": chat_kit.CHATML, "teacher": chat_kit.LLAMA_LIKE}
    for name, kind in (("student", "bytes"), ("teacher", "pieces")):
        save_tokenizer(tmp_path / kind, kind=kind)
        folder = tmp_path / name
        chat_kit.save_chat_tokenizer(folder, tmp_path / kind, sources[name], marks[name])
    call = ["study", "granularity", "--student", tmp_path / "student", "--corpus", corpus, "--json"]
    found = {}
    for teacher in ("student", "teacher"):
        more = ["--teacher", tmp_path / teacher, "--chunks", "1,4,64"]
        result = CliRunner().invoke(app, [str(one) for one in (*call, *more)])
        assert result.exit_code == 0, result.output
        found[teacher] = json.loads(result.stdout)
        assert [one["conversations"] for one in found[teacher]["templates"]] == [12, 12]
        assert found[teacher]["sequences"] == 12
        whole, *finer = [point["iou"] for point in found[teacher]["chunks"]]
        assert whole > 0.99 > finer[0] > finer[1] > 0
        assert found[teacher]["token_level"]["ios"] == pytest.approx(1)
    assert found["student"]["token_level"]["iou"] == 1  # the same tokens
    assert found["teacher"]["token_level"]["iou"] < 0.9
    base = {"corpus": {"files": [str(corpus)]}, "data": {"block_size": 64}}
    recipe = recipe_from_dict({**base, "student": {"tokenizer": str(tmp_path / "student")}})
    plan = GranularityPlan(teacher="teacher", chunks=[4])
    packed = corpus_granularity(recipe, str(tmp_path / "teacher"), plan)
    assert packed.sequences > 12 and packed.points[-1].ios == pytest.approx(1, abs=0.01)
