"""Corpora of right and wrong solutions: equal questions, and nothing but the label differs."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from made import sentencepiece_bpe
from study_kit import save_model

from vocagnolm.evaluate.render import Request, write_requests

sys.path.insert(0, str(Path(__file__).parents[2] / "runs"))
import solutions

LEVELS = ("00", "25", "50", "75")


def question(number: int) -> str:
    return f"Question: What is {number} + 1?\nAnswer:"


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    example = "Question: What is 1 + 1?\nAnswer: 1 + 1 = 2. The answer is 2.\n\n\n"
    requests = [
        Request("gsm8k", n, example + question(n), str(n + 1), ("\n\nQuestion:",), 8)
        for n in range(400)
    ]
    write_requests(path, requests)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["solutions.py", *map(str, arguments)])
    solutions.main()


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_corpora_of_equal_questions(
    tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "written.jsonl"
    with open(written, "w") as file:
        for n in range(400):
            for sample in range(4):  # every tenth question has no right solution
                right = sample < 2 and n % 10 > 0
                output = f" Way {sample}: {n} + 1 = {n + 1 + (not right)}. "
                output += f"The answer is {n + 1 + (not right)}."
                line = {"question": n, "sample": sample, "output": output, "complete": True}
                file.write(json.dumps(line) + "\n")
    run(monkeypatch, "mix", asked, written, "--out", tmp_path / "out")
    about = json.loads(capsys.readouterr().out)
    assert about["questions with both"] == 360 and about["right"] == pytest.approx(720 / 1600)
    corpora = {level: read(tmp_path / "out" / f"unchecked-{level}.jsonl") for level in LEVELS}
    questions = [Counter(d["question"] for d in corpus) for corpus in corpora.values()]
    assert all(counted == questions[0] for counted in questions)
    assert len(corpora["00"]) == 2 * (360 - solutions.HELD_OUT_QUESTIONS)
    wrong = {
        level: {d["text"] for d in corpus if not d["correct"]} for level, corpus in corpora.items()
    }
    for level, corpus in corpora.items():
        assert len(wrong[level]) / len(corpus) == pytest.approx(int(level) / 100, abs=0.02)
        right = read(tmp_path / "out" / f"unchecked-{level}-right.jsonl")
        assert right == [d for d in corpus if d["correct"]]
    assert wrong["25"] < wrong["50"] < wrong["75"]
    for document in corpora["50"]:
        number = document["question"]
        assert document["text"].startswith(question(number))  # type: ignore[union-attr,arg-type]
        said = document["text"].endswith(f"is {number + 1}.")  # type: ignore[union-attr,operator]
        assert document["correct"] == said
    every = {d["text"] for d in read(tmp_path / "out" / "unchecked.jsonl")}
    assert every == {d["text"] for corpus in corpora.values() for d in corpus}
    for name in ("right", "wrong"):
        for document in read(tmp_path / "out" / f"solutions-{name}.jsonl"):
            assert document["question"] not in questions[0]
            ((start, stop),) = document["counts"]  # type: ignore[misc]
            text = str(document["text"])
            assert text[start:stop].startswith(" Way") and stop == len(text)


def test_writing_samples_solutions(
    tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "writer", sentencepiece_bpe(400), seed=2, hidden=48)
    for share in (1, 2):
        out = tmp_path / f"{share}.jsonl"
        options = ["--samples", 2, "--limit", 4, "--share", f"{share}/2", "--max-new-tokens", 6]
        run(monkeypatch, "write", tmp_path / "writer", asked, out, *options, "--device", "cpu")
    lines = read(tmp_path / "1.jsonl") + read(tmp_path / "2.jsonl")
    assert sorted((x["question"], x["sample"]) for x in lines) == [  # type: ignore[type-var]
        (n, sample) for n in range(4) for sample in range(2)
    ]
    assert len({x["output"] for x in lines}) > 4  # drawn, not the likeliest


def test_parts_of_a_worked_solution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k").mkdir()
    row = {
        "question": "How many?",
        "answer": "In May 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = $<<48+24=72>>72.\n#### 72",
    }
    (tmp_path / "gsm8k" / "test.jsonl").write_text(json.dumps(row) + "\n")
    others = [
        {"text": f"Question: q\nAnswer: {n}", "question": n // 2, "correct": n % 2 == 0}
        for n in range(6)
    ]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(x) + "\n" for x in others))
    run(monkeypatch, "measures", tmp_path, tmp_path / "others.jsonl", "--out", tmp_path)
    (results,), (answers,) = read(tmp_path / "results.jsonl"), read(tmp_path / "answers.jsonl")
    text = str(results["text"])
    assert text == (
        "Question: How many?\nAnswer: In May 48/2 = 24 clips.\n"
        "That is 48+24 = $72. The answer is 72."
    )
    assert [text[a:b] for a, b in results["counts"]] == ["24", "72"]  # type: ignore[attr-defined]
    assert [text[a:b] for a, b in answers["counts"]] == ["72"]  # type: ignore[attr-defined]
    assert len(read(tmp_path / "mmlu-right.jsonl")) == 3
