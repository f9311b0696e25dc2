"""A teacher behind a server: what a real one answered, and every way in which servers fail."""

import dataclasses
import email.utils
import json
import threading
import time

import numpy as np
import pytest
from chat_kit import make_chat_lab
from score.server_kit import (
    LOCAL_SETTINGS,
    RECORDED_ALTERNATIVES,
    SERVER_SETTINGS,
    Replay,
    save_served_teacher,
    write_served_corpus,
)
from score.teacher_kit import actor_of, store_bytes
from typer.testing import CliRunner

from vocagnolm import LossStore
from vocagnolm.cli import app
from vocagnolm.errors import ScoreError, StoreError, UsageError
from vocagnolm.model import NllModel, open_model
from vocagnolm.model.nll import TokenScores
from vocagnolm.model.served import exchange, fleet
from vocagnolm.score import Server, Share, score_corpus
from vocagnolm.score.plan import PLAN_FILE, CorpusSource, TeacherSource, describe, make_plan
from vocagnolm.score.work import ScoreJob
from vocagnolm.store import verify_store

KEY = "secret-3141592653"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "teacher").mkdir()
    teacher = save_served_teacher(folder / "teacher")
    corpus = write_served_corpus(folder / "corpus.jsonl")
    settings = dataclasses.replace(LOCAL_SETTINGS, shard_documents=3)
    score_corpus(teacher, corpus, folder / "local", settings=settings)
    telling = dataclasses.replace(LOCAL_SETTINGS, alternatives=RECORDED_ALTERNATIVES)
    score_corpus(teacher, corpus, folder / "telling", settings=telling)
    (teacher / "model.safetensors").unlink()  # the server has them
    return folder


