"""Numbers of an evaluation, the folder they are kept in, and several of them side by side.

    RUN/evaluation/settings.json       model, precision or server, batch size, protocol, prompts:
                                       must not change
    RUN/evaluation/outputs/TASK.jsonl  a line a question: prompt, output, extracted, gold, correct,
                                       complete (false: broken off at the limit)
    RUN/evaluation/outputs/bits_per_byte.jsonl  a line a document of the text: bits, bytes
    RUN/evaluation/results.json        the scores, and the conditions they were made under

The same questions are put to all models, so a comparison is paired: McNemar's exact test for a task
(a binomial test on the questions that only one of two models got right), a sign-flip permutation
test for the averages and for anything that pools tasks, a bootstrap over documents for bits per
byte.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vocagnolm.base.files import (
    append_lines,
    differences,
    finished_lines,
    folder_lock,
    json_digest,
    local_path,
    read_json,
    remove,
    remove_leftovers,
    sealed_lines,
    unsealed,
    whole_lines,
    write_json,
    write_text,
)
from vocagnolm.base.statistics import (
    mcnemar_exact,
    mean_error,
    middle_95,
    resampled_ratios,
    sign_flip_p,
)
from vocagnolm.errors import EvaluationError, VocagnolmWarning
from vocagnolm.evaluate.settings import OF_THE_QUESTIONS, differing
from vocagnolm.generate.reading import Answer
from vocagnolm.questions.suite import (
    AVERAGE_TITLES,
    AVERAGES,
    TASKS,
    Protocol,
    average_stderrs,
    averages,
)
from vocagnolm.store.writer import measured_apart, with_values_of

BITS = "bits_per_byte"
"""The row of a text, beside those of the tasks."""
_TITLES = {**AVERAGE_TITLES, BITS: "bits per byte"}
Score = tuple[float | None, float | None]
"""A value and its standard error; None where they are not known."""
TextSums = Mapping[int, Sequence[float]]
"""`BitsPerByte.by_document`: index in the corpus -> bits, and the bytes that were scored."""


@dataclass(frozen=True)
class QuestionRecord:
    """What a model answered to one question, and how the answer was graded."""

    index: int
    prompt: str
    output: str
    extracted: str | None
    gold: str
    correct: bool
    complete: bool | None = None
    """False: broken off at the limit of tokens. None: not known."""
    reasoning: str = ""


def fields_of(answer: Answer | QuestionRecord) -> dict[str, Any]:
    """The fields that are written to a file; `reasoning` is left out where it is empty."""
    fields = asdict(answer)
    return fields if answer.reasoning else {k: v for k, v in fields.items() if k != "reasoning"}


@dataclass(frozen=True)
class TaskScore:
    score: float  # percent
    stderr: float | None  # percentage points; None for a single question
    n: int
    no_answer: int


def in_order(tasks: Iterable[str]) -> list[str]:
    """The suite's tasks in its order, and then those of the user's own."""
    named = list(dict.fromkeys(tasks))
    return [t for t in TASKS if t in named] + [t for t in named if t not in TASKS]


def title_of(row: str) -> str:
    """The title of a row: a task, an average or the text."""
    return TASKS[row].title if row in TASKS else _TITLES.get(row, row)


def score_records(records: Iterable[QuestionRecord]) -> TaskScore:
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
    """None if there are no tasks."""
    conditions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each task (and `bits_per_byte`), what must be equal for scores to be comparable.
    Evaluations by older versions have none."""
    bits_per_byte_stderr: float | None = None
    """Bootstrap over documents. None for a single document and in evaluations by older versions."""

    def score(self, row: str) -> Score:
        """A task's, an average's or the text's (`bits_per_byte`) value and standard error."""
        if row == BITS:
            return self.bits_per_byte, self.bits_per_byte_stderr
        if row in AVERAGES:
            return self.averages()[row], self.average_stderrs()[row]
        task = self.tasks.get(row)
        return (None, None) if task is None else (task.score, task.stderr)

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
            "bits_per_byte_stderr": self.bits_per_byte_stderr,
            "conditions": self.conditions,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Evaluation":
        tasks = {name: TaskScore(**task) for name, task in values["tasks"].items()}
        protocol = values.get("protocol", "strict" if tasks else None)
        known, error = values.get("conditions") or {}, values.get("bits_per_byte_stderr")
        return cls(tasks, values["bits_per_byte"], protocol, known, error)


