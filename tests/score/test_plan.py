"""The plan of a growing store: made once, read by those who come later, gone in the end."""

import contextlib
import dataclasses
import json
import os
import pickle
import sys

import pytest
from score.teacher_kit import (
    SETTINGS,
    ArithmeticTeacher,
    actor_of,
    save_teacher,
    store_bytes,
    write_corpus,
)
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.cli.common import RayCommand
from vocagnolm.errors import MissingExtraError, ScoreError, StoreError, UsageError
from vocagnolm.jobs.job import Pipeline
from vocagnolm.score import RayCluster, Share, score_corpus
from vocagnolm.score import plan as plan_module
from vocagnolm.score.plan import (
    PLAN_FILE,
    CorpusSource,
    TeacherSource,
    describe,
    load_plan,
    make_plan,
)
from vocagnolm.score.work import ScoreWorker


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "texts" / "corpus.jsonl")


@pytest.fixture
def tmp_path(tmp_path):
    (tmp_path / "texts").mkdir()
    return tmp_path


@pytest.fixture
def opened(monkeypatch):
    """How often a corpus was counted and hashed."""
    calls = []
    real = plan_module.open_corpus

    def spy(*arguments, **options):
        calls.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(plan_module, "open_corpus", spy)
    return calls


def share(corpus, out, text):
    return score_corpus(
        ArithmeticTeacher(), corpus, out, settings=SETTINGS, share=Share.parse(text)
    )


@pytest.mark.parametrize("folder", [False, True])
def test_the_corpus_is_hashed_by_the_first_share_alone(tmp_path, corpus, opened, folder):
    given = corpus.parent if folder else corpus
    score_corpus(ArithmeticTeacher(), given, tmp_path / "whole", settings=SETTINGS)
    opened.clear()
    for number in (2, 1, 3):
        share(given, tmp_path / "s", f"{number}/3")
    assert len(opened) == 1
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "whole")
    assert PLAN_FILE not in store_bytes(tmp_path / "s")


def test_a_corpus_that_is_not_as_it_was_is_read_again(tmp_path, corpus, opened):
    out = tmp_path / "s"
    share(corpus.parent, out, "1/3")
    os.utime(corpus, ns=(1, 1))
    share(corpus.parent, out, "1/3")
    assert len(opened) == 2
    with pytest.raises(StoreError, match="limit_documents"):
        score_corpus(ArithmeticTeacher(), corpus.parent, out, settings=SETTINGS, limit_documents=3)
    assert len(opened) == 3
    write_corpus(corpus.parent / "more.jsonl", documents=2)
    with pytest.raises(StoreError, match=r"corpus\.documents"):
        share(corpus.parent, out, "2/3")
    assert len(opened) == 4


@pytest.mark.parametrize("content", ["foreign", "cut", "older", "nothing"])
def test_a_plan_that_is_none_is_not_used_and_runs_no_code(tmp_path, corpus, opened, content):
    out = tmp_path / "s"
    share(corpus, out, "1/3")
    path, marker = out / PLAN_FILE, tmp_path / "ran"
    whole = path.read_bytes()

    class Foreign:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    path.write_bytes(
        {
            "foreign": pickle.dumps(Foreign()),
            "cut": whole[:-40],
            "older": whole.replace(load_plan(out).version.encode(), b"0.0.0.dev0"),
            "nothing": b"",
        }[content]
    )
    with pytest.raises(StoreError):
        load_plan(out)
    for number in (2, 3):
        assert share(corpus, out, f"{number}/3").store["complete"] == (number == 3)
    assert not marker.exists() and len(opened) == 2


