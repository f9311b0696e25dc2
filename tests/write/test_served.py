"""Teachers behind servers: what they write is what the model gives, nothing is asked twice, and
what servers do wrong is said."""

import json
import os
import pickle
import signal
import threading
import time
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from faults_kit import in_child, kill_at, some, was_killed, write_points
from served_kit import LiveWriter
from typer.testing import CliRunner
from write.write_kit import folder_bytes, opened, save_writer, write_prompts
from write.write_kit import rows_of as plain_rows

from vocagnolm.alternatives import STEPS_PER_NAT
from vocagnolm.cli import app
from vocagnolm.errors import (
    LimitError,
    ScoreError,
    ServerError,
    StoreError,
    UsageError,
    VocagnolmWarning,
    WaitingWarning,
)
from vocagnolm.jobs.cluster import ShardActor
from vocagnolm.model.served import exchange, fleet
from vocagnolm.score import Server, Share, Spending, WriteSettings, write_answers
from vocagnolm.score.plan import PLAN_FILE
from vocagnolm.score.write import open_worker
from vocagnolm.store import LossStore, verify_store
from vocagnolm.store.export import export_parquet
from vocagnolm.store.format import ANSWER_FOLDER

SETTINGS = WriteSettings(samples=3, max_new_tokens=20, alternatives=4, shard_prompts=4)
HALF = 2.0**-10
"""A step of half precision, relative."""
ENGINES = ("vllm", "sglang", "chat")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    save_writer(folder / "teacher")
    write_prompts(folder / "prompts.jsonl")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fleet, "_FIRST_PAUSE_SECONDS", 0.01)
    for name in (exchange.KEY_VARIABLE, exchange.USUAL_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(lab):
    """Starts servers, and ends them with the test."""
    servers = []

    def start(engine="vllm"):
        live = LiveWriter(lab / "teacher", "vllm" if engine == "chat" else engine)
        live.start()
        servers.append(live)
        return live

    yield start
    for live in servers:
        live.stop()


def write(lab, live, out, engine="vllm", **options):
    teacher = None if engine == "chat" else lab / "teacher"
    given = {"settings": SETTINGS, "server": live.server()} | options
    return write_answers(teacher, lab / "prompts.jsonl", out, **given)


def content_of(folder):
    """All files but the card, which has the folder's name."""
    return {name: data for name, data in folder_bytes(folder).items() if name != "README.md"}


def rows_of(folder, name="data"):
    """Rows whose answers have no white space at their edges, which a template may leave there."""
    rows = plain_rows(folder, name)
    for row in rows if name == "data" else []:
        if "messages" in row:
            row["messages"][-1]["content"] = row["messages"][-1]["content"].strip()
    return rows


def identity(folder):
    return json.loads((folder / "manifest.json").read_text())["identity"]


# ---- what is written ----


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_and_alternatives_are_those_of_a_forced_pass(lab, started, tmp_path, engine):
    live = started(engine)
    seen = []
    summary = write(lab, live, tmp_path / "w", engine, on_progress=seen.append)
    assert summary.folder["complete"] and summary.written_shards == 3
    assert verify_store(tmp_path / "w") == [] and not (tmp_path / "w" / ANSWER_FOLDER).exists()
    assert seen[-1].documents == 30 and seen[-1].tokens == summary.tokens
    store, rows = LossStore.open(tmp_path / "w"), rows_of(tmp_path / "w")
    assert len(store) == len(rows) > 20
    spelled = [store.vocabulary[n] for n in range(len(store.vocabulary))]
    ends = set(store.vocabulary.ends.tolist())
    for number, row in enumerate(rows):
        prompt, made = given_answer(live, row)
        logs = forced(lab, [*prompt, *made])[len(prompt) - 1 : -1]
        kept = [place for place in range(len(made)) if shows(live, made, place)]
        columns = store.columns(number)
        known = ~np.isnan(columns["nll"])
        nll = -logs[kept, np.array(made)[kept]]
        assert np.abs(columns["nll"][known] - nll).max() <= 1e-4 + HALF * nll.max()
        given = store.alternatives(number).at(np.flatnonzero(known))
        for place, ids, steps, follows in zip(
            kept, given.ids, given.packed & 2047, given.follows, strict=True
        ):
            likeliest = (-logs[place]).argsort(kind="stable")[: SETTINGS.alternatives]
            wanted = [None if n in live.ends else live.texts.bytes_of(n) for n in likeliest]
            assert [None if n in ends else spelled[n] for n in ids] == wanted
            assert np.abs(steps / STEPS_PER_NAT + logs[place][likeliest]).max() < 0.5 / 128 + 1e-4
            assert follows.tolist() == [n == made[place] for n in likeliest]


def given_answer(live, row):
    """Ids of the prompt and of the answer that a row holds, as the server gave them."""
    text = live.template.render(messages=row["messages"][:-1], add_generation_prompt=True)
    prompt = live.tokenizer.encode(text, add_special_tokens=False).ids
    for ids, made in live.given:
        data = b"".join(live.texts.bytes_of(n) or b"" for n in made if n not in live.ends)
        if ids == prompt and data.decode().strip() == row["messages"][-1]["content"]:
            return ids, made
    raise AssertionError("nobody gave this answer")


def forced(lab, ids):
    with torch.inference_mode():
        return opened(lab / "teacher")[1](torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def shows(live, made, place):
    """Whether a token has a part in the conversation: all but white space at either end."""
    spelled = [live.texts.bytes_of(n) or b"" for n in made]
    before, behind = b"".join(spelled[:place]), b"".join(spelled[place:])
    own = spelled[place].strip()
    return bool(made[place] in live.ends or own or (before.strip() and behind.strip()))


def test_both_ways_give_the_same_folder(lab, started, tmp_path):
    """The same draws by ids and through the chat endpoint, but for what ids spell."""
    live = started()
    write(lab, live, tmp_path / "ids")
    write(lab, live, tmp_path / "chat", "chat")
    assert rows_of(tmp_path / "ids") == rows_of(tmp_path / "chat")
    for name in ("prompt_index", "answer_index", "reason"):
        ours, theirs = (rows_of(tmp_path / way, "dropped") for way in ("ids", "chat"))
        assert [row[name] for row in ours] == [row[name] for row in theirs]
    by_ids, by_text = LossStore.open(tmp_path / "ids"), LossStore.open(tmp_path / "chat")
    for number in range(len(by_ids)):
        ours, theirs = by_ids.columns(number), by_text.columns(number)
        drawn = ~np.isnan(ours["nll"])
        assert np.array_equal(ours["nll"][drawn], theirs["nll"][~np.isnan(theirs["nll"])])


def test_the_vocabulary_of_a_chat_endpoint_is_what_was_seen(lab, started, tmp_path):
    """It is no part of the identity, and every reader gets it."""
    live = started()
    write(lab, live, tmp_path / "w", "chat")
    about = identity(tmp_path / "w")
    assert about["alternatives"] == {"count": 4, "sampled": False}
    assert "tokenizer" not in about and about["server"]["engine"] == "chat completions"
    assert live.url not in json.dumps(about)
    store = LossStore.open(tmp_path / "w")
    entries = [store.vocabulary[n] for n in range(len(store.vocabulary))]
    assert entries == sorted(set(entries)) and entries[0] == b""
    assert store.vocabulary.ends.tolist() == [0]
    assert all(shard.entries for shard in store.shards())
    export_parquet(tmp_path / "w", tmp_path / "w.parquet")
    (tmp_path / "w" / "vocabulary.safetensors").write_bytes(b"?")
    assert "do not match the checksum" in verify_store(tmp_path / "w")[0]
    write(lab, live, tmp_path / "w", "chat")
    assert verify_store(tmp_path / "w") == []


def test_the_teacher_s_context_and_stops(lab, started, tmp_path):
    """System message and examples are sent, and in no conversation; a stop ends an answer."""
    live = started()
    (tmp_path / "examples.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "completion": "2"}))
    changes = {"system": "Be brief.", "examples": str(tmp_path / "examples.jsonl"), "stop": ["re"]}
    settings = replace(SETTINGS, **changes)
    write(lab, live, tmp_path / "chat", "chat", settings=settings)
    write(lab, live, tmp_path / "ids", settings=settings)
    sent = live.bodies[-1]["messages"]
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "user"]
    assert live.bodies[-1]["stop"] == ["re"]
    for name in ("chat", "ids"):
        rows = rows_of(tmp_path / name)
        assert rows and all(len(row["messages"]) == 2 for row in rows)
        assert all("re" not in row["messages"][-1]["content"] for row in rows)
    assert rows_of(tmp_path / "ids") == rows_of(tmp_path / "chat")
    assert identity(tmp_path / "chat")["writing"]["system"] == "Be brief."


def test_a_base_model_goes_on_with_texts(lab, started, tmp_path):
    live = started()
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "the proof of the number is " * 9}))
    options = {"settings": SETTINGS, "server": live.server(), "continues": True}
    options |= {"prompt_tokens": 12}
    write_answers(lab / "teacher", tmp_path / "texts.jsonl", tmp_path / "w", **options)
    assert all(row["text"].startswith("the proof") for row in rows_of(tmp_path / "w"))
    with pytest.raises(UsageError, match=r"--continue does not apply to a chat endpoint"):
        write_answers(None, tmp_path / "texts.jsonl", tmp_path / "z", **options)


