import json
import re
import shutil
from types import SimpleNamespace

import pytest
import yaml
from training_kit import recipe_dict, write_corpus, write_store
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.cli.train import _line
from vocagnolm.model import open_model
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.store import LossStore
from vocagnolm.train.check import check


def tree(lab, tmp_path, **sections):
    sections["run"] = {"folder": str(tmp_path / "run"), **sections.get("run", {})}
    return recipe_dict(lab, **sections)


def report(lab, tmp_path, processes=1, **sections):
    return check(recipe_from_dict(tree(lab, tmp_path, **sections)), processes=processes)


def test_a_good_recipe_is_ready_and_its_plan_is_right(lab, tmp_path):
    found = report(lab, tmp_path, train={"tokens": 10 * 256}, processes=2)
    assert found.ready and found.problems == [] and found.warnings == []
    plan = found.plan
    assert plan["schedule"]["steps"] == 10 and plan["schedule"]["tokens"] == 2560
    assert plan["schedule"]["accumulation"] == 1
    assert plan["blocks"]["prepared"] and plan["blocks"]["mapped_share"] > 0.9
    assert plan["store"]["teacher"] == "made-up" and plan["store"]["bits_per_byte"] > 0
    assert plan["student"]["parameters"] > 10_000
    assert plan["student_tokenizer"]["eos"] == "<end>"
    assert not (tmp_path / "run").exists()  # a dry check leaves nothing behind


def test_what_is_hardly_meant_is_said(lab, tmp_path):
    none = {"blocks": str(tmp_path / "none")}
    tokens = {"tokens": 10**12}
    disk = report(lab, tmp_path, train=tokens, data=none).plan["disk"]
    assert disk["blocks_bytes"] < 10 * (lab / "corpus.jsonl").stat().st_size
    found = report(lab, tmp_path, train=tokens, run={"save_every": 1})
    assert any("times: is train.tokens" in line for line in found.warnings)
    assert any("checkpoints, of which" in line for line in found.warnings)
    found = report(lab, tmp_path, objective={"keep": 0})
    assert any("no token would be kept" in line for line in found.problems)
    step = report(lab, tmp_path, objective={"scope": "global"}).plan["schedule"]["a_step_depends"]
    assert step == "neither on train.micro_batch nor on the number of processes"


