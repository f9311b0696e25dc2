import hashlib

import pytest
import yaml
from evaluation_kit import ROWS, write_rows

from vocagnolm.errors import BenchmarkError, UsageError
from vocagnolm.evaluate.render import (
    TASK_FOLDER,
    read_requests,
    render,
    shots_of,
    spread,
    task_file,
    write_requests,
)
from vocagnolm.questions import grade
from vocagnolm.questions.benchmarks import SOURCES, load_examples, split_options
from vocagnolm.questions.suite import AVERAGES, SUITES, TASKS, task_named, tasks_named


def test_every_format_is_read(benchmarks):
    examples = {name: load_examples(name, benchmarks) for name in TASKS}
    golds = {name: [e.gold for e in listed] for name, listed in examples.items()}
    assert golds["gsm8k"] == ["2", "3", "4", "5", "6"]
    assert golds["math500"] == ["2", "\\frac{1}{2}"]
    assert golds["math"] == ["2", "\\frac{1}{2}", "[2,\\infty)"]
    assert golds["svamp"] == ["145.0", "3.0"]
    assert golds["asdiv"] == ["9 (apples)", "Yes"]  # the row with two answers is left out
    assert golds["tabmwp"] == ["84", "shortage"]
    assert golds["mathqa"] == ["A", "E", "C"]
    assert golds["mmlu_stem"] == ["C", "B"]
    assert golds["sat"] == ["A", "C"]
    assert golds["gsm_hard"] == ["-9867630.0"]
    questions = {name: [e.question for e in listed] for name, listed in examples.items()}
    assert questions["svamp"][0] == "There are 290 bananas in 2 groups. How big is a group?"
    assert questions["asdiv"][1].endswith("(Yes or No)")
    assert questions["tabmwp"][0].startswith('Read the following table regarding "Coins" and')
    assert questions["tabmwp"][1].endswith("options: ['shortage', 'surplus']")
    assert questions["mathqa"][2].endswith("\n(A) 1, (B) 2, (C) 3, (D) 4, (E) 5")
    assert questions["sat"][1].endswith("\n(A) 1,190, (B) 1,900, (C) 2,900, (D) 19,000")


def test_options_keep_what_looks_like_a_label():
    assert split_options("no labels", "ABCD") == []
    listed = split_options("A) f(a) B) the set A. is big C) x D) y", "ABCD")
    assert listed == ["f(a)", "the set A. is big", "x", "y"]


def test_mawps_in_four_parts(tmp_path):
    for part in ("singleeq", "singleop", "addsub", "multiarith"):
        write_rows(tmp_path, f"mawps/{part}.jsonl", [{"input": part, "target": 1}])
    assert [e.question for e in load_examples("mawps", tmp_path)] == [
        "singleeq",
        "singleop",
        "addsub",
        "multiarith",
    ]


@pytest.mark.parametrize("task", list(TASKS))
def test_missing_file_says_what_and_where(task, tmp_path):
    with pytest.raises(BenchmarkError) as error:
        load_examples(task, tmp_path)
    message = str(error.value)
    assert str(tmp_path / SOURCES[task].files[0].split("+")[0]) in message
    assert SOURCES[task].fields in message
    assert "https://" in message


def test_missing_folder(tmp_path):
    with pytest.raises(BenchmarkError, match="is no folder"):
        load_examples("gsm8k", tmp_path / "nowhere")


BROKEN = [
    ("gsm8k", "gsm8k/test.jsonl", '{"question": "q"', "line 1 is not valid JSON"),
    ("gsm8k", "gsm8k/test.jsonl", '{"question": "q"}\n', "no field 'answer'"),
    ("gsm8k", "gsm8k/test.jsonl", '{"question": "q", "answer": "18"}\n', "'#### NUMBER'"),
    ("gsm8k", "gsm8k/test.jsonl", '{"question": "", "answer": "#### 1"}\n', "expected text"),
    ("gsm8k", "gsm8k/test.jsonl", "[1, 2]\n", "line 1 is not a JSON object"),
    ("gsm8k", "gsm8k/test.jsonl", "\n\n", "no questions"),
    ("math", "math/test.jsonl", '{"problem": "p", "solution": "2"}\n', "boxed"),
    ("svamp", "svamp/test.jsonl", '{"Body": "b", "Question": "q", "Answer": "x"}\n', "a number"),
    ("tabmwp", "tabmwp/problems_test1k.json", '{"1": 3}', "entry 1 is not a JSON object"),
    ("tabmwp", "tabmwp/problems_test1k.json", "{", "cannot be read as JSON"),
    ("mathqa", "mathqa/test.jsonl", '{"problem":"p","options":"12","correct":"a"}\n', "options"),
    ("mathqa", "mathqa/test.jsonl", '{"problem":"p","options":"a ) 1 , b ) 2","correct":"e"}\n',
     "none of the 2 options"),
    ("sat", "sat_math/test.jsonl", '{"question":"p","options":"A) 1 B) 2","Answer":"Q"}\n', "Q"),
    ("mmlu_stem", "mmlu_stem/test.jsonl", '{"question":"p","choices":["a","b"],"answer":7}\n', "7"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "name", "content", "expected"), BROKEN)