# ---- nothing is asked twice ----


@pytest.mark.parametrize("engine", ["vllm", "chat"])
def test_killed_at_every_step_of_writing_it_asks_nothing_twice(lab, started, tmp_path, engine):
    whole = tmp_path / "whole"
    live = started()
    options = {"server": live.server(requests=1), "settings": replace(SETTINGS, shard_prompts=10)}
    steps = write_points(lambda: write(lab, live, whole, engine, **options))
    expected = content_of(whole)
    lost = 2 * (16 if engine == "vllm" else 3)  # one request, and what is queued behind it
    probes = 8  # of two starts
    for number, step in some(list(enumerate(steps, start=1)), 4):
        out, before = tmp_path / f"killed-{number}", len(live.given)
        kill_at(number, lambda out=out: write(lab, live, out, engine, **options))
        write(lab, live, out, engine, **options)
        assert content_of(out) == expected, f"killed at {step}"
        assert len(live.given) - before <= 30 + lost + probes, f"killed at {step}"


def test_killed_while_a_server_answers(lab, started, tmp_path):
    live, out = started(), tmp_path / "w"
    options = {"server": live.server(requests=1), "settings": replace(SETTINGS, shard_prompts=10)}
    write(lab, live, tmp_path / "whole", "chat", **options)
    live.bodies.clear()
    child = in_child(lambda: write(lab, live, out, "chat", **options))
    while len(live.bodies) < 12:
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    assert was_killed(child)
    there = len([*(out / ANSWER_FOLDER).iterdir()])
    assert there >= 5
    live.bodies.clear()
    write(lab, live, out, "chat", **options)
    probes = 3
    assert len(live.bodies) <= probes + 10 - there + 1  # one was under way at the kill
    assert content_of(out) == content_of(tmp_path / "whole")