_BEGIN_ANEW = "Remove the evaluation folder and evaluate again, or choose another --out."
_SETTINGS_KEYS: dict[str, type | tuple[type, ...]] = {"settings": dict, "prompts": dict}
_RESULTS_KEYS: dict[str, type | tuple[type, ...]] = {
    "tasks": dict,
    "bits_per_byte": (float, int, type(None)),
}


class RunFolder:
    """The evaluation of one model, kept so that it can be resumed and compared."""

    def __init__(self, path: str | Path) -> None:
        self.path = local_path(path)
        self.folder = self.path / "evaluation"
        self.outputs = self.folder / "outputs"

    @contextlib.contextmanager
    def lock(self) -> Iterator["RunFolder"]:
        """Hold the folder, so that only one evaluation writes here; what a killed one left behind
        is removed."""
        advice = "Wait for it to end, or choose another --out."
        with folder_lock(self.folder, advice):
            for folder in (self.folder, self.outputs):
                remove_leftovers(folder)
            for path in self.outputs.glob("*.partial.jsonl"):
                if path.with_name(path.name.replace(".partial.", ".")).is_file():
                    remove(path)  # killed between the graded file and this
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
        settings = with_values_of(there, settings)  # of a server: its probe, within the tolerance
        before_now = differences({key: there.get(key) for key in settings}, settings)
        different = [
            f"{name}: {measured_apart(name, a, b) or f'{a!r:.80} there, {b!r:.80} now'}"
            for name, a, b in before_now
        ]
        different += [
            f"the prompts of {name} (--limit, --benchmarks, --choices, --max-new-tokens)"
            for name, checksum in prompts.items()
            if before["prompts"].get(name, checksum) != checksum
        ]
        if different:
            raise EvaluationError(
                f"{self.folder} holds an evaluation with other settings ({'; '.join(different)}). "
                "Choose another --out, or use the settings of that evaluation."
            )
        self.outputs.mkdir(parents=True, exist_ok=True)
        merged = {"settings": there | settings, "prompts": before["prompts"] | prompts}
        write_json(path, merged, sealed=True)

    def checksums(self) -> dict[str, str]:
        """Checksum of every task's requests, as they were when the folder was claimed; empty where
        they are not known."""
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
                fields = unsealed(line)
                index = int(fields.pop("index"))
                answers[index] = Answer(**fields)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise EvaluationError(
                    f"{path}, line {number} is not an answer of an interrupted run ({error}). "
                    "Remove the file: its questions are asked again."
                ) from None
        return answers

    def add_answers(self, task: str, answers: Iterable[tuple[int, Answer]]) -> None:
        rows = ({"index": index, **fields_of(answer)} for index, answer in answers)
        append_lines(self._partial(task), sealed_lines(rows))

    # --- graded records -----------------------------------------------------------------------

    def records(self, task: str) -> list[QuestionRecord] | None:
        path = self.outputs / f"{task}.jsonl"
        if not path.is_file():
            return None
        try:
            return [QuestionRecord(**fields) for fields in finished_lines(path)]
        except (ValueError, TypeError) as error:
            raise EvaluationError(
                f"{path} is damaged ({error}). Remove it and run the evaluation again."
            ) from None

    def finish_task(self, task: str, records: list[QuestionRecord]) -> None:
        write_text(self.outputs / f"{task}.jsonl", sealed_lines(map(fields_of, records)))
        remove(self._partial(task))

    # --- the documents of a text --------------------------------------------------------------

    def write_text_sums(self, sums: TextSums) -> None:
        rows = ({"index": at, "bits": bits, "bytes": n} for at, (bits, n) in sorted(sums.items()))
        write_text(self.outputs / f"{BITS}.jsonl", sealed_lines(rows))

    def text_sums(self) -> TextSums:
        """Bits and bytes of every document; empty where there was no text, or the evaluation is of
        an older version."""
        path = self.outputs / f"{BITS}.jsonl"
        if not path.is_file():
            return {}
        try:
            rows = finished_lines(path)
            return {int(row["index"]): (float(row["bits"]), int(row["bytes"])) for row in rows}
        except (ValueError, TypeError, KeyError) as error:
            raise EvaluationError(
                f"{path} is damaged ({error}). Remove it and evaluate with --text again."
            ) from None

    # --- results ------------------------------------------------------------------------------

    def results(self) -> Evaluation | None:
        path = self.folder / "results.json"
        try:
            content = read_json(path, EvaluationError, _BEGIN_ANEW, _RESULTS_KEYS)
            return Evaluation.from_json(content)
        except FileNotFoundError:
            return None
        except (TypeError, KeyError, AttributeError) as error:
            raise EvaluationError(
                f"{path} is not a result of `vocagnolm evaluate` ({error}). {_BEGIN_ANEW}"
            ) from None

    def write_results(self, evaluation: Evaluation) -> Evaluation:
        """Add these scores to the folder's, and give back all of them."""
        before = self.results() or Evaluation({})
        tasks = before.tasks | evaluation.tasks
        of_text = before if evaluation.bits_per_byte is None else evaluation
        merged = Evaluation(
            {name: tasks[name] for name in in_order(tasks)},
            of_text.bits_per_byte,
            evaluation.protocol or before.protocol,
            before.conditions | evaluation.conditions,
            of_text.bits_per_byte_stderr,
        )
        write_json(self.folder / "results.json", merged.to_json(), sealed=True)
        return merged