def test_a_full_disk_is_said_in_units_that_fit(lab, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    found = report(lab, tmp_path)
    assert any(re.search(r"needs about \d+\.\d [kM]B .* has 4\.1 kB", p) for p in found.problems)


def test_a_batch_that_does_not_fit_is_answered_with_values_that_do(lab, tmp_path):
    def problems(**train):
        return report(lab, tmp_path, train=train).problems

    wrong = {"tokens": 12 * 32, "batch_blocks": 96, "micro_batch": 64}
    shorter = next(line for line in problems(**wrong) if "less than one step" in line)
    right = {name: int(value) for name, value in re.findall(r"train\.(\w+) to (\d+)", shorter)}
    assert right == {"batch_blocks": 12, "micro_batch": 12}
    assert problems(**wrong | right) == []
    (alone,) = problems(tokens=2**20, batch_blocks=96, micro_batch=64)
    assert alone.endswith("Set train.micro_batch to 48, or train.batch_blocks to 128.")


def test_a_student_that_is_its_own_teacher_is_warned_of(lab, tmp_path):
    start = str(lab / "student")
    found = report(lab, tmp_path, student={"model": start}, teacher={"model": start + "/"})
    assert any("one model" in line and "learns nothing" in line for line in found.warnings)
    found = report(lab, tmp_path, student={"model": start}, teacher={"model": str(lab)})
    assert not any("learns nothing" in line for line in found.warnings)


def test_a_model_is_called_by_its_run(lab, tmp_path):
    for folder, name in ((tmp_path / "guided" / "model", "guided"), (tmp_path / "big", "big")):
        shutil.copytree(lab / "student", folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        files = open_model(folder, weights=False)
        assert files.name == files.tokenizer.name == name


def test_the_plan_is_printed_in_words():
    assert _line({"a_fact": {"free_bytes": 2 * 10**9, "none": None}, "many": [{"x": 1}, 2]}) == (
        "a fact (free bytes 2.00 GB), many (x 1), 2"
    )


def test_several_teachers_are_shown_side_by_side(lab, tmp_path):
    texts = [json.loads(line)["text"] for line in (lab / "corpus.jsonl").open()]
    second = write_store(tmp_path / "second", texts[:20], lab / "student", seed=5)
    path = [str(lab / "store"), str(second)]
    blocks = {"blocks": str(tmp_path / "blocks")}
    found = report(lab, tmp_path, store={"path": path}, data=blocks)
    assert found.ready, found.problems
    shown = found.plan["stores"]
    stores = [LossStore.open(one) for one in path]
    assert [one["bits_per_byte"] for one in shown] == [store.bits_per_byte for store in stores]

    def bits(store, number):
        token_bytes, nll = store[number]
        return nll.sum(dtype=float) / token_bytes.sum(dtype=float)

    best = [bits(stores[0], n) < bits(stores[1], n) for n in range(20)]
    assert shown[0]["best_share"] == pytest.approx(sum(best) / 20)
    assert shown[0]["best_share"] + shown[1]["best_share"] == pytest.approx(1)
    written = tmp_path / "recipe.yaml"
    written.write_text(yaml.safe_dump(tree(lab, tmp_path, store={"path": path}, data=blocks)))
    printed = CliRunner().invoke(app, ["check", str(written), "--no-measure"])
    assert printed.exit_code == 0 and printed.stdout.count("stores: path ") == 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"student": {"config": None}}, "either `model` or `config`"),
        ({"student": {"tokenizer": None}}, "student.tokenizer"),
        ({"student": {"tokenizer": "/nowhere/at/all"}}, "does not exist"),
        ({"student": {"config": {"model_type": "lama"}}}, "lama"),
        ({"corpus": {"files": ["/nowhere.jsonl"]}}, "/nowhere.jsonl does not exist"),
        ({"store": {"path": "/nowhere"}}, "not a loss store"),
        ({"store": {"path": None}}, "needs store.path"),
        ({"data": {"eos": "<stop>"}}, "'<stop>', which"),
        ({"data": {"block_size": 4096}}, "the student reads at most 128"),
        ({"train": {"batch_blocks": 9}}, "not a multiple"),
        ({"train": {"tokens": 10}}, "less than one step"),
        ({"objective": {"method": "kld"}}, "needs teacher.model"),
        ({"objective": {"method": "rho1", "entropy_keep": 0.8}}, "holds no entropy"),
        ({"optimizer": {"min_learning_rate": 1.0}}, "min_learning_rate is above"),
    ],
)
def test_problems_are_found_without_weights(lab, tmp_path, sections, message):
    found = report(lab, tmp_path, **sections)
    assert not found.ready
    assert any(message in problem for problem in found.problems), found.problems


def test_vocabularies_must_be_one_for_kld_and_rho1(lab, tmp_path):
    for method in ("kld", "rho1"):
        wrong = report(
            lab, tmp_path, objective={"method": method}, teacher={"model": str(lab / "other")}
        )
        assert any("one vocabulary" in problem for problem in wrong.problems)
        right = report(
            lab, tmp_path, objective={"method": method}, teacher={"model": str(lab / "twin")}
        )
        assert not any("one vocabulary" in problem for problem in right.problems)


def test_embedding_rows_must_hold_the_tokenizer(lab, tmp_path):
    config = {**recipe_dict(lab)["student"]["config"], "vocab_size": 64}
    found = report(lab, tmp_path, student={"config": config})
    assert any("64 embedding rows" in problem for problem in found.problems)


def test_an_incomplete_store_and_another_corpus(lab, tmp_path):
    broken = tmp_path / "store"
    shutil.copytree(lab / "store", broken)
    manifest = broken / "manifest.json"
    partial = json.loads(manifest.read_text())
    manifest.rename(broken / "manifest.partial.json")
    found = report(lab, tmp_path, store={"path": str(broken)})
    assert any("not complete" in problem for problem in found.problems)
    partial["identity"]["corpus"] = {"fingerprint": "another"}
    partial.pop("content_sha256", None)
    manifest.write_text(json.dumps(partial))
    found = report(lab, tmp_path, store={"path": str(broken)}, data={"blocks": str(tmp_path / "b")})
    assert any("another corpus" in warning for warning in found.warnings)
    assert found.plan["blocks"] == {"prepared": False, "next": "vocagnolm prepare RECIPE"}


