"""Questions become prompts: worked examples and lm-eval's task files, rendered once, before any
model is loaded.

A request holds all that generation and grading need, so that the three steps (render, generate,
grade) can run on different machines and an interrupted run can go on by example.

GSM8K's eight examples and Minerva's four are the field's classics; lm-eval carries them and they
are read from the installed package. The options beside Minerva's four, and strict's MathQA
examples, are our own. The paper's harness has the same eight and the same four, the latter with
every backslash doubled and the lines broken elsewhere; `protocol="paper"` gives its texts to the
byte.
"""

import ast
import importlib.util
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import yaml

from vocagnolm.base.files import write_text
from vocagnolm.chat import Message, shared_text
from vocagnolm.errors import MissingExtraError, UsageError, optional
from vocagnolm.questions.benchmarks import with_options
from vocagnolm.questions.suite import (
    PAPER_NEW_TOKENS,
    AnswerKind,
    Protocol,
    Shot,
    Task,
    check_protocol,
)
from vocagnolm.recipe.sections import Choices

TASK_FOLDER = Path(__file__).parent / "tasks"


# ---- worked examples ----

# wrong options beside the right one of Minerva's examples, which stands at the letter
_OPTIONS: dict[Protocol, tuple[tuple[list[str], str], ...]] = {
    "strict": (
        (["(2,5]", "[2,5)", "[2,5]", "(-\\infty,5)"], "B"),
        (["6", "10", "14", "24"], "D"),
        (["9", "12", "16", "20"], "C"),
        (["$-\\frac{2}{3}$", "$-\\frac{3}{2}$", "$\\frac{2}{3}$", "$\\frac{3}{2}$"], "A"),
    ),
    "paper": (
        (["[-5,-2)", "[2,5)", "[-2,-5)", "[5,2)"], "B"),
        (["14", "4", "2", "24"], "D"),
        (["12", "20", "16", "15"], "C"),
        (["$-\\\\frac{2}{3}$", "$\\\\frac{2}{3}$", "$\\\\frac{1}{3}$", "$\\\\frac{4}{9}$"], "A"),
    ),
}
# how the harness spells Minerva's examples
_PAPER_SPACES = (("  $", " $"), (",\nfind", ", find"), (":\n\\\\begin", ": \\\\begin"))
_PAPER_MATH = (
    ("{5-x}}$.", "{5-x}}$.}"),
    (". Therefore,", ".\nTherefore,"),
    (". Also,", ".\nAlso,"),
)
_PAPER_CHOICE = (
    (". Therefore, the", ".\nTherefore, the"),
    (".  ", ". "),
    ("is nonzero.", "is\nnonzero."),
    ("we obtain\n\n", "we obtain\n"),
)


def _lm_eval_file(*parts: str) -> str:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise MissingExtraError("lm-eval", "eval", "Evaluation")
    return Path(spec.origin).parent.joinpath("tasks", *parts).read_text(encoding="utf-8")


@cache
def _gsm8k_shots() -> tuple[Shot, ...]:
    settings = yaml.safe_load(_lm_eval_file("gsm8k", "gsm8k-cot.yaml"))
    samples = settings["fewshot_config"]["samples"]
    return tuple((sample["question"], sample["target"]) for sample in samples)


@cache
def _minerva_shots() -> tuple[Shot, ...]:
    # the module itself cannot be imported beside math-verify: it insists on an older antlr4
    module = ast.parse(_lm_eval_file("minerva_math", "utils.py"))
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "list_fewshot_samples":
            returned = next(s for s in statement.body if isinstance(s, ast.Return))
            assert returned.value is not None
            samples = ast.literal_eval(returned.value)
            return tuple((sample["problem"], sample["solution"]) for sample in samples)
    raise AssertionError("this lm-eval does not carry Minerva's examples")