def test_answers_of_other_settings_are_not_mixed(lab, started, tmp_path):
    live = started()
    with pytest.raises(LimitError):
        spending = Spending(max_requests=2)
        write(lab, live, tmp_path / "w", "chat", spending=spending)
    assert [*(tmp_path / "w" / ANSWER_FOLDER).iterdir()]
    with pytest.raises(StoreError, match=r"writing.temperature: the store has 0.7, this run has"):
        write(lab, live, tmp_path / "w", "chat", settings=replace(SETTINGS, temperature=0.5))
    (damaged, *_) = sorted((tmp_path / "w" / ANSWER_FOLDER).iterdir())
    damaged.write_bytes(damaged.read_bytes().replace(b'"nll": "', b'"nll": "A', 1))
    with pytest.warns(VocagnolmWarning, match=r"is damaged .* its prompts are asked again"):
        write(lab, live, tmp_path / "w", "chat")
    write(lab, live, tmp_path / "whole", "chat")
    assert content_of(tmp_path / "w") == content_of(tmp_path / "whole")


def test_limits_end_a_run_and_the_next_one_goes_on(lab, started, tmp_path):
    live = started()
    write(lab, live, tmp_path / "whole", "chat")
    asked = len(live.bodies)
    words = r"--max-requests 4 is reached: 4 requests and \d+ tokens in this run\. 18 of 30 answers"
    with pytest.raises(LimitError, match=words):
        write(lab, live, tmp_path / "w", "chat", spending=Spending(max_requests=4))
    with pytest.raises(LimitError, match=r"--max-server-tokens 1 is reached"):
        one = live.server(requests=1)
        write(lab, live, tmp_path / "w", "chat", server=one, spending=Spending(max_server_tokens=1))
    summary = write(lab, live, tmp_path / "w", "chat")
    probes = asked - 10
    assert len(live.bodies) - asked == 10 + 3 * probes
    assert summary.folder["complete"]
    assert content_of(tmp_path / "w") == content_of(tmp_path / "whole")


