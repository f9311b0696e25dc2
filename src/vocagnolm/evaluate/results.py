"""Numbers of an evaluation, and the folder they are kept in.

    RUN/evaluation/settings.json       model, precision, batch size, protocol, prompts: must not
                                       change
    RUN/evaluation/outputs/TASK.jsonl  a line a question: prompt, output, extracted, gold, correct,
                                       complete (false: broken off at the limit)
    RUN/evaluation/results.json        the scores, and the protocol they were made by

Standard library only.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vocagnolm.errors import EvaluationError
from vocagnolm.evaluate.suite import TASKS, Protocol, average_stderrs, averages
from vocagnolm.files import parse_json, read_json


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
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Evaluation":
        tasks = {name: TaskScore(**task) for name, task in values["tasks"].items()}
        protocol = values.get("protocol", "strict" if tasks else None)
        return cls(tasks, values["bits_per_byte"], protocol)


class RunFolder:
    """The evaluation of one model, kept so that it can be resumed and compared."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = self.path / "evaluation"
        self.outputs = self.folder / "outputs"

    # --- settings -----------------------------------------------------------------------------

    def claim(self, settings: dict[str, Any], prompts: dict[str, str]) -> None:
        """Note what this run is, or refuse to mix it with another one.

        `prompts` is a checksum for every task; tasks may be added to a folder one by one.
        """
        path = self.folder / "settings.json"
        before: dict[str, Any] = {"settings": settings, "prompts": {}}
        if path.is_file():
            before = _read_json(path, {"settings": dict, "prompts": dict})
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
        _write_json(path, merged)

    # --- answers ------------------------------------------------------------------------------

    def _partial(self, task: str) -> Path:
        return self.outputs / f"{task}.partial.jsonl"

    def answers(self, task: str) -> dict[int, Answer]:
        """Answers of an interrupted run, by number of the question. A line cut by a kill is left
        out, and taken off the file so that the next one starts on a line of its own."""
        path = self._partial(task)
        if not path.is_file():
            return {}
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            with open(path, "r+b") as file:
                file.truncate(len(whole))
        try:
            lines = [parse_json(line) for line in whole.split(b"\n") if line]
            return {line.pop("index"): Answer(**line) for line in lines}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EvaluationError(
                f"{path} is damaged ({error!r:.80}). Delete it and run the evaluation again."
            ) from None

    def add_answers(self, task: str, answers: Iterable[tuple[int, Answer]]) -> None:
        with open(self._partial(task), "a", encoding="utf-8") as file:
            for index, answer in answers:
                line = json.dumps({"index": index, **asdict(answer)}, ensure_ascii=False)
                file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    # --- graded records -----------------------------------------------------------------------

    def records(self, task: str) -> list[Record] | None:
        path = self.outputs / f"{task}.jsonl"
        if not path.is_file():
            return None
        try:
            return [Record(**parse_json(line)) for line in _lines(path)]
        except (ValueError, TypeError) as error:
            raise EvaluationError(
                f"{path} is damaged ({error}). Delete it and run the evaluation again."
            ) from None

    def finish_task(self, task: str, records: list[Record]) -> None:
        path = self.outputs / f"{task}.jsonl"
        temporary = path.with_suffix(".jsonl.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._partial(task).unlink(missing_ok=True)

    # --- results ------------------------------------------------------------------------------

    def results(self) -> Evaluation | None:
        path = self.folder / "results.json"
        if not path.is_file():
            return None
        return Evaluation.from_json(_read_json(path, {"tasks": dict}))

    def write_results(self, evaluation: Evaluation) -> Evaluation:
        """Add these scores to the folder's, and give back all of them."""
        before = self.results() or Evaluation({})
        tasks = before.tasks | evaluation.tasks
        bits = evaluation.bits_per_byte
        merged = Evaluation(
            {name: tasks[name] for name in TASKS if name in tasks},
            before.bits_per_byte if bits is None else bits,
            evaluation.protocol or before.protocol,
        )
        _write_json(self.folder / "results.json", merged.to_json())
        return merged


def open_run(path: str | Path) -> tuple[RunFolder, Evaluation]:
    """A finished evaluation: the run's folder, or its `evaluation` folder."""
    given = Path(path)
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


def _lines(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8", newline="\n") as file:
        yield from file


def _read_json(path: Path, keys: dict[str, type]) -> dict[str, Any]:
    return read_json(path, EvaluationError, "Delete the folder and evaluate again.", keys)


def _write_json(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