class NotEvaluated(EvaluationError):
    """The folder has no results."""


def open_run(path: str | Path) -> tuple[RunFolder, Evaluation]:
    """A finished evaluation: the run's folder, or its `evaluation` folder."""
    given = local_path(path)
    if given.exists() and not given.is_dir():
        raise EvaluationError(f"{path} is a file; expected the folder of a run or an evaluation.")
    if given.name == "evaluation" and not (given / "evaluation").is_dir():
        given = given.parent
    run = RunFolder(given)
    results = run.results()
    if results is None:
        raise NotEvaluated(
            f"{path} holds no finished evaluation: expected {run.folder / 'results.json'}. "
            f"Make one with: vocagnolm evaluate MODEL --out {path}, with --text FILE for bits per "
            "byte alone; `vocagnolm report --html` shows runs that have none."
        )
    return run, results


# ---- side by side ----


@dataclass(frozen=True)
class Difference:
    """Second run minus first: in percentage points, on the questions that both answered; or in bits
    per byte, on the documents that both read."""

    difference: float
    stderr: float | None
    p_value: float | None
    n: int
    interval: tuple[float, float] | None = None
    """95 %, of bits per byte."""


@dataclass(frozen=True)
class EvaluatedRun:
    """A finished evaluation with its single answers, as it is compared with others."""

    name: str
    evaluation: Evaluation
    correct: dict[str, dict[int, bool]]  # task -> question -> right
    asked: dict[str, dict[int, str]]  # task -> question -> its prompt and reference answer
    checksums: dict[str, str]  # task -> of all that was asked, limits included
    text_sums: TextSums = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    runs: list[EvaluatedRun]
    # row (task, average or bits per byte) -> difference of every run but the first to the first;
    # None where one of the two was not evaluated on it, or under other conditions
    differences: dict[str, list[Difference | None]]
    # the same rows -> what the conditions of the two differ in
    unlike: dict[str, list[list[str]]]

    def titles(self) -> list[str]:
        """The runs' names, with the protocol where it is not the same for all."""
        protocols = [run.evaluation.protocol for run in self.runs]
        if len(set(protocols) - {None}) < 2:
            return [run.name for run in self.runs]
        return [f"{run.name} ({run.evaluation.protocol})" for run in self.runs]

    def notes(self) -> list[str]:
        """What was not compared, and averages that a reader may miss: the paper's MATH was once
        taken for the 5,000."""
        notes = self._not_compared()
        bits = [run for run in self.runs if run.evaluation.bits_per_byte is not None]
        old = [run.name for run in bits if not run.text_sums]
        if old and len(bits) > 1:
            notes.append(
                f"bits per byte: {', '.join(old)} kept no numbers of single documents, so that no "
                "interval of a difference is known. Run `vocagnolm evaluate` with --text again."
            )
        for run in self.runs:
            tasks = run.evaluation.tasks
            if "math" in tasks and any(
                set(t) - tasks.keys() == {"math500"} for t in AVERAGES.values()
            ):
                notes.append(
                    f"{run.name} has math, all 5,000 questions; the averages want math500 (the "
                    "paper's). Add it: vocagnolm evaluate MODEL --tasks math500 --out RUN"
                )
        return notes

    def _not_compared(self) -> list[str]:
        lines = []
        for number, run in enumerate(self.runs[1:]):
            reasons: dict[str, list[str]] = {}
            for row, unlike in self.unlike.items():
                if unlike[number]:
                    reasons.setdefault("; ".join(unlike[number]), []).append(title_of(row))
            lines += [
                f"{', '.join(rows)}: {self.runs[0].name} and {run.name} are not compared, because "
                f"they were evaluated under other conditions ({reason})."
                for reason, rows in reasons.items()
            ]
        return lines

    def rows(self) -> list[str]:
        """Tasks, averages and the text, of which any run has a score."""
        evaluations = [run.evaluation for run in self.runs]
        known = [
            r for r in (*AVERAGES, BITS) if any(e.score(r)[0] is not None for e in evaluations)
        ]
        return in_order(task for e in evaluations for task in e.tasks) + known

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [{"name": run.name, **run.evaluation.to_json()} for run in self.runs],
            "differences": {
                row: [None if d is None else vars(d) for d in listed]
                for row, listed in self.differences.items()
            },
            "unlike": self.unlike,
        }