def test_malformed_file_is_one_clear_message(task, name, content, expected, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BenchmarkError) as error:
        load_examples(task, tmp_path)
    message = str(error.value)
    assert expected in message
    assert "https://" in message and "\n" not in message


def test_broken_line_is_named(tmp_path):
    rows = ROWS["gsm8k/test.jsonl"]
    path = write_rows(tmp_path, "gsm8k/test.jsonl", rows)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"question": "no answer here"}\n')
    with pytest.raises(BenchmarkError, match=f"line {len(rows) + 1}"):
        load_examples("gsm8k", tmp_path)


@pytest.mark.parametrize("task", list(TASKS.values()), ids=lambda t: t.name)
def test_worked_examples_follow_the_protocol(task):
    shots = shots_of(task)
    assert len(shots) == task.shots
    for question, answer in shots:
        assert question and answer
        # what the examples teach, the grader reads; their own answers are right
        found = grade(task.name, answer, "A" if task.kind == "choice" else "1")
        assert found.extracted is not None
    if task.kind == "choice":
        assert len({grade(task.name, a, "A").extracted for _, a in shots}) == 4


def test_prompts_of_the_suite(benchmarks):
    requests = render(tasks_named(None), benchmarks=benchmarks)
    assert {name: len(listed) for name, listed in requests.items()} == {
        "gsm8k": 5, "math500": 2, "svamp": 2, "asdiv": 2, "mawps": 1, "tabmwp": 2, "mathqa": 3,
        "mmlu_stem": 2, "sat": 2, "gsm_hard": 1,
    }  # fmt: skip
    for name, listed in requests.items():
        for request in listed:
            opening = "Question: " if TASKS[name].shots == 8 else "Problem:\n"
            assert request.prompt.count(f"\n\n\n{opening}") == TASKS[name].shots
            assert request.prompt.startswith(opening)
            assert request.prompt.endswith(("\nAnswer:", "\nSolution:"))
            assert request.stop == ("\n\nQuestion:", "\n\nProblem:")
            assert request.max_new_tokens in (256, 512)
    word = requests["gsm8k"][0].prompt
    assert "So there must have been 21 - 15 = 6. The answer is 6.\n\n\nQuestion: If there" in word
    assert word.endswith("Question: Tom has 0 apples and buys 2. How many has he?\nAnswer:")
    assert "Final Answer: The final answer is $24$. I hope" in requests["math500"][0].prompt
    assert "Final Answer: The final answer is (D).\n\n\nProblem:" in requests["sat"][0].prompt


# of the harness's prompt files (prompts/cot at dcfa46a)
HARNESS_EXAMPLES = {
    "mathqa": "ba599b1fda1932b423e368b6a43643a10763cec1753dcdaca51375fdcd33c0cb",
    "gsm8k": "f7b267f942be471e4ea8013cdba4c4df3cad1f969774c073e9165c568043a7b8",
    "math500": "6637ad6e3ece303c059196bebdc3607ab9f617f4a57f73ac44afeb7f4320c829",
    "mmlu_stem": "c5e61e1f80bbf4b08d60db5abaa55dcdc1a211093ce33e2a591ae9647bf8907a",
}


def test_the_papers_prompts_are_those_of_its_harness(benchmarks):
    requests = render(tasks_named("gsm8k,math500,math,mathqa,mmlu_stem,sat"), benchmarks=benchmarks,
                      protocol="paper")  # fmt: skip
    for task, digest in HARNESS_EXAMPLES.items():
        examples = requests[task][0].prompt.rpartition("\n\n\n")[0]
        assert hashlib.sha256(examples.encode()).hexdigest() == digest
    assert requests["sat"][0].prompt.endswith("\n(A) $f(-6)=0$ (B) $f(6)$ (C) 3 (D) 4\nSolution:")
    listed = [request for some in requests.values() for request in some]
    assert {(r.protocol, r.max_new_tokens) for r in listed} == {("paper", 1024)}