def test_an_edited_corpus_does_not_fit_the_blocks(lab, tmp_path):
    edited = write_corpus(tmp_path / "corpus.jsonl", ["another text"])
    found = report(lab, tmp_path, corpus={"files": [str(edited)]})
    assert any("corpus:" in problem for problem in found.problems)


def test_a_teacher_no_better_than_the_student_is_warned_of(lab, tmp_path):
    bits = report(lab, tmp_path).plan["store"]["bits_per_byte"]
    worse = report(lab, tmp_path, student={"bits_per_byte": bits * 1.5})
    assert worse.warnings == []
    better = report(lab, tmp_path, student={"bits_per_byte": bits * 1.01})
    assert better.ready and any("did harm" in warning for warning in better.warnings)


def test_the_commands_from_start_to_end(lab, tmp_path):
    sections = tree(
        lab, tmp_path, data={"blocks": str(tmp_path / "blocks")}, train={"tokens": 2 * 256}
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    runner = CliRunner()

    def call(*arguments):
        result = runner.invoke(app, [*map(str, arguments)], catch_exceptions=False)
        said.append(result.stderr)
        return result.exit_code, result.stdout

    said: list[str] = []
    code, text = call("check", path, "--json")
    assert code == 0 and json.loads(text)["plan"]["blocks"]["prepared"] is False
    code, text = call("prepare", path, "--workers", 1, "--json")
    summary = json.loads(text)
    assert code == 0 and summary["blocks"] > 0 and summary["guided"]
    lacking = summary["lacking"]
    assert lacking["guided"] is lacking["cpt"] is None
    assert (lacking["alm"], lacking["distill"], lacking["uld"]) == ("stretch", "targets", "text")
    code, text = call("prepare", path, "--workers", 1)
    assert code == 0 and "mapped" in text and "nats" in text
    assert "objective.method may be cpt, guided, " in text and "alm: stretch" in text
    more = ("--set", f"data.blocks={tmp_path / 'more'}", "--set", "data.extra_columns=[stretch]")
    assert json.loads(call("prepare", path, "--json", *more)[1])["lacking"]["alm"] is None
    one_word = ("--set", "objective.method=alm", "--set", f"run.folder={tmp_path / 'alm'}")
    assert call("train", path, "--quiet", *more, *one_word)[0] == 0
    code, text = call("train", path, "--json", "--quiet")
    assert code == 0 and json.loads(text)["finished"] and json.loads(text)["steps"] == 2
    code, text = call("train", path)
    assert code == 0 and "2 steps" in text
    trained = [f"student.model={tmp_path / 'run/model'}", "student.config=null", "run.folder=next"]
    further = [word for one in trained for word in ("--set", one)]
    assert "strength" in call("check", path, *further)[1]
    assert "loading the student's weights" in said[-1]
    assert "strength" not in call("check", path, *further, "--no-measure")[1]
    assert "weights" not in said[-1]
    code, text = call("check", path, "--set", "train.batch_blocks=7")
    assert code == 1 and "not ready" in text and "not a multiple" in text


def test_a_store_of_another_corpus_is_found_by_its_documents(lab, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(lab / "store", store)
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["identity"]["corpus"] = {"fingerprint": "of another"}
    del manifest["content_sha256"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    known = json.loads((lab / "corpus.jsonl").read_text().splitlines()[0])["text"]
    inside = write_corpus(tmp_path / "part.jsonl", [known])
    other = write_corpus(tmp_path / "other.jsonl", [known, "never scored"])

    def found(corpus, missing):
        data = {"missing": missing, "blocks": str(tmp_path / "blocks")}
        sections = {"store": {"path": str(store)}, "corpus": {"files": [str(corpus)]}}
        return report(lab, tmp_path, data=data, **sections, train={"tokens": 512})

    assert found(inside, "error").ready and found(inside, "error").warnings
    assert found(other, "drop").ready
    (problem,) = found(other, "error").problems
    assert "other.jsonl:2" in problem and "data.missing" in problem