@pytest.fixture
def replay(monkeypatch):
    monkeypatch.setattr(fleet, "_FIRST_PAUSE_SECONDS", 0.02)
    for name in (exchange.KEY_VARIABLE, exchange.USUAL_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    one = Replay()
    one.start()
    yield one
    one.stop()


def score(lab, replay, out, **options):
    server = options.pop("server", None) or replay.server()
    given = {"settings": SERVER_SETTINGS, "server": server} | options
    return score_corpus(lab / "teacher", lab / "corpus.jsonl", out, **given)


def losses(store):
    store = LossStore.open(store)
    return [store[number] for number in range(len(store))]


def server_part(store, name="manifest.json"):
    return json.loads((store / name).read_text())["identity"]["server"]


@pytest.fixture(scope="module")
def whole(lab):
    """The store that an undisturbed server makes."""
    one = Replay()
    one.start()
    score(lab, one, lab / "whole")
    one.stop()
    return store_bytes(lab / "whole")


# ---- what it is asked, and what comes of it ----


def test_the_losses_are_those_of_the_local_teacher(lab, replay, tmp_path):
    seen = []
    out = tmp_path / "s"
    summary = score(lab, replay, out, on_progress=lambda now: seen.append(now.tokens))
    assert summary.store["complete"] and summary.scored_shards == 3
    assert seen[-1] == summary.tokens == summary.store["tokens"]
    pairs = list(zip(losses(out), losses(lab / "local"), strict=True))
    assert any(len(ours[1]) > SERVER_SETTINGS.context for ours, _ in pairs)  # several windows
    for (our_bytes, ours), (local_bytes, local) in pairs:
        assert np.array_equal(our_bytes, local_bytes)
        np.testing.assert_allclose(ours, local, atol=0.01)  # float16 of a loss below 16
    about = server_part(out)
    assert (about["engine"], about["version"], about["model"]) == ("vllm", "0.32.0", "tiny")
    assert len(about["probe"]["measured"]) == 3 * 63
    assert replay.url not in json.dumps(json.loads((out / "manifest.json").read_text()))
    assert score(lab, replay, out).scored_shards == 0


def test_many_prompts_go_together_and_few_requests_at_a_time(lab, replay, tmp_path):
    replay.slow = 0.05
    score(lab, replay, tmp_path / "s", server=replay.server(requests=3))
    assert 1 < replay.most_at_once <= 3
    assert max(map(len, replay.requests)) >= 4
    probe = replay.requests[0][2]
    assert all(request[0] in replay.requests[0] for request in replay.requests), probe


def test_a_probability_of_zero_is_missing(lab, replay, tmp_path):
    probes = []

    def change(choice):
        if len(probes) < 3:
            probes.append(choice["prompt_token_ids"])
        elif choice["prompt_token_ids"] not in probes and len(choice["prompt_logprobs"]) > 20:
            ids = choice["prompt_token_ids"]
            choice["prompt_logprobs"][20][str(ids[20])]["logprob"] = -9999.0
        return choice

    replay.change = change
    settings = dataclasses.replace(SERVER_SETTINGS, max_nonfinite_share=0.1)
    summary = score(lab, replay, tmp_path / "s", settings=settings)
    assert summary.store["nonfinite"] >= 8
    assert max(np.nanmax(nll) for _, nll in losses(tmp_path / "s")) < 100


TELLING = dataclasses.replace(SERVER_SETTINGS, alternatives=RECORDED_ALTERNATIVES)


def test_the_alternatives_are_those_of_the_local_teacher(lab, replay, whole, tmp_path):
    score(lab, replay, tmp_path / "s", settings=TELLING)
    sglang = Replay("sglang")
    sglang.models = json.loads(json.dumps(sglang.models))
    sglang.models["data"][0]["owned_by"] = "sglang"
    sglang.start()
    score(lab, sglang, tmp_path / "sglang", settings=TELLING)
    sglang.stop()
    local = LossStore.open(lab / "telling")
    others = [LossStore.open(tmp_path / name) for name in ("s", "sglang")]
    for store in others:
        assert store.kept_alternatives == local.kept_alternatives
        assert verify_store(store.path) == []
        for number in range(len(local)):
            wanted, found = local.alternatives(number), store.alternatives(number)
            same = found.ids == wanted.ids  # of two as likely, either may come first
            assert same.mean() > 0.99
            np.testing.assert_allclose(found.probability, wanted.probability, rtol=0.02)
            np.testing.assert_array_equal(found.follows[same], wanted.follows[same])
            np.testing.assert_allclose(store[number][1], local[number][1], atol=0.01)
    assert store_bytes(lab / "whole") == whole  # asked for losses alone, it is the store it was


def test_more_alternatives_than_the_server_gives(lab, replay, tmp_path):
    replay.max_logprobs = 1
    with pytest.raises(
        ScoreError, match=r"max allowed: 1\. Start the server with --max-logprobs 2"
    ):
        score(lab, replay, tmp_path / "s", settings=TELLING)


def test_alternatives_that_the_server_leaves_out(lab, replay, tmp_path):
    def change(choice):
        rows = choice["prompt_logprobs"]
        ids = choice["prompt_token_ids"]
        choice["prompt_logprobs"] = [
            row and {str(n): row[str(n)]} for n, row in zip(ids, rows, strict=True)
        ]
        return choice

    replay.change = change
    with pytest.raises(ScoreError, match="returns 1 of the 2 most likely tokens"):
        score(lab, replay, tmp_path / "s", settings=TELLING)


def test_a_server_draws_nothing(lab, replay, tmp_path):
    settings = dataclasses.replace(SERVER_SETTINGS, alternatives="sampled:2")
    with pytest.raises(UsageError, match=r"cannot sample\. Use --alternatives 2"):
        score(lab, replay, tmp_path / "s", settings=settings)


def test_sglang_through_the_same_interface(lab, whole, tmp_path):
    one = Replay("sglang")
    one.models = json.loads(json.dumps(one.models))
    one.models["data"][0]["owned_by"] = "sglang"
    one.start()
    score(lab, one, tmp_path / "s")
    one.stop()
    about = server_part(tmp_path / "s")
    assert (about["engine"], about["version"]) == ("sglang", "0.5.9")
    for (_, ours), (_, theirs) in zip(losses(tmp_path / "s"), losses(lab / "whole"), strict=True):
        assert np.array_equal(ours, theirs, equal_nan=True)


# ---- what passes ----


@pytest.mark.parametrize("fault", [500, 503, 429, "broken", "cut"])
def test_what_passes_is_tried_again(lab, replay, whole, tmp_path, fault):
    replay.faults.extend([fault, None, fault, fault, None, None, fault])
    score(lab, replay, tmp_path / "s")
    assert not replay.faults and store_bytes(tmp_path / "s") == whole


def test_a_server_that_says_when_to_come_again(lab, replay, whole, tmp_path):
    replay.retry_after = "1"
    replay.faults.extend([None, 429, 503])
    began = time.monotonic()
    score(lab, replay, tmp_path / "s")
    assert time.monotonic() - began > 1 and store_bytes(tmp_path / "s") == whole
    replay.retry_after = "3600"  # longer than anybody is patient
    replay.faults.extend([None, 503])
    with pytest.raises(ScoreError, match="usefully for 20 s; last error: 503"):
        score(lab, replay, tmp_path / "t")


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("", 0, 0),
        ("7", 7, 7),
        ("soon", 0, 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        (60, 50, 60),
    ],
)
def test_retry_after_is_a_number_or_a_date(header, least, most):
    if isinstance(header, int):
        header = email.utils.formatdate(time.time() + header, usegmt=True)
    assert least <= exchange._seconds_until(header) <= most