def test_the_papers_questions_where_they_differ(tmp_path):
    tabmwp = {"1": {"question": "Is it?", "choices": ["True", "False"], "answer": "False",
                    "table_title": None, "table": "a | b"}}  # fmt: skip
    write_rows(tmp_path, "tabmwp/problems_test1k.json", tabmwp)
    mathqa = {"problem": "x ?", "options": "a ) 1 , 200 , b ) 2", "correct": "b"}
    write_rows(tmp_path, "mathqa/test.jsonl", [mathqa])
    ends = {
        ("tabmwp", "strict"): "['True', 'False']",
        ("tabmwp", "paper"): "['True', 'False'] (True or False)",
        ("mathqa", "strict"): "(A) 1 , 200, (B) 2",
        ("mathqa", "paper"): "(A) 1, 200, (B) 2",
    }
    for (task, protocol), end in ends.items():
        (example,) = load_examples(task, tmp_path, protocol)
        assert example.question.endswith(end)


def test_what_the_paper_has_not_is_refused():
    with pytest.raises(UsageError, match="remove --choices likelihood"):
        render(tasks_named("sat"), protocol="paper", choices="likelihood")
    with pytest.raises(UsageError, match="strict or paper, not 'loose'"):
        render(tasks_named("sat"), protocol="loose")


def test_options_by_likelihood(benchmarks):
    requests = render(tasks_named("gsm8k,mathqa"), benchmarks=benchmarks, choices="likelihood")
    assert requests["gsm8k"][0].options == ()
    choice = requests["mathqa"][0]
    assert choice.options == (" (A)", " (B)", " (C)", " (D)", " (E)")
    assert choice.prompt.count("\nAnswer: (") == 4 and choice.prompt.endswith("\nAnswer:")


def test_limit_is_spread_over_the_benchmark(benchmarks):
    assert spread(10, 3) == [0, 3, 6]
    assert spread(2, 5) == [0, 1]
    requests = render(tasks_named("gsm8k"), benchmarks=benchmarks, limit=2)["gsm8k"]
    assert [request.index for request in requests] == [0, 2]


def test_requests_travel_as_jsonl(benchmarks, tmp_path):
    requests = render(tasks_named("gsm8k,sat"), benchmarks=benchmarks, choices="likelihood")
    listed = [request for some in requests.values() for request in some]
    write_requests(tmp_path / "requests.jsonl", listed)
    assert read_requests(tmp_path / "requests.jsonl") == listed


def test_math_is_math_500_in_the_suite():
    assert "math500" in SUITES["math"] and "math" not in SUITES["math"]
    for name in ("MATH-500", "math_oai", "minerva_math"):
        assert task_named(name).name == "math500"
    assert task_named("math").title == "MATH-5000"


def test_the_files_for_lm_eval_say_what_is_rendered():
    for task in TASKS.values():
        for by_likelihood in (False, True) if task.kind == "choice" else (False,):
            content = task_file(task, by_likelihood)
            path = TASK_FOLDER / f"{content['task'].removeprefix('vocagnolm_')}.yaml"
            assert yaml.safe_load(path.read_text()) == content


def test_the_suite_is_a_group_of_lm_eval(benchmarks, monkeypatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("VOCAGNOLM_BENCHMARKS", str(benchmarks))
    manager = TaskManager(include_path=TASK_FOLDER, include_defaults=False)
    loaded = manager.load(["vocagnolm_math_suite"])["tasks"]
    assert set(loaded) == {TASKS[name].lm_eval_name for name in AVERAGES["avg"]}


@pytest.mark.parametrize(("protocol", "correct"), [("strict", 0.0), ("paper", 1.0)])
def test_lm_eval_alone_knows_the_protocols(benchmarks, protocol, correct):
    from lm_eval.tasks import TaskManager

    metadata = {"benchmarks": str(benchmarks), "protocol": protocol}
    manager = TaskManager(include_path=TASK_FOLDER, include_defaults=False, metadata=metadata)
    task = manager.load(["vocagnolm_gsm8k"])["tasks"]["vocagnolm_gsm8k"]
    graded = task.process_results(task.test_docs()[0], ["It is 3, or 2, or so"])
    assert graded == {"correct": correct, "no_answer": 1.0 - correct}


def test_the_hub_names_the_options_of_sat_otherwise(monkeypatch):
    row = {"Question": "p", "Possible Answers": "A) 1 B) 2 C) 3 D) 4", "Answer": "C"}
    monkeypatch.setattr("vocagnolm.questions.benchmarks._hub_split", lambda *place: [row])
    (example,) = load_examples("sat")
    assert example.gold == "C" and example.question.endswith("\n(A) 1, (B) 2, (C) 3, (D) 4")


@pytest.mark.parametrize("kind", [OSError, ValueError, RuntimeError])
def test_what_the_hub_does_not_give_is_one_message(kind, monkeypatch):
    def refuse(*place):
        raise kind("Dataset scripts are no longer supported\nmore")

    monkeypatch.setattr("vocagnolm.questions.benchmarks._hub_split", refuse)
    with pytest.raises(
        BenchmarkError, match=r"scripts .* --benchmarks DIR with DIR/asdiv"
    ) as error:
        load_examples("asdiv")
    assert "\n" not in str(error.value)