@cache
def _mathqa_shots(protocol: Protocol) -> tuple[Shot, ...]:
    text = (TASK_FOLDER / f"mathqa_{protocol}.md").read_text(encoding="utf-8").strip()
    _, *examples = text.split("\n\n\n")  # first, where they are from
    halves = [example.removeprefix("Problem:\n").partition("\nSolution:\n") for example in examples]
    return tuple((question, answer) for question, _, answer in halves)


def _minerva(kind: AnswerKind, protocol: Protocol) -> list[Shot]:
    if protocol == "strict":
        return list(_minerva_shots())

    def published(text: str) -> str:
        text = text.replace("\\", "\\\\")
        for ours, theirs in (*_PAPER_SPACES, *edits):
            text = text.replace(ours, theirs)
        return text

    edits = _PAPER_CHOICE if kind == "choice" else _PAPER_MATH
    return [(published(question), published(answer)) for question, answer in _minerva_shots()]


def shots_of(task: Task, protocol: Protocol = "strict") -> list[Shot]:
    """The examples of a task, each a question as put to the model and the worked answer, in the
    order of the protocol."""
    if task.examples is not None:
        shots = list(task.examples)
    elif task.name == "mathqa":
        shots = list(_mathqa_shots(protocol))
    elif task.kind in ("number", "mixed"):
        shots = list(_gsm8k_shots())
    else:
        shots = _minerva(task.kind, protocol)
        if task.kind == "choice":
            shots = [
                (
                    with_options(question, options, task.letters),
                    answer.partition("\nFinal Answer:")[0]
                    + f"\nFinal Answer: The final answer is ({letter}).",
                )
                for (question, answer), (options, letter) in zip(
                    shots, _OPTIONS[protocol], strict=True
                )
            ]
    assert len(shots) == task.shots, f"{task.name}: lm-eval has {len(shots)} examples"
    return shots


# ---- requests ----


@dataclass(frozen=True)
class Request:
    task: str
    index: int  # of the question in its benchmark
    prompt: str  # of a conversation, its shared text (`vocagnolm.chat`)
    gold: str
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 0
    # continuations to be compared by likelihood, with the letter each stands for; empty when
    # an answer is generated
    options: tuple[str, ...] = ()
    letters: str = ""
    protocol: Protocol = "strict"  # by which the answer is graded


def task_file(task: Task, by_likelihood: bool = False) -> dict[str, Any]:
    """What lm-eval's file of a task says; the files of the paper's tasks are in `TASK_FOLDER`."""
    shape = "_word_problem_yaml" if task.kind in ("number", "mixed") else "_problem_yaml"
    return {
        "task": task.lm_eval_name + ("_likelihood" if by_likelihood else ""),
        "include": "_likelihood_yaml" if by_likelihood else shape,
        "dataset_kwargs": {"task": task.name},
    }


