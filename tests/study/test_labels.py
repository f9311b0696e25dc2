"""Do the losses tell right from wrong? Areas by hand, and a corpus whose labels are in its text."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from made import sentencepiece_bpe
from study_kit import save_model, write_materials
from typer.testing import CliRunner

from vocagnolm.alignment import TokenSpans
from vocagnolm.cli import app
from vocagnolm.errors import StudyError, UsageError
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm_studies.labels import LabelFields, area, areas, text_parts
from vocagnolm_studies.selection import SelectionStudy, selection_study


def brute_area(values: np.ndarray, label: np.ndarray, groups: np.ndarray | None) -> float:
    won = []
    for i, j in itertools.product(np.flatnonzero(~label), np.flatnonzero(label)):
        if groups is None or groups[i] == groups[j]:
            won.append((values[i] > values[j]) + (values[i] == values[j]) / 2)
    return float(np.mean(won))


@pytest.mark.parametrize("seed", range(3))
def test_areas_count_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    label = rng.random(120) < 0.4
    values = np.round(rng.normal(size=120) - 0.7 * label, 1)  # with ties
    groups = rng.integers(0, 15, 120)
    found = area(values, label, groups)
    assert found.value == pytest.approx(brute_area(values, label, None))
    assert found.within == pytest.approx(brute_area(values, label, groups))
    assert found.low < found.value < found.high
    assert found.within_low is not None and found.within_high is not None
    assert found.within_low < found.within < found.within_high
    assert area(values, label, None).within is None


def test_an_area_needs_documents_of_both_labels() -> None:
    label = np.arange(60) < 30
    known = np.where(np.arange(60) < 15, np.nan, np.arange(60.0))
    assert areas({"half": known}, label, None) == {}
    assert areas({"all": np.arange(60.0)}, label, None)["all"].value == 1.0


def test_parts_of_a_solution() -> None:
    text = (
        b"Question: what is 2 = 2?\nAnswer: 3 * 4 = 12, then 12+1 = $13.50.\nThe answer is $13.50."
    )
    parts = text_parts(text, b"Answer:")
    assert [text[a:b] for a, b in parts["results"]] == [b"12", b"13.50"]
    assert [text[a:b] for a, b in parts["answer"]] == [b"13.50"]
    assert text[slice(*parts["text"][0])].startswith(b" 3 * 4")
    assert text_parts(text, None)["text"] == [(0, len(text))]
    assert next(text[a:b] for a, b in text_parts(text, b"nowhere")["results"]) == b"2"
    letter = b"so it is B. The answer is (B)."
    assert [letter[a:b] for a, b in text_parts(letter, None)["answer"]] == [b"B"]
    tokens = TokenSpans(np.arange(3, dtype=np.int32), np.array([[0, 3], [3, 5], [5, 9]]), 9, 0)
    assert tokens.inside([(4, 6)]).tolist() == [False, True, True]


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents in pairs of one question; the wrong ones are noise."""
    folder = write_materials(tmp_path_factory.mktemp("labels") / "materials")
    save_model(folder / "teacher", sentencepiece_bpe(400), seed=2, hidden=48)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(40):
        for right in (True, False):
            words = ["the sum is even"] * 6 if right else list(map(str, rng.integers(0, 10**6, 6)))
            text = f"Question: {number}?\nAnswer: {' '.join(words)} 1 + 1 = 2. The answer is 2."
            rows.append({"text": text, "correct": right, "question": number, "writer": "ab"[right]})
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "labelled.jsonl").write_text("".join(lines), "utf-8")
    score_corpus(
        str(folder / "teacher"),
        [str(folder / "labelled.jsonl")],
        folder / "label-store",
        settings=ScoreSettings(device="cpu", context=128, threads=1),
    )
    return folder


def study_of(materials: Path, **fields: object) -> SelectionStudy:
    return selection_study(
        materials / "student",
        materials / "label-store",
        str(materials / "labelled.jsonl"),
        tokens=100_000,
        block_size=64,
        scope_blocks=4,
        device="cpu",
        labels=LabelFields(**fields),  # type: ignore[arg-type]
    )


def test_labels_of_a_corpus(materials: Path) -> None:
    labels = study_of(
        materials, label="correct", group="question", by=["writer"], after="Answer:"
    ).labels
    assert labels is not None
    assert labels.documents == 80 and labels.false_documents == 40
    found = labels.areas["text"]["student loss"]
    assert found.false + found.true >= 78  # what the last block cuts off is not seen
    assert {"text", "results", "answer"} == set(labels.areas)
    assert all(area.within is not None for area in labels.areas["answer"].values())
    assert labels.by == {"writer": {}}  # each writer has one label only
    assert set(labels.false_tokens) == {
        "all", "reference", "stretch", "no_teacher", "random", "reducible",
    }  # fmt: skip
    assert 0.3 < labels.false_tokens["all"] < 0.7
    assert labels.false_tokens["random"] == pytest.approx(labels.false_tokens["all"], abs=0.05)


def test_a_label_must_be_true_or_false(materials: Path) -> None:
    with pytest.raises(StudyError, match="'writer' of document 0 holds 'b'"):
        study_of(materials, label="writer")


def test_labels_on_the_command_line(materials: Path) -> None:
    command = ["study", "selection", "--student", str(materials / "student"), "--device", "cpu"]
    command += ["--store", str(materials / "label-store"), "--block-size", "64"]
    command += ["--corpus", str(materials / "labelled.jsonl"), "--scope-blocks", "4"]
    asked = ["--label", "correct", "--label-group", "question", "--label-after", "Answer:"]
    figure = materials / "labels.svg"
    shown = CliRunner().invoke(app, [*command, *asked, "--plot-labels", str(figure)])
    assert shown.exit_code == 0, shown.output
    assert "answer: teacher loss" in figure.read_text()
    assert "reducible share" in shown.stdout and "within a group" in shown.stdout
    told = CliRunner().invoke(app, [*command, *asked, "--json"])
    found = json.loads(told.stdout)["labels"]
    assert found["areas"]["text"]["teacher loss"]["false"] > 30
    alone = CliRunner().invoke(app, [*command, "--label-group", "question"])
    assert isinstance(alone.exception, UsageError)
