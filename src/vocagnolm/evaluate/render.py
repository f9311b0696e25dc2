"""Questions become prompts: lm-eval's task files, rendered once, before any model is loaded.

A request holds all that generation and grading need, so that the three steps (render, generate,
grade) can run on different machines and an interrupted run can go on by example.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from vocagnolm.chat import Message, shared_text
from vocagnolm.errors import MissingExtraError, UsageError
from vocagnolm.evaluate.suite import PAPER_NEW_TOKENS, AnswerKind, Protocol, Task, check_protocol
from vocagnolm.files import write_text
from vocagnolm.recipe.sections import Choices

TASK_FOLDER = Path(__file__).parent / "tasks"


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
    an answer; the other tasks are not touched by it. `max_new_tokens` shortens the answers that
    the tasks allow. `chat`: the question is a user's message and the worked examples are turns
    before it, `shots` of them.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, not {limit}")
    if choices not in get_args(Choices):
        raise UsageError(f"choices must be {' or '.join(get_args(Choices))}, not '{choices}'")
    check_protocol(protocol)
    if shots is not None and not chat:
        raise UsageError(
            "--shots is for --chat: the tasks say how many examples their prompts have"
        )
    if chat and protocol == "paper":
        raise UsageError("the paper's protocol knows no conversations: leave out --chat")
    if protocol == "paper" and choices == "likelihood":
        raise UsageError("the paper's protocol generates its answers: leave --choices likelihood")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingExtraError("lm-eval", "eval", "Evaluation") from None
    metadata: dict[str, Any] = {"protocol": protocol}
    if benchmarks is not None:
        metadata["benchmarks"] = str(benchmarks)
    manager = TaskManager(include_path=TASK_FOLDER, include_defaults=False, metadata=metadata)
    requests = {}
    for task in tasks:
        by_likelihood = choices == "likelihood" and task.kind == "choice"
        name = f"{task.lm_eval_name}_likelihood" if by_likelihood else task.lm_eval_name
        loaded = manager.load([name])["tasks"][name]
        requests[task.name] = _render_task(
            task, loaded, limit, by_likelihood, max_new_tokens, chat, shots
        )
    return requests


def spread(total: int, limit: int | None) -> list[int]:
    """`limit` indices spread evenly: MATH and MMLU are sorted by subject, and the first few
    questions would be all algebra."""
    if limit is None or limit >= total:
        return list(range(total))
    return [i * total // limit for i in range(limit)]


def _render_task(
    task: Task,
    loaded: Any,
    limit: int | None,
    by_likelihood: bool,
    max_new_tokens: int | None,
    chat: bool,
    shots: int | None,
) -> list[Request]:
    docs = loaded.test_docs()
    generation = {} if by_likelihood else loaded.config.generation_kwargs
    length = int(generation.get("max_gen_toks", 0))
    requests = []
    for index in spread(len(docs), limit):
        doc = docs[index]
        allowed = PAPER_NEW_TOKENS if doc["protocol"] == "paper" else length
        options: tuple[str, ...] = ()
        if by_likelihood:
            delimiter = "" if chat else loaded.config.target_delimiter
            options = tuple(f"{delimiter}{label}" for label in loaded.doc_to_choice(doc))
        requests.append(
            Request(
                task=task.name,
                index=index,
                prompt=_conversation(task, loaded, doc, by_likelihood, shots)
                if chat
                else loaded.fewshot_context(doc, loaded.config.num_fewshot),
                gold=doc["gold"],
                # in a conversation an answer ends with its turn
                stop=() if chat else tuple(generation.get("until", ())),
                max_new_tokens=min(allowed, max_new_tokens or allowed),
                options=options,
                letters=doc["letters"] if by_likelihood else "",
                protocol=doc["protocol"],
            )
        )
    return requests


# what the worked examples show where there are none
_HOW_TO_END: dict[AnswerKind, str] = {
    "number": 'End with "The answer is" and the number.',
    "mixed": 'End with "The answer is" and the answer alone.',
    "math": 'End with "Final Answer: The final answer is $ANSWER$."',
    "choice": 'End with "Final Answer: The final answer is (LETTER)."',
}


def _conversation(
    task: Task, loaded: Any, doc: dict[str, Any], by_likelihood: bool, shots: int | None
) -> str:
    """The shared text: worked examples as turns, and the question."""
    count = task.shots if shots is None else shots
    messages = []
    for shot in list(loaded.dataset["shots"])[:count]:
        answer = f"({shot['gold']})" if by_likelihood else shot["answer"]
        messages += [Message("user", shot["question"]), Message("assistant", answer)]
    question = doc["question"]
    if not count:
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
