"""What a teacher's alternatives say at wrong results."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "runs"))
import wrong_answers
from wrong_answers import says

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "research/results/wrong-answers.json"


@pytest.mark.parametrize(
    "token, before, result, decided, expected",
    [
        (b"12", b"", b"12", 1, True),  # the result and no more
        (b"1", b"", b"12", 1, False),  # does not reach the byte that decides
        (b"1", b"", b"12", 0, True),
        (b" 12", b" ", b"12", 1, True),  # with what stands before the result
        (b" 12.", b" ", b"12", 1, True),
        (b" 123", b" ", b"12", 1, False),  # another number
        (b" 13", b" ", b"12", 1, False),
        (b".", b"", b"", 0, True),  # the result has ended here
        (b"4", b"", b"", 0, False),
        (b"(A", b"(", b"A", 0, True),
    ],
)
def test_a_token_says_a_result(
    token: bytes, before: bytes, result: bytes, decided: int, expected: bool
) -> None:
    assert says(token, before, result, decided) is expected


def test_one_right_and_one_wrong_solution_of_each_question(tmp_path: Path) -> None:
    filling = "Because of this and that, we go on and on. " * 6

    def row(question: str, letter: str, correct: bool, words: str = filling) -> str:
        text = f"Question: {question} ½\nAnswer: {words}The answer is ({letter})."
        return json.dumps({"text": text, "question": question, "correct": correct})

    lines = [
        row("good", "C", True),
        row("good", "A", False),
        row("short", "C", True),
        row("short", "A", False, words=""),  # too short: no wrong solution is left
        row("two", "C", True),
        row("two", "D", True),  # two right letters
        row("two", "A", False),
    ]
    path = tmp_path / "solutions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    right, wrong = wrong_answers.choice_pages(path, 400)
    assert (right.kind, wrong.kind) == ("right", "wrong")
    ((one,), (other,)) = right.results, wrong.results
    assert (one.written, one.right) == (b"C", b"C") and (other.written, other.right) == (b"A", b"C")
    for page, (result,) in ((right, right.results), (wrong, wrong.results)):
        assert page.text.encode()[result.start :].startswith(result.written + b")")


def test_the_demo_s_pages_know_what_is_wrong() -> None:
    pages = wrong_answers.demo_pages(60)
    found = [result for page in pages for result in page.results]
    assert {page.kind for page in pages} == {"right", "wrong"} and len(found) > 30
    assert all(
        (result.written != result.right) == (page.kind == "wrong")
        for page in pages
        for result in page.results
    )


def test_the_demo_s_teacher_says_what_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["wrong_answers.py", "demo", "--out", str(tmp_path), "--limit", "60"]
    monkeypatch.setattr(sys, "argv", arguments)
    wrong_answers.main()
    found = json.loads((tmp_path / "wrong-answers.json").read_text())
    for name in ("demo: wrong", "demo: right"):
        numbers = wrong_answers.summary(found[name])
        assert numbers["right"][0] > 95 and numbers["likeliest"][0] > 95
        assert numbers["right4"][0] <= numbers["right"][0]
    assert wrong_answers.summary(found["demo: wrong"])["written"][0] < 5
    assert "| demo: wrong |" in capsys.readouterr().out


def test_the_log_s_table_follows_from_what_is_kept() -> None:
    kept = json.loads(KEPT.read_text())
    del kept["columns"]
    assert wrong_answers.printed(kept) in (ROOT / "research/distillation.md").read_text()
