"""Benchmarks as conversations, in the model's own template."""

import json
from dataclasses import replace

import chat_kit
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from vocagnolm.chat import (
    Message,
    messages_of,
    shared_text,
    template_of,
    trained_ranges,
    trained_tokens,
)
from vocagnolm.cli import app
from vocagnolm.errors import UsageError
from vocagnolm.evaluate.run import evaluate
from vocagnolm.evaluate.settings import Questions
from vocagnolm.generate import Generator
from vocagnolm.model import open_model


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    chat_kit.make_chat_lab(folder)
    return folder


def asked(benchmarks, **more):
    return Questions(tasks="gsm8k,mmlu_stem", benchmarks=benchmarks, limit=2, chat=True, **more)


def test_examples_are_turns_and_the_question_is_last(benchmarks):
    requests = asked(benchmarks).render()
    talk = messages_of(requests["gsm8k"][0].prompt)
    assert [m.role for m in talk] == ["user", "assistant"] * 8 + ["user"]
    assert talk[-1].content == "Tom has 0 apples and buys 2. How many has he?"
    assert talk[1].content.endswith("The answer is 6.")
    assert requests["gsm8k"][0].stop == ()
    (alone,) = messages_of(asked(benchmarks, shots=0).render()["gsm8k"][0].prompt)
    assert alone.content.endswith(
        'buys 2. How many has he?\n\nEnd with "The answer is" and the number.'
    )
    two = asked(benchmarks, shots=2, choices="likelihood").render()["mmlu_stem"][0]
    talk = messages_of(two.prompt)
    assert [m.role for m in talk] == ["user", "assistant"] * 2 + ["user"]
    assert talk[1].content == "(B)" and two.options == ("(A)", "(B)", "(C)", "(D)")


def test_what_conversations_do_not_go_with(benchmarks):
    with pytest.raises(UsageError, match="remove --chat"):
        asked(benchmarks, protocol="paper").render()
    with pytest.raises(UsageError, match="--shots can only be used with --chat"):
        Questions(tasks="gsm8k", benchmarks=benchmarks, shots=1).render()


@pytest.mark.parametrize("side", ["start", "teacher"])
def test_answers_are_those_of_transformers(lab, benchmarks, side):
    """Prompts of the model's own template, greedy answers that end with its turn."""
    requests = asked(benchmarks, shots=1).render()["gsm8k"]
    files = open_model(str(lab / side), device="cpu")
    model = files.load()
    chat = chat_kit.loaded(lab / side)
    theirs = AutoTokenizer.from_pretrained(lab / side)
    generator = Generator(model, files, 2, chat)
    try:
        prompts = [request.prompt for request in requests]
        rows = generator.encode(prompts)
        batches = list(generator.generate(prompts, stop=(), max_new_tokens=6))
    finally:
        generator.close()
    found = {index: answer for batch in batches for index, answer in batch}
    reference = AutoModelForCausalLM.from_pretrained(lab / side)
    end = theirs.convert_tokens_to_ids("<|im_end|>" if side == "start" else "<|eot|>")
    assert chat.end_of_turn == end and end in generator.ends
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        written = [{"role": m.role, "content": m.content} for m in messages_of(prompt)]
        ids = theirs.apply_chat_template(
            written, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        assert row == ids[0].tolist()
        made = reference.generate(
            ids, max_new_tokens=6, do_sample=False, eos_token_id=sorted(generator.ends)
        )[0, ids.shape[1] :].tolist()
        kept = [token for token in made if token not in generator.ends]
        expected = b"".join(files.tokenizer.bytes_of(token) or b"" for token in kept)
        assert found[number].output == expected.decode(errors="replace")


def test_options_are_read_as_answers_in_the_template(lab, benchmarks):
    (request, *_) = asked(benchmarks, shots=1, choices="likelihood").render()["mmlu_stem"]
    chat = chat_kit.loaded(lab / "start")
    prompt = chat.answering_ids(request.prompt)
    whole = chat.answering_ids(request.prompt + request.options[1])
    assert whole[: len(prompt) - 1] == prompt[:-1]
    spelled = b"".join(chat.bytes_of(token) or b"" for token in whole[len(prompt) - 1 :])
    assert spelled.endswith(b"(B)") and chat.end_of_turn not in whole[len(prompt) :]


def test_evaluate_chat(lab, benchmarks, tmp_path):
    found = evaluate(
        str(lab / "start"), asked(benchmarks, shots=0, max_new_tokens=4), out=tmp_path / "run",
        device="cpu", template_options={"enable_thinking": False},
    )  # fmt: skip
    assert set(found.tasks) == {"gsm8k", "mmlu_stem"}
    conditions = found.conditions["gsm8k"]
    assert conditions["chat"] is True and conditions["few_shot"] == 0
    (file,) = (tmp_path / "run" / "evaluation" / "outputs").glob("gsm8k*")
    first = json.loads(file.read_text().splitlines()[0])
    assert first["prompt"].startswith("user: Tom has 0 apples") and "reasoning" not in first
    settings = json.loads((tmp_path / "run" / "evaluation" / "settings.json").read_text())
    own = template_of(chat_kit.loaded(lab / "start").base, None, {"enable_thinking": False})
    assert settings["settings"]["template"] == own.fingerprint


def test_the_content_is_graded_and_the_reasoning_kept_apart(lab, benchmarks, tmp_path):
    """gpt-oss writes both in channels of their own."""
    source = (chat_kit.TEMPLATES / "trl" / "gptoss.jinja").read_text("utf-8")
    control = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"]
    folder = chat_kit.save_chat_tokenizer(tmp_path / "student", lab / "bytes", source, control)
    chat = chat_kit.loaded(folder)
    asks = replace(asked(benchmarks, shots=0, max_new_tokens=64), tasks="gsm8k", limit=1)
    (request,) = asks.render()["gsm8k"]
    answer = Message("assistant", f"The answer is {request.gold}.", reasoning="let me see")
    text = shared_text([*messages_of(request.prompt), answer])
    tokens = chat.spans(text)
    mask = trained_tokens(tokens, trained_ranges(text, "assistant"))
    size = max(chat.vocabulary.values()) + 1
    model = chat_kit.learned_by_heart(size, [tokens.ids.tolist()], [mask])
    model.save_pretrained(folder)
    found = evaluate(str(folder), asks, out=tmp_path / "run", device="cpu")
    assert found.tasks["gsm8k"].score == 100
    (file,) = (tmp_path / "run" / "evaluation" / "outputs").glob("gsm8k*")
    record = json.loads(file.read_text())
    assert record["output"] == answer.content and record["reasoning"] == answer.reasoning
    assert record["complete"] is True


def test_command(lab, benchmarks):
    arguments = [
        *("evaluate", str(lab / "start"), "--chat", "--shots", "0", "--tasks", "gsm8k", "--json"),
        *("--benchmarks", str(benchmarks), "--limit", "1", "--max-new-tokens", "2"),
        *("--device", "cpu", "--text", str(lab / "corpus.jsonl")),
        *("--template-option", "enable_thinking=false"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["conditions"]["gsm8k"]["chat"] is True
    # random weights: about log2 of the vocabulary over the bytes of a token
    assert 1 < values["bits_per_byte"] < 10