@pytest.mark.parametrize("engine", ["vllm", "chat"])
def test_shares_and_workers_of_a_cluster(lab, started, tmp_path, engine):
    live = started()
    write(lab, live, tmp_path / "whole", engine)
    out = tmp_path / "w"
    first = write(lab, live, out, engine, share=Share(1, 2))
    assert first.missing_shares == ["2/2"] and (out / PLAN_FILE).exists()
    actor = ShardActor(pickle.dumps(partial(open_worker, str(out), None)))
    actor.load()
    actor.work(1, None)
    write(lab, live, out, engine, share=Share(2, 2))
    assert content_of(out) == content_of(tmp_path / "whole")


# ---- several servers ----


def test_one_of_several_goes_away_and_the_work_goes_on(lab, started, tmp_path):
    first, second = started(), started()
    write(lab, first, tmp_path / "whole", "chat")
    before = len(first.bodies)

    def dying(body):
        if len(first.bodies) == before + 6:
            threading.Thread(target=first.stop).start()
            raise ConnectionError
        return None

    first.refuses = dying
    server = Server(url=[first.url, second.url], patience_seconds=20, requests=1)
    with pytest.warns(WaitingWarning, match=rf"{first.url} does not answer .* goes on with"):
        summary = write(lab, first, tmp_path / "w", "chat", server=server)
    assert summary.folder["complete"] and second.bodies
    assert content_of(tmp_path / "w") == content_of(tmp_path / "whole")
    first.start()


def test_requests_go_to_both(lab, started, tmp_path):
    first, second = started(), started()
    urls = [first.url, second.url]
    for engine in ("vllm", "chat"):
        server = Server(url=urls, patience_seconds=20, requests=2)
        write(lab, first, tmp_path / engine, engine, server=server)
        assert first.given and second.given
        assert len(first.given) + len(second.given) >= 30
        for live in (first, second):
            assert live.most_at_once <= 2
            live.given.clear()
    assert rows_of(tmp_path / "vllm") == rows_of(tmp_path / "chat")


def test_all_away_is_said_and_ends_in_an_error(lab, started, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "_SAID_SECONDS", 0.1)
    first, second = started(), started()
    server = Server(url=[first.url, second.url], patience_seconds=1.5)
    for live in (first, second):
        live.faults.extend([None] * 4 + [503] * 10000)
    with (
        warnings.catch_warnings(record=True) as said,
        pytest.raises(ServerError, match=r"no server has responded usefully for 2 s; last errors"),
    ):
        warnings.simplefilter("always")
        write(lab, first, tmp_path / "w", "chat", server=server)
    texts = [str(one.message) for one in said]
    assert any(
        "waiting for http" in text and "(503" in text and "(--server-patience)" in text
        for text in texts
    )
    assert all(len(text) < 2000 for text in texts)
    monkeypatch.undo()
    for live in (first, second):
        live.faults.clear()
    assert write(lab, first, tmp_path / "w", "chat").folder["complete"]


def test_servers_that_are_not_alike_are_refused(lab, started, tmp_path):
    first, second = started(), started()
    second.models["data"][0]["max_model_len"] = 64
    server = Server(url=[first.url, second.url], patience_seconds=20, requests=1)
    with pytest.raises(ServerError, match=r"not alike: .* has context 64"):
        write(lab, first, tmp_path / "w", server=server)
    second.most_likely = 2
    with (
        pytest.warns(VocagnolmWarning, match="at most 2 tokens"),
        pytest.raises(ServerError, match=r"not alike: .* has abilities"),
    ):
        write(lab, first, tmp_path / "z", "chat", server=server)
    with pytest.raises(UsageError, match="names an address twice"):
        twice = Server(url=[first.url, f"{first.url}/v1"])
        write(lab, first, tmp_path / "z", "chat", server=twice)


def test_rate_limits_are_obeyed(lab, started, tmp_path):
    live = started()
    write(lab, live, tmp_path / "whole", "chat")
    live.retry_after = "1"
    live.faults.extend([None, None, None, 429, None, 500, "broken", None, "cut", 503])
    write(lab, live, tmp_path / "w", "chat")
    assert not live.faults
    assert content_of(tmp_path / "w") == content_of(tmp_path / "whole")