def test_an_answer_that_does_not_come_is_asked_for_again(lab, replay, whole, tmp_path):
    replay.faults.extend([None, "silent"])
    with pytest.raises(ScoreError, match=r"usefully for 1 s.*TimeoutError"):
        score(lab, replay, tmp_path / "s", server=replay.server(patience_seconds=1, requests=1))
    score(lab, replay, tmp_path / "s")
    assert store_bytes(tmp_path / "s") == whole


def test_slow_answers_are_waited_for(lab, replay, whole, tmp_path):
    replay.slow = 0.3
    score(lab, replay, tmp_path / "s", server=replay.server(patience_seconds=3))
    assert store_bytes(tmp_path / "s") == whole


def test_a_server_killed_midway_and_started_again_loses_nothing(lab, replay, whole, tmp_path):
    def restart():
        replay.stop()
        time.sleep(0.5)
        replay.start()

    def on_request(number):
        if number == 4:
            threading.Thread(target=restart).start()
            time.sleep(0.1)
            raise ConnectionError  # the handler dies with its connection

    replay.on_request = on_request
    score(lab, replay, tmp_path / "s")
    assert store_bytes(tmp_path / "s") == whole


def test_a_server_that_stays_dead_ends_the_run_and_the_next_goes_on(lab, replay, whole, tmp_path):
    out = tmp_path / "s"
    replay.faults.extend([None] * 4 + [503] * 10000)
    with pytest.raises(ScoreError, match=r"usefully for 1 s; last error: 503 .* kept"):
        score(lab, replay, out, server=replay.server(patience_seconds=1, requests=1))
    replay.faults.clear()
    summary = score(lab, replay, out)
    assert summary.found_shards >= 1 and store_bytes(out) == whole


def test_when_one_request_fails_the_others_are_not_waited_for(lab, replay, tmp_path):
    answers, ended = threading.Event(), []

    def on_request(number):
        if number == 2:
            ended.append(answers.wait(200))

    replay.on_request = on_request
    replay.faults.extend([None, None, 400])
    with pytest.raises(ScoreError, match="refuses /v1/completions: 400"):
        score(lab, replay, tmp_path / "s", server=replay.server(patience_seconds=60))

    def interrupt(_):
        raise KeyboardInterrupt

    replay.requests.clear()
    with pytest.raises(KeyboardInterrupt):
        score(lab, replay, tmp_path / "s", on_progress=interrupt)
    assert not ended  # both requests are still under way
    answers.set()
    replay.on_request = lambda number: None
    assert score(lab, replay, tmp_path / "s").store["complete"]


# ---- what is refused ----


def _bos(choice):
    ids, rows = choice["prompt_token_ids"], choice["prompt_logprobs"]
    first = {str(ids[0]): {"logprob": -1.0}}
    return choice | {"prompt_token_ids": [7, *ids], "prompt_logprobs": [None, first, *rows[1:]]}


def _dropped(choice):
    return choice | {name: choice[name][:-1] for name in ("prompt_token_ids", "prompt_logprobs")}


def _changed(choice):
    ids = [*choice["prompt_token_ids"]]
    ids[3] = 399
    rows = [*choice["prompt_logprobs"]]
    rows[3] = {"399": {"logprob": -1.0}}
    return choice | {"prompt_token_ids": ids, "prompt_logprobs": rows}


def _without(*names):
    return lambda choice: {key: value for key, value in choice.items() if key not in names}


def _loss(value):
    def change(choice):
        ids, rows = choice["prompt_token_ids"], choice["prompt_logprobs"]
        row = {str(ids[5]): {"logprob": value}}
        return choice | {"prompt_logprobs": [*rows[:5], row, *rows[6:]]}

    return change