def paired_difference(first: dict[int, bool], second: dict[int, bool]) -> Difference | None:
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    gains = [100 * (int(second[i]) - int(first[i])) for i in shared]
    p_value = mcnemar_exact(gains.count(-100), gains.count(100))
    return Difference(sum(gains) / len(gains), mean_error(gains), p_value, len(gains))


def average_difference(
    first: dict[str, dict[int, bool]], second: dict[str, dict[int, bool]], tasks: tuple[str, ...]
) -> Difference | None:
    """Difference of an average over tasks. The p-value is from a permutation test: under the null
    hypothesis the two models' answers to a question may be exchanged."""
    parts, contributions = [], []
    for task in tasks:
        part = paired_difference(first.get(task, {}), second.get(task, {}))
        if part is None:
            return None
        parts.append(part)
        weight = 100 / (part.n * len(tasks))
        shared = sorted(first[task].keys() & second[task].keys())
        contributions += [weight * (second[task][i] - first[task][i]) for i in shared]
    difference = sum(part.difference for part in parts) / len(tasks)
    known = [part.stderr for part in parts if part.stderr is not None]
    stderr = sum(e * e for e in known) ** 0.5 / len(tasks) if len(known) == len(parts) else None
    p_value = sign_flip_p(np.array(contributions))
    return Difference(difference, stderr, p_value, sum(part.n for part in parts))


def load_run(path: str | Path) -> EvaluatedRun:
    folder, evaluation = open_run(path)
    records = {task: folder.records(task) or [] for task in evaluation.tasks}
    return EvaluatedRun(
        folder.path.resolve().name,
        evaluation,
        {
            task: {record.index: record.correct for record in listed}
            for task, listed in records.items()
        },
        {
            task: {record.index: json_digest([record.prompt, record.gold]) for record in listed}
            for task, listed in records.items()
        },
        folder.checksums(),
        folder.text_sums(),
    )


