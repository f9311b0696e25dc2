"""`evaluate --server`: answers of a model behind a server are those of the same model here."""

import json
import os
import shutil
import signal
from collections import Counter

import chat_kit
import pytest
from evaluation_kit import QUICK, make_model
from faults_kit import in_child, was_killed
from served_kit import Live
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import EvaluationError, ModelError, ServerError, UsageError
from vocagnolm.evaluate import evaluate
from vocagnolm.evaluate.results import RunFolder
from vocagnolm.model.served import ServedModel, exchange, fleet
from vocagnolm.questions.suite import SUITES

ASKED = {"batch_size": 2, "max_new_tokens": 8}


@pytest.fixture
def live(model_folder, monkeypatch):
    """One for each test: a request that was cut may be answered when its test is over."""
    monkeypatch.setattr(fleet, "_FIRST_PAUSE_SECONDS", 0.01)
    for name in (exchange.KEY_VARIABLE, exchange.USUAL_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    live = Live(model_folder)
    live.start()
    yield live
    live.stop()


@pytest.fixture
def tokenizer_only(model_folder, tmp_path):
    """A folder without weights."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model_folder / name, folder)
    return folder


def outputs(out):
    return {p.name: p.read_bytes() for p in (out / "evaluation/outputs").iterdir()}


def prompts_of(live):
    return Counter(tuple(ids) for content in live.sent for ids in content["prompt"])


def test_all_benchmarks_with_two_requests_in_three_failing(
    live, tokenizer_only, benchmarks, finished, tmp_path
):
    """The same bytes in every file of answers, whatever the server goes through."""
    wrong = [503, "broken", None, 429, "cut", None]
    live.faults.extend([None, *wrong * 200])
    found = evaluate(
        tokenizer_only, suite="math", benchmarks=benchmarks, out=tmp_path / "run",
        server=live.server(requests=3), **ASKED,
    )  # fmt: skip
    assert tuple(found.tasks) == SUITES["math"] and found == finished[1]
    assert outputs(tmp_path / "run") == outputs(finished[0])
    about = json.loads((tmp_path / "run/evaluation/settings.json").read_text())["settings"]
    assert about["device"] == "a server" and about["server"]["engine"] == "vllm"
    assert about["server"]["model"] == "tiny" and about["server"]["probe"]["measured"]
    # the same stop strings and limits
    stops = {stop for content in live.sent for stop in content["stop"]}
    assert {"\n\nQuestion:", "\n\nProblem:"} <= stops
    assert {content["max_tokens"] for content in live.sent} == {8}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_choices_by_likelihood_and_sglang(engine, model_folder, benchmarks, tmp_path, live):
    there = live
    if engine == "sglang":
        there = Live(model_folder, "sglang")
        there.start()
    asked = {"benchmarks": benchmarks, "tasks": "mawps,mathqa,sat", "limit": 2}
    asked |= {"choices": "likelihood"}
    evaluate(model_folder, out=tmp_path / "here", **asked, **QUICK)
    evaluate(model_folder, out=tmp_path / "there", server=there.server(), **asked, **ASKED)
    assert outputs(tmp_path / "there") == outputs(tmp_path / "here")
    if there is not live:
        there.stop()


def test_log_likelihoods_are_over_the_same_tokens(live, model_folder):
    from vocagnolm.generate import Generator, ServerGenerator
    from vocagnolm.model import open_model

    files = open_model(model_folder, device="cpu")
    served = ServedModel(live.server())
    served.take_probe(files.tokenizer, files.prefix_ids, given="it")
    prompts, options = ["Is 7 prime?\n", "a"], [[" yes", " no, never"], ["pple", "b", " 1"]]
    here = Generator(files.load(), files, 2)
    there = ServerGenerator(served, files, 2)
    found, expected = (
        dict(pair for batch in one.compare(prompts, options) for pair in batch)
        for one in (there, here)
    )
    here.close()
    for number, values in expected.items():
        assert found[number] == pytest.approx(values, abs=1e-4)


def test_protocol_of_the_paper_and_a_short_context(benchmarks, tmp_path):
    """Prompts that lose their beginning, and answers that the context limits."""
    folder = tmp_path / "model"
    folder.mkdir()
    make_model(folder, context=600)
    live = Live(folder)
    live.start()
    notes = []
    asked = {"tasks": "gsm8k,math500,mathqa", "benchmarks": benchmarks, "protocol": "paper"}
    asked |= {"max_new_tokens": 20, "batch_size": 2, "on_note": notes.append}
    evaluate(folder, out=tmp_path / "here", device="cpu", **asked)
    evaluate(folder, out=tmp_path / "there", server=live.url, **asked)
    live.stop()
    assert outputs(tmp_path / "there") == outputs(tmp_path / "here")
    assert notes[0] == notes[1] and "600 tokens" in notes[0]


def test_conversations(benchmarks, tmp_path):
    chat_kit.make_chat_lab(tmp_path)
    live = Live(tmp_path / "start")
    live.start()
    asked = {"tasks": "gsm8k,mmlu_stem", "benchmarks": benchmarks, "chat": True, "shots": 0}
    asked |= {"limit": 2, "choices": "likelihood", "max_new_tokens": 4}
    for name, where in (("here", {"device": "cpu"}), ("there", {"server": live.url})):
        evaluate(str(tmp_path / "start"), out=tmp_path / name, **asked, **where)
    live.stop()
    assert outputs(tmp_path / "there") == outputs(tmp_path / "here")


def test_bits_per_byte(live, model_folder, text, tmp_path):
    here = evaluate(model_folder, text=[text[0]], device="cpu").bits_per_byte
    there = evaluate(model_folder, text=[text[0]], server=live.url).bits_per_byte
    assert there == pytest.approx(here, rel=1e-5)


def test_killed_and_resumed_it_asks_nothing_twice(
    live, model_folder, benchmarks, tmp_path, monkeypatch
):
    asked = {"tasks": "gsm8k,svamp", "benchmarks": benchmarks, "max_new_tokens": 4}
    there = {"out": tmp_path / "run", "batch_size": 1}
    add_answers = RunFolder.add_answers

    def killed(self, task, answers):
        if len(self.answers(task)) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        add_answers(self, task, answers)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add_answers", killed)
        server = live.server(requests=1)
        assert was_killed(in_child(lambda: evaluate(model_folder, server=server, **asked, **there)))
    assert len(RunFolder(tmp_path / "run").answers("gsm8k")) == 3
    answered = {tuple(content["prompt"][0]) for content in live.sent[:3]}
    other = Live(model_folder)  # the first may still answer what was under way at the kill
    other.start()
    evaluate(model_folder, server=other.server(requests=1), **asked, **there)
    other.stop()
    assert sum(prompts_of(other).values()) == 7 - 3
    assert not answered & set(prompts_of(other))
    evaluate(model_folder, **asked, out=tmp_path / "here", batch_size=2, device="cpu")
    assert outputs(tmp_path / "run") == outputs(tmp_path / "here")


def test_an_error_of_ours_ends_what_is_under_way(live, model_folder, benchmarks, tmp_path):
    def interrupt(now):
        if now.fresh:
            raise KeyboardInterrupt

    asked = {"tasks": "gsm8k", "benchmarks": benchmarks, "out": tmp_path, "batch_size": 1}
    asked |= {"max_new_tokens": 4, "server": live.server(requests=1)}
    with pytest.raises(KeyboardInterrupt):
        evaluate(model_folder, on_progress=interrupt, **asked)
    assert len(prompts_of(live)) < 5
    evaluate(model_folder, **asked)
    assert len(prompts_of(live)) == 5


def test_another_model_is_refused(live, model_folder, other_model_folder, benchmarks, tmp_path):
    asked = {"tasks": "gsm8k", "benchmarks": benchmarks, "out": tmp_path / "run", "limit": 2}
    asked |= {"max_new_tokens": 2}
    evaluate(model_folder, server=live.url, **asked)
    other = Live(other_model_folder)
    other.start()
    with pytest.raises(EvaluationError, match=r"server.probe.measured: .* apart on the mean"):
        evaluate(model_folder, server=other.url, **asked)
    with pytest.raises(EvaluationError, match="device: 'a server' there, 'cpu' now"):
        evaluate(model_folder, device="cpu", **asked)
    other.stop()

    own, before = live.model, len(live.requests)

    def exchange(number):  # after the probe
        if number > before + 1:
            live.model = other.model

    live.on_request = exchange
    try:
        with pytest.raises(ServerError, match="have changed since this run began"):
            evaluate(
                model_folder, server=live.server(), **asked | {"out": tmp_path / "new", "limit": 3}
            )
    finally:
        live.model = own
    assert not RunFolder(tmp_path / "new").answers("gsm8k")


def test_an_error_of_the_server_ends_it_and_keeps_the_answers(
    live, model_folder, benchmarks, tmp_path
):
    # the probe, and then answers with a probe after each
    live.faults.extend([None] * 5 + [400])
    asked = {"tasks": "gsm8k", "benchmarks": benchmarks, "out": tmp_path, "batch_size": 1}
    asked |= {"max_new_tokens": 2, "server": live.server(patience_seconds=600, requests=1)}
    with pytest.raises(EvaluationError, match="refuses /v1/completions: 400"):
        evaluate(model_folder, **asked)
    assert len(RunFolder(tmp_path).answers("gsm8k")) == 2
    answered = [tuple(content["prompt"][0]) for content in live.sent[:2]]
    evaluate(model_folder, **asked)
    assert [prompts_of(live)[ids] for ids in answered] == [1, 1]


def test_where_the_tokenizer_comes_from(live, model_folder, benchmarks, tmp_path):
    asked = {"tasks": "gsm8k", "benchmarks": benchmarks, "limit": 1, "max_new_tokens": 2}
    assert evaluate(server=live.url, **asked) == evaluate(model_folder, device="cpu", **asked)
    entry = live.models["data"][0]
    entry["root"] = str(tmp_path / "elsewhere")
    try:
        with pytest.raises(
            ModelError, match=r"tokenizer is needed here: .*evaluate MODEL --server"
        ):
            evaluate(server=live.url, **asked)
    finally:
        entry["root"] = str(model_folder)
    with pytest.raises(UsageError, match="evaluate needs a MODEL"):
        evaluate(**asked)
    with pytest.raises(UsageError, match="do not apply with --server"):
        evaluate(model_folder, server=live.url, dtype="bfloat16", **asked)


def test_the_command_and_the_usual_key(live, model_folder, benchmarks, monkeypatch):
    monkeypatch.setenv(exchange.USUAL_KEY_VARIABLE, "sk-usual")
    words = ["evaluate", "--server", f"{live.url}/v1", "--model", "tiny", "--tasks", "svamp"]
    words += ["--benchmarks", str(benchmarks), "--max-new-tokens", "2", "--protocol", "paper"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tasks"]["svamp"]["n"] == 2
    assert set(live.keys) == {"Bearer sk-usual"}
    monkeypatch.setenv(exchange.KEY_VARIABLE, "of-this-server")
    live.keys.clear()
    CliRunner().invoke(app, words)
    assert set(live.keys) == {"Bearer of-this-server"}
    result = CliRunner().invoke(app, ["evaluate", str(model_folder), "--server-requests", "2"])
    assert "can only be used with --server" in str(result.exception)
    result = CliRunner().invoke(app, [*words, "--server-model", "large"])
    assert "among tiny" in str(result.exception)