@pytest.mark.parametrize("value", [5.0, -1e30, 1e30])
def test_an_impossible_loss_is_refused_in_every_answer(lab, replay, tmp_path, value):
    asked = []

    def change(choice):
        asked.append(choice)
        return choice if len(asked) <= 3 else _loss(value)(choice)  # the probe has three

    replay.change = change
    with pytest.raises(ScoreError, match=r"impossible log-probability"):
        score(lab, replay, tmp_path / "s")
    assert not list((tmp_path / "s" / "shards").glob("*"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_loss(5.0), "impossible log-probability 5"),
        (_loss(-1e30), "log-probability -1e\\+30"),
        (_bos, r"adds the token 7 \(beginning-of-text\?\) before the 64"),
        (_dropped, "drops tokens: it was given 64 and has read 63"),
        (_changed, "changes token ids: at position 3 it has read 399 for"),
        (_without("prompt_logprobs"), "does not return the log-probabilities of the prompt"),
        (_without("prompt_token_ids"), "does not return the token ids of the prompt"),
        (
            _without("prompt_token_ids", "prompt_logprobs"),
            "does not return the log-probabilities of the prompt",
        ),
        (_without("index"), "an unknown response format"),
    ],
)
def test_the_probe_refuses_with_the_reason(lab, replay, tmp_path, change, reason):
    if reason == "an unknown response format":
        replay.completed = lambda content: {"choices": [{"text": "?"}]}
    replay.change = change
    with pytest.raises(ScoreError, match=reason):
        score(lab, replay, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_sglang_without_log_probabilities_is_refused(lab, replay, tmp_path):
    replay.models = {"data": [{"id": "tiny", "owned_by": "sglang"}]}
    replay.generated = lambda content: [{"text": "", "meta_info": {}} for _ in content["input_ids"]]
    with pytest.raises(ScoreError, match="does not return the log-probabilities of the prompt"):
        score(lab, replay, tmp_path / "s")


@pytest.mark.parametrize(
    ("models", "error", "reason"),
    [
        ({"data": [{"id": "m", "owned_by": "llamacpp"}]}, ScoreError, "llama.cpp server"),
        ({"data": []}, ScoreError, "lists no model"),
        (None, ScoreError, "lists no model"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, UsageError, "several models.*--server-model.*a, b"),
        (
            {"data": [{"id": "tiny", "max_model_len": 32}]},
            UsageError,
            r"--context 64: the server .* at most 31 .*--max-model-len 65",
        ),
    ],
)
def test_a_server_that_cannot_serve_is_refused(lab, replay, tmp_path, models, error, reason):
    replay.models = models
    with pytest.raises(error, match=reason):
        score(lab, replay, tmp_path / "s")


def test_wrong_models_are_refused(lab, replay, tmp_path):
    with pytest.raises(UsageError, match=r"no model 'large': choose .* among tiny"):
        score(lab, replay, tmp_path / "s", server=replay.server(model="large"))
    replay.recorded = json.loads(json.dumps(replay.recorded))
    for answer in replay.recorded["tokenize"].values():
        answer["tokens"] = [1, 2, 3]
    with pytest.raises(ScoreError, match=r"another tokenizer than --teacher: .* \[1, 2, 3\]"):
        score(lab, replay, tmp_path / "s")
    replay.missing = ("/tokenize",)  # not told: the probe's losses alone
    assert score(lab, replay, tmp_path / "s").store["complete"]


def test_what_the_server_decides_is_not_an_option(lab, replay, tmp_path):
    for changes in ({"dtype": "bfloat16"}, {"compiled": True}, {"device": "cuda"}):
        settings = dataclasses.replace(SERVER_SETTINGS, **changes)
        with pytest.raises(UsageError, match="do not apply with --server"):
            score(lab, replay, tmp_path / "s", settings=settings)


def test_the_context_is_the_server_s_where_it_is_less(lab, replay):
    settings = dataclasses.replace(SERVER_SETTINGS, context=None, stride=None)
    source = TeacherSource(str(lab / "teacher"), server=replay.server())
    with pytest.raises(KeyError):  # prompts of 100 tokens were not recorded
        replay._choice([0] * 100, 0)
    replay.models["data"][0]["max_model_len"] = 65
    assert source.open(settings).settings.context == 64


def test_an_address_nobody_answers_is_told_soon(lab, tmp_path, replay):
    replay.stop()
    began = time.monotonic()
    with pytest.raises(ScoreError, match=r"usefully for 5 s.*ConnectionRefused"):
        score(lab, replay, tmp_path / "s", server=replay.server(patience_seconds=600))
    assert time.monotonic() - began < 300
    replay.start()


# ---- the identity ----


def moved(nats):
    """A server whose losses are so much higher."""

    def change(choice):
        for index, row in zip(choice["prompt_token_ids"], choice["prompt_logprobs"], strict=True):
            if row is not None:
                row[str(index)]["logprob"] -= nats
        return choice

    return change


def half_done(lab, replay, out):
    return score(lab, replay, out, share=Share(1, 2))


def test_a_resumed_store_keeps_the_first_measurement(lab, replay, tmp_path):
    out = tmp_path / "s"
    half_done(lab, replay, out)
    first = server_part(out, "manifest.partial.json")
    replay.change = moved(0.02)
    summary = score(lab, replay, out)
    assert summary.found_shards == 2 and summary.scored_shards == 1
    assert server_part(out) == first
    assert score(lab, replay, out).scored_shards == 0
    assert CliRunner().invoke(app, ["store", "verify", str(out)]).exit_code == 0


def test_a_probe_that_is_not_reproduced_is_refused(lab, replay, tmp_path):
    out = tmp_path / "s"
    half_done(lab, replay, out)
    before = store_bytes(out)
    replay.change = moved(0.1)
    for options in ({}, {"share": Share(2, 2)}):
        with pytest.raises(StoreError, match=r"server.probe.measured: 0.100 apart on the mean"):
            score(lab, replay, out, **options)
    assert store_bytes(out) == before


def test_another_version_is_refused(lab, replay, tmp_path):
    out = tmp_path / "s"
    half_done(lab, replay, out)
    replay.recorded = replay.recorded | {"version": {"version": "0.33.0"}}
    with pytest.raises(StoreError, match=r'server.version: the store has "0.32.0", this run'):
        score(lab, replay, out)


def test_shares_that_begin_together_agree(lab, replay, tmp_path):
    """Two processes have probed before either has begun the store."""
    out, other = tmp_path / "s", Replay()
    other.start()
    other.change = moved(0.01)
    source = CorpusSource.of(lab / "corpus.jsonl")
    writers = []
    for one in (replay, other):
        teacher_source = TeacherSource(str(lab / "teacher"), server=one.server())
        about = describe(teacher_source.open(SERVER_SETTINGS), SERVER_SETTINGS)
        writers.append(make_plan(about, source.open(), str(out)).writer())
    other.stop()
    assert writers[0].identity != writers[1].identity
    for writer in writers:
        writer.begin()
    assert writers[0].identity == writers[1].identity
    assert server_part(out, "manifest.partial.json") == writers[0].identity["server"]


def test_another_model_started_midway_is_seen(lab, replay, tmp_path):
    def on_request(number):
        if number == 4:
            replay.change = moved(0.5)

    replay.on_request = on_request
    with pytest.raises(ScoreError, match=r"have changed since this run began.* 0.500 nats"):
        score(lab, replay, tmp_path / "s")
    replay.change = moved(0)
    replay.on_request = lambda number: None
    assert score(lab, replay, tmp_path / "s").store["complete"]


def test_a_worker_of_a_cluster_opens_the_server_of_the_plan(lab, replay, whole, tmp_path):
    source = TeacherSource(str(lab / "teacher"), server=replay.server())
    corpus = CorpusSource.of(lab / "corpus.jsonl")
    teacher = source.open(SERVER_SETTINGS)
    about = describe(teacher, SERVER_SETTINGS)
    out = str(tmp_path / "s")
    plan = make_plan(about, corpus.open(), out, teacher_source=source, corpus_source=corpus)
    assert ScoreJob(plan).worker_needs == {"CPU": 1}
    plan.writer().begin()
    digest = plan.save()
    replay.change = moved(0.1)
    with pytest.raises(ScoreError, match=r"server.probe.measured is 0.100 apart .* the plan has"):
        actor_of(out, digest).load()
    replay.change = moved(0)
    actor = actor_of(out, digest)
    actor.load()
    for number in range(3):
        actor.work(number, None)
    score(lab, replay, out)
    assert store_bytes(tmp_path / "s") == whole


# ---- the key ----


def test_the_key_is_sent_and_nowhere_written(lab, replay, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(exchange.KEY_VARIABLE, KEY)
    out = tmp_path / "s"
    replay.faults.extend([None, 401])
    with pytest.raises(ScoreError, match=r"401 no: Bearer \(key\)\. Its key comes from") as error:
        score(lab, replay, out)
    assert KEY not in str(error.value)
    replay.faults.extend([None, *[503] * 1000])
    with pytest.raises(ScoreError, match=r"503 no: Bearer \(key\)") as error:
        score(lab, replay, out, server=replay.server(patience_seconds=0.5))
    replay.faults.clear()
    half_done(lab, replay, out)
    assert PLAN_FILE in store_bytes(out)
    assert KEY.encode() not in b"".join(store_bytes(out).values())
    score(lab, replay, out)
    assert KEY.encode() not in b"".join(store_bytes(out).values())
    assert set(replay.keys) == {f"Bearer {KEY}"}
    shown = capfd.readouterr()
    assert KEY not in shown.out + shown.err


def test_a_key_that_no_header_may_have_is_not_shown(lab, replay, tmp_path, monkeypatch):
    monkeypatch.setenv(exchange.KEY_VARIABLE, "two\nlines-of-a-key")
    with pytest.raises(UsageError, match="not allowed in a header") as error:
        score(lab, replay, tmp_path / "s")
    assert "lines-of-a-key" not in str(error.value)


@pytest.mark.parametrize("url", ["http://me:hidden@host:8000", "http://host:8000?key=hidden"])
def test_an_address_with_a_key_is_refused(lab, replay, tmp_path, url):
    with pytest.raises(UsageError, match="VOCAGNOLM_SERVER_KEY") as error:
        score(lab, replay, tmp_path / "s", server=Server(url=url))
    assert "hidden" not in str(error.value)


# ---- the command ----


def test_the_command(lab, replay, whole, tmp_path):
    words = ["score", "--teacher", lab / "teacher", "--corpus", lab / "corpus.jsonl"]
    words += ["--out", tmp_path / "s", "--context", "64", "--stride", "16", "--batch-tokens", "192"]
    words += ["--shard-documents", "3", "--server", f"{replay.url}/v1", "--server-model", "tiny"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert "3 shards scored" in result.stdout and store_bytes(tmp_path / "s") == whole
    shown = CliRunner().invoke(app, ["store", "inspect", str(tmp_path / "s")]).stdout
    assert "vllm 0.32.0, model tiny, context 64, stride 16" in shown


def test_a_teacher_of_the_caller_s_has_no_server(tmp_path, lab):
    with pytest.raises(ValueError, match="opened by name"):
        score_corpus(object(), lab / "corpus.jsonl", tmp_path / "s", server="http://localhost:1")


def test_conversations_are_read_in_the_template(tmp_path, monkeypatch):
    """The probe stays a text."""
    make_chat_lab(tmp_path, 4)
    teacher, corpus = tmp_path / "teacher", tmp_path / "corpus.jsonl"
    settings = dataclasses.replace(LOCAL_SETTINGS, context=None, stride=None)
    score_corpus(teacher, corpus, tmp_path / "local", settings=settings)
    model = NllModel(
        open_model(teacher, device="cpu").load(), context=512, stride=1, batch_tokens=512
    )

    class Served:
        name, version, model, longest = "vllm", "1", "tiny", 512

        def tokenize(self, text):
            return None

        def scores(self, prompts, alternatives=0):
            nll = model.document_nll([np.array(prompt) for prompt in prompts])
            return [TokenScores(one, None) for one in nll]

    monkeypatch.setattr("vocagnolm.model.served.model.open_engine", lambda *_: Served())
    server = Server(url="http://localhost:1")
    served = dataclasses.replace(SERVER_SETTINGS, context=None, stride=None)
    score_corpus(teacher, corpus, tmp_path / "served", settings=served, server=server)
    about = json.loads((tmp_path / "served" / "manifest.json").read_text())["identity"]
    assert about["template"]["origin"] == "own"
    pairs = list(zip(losses(tmp_path / "served"), losses(tmp_path / "local"), strict=True))
    assert len(pairs) == 4
    for (our_bytes, ours), (local_bytes, local) in pairs:
        assert np.array_equal(our_bytes, local_bytes)
        np.testing.assert_allclose(ours, local, atol=0.01)