def compare_runs(paths: list[str | Path]) -> Comparison:
    """Read finished evaluations and compare the others with the first."""
    runs, evaluated = [], []
    for path in paths:
        try:
            runs.append(load_run(path))
            evaluated.append(path)
        except NotEvaluated as error:
            if len(paths) == 1 or path == paths[0]:
                raise
            warnings.warn(f"left out: {error}", VocagnolmWarning, stacklevel=2)
    names = [run.name for run in runs]
    # runs/a/eval and runs/b/eval have the same last part: then the whole path tells them apart
    if len(set(names)) < len(names):
        runs = [replace(run, name=str(path)) for path, run in zip(evaluated, runs, strict=True)]
    table = Comparison(runs, {}, {})
    base, others = runs[0], runs[1:]
    for row in table.rows():
        table.unlike[row] = [_unlike(base, run, row) for run in others]
        table.differences[row] = [_difference(base, run, row) for run in others]
    return table


def _difference(first: EvaluatedRun, second: EvaluatedRun, row: str) -> Difference | None:
    if _unlike(first, second, row):
        return None
    if row in AVERAGES:
        return average_difference(first.correct, second.correct, AVERAGES[row])
    if row != BITS:
        return paired_difference(first.correct.get(row, {}), second.correct.get(row, {}))
    sums = {"first": first.text_sums, "second": second.text_sums}
    if not all(sums.values()):
        return None
    ranked = {score.name: score for score in rank_texts(sums, "first")}
    score = ranked["second"]
    return Difference(score.difference, None, None, score.documents, score.difference_interval)


def _unlike(first: EvaluatedRun, second: EvaluatedRun, row: str) -> list[str]:
    """What the conditions of two runs differ in; nothing where one of them lacks the row."""
    a, b = first.evaluation, second.evaluation
    if row == BITS:
        if a.bits_per_byte is None or b.bits_per_byte is None:
            return []
        return differing(a.conditions.get(row), b.conditions.get(row))
    tasks = AVERAGES.get(row, (row,))
    if any(task not in run.tasks for task in tasks for run in (a, b)):
        return []
    lines = [] if a.protocol == b.protocol else [f"protocol {a.protocol} / {b.protocol}"]
    for task in tasks:
        lines += _unlike_task(first, second, task)
    return list(dict.fromkeys(lines))


def _unlike_task(first: EvaluatedRun, second: EvaluatedRun, task: str) -> list[str]:
    pair = []
    for run in (first, second):
        known = run.evaluation.conditions.get(task, {})
        pair.append({k: v for k, v in known.items() if k not in (*OF_THE_QUESTIONS, "protocol")})
    shared = first.asked[task].keys() & second.asked[task].keys()
    lines = differing(*pair)
    old = not any(pair) and first.asked[task] == second.asked[task]
    sums = [run.checksums.get(task) for run in (first, second)]
    if old and None not in sums and sums[0] != sums[1]:
        lines.append("the limit of new tokens or the stop strings, which were not recorded")
    if any(first.asked[task][number] != second.asked[task][number] for number in shared):
        lines.append("prompts (another version of the task or of its questions)")
    return lines


# ---- several models on one text ----


def bits_stderr(sums: TextSums) -> float | None:
    """The standard error of bits per byte: bootstrap over documents. None for a single one."""
    above_D, below_D = np.array([pair for pair in sums.values() if pair[1]], np.float64).T
    if len(above_D) < 2:
        return None
    return float(resampled_ratios(above_D[None], below_D[None]).std(ddof=1))


@dataclass(frozen=True)
class TextScore:
    """One of several models on the documents that all of them could read."""

    name: str
    documents: int
    bits_per_byte: float
    interval: tuple[float, float]
    """95 %, bootstrap over documents."""
    difference: float
    """Difference from the baseline, paired; below zero is better."""
    difference_interval: tuple[float, float]
    outcome: Literal["better", "worse", "equal"]
    """Compared with the baseline; equal: no difference that these documents can show."""


