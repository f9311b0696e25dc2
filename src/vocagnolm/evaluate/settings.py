"""What an evaluation is asked to do, in two groups: the questions, and how the model runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict

from vocagnolm.evaluate.render import Method, Request, render
from vocagnolm.evaluate.suite import Protocol, tasks_named


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What is asked: `tasks`, or a whole suite, the paper's ten unless another is named."""

    suite: str | None = None
    tasks: str | Sequence[str] | None = None
    benchmarks: str | Path | None = None
    limit: int | None = None
    choices: Method = "generate"
    max_new_tokens: int | None = None
    protocol: Protocol = "strict"
    chat: bool = False
    """As conversations, in the model's template."""
    shots: int | None = None
    """With `chat`: worked examples, as turns before the question; the task's own number."""

    def render(self) -> dict[str, list[Request]]:
        names = (
            self.tasks if self.tasks is None or isinstance(self.tasks, str) else list(self.tasks)
        )
        return render(
            tasks_named(names, self.suite or "math"),
            benchmarks=self.benchmarks,
            limit=self.limit,
            choices=self.choices,
            max_new_tokens=self.max_new_tokens,
            protocol=self.protocol,
            chat=self.chat,
            shots=self.shots,
        )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How the model runs."""

    device: str = "auto"
    dtype: str = "auto"
    batch_size: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    """For conversations: a Jinja file, a folder with one, or plain; the model's own."""


class Keywords(TypedDict, total=False):
    """The fields of both groups, as `evaluate` takes them one by one."""

    suite: str | None
    tasks: str | Sequence[str] | None
    benchmarks: str | Path | None
    limit: int | None
    choices: Method
    max_new_tokens: int | None
    protocol: Protocol
    chat: bool
    shots: int | None
    device: str
    dtype: str
    batch_size: int | None
    revision: str | None
    trust_remote_code: bool
    chat_template: str | None


def grouped(
    questions: Questions | None, engine: Engine | None, keywords: Mapping[str, Any]
) -> tuple[Questions, Engine]:
    """The two groups, with what was given one by one put in its place."""
    asked, how = questions or Questions(), engine or Engine()
    unknown = keywords.keys() - Keywords.__annotations__.keys()
    if unknown:
        raise TypeError(f"evaluate() got an unexpected keyword argument '{min(unknown)}'")
    for_questions = {f.name for f in fields(Questions)}
    return (
        replace(asked, **{k: v for k, v in keywords.items() if k in for_questions}),
        replace(how, **{k: v for k, v in keywords.items() if k not in for_questions}),
    )
