"""`vocagnolm view` from the command line, with tokenizers alone and with models."""

import json
import re

import made
import pytest
from typer.testing import CliRunner

from vocagnolm.alignment import load_tokenizer
from vocagnolm.cli import app
from vocagnolm.errors import UsageError, VocagnolmError
from vocagnolm.report.view import Side, model_scorer, view_page

TEXT = "Probability, Uncertainty 🙂 naïve. $x^2 = 4$"


def page_of(path) -> dict:
    html = path.read_text(encoding="utf-8")
    block = re.search(r'id="data">(.*?)</script>', html, re.S)
    assert block is not None
    return json.loads(block.group(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return (
        made.save("sentencepiece prepend", root / "student"),
        made.save("byte-level", root / "teacher"),
    )


def test_tokenizers_alone_give_the_alignment(folders, tmp_path) -> None:
    student, teacher = folders
    out = tmp_path / "view.html"
    arguments = ["view", "--student", str(student), "--teacher", str(teacher), "--text", TEXT]
    result = CliRunner().invoke(app, [*arguments, "--html", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.strip() == str(out)
    page = page_of(out)
    [passage] = page["passages"]
    shown = "".join(passage["student"]["text"]).encode("utf-8", "surrogateescape").decode()
    assert shown == TEXT
    assert "excess" not in passage and "weights" not in passage
    [pair] = page["preflight"]
    assert (pair["student"], pair["teacher"], pair["ios"]) == ("student", "teacher", 1.0)


def test_files_are_read_byte_for_byte(folders, tmp_path) -> None:
    student, teacher = folders
    file = tmp_path / "crlf.txt"
    file.write_bytes(b"one\r\ntwo\n")
    arguments = ["view", "--student", str(student), "--teacher", str(teacher), "--file", str(file)]
    CliRunner().invoke(
        app, [*arguments, "--html", str(tmp_path / "v.html")], catch_exceptions=False
    )
    [passage] = page_of(tmp_path / "v.html")["passages"]
    assert "".join(passage["student"]["text"]) == "one\r\ntwo\n"
    assert passage["title"] == "crlf.txt"


def run_expecting_error(arguments: list[str]) -> str:
    with pytest.raises(VocagnolmError) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    return str(caught.value)


def test_wrong_calls_say_what_to_do(folders, tmp_path) -> None:
    student, _ = folders
    html = ["--html", str(tmp_path / "x.html")]
    assert "--teacher-model" in run_expecting_error(
        ["view", "--student", str(student), "--text", "a", *html]
    )
    pair = ["view", "--student", str(student), "--teacher", str(student)]
    assert "--text or --file" in run_expecting_error([*pair, *html])
    wrong = CliRunner().invoke(app, [*pair, "--text", "a", "--aggregation", "median", *html])
    said = " ".join(wrong.output.replace("│", "").split())  # some versions of typer draw a box
    assert wrong.exit_code == 2 and "'max', 'mean', 'sum'" in said
    assert not (tmp_path / "x.html").exists()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny models with unlike tokenizers."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("models")
    result = []
    for name in ("sentencepiece prepend", "byte-level"):
        torch.manual_seed(len(result))
        folder = made.save(name, root / ("teacher" if result else "student"))
        config = LlamaConfig(
            vocab_size=made.tokenizer(name).get_vocab_size(),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        result.append(folder)
    return result


def test_models_add_losses_excess_and_the_selection(models, tmp_path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    student, teacher = models
    out = tmp_path / "v.html"
    arguments = ["view", "--student-model", str(student), "--teacher-model", str(teacher)]
    arguments += ["--text", TEXT, "--text", "7 + 5 = 12", "--keep", "0.5", "--html", str(out)]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    page = page_of(out)
    passage = page["passages"][0]
    ids = torch.tensor([passage["student"]["ids"]])
    logits = AutoModelForCausalLM.from_pretrained(student)(ids).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert passage["student"]["nll"][0] is None
    assert passage["student"]["nll"][1:] == pytest.approx(expected.tolist(), abs=2e-3)
    mapped = [e for p in page["passages"] for e in p["excess"] if e is not None]
    kept = sum(sum(p["weights"]) for p in page["passages"])
    free = sum(  # scored by the student, but its teacher token has no loss: included
        n is not None and e is None
        for p in page["passages"]
        for n, e in zip(p["student"]["nll"], p["excess"], strict=True)
    )
    assert kept == -(-len(mapped) // 2) + free
    assert page["selection"]["keep"] == 0.5


def test_a_tokenizer_of_another_model_is_refused(models) -> None:
    student, teacher = models
    with pytest.raises(UsageError, match="is not the tokenizer of the model"):
        model_scorer(str(student), load_tokenizer(teacher))


def test_one_model_gives_its_own_losses_only(models) -> None:
    student, teacher = models
    tokenizer, scorer = model_scorer(str(teacher))
    page = view_page(Side(load_tokenizer(student)), [Side(tokenizer, scorer)], [("t", TEXT)])
    [passage] = page.passages
    assert passage.guidance is not None
    assert passage.excess is None and passage.weights is None
    assert "No model was run" not in page.subtitle
    assert f"The losses are those of {tokenizer.name}" in page.subtitle


def test_several_teachers_and_a_model_of_a_run(models, tmp_path) -> None:
    student, teacher = models
    run = tmp_path / "guided-7"
    run.mkdir()
    (run / "recipe.yaml").write_text("objective: {}\n")
    (run / "model").symlink_to(student)
    out = tmp_path / "v.html"
    arguments = ["view", "--student-model", str(run / "model"), "--teacher-model", str(teacher)]
    arguments += ["--teacher-model", str(student), "--text", TEXT, "--html", str(out)]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    page = page_of(out)
    [passage] = page["passages"]
    assert passage["student"]["name"] == "guided-7"
    assert [row["name"] for row in passage["teachers"]] == ["teacher", "student"]
    assert [pair["teacher"] for pair in page["preflight"]] == ["teacher", "student"]
    assert page["selection"]["combine"] == "min"
