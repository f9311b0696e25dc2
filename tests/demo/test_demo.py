"""The demo's material is what it says, and the whole pipeline runs."""

import itertools
import random
import re
from functools import partial

import pytest
from demo_kit import InThisProcess
from faults_kit import LONG
from typer.testing import CliRunner

from vocagnolm.alignment import align, load_tokenizer, shares
from vocagnolm.base import statistics
from vocagnolm.cli import app
from vocagnolm.demo import corpus, pipeline, students
from vocagnolm.demo.corpus import draw_problem
from vocagnolm.demo.students import exact_answers, read_answer
from vocagnolm.train.loop import TrainingLoop
from vocagnolm_studies.run import run_study


def documents(n: int) -> list[tuple[str, str]]:
    return list(itertools.islice(corpus.noisy_documents(3), n))


def test_the_corpus_comes_from_its_seed_alone() -> None:
    assert documents(50) == documents(50)
    counts = {kind: sum(k == kind for k, _ in documents(2000)) for kind in corpus.SHARES}
    for kind, share in corpus.SHARES.items():
        assert counts[kind] / 2000 == pytest.approx(share, abs=0.05)


def test_solutions_are_right_or_wrong_as_their_kind_says() -> None:
    compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    right_lines = dict.fromkeys(corpus.SHARES, 0)
    lines = dict.fromkeys(corpus.SHARES, 0)
    for kind, text in documents(800):
        for left, operator, right, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", text):
            lines[kind] += 1
            right_lines[kind] += compute[operator](int(left), int(right)) == int(result)
        if kind == corpus.JUNK:
            assert "answer" not in text
    assert right_lines[corpus.CLEAN] == lines[corpus.CLEAN] > 500
    assert right_lines[corpus.WRONG] < 0.25 * lines[corpus.WRONG]


def test_no_problem_has_a_negative_answer() -> None:
    chance = random.Random(0)
    assert all(draw_problem(chance).answer > 0 for _ in range(2000))


def test_held_out_problems_differ_and_are_graded() -> None:
    learned_from = corpus.corpus_documents(2000)
    problems = corpus.held_out_problems(50, learned_from)
    assert len({problem.question for problem in problems}) == 50
    learned = "".join(text for _, text in learned_from)
    assert not any(problem.question in learned for problem in problems)
    right = [read_answer(problem.solution()) for problem in problems]
    assert exact_answers(right, problems) == [1] * 50
    assert exact_answers([None] * 50, problems) == [0] * 50
    assert read_answer("The answer is 12. The answer is 13.") == 12
    assert read_answer("The answer is twelve.") is None


def test_the_shipped_tokenizers_are_unlike_and_tile_the_corpus() -> None:
    student, teacher = load_tokenizer(students.START), load_tokenizer(students.TEACHER)
    assert (student.kind, teacher.kind) == ("SentencePiece BPE", "byte-level BPE")
    texts = [text for _, text in documents(100)]
    pairs = zip(student.spans_batch(texts), teacher.spans_batch(texts), strict=True)
    one_to_many = 0
    for ours, theirs in pairs:
        assert ours.lost_bytes == theirs.lost_bytes == 0
        found = shares(align(ours.spans, theirs.spans))
        assert found.unmapped == 0
        one_to_many += found.one_to_many
    assert one_to_many > 0


def record(exact: float, bits: float = 0.5) -> students.Record:
    """Of 100 problems and ten texts, of which the model solves these."""
    right = [int(at < round(100 * exact)) for at in range(100)]
    documents = [[bits * size, size] for size in range(10, 20)]
    return {"exact": exact, "bits_per_byte": bits, "answers": right, "documents": documents}


