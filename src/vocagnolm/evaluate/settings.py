"""What an evaluation is asked to do, in two groups: the questions, and how the model runs."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vocagnolm.base.files import file_digest, json_digest
from vocagnolm.chat.messages import is_conversation, messages_of
from vocagnolm.evaluate.render import Request, render
from vocagnolm.questions.benchmarks import tasks_asked
from vocagnolm.questions.suite import TASKS
from vocagnolm.recipe.sections import EngineSection, QuestionsSection

Conditions = dict[str, Any]

# Two runs may have been asked other questions of one task: a pair is compared on those of both.
OF_THE_QUESTIONS = ("questions", "prompts")


def task_conditions(requests: Sequence[Request]) -> Conditions:
    """Conditions of one task. `prompts` stands for the benchmark's files and the task's version."""
    first = requests[0]
    shots, talk = TASKS[first.task].shots, {}
    if is_conversation(first.prompt):
        shots = sum(message.role == "assistant" for message in messages_of(first.prompt))
        talk = {"chat": True}
    return {
        "protocol": first.protocol,
        **talk,
        "few_shot": shots,
        "choices": "likelihood" if first.options else "generate",
        "max_new_tokens": first.max_new_tokens,
        "stop": list(first.stop),
        "questions": len(requests),
        "prompts": json_digest([[r.index, r.prompt, r.gold] for r in requests])[:16],
    }


def text_conditions(text: Sequence[str | Path], text_field: str) -> Conditions:
    """Conditions of bits per byte: a digest of the text itself, whatever its files are called."""
    content = [file_digest(path) if Path(path).is_file() else str(path) for path in text]
    return {"text": json_digest([content, text_field])[:16]}


def differing(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> list[str]:
    """`name first / second` for every condition that two scores do not share. What an older version
    did not record may be anything: it differs from all that was."""
    if not first and not second:
        return []
    if not first or not second:
        return ["conditions that an older version did not record"]
    return [
        f"{name} {_shown(first.get(name))} / {_shown(second.get(name))}"
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def marks(conditions: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sets each of several scores of one task apart from the others; an empty text where
    nothing does."""
    recorded = [known for known in conditions if len(known) > 1]
    apart = _apart(recorded)
    # other questions have other prompts: their number says it
    if "questions" in apart:
        apart = [name for name in apart if name != "prompts"]
    shared = [name for name in _apart(conditions) if all(name in known for known in conditions)]
    result = []
    for known in conditions:
        old = recorded and known not in recorded
        parts = [f"{name} {_shown(known.get(name))}" for name in (shared if old else apart)]
        result.append(", ".join([*parts, *(["conditions not recorded"] if old else [])]))
    return result


def _apart(conditions: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for known in conditions for name in known)
    return [n for n in names if len({_shown(known.get(n)) for known in conditions}) > 1]


def _shown(value: Any) -> str:
    return "not recorded" if value is None else str(value)


# ---- settings ----


class Questions(QuestionsSection, frozen=True):
    """The questions: `tasks`, or a whole suite, by default the paper's ten tasks."""

    def render(self) -> dict[str, list[Request]]:
        asked = {f.name: getattr(self, f.name) for f in fields(QuestionsSection)}
        suite, tasks = asked.pop("suite"), asked.pop("tasks")
        return render(tasks_asked(tasks, suite or "math"), **asked)


class Engine(EngineSection, frozen=True):
    """How the model runs."""


def grouped(
    questions: Questions | None, engine: Engine | None, keywords: Mapping[str, Any]
) -> tuple[Questions, Engine]:
    """The two groups, with what was given one by one in the group that has it."""
    asked, how = questions or Questions(), engine or Engine()
    known = {f.name: group for group in (asked, how) for f in fields(group)}
    if unknown := keywords.keys() - known.keys():
        raise TypeError(f"evaluate() got an unexpected keyword argument '{min(unknown)}'")
    return (
        replace(asked, **{k: v for k, v in keywords.items() if known[k] is asked}),
        replace(how, **{k: v for k, v in keywords.items() if known[k] is how}),
    )
