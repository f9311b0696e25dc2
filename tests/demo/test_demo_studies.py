"""The studies in the demo's setting (`runs/demo.py`) run from end to end on a few tokens."""

import itertools
import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from demo_kit import InThisProcess
from faults_kit import LONG
from safetensors.torch import load_file

from vocagnolm.alignment import load_tokenizer
from vocagnolm.base.files import json_digest, write_text
from vocagnolm.demo import students
from vocagnolm.demo.corpus import Problem
from vocagnolm.recipe import Recipe

sys.path.append(str(Path(__file__).parents[2] / "runs"))  # scripts find their neighbours there

TOKENS = 2048


def as_if_trained(recipe: Recipe, held_out: Path, problems: list[Problem]) -> students.Record:
    """In place of training: what a run leaves, from numbers that its recipe decides. What it would
    read has to be there."""
    blocks, folder = Path(recipe.data.blocks or ""), Path(recipe.run.folder or "")
    assert (blocks / "manifest.json").is_file() and held_out.is_file() and problems
    shutil.copytree(recipe.student.model or "", folder / "model", dirs_exist_ok=True)
    write_text(folder / "metrics.jsonl", json.dumps({"step": 1, "tokens_per_second": 500.0}) + "\n")
    tree = recipe.to_dict()
    shown = [tree["objective"], tree["optimizer"], tree["store"], tree["data"], tree["run"]["seed"]]
    number = int(json_digest([*shown, recipe.train.tokens])[:6], 16)
    return {"exact": number % 4 / 4, "bits_per_byte": 0.2 + number / 1e9}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with students that read 2,048 tokens and solve four problems. They are trained in
    a long run alone."""
    pytest.importorskip("matplotlib")
    import demo

    budget = students.Budget(tokens=TOKENS, documents=40, problems=4, seeds=1)
    for name, value in {
        "BUDGET": budget,
        "WorkerPool": InThisProcess,
        "TUNING_PROBLEMS": 4,
        "DISTILL_RATES": (2e-3, 4e-3),
        "HEAL_RATES": (2e-3,),
        "HEAL_TOKENS": (1024, TOKENS),
        "PEER_RATES": (2e-3,),
    }.items():
        monkeypatch.setattr(demo, name, value)
    if not LONG:
        monkeypatch.setattr(students, "train_and_measure", as_if_trained)
        measured = {"exact": 0.25, "bits_per_byte": 0.3}
        monkeypatch.setattr(students, "measure", lambda *given: dict(measured))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return demo


def run(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, study: str, seeds: int = 2
) -> None:
    words = ["demo.py", study, "--out", str(out), "--seeds", str(seeds), "--workers", "1"]
    monkeypatch.setattr("sys.argv", words)
    demo.main()


def only(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, rules: str, *names: str) -> None:
    monkeypatch.setattr(demo, rules, {name: getattr(demo, rules)[name] for name in names})


def test_why_changes_one_thing_at_a_time(demo, monkeypatch, tmp_path, capsys) -> None:
    for setting in {s for sweep in demo.SWEEPS.values() for s in sweep.values()}:
        assert sum(setting.shares.values()) == pytest.approx(1)
        changed = sum(getattr(setting, key) != getattr(demo.USUAL, key) for key in vars(setting))
        assert changed <= 1 or (setting.wrong == 0 and changed == 2)
    few = replace(demo.USUAL, tokens=TOKENS, documents=40)
    sweeps = {
        "tokens, thousands": {1.024: replace(few, tokens=1024), 2.048: few},
        "loss divided by": {"all": few, "the selected": replace(few, normalise="selected")},
    }
    monkeypatch.setattr(demo, "SWEEPS", sweeps)
    run(demo, monkeypatch, tmp_path, "why")
    lines = capsys.readouterr().out.splitlines()
    assert "| loss divided by | plain pretraining | random 40 % | guided, 40 % |" in lines
    assert sum(line.startswith("| the selected | ") for line in lines) == 1
    rows = {row["row"]: row for row in json.loads((tmp_path / "why.json").read_text())["rows"]}
    assert len(rows) == 12 and all(len(row["by_seed"]) == 2 for row in rows.values())
    guided = {n.removesuffix("-guided"): r["bits_per_byte_by_seed"] for n, r in rows.items()}
    assert guided["loss divided by-all"] == guided["tokens, thousands-2.048"]
    assert guided["loss divided by-all"] != guided["loss divided by-the selected"]
    problems = (tmp_path / "held-out.jsonl").read_text()
    learned = (tmp_path / few.corpus / "corpus.jsonl").read_text()
    assert problems and not any(line in learned for line in problems.splitlines())
    assert (tmp_path / "why.svg").exists()


def test_teachers_are_made_measured_and_taught_from(demo, monkeypatch, tmp_path, capsys) -> None:
    own = demo.TEACHERS[demo.OWN_VOCABULARY]
    assert own.tokenizer(iter(())).get_vocab() == load_tokenizer(students.START).vocabulary
    names = (demo.USUAL_TEACHER, demo.OWN_VOCABULARY)
    only(demo, monkeypatch, "TEACHERS", *names)
    shipped = partial(shutil.copytree, students.TEACHER)
    monkeypatch.setattr("vocagnolm_studies.labels.RESAMPLES", 20)
    monkeypatch.setattr(demo.demo_models, "make_model", lambda plan, folder: shipped(folder))
    # enough pages of either label in the sample
    monkeypatch.setattr(demo, "BUDGET", replace(demo.BUDGET, tokens=4 * TOKENS, documents=120))
    run(demo, monkeypatch, tmp_path, "teachers", seeds=1)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| none: random 40 % |  |  |  |  | ") for line in lines) == 1
    rows = json.loads((tmp_path / "teachers.json").read_text())["rows"]
    assert len(rows) == 2 + 3 * len(names)
    taught = [row for row in rows if row["teacher"]]
    assert all(0 <= row["tells_wrong"] <= 1 and row["bits_per_byte_clean"] > 0 for row in taught)
    (line,) = [line for line in lines if line.startswith(f"| {demo.OWN_VOCABULARY} | ")]
    assert f"| {taught[1]['bits_per_byte_corpus']:.3f} |" in line
    assert (tmp_path / "teachers.svg").exists()


def test_rules_of_distillation_differ_in_the_objective_or_in_the_teacher(demo, tmp_path) -> None:
    rules = demo.DISTILL_RULES
    recipes = {n: demo.distill_recipe(tmp_path, n, TOKENS, 4e-3, 0) for n in rules}
    told = [(str(r.objective), r.store.path, rules[n].targets) for n, r in recipes.items()]
    assert len(set(told)) == len(told)
    # blocks are shared where a prepared column serves both, and nowhere else
    of = {name: recipe.data.blocks for name, recipe in recipes.items()}
    assert of["half"] == of["one"] == of["shuffled"] == of["quarter"]
    assert len({of[name] for name in ("half", "k1", "k16", "drawn", "starts", "own", "cpt")}) == 7


def test_distill_tunes_each_rule_and_pairs_the_seeds(demo, monkeypatch, tmp_path, capsys) -> None:
    names = ("cpt", "guided", "quarter", "half", "one", "own", "shuffled", "smoothed")
    only(demo, monkeypatch, "DISTILL_RULES", *names)
    run(demo, monkeypatch, tmp_path, "distill")
    rows = {r["row"]: r for r in json.loads((tmp_path / "demo-distill.json").read_text())["rows"]}
    assert list(rows) == list(demo.DISTILL_RULES)
    for row in rows.values():
        assert list(row["tuning"]) == ["0.002", "0.004"] and len(row["clean"]) == 2
        best = max(row["tuning"], key=lambda rate: row["tuning"][rate])
        assert row["learning_rate"] == float(best)
    # each control reads blocks or a store of its own
    assert len({tuple(row["clean"]) for row in rows.values()}) == len(rows)
    plain, half = rows["cpt"]["clean"], rows["half"]["clean"]
    gap = sum(a - b for a, b in zip(half, plain, strict=True)) / 2
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("| distilled, mix 0.5 |")]
    assert f"| {gap:+.4f} ± " in line
    assert (tmp_path / "demo-distill.svg").exists()


def test_heal_rounds_the_layers_and_nothing_else(demo, monkeypatch, tmp_path, capsys) -> None:
    only(demo, monkeypatch, "HEAL_RULES", "cpt", "own-half")
    run(demo, monkeypatch, tmp_path, "heal", seeds=1)
    assert "rounded: " in capsys.readouterr().out
    folders = (tmp_path / "healthy-run/model", tmp_path / "damaged")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    for name, weight in after.items():
        values = max(len(row.unique()) for row in weight.reshape(len(weight), -1))
        is_layer = ".layers." in name and weight.ndim == 2
        assert values <= 4 if is_layer else bool((weight == before[name]).all()), name
    lengths = json.loads((tmp_path / "demo-heal.json").read_text())["lengths"]
    assert [length["tokens"] for length in lengths] == [1024, TOKENS]
    assert all([row["row"] for row in length["rows"]] == ["cpt", "own-half"] for length in lengths)


def test_peers_read_the_same_documents_in_both_vocabularies(demo, tmp_path) -> None:
    import demo_documents as whole

    texts = ["Ada has 3 boxes.", "Uma sells 14 coins and 2 stamps."]
    for model in (students.START, students.TEACHER):
        rows = [whole.tokenized(load_tokenizer(model), text) for text in texts]
        ids, labels, spans = whole.padded(rows)
        for text, tokens, offsets, label in zip(texts, ids, spans, labels, strict=True):
            assert int(tokens[0]) == load_tokenizer(model).vocabulary[students.END]
            learned = label != whole.IGNORED
            assert not learned[0] and (label[learned] == tokens[learned]).all()
            ends = offsets[learned].tolist()
            assert ends[0][0] == 0 and ends[-1][1] == len(text)
            assert all(left[1] == right[0] for left, right in itertools.pairwise(ends))
    lengths = [300, 500, 400, 700]
    plan = list(whole.batches(lengths, 4000, 1))
    steps = [sum(lengths[document] for document in batch) for batch in plan]
    assert all(tokens >= whole.STEP_TOKENS for tokens in steps[:-1])
    assert sum(steps[:-1]) < 4000 <= sum(steps)
    assert sorted(itertools.chain(*plan))[:2] == [0, 0]  # a second pass
    assert plan == list(whole.batches(lengths, 4000, 1)) != list(whole.batches(lengths, 4000, 2))
    plain, longer = (
        demo.peer_recipe(tmp_path, name, 250_000, 2e-3, 0) for name in ("cpt", "longer-masked")
    )
    assert (longer.data.block_size, longer.data.document_mask) == (512, True)
    assert longer.data.blocks != plain.data.blocks and not plain.data.document_mask
    assert longer.train.batch_blocks * 512 == plain.train.batch_blocks * 128 == whole.STEP_TOKENS


def test_peers_are_compared_at_equal_tokens_and_in_equal_time(
    demo, monkeypatch, tmp_path, capsys
) -> None:
    """Without GOLD's own loss, which needs TRL; whole documents from a store are really trained."""
    only(demo, monkeypatch, "PEER_RULES", "cpt", "half", "uld", "documents-half")
    monkeypatch.setattr(demo, "ONLINE", ("uld",))
    run(demo, monkeypatch, tmp_path, "peers", seeds=1)
    tables: dict[str, list[dict[str, Any]]] = json.loads((tmp_path / "demo-peers.json").read_text())
    assert [row["row"] for row in tables["equal_tokens"]] == list(demo.PEER_RULES)
    assert [row["row"] for row in tables["equal_time"]] == ["cpt", "half", "uld"]
    speed = {row["row"]: row["tokens_per_second"] for row in tables["equal_tokens"]}
    assert tables["equal_time"][-1]["tokens"] == round(TOKENS * speed["uld"] / speed["cpt"])
    assert "cpt: 2,048 tokens, 1.000 x the speed of every token" in capsys.readouterr().out
    start, trained = (
        load_file(folder / "model.safetensors")
        for folder in (students.START, tmp_path / f"runs/documents-half-{TOKENS}-0.002-0/model")
    )
    assert any((trained[name] != weight.float()).any() for name, weight in start.items())