@pytest.mark.parametrize(
    ("guided", "control", "words"),
    [
        ([0.6, 0.7], [0.5, 0.5], r"without a teacher 50\.0 \(\+15\.0, \+[\d.]+ to \+[\d.]+\)"),
        ([0.4, 0.3], [0.5, 0.5], r"without a teacher 50\.0 \(-15\.0, -[\d.]+ to -[\d.]+\)"),
        ([0.6, 0.4], [0.5, 0.5], r"50\.0 \(\+0\.0, -[\d.]+ to \+[\d.]+, not clear\)"),
    ],
)
def test_the_verdict_says_what_the_numbers_say(guided, control, words) -> None:
    text = pipeline.verdict(
        {"cpt": list(map(record, control)), "guided": list(map(record, guided))}
    )
    assert re.search(words, text), text
    assert text.startswith("Guided by the teacher: ") and "0.5000 bits per byte" in text
    assert text.count("(+0.0000, +0.0000 to +0.0000, not clear)") == 1


def test_the_results_keep_every_seed_and_have_intervals() -> None:
    measured = {"start": [record(0.0)], "guided": [record(0.6), record(0.7, 0.4)]}
    results = pipeline.results_of(measured)
    start, guided = results.groups
    assert (start.name, guided.about) == ("start", "guided by the teacher")
    assert guided.values == [
        [pytest.approx(60), pytest.approx(70)],
        [pytest.approx(v) for v in (0.5, 0.4)],
    ]
    low, high = guided.intervals[0]
    assert 50 < low < 60 < 70 < high < 80  # over seeds and problems
    assert start.intervals[0] == (0.0, pytest.approx(3.7, abs=0.05))  # Wilson, of none in 100
    assert pipeline.mean_and_spread([1.0, 2.0], 1) == "1.5 ± 0.7"


def test_the_demo_runs_from_end_to_end(tmp_path, capsys, monkeypatch) -> None:
    if not LONG:
        monkeypatch.setattr(pipeline, "WorkerPool", InThisProcess)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    few = partial(statistics.bootstrap_interval, resamples=100)
    monkeypatch.setattr(statistics, "bootstrap_interval", few)
    budget = students.Budget(tokens=2048, documents=40, problems=4, seeds=1)
    pipeline.run_demo(tmp_path, budget)
    said = " ".join(capsys.readouterr().out.split())  # a terminal may wrap anywhere
    assert "Guided by the teacher: " in said and "Distilled from the teacher: " in said
    page = (tmp_path / "report.html").read_text()
    assert "Does a teacher with another vocabulary help?" in page
    runs = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    assert runs == [
        *("cpt-0", "distill-0", "guided-0", "random-0"),
        *("written-distilled-0", "written-plain-0"),
    ]
    assert "write: the teacher answered " in said
    assert "Distilled from what the teacher wrote: " in said and "on its text alone" in said
    # again: everything is there
    monkeypatch.setattr(TrainingLoop, "run", None)
    monkeypatch.setattr(pipeline, "make_page", lambda *given: tmp_path / "report.html")
    pipeline.run_demo(tmp_path, budget)
    assert "shows every token." in " ".join(capsys.readouterr().out.split())


def test_the_toy_study_runs_on_the_materials_of_the_demo(tmp_path) -> None:
    materials = tmp_path / "materials"
    done = CliRunner().invoke(app, ["demo", "--materials", str(materials)])
    assert done.exit_code == 0 and done.stdout == f"{materials}\n"
    for name, lines in (("corpus", 60), ("held-out", 3), ("requests", 4)):
        path = materials / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    few = [
        "use=[cpt,guided,kld,uld-0.5]",
        "base.train.tokens=1024",
        "teachers.same.train.run.seed=9",
    ]
    few += [f"rows.{name}.seeds=[1]" for name in ("cpt", "guided", "kld", "uld")]
    study = ["comparisons=[[guided,cpt]]", *few]
    table, text = run_study("toy", tmp_path / "out", materials=materials, overrides=study)
    assert [row["row"] for row in table["rows"]] == ["cpt", "guided", "kld", "uld-0.5"]
    assert all(row["accuracy"] is not None for row in table["rows"])
    assert table["missing"] == [] and "guided - cpt" in text