@pytest.mark.parametrize("name", ["Popen", "PosixPath", "LocalTeacher", "object"])
def test_a_plan_makes_nothing_but_its_own_kinds(tmp_path, name):
    (tmp_path / PLAN_FILE).write_text(json.dumps({name: {"args": "true"}}))
    with pytest.raises(StoreError, match=name):
        load_plan(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet"])
def test_a_plan_that_was_saved_is_the_plan(tmp_path, name):
    path = tmp_path / "texts" / name
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.table({"text": ["one", "two", "three"]})
        __import__("pyarrow.parquet").parquet.write_table(table, path)
    elif path.suffix == ".jsonl":
        write_corpus(path)
    else:
        path.write_text("one\n\ntwo\n")
    source = CorpusSource.of(path, split="line" if path.suffix == ".txt" else "none")
    about = describe(ArithmeticTeacher(), SETTINGS)
    plan = make_plan(about, source.open(), str(tmp_path / "s"), corpus_source=source)
    plan.save()
    found = load_plan(tmp_path / "s")
    assert (found.identity, found.settings) == (plan.identity, plan.settings)
    assert found.corpus.describe() == plan.corpus.describe() and not found.corpus.changed_sources()
    assert list(found.corpus) == list(plan.corpus)


def planned(tmp_path, corpus):
    teacher_source = TeacherSource(str(save_teacher(tmp_path / "t")))
    corpus_source = CorpusSource.of(corpus)
    teacher = teacher_source.open(SETTINGS)
    plan = make_plan(
        describe(teacher, SETTINGS),
        corpus_source.open(),
        tmp_path / "s",
        teacher_source=teacher_source,
        corpus_source=corpus_source,
    )
    plan.writer().begin()
    return plan, plan.save(), teacher


def test_a_worker_takes_all_it_needs_from_the_plan(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    score_corpus(save_teacher(tmp_path / "t"), corpus, tmp_path / "whole", settings=SETTINGS)
    plan, digest, _ = planned(tmp_path, corpus.relative_to(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    actor = actor_of(plan.absolute().out, digest)
    assert actor.hello()
    actor.load()
    for number, ahead in ((3, 1), (0, 4), (4, None), (1, 2), (2, None)):  # 1 was read for nothing
        actor.work(number, ahead)
    summary = score_corpus(tmp_path / "t", corpus, tmp_path / "s", settings=SETTINGS)
    assert summary.scored_shards == 0 and summary.found_shards == 5
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "whole")


def test_a_worker_refuses_another_plan_and_another_teacher(tmp_path, corpus):
    plan, digest, _ = planned(tmp_path, corpus)
    with pytest.raises(StoreError, match="not the plan of this run"):
        actor_of(plan.out, "0" * 64).load()
    save_teacher(tmp_path / "t", seed=7)
    with pytest.raises(ScoreError, match=r"teacher.fingerprint .* on this machine, the plan has"):
        actor_of(plan.out, digest).load()
    with pytest.raises(StoreError, match="Every machine must see the store"):
        actor_of(str(tmp_path / "not here"), digest).load()


def test_an_error_in_what_was_read_ahead_comes_when_its_turn_comes(tmp_path, corpus):
    lines = corpus.read_text().splitlines()
    lines[7] = '{"text": ""}'
    corpus.write_text("\n".join(lines))
    plan, _, teacher = planned(tmp_path, corpus)
    plan = dataclasses.replace(plan, settings=dataclasses.replace(SETTINGS, strict=True))
    worker = ScoreWorker(plan, teacher, plan.writer())
    with contextlib.closing(Pipeline(worker)) as pipeline:
        pipeline.make(0, 1)
        pipeline.make(2, 1)
        with pytest.raises(ScoreError, match=r"document 7.*empty"):
            pipeline.make(1, 3)
        assert pipeline.make(3, None).documents == 5
        pipeline.settle()


def test_without_ray_the_pip_line_is_told(tmp_path, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    teacher = save_teacher(tmp_path / "t")
    with pytest.raises(MissingExtraError, match=r"pip install 'vocagnolm\[ray\]'"):
        score_corpus(teacher, corpus, tmp_path / "s", settings=SETTINGS, cluster=RayCluster())
    assert not (tmp_path / "s").exists()


def test_a_cluster_needs_names_and_no_share(tmp_path, corpus):
    cluster = RayCluster()
    with pytest.raises(ValueError, match="by name"):
        score_corpus(ArithmeticTeacher(), corpus, tmp_path / "s", cluster=cluster)
    with pytest.raises(UsageError, match="--ray distributes the shards itself"):
        score_corpus("t", corpus, tmp_path / "s", cluster=cluster, share=Share(1, 2))


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray"], ""),
        (["--ray", "--strict"], ""),
        (["--strict", "--ray", "auto"], "auto"),
        (["--ray", "10.0.0.1:6379", "--json"], "10.0.0.1:6379"),
        (["--ray=auto"], "auto"),
        (["--strict"], None),
    ],
)
def test_an_address_may_be_left_out(words, address, monkeypatch):
    seen = {}

    def invoke(self, context):
        seen.update(context.params)

    monkeypatch.setattr(RayCommand, "invoke", invoke)
    result = CliRunner().invoke(app, ["score", *words])
    assert result.exit_code == 0, result.output
    assert seen["ray"] == address
