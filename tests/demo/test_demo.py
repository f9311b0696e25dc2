"""The demo's material is what it says, and the whole pipeline runs."""

import importlib
import itertools
import random
import re
import sys
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from faults_kit import LONG
from typer.testing import CliRunner

from vocagnolm import statistics
from vocagnolm.alignment import align, load_tokenizer, shares
from vocagnolm.cli import app
from vocagnolm.demo import corpus, pipeline, students
from vocagnolm.demo.corpus import draw_problem
from vocagnolm.demo.students import exact_answers, read_answer
from vocagnolm.train.loop import TrainingLoop
from vocagnolm_studies.run import run_study

ROOT = Path(__file__).parents[2]


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


def script(name: str) -> ModuleType:
    """Found as Python finds a script's neighbours when it runs one."""
    if str(ROOT / "runs") not in sys.path:
        sys.path.append(str(ROOT / "runs"))
    return importlib.import_module(name)


class InThisProcess:
    """In place of a pool of processes, which take longer to start than these students to train."""

    def __init__(self, workers: int):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, job, *arguments) -> Future:
        future = Future()
        future.set_result(job(*arguments))
        return future


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


def test_one_thing_is_changed_at_a_time_and_shown(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    why = script("demo_why")
    settings = list({one for sweep in why.SWEEPS.values() for one in sweep.values()})
    for one in settings:
        assert sum(one.shares.values()) == pytest.approx(1)
        changed = sum(getattr(one, key) != getattr(why.USUAL, key) for key in vars(one))
        assert changed <= 1 or (one.wrong == 0 and changed == 2)
    _, problems = why.make_corpora(tmp_path, [replace(why.USUAL, documents=40)])
    learned = (tmp_path / why.USUAL.corpus / "corpus.jsonl").read_text()
    assert len(problems) == why.PROBLEMS
    assert not any(problem.question in learned for problem in problems)
    found = {
        (one, method, seed): {"exact": 0.5 + 0.1 * seed, "bits_per_byte": 0.2}
        for one in settings
        for method in why.METHODS
        for seed in range(2)
    }
    why.write_results(tmp_path, found, why.SWEEPS, 2)
    assert (
        "| 30 | 55.0 ± 7.1 (0.200) | 55.0 ± 7.1 (0.200) | 55.0 ± 7.1 (0.200) |"
        in capsys.readouterr().out
    )
    assert (tmp_path / "why.svg").exists()
    plain = {
        (one, "cpt", 0): found[why.USUAL, "cpt", 0]
        for one in why.LONG["tokens, thousands"].values()
    }
    why.write_results(tmp_path, plain, why.LONG, 1)
    assert "| tokens, thousands | plain pretraining |" in capsys.readouterr().out


def test_rules_of_distillation_differ_in_the_objective_or_in_the_teacher(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    rules = script("demo_distill")
    recipes = {name: rules.recipe_of(tmp_path, name, 4e-3, 0) for name in rules.RULES}
    told = [
        (str(recipe.objective), recipe.store.path, rules.RULES[name].targets)
        for name, recipe in recipes.items()
    ]
    assert len(set(told)) == len(told)
    # blocks are shared where a prepared column serves both, and nowhere else
    of = {name: recipe.data.blocks for name, recipe in recipes.items()}
    assert of["half"] == of["one"] == of["shuffled"] == of["quarter"]
    assert len({of[name] for name in ("half", "k1", "k16", "drawn", "starts", "own", "cpt")}) == 7
    rows = [
        {
            "row": name,
            "label": rule.label,
            "learning_rate": 4e-3,
            "tuning": {},
            "exact": [50.0 + place, 51.0 + place],
            "clean": [0.23, 0.24],
        }
        for place, (name, rule) in enumerate(rules.RULES.items())
    ]
    rules.write_results(tmp_path, rows)
    said = capsys.readouterr().out
    assert "| distilled, mix 0.5 | 0.004 | 54.5 ± 0.7 | +4.0 ± 0.0 | 0.2350 ± 0.0071 |" in said
    assert (tmp_path / "demo-distill.svg").exists()


def test_peers_read_the_same_documents_in_both_vocabularies(tmp_path, capsys) -> None:
    peers = script("demo_peers")
    texts = ["Ada has 3 boxes.", "Uma sells 14 coins and 2 stamps."]
    for model in (students.START, students.TEACHER):
        rows = [peers.row(load_tokenizer(model), text) for text in texts]
        ids, labels, spans = peers.padded(rows)
        for text, found, offsets, label in zip(texts, ids, spans, labels, strict=True):
            assert int(found[0]) == load_tokenizer(model).vocabulary[students.END]
            learned = label != peers.IGNORED
            assert not learned[0] and (label[learned] == found[learned]).all()
            ends = offsets[learned].tolist()
            assert ends[0][0] == 0 and ends[-1][1] == len(text)
            assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))
    lengths = [300, 500, 400, 700]
    plan = list(peers.batches(lengths, 4000, 1))
    steps = [sum(lengths[document] for document in batch) for batch in plan]
    assert all(tokens >= peers.STEP_TOKENS for tokens in steps[:-1])
    assert sum(steps[:-1]) < 4000 <= sum(steps)
    assert sorted(itertools.chain(*plan))[:2] == [0, 0]  # a second pass
    assert plan == list(peers.batches(lengths, 4000, 1)) != list(peers.batches(lengths, 4000, 2))
    plain, longer = (
        peers.recipe_of(tmp_path, name, 2e-3, 250_000, 0) for name in ("cpt", "longer-masked")
    )
    assert (longer.data.block_size, longer.data.document_mask) == (512, True)
    assert longer.data.blocks != plain.data.blocks and not plain.data.document_mask
    assert longer.train.batch_blocks * 512 == plain.train.batch_blocks * 128 == peers.STEP_TOKENS
    rows = [
        {
            "row": name,
            "label": rule.label,
            "tokens": 250_000,
            "tokens_per_second": 1000.0 / (1 + place),
            "learning_rate": 4e-3,
            "exact": [50.0 + place, 51.0 + place],
            "clean": [0.23, 0.24],
        }
        for place, (name, rule) in enumerate(peers.RULES.items())
    ]
    peers.write_results(tmp_path, rows, [rows[0], rows[4]])
    said = capsys.readouterr().out
    assert "| ULD, online | 0.004 | 54.5 ± 0.7 | +4.0 ± 0.0 | 0.2350 ± 0.0071 |" in said
    assert said.count("uld: 250,000 tokens, 0.200 x the speed of every token") == 2