def test_an_answer_that_drips_is_given_up(lab, started, tmp_path):
    live = started()
    live.faults.extend([None] * 3 + ["drip"])
    with pytest.raises(ServerError, match=r"usefully for 1 s; last error: TimeoutError: no whole"):
        one = live.server(requests=1, patience_seconds=1)
        write(lab, live, tmp_path / "w", "chat", server=one)
    assert write(lab, live, tmp_path / "w", "chat").folder["complete"]


# ---- what servers can do ----


@pytest.mark.parametrize("engine", ENGINES)
def test_scaled_log_probabilities_are_refused(lab, started, tmp_path, engine):
    live = started(engine)
    live.raw = False
    with pytest.raises(ServerError, match=r"not the raw ones: at temperature 0.7 they are \d"):
        write(lab, live, tmp_path / "w", engine)
    for changes in ({"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.5}):
        with pytest.raises(ServerError, match="--temperature 1 and without --top-p"):
            write(lab, live, tmp_path / "w", engine, settings=replace(SETTINGS, **changes))
    assert not (tmp_path / "w").exists()
    at_one = replace(SETTINGS, temperature=1.0)
    assert write(lab, live, tmp_path / "w", engine, settings=at_one).folder["complete"]
    if engine == "chat":
        texts = replace(SETTINGS, alternatives=0)
        with pytest.warns(VocagnolmWarning, match="not raw, so its answers are kept as texts"):
            folder = write(lab, live, tmp_path / "t", engine, settings=texts).folder
        assert folder["scored_tokens"] == 0 and folder["documents"] > 20


def test_fewer_alternatives_than_asked_for(lab, started, tmp_path):
    live = started()
    live.most_likely = 3
    with pytest.warns(VocagnolmWarning, match=r"at most 3 tokens at a place: 3 alternatives are"):
        write(lab, live, tmp_path / "w", "chat")
    assert LossStore.open(tmp_path / "w").kept_alternatives.count == 3
    live.most_likely = 0
    at_one = replace(SETTINGS, temperature=1.0)
    with pytest.warns(VocagnolmWarning, match="no alternatives are kept, not 4"):
        folder = write(lab, live, tmp_path / "z", "chat", settings=at_one).folder
    assert "alternatives" not in folder and folder["mean_nll"] > 0
    live.max_logprobs = 3
    with pytest.raises(ScoreError, match=r"Start the server with --max-logprobs 5, or ask for"):
        write(lab, live, tmp_path / "y")


def test_a_server_without_log_probabilities_gives_texts(lab, started, tmp_path):
    live = started()
    write(lab, live, tmp_path / "whole", "chat")
    live.numbers = False
    with pytest.warns(VocagnolmWarning, match="it gives no log probabilities, so its answers"):
        folder = write(lab, live, tmp_path / "w", "chat").folder
    assert rows_of(tmp_path / "w") == rows_of(tmp_path / "whole")
    assert folder["scored_tokens"] == 0 and folder["bits_per_byte"] is None
    assert folder["server"]["numbers"] == "none" and verify_store(tmp_path / "w") == []
    live.refuses = lambda body: "logprobs are not supported" if "logprobs" in body else None
    with pytest.warns(VocagnolmWarning, match="it gives no log probabilities"):
        write(lab, live, tmp_path / "z", "chat")
    assert content_of(tmp_path / "z") == content_of(tmp_path / "w")


def test_a_server_with_one_answer_at_a_time(lab, started, tmp_path):
    live = started()
    live.has_n = False
    summary = write(lab, live, tmp_path / "w", "chat")
    assert summary.folder["documents"] > 20
    live.has_n = True
    live.bodies.clear()
    live.refuses = lambda body: "n must be 1" if "n" in body else None
    write(lab, live, tmp_path / "z", "chat")
    assert not any("n" in body for body in live.bodies[1:])


def test_hidden_reasoning_is_refused_unless_it_is_asked_for(lab, started, tmp_path):
    live = started()

    def thinking(choice):
        choice["message"]["reasoning_content"] = "Let me see."
        if choice["logprobs"] and choice["message"]["content"]:
            entry = {"token": "Let me see.", "bytes": None, "logprob": -0.5, "top_logprobs": []}
            choice["logprobs"]["content"].insert(0, entry)
        return choice

    write(lab, live, tmp_path / "plain", "chat")
    live.change_chat = thinking
    with pytest.raises(ServerError, match=r"thinks before it answers.*--keep-reasoning"):
        write(lab, live, tmp_path / "w", "chat")
    kept = replace(SETTINGS, keep_reasoning=True)
    write(lab, live, tmp_path / "w", "chat", settings=kept)
    assert identity(tmp_path / "w")["writing"]["hidden_reasoning"] == "kept"
    rows, plain = rows_of(tmp_path / "w"), rows_of(tmp_path / "plain")
    assert [row["messages"][-1].pop("reasoning_content") for row in rows] == ["Let me see."] * len(
        rows
    )
    assert rows == plain
    ours, theirs = LossStore.open(tmp_path / "w"), LossStore.open(tmp_path / "plain")
    for number in range(len(ours)):
        losses = [store.columns(number)["nll"] for store in (ours, theirs)]
        one, other = (nll[~np.isnan(nll)] for nll in losses)
        assert np.array_equal(one, other)


def test_options_of_requests(lab, started, tmp_path):
    live = started()
    options = {"provider": {"require_parameters": True}, "max_tokens": None, "max_new": 3}
    settings = replace(
        SETTINGS, server_options=options, template_options={"enable_thinking": False}
    )

    def refuse(body):
        body.setdefault("max_tokens", 20)

    live.refuses = refuse
    write(lab, live, tmp_path / "w", "chat", settings=settings)
    body = live.bodies[-1]
    assert body["provider"] == {"require_parameters": True} and body["max_new"] == 3
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert identity(tmp_path / "w")["writing"]["server_options"]["max_new"] == 3
    for name, value, words in (
        ("temperature", 0.5, "use --temperature instead"),
        ("logprobs", None, "use the options of this command"),
        ("temperature", None, "write with --temperature 1"),
    ):
        with pytest.raises(UsageError, match=words):
            changed = replace(SETTINGS, server_options={name: value})
            write(lab, live, tmp_path / "z", "chat", settings=changed)
    with pytest.raises(UsageError, match="is for chat endpoints, without --teacher"):
        write(lab, live, tmp_path / "z", settings=replace(SETTINGS, server_options={"a": 1}))
    for changes, words in (
        ({"dtype": "float32"}, "--dtype does not apply with --server"),
        ({"rows": 8}, "--rows does not apply with --server"),
    ):
        with pytest.raises(UsageError, match=words):
            write(lab, live, tmp_path / "z", settings=replace(SETTINGS, **changes))
    with pytest.raises(UsageError, match="a teacher: --teacher, --server, or both"):
        write_answers(None, lab / "prompts.jsonl", tmp_path / "z")


# ---- the command ----


def test_the_command_and_its_dry_run(lab, started, tmp_path, monkeypatch):
    monkeypatch.setenv(exchange.KEY_VARIABLE, "secret-271828")
    first, second = started(), started()
    words = ["write", "--prompts", lab / "prompts.jsonl", "--out", tmp_path / "w"]
    words += ["--samples", "3", "--max-new-tokens", "20", "--alternatives", "4"]
    words += ["--server", first.url, "--server", f"{second.url}/v1", "--server-model", "tiny"]
    words += ["--shard-prompts", "4", "--server-option", "provider={only: [a]}"]

    def run(*more):
        return CliRunner().invoke(app, [str(word) for word in (*words, *more)])

    shown = run("--dry-run", "--price-input", "2", "--price-output", "1000")
    assert shown.exit_code == 0, shown.output
    assert "user: " in shown.stdout and "at most 600" in shown.stdout
    assert "requests      10" in shown.stdout and "price         at most 0.60" in shown.stdout
    assert not (tmp_path / "w").exists()
    stopped = run("--max-requests", "3")
    assert isinstance(stopped.exception, LimitError)
    result = run()
    assert result.exit_code == 0, result.output
    assert first.bodies[-1]["provider"] == {"only": ["a"]} and second.bodies
    assert "alternatives  4 per token" in result.stdout
    assert set(first.keys) == {"Bearer secret-271828"}
    assert b"secret" not in b"".join(folder_bytes(tmp_path / "w").values())
    by_ids = run("--teacher", lab / "teacher")
    assert "is for chat endpoints" in str(by_ids.exception)
    alone = words[: words.index("--server")]
    lacking = CliRunner().invoke(app, [str(word) for word in (*alone, "--max-requests", "3")])
    assert "--max-requests can only be used with --server" in str(lacking.exception)
