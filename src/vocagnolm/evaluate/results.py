"""Numbers of an evaluation, and the folder they are kept in.

    RUN/evaluation/settings.json       model, precision, batch size, protocol, prompts: must not
                                       change
    RUN/evaluation/outputs/TASK.jsonl  a line a question: prompt, output, extracted, gold, correct,
                                       complete (false: broken off at the limit)
    RUN/evaluation/results.json        the scores, and the conditions they were made under

Standard library only.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vocagnolm.errors import EvaluationError
from vocagnolm.evaluate.suite import TASKS, Protocol, average_stderrs, averages
from vocagnolm.files import (
    append_lines,
    folder_lock,
    local_path,
    parse_json,
    read_json,
    remove,
    remove_leftovers,
    whole_lines,
    write_json,
    write_text,
)


@dataclass(frozen=True)
class Answer:
    """What a model wrote, and whether it came to an end by itself."""

    output: str
    complete: bool | None = None


@dataclass(frozen=True)
class Record:
    index: int
    prompt: str
    output: str
    extracted: str | None
    gold: str
    correct: bool
    complete: bool | None = None
    """False: broken off at the limit of tokens. None: not known."""


@dataclass(frozen=True)
class TaskScore:
    score: float  # percent
    stderr: float | None  # percentage points; None for a single question
    n: int
    no_answer: int


def score_records(records: Iterable[Record]) -> TaskScore:
    listed = list(records)
    n = len(listed)
    share = sum(record.correct for record in listed) / n
    stderr = 100 * (share * (1 - share) / (n - 1)) ** 0.5 if n > 1 else None
    no_answer = sum(record.extracted is None for record in listed)
    return TaskScore(100 * share, stderr, n, no_answer)


@dataclass(frozen=True)
class Evaluation:
    tasks: dict[str, TaskScore]
    bits_per_byte: float | None = None
    protocol: Protocol | None = None
    """None where there are no tasks."""
    conditions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By task (and `bits_per_byte`): what must be equal for scores to be compared. Evaluations of
    older versions have none."""

    def averages(self) -> dict[str, float | None]:
        return averages({name: task.score for name, task in self.tasks.items()})

    def average_stderrs(self) -> dict[str, float | None]:
        return average_stderrs({name: task.stderr for name, task in self.tasks.items()})

    def to_json(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "tasks": {name: asdict(task) for name, task in self.tasks.items()},
            **self.averages(),
            "bits_per_byte": self.bits_per_byte,
            "conditions": self.conditions,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Evaluation":
        tasks = {name: TaskScore(**task) for name, task in values["tasks"].items()}
        protocol = values.get("protocol", "strict" if tasks else None)
        return cls(tasks, values["bits_per_byte"], protocol, values.get("conditions") or {})


_BEGIN_ANEW = "Remove the evaluation folder and evaluate again, or give another --out."
_SETTINGS_KEYS: dict[str, type | tuple[type, ...]] = {"settings": dict, "prompts": dict}
_RESULTS_KEYS: dict[str, type | tuple[type, ...]] = {
    "tasks": dict,
    "bits_per_byte": (float, int, type(None)),
}


def read_results(path: Path) -> Evaluation:
    """A results.json; FileNotFoundError where there is none."""
    content = read_json(path, EvaluationError, _BEGIN_ANEW, _RESULTS_KEYS)
    try:
        return Evaluation.from_json(content)
    except (TypeError, KeyError, AttributeError) as error:
        raise EvaluationError(
            f"{path} is no result of `vocagnolm evaluate` ({error}). {_BEGIN_ANEW}"
        ) from None


class RunFolder:
    """The evaluation of one model, kept so that it can be resumed and compared."""

    def __init__(self, path: str | Path) -> None:
        self.path = local_path(path)
        self.folder = self.path / "evaluation"
        self.outputs = self.folder / "outputs"

    @contextlib.contextmanager
    def lock(self) -> Iterator["RunFolder"]:
        """Only one evaluation may write here; what a killed one left behind is removed."""
        advice = "Wait for it to end, or give another --out."
        with folder_lock(self.folder, advice):
            for folder in (self.folder, self.outputs):
                remove_leftovers(folder)
            yield self

    # --- settings -----------------------------------------------------------------------------

    def claim(self, settings: dict[str, Any], prompts: dict[str, str]) -> None:
        """Note what this run is, or refuse to mix it with another one.

        `prompts` is a checksum for every task; tasks may be added to a folder one by one.
        """
        path = self.folder / "settings.json"
        try:
            before = read_json(path, EvaluationError, _BEGIN_ANEW, _SETTINGS_KEYS)
        except FileNotFoundError:
            before = {"settings": settings, "prompts": {}}
        there = before["settings"]
        if before["prompts"]:
            there.setdefault("protocol", "strict")  # once there was one, and no word for it
        elif "protocol" in settings:  # bits per byte alone: of no protocol
            there["protocol"] = settings["protocol"]
        different = [
            f"{key}: {there.get(key)!r} there, {settings[key]!r} now"
            for key in settings
            if there.get(key) != settings[key]
        ]
        different += [
            f"the prompts of {name} (--limit, --benchmarks, --choices, --max-new-tokens)"
            for name, checksum in prompts.items()
            if before["prompts"].get(name, checksum) != checksum
        ]
        if different:
            raise EvaluationError(
                f"{self.folder} holds an evaluation with other settings ({'; '.join(different)}). "
                "Give another --out, or the settings of that evaluation."
            )
        self.outputs.mkdir(parents=True, exist_ok=True)
        merged = {"settings": there | settings, "prompts": before["prompts"] | prompts}
        write_json(path, merged)

    def checksums(self) -> dict[str, str]:
        """Of every task's requests, as they were when it was claimed; empty where not known."""
        with contextlib.suppress(FileNotFoundError):
            path = self.folder / "settings.json"
            return dict(read_json(path, EvaluationError, _BEGIN_ANEW, _SETTINGS_KEYS)["prompts"])
        return {}

    # --- answers ------------------------------------------------------------------------------

    def _partial(self, task: str) -> Path:
        return self.outputs / f"{task}.partial.jsonl"

    def answers(self, task: str) -> dict[int, Answer]:
        """Answers of an interrupted run, by number of the question. A line cut by a kill is left
        out, and taken off the file so that the next one starts on a line of its own."""
        path = self._partial(task)
        answers = {}
        for number, line in enumerate(whole_lines(path), 1):
            try:
                fields = parse_json(line)
                index = int(fields.pop("index"))
                answers[index] = Answer(**fields)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise EvaluationError(
                    f"{path}, line {number} is no answer of an interrupted run ({error}). "
                    "Remove the file: its questions are asked again."
                ) from None
        return answers

    def add_answers(self, task: str, answers: Iterable[tuple[int, Answer]]) -> None:
        lines = (
            json.dumps({"index": index, **asdict(answer)}, ensure_ascii=False) + "\n"
            for index, answer in answers
        )
        append_lines(self._partial(task), "".join(lines))

    # --- graded records -----------------------------------------------------------------------

    def records(self, task: str) -> list[Record] | None:
        path = self.outputs / f"{task}.jsonl"
        if not path.is_file():
            return None
        try:
            with open(path, encoding="utf-8", newline="\n") as file:
                return [Record(**parse_json(line)) for line in file]
        except (ValueError, TypeError) as error:
            raise EvaluationError(
                f"{path} is damaged ({error}). Remove it and run the evaluation again."
            ) from None

    def finish_task(self, task: str, records: list[Record]) -> None:
        lines = (json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
        write_text(self.outputs / f"{task}.jsonl", "".join(lines))
        remove(self._partial(task))

    # --- results ------------------------------------------------------------------------------

    def results(self) -> Evaluation | None:
        with contextlib.suppress(FileNotFoundError):
            return read_results(self.folder / "results.json")
        return None

    def write_results(self, evaluation: Evaluation) -> Evaluation:
        """Add these scores to the folder's, and give back all of them."""
        before = self.results() or Evaluation({})
        tasks = before.tasks | evaluation.tasks
        bits = evaluation.bits_per_byte
        merged = Evaluation(
            {name: tasks[name] for name in TASKS if name in tasks},
            before.bits_per_byte if bits is None else bits,
            evaluation.protocol or before.protocol,
            before.conditions | evaluation.conditions,
        )
        write_json(self.folder / "results.json", merged.to_json())
        return merged


def open_run(path: str | Path) -> tuple[RunFolder, Evaluation]:
    """A finished evaluation: the run's folder, or its `evaluation` folder."""
    given = local_path(path)
    if given.name == "evaluation" and not (given / "evaluation").is_dir():
        given = given.parent
    run = RunFolder(given)
    results = run.results()
    if results is None:
        raise EvaluationError(
            f"{path} holds no finished evaluation: expected {run.folder / 'results.json'}. "
            f"Make one with: vocagnolm evaluate MODEL --out {path}"
        )
    return run, results