def test_teachers_are_compared_by_their_own_measures(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    compared = script("demo_teachers")
    *_, own = compared.TEACHERS.values()
    assert own.tokenizer(iter(())).get_vocab() == load_tokenizer(students.START).vocabulary
    rows: list[dict[str, Any]] = [
        {"teacher": None, "method": method, "by_seed": [50.0, 60.0]} for method in compared.CONTROLS
    ]
    known = {"teacher_exact": 90.0, "bits_per_byte_corpus": 0.8, "bits_per_byte_clean": 0.2}
    known |= {"tells_wrong": 0.9, "tells_wrong_low": 0.85, "tells_wrong_high": 0.95}
    rows += [
        {"teacher": name, "method": rule, "by_seed": seeds, **known}
        for rule, seeds in zip(
            compared.RULES, ([70.0, 80.0], [80.0, 90.0], [60.0, 70.0]), strict=True
        )
        for name in compared.TEACHERS
    ]
    compared.write_results(tmp_path, rows)
    lines = capsys.readouterr().out.splitlines()
    assert "| none: plain pretraining |  |  |  |  | 55.0 ± 7.1 |  |  |" in lines
    told = "90.0 | 0.800 | 0.200 | 0.900 (0.850 to 0.950)"
    assert f"| 100 steps | {told} | 75.0 ± 7.1 | 85.0 ± 7.1 | 65.0 ± 7.1 |" in lines
    name = next(iter(compared.TEACHERS))
    weighed = compared.recipe_of(tmp_path, name, "reducible", 1)
    published = compared.recipe_of(tmp_path, name, "guided", 1)
    assert weighed.objective.weighting == "reducible" != published.objective.weighting
    assert weighed.run.folder != published.run.folder
    assert weighed.data.blocks != published.data.blocks
    assert (tmp_path / "teachers.svg").exists()


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