def render(
    tasks: list[Task],
    *,
    benchmarks: str | Path | None = None,
    limit: int | None = None,
    choices: Choices = "generate",
    max_new_tokens: int | None = None,
    protocol: Protocol = "strict",
    chat: bool = False,
    shots: int | None = None,
) -> dict[str, list[Request]]:
    """Prompts of every task, in the order of the benchmark.

    `choices="likelihood"` compares the options of the multiple-choice tasks instead of generating
    an answer; other tasks are not affected. `max_new_tokens` shortens the answers that the tasks
    allow. `chat`: the question is a user message, and `shots` worked examples are earlier turns.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, not {limit}")
    if choices not in get_args(Choices):
        raise UsageError(f"choices must be {' or '.join(get_args(Choices))}, not '{choices}'")
    check_protocol(protocol)
    if shots is not None and not chat:
        raise UsageError(
            "--shots can only be used with --chat: otherwise the tasks set the number of examples"
        )
    if chat and protocol == "paper":
        raise UsageError("the paper's protocol has no conversations: remove --chat")
    if protocol == "paper" and choices == "likelihood":
        raise UsageError("the paper's protocol generates its answers: remove --choices likelihood")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    metadata: dict[str, Any] = {"protocol": protocol}
    if benchmarks is not None:
        metadata["benchmarks"] = str(benchmarks)
    harness = optional("lm_eval.tasks", "eval", "Evaluation")
    manager = harness.TaskManager(include_defaults=False, metadata=metadata)
    requests = {}
    with TemporaryDirectory() as folder:
        for task in tasks:
            by_likelihood = choices == "likelihood" and task.kind == "choice"
            turns = (task.shots if shots is None else shots) if chat else None
            content = task_file(task, by_likelihood)
            content |= {"include": str(TASK_FOLDER / content["include"]), "num_fewshot": task.shots}
            path = Path(folder, f"{content['task']}.yaml")
            path.write_text(yaml.safe_dump(content), encoding="utf-8")
            loaded = manager.load([str(path)])["tasks"][content["task"]]
            requests[task.name] = [
                _request(task, loaded, index, by_likelihood, max_new_tokens, turns)
                for index in spread(len(loaded.test_docs()), limit)
            ]
    return requests


def spread(total: int, limit: int | None) -> list[int]:
    """`limit` indices spread evenly: MATH and MMLU are sorted by subject, so the first few
    questions would be all algebra."""
    if limit is None or limit >= total:
        return list(range(total))
    return [i * total // limit for i in range(limit)]


def _request(
    task: Task, loaded: Any, index: int, by_likelihood: bool, limit: int | None, turns: int | None
) -> Request:
    """A task's question as it is put to the model. `turns`: worked examples of a conversation, None
    where it is none. `limit`: of new tokens."""
    chat, doc = turns is not None, loaded.test_docs()[index]
    generation = {} if by_likelihood else loaded.config.generation_kwargs
    allowed = int(generation.get("max_gen_toks", 0))
    if doc["protocol"] == "paper":
        allowed = PAPER_NEW_TOKENS
    options: tuple[str, ...] = ()
    if by_likelihood:
        delimiter = "" if chat else loaded.config.target_delimiter
        options = tuple(f"{delimiter}{label}" for label in loaded.doc_to_choice(doc))
    return Request(
        task=task.name,
        index=index,
        prompt=loaded.fewshot_context(doc, loaded.config.num_fewshot)
        if turns is None
        else _conversation(task, loaded, doc, by_likelihood, turns),
        gold=doc["gold"],
        # in a conversation an answer ends with its turn
        stop=() if chat else tuple(generation.get("until", ())),
        max_new_tokens=min(allowed, limit or allowed),
        options=options,
        letters=doc["letters"] if by_likelihood else "",
        protocol=doc["protocol"],
    )


# what the worked examples show where there are none
_HOW_TO_END: dict[AnswerKind, str] = {
    "number": 'End with "The answer is" and the number.',
    "mixed": 'End with "The answer is" and the answer alone.',
    "math": 'End with "Final Answer: The final answer is $ANSWER$."',
    "choice": 'End with "Final Answer: The final answer is (LETTER)."',
}


def _conversation(
    task: Task, loaded: Any, doc: dict[str, Any], by_likelihood: bool, turns: int
) -> str:
    """A question as the shared text of a conversation, behind worked examples as turns."""
    messages = []
    for shot in list(loaded.dataset["shots"])[:turns]:
        answer = f"({shot['gold']})" if by_likelihood else shot["answer"]
        messages += [Message("user", shot["question"]), Message("assistant", answer)]
    question = doc["question"]
    if not turns:
        how = "Answer with (LETTER) alone." if by_likelihood else _HOW_TO_END[task.kind]
        question = f"{question}\n\n{how}"
    return shared_text([*messages, Message("user", question)])


def write_requests(path: str | Path, requests: Iterable[Request]) -> None:
    lines = [json.dumps(asdict(request), ensure_ascii=False) + "\n" for request in requests]
    write_text(path, "".join(lines))


def read_requests(path: str | Path) -> list[Request]:
    requests = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            fields = json.loads(line)
            fields["stop"], fields["options"] = tuple(fields["stop"]), tuple(fields["options"])
            requests.append(Request(**fields))
    return requests