def rank_texts(by_model: Mapping[str, TextSums], baseline: str | None = None) -> list[TextScore]:
    """Models by their bits per byte, the best first, from the `BitsPerByte.by_document` of each.
    `baseline`: the model that all are compared with; None: the best."""
    names = list(by_model)
    common = set.intersection(
        *({at for at, (_, n) in sums.items() if n} for sums in by_model.values())
    )
    if not common:
        raise EvaluationError(
            f"{', '.join(names)}: there is no document that all of them can read."
        )
    sums_MD2 = np.array(
        [[sums[at] for at in sorted(common)] for sums in by_model.values()], np.float64
    )
    value_M = np.divide(*sums_MD2.sum(1).T)
    drawn_RM = resampled_ratios(sums_MD2[..., 0], sums_MD2[..., 1])
    base = int(value_M.argmin()) if baseline is None else names.index(baseline)
    ranked = []
    for at in np.argsort(value_M, kind="stable").tolist():
        low, high = middle_95(drawn_RM[:, at] - drawn_RM[:, base])
        ranked.append(
            TextScore(
                name=names[at],
                documents=len(common),
                bits_per_byte=float(value_M[at]),
                interval=middle_95(drawn_RM[:, at]),
                difference=float(value_M[at] - value_M[base]),
                difference_interval=(low, high),
                outcome="better" if high < 0 else "worse" if low > 0 else "equal",
            )
        )
    return ranked


# ---- as text ----


def _with_error(
    value: float | None, stderr: float | None, sign: bool = False, digits: int = 1
) -> str:
    if value is None:
        return "-"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text if stderr is None else f"{text} ± {stderr:.{digits}f}"


def _score(evaluation: Evaluation, row: str) -> str:
    return _with_error(*evaluation.score(row), digits=4 if row == BITS else 1)


def scores_table(evaluation: Evaluation) -> list[list[str]]:
    """Rows of cells for one evaluation, the heading first."""
    score = "score (paper)" if evaluation.protocol == "paper" else "score"
    rows = [["task", score, "n", "no answer"]]
    for name, task in evaluation.tasks.items():
        counts = [str(task.n), str(task.no_answer)]
        rows.append([title_of(name), _score(evaluation, name), *counts])
    for row in (*AVERAGES, BITS):
        if evaluation.score(row)[0] is not None:
            rows.append([title_of(row), _score(evaluation, row), "", ""])
    return rows


OUTCOMES = {"better": "better", "worse": "worse", "equal": "no clear difference"}


def ranking_table(ranked: Sequence[TextScore], baseline: str = "the best") -> list[list[str]]:
    """Rows of cells for models on one text; `baseline` names what they are compared with."""
    rows = [["model", "bits per byte", "95 % interval", f"against {baseline}", ""]]
    for model in ranked:
        low, high = model.difference_interval
        against = f"{model.difference:+.4f} ({low:+.4f} to {high:+.4f})"
        compared = [] if model.difference == low == high else [against, OUTCOMES[model.outcome]]
        interval = "{:.4f} to {:.4f}".format(*model.interval)
        rows.append([model.name, f"{model.bits_per_byte:.4f}", interval, *compared])
    return rows


def comparison_table(comparison: Comparison) -> list[list[str]]:
    """Rows of cells: every run's score, and for all but the first the difference to the first."""
    first, *others = comparison.titles()
    base, *rest = (run.evaluation for run in comparison.runs)
    rows = [["task", first, *(cell for title in others for cell in (title, "difference", ""))]]
    for row in comparison.rows():
        cells = [title_of(row), _score(base, row)]
        for evaluation, change in zip(rest, comparison.differences[row], strict=True):
            cells += [_score(evaluation, row), *_difference_cells(change)]
        rows.append(cells)
    return rows


def _difference_cells(change: Difference | None) -> list[str]:
    if change is None:
        return ["-", ""]
    if change.interval is not None:
        return [f"{change.difference:+.4f}", "95 %: {:+.4f} to {:+.4f}".format(*change.interval)]
    shown, p = _with_error(change.difference, change.stderr, sign=True), change.p_value
    return [shown, "" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"]


def format_table(rows: Sequence[Sequence[str]], *, rule: bool = True) -> str:
    """Columns under each other: names to the left, figures to the right. `rule`: a line below the
    heading, which is the first row."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD if rule else None, show_edge=False, pad_edge=False)
    for number, name in enumerate(rows[0]):
        table.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    # the same wherever it is printed: never folded to the width of a terminal
    console = Console(width=10_000, color_system=None)
    with console.capture() as printed:
        console.print(table)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())
